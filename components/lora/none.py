"""No adapters."""

from __future__ import annotations

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import LoRA


class NoLoRA(LoRA):
    """The base model for every row."""

    def activate(self, batch: InputBatch) -> None:
        pass
