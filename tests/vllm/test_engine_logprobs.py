"""Log-probabilities through vLLM's engine: the values of our own engine, in the shape that vLLM documents."""

import pytest
import vllm_engine
from vllm_engine import VOCAB, ask, completions, generate

CHOSEN = (11, 4000, 12345)


@pytest.fixture(scope="module")
def ours(tiny_dir):
    with vllm_engine.our_engine(tiny_dir) as engine:
        yield engine


@pytest.fixture(scope="module", params=vllm_engine.EACH)
def llm(request, tiny_dir):
    runner, asynchronous = vllm_engine.VARIANTS[request.param]
    with vllm_engine.vllm_engine(tiny_dir, vllm_engine.config(runner), asynchronous, max_logprobs=-1) as llm:
        yield llm


def both(llm, ours, asks):
    return zip(generate(llm, asks), completions(ours, asks), strict=True)


def check(position, expected, columns):
    """One position of vLLM's answer, a dictionary by token, against ours; `columns` are those that vLLM shows beside
    the token itself."""
    assert [*position] == [*dict.fromkeys([expected.token_id, *(token for token, _ in columns)])]
    known = dict(columns) | {expected.token_id: expected.logprob}
    assert max(abs(entry.logprob - known[token]) for token, entry in position.items()) <= 1e-5
    assert position[expected.token_id].rank == expected.rank


def check_all(positions, expected):
    assert len(positions) == len(expected)
    for position, ours in zip(positions, expected, strict=True):
        check(position, ours, ours.top)


def test_logprobs_of_sampled_tokens(llm, ours):
    """Requests that ask for different numbers, or for none, share the steps."""
    numbers = [0, 3, None, 1, 20, 5]
    asks = [
        ask(prompt, max_tokens=6, logprobs=number, temperature=0.7 * (number == 5), seed=9)
        for prompt, number in zip(vllm_engine.prompts([30, 4, 21, 40, 9, 12]), numbers, strict=True)
    ]
    for (output, expected), number in zip(both(llm, ours, asks), numbers, strict=True):
        (sampled,) = output.outputs
        assert tuple(sampled.token_ids) == expected.token_ids
        if number is None:
            assert sampled.logprobs is None
            continue
        check_all(sampled.logprobs, expected.logprobs)
        assert all(number <= len(position) <= number + 1 for position in sampled.logprobs)


def test_all_logprobs(llm, ours):
    asks = [ask(prompt, max_tokens=2, logprobs=-1) for prompt in vllm_engine.prompts([5, 18])]
    for output, expected in both(llm, ours, asks):
        assert len(output.outputs[0].logprobs[0]) == VOCAB
        check_all(output.outputs[0].logprobs, expected.logprobs)


def test_logprobs_of_chosen_tokens(llm, ours):
    """vLLM then shows no most likely ones, but the token itself and the chosen ones; beside a request with others."""
    prompts = vllm_engine.prompts([20, 20])
    fields = [{"logprob_token_ids": [*CHOSEN]}, {"logprobs": 4}]
    asks = [ask(prompt, max_tokens=4, **these) for prompt, these in zip(prompts, fields, strict=True)]
    (chosen, expected), (likely, expected_likely) = both(llm, ours, asks)
    assert len(chosen.outputs[0].logprobs) == 4
    for position, of_ours in zip(chosen.outputs[0].logprobs, expected.logprobs, strict=True):
        assert tuple(token for token, _ in of_ours.chosen) == CHOSEN
        check(position, of_ours, of_ours.chosen)
    check_all(likely.outputs[0].logprobs, expected_likely.logprobs)


def test_b52_prompt_logprobs_across_chunks(llm, ours):
    """Steps of 16 tokens: prompts that end before, at and behind a step's end, alone and together."""
    asks = [
        ask(prompt, max_tokens=3, prompt_logprobs=number, logprobs=1)
        for prompt, number in zip(vllm_engine.prompts([1, 2, 15, 16, 17, 32, 50]), [2, 0, 1, 2, 3, 1, 5], strict=True)
    ]
    for wanted in ([asks[3]], [asks[5]], asks):
        for output, expected in both(llm, ours, wanted):
            assert output.prompt_logprobs[0] is None
            check_all(output.prompt_logprobs[1:], expected.prompt_logprobs[1:])
            check_all(output.outputs[0].logprobs, expected.logprobs)


def test_all_prompt_logprobs(llm, ours):
    ((output, expected),) = both(llm, ours, [ask(vllm_engine.prompts([5])[0], max_tokens=1, prompt_logprobs=-1)])
    assert [len(position) for position in output.prompt_logprobs[1:]] == [VOCAB] * 4
    check_all(output.prompt_logprobs[1:], expected.prompt_logprobs[1:])


def test_prompt_logprobs_are_delivered_once(llm):
    """Exactly one answer of a request carries them, also when its text is streamed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(max_tokens=5, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    engine = llm.llm_engine
    engine.add_request("streamed", {"prompt_token_ids": vllm_engine.prompts([40])[0]}, params)
    carried = []
    while engine.has_unfinished_requests():
        carried += [len(output.prompt_logprobs or ()) for output in engine.step()]
    assert carried == [40, 0, 0, 0, 0]


@pytest.mark.newest
@pytest.mark.parametrize(("variant"), ["v1", "v2"])
def test_prompt_logprobs_survive_preemption(tiny_dir, ours, variant):
    """A prompt that is computed anew is not reported anew."""
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    asks = [ask(prompt, max_tokens=60, prompt_logprobs=1) for prompt in vllm_engine.prompts([50, 60, 70])]
    options = {"num_gpu_blocks_override": 14}
    with vllm_engine.vllm_engine(tiny_dir, vllm_engine.config(runner), asynchronous, **options) as llm:
        for output, expected in both(llm, ours, asks):
            assert tuple(output.outputs[0].token_ids) == expected.token_ids
            check_all(output.prompt_logprobs[1:], expected.prompt_logprobs[1:])
        assert vllm_engine.counter(llm, "num_preemptions") > 0
