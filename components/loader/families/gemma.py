"""Gemma 2, and the text of Gemma 3: norms, scales and soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.interfaces.model import ModelConfig


def gemma2(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """`config` with the family's own numbers; defaults are transformers', where null is not the same as absent."""
    attention, final = (
        fields.number(name, default=None) if name in raw else cap
        for name, cap in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    )
    return attrs.evolve(_gemma(config, fields), attn_logit_softcapping=attention, final_logit_softcapping=final)


def gemma3(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """Likewise."""
    if fields.number("attn_logit_softcapping", default=None) is not None:  # nor does transformers cap its scores
        fields.problem("attn_logit_softcapping", "is not supported, only null")
    final = fields.number("final_logit_softcapping", default=None)
    return attrs.evolve(_gemma(config, fields), final_logit_softcapping=final)


def _gemma(config: ModelConfig, fields: Fields) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", False):
        fields.problem("use_bidirectional_attention", "is not supported, only false")
    return attrs.evolve(
        config,
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
    )
