"""The recurrence of Mamba-2 (Dao and Gu, 2024), token by token in float32."""

from __future__ import annotations

import itertools

import torch


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    initial: torch.Tensor,
    token_states: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """h <- h * exp(a * dt) + dt * x ⊗ b, y = h · c, of each head.

    x [T, Nh, P]; dt [T, Nh] float32; a [Nh] float32, below 0; b, c [T, G, N], Nh / G heads sharing each; states
    [S, Nh, P, N] float32, in place; initial [R] int64, token_states [T] int64 (-1: not kept), query_start_loc [R + 1]
    int32 as in RecurrentBatch. Returns [T, Nh, P].
    """
    group = x.shape[1] // b.shape[1]
    output = torch.empty_like(x)
    starts = query_start_loc.tolist()
    before = states[initial]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        state = before[row]
        for token in range(start, end):
            wide_b, wide_c = (part[token].float().repeat_interleave(group, dim=0) for part in (b, c))
            step = dt[token, :, None] * x[token].float()
            state = state * torch.exp(a * dt[token])[:, None, None] + step[..., None] * wide_b[:, None]
            output[token] = (state * wide_c[:, None]).sum(-1)
            if token_states[token] >= 0:
                states[token_states[token]] = state
    return output
