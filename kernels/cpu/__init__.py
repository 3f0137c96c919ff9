"""Ops for which plain torch on a CPU has a faster form than the reference; the other ops come from a later library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workerkit.kernels.cpu.attention import decode_attention, prefill_attention
from workerkit.kernels.cpu.cache import reshape_and_cache
from workerkit.kernels.cpu.norm import fused_add_rms_norm, rms_norm
from workerkit.kernels.cpu.projection import linear
from workerkit.kernels.cpu.rope import rotary_embedding
from workerkit.kernels.cpu.sampling import apply_top_k_top_p

OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_embedding": rotary_embedding,
    "reshape_and_cache": reshape_and_cache,
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "apply_top_k_top_p": apply_top_k_top_p,
}
