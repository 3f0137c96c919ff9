"""The CPU as a device. Its stream is one worker thread: queued steps run in order, and the caller never waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime, MemoryInfo, Pending
from workerkit.framework.interfaces.sections import ModelSection

T = TypeVar("T")


class _Queued(Pending[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()


class _Ready(Pending[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        return self._value


class CpuDevice(DeviceRuntime):
    """Host memory and torch's own threads. `dtype: auto` means float32, in which tokens are exactly reproducible."""

    def __init__(self, section: ModelSection) -> None:
        self._dtype = torch.float32 if section.dtype == "auto" else getattr(torch, section.dtype)
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workerkit-cpu-stream")
        self._process = psutil.Process()
        self._base_memory = 0

    @property
    def kind(self) -> str:
        return "cpu"

    def initialize(self, local_rank: int) -> DeviceContext:
        return DeviceContext(device=torch.device("cpu"), dtype=self._dtype, local_rank=local_rank)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        return _Queued(self._stream.submit(work))

    def synchronize(self) -> None:
        self._stream.submit(lambda: None).result()

    def copy_to_host(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return _Ready(tensor.clone())  # the next step may overwrite it

    def memory(self) -> MemoryInfo:
        machine = psutil.virtual_memory()
        limit = _cgroup_limit()
        if limit is None or limit >= machine.total:
            return MemoryInfo(free_bytes=machine.available, total_bytes=machine.total)
        free = max(0, limit - self._process.memory_info().rss)
        return MemoryInfo(free_bytes=min(free, machine.available), total_bytes=limit)

    def reset_peak_memory(self) -> None:
        self._base_memory = self._process.memory_info().rss
        clear = Path("/proc/self/clear_refs")
        if clear.exists():
            try:
                clear.write_text("5")  # resets VmHWM
            except OSError:  # some containers forbid it: the peak then also covers what came before, which errs safely
                return

    def peak_memory_increase(self) -> int:
        return max(0, self._peak() - self._base_memory)

    def _peak(self) -> int:
        status = Path("/proc/self/status")
        if status.exists():
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return int(self._process.memory_info().rss)

    def health_text(self) -> str:
        return "Device : cpu\nHealth : OK"

    def profiler_activities(self) -> tuple[Any, ...]:
        return (torch.profiler.ProfilerActivity.CPU,)

    def shutdown(self) -> None:
        # Another worker may share the device: its next submit finds a fresh thread.
        stream, self._stream = self._stream, ThreadPoolExecutor(1, thread_name_prefix="workerkit-cpu-stream")
        stream.shutdown(wait=True)


def _cgroup_limit() -> int | None:
    """The container's memory limit in bytes, if it has one."""
    path = Path("/sys/fs/cgroup/memory.max")
    if os.name != "posix" or not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)
