"""A CPU's graph: the kernels of one forward, noted once, run by native code with no Python in between."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from workerkit.components.graph.capture import addresses
from workerkit.framework.errors import IntegrityError, UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape, GraphManager
from workerkit.framework.interfaces.kernels import Kernels, Program
from workerkit.framework.interfaces.model import ModelInputs, ModelOutput
from workerkit.framework.interfaces.runner import WorkerShape

_log = logging.getLogger(__name__)


class CompiledGraphs(GraphManager):
    """One program for steps of any size up to max_num_batched_tokens, so nothing is padded.

    A model that computes anything outside the kernels cannot be recorded: then steps run eagerly, and the log says why.
    """

    def __init__(self, shape: WorkerShape, kernels: Kernels, attention: AttentionBackend) -> None:
        self._max_tokens = shape.max_num_batched_tokens
        # As many rows as there can be: their tables are all within what is recorded. At least two tokens: the strides
        # of one say nothing of the next.
        tokens = min(max(shape.max_num_reqs, 2), shape.max_num_batched_tokens)
        self._case = BatchDescriptor(mode="full", num_tokens=tokens, num_reqs=min(shape.max_num_reqs, tokens))
        self._kernels = kernels
        self._attention = attention
        self._program: Program | None = None

    @property
    def cases(self) -> tuple[BatchDescriptor, ...]:
        if self._attention.graph_support != "always":
            _log.warning("steps run eagerly: the attention backend works out part of a step on the host")
            return ()
        return (self._case,)

    def dispatch(self, shape: BatchShape) -> BatchDescriptor:
        return BatchDescriptor(
            mode="eager" if self._program is None else "full",
            num_tokens=shape.num_tokens,
            num_reqs=shape.num_reqs,
        )

    def capture(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> None:
        def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            output = forward(inputs)
            return output.hidden, dict(output.taps)

        try:
            if inputs.recurrent is not None:
                raise UnsupportedError("where the recurrent states lie is said by other tensors in each step")
            self._program, (self._hidden, self._taps) = self._kernels.record(run, desc.num_tokens, self._max_tokens)
        except UnsupportedError as error:
            _log.warning("steps run eagerly, for the forward cannot be recorded: %s", error)
        self._addresses = addresses(inputs)
        self._captured_taps = inputs.taps

    def run(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> ModelOutput:
        if self._program is None or desc.mode == "eager":
            return forward(inputs)
        if addresses(inputs) != self._addresses or inputs.taps != self._captured_taps:
            raise IntegrityError("the step's inputs are not where they were when the graph was captured")
        rows = len(inputs.input_ids)
        self._program.run(rows)
        return ModelOutput(hidden=self._hidden[:rows], taps={name: tap[:rows] for name, tap in self._taps.items()})

    def release(self) -> None:
        self._program = None
        self._hidden, self._taps = torch.empty(0), {}
