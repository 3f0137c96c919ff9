"""Rotary position embedding, the two halves of the rotated dimensions paired (the layout of Hugging Face)."""

from __future__ import annotations

import torch


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1)


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, Nq, D], key [T, Nk, D], cos and sin [T, rotary_dim // 2]; rotates pairs (i, i + rotary_dim / 2)."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def rotary_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] int64, inv_freq [half] float32 -> cos and sin of their products, times scaling, [T, half] each."""
    angles = positions[:, None].float() * inv_freq
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
