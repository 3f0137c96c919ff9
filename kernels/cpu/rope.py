"""Rotary embedding of query and key in one pass over their joined heads: half as many torch calls."""

from __future__ import annotations

import torch


def _joined(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[T, Nq + Nk, D]: a view when the key's heads lie behind the query's, as in the output of a merged projection."""
    tokens, heads, dim = query.shape
    if (
        query.stride() == key.stride()
        and query.stride(1) == dim
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        and key.storage_offset() == query.storage_offset() + heads * dim
    ):
        return query.as_strided((tokens, heads + key.shape[1], dim), query.stride())
    return torch.cat((query, key), dim=1)


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, Nq, D], key [T, Nk, D], cos and sin [T, rotary_dim // 2]; rotates pairs (i, i + rotary_dim / 2)."""
    half = cos.shape[-1]
    x = _joined(query, key)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    halves = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        halves.append(x[..., 2 * half :])
    rotated = torch.cat(halves, dim=-1).to(x.dtype)
    heads = query.shape[1]
    return rotated[:, :heads], rotated[:, heads:]
