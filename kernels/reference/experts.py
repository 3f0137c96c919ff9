"""Mixtures of experts: each token goes through the few experts that a router chose for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    mlps: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """x [T, H], expert_ids [T, k] int64, their weights [T, k] float32, a function [N, H] -> [N, H] for each expert ->
    [T, H]: the sum, in float32, of what a token's experts make of it times their weights."""
    result = torch.zeros_like(x, dtype=torch.float32)
    for token, (ids, weights) in enumerate(zip(expert_ids.tolist(), expert_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            result[token] += weight * mlps[expert](x[token : token + 1])[0].float()
    return result.to(x.dtype)
