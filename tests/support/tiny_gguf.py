"""GGUF files of tiny random models: a llama of ours, and Hugging Face's families."""

import re

import gguf
import torch

from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.framework.interfaces.sections import LimitsSection

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}


def gguf_name(name):
    """Of a tensor with Hugging Face's name."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_tiny_gguf(path, kinds, default=gguf.GGMLQuantizationType.Q4_1, **sizes):
    """kinds: quantisation of the matrices whose GGUF name contains the key, `default` that of all others."""
    config = RandomLoader(RandomLoaderConfig(**sizes), LimitsSection()).read_config()
    writer = writer_of(path, "llama", config)
    for name, tensor in RandomLoader(RandomLoaderConfig(**sizes), LimitsSection()).weights(config):
        stored = gguf_name(name)
        kind = next((kind for part, kind in kinds.items() if part in stored), default)
        kind = kind if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    finish(writer)


def writer_of(path, arch, config):
    """With the keys that all files have. config: ours, or Hugging Face's."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    return writer


def finish(writer):
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(weight, heads):
    """What llama.cpp's converter does to q and k of arch llama (LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def converted(tensors, arch, config):
    """Hugging Face's tensors -> the arrays that llama.cpp's converter makes of them, by its names: those of the gguf
    package. What belongs to all experts of a layer is stacked."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    stacks = {}  # name -> number of an expert, 0 where there are none -> tensor
    for name, tensor in tensors.items():
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if num_heads := heads.get(name.split(".")[-2]):
            tensor = permuted(tensor, num_heads)
        number = re.search(r"\.experts\.(\d+)", name)
        stacks.setdefault(re.sub(r"\.experts\.\d+", ".experts", name), {})[int(number[1]) if number else 0] = tensor
    arrays = {}
    for name, parts in stacks.items():
        stem, _, end = name.rpartition(".")
        whole = torch.stack([parts[n] for n in sorted(parts)]) if ".experts." in name else parts[0]
        arrays[f"{names.get_name(stem)}.{end}"] = whole.numpy()
    return arrays
