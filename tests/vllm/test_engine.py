"""vLLM's engine around our worker says what our own engine says: the same tokens, exactly, on both runners."""

import pytest
import vllm_engine
from vllm_engine import ask, completions, counter, generate, said_by_us, said_by_vllm

FEW_BLOCKS = 14  # of 16 tokens; a request of full length takes 10


@pytest.fixture(scope="module")
def ours(tiny_dir):
    with vllm_engine.our_engine(tiny_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def asks(ours):
    """Requests of many kinds; those that forbid or stop name tokens that would otherwise come."""
    random = vllm_engine.prompts([40, 1, 16, 17, 33, 25, 50, 7, 90, 12, 64, 30, 5, 31])
    plain = [one.token_ids for one in completions(ours, [ask(prompt, max_tokens=12) for prompt in random])]
    words = [word for name in ("one", "two", "red", "blue") for word in (name, " " + name)]
    ids = [token for word in words for token in ours.tokenizer.encode(word, add_special_tokens=False)]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.4}
    fields = [
        {"max_tokens": 12},
        {"max_tokens": 30, "stop_token_ids": [plain[1][5]], "min_tokens": 5},
        {"max_tokens": 12, "stop_token_ids": [plain[2][4]]},
        {"max_tokens": 12, "stop_token_ids": [plain[3][2], plain[3][6]], "min_tokens": 5},
        {"max_tokens": 24, **penalties},
        {"max_tokens": 9, "allowed_token_ids": ids, "bad_words": ["two", "red"]},
        {"max_tokens": 9, "logit_bias": {plain[6][0]: -100.0, plain[6][1]: 2.0, 777: 1.0}},
        {"max_tokens": 20, "allowed_token_ids": [*range(1000, 1040)], "temperature": 1.0, "seed": 1},
        {"max_tokens": 16, "temperature": 0.8, "top_k": 20, "seed": 2, **penalties},
        {"max_tokens": 40, "temperature": 1.0, "top_p": 0.7, "seed": 3},
        {"max_tokens": 8, "temperature": 1.3, "min_p": 0.05, "seed": 2**40},
        {"max_tokens": 13, "temperature": 1.0, "typical_p": 0.6, "seed": 5},
        {"max_tokens": 1, "temperature": 1.0, "seed": 6},
        {"max_tokens": 15, "temperature": 1.5, "top_n_sigma": 1.5, "seed": 7},
    ]
    return [ask(prompt, **these) for prompt, these in zip(random, fields, strict=True)]


@pytest.fixture(scope="module")
def expected(ours, asks):
    return completions(ours, asks)


def test_the_requests_are_of_many_kinds(expected):
    """The comparison below means something: requests stop and run, and say different things."""
    assert [one.finish_reason for one in expected].count("stop") == 2
    assert len(expected[3].token_ids) >= 5  # its stop tokens came before
    assert set(expected[5].text.replace("one", "1").replace("blue", "2").replace(" ", "")) <= {"1", "2"}
    assert len({one.token_ids[:3] for one in expected}) == len(expected)


@pytest.fixture(scope="module", params=vllm_engine.EACH)
def llm(request, tiny_dir):
    """Steps of 16 tokens: prompts arrive in pieces, beside requests that decode."""
    runner, asynchronous = vllm_engine.VARIANTS[request.param]
    with vllm_engine.vllm_engine(tiny_dir, vllm_engine.config(runner), asynchronous) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == asynchronous
        yield llm


def test_tokens_are_the_same(llm, asks, expected):
    outputs = generate(llm, asks)
    assert said_by_vllm(outputs) == said_by_us(expected)
    assert not any(output.num_cached_tokens for output in outputs)
    llm.collective_rpc("check_integrity")


def test_tokens_are_the_same_from_the_prefix_cache(llm, asks, expected):
    outputs = generate(llm, asks)
    assert said_by_vllm(outputs) == said_by_us(expected)
    blocks = [(len(one.prompt) - 1) // 16 for one in asks]
    assert [output.num_cached_tokens for output in outputs] == [16 * count for count in blocks]


def test_reset_prefix_cache_forgets_all(llm, asks, expected):
    generate(llm, asks[:1])
    assert llm.reset_prefix_cache()
    outputs = generate(llm, asks[:1])
    assert said_by_vllm(outputs) == said_by_us(expected[:1])
    assert not outputs[0].num_cached_tokens


def test_b125_children_of_a_request_are_what_their_seeds_say_and_leave_nothing(llm, ours):
    """vLLM gives child i the seed of the request plus i."""
    (prompt,) = vllm_engine.prompts([20], seed=1)
    sampled = {"temperature": 1.0, "max_tokens": 10}
    (output,) = generate(llm, [ask(prompt, **sampled, seed=30, n=3)])
    alone = completions(ours, [ask(prompt, **sampled, seed=30 + index) for index in range(3)])
    assert said_by_vllm([output]) == said_by_us(alone)
    llm.llm_engine.step()  # tells the worker of what has finished
    assert vllm_engine.num_requests(llm) == 0
    assert not llm.llm_engine.has_unfinished_requests()


def test_b98_the_longest_prompt(llm, ours):
    """One token less than the context gets one token; more is refused with both numbers."""
    from vllm.exceptions import VLLMValidationError

    longest = vllm_engine.prompts([vllm_engine.MAX_MODEL_LEN - 1])[0]
    expected = said_by_us(completions(ours, [ask(longest, max_tokens=1)]))
    wanted = [ask(longest, max_tokens=5)]
    assert said_by_vllm(generate(llm, wanted)) == expected
    for extra in (1, 2):
        both = f"(?=.*{len(longest) + extra})(?=.*{vllm_engine.MAX_MODEL_LEN})"
        with pytest.raises(VLLMValidationError, match=both):
            generate(llm, [ask([*longest, *[200] * extra], max_tokens=1)])
    assert said_by_vllm(generate(llm, wanted)) == expected


def test_requests_without_a_seed_differ(llm):
    (prompt,) = vllm_engine.prompts([10], seed=2)
    outputs = generate(llm, [ask(prompt, temperature=1.0, max_tokens=8)] * 4)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


@pytest.mark.parametrize(
    ("variant", "caching"), [("v1", True), ("v2", True), pytest.param("v2-waits", False, marks=pytest.mark.newest)]
)
def test_tokens_are_the_same_when_requests_are_preempted(tiny_dir, asks, expected, variant, caching):
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    options = {"num_gpu_blocks_override": FEW_BLOCKS, "enable_prefix_caching": caching}
    with vllm_engine.vllm_engine(tiny_dir, vllm_engine.config(runner), asynchronous, **options) as llm:
        assert said_by_vllm(generate(llm, asks)) == said_by_us(expected)
        assert counter(llm, "num_preemptions") > 0
        llm.collective_rpc("check_integrity")
        llm.llm_engine.step()
        assert vllm_engine.num_requests(llm) == 0
