"""Requests that fail, are refused or are aborted: the others get their tokens, and nothing is left of any."""

import random

import pytest
import vllm_engine
import vllm_plugin
from vllm_engine import ask, completions, generate, said_by_us, said_by_vllm

STAGES = ["min_tokens", "temperature", "top_k_top_p", "typical_p", "poison"]
SPECULATION = {
    "none": ({}, 0),
    "echo": ({"speculator": "echo"}, 3),
    "itself": ({"speculator": "draft_model", "draft": "target", "rejection": "standard"}, 3),
}
ESSENTIAL = [("v1", "none"), ("v2", "none"), ("v2", "echo")]
OTHERS = [("v2-waits", "none"), ("v1", "echo"), ("v2", "itself")]
EACH = [*ESSENTIAL, *(pytest.param(other, marks=pytest.mark.newest) for other in OTHERS)]


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    with vllm_plugin.installed(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(scope="module")
def asks():
    lengths = [5, 16, 40, 30, 1, 22, 70, 18, 33]
    return [ask(prompt, max_tokens=8 + 2 * row) for row, prompt in enumerate(vllm_engine.prompts(lengths))]


@pytest.fixture(scope="module")
def expected(tiny_dir, asks):
    with vllm_engine.our_engine(tiny_dir) as ours:
        return said_by_us(completions(ours, asks))


@pytest.fixture(scope="module", params=EACH, ids="-".join)
def llm(request, tiny_dir):
    variant, speculation = request.param
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    components, count = SPECULATION[speculation]
    workerkit = vllm_engine.config(
        runner,
        components={**components, "sampler": {"use": "torch", "stages": STAGES}},
        limits={"num_speculative_tokens": count},
    )
    with vllm_engine.vllm_engine(tiny_dir, workerkit, asynchronous, num_gpu_blocks_override=20) as llm:
        yield llm


def assert_nothing_is_left(llm):
    """In the scheduler, in vLLM's front end, in the adapter and in the worker, which hears of it with one more step."""
    engine = llm.llm_engine
    engine.step()
    engine.collective_rpc("check_integrity")
    scheduler, ours = engine.engine_core.engine_core.scheduler, vllm_engine.worker_of(llm)._requests
    assert vllm_engine.num_requests(llm) == 0
    assert not any((scheduler.requests, engine.output_processor.request_states, ours._live, ours._refused))
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 20 - 1


def test_a_request_that_fails_ends_alone(llm, asks, expected):
    """Logits that are not a number: at once, behind a prompt in pieces, and after some tokens."""
    poison = {0: 3, 2: 0, 5: 1, 6: 6}
    mixed = [
        ask(one.prompt, **one.fields, **({"extra_args": {"poison": poison[row]}} if row in poison else {}))
        for row, one in enumerate(asks)
    ]
    for row, (output, (tokens, _)) in enumerate(zip(generate(llm, mixed), expected, strict=True)):
        (got,) = output.outputs
        if row not in poison:
            assert said_by_vllm([output]) == [expected[row]]
            continue
        assert got.finish_reason == "error"
        assert "not finite" in got.stop_reason
        # Tokens that the failing step accepted before its failure are lost with it.
        assert tuple(got.token_ids) == tokens[: len(got.token_ids)]
        assert poison[row] - 3 <= len(got.token_ids) <= poison[row]
    assert_nothing_is_left(llm)
    assert said_by_vllm(generate(llm, asks)) == expected
    assert_nothing_is_left(llm)


def test_a_request_that_the_worker_refuses_ends_alone(llm, asks, expected):
    """Parameters that only its parts can judge: vLLM learns of it when they are scheduled."""
    wrong = {1: "soon", 6: [1], 8: 1.5}
    mixed = [
        ask(one.prompt, **one.fields, **({"extra_args": {"poison": wrong[row]}} if row in wrong else {}))
        for row, one in enumerate(asks)
    ]
    for row, output in enumerate(generate(llm, mixed)):
        (got,) = output.outputs
        if row not in wrong:
            assert said_by_vllm([output]) == [expected[row]]
            continue
        assert (got.finish_reason, list(got.token_ids)) == ("error", [])
        assert f"poison is {wrong[row]!r}" in got.stop_reason
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"poisson": 1}, "no part of this worker reads 'poisson'; did you mean 'poison'"),
        ({"typical_p": 7.0}, "'typical_p' must be <= 1.0: 7.0"),
    ],
)
def test_parameters_are_refused_before_the_engine_sees_them(llm, asks, expected, extra, why):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=why):
        generate(llm, [*asks, ask([200], extra_args=extra)])
    assert not llm.llm_engine.has_unfinished_requests()
    assert said_by_vllm(generate(llm, asks)) == expected


def test_b59_b60_b125_random_aborts(llm, asks, expected):
    """200 steps with requests that come, go, and come again under the same names; the rest gets its tokens."""
    engine, numbers = llm.llm_engine, random.Random(5)
    live, num_aborted, num_done = {}, 0, 0

    def step():
        nonlocal num_done
        for output in engine.step():
            if output.finished:
                assert said_by_vllm([output]) == [expected[live.pop(output.request_id)]]
                num_done += 1

    for count in range(200):
        for _ in range(numbers.choice((0, 0, 1, 2))):
            name, row = f"name-{numbers.randrange(14)}", numbers.randrange(len(asks))
            if name in live and numbers.random() < 0.5:
                engine.abort_request([name])
                num_aborted += 1
                live.pop(name)  # and comes again before any step
            if name not in live:
                live[name] = row
                engine.add_request(name, {"prompt_token_ids": [*asks[row].prompt]}, asks[row].vllm_params())
        if live and numbers.random() < 0.2:
            name = numbers.choice(sorted(live))
            engine.abort_request([name])
            num_aborted += 1
            live.pop(name)
        step()
        if count % 20 == 0:
            engine.collective_rpc("check_integrity")
    while engine.has_unfinished_requests():
        step()
    assert not live
    assert min(num_aborted, num_done) > 20
    assert_nothing_is_left(llm)


def test_an_abort_of_everything(llm, asks, expected):
    """The worker hears of it although no request is left that a step would be for."""
    engine = llm.llm_engine
    for steps in (0, 1, 2, 5):
        for row, one in enumerate(asks):
            engine.add_request(str(row), {"prompt_token_ids": [*one.prompt]}, one.vllm_params())
        for _ in range(steps):
            engine.step()
        engine.abort_request([str(row) for row in range(len(asks))])
        assert not engine.has_unfinished_requests()
        engine.step()
        assert_nothing_is_left(llm)
    assert said_by_vllm(generate(llm, asks)) == expected
