"""A model made up on the spot: its numbers come from the config file, its weights from a seeded generator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs
import torch
from attrs import validators

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.model import ModelConfig, ModelLoader, RopeConfig
from workerkit.framework.interfaces.sections import LimitsSection


def _size(default: int, doc: str) -> int:
    size: int = attrs.field(default=default, validator=validators.ge(1), metadata={"doc": doc})
    return size


@attrs.frozen(kw_only=True)
class RandomLoaderConfig:
    """The architecture's numbers, in the names of Hugging Face's config.json."""

    architecture: str = attrs.field(
        default="LlamaForCausalLM", metadata={"doc": "a name from the model library's architectures"}
    )
    vocab_size: int = _size(256, "token ids")
    hidden_size: int = _size(64, "width of the residual stream")
    intermediate_size: int = _size(128, "width of the MLP")
    num_hidden_layers: int = _size(2, "decoder layers")
    num_attention_heads: int = _size(4, "query heads")
    num_key_value_heads: int = _size(2, "key and value heads")
    head_dim: int = _size(16, "width of a head, even")
    max_position_embeddings: int = _size(1024, "longest context, in tokens")
    rms_norm_eps: float = attrs.field(default=1e-5, validator=validators.gt(0.0), metadata={"doc": "epsilon of norms"})
    tie_word_embeddings: bool = attrs.field(default=False, metadata={"doc": "the head is the embedding"})
    qkv_bias: bool = attrs.field(default=False, metadata={"doc": "q, k and v projections have biases (Qwen2)"})
    qk_norm: bool = attrs.field(default=False, metadata={"doc": "queries and keys are normed before rope (Qwen3)"})
    sliding_window: int | None = attrs.field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        metadata={"doc": "keys that a query sees, its own included; null sees all"},
    )
    full_attention_interval: int = attrs.field(
        default=0,
        validator=validators.ge(0),
        metadata={"doc": "every n-th layer has no sliding window, which makes a second KV-cache group; 0: none"},
    )
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = attrs.field(
        default="default", metadata={"doc": "scaling of the rotary embedding"}
    )
    rope_theta: float = attrs.field(default=10000.0, validator=validators.gt(0.0), metadata={"doc": "base of rope"})
    rope_factor: float = attrs.field(
        default=1.0, validator=validators.gt(0.0), metadata={"doc": "factor of the rope scaling"}
    )
    rope_original_max_position: int | None = attrs.field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        metadata={"doc": "context that the rope scaling starts from; null takes max_position_embeddings"},
    )


class RandomLoader(ModelLoader):
    """Yields random weights whose logits are well apart, the same for the same seed.

    Projections keep the size of what goes through them and norms and biases differ from 1 and 0, so that no part of
    the network can be left out unnoticed; queries and keys are large, so that attention looks at few positions.
    """

    def __init__(self, config: RandomLoaderConfig, limits: LimitsSection) -> None:
        self._config = config
        self._seed = limits.seed

    def read_config(self) -> ModelConfig:
        c = self._config
        windows = tuple(
            None if c.full_attention_interval and (layer + 1) % c.full_attention_interval == 0 else c.sliding_window
            for layer in range(c.num_hidden_layers)
        )
        rope = RopeConfig(
            rope_type=c.rope_type,
            theta=c.rope_theta,
            rotary_dim=c.head_dim,
            factor=c.rope_factor,
            original_max_position=c.rope_original_max_position or c.max_position_embeddings,
        )
        return ModelConfig(
            architecture=c.architecture,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_hidden_layers,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            max_position_embeddings=c.max_position_embeddings,
            rope=rope,
            tie_word_embeddings=c.tie_word_embeddings,
            qkv_bias=c.qkv_bias,
            qk_norm=c.qk_norm,
            sliding_windows=windows,
        )

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        for name, shape in _shapes(config).items():
            tensor = torch.randn(shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor = 1.0 + 0.2 * tensor
            elif name.endswith(".bias"):
                tensor = 0.2 * tensor
            elif config.tie_word_embeddings or name != "model.embed_tokens.weight":
                tensor *= _gain(name) * shape[-1] ** -0.5
            yield name, tensor

    def count(self) -> int:
        return len(_shapes(self.read_config()))

    def at(self, source: str) -> ModelLoader:
        raise UnsupportedError(
            f"components.loader: random reads no files, so it cannot read {source}; use a loader that does, or make up "
            "the draft too (components.draft: random)"
        )


def _gain(name: str) -> float:
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        return 4.0  # the spread of the logits
    return 2.0 if name.endswith(("q_proj.weight", "k_proj.weight", "down_proj.weight", "o_proj.weight")) else 1.0


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape, in the order of the checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (size,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
