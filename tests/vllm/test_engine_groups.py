"""vLLM's engine around our worker says what our own engine says, for models whose layers keep different things."""

import shutil

import pytest
import torch
import vllm_engine
from hf_oracle import perturb, random_prompts
from tiny_families import LATENT
from vllm_engine import ask, completions, generate, said_by_us, said_by_vllm

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
GEMMA = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}
BAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
CASES = {  # (family, its fields, cache.quantization, whether vLLM's prefix cache works)
    "windows": ("Gemma3Text", GEMMA, "none", True),
    "windows in int8": ("Gemma3Text", GEMMA, {"sliding": "int8"}, True),
    "some layers in int8": ("Gemma3Text", GEMMA, {"layers": {"0-1": "int8", "3": "int8"}}, True),
    "latent": ("DeepseekV3", {"num_hidden_layers": 3, **LATENT}, "none", True),
    "recurrent": ("Bamba", BAMBA, "none", False),
}


def write(folder, family, fields, like):
    """With the tokenizer of the folder `like`, which knows more tokens."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**(SMALL | fields))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    perturb(model)
    model.save_pretrained(folder)
    for file in like.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.newest
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same(case, runner, tmp_path, model_dir):
    family, fields, quantization, prefixes = CASES[case]
    folder = write(tmp_path, family, fields, model_dir)
    cache = {"num_blocks": 400, "block_size": 8, "quantization": quantization}
    asks = [ask(prompt, max_tokens=24) for prompt in random_prompts([40, 1, 17, 90, 33, 64])]
    with vllm_engine.our_engine(folder, runner, cache=cache) as engine:
        expected = said_by_us(completions(engine, asks))
    config = vllm_engine.config(runner, cache=cache)
    with vllm_engine.vllm_engine(folder, config, runner == "v2") as llm:
        assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching == prefixes
        for turn in range(2):
            outputs = generate(llm, asks)
            assert said_by_vllm(outputs) == expected
            assert any(output.num_cached_tokens for output in outputs) == (prefixes and turn > 0)
            llm.collective_rpc("check_integrity")
