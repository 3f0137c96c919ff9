"""GPT-OSS: biases and sinks of attention, experts, and the 4-bit floats that they are published in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.interfaces.model import ModelConfig, MoEConfig

_CONSTANTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of the activation, which has no other form


def gpt_oss(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """`config` with the family's own numbers; defaults are transformers'."""
    for name, value in _CONSTANTS.items():
        if fields.number(name, value) != value:
            fields.problem(name, f"{raw[name]!r} is not supported, only {value}")
    rope = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    if fields.below(rope).number("rope_theta", default=None) is None:
        fields.number("rope_theta")  # its default, 150000, is written into every file
    bias = fields.flag("attention_bias", True)
    return attrs.evolve(
        config,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        moe=_moe(config, raw, fields),
    )


def _moe(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> MoEConfig:
    number = fields.integer("num_experts" if raw.get("num_experts") is not None else "num_local_experts")
    per_token = fields.integer("num_experts_per_tok", default=4)
    if per_token > number:
        fields.problem("num_experts_per_tok", f"{per_token} of {number} experts")
    mxfp4 = raw.get("quantization_config") is not None
    for name in ("hidden_size", "intermediate_size") if mxfp4 else ():
        if getattr(config, name) % 32:
            fields.problem(name, f"{getattr(config, name)} is no multiple of 32, which mxfp4 packs together")
    return MoEConfig(
        num_experts=number,
        num_experts_per_tok=per_token,
        intermediate_size=config.intermediate_size,
        mxfp4=mxfp4,
        sparse_layers=tuple(range(config.num_hidden_layers)),
    )
