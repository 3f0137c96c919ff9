"""Sums over a softmax without holding it: a few rows at a time, which stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

ROUNDING = 1e-6  # bound of the relative error of `exp_sum`, and of `mean_logit`'s from the largest logit
_CHUNK = 16  # rows at a time
_BLOCK = 128  # tokens summed in float32; sums of a fixed length do not depend on how threads share a row


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], token_ids [N, C] int64 -> [N, C] float32: logit - logsumexp of the row; -inf for a banned one.
    Within 1e-6 of the reference, besides float32's rounding of the result."""
    chosen = logits.gather(1, token_ids)
    largest = logits.amax(-1, keepdim=True)
    logprobs = (chosen.double() - (largest.double() + exp_sum(logits, largest).log())).float()
    return logprobs.masked_fill(chosen == float("-inf"), float("-inf"))


def exp_sum(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Sum of exp(logits - largest) over each row, [N, 1] float64, with a relative error below ROUNDING."""
    total = torch.empty(len(logits), 1, dtype=torch.float64)
    for rows, _, weights in _shifted_and_exp(logits, largest):
        total[rows] = _sum(weights)
    return total


def mean_logit(logits: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the expected logit, and `exp_sum`; both [N, 1] float64. The former's error is below ROUNDING times its
    distance from the largest."""
    moment, total = torch.empty(2, len(logits), 1, dtype=torch.float64)
    for rows, shifted, weights in _shifted_and_exp(logits, largest):
        total[rows] = _sum(weights)
        moment[rows] = _sum(shifted.clamp_(min=-1e4).mul_(weights))  # banned tokens: 0 times something finite
    return largest + moment / total, total


def _shifted_and_exp(logits: torch.Tensor, largest: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Some rows, logits - largest of them and its exponential, padded to whole blocks with -inf and 0; reused."""
    num_rows, vocab_size = logits.shape
    width = vocab_size + -vocab_size % _BLOCK
    shifted = torch.empty(min(num_rows, _CHUNK), width)
    weights = torch.empty_like(shifted)
    for start in range(0, num_rows, _CHUNK):
        rows = slice(start, min(start + _CHUNK, num_rows))
        x, w = shifted[: rows.stop - start], weights[: rows.stop - start]
        torch.sub(logits[rows], largest[rows], out=x[:, :vocab_size])
        x[:, vocab_size:] = float("-inf")
        yield rows, x, torch.exp(x, out=w)


def _sum(x: torch.Tensor) -> torch.Tensor:
    """[n, blocks * 128] float32 -> [n, 1] float64."""
    return x.view(len(x), -1, _BLOCK).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)
