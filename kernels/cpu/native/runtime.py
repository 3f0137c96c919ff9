"""Calling native kernels: at once, or recorded into a program that runs many calls as one."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from workerkit.kernels.cpu.native.build import build
from workerkit.kernels.cpu.native.recording import Argument, NotRecordable, Recording, as_integer

T = TypeVar("T")
SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of the kernels of a type; there are none of others


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    """Loaded once a process; it holds no data of anyone's."""
    library = ctypes.CDLL(path)
    library.wk_find.argtypes = [ctypes.c_char_p]
    library.wk_call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    library.wk_program_new.restype = ctypes.c_void_p
    library.wk_program_add.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    library.wk_program_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.wk_program_free.argtypes = [ctypes.c_void_p]
    return library


class Kernel:
    """One kernel by name, and its arguments' layout."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self.number: int = library.wk_find(name.encode())
        if self.number < 0:
            raise KeyError(f"there is no native kernel {name!r}")
        self.num_args: int = library.wk_num_args(self.number)
        self.rowwise = bool(library.wk_is_rowwise(self.number))
        self._pack = struct.Struct(f"{self.num_args}q").pack

    def pack(self, args: Sequence[int]) -> bytes:
        """Arguments as the kernel reads them."""
        return self._pack(*args)


class Runtime:
    """The native library of one worker. While it records, calls are noted and not carried out."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._recording: Recording | None = None

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        return _load(str(build()))

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile if need be, and load; otherwise the first call does. `progress` as in `build`."""
        self._library = _load(str(build(progress)))

    def _kernel(self, name: str) -> Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = Kernel(self._library, name)
        return kernel

    def _here(self) -> Recording | None:
        """What notes the calls of this thread; others may go on meanwhile."""
        recording = self._recording
        return recording if recording is not None and recording.thread == threading.get_ident() else None

    def call(self, name: str, rows: int, *args: Argument) -> None:
        """Run a kernel over `rows` rows, or note the call. Tensors go as their addresses: strides are arguments of
        their own."""
        if (recording := self._here()) is not None:
            recording.note(self._kernel(name), rows, args)
            return
        if rows == 0:
            return
        kernel = self._kernel(name)
        self._library.wk_call(kernel.number, kernel.pack([rows, *map(as_integer, args)]), torch.get_num_threads())

    def empty(self, rows: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, *size], contiguous: where a kernel writes its result to."""
        if (recording := self._here()) is not None:
            return recording.empty(rows, *size, dtype=dtype)
        return torch.empty(rows, *size, dtype=dtype)

    def record(self, function: Callable[[], T], num_rows: int, max_rows: int) -> tuple[Program, T]:
        """Run `function`, which computes over `num_rows` rows with native kernels only, without computing anything.

        Returns what it returned, with tensors of max_rows rows (of those that had num_rows), and the program that
        fills their first rows. Raises NotRecordable, naming the operation, when something else computes in between, and
        for one row where there may be more: its strides do not tell where the next one is.
        """
        if num_rows == 1 < max_rows:
            raise NotRecordable("one row says nothing of where others are")
        recording = self._recording = Recording(num_rows)
        try:
            with recording:
                result = function()
        finally:
            self._recording = None
        arena, resolved, result = recording.plan(result, max_rows)
        return Program(self._library, recording, resolved, arena), result


class Program:
    """Recorded calls. The tensors that they were recorded with are kept, and must not move."""

    def __init__(
        self,
        library: ctypes.CDLL,
        recording: Recording,
        calls: Sequence[tuple[Any, Sequence[int], bool]],
        arena: torch.Tensor,
    ) -> None:
        self._library = library
        self._kept = (recording.kept, arena)
        self._handle = library.wk_program_new()
        for kernel, args, waits in calls:
            library.wk_program_add(self._handle, kernel.number, kernel.pack(args), waits)
        self.num_calls = len(calls)
        self.arena_bytes = arena.numel()

    def run(self, num_rows: int) -> None:
        """Carry out all calls over the first rows."""
        self._library.wk_program_run(self._handle, num_rows, torch.get_num_threads())

    def __del__(self) -> None:
        self._library.wk_program_free(self._handle)
