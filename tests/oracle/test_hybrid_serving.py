"""Models with recurrent layers as they are served: drafts that are rejected in part, prefixes found in the cache,
preemptions, asynchronous scheduling. The tokens are Hugging Face's."""

import pytest
import torch
from hf_oracle import random_model, random_prompts

from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.registry import fake_registry

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
FAMILIES = {
    "Bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_chunk_size": 16},
    "Qwen3Next": {
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
    },
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
RUNS = {
    "v1-drafts": ("v1", {"limits": {"num_speculative_tokens": 3}, "components": {"speculator": "ngram"}}),
    "v2-drafts": ("v2", {"limits": {"num_speculative_tokens": 3}, "components": {"speculator": "ngram"}}),
    "v2-async-drafts": (
        "v2",
        {
            "limits": {"num_speculative_tokens": 3},
            "components": {"speculator": "ngram", "scheduler": {"use": "continuous", "async_scheduling": True}},
        },
    ),
    "v1-few-blocks": ("v1", {"cache": {"num_blocks": 40}}),
    "v2-few-blocks": ("v2", {"cache": {"num_blocks": 40}}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """(Hugging Face's model, its folder)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param, **SMALL, **FAMILIES[request.param])
    model.save_pretrained(folder)
    return model, folder


def assert_greedy(model, prompts, done):
    for prompt, completion in zip(prompts, done, strict=True):
        tokens = list(completion.token_ids)
        assert len(tokens) == 64, completion.error
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < 1e-4


@pytest.mark.parametrize("run", RUNS)
def test_tokens_are_hugging_faces(saved, run):
    model, folder = saved
    runner, more = RUNS[run]
    config = {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 240},
        "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 50, **more.get("limits", {})},
        "cache": {"block_size": 8, "num_blocks": 400, "state_interval": 16, **more.get("cache", {})},
        "components": {"runner": runner, "tokenizer": "fake", **more.get("components", {})},
    }
    first = random_prompts([1, 40, 70, 9])
    prompts = [*first, first[2][:50] + first[1][:5], [*first[1], 7, 8], first[3] * 6]
    assembly = assemble(config, registry=fake_registry())
    try:
        engine = assembly.engine
        engine.start()
        done = engine.generate(prompts, GREEDY)
        assert_greedy(model, prompts, done)
        again = [[*prompt, *completion.token_ids[:40]] for prompt, completion in zip(prompts, done, strict=True)]
        done = engine.generate(again, GREEDY)
        assert_greedy(model, again, done)
        stats = engine.stats
        if "drafts" in run:
            assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        if "few" in run:
            assert stats.num_preemptions
        else:
            assert stats.num_cached_tokens >= 16 * len(prompts)
    finally:
        assembly.shutdown()
