"""Random numbers from a hash, and the inverse CDF."""

from __future__ import annotations

import torch
from torch.nn import functional as F

_BLOCK = 128  # tokens


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


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] -> [N] int64: the first of the largest logits; -1 where that is not a number, or infinite."""
    largest, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(~largest.isfinite(), -1)


def sample_tokens(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], uniform [N] float64 -> [N] int64, drawn from the softmax by inverse CDF; -1 where the largest
    logit is not a number, or infinite."""
    probs = logits.softmax(dim=-1)
    tokens = sample_from_probs(probs, uniform)
    # Where the largest logit is infinite or not a number, all of the row's probabilities are not numbers.
    return tokens.masked_fill_(~probs[:, 0].isfinite(), -1)


def sample_from_probs(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF. probs [N, V] float32 (rows need not be normalised), uniform [N] -> [N] int64; never a token of
    probability 0. A row without any mass, or with NaN, yields some id below V.

    Blocks are summed in float32, which is off by some 1e-7 of a block's mass, and their sums in float64; then the block
    that holds the token in float64. A tenth of the work, and sums of a fixed length, which do not depend on the other
    rows or on how they are shared among threads.
    """
    missing = -probs.shape[-1] % _BLOCK
    blocks = (F.pad(probs, (0, missing)) if missing else probs).view(len(probs), -1, _BLOCK)
    ends = F.pad(blocks.sum(-1).double().cumsum(-1), (1, 0))  # [N, 1 + blocks], the CDF at the edges of the blocks
    target = uniform.double()[:, None] * ends[:, -1:]
    block = _first_above(ends[:, 1:].contiguous(), target)
    within = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].double().cumsum(-1)
    token = block * _BLOCK + _first_above(within, target - ends.gather(-1, block))
    return token[:, 0].clamp(max=probs.shape[-1] - 1)


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Where a CDF [N, M] first exceeds the target [N, 1]; where it ends to rise if rounding put the target past it."""
    where = torch.searchsorted(cdf, target, right=True)
    end = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    return torch.minimum(where, end).clamp(max=cdf.shape[-1] - 1)
