"""What a decoder keeps beside the paged cache: nothing, or where the pictures of its requests stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from workerkit.components.model_state.rope_positions import RopePositions
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.extensions import ModelState
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput


class AscendModelState(ModelState):
    """For decoders whose layers all have attention.

    Those with M-RoPE get positions in three dimensions, all others cost nothing.
    """

    keeps_recurrent: ClassVar[bool] = False  # whether it serves networks with recurrent layers

    def __init__(self, shape: WorkerShape, context: DeviceContext, loaded: LoadedModel) -> None:
        if loaded.network.recurrent_layers and not self.keeps_recurrent:
            raise UnsupportedError(
                f"components.model_state: ascend keeps no recurrent state, and {loaded.config.architecture} has "
                f"{len(loaded.network.recurrent_layers)} recurrent layers; right: ascend_mamba_hybrid, or auto_detect"
            )
        self._rope = RopePositions(shape, context.device) if loaded.config.rope.mrope_section else None

    def add(self, slot: int, request: NewRequest) -> None:
        if self._rope is not None:
            self._rope.add(slot, request)

    def clear(self, slot: int) -> None:
        if self._rope is not None:
            self._rope.clear(slot)

    def preprocess(self, batch: InputBatch) -> None:
        """Everything is worked out in `rope_positions`."""

    def extras(self, batch: InputBatch) -> Mapping[str, Any]:
        return {}

    def rope_positions(self, batch: InputBatch) -> torch.Tensor | None:
        return None if self._rope is None else self._rope.of(batch)

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        """Positions do not depend on what was sampled."""
