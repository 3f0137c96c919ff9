"""The random numbers; the same bits as the reference."""

from __future__ import annotations

import numpy as np
import torch


def uniform_from_seed(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """seeds, positions [N] int64 -> [N] float64 in (0, 1): a hash, so the same whatever else is in the batch.
    `stream` separates independent uses (0 sampling). In numpy, whose calls cost less on a few numbers."""
    mixed = _mix(_mix(_mix(seeds.numpy().view(np.uint64)) ^ positions.numpy().view(np.uint64)) ^ np.uint64(stream))
    return torch.from_numpy(((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def _mix(x: np.ndarray) -> np.ndarray:
    """One output of splitmix64, see the reference."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
