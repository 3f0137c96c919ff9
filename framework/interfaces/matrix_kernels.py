"""Signatures of the ops that multiply by weights, and what they make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Matrix(Protocol):
    """A weight [O, H] in the form that suits a library, which is the only copy of it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, O], in x's dtype."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, O]: the same product, not rounded to x's dtype."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int32 or int64 -> [N, H], these rows of the weight, in the dtype of activations. Only a matrix made by
        `embedding`, or a quantised one, has to have them."""
        ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it keeps."""
        ...


class Linear(Protocol):
    """weight [O, H], bias [O] or None -> the matrix that multiplies by them. It may keep the weight as it is: nobody
    else writes there afterwards."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix: ...


class HeadMatrices(Protocol):
    """A matrix for each of N heads."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N, H] -> [T, N, O]."""
        ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that they keep."""
        ...


class LinearHeads(Protocol):
    """weight [N, O, H] -> the matrices that multiply each head by its own. They may keep the weight as it is."""

    def __call__(self, weight: torch.Tensor) -> HeadMatrices: ...


class Embedding(Protocol):
    """weight [V, H] -> a matrix whose rows are read, and that is multiplied by as well where it is the head, too."""

    def __call__(self, weight: torch.Tensor) -> Matrix: ...


class LinearQ4(Protocol):
    """4 bits a weight."""

    """w = code * scale + minimum, in groups of 32 along a row. codes uint8 [O, H / 2]: byte j of a group's 16 holds
    element j in its low half and j + 16 in its high half, which is GGUF's order; scales, minima [O, H / 32] float32;
    bias [O] or None; dtype of activations."""

    def __call__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        minima: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Matrix: ...


class LinearQ8(Protocol):
    """8 bits a weight, with scales of groups."""

    """w = code * scale. codes int8 [O, H]; scales [O, H / 32] float32, of 32 along a row; bias [O] or None; dtype of
    activations."""

    def __call__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Matrix: ...


class LinearW8(Protocol):
    """8 bits a weight, with a scale for each output channel."""

    """w = code * scale. codes int8 [O, H]; scales [O] float32; bias [O] or None; dtype of activations. `linear_w8`
    leaves these as they are; `linear_w8a8` rounds each token's to 8 bits, its scale being max |x| / 127, and adds up
    integers; `rows` are the same."""

    def __call__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Matrix: ...


class Experts(Protocol):
    """Functions, an expert each, of which each token goes through a few."""

    def __call__(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        mlps: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> torch.Tensor:
        """x [T, H], expert_ids [T, k] int64, their weights [T, k] float32, mlps [N, H] -> [N, H], whose rows have
        nothing to do with each other -> [T, H], the weighted sum in x's dtype."""
        ...
