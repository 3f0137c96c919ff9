"""Products with a weight matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """weight [O, H], bias [O] or None -> a function [T, H] -> [T, O] that multiplies by them."""
    return partial(torch.nn.functional.linear, weight=weight, bias=bias)
