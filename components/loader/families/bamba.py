"""Bamba: which layers are recurrent, and the numbers of Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.interfaces.families import Mamba2Config
from workerkit.framework.interfaces.model import ModelConfig

_RECURRENT = ("linear_attention", "mamba")  # transformers 5's word, and the one before
_ATTENTION = ("full_attention", "attention")
_ROTATED = 0.5  # of a head, where `rope_parameters` says nothing: fixed in transformers, whatever else the file has


def bamba(config: ModelConfig, raw: Mapping[str, Any], fields: Fields) -> ModelConfig:
    """The page of `model_type: bamba`."""
    bias = fields.flag("attention_bias", False)
    recurrent = _recurrent_layers(raw, fields, config.num_hidden_layers)
    if len(recurrent) == config.num_hidden_layers:
        fields.problem("attn_layer_indices", "must name a layer at least: models without attention are not supported")
    return attrs.evolve(
        config,
        rope=attrs.evolve(config.rope, rotary_dim=_rotary_dim(raw, fields, config.head_dim)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        recurrent_layers=recurrent,
        mamba2=_mamba2(raw, fields, config.hidden_size),
    )


def _rotary_dim(raw: Mapping[str, Any], fields: Fields, head_dim: int) -> int:
    values = raw.get("rope_scaling") or raw.get("rope_parameters")
    own = values.get("partial_rotary_factor") if isinstance(values, Mapping) else None
    rotary_dim = int(head_dim * (own if isinstance(own, (int, float)) else _ROTATED))
    said = fields.integer("attn_rotary_emb", default=rotary_dim)
    if said != rotary_dim:
        fields.problem("attn_rotary_emb", f"{said} is not the {rotary_dim} dimensions that this family turns")
    return rotary_dim


def _recurrent_layers(raw: Mapping[str, Any], fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`attn_layer_indices`, or a kind for each layer."""
    numbers = range(num_layers)
    kinds_name = "layer_types" if raw.get("layer_types") is not None else "layers_block_type"
    kinds, attention = raw.get(kinds_name), raw.get("attn_layer_indices")
    if attention is not None and (not isinstance(attention, list) or any(i not in numbers for i in attention)):
        fields.problem("attn_layer_indices", f"must be a list of layers in 0..{num_layers - 1}, not {attention!r}")
        return ()
    if kinds is None:
        return tuple(number for number in numbers if number not in (attention or []))
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {*_RECURRENT, *_ATTENTION}:
        known = " or ".join((*_RECURRENT, *_ATTENTION))
        fields.problem(kinds_name, f"must be {num_layers} times {known}, one a layer, not {kinds!r}")
        return ()
    recurrent = tuple(number for number in numbers if kinds[number] in _RECURRENT)
    if attention is not None and {*attention} != {*numbers} - {*recurrent}:
        fields.problem(kinds_name, f"{kinds!r} contradicts attn_layer_indices {attention!r}")
    return recurrent


def _mamba2(raw: Mapping[str, Any], fields: Fields, hidden_size: int) -> Mamba2Config:
    inner = fields.integer("mamba_expand", default=2) * hidden_size
    heads, groups = fields.integer("mamba_n_heads", default=128), fields.integer("mamba_n_groups", default=1)
    head_dim = inner // heads if raw.get("mamba_d_head", "auto") == "auto" else fields.integer("mamba_d_head")
    if head_dim * heads != inner:
        fields.problem("mamba_d_head", f"{head_dim} * mamba_n_heads {heads} is not mamba_expand * hidden_size {inner}")
    if heads % groups:
        fields.problem("mamba_n_groups", f"{groups} must divide mamba_n_heads {heads}")
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=fields.integer("mamba_d_state", default=256),
        conv_width=fields.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias", False),
        time_step_limit=_limits(raw.get("time_step_limit"), fields),
    )


def _limits(value: Any, fields: Fields) -> tuple[float, float]:
    if value is None:
        return 0.0, float("inf")
    bounds = [_bound(item) for item in value] if isinstance(value, list) else []
    if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None and 0 <= bounds[0] <= bounds[1]:
        return bounds[0], bounds[1]
    fields.problem("time_step_limit", f"must be two numbers >= 0, the smaller one first, not {value!r}")
    return 0.0, float("inf")


def _bound(item: Any) -> float | None:
    """JSON has no word for infinity: transformers writes an object."""
    if isinstance(item, Mapping):
        item = {"Infinity": float("inf")}.get(str(item.get("__float__")))
    return float(item) if type(item) in (int, float) else None
