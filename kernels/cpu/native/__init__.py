"""Ops in C++ with AVX-512, BF16 and VNNI. Each takes the Runtime first, then what the reference takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workerkit.kernels.cpu.native.attention import paged_attention, reshape_and_cache, rotary_embedding
from workerkit.kernels.cpu.native.elementwise import add, fused_add_rms_norm, rms_norm, rotary_cos_sin, silu_and_mul
from workerkit.kernels.cpu.native.linear import embedding, linear
from workerkit.kernels.cpu.native.quantized import linear_q4, linear_q8, linear_w8, linear_w8a8
from workerkit.kernels.cpu.native.sampling import greedy_tokens, sample_tokens

OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "embedding": embedding,
    "linear_q4": linear_q4,
    "linear_q8": linear_q8,
    "linear_w8": linear_w8,
    "linear_w8a8": linear_w8a8,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_cos_sin": rotary_cos_sin,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "reshape_and_cache": reshape_and_cache,
    "paged_attention": paged_attention,
    "add": add,
    "greedy_tokens": greedy_tokens,
    "sample_tokens": sample_tokens,
}
