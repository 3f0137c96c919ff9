"""The kernel libraries that come with workerkit, as parts: only plugins know the kernels themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workerkit.framework.interfaces.kernels import KernelLibrary
from workerkit.kernels import cpu, reference


class ReferenceKernels(KernelLibrary):
    """Every op in plain torch, on any device."""

    @property
    def name(self) -> str:
        return "reference"

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return reference.OPS


class CpuKernels(KernelLibrary):
    """The ops that have a faster form on a CPU."""

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return cpu.OPS
