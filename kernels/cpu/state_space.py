"""The recurrence of Mamba-2 (Dao and Gu, 2024): short rows step by step, all at once; long ones in chunks (SSD)."""

from __future__ import annotations

import torch

from workerkit.kernels.cpu.recurrent_rows import CHUNK, STATE_NUMBERS, keep, short_and_long

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    """x [T, Nh, P]; dt [T, Nh] float32; a [Nh] float32, below 0; b, c [T, G, N]; states [S, Nh, P, N] float32, in
    place; initial [R] int64; token_states [T] int64, -1: not kept; query_start_loc [R + 1] int32."""
    output = torch.empty_like(x)
    inputs = (x, dt, a, b.float(), c.float())
    starts, lens = query_start_loc[:-1].long(), query_start_loc.diff().long()
    short, long = short_and_long(token_states, lens, starts)
    for compute, all_rows in ((_step_by_step, short), (_in_chunks, long)):
        for rows in torch.split(all_rows, max(1, STATE_NUMBERS // states[0].numel())):
            if len(rows):
                before = states.index_select(0, initial[rows])
                compute(inputs, states, before, token_states, starts[rows], lens[rows], output)
    return output


def _step_by_step(
    inputs: Inputs,
    states: torch.Tensor,
    state: torch.Tensor,
    token_states: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """state [n, Nh, P, N] of rows, the longest first, which it works in; starts, lens [n]."""
    x, dt, a, b, c = inputs
    groups, size = b.shape[1:]
    for step in range(int(lens.max())):
        num_rows = int((lens > step).sum())
        tokens = starts[:num_rows] + step
        state = state[:num_rows]
        state.mul_(torch.exp(a * dt[tokens])[..., None, None])
        grouped = state.view(num_rows, groups, -1, size)
        scaled = dt[tokens, :, None] * x[tokens]
        grouped.addcmul_(scaled.view(num_rows, groups, -1, 1), b[tokens, :, None])
        output[tokens] = (grouped @ c[tokens, :, :, None]).view(scaled.shape).to(output.dtype)
        keep(states, token_states[tokens], state)


def _in_chunks(
    inputs: Inputs,
    states: torch.Tensor,
    state: torch.Tensor,
    token_states: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """As `_step_by_step`, but keeps the state behind a row's last token only.

    Within a chunk, with l[t] the sum of a * dt up to token t and h the state before it:
    y[t] = exp(l[t]) h · c[t] + sum over s <= t of exp(l[t] - l[s]) dt[s] (c[t] · b[s]) x[s].
    """
    x, dt, a, b, c = inputs
    groups, size = b.shape[1:]
    head_dim = x.shape[2]
    final = token_states[starts + lens - 1]
    longest = int(lens.max())
    for first in range(0, longest, CHUNK):
        num_rows = int((lens > first).sum())
        state = state[:num_rows]
        width = min(CHUNK, longest - first)
        offsets = torch.arange(first, first + width, device=x.device)
        is_real = offsets < lens[:num_rows, None]
        tokens = starts[:num_rows, None] + torch.minimum(offsets, lens[:num_rows, None] - 1)
        steps = torch.where(is_real[..., None], dt[tokens], 0.0)  # [n, Q, Nh]; a step of 0 changes nothing
        # Differences of sums: in float64, so that those of large ones are as good as any.
        sums = (a.double()[:, None] * steps.mT.contiguous()).cumsum(2)  # [n, Nh, Q]
        later = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
        decay = (sums[..., None] - sums[:, :, None]).float().masked_fill_(later, float("-inf")).exp_()
        values = (steps[..., None] * x[tokens]).transpose(1, 2)  # [n, Nh, Q, P]
        keys, queries = b[tokens].transpose(1, 2), c[tokens].transpose(1, 2)  # [n, G, Q, N]
        scores = decay.view(num_rows, groups, -1, width, width) * (queries @ keys.mT)[:, :, None]
        result = scores.view(decay.shape) @ values
        old = queries @ state.view(num_rows, groups, -1, size).mT  # [n, G, Q, heads of the group * P]
        old = old.view(num_rows, groups, width, -1, head_dim).transpose(2, 3).reshape(result.shape)
        result.addcmul_(old, sums.float().exp_()[..., None])
        output[tokens[is_real]] = result.transpose(1, 2)[is_real].to(output.dtype)
        added = (values * decay[:, :, -1, :, None]).transpose(2, 3)  # [n, Nh, P, Q]
        added = added.reshape(num_rows, groups, -1, width) @ keys
        state.mul_(sums[..., -1].float().exp_()[..., None, None]).add_(added.view(state.shape))
        is_last = lens[:num_rows] <= first + width
        keep(states, torch.where(is_last, final[:num_rows], -1), state)
