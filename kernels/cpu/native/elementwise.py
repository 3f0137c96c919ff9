"""Norms, activation and what else works on each token alone. float16, which no kernel is written for, goes the way of
plain torch."""

from __future__ import annotations

import torch

from workerkit.kernels.cpu import norm as torch_norm
from workerkit.kernels.cpu.native.runtime import SUFFIX, Runtime
from workerkit.kernels.reference import activation
from workerkit.kernels.reference.rope import rotary_cos_sin as torch_rotary_cos_sin


def rms_norm(runtime: Runtime, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] or [T, N, H], weight [H], of x's dtype or float32: x / sqrt(mean(x^2) + eps) * weight, computed in
    float32, rounded once."""
    if x.dtype not in SUFFIX:
        return torch_norm.rms_norm(x, weight, eps)
    size = x.shape[-1]
    if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != size):
        x = x.contiguous()
    out = runtime.empty(*x.shape, dtype=x.dtype)
    groups = x.shape[1] if x.dim() == 3 else 1
    name = f"rms_norm_{SUFFIX[x.dtype]}_{SUFFIX[weight.dtype]}"
    runtime.call(name, len(x), out, x, x.stride(0), weight, groups, size, float(eps))
    return out


def fused_add_rms_norm(
    runtime: Runtime, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), the sum in the memory of `residual`."""
    if x.dtype not in SUFFIX:
        return torch_norm.fused_add_rms_norm(x, residual, weight, eps)
    out = runtime.empty(*x.shape, dtype=x.dtype)
    name = f"fused_add_rms_norm_{SUFFIX[x.dtype]}_{SUFFIX[weight.dtype]}"
    runtime.call(name, len(x), out, x.contiguous(), residual, weight, x.shape[1], float(eps))
    return out, residual


def silu_and_mul(runtime: Runtime, x: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]: silu(x[:, :I]) * x[:, I:], in float32, rounded once."""
    if x.dtype not in SUFFIX:
        return activation.silu_and_mul(x)
    out = runtime.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
    runtime.call(f"silu_and_mul_{SUFFIX[x.dtype]}", len(x), out, x, x.stride(0), x.shape[1] // 2)
    return out


def rotary_cos_sin(
    runtime: Runtime, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] int64, inv_freq [half] float32 -> cos and sin of their products, times scaling, [T, half] each."""
    if dtype not in SUFFIX:
        return torch_rotary_cos_sin(positions, inv_freq, scaling, dtype)
    cos, sin = (runtime.empty(len(positions), len(inv_freq), dtype=dtype) for _ in range(2))
    name = f"rotary_cos_sin_{SUFFIX[dtype]}"
    runtime.call(name, len(positions), cos, sin, positions, inv_freq, len(inv_freq), float(scaling))
    return cos, sin


def add(runtime: Runtime, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[T, H] each -> their sum."""
    if a.dtype not in SUFFIX:
        return a + b
    out = runtime.empty(*a.shape, dtype=a.dtype)
    runtime.call(f"add_{SUFFIX[a.dtype]}", len(a), out, a.contiguous(), b.contiguous(), a.shape[1])
    return out
