"""Depthwise causal convolution over all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    initial: torch.Tensor,
    token_states: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """x [T, C]; weight [C, width]; bias [C]; states [S, C, width - 1], in place; initial [R] int64; token_states [T]
    int64, -1: not kept; query_start_loc [R + 1] int32."""
    if len(x) == len(initial):
        return _one_token_rows(x, weight, bias, states, initial, token_states)
    width = weight.shape[1]
    # The rows one after another, each behind the inputs that it has seen last.
    num_rows, past = len(initial), width - 1
    starts, lens = query_start_loc[:-1].long(), query_start_loc.diff().long()
    shifts = torch.arange(num_rows, device=x.device) * past
    places = torch.arange(len(x), device=x.device) + torch.repeat_interleave(shifts + past, lens)
    inputs = x.new_empty(len(x) + num_rows * past, x.shape[1])
    inputs[places] = x
    inputs[(starts + shifts)[:, None] + torch.arange(past, device=x.device)] = states[initial].mT.to(x.dtype)
    length = len(inputs) - past
    # Windows that reach across rows are computed, too, and left out.
    output = _weighted([inputs[i : i + length] for i in range(width)], weight, bias)[places - past]
    kept = (token_states >= 0).nonzero().squeeze(1)
    windows = places[kept, None] + torch.arange(1 - past, 1, device=x.device)
    states[token_states[kept]] = inputs[windows].mT.to(states.dtype)
    return output.to(x.dtype)


def _one_token_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    initial: torch.Tensor,
    token_states: torch.Tensor,
) -> torch.Tensor:
    window = torch.cat((states[initial].to(x.dtype), x[..., None]), dim=-1)
    kept = (token_states >= 0).nonzero().squeeze(1)
    states[token_states[kept]] = window[kept, :, 1:].to(states.dtype)
    return _weighted(window.unbind(-1), weight, bias).to(x.dtype)


def _weighted(taps: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """taps [N, C], one a column of the weight, oldest first -> float32 [N, C]."""
    total = taps[0].float() * weight[:, 0].float()
    for tap, column in zip(taps[1:], weight.unbind(1)[1:], strict=True):
        total.addcmul_(tap.float(), column.float())
    return total if bias is None else total.add_(bias.float())
