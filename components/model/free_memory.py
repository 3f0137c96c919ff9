"""Memory that was freed goes back to the system while a model is loaded."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator

from workerkit.components.layers.weights import Weight

_NUMBERS = 2**24  # of weights, after which memory is given back


def giving_back(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """The same weights. The C library keeps what is freed between blocks in use, and weights that are made from others,
    a little at a time, leave much of it: a tenth to a fifth of a model."""
    numbers = 0
    for name, weight in weights:
        yield name, weight
        numbers += math.prod(weight.shape)
        if numbers >= _NUMBERS:
            _trim()(0)
            numbers = 0
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    """glibc's malloc_trim; without it, nothing is done."""
    trim: Callable[[int], object] | None = None
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda padding: None)
