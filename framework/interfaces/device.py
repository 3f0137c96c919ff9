"""The device: memory, the stream that steps are queued on, copies to the host, health."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import attrs

from workerkit.framework.errors import UnsupportedError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from workerkit.framework.interfaces.graph import BatchDescriptor

T = TypeVar("T")


@attrs.frozen(kw_only=True, eq=False)
class DeviceContext:
    """Stage value: an initialised device."""

    device: torch.device
    dtype: torch.dtype  # of weights, activations and cache: the config's choice, or what the device prefers
    local_rank: int = 0


@attrs.frozen(kw_only=True)
class MemoryInfo:
    """Device memory, as other processes see it too."""

    free_bytes: int
    total_bytes: int


class Pending(abc.ABC, Generic[T]):
    """Work queued on the device's stream."""

    @abc.abstractmethod
    def wait(self) -> T:
        """Its result; raises what it raised."""


class DeviceStream(Protocol):
    """What graphs need of torch.cuda.Stream and torch.npu.Stream."""

    def wait_stream(self, stream: Any) -> None:
        """Later work here waits for what `stream` has been given so far."""

    def synchronize(self) -> None:
        """The host waits for all work."""


class DeviceGraph(Protocol):
    """What is used of torch.cuda.CUDAGraph and torch.npu.NPUGraph."""

    def capture_begin(self, pool: Any = None) -> None:
        """Work of the current stream is noted instead of done, its results placed in `pool`."""

    def capture_end(self) -> None:
        """The end of it."""

    def replay(self) -> None:
        """Issue all of it on the current stream."""

    def reset(self) -> None:
        """Forget it and give its memory back."""


class GraphDevice(abc.ABC):
    """Streams and captured graphs of a device.

    The second half serves ops that take lengths from the host, which a graph would remember: each is captured as a task
    that waits for an event, and is launched anew on another stream, which then records the event, while the graph is
    replayed. A device without such ops leaves it as it is here.
    """

    @abc.abstractmethod
    def new_stream(self) -> DeviceStream:
        """A stream beside the current one."""

    @abc.abstractmethod
    def current_stream(self) -> DeviceStream:
        """Where work is issued now."""

    @abc.abstractmethod
    def use(self, stream: DeviceStream) -> AbstractContextManager[Any]:
        """Makes `stream` the current one."""

    @abc.abstractmethod
    def new_pool(self) -> Any:
        """Memory that graphs share which are never replayed at the same time."""

    @abc.abstractmethod
    def new_graph(self) -> DeviceGraph:
        """An empty graph."""

    def new_event(self) -> Any:
        """An event with `wait`, `reset` and `record`, each of a stream, that is set from outside a graph."""
        raise UnsupportedError("graphs of this device hold no ops with lengths from the host")

    def begin_task(self, stream: DeviceStream) -> None:
        """What is captured next can be launched anew."""
        raise UnsupportedError("graphs of this device hold no ops with lengths from the host")

    def end_task(self, stream: DeviceStream) -> Any:
        """The end of it; returns the task's handle."""
        raise UnsupportedError("graphs of this device hold no ops with lengths from the host")

    def begin_update(self, stream: DeviceStream, handle: Any) -> None:
        """What is launched next takes the place of the task's."""
        raise UnsupportedError("graphs of this device hold no ops with lengths from the host")

    def end_update(self, stream: DeviceStream) -> None:
        """The end of it."""
        raise UnsupportedError("graphs of this device hold no ops with lengths from the host")


class DeviceRuntime(abc.ABC):
    """One device of the process."""

    captures_graphs: ClassVar[bool] = False  # whether `graphs` works

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """`cpu`, `cuda` or `npu`."""

    @abc.abstractmethod
    def initialize(self, local_rank: int) -> DeviceContext:
        """Open the device. Raises UnsupportedError when it is not there."""

    @abc.abstractmethod
    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Queue work on the stream, in order. On an accelerator it is issued at once and runs there; on the CPU one
        worker thread runs it. The calling thread never waits."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was submitted; raises nothing of it."""

    @abc.abstractmethod
    def copy_to_host(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        """Start copying to host memory; called on the stream."""

    @abc.abstractmethod
    def memory(self) -> MemoryInfo:
        """Device memory now, after returning cached memory."""

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Start measuring the peak."""

    @abc.abstractmethod
    def peak_memory_increase(self) -> int:
        """Bytes by which the process's use of the device grew at its peak since `reset_peak_memory`."""

    @abc.abstractmethod
    def health_text(self) -> str:
        """The device tool's health report, with lines like `Health : OK`. Raises UnsupportedError without the tool."""

    @abc.abstractmethod
    def profiler_activities(self) -> tuple[Any, ...]:
        """torch.profiler activities of this device."""

    def graphs(self) -> GraphDevice:
        """For capturing graphs. Raises UnsupportedError where the device has none."""
        raise UnsupportedError(f"device {self.kind!r} captures no graphs: right would be `graph: none`")

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Stop the stream."""


class MemoryPool(abc.ABC):
    """Gives tagged memory back while the worker sleeps (tags: `weights`, `kv_cache`)."""

    @abc.abstractmethod
    def track(self, tag: str, tensors: tuple[torch.Tensor, ...]) -> None:
        """Memory that belongs to a tag, beside what was tracked before."""

    @abc.abstractmethod
    def forget(self, tag: str) -> None:
        """Nothing belongs to the tag any more."""

    @abc.abstractmethod
    def discard(self, tag: str) -> int:
        """Free the tag's memory, contents lost, addresses of the tensor objects kept. Returns bytes freed."""

    @abc.abstractmethod
    def restore(self, tag: str) -> None:
        """Give the tensors memory again, zero-filled."""


class ParallelGroups(abc.ABC):
    """The process groups of the worker."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int: ...

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def local_rank(self) -> int:
        """Which device of this machine is this process's."""

    @abc.abstractmethod
    def initialize(self, context: DeviceContext) -> None:
        """Join the groups; after the device is open, before anything is built on it."""

    @abc.abstractmethod
    def agree(self, desc: BatchDescriptor) -> BatchDescriptor:
        """The BatchDescriptor that all data-parallel ranks run."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Leave the groups."""
