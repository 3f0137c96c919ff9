"""The device: memory, the stream that steps are queued on, copies to the host, health."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

if TYPE_CHECKING:
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


class DeviceRuntime(abc.ABC):
    """One device of the process."""

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

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Stop the stream."""


class MemoryPool(abc.ABC):
    """Gives tagged memory back while the worker sleeps (tags: `weights`, `kv_cache`)."""

    @abc.abstractmethod
    def track(self, tag: str, tensors: tuple[torch.Tensor, ...]) -> None:
        """Memory that belongs to a tag."""

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
