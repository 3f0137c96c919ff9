"""The sections of a config file that belong to no single part; a constructor may ask for any of them by type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import validators

if TYPE_CHECKING:
    from workerkit.framework.interfaces.kv_cache import AttentionLayer


def _positive_or_none(instance: object, attribute: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"'{attribute.name}' must be >= 1 or null: {value}")


Quantization = Literal["none", "keep", "int8", "w8a8"]


@attrs.frozen(kw_only=True)
class QuantizationSection:
    """How matrices of each kind are kept. `none`: in model.dtype. `keep`: as the file has them, GGUF's Q4_0, Q4_1 and
    Q8_0 packed, MXFP4 in 8 bits that hold the same values, anything else in model.dtype. `int8`: rounded to 8 bits, a
    scale for each output channel. `w8a8`: likewise, and activations are rounded to 8 bits for each token in every
    product."""

    default: Quantization = attrs.field(default="none", metadata={"doc": "for the kinds that are not named"})
    attention: Quantization | None = attrs.field(
        default=None, metadata={"doc": "projections of attention and of recurrent layers; null takes `default`"}
    )
    mlp: Quantization | None = attrs.field(
        default=None,
        metadata={"doc": "projections of the MLP, of each expert where there are such; null takes `default`"},
    )
    embedding: Quantization | None = attrs.field(
        default=None, metadata={"doc": "embeddings, unless they are the head as well; null takes `default`"}
    )
    head: Quantization | None = attrs.field(
        default=None, metadata={"doc": "the projection to logits; null takes `default`"}
    )

    def of(self, kind: str | None) -> Quantization:
        """Of a kind of matrix; kinds that have no field are kept in model.dtype."""
        return getattr(self, kind) or self.default if kind in _KINDS else "none"

    @property
    def kept(self) -> QuantizationSection:
        """What it says of a draft, which is kept packed where the target is, and never rounded."""

        def choice(kind: str) -> Quantization:
            return "keep" if self.of(kind) == "keep" else "none"

        return QuantizationSection(
            attention=choice("attention"), mlp=choice("mlp"), embedding=choice("embedding"), head=choice("head")
        )

    @property
    def uses(self) -> set[Quantization]:
        """All that are chosen."""
        return {self.of(kind) for kind in _KINDS}


_KINDS = tuple(field.name for field in attrs.fields(QuantizationSection) if field.name != "default")


@attrs.frozen(kw_only=True)
class ModelSection:
    """Which model the worker serves."""

    source: str = attrs.field(
        default="smollm2",
        validator=validators.min_len(1),
        metadata={"doc": "a name from `workerkit models`, a GGUF file, or a folder with config.json and safetensors"},
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = attrs.field(
        default="auto",
        metadata={"doc": "type of weights, activations and KV cache; auto takes what the device prefers"},
    )
    quantization: QuantizationSection = attrs.field(
        factory=QuantizationSection,
        metadata={"doc": "how matrices are kept; a plain string is the default of all kinds"},
    )
    max_model_len: int | None = attrs.field(
        default=None,
        validator=_positive_or_none,
        metadata={"doc": "longest prompt plus output, in tokens; null takes what the model allows"},
    )


@attrs.frozen(kw_only=True)
class LimitsSection:
    """How much one step may hold."""

    max_num_reqs: int = attrs.field(
        default=32, validator=validators.ge(1), metadata={"doc": "requests that run at the same time (R)"}
    )
    max_num_batched_tokens: int = attrs.field(
        default=512, validator=validators.ge(1), metadata={"doc": "token budget of one step (T)"}
    )
    num_speculative_tokens: int = attrs.field(
        default=0, validator=validators.ge(0), metadata={"doc": "drafts that the speculator may propose a request (K)"}
    )
    seed: int = attrs.field(default=0, validator=validators.ge(0), metadata={"doc": "seed of random weights"})


KVQuantization = Literal["none", "int8"]


def _layer_ranges(
    instance: object, attribute: attrs.Attribute[Mapping[str, KVQuantization]], value: Mapping[str, KVQuantization]
) -> None:
    named: set[int] = set()
    for text in value:
        if not (layers := _layer_range(text)):
            raise ValueError(f"{text!r} is no layer number and no range of them: right would be '3' or '0-3'")
        if twice := named.intersection(layers):
            raise ValueError(f"layer {min(twice)} is named more than once")
        named.update(layers)


def _layer_range(text: str) -> range:
    """Empty when it is none."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


@attrs.frozen(kw_only=True)
class CacheQuantization:
    """How keys and values are kept. `none`: in model.dtype. `int8`: rounded to 8 bits, with a float32 scale for each
    token and head. A draft's are kept in model.dtype."""

    default: KVQuantization = attrs.field(default="none", metadata={"doc": "for the layers that are not named"})
    full: KVQuantization | None = attrs.field(
        default=None, metadata={"doc": "layers whose queries see all keys before them; null takes `default`"}
    )
    sliding: KVQuantization | None = attrs.field(
        default=None, metadata={"doc": "layers with a sliding window; null takes `default`"}
    )
    layers: Mapping[str, KVQuantization] = attrs.field(
        factory=dict,
        validator=_layer_ranges,
        metadata={"doc": "by number, '3' or '0-3', counted over the attention layers from 0; wins over kinds"},
    )

    @property
    def numbers(self) -> dict[int, KVQuantization]:
        """Of the layers that have a choice of their own."""
        return {number: choice for text, choice in self.layers.items() for number in _layer_range(text)}

    @property
    def uses(self) -> set[KVQuantization]:
        """All that are chosen."""
        return {choice for choice in (self.default, self.full, self.sliding, *self.layers.values()) if choice}

    def of(self, layer: AttentionLayer) -> KVQuantization:
        """What is chosen for a layer."""
        if layer.is_draft:
            return "none"
        kind = self.full if layer.sliding_window is None else self.sliding
        return self.numbers.get(layer.index) or kind or self.default


@attrs.frozen(kw_only=True)
class CacheSection:
    """The paged KV cache. `num_blocks` wins over `memory_bytes`, which wins over `memory_fraction`."""

    block_size: int = attrs.field(default=16, validator=validators.ge(1), metadata={"doc": "tokens in one block (B)"})
    memory_fraction: float = attrs.field(
        default=0.5,
        validator=[validators.gt(0.0), validators.le(1.0)],
        metadata={"doc": "share of the device's memory that the worker may use in all"},
    )
    memory_bytes: int | None = attrs.field(
        default=None, validator=_positive_or_none, metadata={"doc": "bytes for the KV cache alone"}
    )
    num_blocks: int | None = attrs.field(
        default=None,
        validator=_positive_or_none,
        metadata={"doc": "number of blocks, block 0 included, which is never handed out"},
    )
    quantization: CacheQuantization = attrs.field(
        factory=CacheQuantization,
        metadata={"doc": "how keys and values are kept; a plain string is for all layers"},
    )
    state_interval: int | None = attrs.field(
        default=None,
        validator=_positive_or_none,
        metadata={
            "doc": "tokens between copies of a recurrent state for the prefix cache, a multiple of all groups' block "
            "sizes; null takes as many as make a copy no larger than the keys and values between two of them"
        },
    )
