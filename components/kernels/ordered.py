"""Kernels bound op by op from an ordered list of libraries."""

from __future__ import annotations

from collections.abc import Mapping

from workerkit.framework.errors import UnsupportedError, did_you_mean
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import OPS, KernelLibrary, Kernels


class OrderedKernels(Kernels):
    """Each op of OPS from the first library that has it.

    Raises UnsupportedError naming the ops that no library offers, and the ops of a library that OPS does not know.
    """

    def __init__(self, libraries: tuple[KernelLibrary, ...]) -> None:
        self._bindings: dict[str, str] = {}
        problems = [
            f"kernel library {library.name!r} offers {op!r}, which is no op; {did_you_mean(op, OPS)}"
            for library in libraries
            for op in library.ops
            if op not in OPS
        ]
        for op in OPS:
            library = next((library for library in libraries if op in library.ops), None)
            if library is None:
                offered = ", ".join(library.name for library in libraries) or "none"
                problems.append(f"no kernel library offers {op!r} (libraries: {offered})")
            else:
                self._bindings[op] = library.name
                setattr(self, op, library.ops[op])
        if problems:
            raise UnsupportedError("; ".join(problems))

    @property
    def bindings(self) -> Mapping[str, str]:
        return self._bindings

    def prepare(self, context: DeviceContext) -> None:
        """The libraries are plain functions: there is nothing to load."""
