"""Depthwise causal convolution over ragged rows, each of which goes on from the inputs that it has seen last."""

from __future__ import annotations

import itertools

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
    """y[t] = bias + sum over i of weight[:, i] * input[t - (width - 1) + i], in float32; no activation.

    x [T, C]; weight [C, width], its last column for the token itself; bias [C]; states [S, C, width - 1], in place: the
    last width - 1 inputs, oldest first; initial [R] int64, token_states [T] int64 (-1: not kept), query_start_loc
    [R + 1] int32 as in RecurrentBatch.
    """
    width = weight.shape[1]
    output = torch.empty_like(x)
    starts = query_start_loc.tolist()
    before = states[initial].to(x.dtype)
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        inputs = torch.cat((before[row].T, x[start:end]))
        for number, token in enumerate(range(start, end)):
            window = inputs[number : number + width].T
            value = (window.float() * weight.float()).sum(-1)
            output[token] = value if bias is None else value + bias.float()
            if token_states[token] >= 0:
                states[token_states[token]] = window[:, 1:].to(states.dtype)
    return output
