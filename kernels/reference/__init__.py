"""Plain torch versions of every op: the truth that faster libraries are tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workerkit.kernels.reference.activation import add, gelu_tanh_and_mul, silu_and_mul, swigluoai_and_mul
from workerkit.kernels.reference.attention import decode_attention, paged_attention, prefill_attention
from workerkit.kernels.reference.bitmask import apply_grammar_bitmask
from workerkit.kernels.reference.cache import dequantize_blocks, quantize_and_cache, reshape_and_cache
from workerkit.kernels.reference.conv import causal_conv1d
from workerkit.kernels.reference.experts import experts
from workerkit.kernels.reference.gated_delta import gated_delta_rule
from workerkit.kernels.reference.heads import linear_heads
from workerkit.kernels.reference.logprobs import compute_token_logprobs, most_likely_tokens
from workerkit.kernels.reference.lora import add_lora
from workerkit.kernels.reference.norm import fused_add_rms_norm, rms_norm
from workerkit.kernels.reference.penalties import apply_bad_words, apply_penalties
from workerkit.kernels.reference.projection import embedding, linear
from workerkit.kernels.reference.quantized import linear_q4, linear_q8, linear_w8, linear_w8a8
from workerkit.kernels.reference.rope import rotary_cos_sin, rotary_embedding
from workerkit.kernels.reference.sampling import greedy_tokens, sample_from_probs, sample_tokens, uniform_from_seed
from workerkit.kernels.reference.state_space import state_space
from workerkit.kernels.reference.truncation import (
    apply_min_p,
    apply_top_k_top_p_npu,
    apply_top_n_sigma,
    apply_typical_p,
)
from workerkit.kernels.reference.verification import residual_probs

OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "linear_heads": linear_heads,
    "embedding": embedding,
    "linear_q4": linear_q4,
    "linear_q8": linear_q8,
    "linear_w8": linear_w8,
    "linear_w8a8": linear_w8a8,
    "experts": experts,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_cos_sin": rotary_cos_sin,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "swigluoai_and_mul": swigluoai_and_mul,
    "add": add,
    "add_lora": add_lora,
    "reshape_and_cache": reshape_and_cache,
    "quantize_and_cache": quantize_and_cache,
    "dequantize_blocks": dequantize_blocks,
    "paged_attention": paged_attention,
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
    "greedy_tokens": greedy_tokens,
    "sample_tokens": sample_tokens,
    "sample_from_probs": sample_from_probs,
    "residual_probs": residual_probs,
}
