"""The few tokens of a row with the highest keys. numpy: a call costs less there than in torch, and it sorts with vector
instructions."""

from __future__ import annotations

import numpy as np
import torch

_BLOCK = 64  # tokens
LOWEST = np.finfo(np.float32).min  # no finite number lies below it


def block_maxima(x: torch.Tensor) -> np.ndarray:
    """[N, V] -> [N, blocks]; the last V % block entries are in none."""
    size = min(_BLOCK, x.shape[1])
    blocks = x.shape[1] // size
    maxima: np.ndarray = x[:, : blocks * size].view(len(x), blocks, size).amax(-1).numpy()
    return maxima


def bounds(key: torch.Tensor, count: np.ndarray) -> np.ndarray:
    """key [N, V] float32, count [N] -> [N] float32: a number that at least `count` entries of a row reach, and not many
    more, because the largest entries of no more than `count` blocks do. LOWEST where no such number is known."""
    maxima = np.sort(block_maxima(key), axis=1)
    blocks = maxima.shape[1]
    bound = maxima[np.arange(len(maxima)), blocks - np.minimum(count, blocks)]
    return np.where(count <= blocks, np.maximum(bound, LOWEST), LOWEST)


def select(x: torch.Tensor, key: torch.Tensor, bound: np.ndarray, width: int = 1) -> np.ndarray:
    """Entries of x [N, V] where the key reaches the row's bound -> [N, at least width], filled up with -inf."""
    rows = [row[keys >= least] for row, keys, least in zip(x.numpy(), key.numpy(), bound, strict=True)]
    padded = np.full((len(rows), max(width, *map(len, rows))), -np.inf, np.float32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def descending(values: np.ndarray) -> torch.Tensor:
    """[N, W], each row sorted."""
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())
