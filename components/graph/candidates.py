"""Which sizes are captured, and which of them a step runs in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape
from workerkit.framework.interfaces.runner import WorkerShape

Mode = Literal["full", "full_decode_only", "piecewise", "full_and_piecewise"]

_LARGEST_BY_DEFAULT = 512  # larger steps keep a device busy without graphs


def default_sizes(shape: WorkerShape) -> tuple[int, ...]:
    """Tokens: 1, 2, 4, multiples of 8 up to 256, of 16 up to 512 or twice a full step of decodes; and such a step."""
    decodes = min(shape.max_num_reqs * (1 + shape.num_speculative_tokens), shape.max_num_batched_tokens)
    largest = min(2 * decodes, _LARGEST_BY_DEFAULT, shape.max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, _LARGEST_BY_DEFAULT + 1, 16)}
    return tuple(sorted({size for size in sizes if size <= largest} | ({decodes} if decodes <= largest else set())))


class Candidates:
    """The cases of a mode, and for each number of tokens those that it may be padded to, best first.

    Whole forwards come before piecewise ones; of each kind there is the smallest that holds the tokens. Sizes for
    decodes are rounded up to whole rows of 1 + K tokens; what then exceeds the worker's limits is left out.
    """

    def __init__(self, mode: Mode, varlen_decode: bool, sizes: Sequence[int], shape: WorkerShape) -> None:
        self._shape = shape
        sizes = sorted(set(sizes))
        kinds: list[list[BatchDescriptor]] = []
        if mode in ("full_decode_only", "full_and_piecewise"):
            kinds.append(list(self._decodes(sizes)))
            if varlen_decode:
                kinds.append(list(self._varlen_decodes(sizes)))
        if mode == "full":
            kinds.append([self._mixed("full", size) for size in sizes])
        full = [case for kind in kinds for case in kind]
        piecewise = []
        if mode in ("piecewise", "full_and_piecewise"):
            piecewise = [self._mixed("piecewise", size) for size in sizes]
            kinds.append(piecewise)
        self.cases = (*_largest_first(piecewise), *_largest_first(full))
        largest = max((case.num_tokens for case in self.cases), default=0)
        self._by_tokens = [
            [
                next(case for case in kind if case.num_tokens >= count)
                for kind in kinds
                if kind[-1:] and kind[-1].num_tokens >= count
            ]
            for count in range(largest + 1)
        ]

    def _decodes(self, sizes: Sequence[int]) -> Iterator[BatchDescriptor]:
        length, last = 1 + self._shape.num_speculative_tokens, 0
        for size in sizes:
            num_reqs = -(-size // length)
            if last < num_reqs <= min(self._shape.max_num_reqs, self._shape.max_num_batched_tokens // length):
                last = num_reqs
                yield BatchDescriptor(
                    mode="full", num_tokens=num_reqs * length, num_reqs=num_reqs, uniform_query_len=length
                )

    def _varlen_decodes(self, sizes: Sequence[int]) -> Iterator[BatchDescriptor]:
        length = 1 + self._shape.num_speculative_tokens
        for size in sizes:
            if size <= self._shape.max_num_reqs * length:
                num_reqs = min(size, self._shape.max_num_reqs)
                yield BatchDescriptor(mode="full", num_tokens=size, num_reqs=num_reqs, max_query_len=length)

    def _mixed(self, mode: Literal["full", "piecewise"], size: int) -> BatchDescriptor:
        return BatchDescriptor(mode=mode, num_tokens=size, num_reqs=min(size, self._shape.max_num_reqs))

    def find(self, shape: BatchShape) -> BatchDescriptor | None:
        """The case to run in; None: no case is large enough, or fits."""
        if shape.num_tokens >= len(self._by_tokens):
            return None
        longest = shape.num_tokens if shape.max_query_len is None else shape.max_query_len
        for case in self._by_tokens[shape.num_tokens]:
            if (
                case.uniform_query_len in (None, shape.uniform_query_len)
                and (case.max_query_len is None or longest <= case.max_query_len)
                and shape.num_reqs <= case.num_reqs
            ):
                return case
        return None


def _largest_first(cases: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    return sorted(cases, key=lambda case: case.num_tokens, reverse=True)
