"""Root mean square norm as a module."""

from __future__ import annotations

import torch

from workerkit.framework.interfaces.kernels import Kernels


class RMSNorm(torch.nn.Module):
    """Norm over the last dimension, alone or fused with the addition of a residual."""

    def __init__(self, size: int, eps: float, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), None being 0; neither input may be used afterwards."""
        if x is None:
            return self(residual), residual
        return self.kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)
