"""The architectures of GGUF files that are served: the family that each one is, and what its tensors are called there.

Names as in the tables of the `gguf` package. What llama.cpp's converter does to weights, and what its code knows of an
architecture without a key in the file, is said here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from workerkit.components.loader.hf_config import FAMILIES

Key = Callable[[str], Any]  # name of a key behind the architecture's prefix -> its value; None: the file has none

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DECODER = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_SANDWICH = {
    **_DECODER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _experts(room: str, gate: str, up: str, down: str) -> dict[str, str]:
    projections = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {"ffn_gate_inp": f"{room}.gate"} | {
        name: f"{room}.experts.{{}}.{projection}" for name, projection in projections.items()
    }


def _no_fields(key: Key) -> dict[str, Any]:
    return {}


@attrs.frozen(kw_only=True)
class GGUFArchitecture:
    """What `general.architecture` stands for."""

    family: str  # a key of FAMILIES
    names: Mapping[str, str]  # GGUF's -> Hugging Face's, below a layer; {}: number of an expert, in one tensor for all
    fields: Callable[[Key], dict[str, Any]] = _no_fields  # of config.json, beside those that all have
    norm_offset: float = 0.0  # what the converter adds to the weights of norms
    interleaves: bool = False  # it does so with the two halves of a head that a rotation pairs, in queries and keys


def _llama(key: Key) -> dict[str, Any]:
    """Mixtral is one with experts, Mistral one with a sliding window."""
    family = "mixtral" if key("expert_count") else "mistral" if key("attention.sliding_window") else "llama"
    return {"architectures": [FAMILIES[family]]}


def _gemma2(key: Key) -> dict[str, Any]:
    # The model with 27 billion weights, of so many layers, is the only one whose scale is not that of its heads' size.
    fields = {"query_pre_attn_scalar": 144 if key("block_count") == 46 else key("attention.key_length")}
    return fields | _present(key, "attn_logit_softcapping", "final_logit_softcapping")


def _gemma3(key: Key) -> dict[str, Any]:
    pattern = key("attention.sliding_window_pattern")
    fields = {
        "rope_local_base_freq": key("rope.freq_base_swa"),
        "sliding_window_pattern": None if isinstance(pattern, list) else pattern,
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
        if isinstance(pattern, list)
        else None,
        "query_pre_attn_scalar": 168 if key("block_count") == 62 else key("attention.key_length"),  # as in Gemma 2
    }
    return fields | _present(key, "final_logit_softcapping")


def _present(key: Key, *names: str) -> dict[str, Any]:
    """Those that the file has: the family knows what their absence means."""
    return {name: key(name) for name in names if key(name) is not None}


ARCHITECTURES = {
    "gemma2": GGUFArchitecture(family="gemma2", names=_SANDWICH, fields=_gemma2, norm_offset=1.0),
    "gemma3": GGUFArchitecture(
        family="gemma3_text",
        names=_SANDWICH | _QK_NORMS,
        fields=_gemma3,
        norm_offset=1.0,
    ),
    "llama": GGUFArchitecture(
        family="llama",
        names=_DECODER | _experts("block_sparse_moe", "w1", "w3", "w2"),
        fields=_llama,
        interleaves=True,
    ),
    "qwen2": GGUFArchitecture(family="qwen2", names=_DECODER),
    "qwen3": GGUFArchitecture(family="qwen3", names=_DECODER | _QK_NORMS),
    "qwen3moe": GGUFArchitecture(
        family="qwen3_moe",
        names=_DECODER | _QK_NORMS | _experts("mlp", "gate_proj", "up_proj", "down_proj"),
        fields=lambda key: {"norm_topk_prob": True},
    ),
}
