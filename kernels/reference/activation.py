"""Gated activations, and sums."""

from __future__ import annotations

import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]: silu(x[:, :I]) * x[:, I:]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]: gelu(x[:, :I]) * x[:, I:], in the approximation by tanh (Hendrycks and Gimpel, 2016)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[T, H] each -> their sum."""
    return a + b
