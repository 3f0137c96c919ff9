"""Norms in one torch call; in float32 the same bits as the reference, in lower types one rounding less."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H]: x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once."""
    return torch.rms_norm(x, weight.shape, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return torch.rms_norm(total, weight.shape, weight, eps), total
