"""Choosing tokens from logits, row by row, without a copy of the vocabulary."""

from __future__ import annotations

import torch

from workerkit.kernels.cpu.native.runtime import Runtime


def greedy_tokens(runtime: Runtime, logits: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] -> [N] int64: the first of the largest logits; -1 where that is not a number, or infinite."""
    out = torch.empty(len(logits), dtype=torch.int64)
    runtime.call("greedy_tokens", len(logits), out, logits, logits.stride(0), logits.shape[1])
    return out


def sample_tokens(runtime: Runtime, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], uniform [N] float64 -> [N] int64, drawn from the softmax by inverse CDF; -1 where the largest
    logit is not a number, or infinite. Weights are summed in float32 within 128 tokens, in float64 beyond."""
    out = torch.empty(len(logits), dtype=torch.int64)
    runtime.call("sample_tokens", len(logits), out, logits, logits.stride(0), logits.shape[1], uniform)
    return out
