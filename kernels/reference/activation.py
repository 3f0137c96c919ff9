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


def swigluoai_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]: g * sigmoid(1.702 g) * (u + 1), with g = x[:, :I] at most 7 and u = x[:, I:] in -7 … 7: the
    activation of GPT-OSS (OpenAI, 2025)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[T, H] each -> their sum."""
    return a + b
