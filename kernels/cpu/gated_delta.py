"""The gated delta rule (Yang et al., 2024): short rows step by step, all at once; long ones in chunks."""

from __future__ import annotations

import torch

from workerkit.kernels.cpu.recurrent_rows import CHUNK, STATE_NUMBERS, keep, rows_of, short_and_long
from workerkit.kernels.reference.gated_delta import unit


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
    """query, key [T, Nk, Dk], of any length; value [T, Nv, Dv]; decay, beta [T, Nv] float32; states [S, Nv, Dk, Dv]
    float32, in place; initial [R] int64; token_states [T] int64, -1: not kept; query_start_loc [R + 1] int32."""
    num_tokens, heads, size = key.shape
    values = value.float().view(num_tokens, heads, -1, value.shape[2])
    decays, rates = (x.view(num_tokens, heads, -1) for x in (decay, beta))
    inputs = (unit(query) * size**-0.5, unit(key), values, decays, rates)
    output = torch.empty_like(value)
    starts, lens = query_start_loc[:-1].long(), query_start_loc.diff().long()
    at_once = max(1, STATE_NUMBERS // states[0].numel())
    for rows, chunk in zip(short_and_long(token_states, lens, starts), (1, CHUNK), strict=True):
        for part in torch.split(rows, at_once):
            before = rows_of(states, initial[part])
            _in_chunks(inputs, states, before, token_states, starts[part], lens[part], output, chunk)
    return output


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _in_chunks(
    inputs: Inputs,
    states: torch.Tensor,
    state: torch.Tensor,
    token_states: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    output: torch.Tensor,
    chunk: int,
) -> None:
    """inputs: query, key [T, Nk, Dk], value [T, Nk, G, Dv], decay, beta [T, Nk, G], G = Nv / Nk, all float32; state
    [n, Nv, Dk, Dv] of rows, the longest first, which it works in; starts, lens [n]. States are kept behind the last
    tokens of chunks only.

    Within a chunk, with l[t] the sum of decays up to token t, S the state before it, and K, Q, V of a row a token: what
    its tokens add to the state is k[t] d[t]^T, where (I + A) D = beta (V - exp(l) K S), and A[t, s] =
    beta[t] exp(l[t] - l[s]) k[t] · k[s] for s < t. Then o[t] = exp(l[t]) S^T q[t] + sum over s <= t of
    exp(l[t] - l[s]) (q[t] · k[s]) d[s].
    """
    query, key, value, decay, beta = inputs
    heads, size = key.shape[1:]
    groups, value_size = value.shape[2:]
    last = starts + lens - 1
    longest = int(lens.max()) if len(lens) else 0
    for first in range(0, longest, chunk):
        num_rows = int((lens > first).sum())
        state = state[:num_rows]
        width = min(chunk, longest - first)
        offsets = torch.arange(first, first + width, device=key.device)
        is_real = offsets < lens[:num_rows, None]
        tokens = torch.minimum(starts[:num_rows, None] + offsets, last[:num_rows, None])

        # Decays and betas of 0 change nothing. Sums in float64: their differences are as good for large ones.
        unreal = ~is_real[:, None, None]
        sums = rows_of(decay, tokens).movedim(1, 3).masked_fill(unreal, 0.0).double().cumsum(-1)
        rates = rows_of(beta, tokens).movedim(1, 3).masked_fill(unreal, 0.0)[..., None]
        later = torch.ones(width, width, dtype=torch.bool, device=key.device).triu(1)
        pairs = (sums[..., None] - sums[..., None, :]).float().masked_fill_(later, float("-inf")).exp_()
        past = sums.float().exp_()[..., None]

        keys = rows_of(key, tokens).transpose(1, 2)  # [n, Nk, width, Dk]
        both = torch.cat((keys, rows_of(query, tokens).transpose(1, 2)), dim=2)
        grouped = state.view(num_rows, heads, groups, size, value_size)
        old = (both[:, :, None] @ grouped).mul_(torch.cat((past, past), dim=3))
        known, read = torch.split(old, width, dim=3)
        of_keys, of_queries = torch.split((both @ keys.mT)[:, :, None], width, dim=3)
        added = rates * (rows_of(value, tokens).movedim(1, 3) - known)
        if width > 1:
            added = torch.linalg.solve_triangular(rates * pairs * of_keys, added, upper=False, unitriangular=True)
        result = read + (pairs * of_queries) @ added
        result = result.flatten(1, 2).transpose(1, 2)[is_real]  # [real tokens, Nv, Dv]
        output.index_copy_(0, tokens[is_real], result.to(output.dtype))

        weighted = keys.mT[:, :, None] * pairs[..., -1:, :]  # [n, Nk, G, Dk, width]
        state.mul_(past[..., -1:, :].view(num_rows, -1, 1, 1))
        state.flatten(0, 1).baddbmm_(weighted.flatten(0, 2), added.flatten(0, 2))
        keep(states, token_states[tokens[:, -1]], state)
