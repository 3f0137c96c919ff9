"""The kernel libraries that come with workerkit, as parts: only plugins know the kernels themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

from tqdm import tqdm

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import KernelLibrary, Program
from workerkit.kernels import cpu, reference
from workerkit.kernels.cpu import native
from workerkit.kernels.cpu.native.build import unavailable
from workerkit.kernels.cpu.native.recording import NotRecordable
from workerkit.kernels.cpu.native.runtime import Runtime

T = TypeVar("T")


class ReferenceKernels(KernelLibrary):
    """Every op in plain torch, on any device."""

    @property
    def name(self) -> str:
        return "reference"

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return reference.OPS

    @property
    def batch_invariant(self) -> frozenset[str]:
        return frozenset({"experts", "linear_heads", "gated_delta_rule", "state_space"})  # one token at a time


class CpuKernels(KernelLibrary):
    """The ops that have a faster form on a CPU."""

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return cpu.OPS

    @property
    def batch_invariant(self) -> frozenset[str]:
        return frozenset({"experts"})  # products are the matrices', sums are in the order of each token's router


class NativeKernels(KernelLibrary):
    """Ops in C++ for x86 with AVX-512, BF16 and VNNI, compiled on first use. It records.

    Raises UnsupportedError saying what is missing on this machine.
    """

    def __init__(self) -> None:
        if reason := unavailable():
            raise UnsupportedError(f"kernel library 'native': {reason}")
        self._runtime = Runtime()

    @property
    def name(self) -> str:
        return "native"

    @cached_property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return {name: partial(op, self._runtime) for name, op in native.OPS.items()}

    @property
    def batch_invariant(self) -> frozenset[str]:
        return frozenset(native.OPS)

    def prepare(self, context: DeviceContext) -> None:
        with tqdm(desc="compiling kernels", leave=False, unit="file", disable=None, delay=0.5) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            self._runtime.load(progress)

    @property
    def records(self) -> bool:
        return True

    def record(self, function: Callable[[], T], num_rows: int, max_rows: int) -> tuple[Program, T]:
        try:
            program, result = self._runtime.record(function, num_rows, max_rows)
        except NotRecordable as error:
            raise UnsupportedError(str(error)) from error
        return _NativeProgram(program.run), result


class _NativeProgram(Program):
    def __init__(self, run: Callable[[int], None]) -> None:
        self._run = run

    def run(self, num_rows: int) -> None:
        self._run(num_rows)
