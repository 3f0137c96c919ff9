"""vLLM's own engine core and scheduler around tiny workers of ours, in both of its protocols: what our engine says."""

import random

import pytest
from letters import Letters
from vllm import SamplingParams
from vllm.v1.engine import FinishReason
from vllm_steps import PROTOCOLS, Core, vllm_config, workerkit_config, write_config_json

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces import sampling_params as ours
from workerkit.framework.plugins import load_plugins

VARIANTS = {"v1": ("v1", False), "v2": ("v2", True), "v2 waits": ("v2", False)}  # runner, asynchronous scheduling
SPECULATION = {"limits": {"num_speculative_tokens": 3}, "components": {"speculator": "ngram"}}
LENGTHS = (5, 1, 30, 9, 17, 2, 12, 40)


def asks():
    """(prompt, parameters that both sides know); long texts, so that they compete for blocks."""
    numbers = random.Random(0)
    for index, length in enumerate(LENGTHS):
        drawn = {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0.0}
        yield [numbers.randrange(60) for _ in range(length)], {"max_tokens": 20, "ignore_eos": True, **drawn}


REPORTS = ([*range(40)], {"max_tokens": 9, "ignore_eos": True, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1})


@pytest.fixture(scope="module")
def standalone():
    """Completions of the standalone engine: of all that are asked, then of REPORTS."""
    registry = load_plugins().registry
    registry.add(roles.TOKENIZER, "letters", Letters)
    source = {"model": {"source": "random", "max_model_len": 64, "dtype": "float32"}, "cache": {"num_blocks": 300}}
    with assemble(workerkit_config(**source, components={"tokenizer": "letters"}), registry=registry) as assembly:
        assembly.engine.start()
        prompts, fields = zip(*asks(), REPORTS, strict=True)
        return assembly.engine.generate([*prompts], [ours.SamplingParams(**one) for one in fields])


@pytest.fixture(scope="module")
def expected(standalone):
    return [list(one.token_ids) for one in standalone[:-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_config_json(tmp_path_factory.mktemp("model"))


def make(folder, variant, **sections):
    """20 blocks of 4 tokens, where a request of full length takes 16."""
    runner, ahead = VARIANTS[variant]
    options = {"num_gpu_blocks_override": 20, "block_size": 4, "dtype": "float32", "async_scheduling": ahead}
    config = vllm_config(folder, workerkit_config(runner, **sections), **options)
    assert config.scheduler_config.async_scheduling == ahead
    return Core(config)


@pytest.fixture(scope="module", params=VARIANTS)
def shared(request, folder):
    core = make(folder, request.param)
    yield core
    core.core.shutdown()


@pytest.fixture(params=PROTOCOLS)
def core(request, shared):
    shared.begin(request.param)
    return shared


def ask(core):
    for index, (prompt, fields) in enumerate(asks()):
        core.add(str(index), prompt, SamplingParams(**fields))
    return core


def tokens(told):
    return [told[str(index)].tokens for index in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("variant", "sections"),
    [("v1", {}), ("v2", {}), ("v1", SPECULATION), ("v2", SPECULATION)],
    ids=["v1", "v2", "v1 drafts", "v2 drafts"],
)
def test_both_protocols_lead_to_the_same_steps_and_the_tokens_of_our_engine(folder, expected, variant, sections):
    steps = []
    for protocol in PROTOCOLS:
        core = make(folder, variant, **sections)
        core.begin(protocol)
        assert tokens(ask(core).run()) == expected
        assert len(core.preempted()) > 2
        assert bool(sections) == any(step.scheduled_drafts for step in core.steps)
        steps.append(core.steps)
        core.core.shutdown()
    assert steps[0] == steps[1]


def test_all_are_preempted_at_once_and_come_back_in_the_next_step(core, standalone, expected):
    """`reset_prefix_cache` of running requests: tokens and log-probabilities that were on their way are dropped."""
    core.add("reports", REPORTS[0], SamplingParams(**REPORTS[1]))
    ask(core)
    for _ in range(12):
        core.step()
        assert core.core.reset_prefix_cache(reset_running_requests=True)
    told = core.run()
    assert len(core.preempted()) > 12
    assert tokens(told) == expected
    told, wanted = told["reports"], standalone[-1]
    assert told.tokens == [*wanted.token_ids]
    assert told.chosen == pytest.approx([one.logprob for one in wanted.logprobs], abs=1e-4)
    [prompt] = told.prompts
    assert prompt.logprob_token_ids[:, 0].tolist() == REPORTS[0][1:]
    assert prompt.logprobs[:, 0].tolist() == pytest.approx(
        [one.logprob for one in wanted.prompt_logprobs[1:]], abs=1e-4
    )


def fails_at(token):
    """No token is possible after the first ones."""
    params = SamplingParams(allowed_token_ids=[7], max_tokens=9, temperature=0.0, bad_words=["x"])
    params._bad_words_token_ids = [[7] * token]
    return params


REFUSED = SamplingParams(thinking_token_budget=3)


def test_a_request_that_fails_ends_with_an_error_and_no_other_notices(core, expected):
    failing = {"at once": fails_at(1), "later": fails_at(4), "refused": REFUSED}
    for name, params in failing.items():
        core.add(name, [1, 2, 3], params)
    told = ask(core).run()
    assert tokens(told) == expected
    assert [told[name].tokens for name in failing] == [[], [7, 7, 7], []]
    assert {told[name].finish_reason for name in failing} == {FinishReason.ERROR}
    assert "no token was possible" in told["later"].stop_reason
    assert "sampling_params.thinking_token_budget" in told["refused"].stop_reason
    core.add("at once", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))  # its id is free
    again = core.run()["at once"]
    assert (again.finish_reason, len(again.tokens)) == (FinishReason.LENGTH, 2)


def test_a_step_of_refused_requests_only(core):
    core.add("refused", [1, 2, 3], REFUSED)
    assert core.run()["refused"].finish_reason == FinishReason.ERROR
    assert not any(step.num_scheduled_tokens for step in core.steps)
