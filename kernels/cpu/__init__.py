"""Ops for which plain torch on a CPU has a faster form than the reference; the other ops come from a later library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workerkit.kernels.cpu.attention import decode_attention, prefill_attention
from workerkit.kernels.cpu.bitmask import apply_grammar_bitmask
from workerkit.kernels.cpu.cache import reshape_and_cache
from workerkit.kernels.cpu.conv import causal_conv1d
from workerkit.kernels.cpu.experts import experts
from workerkit.kernels.cpu.gated_delta import gated_delta_rule
from workerkit.kernels.cpu.heads import linear_heads
from workerkit.kernels.cpu.logprobs import most_likely_tokens
from workerkit.kernels.cpu.norm import fused_add_rms_norm, rms_norm
from workerkit.kernels.cpu.penalties import apply_bad_words, apply_penalties
from workerkit.kernels.cpu.projection import embedding, linear
from workerkit.kernels.cpu.rope import rotary_embedding
from workerkit.kernels.cpu.sampling import uniform_from_seed
from workerkit.kernels.cpu.softmax import compute_token_logprobs
from workerkit.kernels.cpu.state_space import state_space
from workerkit.kernels.cpu.truncation import apply_min_p, apply_top_k_top_p_npu, apply_top_n_sigma, apply_typical_p

OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "linear_heads": linear_heads,
    "embedding": embedding,
    "experts": experts,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_embedding": rotary_embedding,
    "reshape_and_cache": reshape_and_cache,
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "causal_conv1d": causal_conv1d,
    "state_space": state_space,
    "gated_delta_rule": gated_delta_rule,
    "apply_penalties": apply_penalties,
    "apply_bad_words": apply_bad_words,
    "apply_min_p": apply_min_p,
    "apply_top_n_sigma": apply_top_n_sigma,
    "apply_top_k_top_p_npu": apply_top_k_top_p_npu,
    "apply_typical_p": apply_typical_p,
    "apply_grammar_bitmask": apply_grammar_bitmask,
    "compute_token_logprobs": compute_token_logprobs,
    "most_likely_tokens": most_likely_tokens,
    "uniform_from_seed": uniform_from_seed,
}
