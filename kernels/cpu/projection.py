"""Products with a weight matrix, bfloat16 ones in the layout that oneDNN works on: no reordering in every call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workerkit.kernels.reference import projection as reference


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """weight [O, H], bias [O] or None -> a function [T, H] -> [T, O] that multiplies by them.

    A bfloat16 weight is copied into oneDNN's blocked layout, which takes its size once more and gives the same bits
    in half the time of a decode step. float32 has no gain from it and stays as it is; so does a processor without
    the instructions.
    """
    if weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return reference.linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product
