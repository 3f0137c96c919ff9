"""Qwen3-Next and the text models of Qwen3.5: which layers are recurrent, the numbers of Gated DeltaNet, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.interfaces.families import GatedDeltaConfig
from workerkit.framework.interfaces.model import ModelConfig, MoEConfig

_ROTATED = 0.25  # of a head, where the file says nothing


def qwen3_next(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """Every n-th layer has experts, but for those that the file leaves out. Defaults are transformers'."""
    dense, step = raw.get("mlp_only_layers") or (), fields.integer("decoder_sparse_step", default=1)
    layers = tuple(n for n in range(config.num_hidden_layers) if n not in dense and (n + 1) % step == 0)
    moe = _moe(raw, fields, layers, default_per_token=10, normalize=fields.flag("norm_topk_prob", True))
    return attrs.evolve(qwen3_5(config, raw, fields), moe=moe)


def qwen3_5_moe(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """All layers have experts."""
    layers = tuple(range(config.num_hidden_layers))
    moe = _moe(raw, fields, layers, default_per_token=8, normalize=True)
    return attrs.evolve(qwen3_5(config, raw, fields), moe=moe)


def qwen3_5(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """What all of them have in common."""
    bias, rope = fields.flag("attention_bias", False), config.rope
    values = raw.get("rope_scaling") or raw.get("rope_parameters")
    own = values.get("partial_rotary_factor") if isinstance(values, Mapping) else None
    if own is None and raw.get("partial_rotary_factor") is None:
        rope = attrs.evolve(rope, rotary_dim=int(_ROTATED * config.head_dim))
    return attrs.evolve(
        config,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        recurrent_layers=_recurrent_layers(raw, fields, config.num_hidden_layers),
        gated_delta=_gated_delta(fields),
    )


def _recurrent_layers(raw: Mapping[str, Any], fields: Fields, num_layers: int) -> tuple[int, ...]:
    """A kind for each layer, or every n-th with attention."""
    kinds, interval = raw.get("layer_types"), fields.integer("full_attention_interval", default=4)
    if kinds is None:
        return tuple(number for number in range(num_layers) if (number + 1) % interval)
    known = {"linear_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        fields.problem(
            "layer_types", f"must be {num_layers} times linear_attention or full_attention, one a layer, not {kinds!r}"
        )
        return ()
    return tuple(number for number, kind in enumerate(kinds) if kind == "linear_attention")


def _gated_delta(fields: Fields) -> GatedDeltaConfig:
    key_heads = fields.integer("linear_num_key_heads", default=16)
    value_heads = fields.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        fields.problem("linear_num_value_heads", f"{value_heads} must be a multiple of {key_heads} key heads")
    return GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=fields.integer("linear_key_head_dim", default=128),
        value_head_dim=fields.integer("linear_value_head_dim", default=128),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4, minimum=2),
    )


def _moe(
    raw: Mapping[str, Any], fields: Fields, layers: tuple[int, ...], default_per_token: int, normalize: bool
) -> MoEConfig:
    number = fields.integer("num_experts" if raw.get("num_experts") is not None else "num_local_experts")
    per_token = fields.integer("num_experts_per_tok", default=default_per_token)
    if per_token > number:
        fields.problem("num_experts_per_tok", f"{per_token} of {number} experts")
    return MoEConfig(
        num_experts=number,
        num_experts_per_tok=per_token,
        intermediate_size=fields.integer("moe_intermediate_size", default=512),
        normalize=normalize,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", default=512),
        sparse_layers=layers,
    )
