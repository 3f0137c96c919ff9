"""DeepSeek-V3: latent attention, experts chosen by group with shared ones beside them, layers behind that draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.components.layers.rope import yarn_mscale
from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.interfaces.families import MLAConfig
from workerkit.framework.interfaces.model import ModelConfig, MoEConfig


def deepseek(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """`config` with the family's own numbers; defaults are transformers'."""
    if fields.flag("attention_bias", False):
        fields.problem("attention_bias", "is not supported, only false")
    if config.num_key_value_heads != config.num_attention_heads:
        fields.problem(
            "num_key_value_heads",
            f"{config.num_key_value_heads} must be num_attention_heads, {config.num_attention_heads}",
        )
    mla = MLAConfig(
        q_lora_rank=fields.integer("q_lora_rank", default=None),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        rope_interleave=fields.flag("rope_interleave", True),
    )
    if config.rope.rotary_dim != mla.qk_rope_head_dim:
        fields.problem("partial_rotary_factor", "is not supported, only 1: qk_rope_head_dim is what is rotated")
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
    if config.rope.mscale_all_dim is not None:  # both sides of the product are made longer
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return attrs.evolve(
        config,
        num_key_value_heads=1,
        head_dim=mla.kv_lora_rank + mla.qk_rope_head_dim,
        attention_scale=scale,
        mla=mla,
        moe=_moe(config.num_hidden_layers, fields),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", default=1, minimum=0),
    )


def _moe(num_layers: int, fields: Fields) -> MoEConfig:
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if fields.integer("moe_layer_freq", default=1) != 1:
        fields.problem("moe_layer_freq", "is not supported, only 1")
    number, per_token = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok", default=8)
    groups, kept = fields.integer("n_group", default=8), fields.integer("topk_group", default=4)
    if number % groups or number // groups < 2:
        fields.problem("n_group", f"{groups} groups of {number} experts must be of one size, and of two at least")
    elif kept > groups:
        fields.problem("topk_group", f"{kept} of {groups} groups")
    elif per_token > kept * (number // groups):
        fields.problem("num_experts_per_tok", f"{per_token} of {kept * (number // groups)} experts in {kept} groups")
    inner = fields.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=number,
        num_experts_per_tok=per_token,
        intermediate_size=inner,
        normalize=fields.flag("norm_topk_prob", True),
        routing="sigmoid",
        num_groups=groups,
        top_k_groups=kept,
        scaling=fields.number("routed_scaling_factor", 2.5),
        shared_intermediate_size=inner * fields.integer("n_shared_experts", default=1, minimum=0),
        sparse_layers=tuple(range(fields.integer("first_k_dense_replace", default=3, minimum=0), num_layers)),
    )
