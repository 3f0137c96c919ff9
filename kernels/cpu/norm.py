"""Norms in one torch call; in float32 the same bits as the reference, in lower types one rounding less."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H], of x's dtype or float32: x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded
    once."""
    return torch.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
