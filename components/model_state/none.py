"""Models that keep nothing beside the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import ModelState
from workerkit.framework.interfaces.sampling import SamplerOutput


class NoModelState(ModelState):
    """Keeps nothing."""

    def preprocess(self, batch: InputBatch) -> None:
        pass

    def extras(self, batch: InputBatch) -> Mapping[str, Any]:
        return {}

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        pass
