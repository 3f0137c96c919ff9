"""Tiny random models of each family, saved by Hugging Face and read by our loader: the logits that each runner samples
from are Hugging Face's within 1e-4, alone and in a mixed batch of 32, and so are the tokens."""

import pytest
import torch
from hf_oracle import assert_served_as_by, random_model, random_prompts, serve

from workerkit.framework.assembly import assemble

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
FAMILIES = {
    "Llama": {},
    "Llama-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "Gemma3Text-scaled-rope": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 32,
    },
    "Qwen3Moe-plain-weights": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_of_both_runners_are_hugging_faces(family, tmp_path):
    model = random_model(family.split("-")[0], **SMALL, **FAMILIES[family])
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = random_prompts([1, 2, 90, *torch.randint(1, 60, (29,), generator=generator).tolist()])
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
    }
    for runner in ("v1", "v2"):
        assembly = assemble(config, {"components.runner": runner})
        served = serve(assembly, prompts, 6) + [serve(assembly, [prompt], 6)[0] for prompt in prompts[:4]]
        assert_served_as_by(model, prompts + prompts[:4], served)
