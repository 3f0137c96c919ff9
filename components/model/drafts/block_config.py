"""What the configs of DFlash and DSpark checkpoints say, in the spellings of their authors and of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workerkit.components.model.drafts.head import integer
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.model import ModelConfig

MASK_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def target_layer_ids(config: ModelConfig) -> tuple[int, ...]:
    """Layers of the target whose outputs are the context, -1 being its embeddings. Raises ModelError."""
    raw = config.raw
    ids = _inner(config).get("target_layer_ids", raw.get("target_layer_ids"))
    if ids is None and (entered := raw.get("aux_hidden_state_layer_ids")) is not None:  # speculators: one more
        ids = [index - 1 for index in entered]
    if ids is None:
        count, num_target_layers = config.num_hidden_layers, integer(config, "num_target_layers")
        if count == 1:
            return (num_target_layers // 2,)
        return tuple(round(1 + index * (num_target_layers - 4) / (count - 1)) for index in range(count))
    if not ids or any(type(index) is not int or index < -1 for index in ids):
        raise ModelError(
            f"{config.architecture}: target_layer_ids must be layers of the target, -1 its embeddings, not {ids!r}"
        )
    return tuple(ids)


def mask_token_id(config: ModelConfig) -> int | None:
    """Whose embedding a mask has, by the first field that says it. Raises ModelError."""
    candidates = (_inner(config).get("mask_token_id"), *(config.raw.get(name) for name in MASK_FIELDS))
    token_id = next((value for value in candidates if value is not None), None)
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < config.vocab_size):
        raise ModelError(f"{config.architecture}: mask_token_id {token_id!r} is none of {config.vocab_size} tokens")
    return token_id


def check_config(config: ModelConfig) -> None:
    """Raise ModelError with everything that these networks cannot serve."""
    raw, inner = config.raw, _inner(config)
    problems = []
    if config.hidden_act not in ("silu", "swish"):
        problems.append(f"hidden_act {config.hidden_act!r} is not supported, only 'silu'")
    if type(raw.get("block_size")) is not int or raw["block_size"] < 2:
        problems.append(f"block_size must be an integer >= 2, not {raw.get('block_size')!r}")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"layer_types {raw['layer_types']!r}: only full_attention is supported")
    problems += [f"dflash_config.{name} is not supported" for name in ("causal", "use_swa") if inner.get(name)]
    if problems:
        raise ModelError(f"{config.architecture}: " + "; ".join(problems))


def _inner(config: ModelConfig) -> Mapping[str, Any]:
    return config.raw.get("dflash_config") or {}
