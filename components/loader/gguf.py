"""GGUF files of the architectures in `gguf_architectures`, with Hugging Face's names and order of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from workerkit.components.layers.weights import Weight
from workerkit.components.loader.gguf_architectures import ARCHITECTURES, GLOBAL_NAMES, GGUFArchitecture
from workerkit.components.loader.hf_config import FAMILIES, model_config
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import ModelConfig, ModelLoader, QuantizedTensor, RopeConfig
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import GGUFHeader, GGUFTensor, ModelStore

_ROPE_FREQS = "rope_freqs.weight"  # llama3's frequency factors: part of the config, not of the weights
_PACKED = ("Q4_0", "Q4_1", "Q8_0")  # what QuantizedTensor can hold
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class GGUFLoader(ModelLoader):
    """Metadata to config. Tensors are renamed; matrices of Q4_0, Q4_1 and Q8_0 stay packed, F16 and BF16 stay as they
    are, all other kinds are dequantised to float32. What a file stacks of all experts is read one by one."""

    def __init__(self, section: ModelSection, files: ModelStore) -> None:
        self._section = section
        self._files = files

    def read_config(self) -> ModelConfig:
        return _read_config(self._header())

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
        header = self._header()
        places = _places(header)
        _check_types(header, places)
        return _read(header, places, config)

    def count(self) -> int:
        return len(_places(self._header()))

    def at(self, source: str) -> ModelLoader:
        return GGUFLoader(attrs.evolve(self._section, source=source), self._files)

    def _header(self) -> GGUFHeader:
        path = self._files.resolve(self._section.source)
        if not path.is_file():
            raise ModelError(f"{path} is a folder; a GGUF model is given by its file")
        return self._files.read_gguf(path)


def _architecture(header: GGUFHeader) -> GGUFArchitecture:
    arch = str(header.metadata.get("general.architecture"))
    if arch not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: general.architecture {arch!r} is not supported; {supported} are")
    return ARCHITECTURES[arch]


def _read_config(header: GGUFHeader) -> ModelConfig:
    metadata, path = header.metadata, header.path
    architecture, arch = _architecture(header), metadata["general.architecture"]
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts; merge them first (llama-gguf-split --merge)"
        )

    def key(name: str) -> Any:
        return metadata.get(f"{arch}.{name}")

    if key("attention.key_length") != key("attention.value_length"):
        raise ModelError(f"{path}: {arch}.attention.key_length and value_length differ, which is not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    raw = {
        "architectures": [FAMILIES[architecture.family]],
        "vocab_size": len(tokens) if isinstance(tokens, list) else key("vocab_size"),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": key("attention.key_length"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base"),
        "rope_scaling": _rope_scaling(header, {name: key(name) for name in _ROPE_KEYS}),
        "sliding_window": key("attention.sliding_window"),
        "num_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[name]
            for name in (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
            if name in metadata
        ],
        **architecture.fields(key),
    }
    config = model_config(raw, {}, str(path))
    if key("rope.dimension_count") not in (None, config.head_dim):
        raise ModelError(
            f"{path}: {arch}.rope.dimension_count {key('rope.dimension_count')} is not the head dimension "
            f"{config.head_dim}: partial rotation is not supported in GGUF files"
        )
    first = header.tensors.get("blk.0.attn_q.weight")
    return attrs.evolve(
        config,
        rope=_llama3_rope(header, config.rope) if _ROPE_FREQS in header.tensors else config.rope,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        dtype=str(_FLOATS.get(first.type_name if first else "", torch.float32)).removeprefix("torch."),
    )


_ROPE_KEYS = (
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)


def _rope_scaling(header: GGUFHeader, keys: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = keys["rope.scaling.type"] or ("linear" if keys["rope.scale_linear"] not in (None, 0.0, 1.0) else "none")
    if _ROPE_FREQS in header.tensors and kind != "none":
        raise ModelError(f"{header.path}: {_ROPE_FREQS} together with rope.scaling.type {kind!r} is not supported")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{header.path}: rope.scaling.type {kind!r} is not supported; none, linear and yarn are")
    factor = keys["rope.scaling.factor"] or keys["rope.scale_linear"]
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    odd = {
        name: keys[name]
        for name in _ROPE_KEYS
        if name.endswith(("attn_factor", "ext_factor", "log_multiplier")) and keys[name] not in (None, 0.0, 1.0)
    }
    if odd:
        raise ModelError(f"{header.path}: yarn rope with {odd} is not supported")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
        "beta_fast": keys["rope.scaling.yarn_beta_fast"],
        "beta_slow": keys["rope.scaling.yarn_beta_slow"],
    }


def _llama3_rope(header: GGUFHeader, rope: RopeConfig) -> RopeConfig:
    """The file holds only the resulting factors. Every Llama 3 model has them from these constants; this is checked."""
    found = _dequantised(header, header.tensors[_ROPE_FREQS]).double()
    factor, low, high, original = float(found.max()), 1.0, 4.0, 8192
    dim = rope.rotary_dim
    wavelen = 2 * math.pi * rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    smooth = ((original / wavelen - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3):
        raise ModelError(
            f"{header.path}: the factors in {_ROPE_FREQS} are not those of Llama 3, which is not supported"
        )
    return attrs.evolve(
        rope,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _places(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """Hugging Face name -> where it lies; of what is stacked, each expert's part."""
    names, arch = _architecture(header).names, header.metadata["general.architecture"]
    num_experts = header.metadata.get(f"{arch}.expert_count")
    places: dict[str, GGUFTensor] = {}
    unknown: list[str] = []
    for name, tensor in header.tensors.items():
        stem, _, kind = name.rpartition(".")  # kind: weight or bias
        block, _, part = stem.removeprefix("blk.").partition(".")
        if stem in GLOBAL_NAMES:
            places[f"{GLOBAL_NAMES[stem]}.{kind}"] = tensor
        elif stem.startswith("blk.") and block.isdigit() and part in names:
            own = f"model.layers.{block}.{names[part]}.{kind}"
            places |= _by_expert(header, tensor, own, num_experts) if "{}" in own else {own: tensor}
        elif name != _ROPE_FREQS:
            unknown.append(name)
    if unknown:
        raise WeightError(f"{header.path}: tensors that no known model has: {', '.join(sorted(unknown))}")
    return places


def _by_expert(header: GGUFHeader, tensor: GGUFTensor, name: str, number: object) -> dict[str, GGUFTensor]:
    """The tensor [E, ...] of all experts, a name with {} for the number of one -> name of each one, and its part."""
    if tensor.shape[:1] != (number,) or tensor.shape[0] < 1:
        raise WeightError(f"{header.path}: tensor {tensor.name} is {list(tensor.shape)}, not of {number} experts")
    size = tensor.num_bytes // tensor.shape[0]

    def part(expert: int) -> GGUFTensor:
        offset = tensor.offset + expert * size
        return attrs.evolve(tensor, shape=tensor.shape[1:], offset=offset, num_bytes=size)

    return {name.format(expert): part(expert) for expert in range(tensor.shape[0])}


def _check_types(header: GGUFHeader, places: Mapping[str, GGUFTensor]) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    first = {tensor.type_name: tensor.name for tensor in places.values()}
    for kind, name in first.items():
        if kind in _FLOATS:
            continue
        quantisation = GGMLQuantizationType[kind]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[quantisation][1]), np.uint8), quantisation)
        except NotImplementedError as error:
            raise WeightError(
                f"{header.path}: tensor {name} is stored as {kind}, which cannot be dequantised"
            ) from error


def _read(header: GGUFHeader, places: Mapping[str, GGUFTensor], config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    architecture = _architecture(header)
    heads: dict[str, int] = {}
    if architecture.interleaves:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    # The largest come first, while there is little else in memory.
    for name, place in sorted(places.items(), key=lambda pair: pair[0].startswith("model.layers.")):
        num_heads = heads.get(name.split(".")[-2])
        if place.type_name in _PACKED and len(place.shape) == 2:
            yield name, _packed(header, place, num_heads)
            continue
        tensor = _dequantised(header, place)
        if architecture.norm_offset and name.endswith("norm.weight"):
            tensor = tensor.float() - architecture.norm_offset
        yield name, tensor if num_heads is None else _halves_apart(tensor, num_heads)


def _halves_apart(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from (0, d/2, 1, d/2+1, …) back to (0, 1, …, d/2, d/2+1, …)."""
    if tensor.shape[0] % (2 * num_heads):
        return tensor  # the network refuses the shape, by name
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _packed(header: GGUFHeader, tensor: GGUFTensor, num_heads: int | None) -> QuantizedTensor:
    """Blocks of 32 weights: a scale d, for Q4_1 a minimum m, both float16, then the codes. Q4_0 means (code - 8) d."""
    rows, columns = tensor.shape
    blocks = torch.from_numpy(_bytes(header, tensor)).view(rows, columns // 32, -1)
    if num_heads is not None:
        blocks = _halves_apart(blocks, num_heads)
    scales = _halves(blocks[..., :2])
    if tensor.type_name == "Q8_0":
        return QuantizedTensor(codes=blocks[..., 2:].contiguous().view(torch.int8).view(rows, -1), scales=scales)
    minima = _halves(blocks[..., 2:4]) if tensor.type_name == "Q4_1" else -8 * scales
    return QuantizedTensor(codes=blocks[..., -16:].reshape(rows, -1), scales=scales, minima=minima)


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 2] of a float16 -> [...] float32."""
    return pairs.contiguous().view(torch.float16).squeeze(-1).float()


def _dequantised(header: GGUFHeader, tensor: GGUFTensor) -> torch.Tensor:
    from gguf import GGMLQuantizationType, dequantize

    data = _bytes(header, tensor)
    if tensor.type_name in _FLOATS:
        return torch.from_numpy(data).view(_FLOATS[tensor.type_name]).reshape(tensor.shape)
    rows = data.reshape(*tensor.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[tensor.type_name]).reshape(tensor.shape))


def _bytes(header: GGUFHeader, tensor: GGUFTensor) -> np.ndarray:
    """Read, not mapped: a mapped file would count as memory of the process until it is closed."""
    try:
        data = np.fromfile(header.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    except OSError as error:
        raise WeightError(f"{header.path}: tensor {tensor.name} cannot be read: {error}") from error
    if len(data) != tensor.num_bytes:
        raise WeightError(f"{header.path}: tensor {tensor.name} has {len(data)} of {tensor.num_bytes} bytes: truncated")
    return data
