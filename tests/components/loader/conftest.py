"""Tiny checkpoints of each family, saved by transformers, with no weight left at a trivial value."""

import json

import pytest
import torch
import transformers

from workerkit.components.loader.store import LocalModelStore, LocalModelStoreConfig

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"rms_norm_eps": 1e-5}),
    "llama-bias": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 16}),
}


def tiny_model(family):
    cls, extra = FAMILIES[family]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(cls(**SMALL | extra))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, 1.0, 0.2)
    return model.eval()


@pytest.fixture
def store(tmp_path):
    return LocalModelStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "cache"), offline=True))


@pytest.fixture
def save(tmp_path):
    """(family, options of save_pretrained) -> (model, folder)"""

    def run(family="llama", **options):
        folder = tmp_path / family
        model = tiny_model(family)
        model.save_pretrained(folder, **options)
        return model, folder

    return run


@pytest.fixture
def edit():
    """Change the fields of a JSON file; None removes one."""

    def run(path, **changes):
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return run
