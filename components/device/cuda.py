"""A CUDA device. Work is issued at once, on one stream of its own, and runs there while the host goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeVar

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import (
    DeviceContext,
    DeviceGraph,
    DeviceRuntime,
    DeviceStream,
    GraphDevice,
    MemoryInfo,
    Pending,
)
from workerkit.framework.interfaces.sections import ModelSection

T = TypeVar("T")

_HEALTH_SECONDS = 10


class _Issued(Pending[T]):
    """Work whose host side is done; its result is on the device's stream."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._error: BaseException | None = None
        try:
            self._value = work()
        except BaseException as error:
            self._error = error

    def wait(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


class _HostCopy(Pending[torch.Tensor]):
    def __init__(self, tensor: torch.Tensor) -> None:
        # Pinned, or the copy would wait for the device.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> torch.Tensor:
        self._done.synchronize()
        return self._host


class CudaGraphs(GraphDevice):
    """Streams and graphs of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> DeviceStream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> DeviceStream:
        return torch.cuda.current_stream(self._device)

    def use(self, stream: DeviceStream) -> AbstractContextManager[Any]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> DeviceGraph:
        return torch.cuda.CUDAGraph()


class CudaDevice(DeviceRuntime):
    """One GPU. `dtype: auto` means bfloat16 where the GPU computes in it, float16 elsewhere."""

    captures_graphs = True

    def __init__(self, section: ModelSection) -> None:
        self._wanted_dtype = section.dtype
        self._device = torch.device("cuda", 0)
        self._allocated, self._others = 0, 0  # bytes, when the peak was last reset

    @property
    def kind(self) -> str:
        return "cuda"

    def initialize(self, local_rank: int) -> DeviceContext:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if local_rank >= count:
            raise UnsupportedError(
                f"device 'cuda': GPU {local_rank} is not there, torch {torch.__version__} sees {count}; "
                "right would be `device: cpu`, or a torch built for CUDA and a driver"
            )
        self._device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self._device)
        if self._wanted_dtype == "auto":
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        else:
            dtype = getattr(torch, self._wanted_dtype)
        return DeviceContext(device=self._device, dtype=dtype, local_rank=local_rank)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        with torch.cuda.stream(self._stream):  # of this thread, and the GPU with it
            return _Issued(work)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def copy_to_host(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return _HostCopy(tensor)

    def memory(self) -> MemoryInfo:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryInfo(free_bytes=free, total_bytes=total)

    def _used_by_others(self) -> int:
        """Bytes that torch's allocator has not handed out: libraries, other processes."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def reset_peak_memory(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = torch.cuda.memory_allocated(self._device)
        self._others = self._used_by_others()

    def peak_memory_increase(self) -> int:
        torch.cuda.synchronize(self._device)
        own = torch.cuda.max_memory_allocated(self._device) - self._allocated
        return own + max(0, self._used_by_others() - self._others)

    def health_text(self) -> str:
        if shutil.which("nvidia-smi") is None:
            raise UnsupportedError("device 'cuda': nvidia-smi, which knows the GPU's health, is not on the PATH")
        fields = "name,ecc.errors.uncorrected.volatile.total"
        uuid = torch.cuda.get_device_properties(self._device).uuid  # unlike an index, the same under any visibility
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_HEALTH_SECONDS, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            raise UnsupportedError(f"device 'cuda': {' '.join(command)} failed: {error}") from error
        return health_of(done.stdout)

    def profiler_activities(self) -> tuple[Any, ...]:
        return (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    def graphs(self) -> GraphDevice:
        return CudaGraphs(self._device)

    def shutdown(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._stream.synchronize()


def health_of(line: str) -> str:
    """`name, uncorrectable ECC errors since the driver started`, the second maybe `[N/A]` -> a health report."""
    name, _, errors = line.strip().rpartition(", ")
    state = f"{errors} uncorrectable memory errors" if errors.isdigit() and int(errors) else "OK"
    return f"Device : {name}\nHealth : {state}"
