"""The most likely tokens, from the blocks of the vocabulary that can hold them; the same ids as the reference."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.kernels.cpu.candidates import LOWEST, bounds
from workerkit.kernels.reference import logprobs as reference


def most_likely_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """float32 [N, V] -> ids [N, count] int64 in descending order of their logits, of equal ones the lowest id first."""
    bound = bounds(logits, np.full(len(logits), max(count, 1)))
    if not (bound > LOWEST).all():  # nearly all tokens, or hardly one that is possible
        return reference.most_likely_tokens(logits, count)
    tokens = np.empty((len(logits), count), np.int64)
    for target, row, least in zip(tokens, logits.numpy(), bound, strict=True):
        ids = np.flatnonzero(row >= least)  # whatever is tied with the last one is among them
        target[:] = ids[np.argsort(-row[ids], kind="stable")[:count]]
    return torch.from_numpy(tokens)
