"""From logits to tokens: truncation, a hash that serves as random source, and the inverse CDF."""

from __future__ import annotations

import torch


def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """float32 [N, V], k [N] int (0 or V: off), p [N] float32 (1: off). Top-k keeps every logit tied with the k-th;
    top-p then works on the renormalised rest and keeps the smallest set whose mass reaches p, at least one token;
    tokens tied with the last one kept are kept. Others become -inf."""
    if k is None and p is None:
        return logits
    descending = logits.sort(dim=-1, descending=True).values
    threshold = truncation_threshold(descending, logits.shape[-1], k, p)
    return logits.masked_fill(logits < threshold, float("-inf"))


def truncation_threshold(
    descending: torch.Tensor, vocab_size: int, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """The smallest logit that `apply_top_k_top_p` keeps in each row, [N, 1]; -inf in a row that uses neither.

    `descending` [N, M] holds the largest logits of each row in order; M < vocab_size serves when every row's k and
    the ties of its k-th logit lie within M. The prefix sum is taken in order, so both give the same bits.
    """
    threshold = torch.full_like(descending[:, :1], float("-inf"))
    if k is not None:
        k = k.long()[:, None]
        on = (k > 0) & (k < vocab_size)
        kth = descending.gather(-1, torch.where(on, k - 1, 0))
        threshold = torch.where(on, kth, threshold)
    if p is not None:
        p = p[:, None]
        weights = (descending.double() - descending[:, :1].double()).exp().masked_fill(descending < threshold, 0.0)
        mass = weights.cumsum(-1)
        last = (mass < p.double() * mass[:, -1:]).sum(-1, keepdim=True)  # the first token with which the mass reaches p
        threshold = torch.where(p < 1, torch.maximum(descending.gather(-1, last), threshold), threshold)
    return threshold


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """One output of splitmix64 (Steele, Lea and Flood, 2014), in wrapping int64."""
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform_from_seed(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """seeds, positions [N] int64 -> [N] float64 in (0, 1): a hash, so the same whatever else is in the batch.
    `stream` separates independent uses (0 sampling)."""
    mixed = _mix(_mix(_mix(seeds) ^ positions) ^ stream)
    return (_shift_right(mixed, 12).double() + 0.5) * 2.0**-52  # odd multiples of 2^-53: neither 0 nor 1


def sample_from_probs(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF. probs [N, V] float32 (rows need not be normalised), uniform [N] -> [N] int64; never a token of
    probability 0. A row without any mass, or with NaN, yields some id below V."""
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, uniform.double()[:, None] * total, right=True)
    last = torch.searchsorted(cdf, total)  # the product above may round up to the total
    return torch.minimum(token, last).clamp(max=probs.shape[-1] - 1).squeeze(-1)
