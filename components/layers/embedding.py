"""Embeddings, which may be the head as well."""

from __future__ import annotations

import torch

from workerkit.components.layers.linear import Linear
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.matrix_kernels import Matrix


class Embedding(Linear):
    """A table [size, width] whose rows are read; as a linear layer it multiplies by the table: a tied head."""

    def __init__(
        self,
        name: str,
        size: int,
        width: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        super().__init__(name, width, size, False, kernels, dtype, device, kind)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] integer ids -> [N, width]."""
        assert self.matrix is not None, "load_weights comes first"
        return self.matrix.rows(ids)

    def _plain(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        return self.kernels.embedding(weight)
