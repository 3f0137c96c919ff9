"""A matrix for each head: the two halves that latent attention takes out of a projection to keys and values."""

from __future__ import annotations

import torch


class PlainHeads:
    """Weights [N, O, H] of N heads, as they are."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N, H] -> [T, N, O]."""
        result = x.new_empty(len(x), *self.weight.shape[:2])
        for token, heads in enumerate(x):  # one at a time: the bits of a token are the same whatever the others are
            result[token] = torch.matmul(self.weight, heads[..., None])[..., 0]
        return result

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that they keep."""
        return (self.weight,)


def linear_heads(weight: torch.Tensor) -> PlainHeads:
    """weight [N, O, H] -> the matrices that multiply each head by its own."""
    return PlainHeads(weight)
