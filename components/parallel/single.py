"""A worker of one process."""

from __future__ import annotations

import attrs
from attrs import validators

from workerkit.framework.interfaces.device import DeviceContext, ParallelGroups
from workerkit.framework.interfaces.graph import BatchDescriptor


@attrs.frozen(kw_only=True)
class SingleProcessConfig:
    """Options of `parallel: single`."""

    local_rank: int = attrs.field(
        default=0, validator=validators.ge(0), metadata={"doc": "which device of this machine to use"}
    )


class SingleProcess(ParallelGroups):
    """World size 1; agrees with itself."""

    def __init__(self, config: SingleProcessConfig) -> None:
        self._local_rank = config.local_rank

    @property
    def world_size(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return 0

    @property
    def local_rank(self) -> int:
        return self._local_rank

    def initialize(self, context: DeviceContext) -> None:
        pass

    def agree(self, desc: BatchDescriptor) -> BatchDescriptor:
        return desc

    def shutdown(self) -> None:
        pass
