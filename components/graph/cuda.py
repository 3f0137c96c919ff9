"""Graphs that the device captures: steps are padded to a captured size and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from attrs import validators

from workerkit.components.graph.candidates import Candidates, Mode, default_sizes
from workerkit.components.graph.capture import CapturedForward, StaticBuffers, graph_capture
from workerkit.components.graph.tasks import UpdatableTasks
from workerkit.framework.errors import IntegrityError, UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape, GraphManager
from workerkit.framework.interfaces.model import ModelInputs, ModelOutput
from workerkit.framework.interfaces.runner import WorkerShape


def _at_least_one(
    instance: object, attribute: attrs.Attribute[tuple[int, ...] | None], value: tuple[int, ...] | None
) -> None:
    if value is not None and min(value, default=0) < 1:
        raise ValueError(f"{attribute.name!r} must name sizes >= 1, or be null: {value}")


@attrs.frozen(kw_only=True)
class CudaGraphConfig:
    """Options of `graph: cuda`."""

    mode: Mode = attrs.field(
        default="full_and_piecewise",
        validator=validators.in_(("full", "full_decode_only", "piecewise", "full_and_piecewise")),
        metadata={
            "doc": "full: the whole forward of any batch; full_decode_only: of batches whose rows have 1 + K tokens "
            "each, all others run eagerly; piecewise: of any batch, attention left out; full_and_piecewise: "
            "full_decode_only, and piecewise for all others"
        },
    )
    capture_sizes: tuple[int, ...] | None = attrs.field(
        default=None,
        validator=_at_least_one,
        metadata={
            "doc": "tokens of a step to capture; null: 1, 2, 4, 8, 16, 24 … as far as the limits go, 512 at most"
        },
    )
    varlen_decode: bool = attrs.field(
        default=False,
        metadata={"doc": "also capture rows of 1 to 1 + K tokens, for drafts that verify_budget has trimmed"},
    )


class CudaGraphManager(GraphManager):
    """Captures on any device that has graphs; steps beyond the largest captured size run eagerly, at their own size.

    Raises UnsupportedError for sizes beyond the worker's limits, and for a mode that the attention backend's
    `graph_support` does not cover.
    """

    needs_device_graphs = True

    def __init__(
        self,
        config: CudaGraphConfig,
        shape: WorkerShape,
        context: DeviceContext,
        device: DeviceRuntime,
        attention: AttentionBackend,
    ) -> None:
        sizes = default_sizes(shape) if config.capture_sizes is None else config.capture_sizes
        if max(sizes) > shape.max_num_batched_tokens:
            raise UnsupportedError(
                f"components.graph.capture_sizes: {max(sizes)} tokens are more than a step can have, "
                f"limits.max_num_batched_tokens is {shape.max_num_batched_tokens}"
            )
        _check_attention(config, attention)
        self._candidates = Candidates(config.mode, config.varlen_decode, sizes, shape)
        if not self._candidates.cases:
            raise UnsupportedError(
                f"components.graph captures nothing: no whole row of {1 + shape.num_speculative_tokens} tokens fits "
                f"capture_sizes {list(sizes)} and limits.max_num_batched_tokens {shape.max_num_batched_tokens}"
            )
        self._device = device.graphs()
        self._stream = self._device.new_stream()
        self.tasks = self._tasks = UpdatableTasks(self._device)
        self._graphs: dict[BatchDescriptor, CapturedForward] = {}
        self.release()

    @property
    def cases(self) -> tuple[BatchDescriptor, ...]:
        return self._candidates.cases

    def dispatch(self, shape: BatchShape) -> BatchDescriptor:
        case = self._candidates.find(shape) if len(self._graphs) == len(self.cases) else None
        if case is None:
            return BatchDescriptor(num_tokens=shape.num_tokens, num_reqs=shape.num_reqs)
        if case.mode == "piecewise":  # nothing in a piece goes by rows
            return BatchDescriptor(mode="piecewise", num_tokens=case.num_tokens, num_reqs=shape.num_reqs)
        return case

    def capture(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> None:
        with graph_capture(self._device, self._stream):
            forward(inputs)  # libraries allocate what they need at their first call, which a graph cannot hold
            self._stream.synchronize()
            self._graphs[_key(desc)] = CapturedForward(
                self._device, self._pool, self._tasks, self._buffers, forward, inputs, split=desc.mode == "piecewise"
            )

    def run(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> ModelOutput:
        if desc.mode == "eager":
            return forward(inputs)
        graph = self._graphs[_key(desc)]
        if not graph.serves(inputs):
            raise IntegrityError(f"the inputs of a step do not lie where those of its graph lay: {desc}")
        return graph.replay(inputs)

    def release(self) -> None:
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self._pool = self._device.new_pool()
        self._buffers = StaticBuffers(max(case.num_tokens for case in self.cases))


def _key(desc: BatchDescriptor) -> BatchDescriptor:
    """A piecewise graph serves any number of rows."""
    return desc if desc.mode == "full" else BatchDescriptor(mode=desc.mode, num_tokens=desc.num_tokens, num_reqs=0)


def _check_attention(config: CudaGraphConfig, attention: AttentionBackend) -> None:
    support = attention.graph_support
    needed = "always" if config.mode == "full" or config.varlen_decode else "uniform"
    if config.mode != "piecewise" and support not in (needed, "always"):
        wanted = "rows of any length" if needed == "always" else "rows of equal length"
        right = "piecewise" if support == "never" else "full_decode_only or full_and_piecewise, varlen_decode false"
        raise UnsupportedError(
            f"components.graph.mode {config.mode!r} captures the attention of {wanted}, the attention backend's "
            f"graph_support is {support!r}: right would be mode {right}, or another backend"
        )
