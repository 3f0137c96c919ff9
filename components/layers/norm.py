"""Norms as modules."""

from __future__ import annotations

import attrs
import torch

from workerkit.components.layers.weights import Destination, Weight, destination
from workerkit.framework.interfaces.kernels import Kernels


class RMSNorm(torch.nn.Module):
    """Norm over the last dimension, alone or fused with the addition of a residual.

    offset: what a checkpoint's weights are short of; it is added when they are loaded, and the sums are kept in
    float32: in a lower type they would lose digits that the file has.
    """

    def __init__(
        self, size: int, eps: float, kernels: Kernels, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.offset = offset
        kept = torch.float32 if offset else dtype
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=kept, device=device), requires_grad=False)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def destination(self) -> Destination:
        """Where the weight goes."""
        plain = destination(self.weight)
        return plain if not self.offset else attrs.evolve(plain, fill=self._fill)

    def _fill(self, weight: Weight) -> None:
        values = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        self.weight.copy_(values.float() + self.offset)

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), None being 0; neither input may be used afterwards."""
        if x is None:
            return self(residual), residual
        return self.kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """Norm over the last dimension that takes the mean away, with a bias: towers have it."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self.requires_grad_(False)

    def destinations(self, name: str) -> dict[str, Destination]:
        """`{name}.weight` and `{name}.bias` -> where they go."""
        return {f"{name}.weight": destination(self.weight), f"{name}.bias": destination(self.bias)}
