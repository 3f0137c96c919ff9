"""The inverse CDF with sums of a few rows at a time; the same bits as the reference."""

from __future__ import annotations

import torch

from workerkit.kernels.reference import sampling as reference

_CHUNK = 2_000  # blocks at a time, whose float64 copies stay in the processor's cache


def sample_from_probs(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF. probs [N, V] float32 (rows need not be normalised), uniform [N] -> [N] int64; never a token of
    probability 0. A row without any mass, or with NaN, yields some id below V."""
    blocks = reference.blocks_of(probs)
    flat = blocks.flatten(0, 1)
    sums = torch.empty(len(flat), dtype=torch.float64)
    for start in range(0, len(flat), _CHUNK):
        torch.sum(flat[start : start + _CHUNK].double(), -1, out=sums[start : start + _CHUNK])
    tokens = reference.sample_from_blocks(blocks, sums.view(blocks.shape[:2]), uniform)
    return tokens.clamp(max=probs.shape[1] - 1)
