"""Hugging Face's config.json (and generation_config.json) to a ModelConfig, in the spellings of transformers 4 and 5.

The families that the native decoder knows are checked strictly; any other architecture, a draft's or a plugin's,
is only required to have the fields every decoder has, and finds the rest in `ModelConfig.raw`. If its `model_type` is
one of these, its layers are such: biases, norms of queries and keys, and sliding windows are read as there.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from workerkit.components.loader.families.bamba import bamba
from workerkit.components.loader.families.deepseek import deepseek
from workerkit.components.loader.families.gemma import gemma2, gemma3
from workerkit.components.loader.families.gpt_oss import gpt_oss
from workerkit.components.loader.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next
from workerkit.components.loader.families.qwen3_vl import qwen3_5_moe_vl, qwen3_5_vl, qwen3_vl
from workerkit.components.loader.hf_fields import Fields
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.model import ModelConfig, MoEConfig, RopeConfig

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "bamba": "BambaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# What a family has beyond the fields that all have: (config so far, the file's fields, typed access to them) -> config
FAMILY_PAGES: dict[str, Callable[[ModelConfig, Mapping[str, Any], Fields], ModelConfig]] = {
    "bamba": bamba,
    "deepseek_v3": deepseek,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt_oss": gpt_oss,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "qwen3_vl_text": qwen3_vl,
    "qwen3_5": qwen3_5_vl,
    "qwen3_5_moe": qwen3_5_moe_vl,
}
_GEMMA = ("gemma2", "gemma3_text")
_QWEN = ("qwen2", "qwen3", "qwen3_moe")
MEDUSA = "MedusaModel"
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_HEAD_DIMS = {  # transformers' defaults, where they are fixed
    **{"qwen3": 128, "qwen3_vl_text": 128, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64},
    **{"qwen3_next": 256, "qwen3_5_text": 256, "qwen3_5_moe_text": 256, "qwen3_5": 256, "qwen3_5_moe": 256},
}
_HEAD_DIM_NAMES = {"deepseek_v3": "qk_rope_head_dim"}  # where rope is of a part of each head alone
# Where no layer has a plain MLP
_INNER_NAMES = dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_moe"), "moe_intermediate_size")
_PACKED = {"gpt_oss": ("mxfp4",)}  # quant_method that a family's weights may have
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MEDUSA = {  # a file of Medusa heads may say nothing of the model that they belong to; 0: what that has
    **{"hidden_size": 0, "vocab_size": 0, "num_hidden_layers": 1, "intermediate_size": 1},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 1},
}
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def read_hf_config(folder: pathlib.Path) -> ModelConfig:
    """The config of a checkpoint folder. Raises ModelError with all problems of the file at once."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: a model folder needs one beside its safetensors files")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return model_config(read_json(path), generation, str(path))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> ModelConfig:
    """`source` is the file's name for messages; end-of-sequence ids of both files count."""
    problems: list[str] = []
    raw = _flat(raw)
    architecture = _architecture(raw, problems)
    if architecture == MEDUSA:
        raw = _MEDUSA | raw
    fields = Fields(raw, problems)
    strict = architecture in FAMILIES.values()
    family = next((name for name, known in FAMILIES.items() if known == architecture), raw.get("model_type"))
    family = family if family in FAMILIES else None

    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=None)
    if num_kv_heads is None:  # before grouped queries the field did not exist
        num_kv_heads = num_heads
    at_least = 0 if architecture == MEDUSA else 1
    hidden_size = fields.integer("hidden_size", minimum=at_least)
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer(_HEAD_DIM_NAMES.get(family or "", "head_dim"), default=None)
    if head_dim is None:
        if hidden_size % num_heads:
            fields.problem("head_dim", f"is missing, and hidden_size {hidden_size} is no multiple of {num_heads} heads")
        head_dim = _HEAD_DIMS.get(family or "", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        fields.problem("num_key_value_heads", f"{num_kv_heads} must divide num_attention_heads {num_heads}")
    max_position = fields.integer("max_position_embeddings")
    if strict and (quantization := raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        if method not in _PACKED.get(family or "", ()):
            text = f"{method!r} is not supported; use a checkpoint of plain weights, or a GGUF file"
            fields.problem("quantization_config", text)
    two_ropes = family == "gemma3_text"
    if family in _GEMMA:
        hidden_act = fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    else:
        hidden_act = fields.choice("hidden_act", _ACTIVATIONS, "silu") if strict else str(raw.get("hidden_act", "silu"))
    attention_bias = (
        fields.flag("attention_bias", False) if family in ("llama", "qwen3", "qwen3_moe", *_GEMMA) else False
    )
    dtype_field = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    dtype = str(raw.get(dtype_field) or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        fields.problem(dtype_field, f"{raw[dtype_field]!r} is not supported; {', '.join(_DTYPES)} are")
    eos = fields.token_ids("eos_token_id") + Fields(generation, problems, "generation_config.").token_ids(
        "eos_token_id"
    )
    bos = fields.token_ids("bos_token_id")

    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", minimum=at_least),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(_INNER_NAMES.get(family or "", "intermediate_size")),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        rope=_rope(
            _of_layers(raw, "full_attention", 1e6) if two_ropes else raw, problems, head_dim, max_position, strict
        ),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family in _GEMMA),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family == "llama" else False,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        hidden_act="silu" if hidden_act == "swish" else hidden_act,
        sliding_windows=_sliding_windows(raw, fields, family, num_layers),
        local_rope=_rope(_of_layers(raw, "sliding_attention", 1e4), problems, head_dim, max_position, strict)
        if two_ropes
        else None,
        moe=_moe(raw, fields, family, num_layers),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=dtype,
        raw=dict(raw),
    )
    if family in FAMILY_PAGES:
        config = FAMILY_PAGES[family](config, raw, fields)
    if problems:
        raise ModelError("\n  - ".join([f"{source} ({architecture}) is not understood:", *problems]))
    return config


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A file of speculators has the fields of the draft's layers one level down, one of a vision model its text's."""
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        return {**text, **{key: value for key, value in raw.items() if key not in ("text_config", "model_type")}}
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return dict(raw)
    return {**layer, **{key: value for key, value in raw.items() if key != "model_type" or key not in layer}}


def _architecture(raw: Mapping[str, Any], problems: list[str]) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw:
        return MEDUSA
    model_type = raw.get("model_type")
    if model_type in FAMILIES:  # transformers writes `architectures` only when it saves a model
        return FAMILIES[model_type]
    problems.append(f"architectures: must be a list with one name, e.g. ['LlamaForCausalLM'], not {names!r}")
    return "unknown architecture"


def _sliding_windows(
    raw: Mapping[str, Any], fields: Fields, family: str | None, num_layers: int
) -> tuple[int | None, ...]:
    if family == "mistral":
        # absent means 4096 there, null means none: transformers' default is not null
        window = fields.integer("sliding_window", default=None) if "sliding_window" in raw else 4096
        return () if window is None else (window,) * num_layers
    if family == "gemma3_text":
        pattern = fields.integer("sliding_window_pattern", default=6)
        types = ["full_attention" if (n + 1) % pattern == 0 else "sliding_attention" for n in range(num_layers)]
        return _windows(raw, fields, fields.integer("sliding_window", default=4096), types, num_layers)
    if family in ("gemma2", "gpt_oss"):
        types = ["full_attention" if n % 2 else "sliding_attention" for n in range(num_layers)]
        window = fields.integer("sliding_window", default=4096 if family == "gemma2" else 128)
        return _windows(raw, fields, window, types, num_layers)
    if family == "mixtral" and raw.get("sliding_window") is not None:
        return (fields.integer("sliding_window"),) * num_layers
    if family not in _QWEN or not fields.flag("use_sliding_window", False):
        return ()
    window = fields.integer("sliding_window", default=None) if "sliding_window" in raw else 4096
    if window is None:
        return ()
    first = fields.integer("max_window_layers", default=28, minimum=0)
    types = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * (num_layers - first)
    return _windows(raw, fields, window, types, num_layers)


def _windows(
    raw: Mapping[str, Any], fields: Fields, window: int, default: list[str], num_layers: int
) -> tuple[int | None, ...]:
    """`layer_types`, or the default, as one entry a layer."""
    types = raw.get("layer_types")
    types = default if types is None else types
    if not isinstance(types, list) or set(types) - {"full_attention", "sliding_attention"} or len(types) != num_layers:
        fields.problem(
            "layer_types", f"must be {num_layers} times full_attention or sliding_attention, one a layer, not {types!r}"
        )
        return ()
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def _of_layers(raw: Mapping[str, Any], kind: str, theta: float) -> dict[str, Any]:
    """Gemma 3 has a rotary embedding for each kind of layer. Old files scale those of full attention only."""
    new = raw.get("rope_parameters")
    own = new.get(kind) if isinstance(new, Mapping) else None
    old_theta = raw.get("rope_theta" if kind == "full_attention" else "rope_local_base_freq")
    scaling = raw.get("rope_scaling") if kind == "full_attention" else None
    values = {"rope_theta": old_theta or theta, **(own or scaling or {})}
    return {**raw, "rope_parameters": values, "rope_scaling": None, "rope_theta": None}


def _moe(raw: Mapping[str, Any], fields: Fields, family: str | None, num_layers: int) -> MoEConfig | None:
    if family not in ("mixtral", "qwen3_moe"):
        return None
    # transformers 5 saves `num_local_experts` where hub files of Qwen3 have `num_experts`
    number = fields.integer("num_experts" if raw.get("num_experts") is not None else "num_local_experts")
    per_token = fields.integer("num_experts_per_tok", default=2 if family == "mixtral" else 8)
    if per_token > number:
        fields.problem("num_experts_per_tok", f"{per_token} of {number} experts")
    if family == "mixtral":
        layers: tuple[int, ...] = tuple(range(num_layers))
        inner = fields.integer("intermediate_size")
    else:
        step, dense = fields.integer("decoder_sparse_step", default=1), raw.get("mlp_only_layers") or ()
        layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
        inner = fields.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=number,
        num_experts_per_tok=per_token,
        intermediate_size=inner,
        normalize=family == "mixtral" or fields.flag("norm_topk_prob", False),
        sparse_layers=layers,
    )


def _rope(raw: Mapping[str, Any], problems: list[str], head_dim: int, max_position: int, strict: bool) -> RopeConfig:
    """Old: `rope_theta` beside `rope_scaling`; new: all in `rope_parameters`. The old one wins, as in transformers."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(name) or {}
    if not isinstance(values, Mapping):
        problems.append(f"{name}: must be an object, not {values!r}")
        values = {}
    top = Fields(raw, problems)
    inner = Fields(values, problems, f"{name}.")
    kind = values.get("rope_type", values.get("type")) or "default"  # `type` is the older name
    if kind not in _ROPE_TYPES:
        if strict:
            problems.append(f"{name}.rope_type: {kind!r} is not supported; {', '.join(_ROPE_TYPES)} are")
        return RopeConfig(rope_type=str(kind), rotary_dim=head_dim, original_max_position=max_position)
    theta = inner.number("rope_theta", default=None)
    partial = inner.number("partial_rotary_factor", default=None) or top.number("partial_rotary_factor", default=1.0)
    rotary_dim = int(head_dim * partial)
    if strict and (rotary_dim % 2 or not 2 <= rotary_dim <= head_dim):
        problems.append(
            f"{name}: rotary dimension {rotary_dim} of head_dim {head_dim} must be even and in 2..{head_dim}"
        )
    original = max_position
    if kind in ("yarn", "llama3"):  # `dynamic` starts from max_position_embeddings whatever else is given
        original = top.integer("original_max_position_embeddings", default=None) or inner.integer(
            "original_max_position_embeddings", default=max_position
        )
    low, high = 1.0, 4.0
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low:
            problems.append(f"{name}.high_freq_factor: {high:g} must be greater than low_freq_factor {low:g}")
    factor = 1.0
    if kind == "yarn" and values.get("factor") is None and original < max_position:
        factor = max_position / original
    elif kind != "default":
        factor = inner.number("factor")
        if factor < 1.0:
            problems.append(f"{name}.factor: must be >= 1, not {factor:g}")
    is_yarn = kind == "yarn"
    return RopeConfig(
        rope_type=kind,
        theta=theta if theta is not None else top.number("rope_theta", default=10000.0),
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position=original,
        attention_factor=inner.number("attention_factor", default=None) if is_yarn else None,
        # 0 is written for "not used"
        mscale=inner.number("mscale", default=None) if is_yarn and values.get("mscale") else None,
        mscale_all_dim=inner.number("mscale_all_dim", default=None)
        if is_yarn and values.get("mscale_all_dim")
        else None,
        beta_fast=inner.number("beta_fast", default=32.0) if is_yarn else 32.0,
        beta_slow=inner.number("beta_slow", default=1.0) if is_yarn else 1.0,
        truncate=inner.flag("truncate", True) if is_yarn else True,
        low_freq_factor=low,
        high_freq_factor=high,
    )
