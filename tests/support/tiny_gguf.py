"""A llama of random weights in a GGUF file."""

import gguf

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
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    for name, tensor in RandomLoader(RandomLoaderConfig(**sizes), LimitsSection()).weights(config):
        stored = gguf_name(name)
        kind = next((kind for part, kind in kinds.items() if part in stored), default)
        kind = kind if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
