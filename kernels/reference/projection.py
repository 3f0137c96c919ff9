"""Products with a weight matrix."""

from __future__ import annotations

import torch

_CHUNK = 8192  # rows of a weight that are converted at a time


class PlainMatrix:
    """A weight [O, H] as it is, and its bias [O] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, O]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, O]: products and sums in float32."""
        if x.dtype == torch.float32:
            return self(x)
        wide = x.float()
        # In parts: a whole head in float32 would be twice the size of its weight.
        logits = torch.cat([wide @ part.float().T for part in torch.split(self.weight, _CHUNK)], dim=1)
        return logits if self.bias is None else logits + self.bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] integer ids -> [N, H]."""
        return torch.nn.functional.embedding(ids, self.weight)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it keeps."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PlainMatrix:
    """weight [O, H], bias [O] or None -> the matrix that multiplies by them."""
    return PlainMatrix(weight, bias)


def embedding(weight: torch.Tensor) -> PlainMatrix:
    """weight [V, H] -> the matrix whose rows are read; a tied head multiplies by it as well."""
    return PlainMatrix(weight, None)
