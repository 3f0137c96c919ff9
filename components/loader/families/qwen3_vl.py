"""Qwen3-VL and Qwen3.5: a vision tower beside a text model, whose fields are flattened already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.components.loader.families.qwen3_next import qwen3_5, qwen3_5_moe
from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.interfaces.families import VisionConfig
from workerkit.framework.interfaces.model import ModelConfig, RopeConfig


def qwen3_vl(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """Biases and norms as in Qwen3; pictures, and the positions that they bring."""
    has_bias = fields.flag("attention_bias", False)
    config = attrs.evolve(config, qk_norm=True, qkv_bias=has_bias, o_bias=has_bias)
    if not any(part.number("rope_theta", default=None) for part in (fields, _rope_fields(raw, fields))):
        config = attrs.evolve(config, rope=attrs.evolve(config.rope, theta=500000.0))  # transformers' default here
    return with_vision(config, raw, fields, (24, 20, 20))


def qwen3_5_vl(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """Text as in Qwen3.5."""
    return with_vision(qwen3_5(config, raw, fields), raw, fields, (11, 11, 10))


def qwen3_5_moe_vl(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """Text as in Qwen3.5 with experts."""
    return with_vision(qwen3_5_moe(config, raw, fields), raw, fields, (11, 11, 10))


def with_vision(
    config: ModelConfig, raw: Mapping[str, Any], fields: Fields, mrope_section: tuple[int, ...]
) -> ModelConfig:
    """With what `vision_config` says, and positions of three axes; `mrope_section`: the family's default."""
    vision = _vision(config, fields)
    if len(vision.deepstack_indexes) > config.num_hidden_layers:
        count = len(vision.deepstack_indexes)
        fields.problem(
            "vision_config.deepstack_visual_indexes", f"{count} of them, for {config.num_hidden_layers} text layers"
        )
    return attrs.evolve(config, vision=vision, rope=mrope(config.rope, raw, fields, mrope_section))


def mrope(rope: RopeConfig, raw: Mapping[str, Any], fields: Fields, default: tuple[int, ...]) -> RopeConfig:
    """With its `mrope_section`, interleaved, which is the only order that is served."""
    values = _rope_fields(raw, fields)
    section = values.integers("mrope_section", default)
    if len(section) != 3 or sum(section) != rope.rotary_dim // 2:
        values.problem(
            "mrope_section",
            f"{list(section)} must be three numbers that add up to {rope.rotary_dim // 2}, the frequencies of a head",
        )
    if not values.flag("mrope_interleaved", True):
        values.problem("mrope_interleaved", "false is not supported, only true")
    if rope.rope_type == "dynamic":
        values.problem("rope_type", "'dynamic' is not supported with positions of three axes")
    return attrs.evolve(rope, mrope_section=section)


def _rope_fields(raw: Mapping[str, Any], fields: Fields) -> Fields:
    return fields.below("rope_scaling" if raw.get("rope_scaling") else "rope_parameters")


def _vision(config: ModelConfig, fields: Fields) -> VisionConfig:
    vision = fields.below("vision_config")
    vision.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    out_hidden_size = vision.integer("out_hidden_size", default=config.hidden_size)
    if out_hidden_size != config.hidden_size:
        vision.problem(
            "out_hidden_size", f"{out_hidden_size} must be the text model's hidden_size {config.hidden_size}"
        )
    rope = vision.below("rope_parameters")
    rope.choice("rope_type", ("axial",), "axial")
    return VisionConfig(
        depth=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.integer("num_heads"),
        out_hidden_size=out_hidden_size,
        in_channels=vision.integer("in_channels", default=3),
        patch_size=vision.integer("patch_size", default=16),
        temporal_patch_size=vision.integer("temporal_patch_size", default=2),
        merge_size=vision.integer("spatial_merge_size", default=2),
        num_position_embeddings=vision.integer("num_position_embeddings", default=2304),
        deepstack_indexes=vision.integers("deepstack_visual_indexes"),
        rope_theta=rope.number("rope_theta", default=10000.0),
        image_token_id=fields.integer("image_token_id", minimum=0),
        video_token_id=fields.integer("video_token_id", default=None, minimum=0),
        vision_start_token_id=fields.integer("vision_start_token_id", default=None, minimum=0),
        vision_end_token_id=fields.integer("vision_end_token_id", default=None, minimum=0),
    )
