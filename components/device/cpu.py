"""The CPU as a device. Its stream is one worker thread: queued steps run in order, and the caller never waits."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime, MemoryInfo, Pending
from workerkit.framework.interfaces.sections import ModelSection

T = TypeVar("T")


class _Queued(Pending[T]):
    """One piece of work. A lock that is released when it is done costs a tenth of a Future, and a step has two."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        assert self._work is not None
        try:
            self._value = self._work()
            self._error: BaseException | None = None
        except BaseException as error:
            self._error = error
        self._work = None  # what it holds goes now, not with the last reader
        self._done.release()

    def wait(self) -> T:
        with self._done:
            pass
        if self._error is not None:
            raise self._error
        return self._value


class _Stream:
    """A thread that does what is queued, in order. Its owner sees to it that nothing is submitted after `close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Queued[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="workerkit-cpu-stream", daemon=True)
        self._started = False

    def submit(self, work: Callable[[], T]) -> _Queued[T]:
        if not self._started:
            self._thread.start()
            self._started = True
        queued = _Queued(work)
        self._queue.put(queued)
        return queued

    def _serve(self) -> None:
        while (queued := self._queue.get()) is not None:
            queued.run()
            del queued  # an idle stream holds nothing of the last step

    def close(self) -> None:
        self._queue.put(None)
        if self._started:
            self._thread.join()


class _Ready(Pending[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        return self._value


class CpuDevice(DeviceRuntime):
    """Host memory and torch's own threads. `dtype: auto` means float32, in which tokens are exactly reproducible."""

    def __init__(self, section: ModelSection) -> None:
        self._dtype = torch.float32 if section.dtype == "auto" else getattr(torch, section.dtype)
        self._stream = _Stream()
        self._lock = threading.Lock()
        self._process = psutil.Process()
        self._base_memory = 0

    @property
    def kind(self) -> str:
        return "cpu"

    def initialize(self, local_rank: int) -> DeviceContext:
        return DeviceContext(device=torch.device("cpu"), dtype=self._dtype, local_rank=local_rank)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        with self._lock:
            return self._stream.submit(work)

    def synchronize(self) -> None:
        self.submit(lambda: None).wait()

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
        with self._lock:
            stream, self._stream = self._stream, _Stream()
        stream.close()


def _cgroup_limit() -> int | None:
    """The container's memory limit in bytes, if it has one."""
    path = Path("/sys/fs/cgroup/memory.max")
    if os.name != "posix" or not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)
