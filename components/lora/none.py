"""No adapters."""

from __future__ import annotations

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.lora import LoRA


class NoLoRA(LoRA):
    """The base model for every row."""

    def load(self, name: str, source: str) -> None:
        raise UnsupportedError(f"adapter {name!r}: components.lora is none; choose peft")

    def remove(self, name: str) -> None:
        raise UnsupportedError(f"adapter {name!r}: components.lora is none, so none is loaded")

    def activate(self, batch: InputBatch) -> None:
        pass
