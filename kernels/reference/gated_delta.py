"""The gated delta rule (Yang et al., 2024) over ragged rows, each of which goes on from a state, token by token."""

from __future__ import annotations

import itertools

import torch


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    initial: torch.Tensor,
    token_states: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """S <- exp(decay) S, S <- S + k beta (v - S^T k)^T, o = S^T q / sqrt(Dk), of each head, in float32.

    query, key [T, Nk, Dk], which are divided by their L2 norms here; value [T, Nv, Dv], Nv / Nk heads in a row sharing
    a query and a key; decay (its logarithm) and beta [T, Nv] float32; states [S, Nv, Dk, Dv] float32, in place; initial
    [R] int64, token_states [T] int64 (-1: not kept), query_start_loc [R + 1] int32 as in RecurrentBatch: a row's
    initial state is read before any of its states is written. Returns [T, Nv, Dv].
    """
    groups, scale = value.shape[1] // query.shape[1], query.shape[2] ** -0.5
    output = torch.empty_like(value)
    starts = query_start_loc.tolist()
    before = states[initial]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        state = before[row]
        for token in range(start, end):
            q, k = (unit(x[token]).repeat_interleave(groups, 0)[..., None] for x in (query, key))
            state = state * decay[token].exp()[:, None, None]
            missing = value[token].float() - (state * k).sum(1)
            state = state + k * (beta[token][:, None] * missing)[:, None]
            output[token] = (state * q).sum(1) * scale
            if token_states[token] >= 0:
                states[token_states[token]] = state
    return output


def unit(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> the same in float32, of length 1."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
