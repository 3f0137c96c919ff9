"""Models with sliding windows in as few blocks as one request needs: what is behind a window is another request's by
then. Hugging Face's tokens all the same, with prefixes found and not, and after preemptions."""

import pytest
import torch
from hf_oracle import random_model, random_prompts

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.sampling_params import SamplingParams

COUNT = 24  # tokens of each answer
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
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """(directory, prompts, Hugging Face's greedy answers): prompts of which some begin alike, one several times."""
    model = random_model(request.param, **SMALL, **FAMILIES[request.param])
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    common, *others = random_prompts([48, 3, 95, 17, 30])
    prompts = [common, others[0], [*common[:32], *others[1][:20]], others[1], common, [*common, *others[2]], others[3]]
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(COUNT):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return request.param, path, prompts, answers


def run(path, prompts, block_size, num_blocks, num_drafts=0, **components):
    """(answers, scheduler's counts); two requests at a time, so that later ones find what earlier ones left."""
    config = {
        "model": {"source": str(path), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 2, "max_num_batched_tokens": 20, "num_speculative_tokens": num_drafts},
        "cache": {"block_size": block_size, "num_blocks": num_blocks},
        "components": {"sampler": {"use": "torch", "temperature": 0.0}, **components},
    }
    assembly = assemble(config)
    worker = assembly.worker
    worker.start()
    scheduler = assembly.get(roles.SCHEDULER)
    answers = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=COUNT)
        scheduler.add(EngineRequest(req_id=f"{number}", prompt_token_ids=tuple(prompt), params=params))
    in_flight = []
    while scheduler.has_work or in_flight:
        while scheduler.has_work and len(in_flight) < scheduler.max_in_flight:
            output = scheduler.schedule()
            scheduler.check_integrity()
            if worker.execute_model(output) is not None:
                break
            in_flight.append((output, worker.sample_tokens()))
        if in_flight:
            output, step = in_flight.pop(0)
            for req_id, progress in scheduler.update(output, step.get()).items():
                answers[int(req_id)].extend(progress.token_ids)
            scheduler.check_integrity()
    worker.check_integrity()
    stats = scheduler.stats()
    assert stats["num_free_blocks"] == num_blocks - 1
    worker.shutdown()
    return answers, stats


PARTS = {
    "cpu": {"runner": "v1", "attention": "cpu"},
    "cpu v2": {"runner": "v2", "attention": "cpu"},
    "sdpa": {"runner": "v2", "attention": "sdpa", "graph": "none"},
    "reference": {"runner": "v1", "attention": "reference"},
    "ahead": {"runner": "v2", "scheduler": {"use": "continuous", "async_scheduling": True}},
    "no caching": {"runner": "v1", "scheduler": {"use": "continuous", "prefix_caching": False}},
}


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("parts", PARTS)
def test_the_least_blocks_yield_hugging_faces_tokens(case, parts, block_size):
    """Block 4: 6 + 1 blocks at a time for a window of 8 and steps of 20 tokens, block 16: 2 + 1; 32 and 8 for all of
    128 tokens."""
    family, path, prompts, expected = case
    windowed = -(-(7 + 20 - 1) // block_size) + 1
    full = 128 // block_size if family == "Gemma3Text" else 0
    answers, stats = run(path, prompts, block_size, 1 + windowed + full, **PARTS[parts])
    assert answers == expected
    assert full or windowed < 128 // block_size
    assert stats["num_preemptions"] or block_size == 4


@pytest.mark.parametrize("parts", ["cpu", "cpu v2", "ahead", "no caching"])
def test_prefixes_are_found(case, parts):
    _, path, prompts, expected = case
    answers, stats = run(path, prompts, 4, 200, **PARTS[parts])
    assert answers == expected
    assert stats["num_cached_tokens"] == (0 if parts == "no caching" else 32 + 47 + 48)
    assert not stats["num_preemptions"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_that_are_rejected_take_nothing_back(case, async_scheduling):
    family, path, prompts, expected = case
    num_drafts = 3
    windowed = -(-(7 + 20 + num_drafts + 1 - 1) // 4) + 1
    parts = {
        "runner": "v2",
        "speculator": {"use": "ngram", "min_n": 1},
        "scheduler": {"use": "continuous", "async_scheduling": async_scheduling},
    }
    answers, stats = run(path, prompts, 4, 1 + windowed + (32 if family == "Gemma3Text" else 0), num_drafts, **parts)
    assert answers == expected
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
