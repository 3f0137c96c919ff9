"""Mixtures of experts, all tokens of an expert at once."""

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
    [T, H]: the sum, in float32, of what a token's experts make of it times their weights.

    An expert that any token goes to is read once. A token's parts are added up in the order in which its router named
    them: what comes out has the same bits whatever the other tokens are, if that holds for each expert.
    """
    per_token = expert_ids.shape[1]
    chosen = expert_ids.flatten()
    order = chosen.argsort(stable=True)
    used, counts = torch.unique_consecutive(chosen[order], return_counts=True)
    parts = x.new_empty(len(chosen), x.shape[1])
    for expert, places in zip(used.tolist(), torch.split(order, counts.tolist()), strict=True):
        parts[places] = mlps[expert](x[places // per_token])
    result = torch.zeros_like(x, dtype=torch.float32)
    for part, weight in zip(parts.view(-1, per_token, x.shape[1]).unbind(1), expert_weights.unbind(1), strict=True):
        result += part.float() * weight[:, None]
    return result.to(x.dtype)
