"""Low-rank corrections of a linear layer (Hu et al., 2021), one of several for each token."""

from __future__ import annotations

import torch


def add_lora(output: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> None:
    """output [T, O] += (x a^T, masked) b, in place. x [T, I]; a [n * r, I] and b [n * r, O] of n adapters, one after
    another, scales included; mask [T, n]: 1 for a token's adapter, else 0.

    All adapters' inner products are worked out, and those of others are masked: r is small, and one product serves any
    mixture of adapters.
    """
    adapters = mask.shape[1]
    inner = (x @ a.T).view(len(x), adapters, len(a) // adapters) * mask[:, :, None]
    output.addmm_(inner.flatten(1), b)
