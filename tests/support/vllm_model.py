"""Models that vLLM can load: SmolLM2 as a Hugging Face folder, and a tiny llama of random weights."""

import json
import shutil
import tempfile
from pathlib import Path

import torch

from workerkit.framework import roles
from workerkit.framework.plugins import load_plugins

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's own CPU attention takes
    "tie_word_embeddings": False,  # tied to random embeddings, a model says its last token again and again
    "dtype": "float32",
}


def smollm2_folder():
    """The named model of our store in bf16, written once into the store's cache by transformers' own code."""
    entry = load_plugins().registry.entry(roles.MODEL_STORE.name, "local")
    store = entry.factory(config=entry.config())
    gguf = store.fetch("smollm2")
    folder = gguf.parent / f"hf-{store.names()['smollm2'].sha256[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=gguf.parent, prefix=".hf-") as scratch:
            part = Path(scratch) / "model"
            _export(gguf, part)
            try:
                part.rename(folder)
            except OSError:  # another process was first: a folder that is not empty is never replaced
                if not folder.exists():
                    raise
    return folder


def _export(gguf, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def write_tiny(folder, like):
    """A random llama in float32 with the tokenizer and the remaining config of the folder `like`.

    Logits have a deviation of about 4: sampling has many candidates, greedy choices have gaps far above rounding.
    """
    from safetensors.torch import save_file

    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = {**json.loads((like / "config.json").read_text()), **TINY}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    hidden, middle, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    cached = config["num_key_value_heads"] * config["head_dim"]

    def random(rows, columns, deviation):
        return torch.randn(rows, columns, generator=generator) * deviation

    weights = {
        "model.embed_tokens.weight": random(vocab, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocab, hidden, 0.5),
    }
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (cached, hidden),
        "self_attn.v_proj": (cached, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(rows, columns, 1.5 * columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
