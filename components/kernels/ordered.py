"""Kernels bound op by op from an ordered list of libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import attrs

from workerkit.framework.errors import UnsupportedError, did_you_mean
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import BATCH_SENSITIVE, OPS, KernelLibrary, Kernels, Program

T = TypeVar("T")
_SPECIAL = {"decode_attention", "prefill_attention"}  # what paged_attention can do as well


@attrs.frozen(kw_only=True)
class OrderedKernelsConfig:
    """Options of the binding."""

    batch_invariant: bool = attrs.field(
        default=False,
        metadata={"doc": "only kernels whose result for a row has the same bits whatever the other rows are"},
    )


_DEFAULT = OrderedKernelsConfig()


class OrderedKernels(Kernels):
    """Each op of OPS from the first library that has it.

    Raises UnsupportedError naming the ops that no library offers, and the ops of a library that OPS does not know.
    """

    def __init__(self, libraries: tuple[KernelLibrary, ...], config: OrderedKernelsConfig = _DEFAULT) -> None:
        self._libraries = libraries
        self._ranks: dict[str, int] = {}
        problems = [
            f"kernel library {library.name!r} offers {op!r}, which is no op; {did_you_mean(op, OPS)}"
            for library in libraries
            for op in library.ops
            if op not in OPS
        ]
        for op in OPS:
            only_invariant = config.batch_invariant and op in BATCH_SENSITIVE
            ranks = (
                rank
                for rank, library in enumerate(libraries)
                if op in library.ops and (not only_invariant or op in library.batch_invariant)
            )
            rank = next(ranks, None)
            if rank is not None:
                self._ranks[op] = rank
                setattr(self, op, libraries[rank].ops[op])
            elif only_invariant and op in _SPECIAL:
                setattr(self, op, _refuse)
            else:
                offered = ", ".join(library.name for library in libraries) or "none"
                how = " that is batch-invariant" if only_invariant else ""
                problems.append(f"no kernel library offers {op!r}{how} (libraries: {offered})")
        if problems:
            raise UnsupportedError("; ".join(problems))

    @property
    def bindings(self) -> Mapping[str, str]:
        return {op: self._libraries[rank].name for op, rank in self._ranks.items()}

    def prepare(self, context: DeviceContext) -> None:
        for library in self._libraries:
            library.prepare(context)

    def rank(self, op: str) -> int:
        return self._ranks.get(op, len(self._libraries))

    def record(self, function: Callable[[], T], num_rows: int, max_rows: int) -> tuple[Program, T]:
        for library in self._libraries:
            if library.records:
                return library.record(function, num_rows, max_rows)
        raise UnsupportedError(
            f"no kernel library of {[library.name for library in self._libraries]} records its calls"
        )


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError("no kernel library offers this op in a batch-invariant form: paged_attention is what works")
