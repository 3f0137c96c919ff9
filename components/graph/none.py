"""No graphs: every step runs eagerly, at its own size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape, EncoderGraphManager, GraphManager
from workerkit.framework.interfaces.model import LoadedModel, ModelInputs, ModelOutput
from workerkit.framework.interfaces.vision import Grid, VisionOutput


class NoGraph(GraphManager):
    """Runs the model eagerly."""

    @property
    def cases(self) -> tuple[BatchDescriptor, ...]:
        return ()

    def dispatch(self, shape: BatchShape) -> BatchDescriptor:
        return BatchDescriptor(num_tokens=shape.num_tokens, num_reqs=shape.num_reqs)

    def capture(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> None:
        pass

    def run(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> ModelOutput:
        return forward(inputs)

    def release(self) -> None:
        pass


class NoEncoderGraph(EncoderGraphManager):
    """A tower runs eagerly, over all pictures of a step at once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tower = loaded.network.vision
        self._architecture = loaded.config.architecture

    def capture(self) -> None:
        pass

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[VisionOutput]:
        if self._tower is None:
            raise UnsupportedError(f"{self._architecture} sees no pictures")
        output = self._tower.encode(pixels, grids)
        sizes = [self._tower.num_tokens(grid) for grid in grids]
        levels = [torch.split(level, sizes) for level in output.deepstack]
        return [
            VisionOutput(embeds=embeds, deepstack=tuple(level[index] for level in levels))
            for index, embeds in enumerate(torch.split(output.embeds, sizes))
        ]
