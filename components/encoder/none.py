"""Text only."""

from __future__ import annotations

from collections.abc import Sequence

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import Encoder


class NoEncoder(Encoder):
    """Token ids are embedded by the model."""

    def free(self, req_ids: Sequence[str]) -> None:
        pass

    def embed(self, batch: InputBatch) -> None:
        return None
