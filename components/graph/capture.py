"""One captured forward: a single graph, or graphs of what lies between its calls of `attend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch

from workerkit.components.graph.tasks import Task, UpdatableTasks
from workerkit.framework.interfaces.device import DeviceGraph, DeviceStream, GraphDevice
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelInputs, ModelOutput


@attrs.frozen(eq=False)
class GraphCaptureContext:
    """Inside `graph_capture`."""

    stream: DeviceStream  # what is captured is issued here


@contextmanager
def graph_capture(device: GraphDevice, stream: DeviceStream) -> Iterator[GraphCaptureContext]:
    """Makes `stream`, which no step runs on, the current one; each waits for the other."""
    stream.wait_stream(device.current_stream())
    with device.use(stream):
        yield GraphCaptureContext(stream)
    device.current_stream().wait_stream(stream)


class StaticBuffers:
    """Tensors that graphs of all sizes share, because they run one after the other; by name and the shape of a row."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}

    def like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The first rows of the buffer, as many as `tensor` [rows, …] has."""
        key = (name, tensor.shape[1:], tensor.dtype)
        if key not in self._buffers:
            self._buffers[key] = tensor.new_empty(self._max_rows, *tensor.shape[1:])
        return self._buffers[key][: len(tensor)]

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Likewise, filled with `tensor`."""
        return self.like(name, tensor).copy_(tensor)


@attrs.frozen(eq=False)
class _AttendCall:
    """A call of `attend` between two graphs, and where its result is looked for."""

    layer: AttentionLayer
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    output: torch.Tensor


class CapturedForward:
    """Captures one forward, of a batch that stands for all of its size; owns all that its graphs read and write.

    What goes out, and what goes through `attend` when it is left outside (`split`), is copied to buffers that all
    sizes share: so the memory of a graph's own intermediate results is free for the next graph of the pool.
    """

    def __init__(
        self,
        device: GraphDevice,
        pool: object,
        tasks: UpdatableTasks,
        buffers: StaticBuffers,
        forward: Callable[[ModelInputs], ModelOutput],
        inputs: ModelInputs,
        split: bool,
    ) -> None:
        self._device = device
        self._pool = pool
        self._updates = tasks
        self._buffers = buffers
        self._inputs = inputs
        self._graphs: list[DeviceGraph] = []
        self._calls: list[_AttendCall] = []
        self._tasks: list[Task] = []
        self._begin()
        try:
            with tasks.recorded() as self._tasks:
                output = forward(attrs.evolve(inputs, attend=self._attend) if split else inputs)
            self._output = ModelOutput(
                hidden=buffers.copy("hidden", output.hidden),
                taps={name: buffers.copy(name, tap) for name, tap in output.taps.items()},
            )
        finally:
            self._graphs[-1].capture_end()

    def _begin(self) -> None:
        graph = self._device.new_graph()
        graph.capture_begin(pool=self._pool)
        self._graphs.append(graph)

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In the place of a batch's own while the forward is captured: here one graph ends and the next begins."""
        copy = self._buffers.copy
        query, key, value = copy("query", query), copy("key", key), copy("value", value)
        self._graphs[-1].capture_end()
        output = self._buffers.like("attention", query[..., :1].expand(*query.shape[:2], layer.value_dim))
        self._calls.append(_AttendCall(layer, query, key, value, sinks, output))
        self._begin()
        return self._calls[-1].output

    def serves(self, inputs: ModelInputs) -> bool:
        """Whether they lie where those of the capture lay."""
        return addresses(inputs) == addresses(self._inputs) and inputs.taps == self._inputs.taps

    def replay(self, inputs: ModelInputs) -> ModelOutput:
        """The forward of a batch that lies where the captured one lay; valid until the next replay of any size."""
        if not self._calls:
            self._updates.replay(self._graphs[0].replay, self._tasks, inputs.host_parameters)
            return self._output
        for graph, call in zip(self._graphs, self._calls, strict=False):
            graph.replay()
            call.output.copy_(inputs.attend(call.layer, call.query, call.key, call.value, call.sinks))
        self._graphs[-1].replay()
        return self._output

    def release(self) -> None:
        """Give the graphs' memory back."""
        for graph in self._graphs:
            graph.reset()


def addresses(inputs: ModelInputs) -> tuple[int | None, ...]:
    """Where what differs from step to step lies; of a graph's steps it has to be the same."""
    tensors = inputs.input_ids, inputs.positions, inputs.rope_lens, inputs.rope_positions
    return tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
