"""Proposers of ours under vLLM's scheduler: tokens are those without speculation, and vLLM counts what was accepted."""

import pytest
import vllm_engine
from vllm_engine import ask, completions, counter, generate, said_by_us, said_by_vllm

COUNT = 3  # drafts a step
PROPOSERS = {
    "echo": {"speculator": "echo"},
    "ngram": {"speculator": {"use": "ngram", "min_n": 1}},
    "suffix": {"speculator": "suffix", "rejection": "standard"},
    "itself": {"speculator": "draft_model", "draft": "target", "rejection": "standard"},
}
ON_THE_HOST = ("suffix",)  # reads tokens there, so vLLM cannot plan ahead


@pytest.fixture(scope="module")
def ours(tiny_dir):
    with vllm_engine.our_engine(tiny_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def asks():
    """Output that repeats, which what looks back can guess, where few tokens are allowed. Some is sampled, with what
    changes probabilities; vLLM's front end refuses min_p and logit_bias together with any speculation."""
    few = [*range(2000, 2006)]
    fields = [
        {"max_tokens": 40, "allowed_token_ids": few},
        {"max_tokens": 25, "allowed_token_ids": few, "temperature": 1.0, "seed": 1},
        {"max_tokens": 20},
        {"max_tokens": 30, "allowed_token_ids": few, "frequency_penalty": 1.5},
        {"max_tokens": 18, "temperature": 0.9, "top_k": 5, "seed": 3},
        {"max_tokens": 33, "allowed_token_ids": few, "stop_token_ids": [few[2]], "min_tokens": 12},
        {"max_tokens": 1},
        {"max_tokens": 2, "allowed_token_ids": few[:1]},
        {"max_tokens": 30, "repetition_penalty": 1.3, "temperature": 1.0, "typical_p": 0.7, "seed": 4},
        {"max_tokens": 16, "allowed_token_ids": few, "logprobs": 2},
    ]
    lengths = [20, 3, 40, 16, 17, 60, 9, 33, 1, 25]
    return [ask(prompt, **these) for prompt, these in zip(vllm_engine.prompts(lengths), fields, strict=True)]


@pytest.fixture(scope="module")
def expected(ours, asks):
    return completions(ours, asks)


def started(tiny_dir, variant, proposer, **options):
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    limits = {"num_speculative_tokens": COUNT}
    workerkit = vllm_engine.config(runner, components=PROPOSERS[proposer], limits=limits)
    return vllm_engine.vllm_engine(tiny_dir, workerkit, asynchronous, **options)


def counts(llm):
    """drafts, draft tokens, accepted tokens, and these by their place."""
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    return [counter(llm, f"spec_decode_num_{name}") for name in names]


@pytest.mark.parametrize(
    "proposer", ["echo", "itself", *(pytest.param(name, marks=pytest.mark.newest) for name in ("ngram", "suffix"))]
)
@pytest.mark.parametrize("variant", vllm_engine.EACH)
def test_tokens_are_those_without_speculation(tiny_dir, asks, expected, variant, proposer):
    with started(tiny_dir, variant, proposer) as llm:
        ahead = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert ahead == (variant == "v2" and proposer not in ON_THE_HOST)
        for _ in range(2):  # from the prefix cache, too
            outputs = generate(llm, asks)
            assert said_by_vllm(outputs) == said_by_us(expected)
        for position, of_ours in zip(outputs[-1].outputs[0].logprobs, expected[-1].logprobs, strict=True):
            assert position[of_ours.token_id].logprob == pytest.approx(of_ours.logprob, abs=1e-5)
        llm.collective_rpc("check_integrity")
        drafts, tokens, accepted, by_place = counts(llm)
        assert 0 < accepted < tokens <= COUNT * drafts
        assert sum(by_place) == accepted
        assert by_place == sorted(by_place, reverse=True)


@pytest.mark.parametrize("variant", vllm_engine.EACH)
def test_b127_a_draft_that_is_the_target_is_accepted(tiny_dir, variant):
    """Greedy, alone: each step but the first accepts all of its drafts, and vLLM counts just that."""
    with started(tiny_dir, variant, "itself", max_num_batched_tokens=64) as llm:
        (output,) = generate(llm, [ask(vllm_engine.prompts([30])[0], max_tokens=1 + 5 * (COUNT + 1))])
        assert len(output.outputs[0].token_ids) == 1 + 5 * (COUNT + 1)
        assert counts(llm) == [5, 5 * COUNT, 5 * COUNT, [5] * COUNT]


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_a_draft_with_weights_of_its_own_has_layers_in_vllms_cache(tiny_dir, asks, expected, variant):
    """Its layers come to vLLM with the target's, and come back in vLLM's KVCacheConfig."""
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    draft = {"use": "checkpoint", "source": str(tiny_dir)}
    workerkit = vllm_engine.config(
        runner,
        components={"speculator": "draft_model", "draft": draft, "rejection": "standard"},
        limits={"num_speculative_tokens": COUNT},
    )
    with vllm_engine.vllm_engine(tiny_dir, workerkit, asynchronous) as llm:
        cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        assert sum(len(group.layer_names) for group in cache.kv_cache_groups) == 4
        layout = vllm_engine.worker_of(llm)._assembly.worker.layout
        assert sorted(index for group in layout.groups for index in group.layers) == [0, 1, 2, 3]
        assert layout.num_blocks == cache.num_blocks
        assert said_by_vllm(generate(llm, asks)) == said_by_us(expected)
        before = counts(llm)[1:3]  # of drafts that know nothing of allowed tokens and the like
        generate(llm, [ask(vllm_engine.prompts([30])[0], max_tokens=20)])
        tokens, accepted = (now - was for now, was in zip(counts(llm)[1:3], before, strict=True))
        assert accepted > tokens * 0.8


@pytest.mark.newest
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_tokens_are_the_same_when_requests_are_preempted(tiny_dir, asks, expected, variant, proposer):
    with started(tiny_dir, variant, proposer, num_gpu_blocks_override=11) as llm:
        assert said_by_vllm(generate(llm, asks)) == said_by_us(expected)
        assert counter(llm, "num_preemptions") > 0
        llm.collective_rpc("check_integrity")
        llm.llm_engine.step()
        assert vllm_engine.num_requests(llm) == 0


@pytest.mark.newest  # vLLM's own fault before 0.32
def test_b142_tokens_behind_a_stop_string_do_not_count(tiny_dir, ours):
    """A step may accept tokens behind the one that completes a stop string."""
    from vllm import SamplingParams

    (prompt,) = vllm_engine.prompts([30])
    (whole,) = completions(ours, [ask(prompt, max_tokens=21)])
    pieces = [ours.tokenizer.decode([token]) for token in whole.token_ids]
    with started(tiny_dir, "v2", "itself") as llm:
        for place in range(4, 12):
            stop = pieces[place].strip()
            end = next(end for end in range(1, 22) if stop in ours.tokenizer.decode(whole.token_ids[:end]))
            params = SamplingParams(temperature=0.0, max_tokens=21, stop=[stop], logprobs=0, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            (stopped,) = output.outputs
            assert tuple(stopped.token_ids) == whole.token_ids[:end]
            assert len(stopped.logprobs) == end
            assert stop not in stopped.text
