"""A matrix for each head, all heads in one call."""

from __future__ import annotations

import torch

from workerkit.kernels.reference.heads import PlainHeads


class BatchedHeads(PlainHeads):
    """Weights as they are, all tokens of a head in one product."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N, H] -> [T, N, O]."""
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


def linear_heads(weight: torch.Tensor) -> BatchedHeads:
    """weight [N, O, H] -> the matrices that multiply each head by its own."""
    return BatchedHeads(weight)
