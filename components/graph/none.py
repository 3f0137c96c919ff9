"""No graphs: every step runs eagerly, at its own size."""

from __future__ import annotations

from collections.abc import Callable

from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape, EncoderGraphManager, GraphManager
from workerkit.framework.interfaces.model import ModelInputs, ModelOutput


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
    """No encoder, or one that runs eagerly."""

    def capture(self) -> None:
        pass
