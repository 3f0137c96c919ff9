"""The stage alone, in a worker made of fakes, and through the suite that defines what a sampler stage is."""

from typing import ClassVar

import pytest

from workerkit.framework import roles
from workerkit.framework.errors import ConfigError, RequestError, UnsupportedError
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.conformance import SamplerStageConformance
from workerkit.framework.testing.fakes_model import fake_tokens
from workerkit.framework.testing.registry import fake_config

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def config_of(runner, **options):
    sampler = {"use": "torch", "stages": [{"use": "ban_token", **options}]}
    return fake_config(runner, speculator="none", kernels="ordered", sampler=sampler)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_banned_token_is_not_sampled(runner, assembly_factory):
    (favourite,) = fake_tokens(PROMPT, 1)
    other = assembly_factory(config_of(runner, token_ids=[favourite]))
    same = assembly_factory(config_of(runner, token_ids=[favourite + 1]))
    tokens = []
    for assembly in (other, same):
        assembly.engine.start()
        (done,) = assembly.engine.generate([PROMPT], GREEDY)
        tokens.extend(done.token_ids)
    assert tokens[0] != favourite
    assert tokens[1] == favourite


@pytest.mark.parametrize(
    ("token_ids", "problem"),
    [
        ([-1], "token_ids"),
        (["a"], "token_ids[0]: expected int, got 'a' (str)"),
        (7, "token_ids: expected a list, got 7 (int)"),
    ],
)
def test_wrong_options_are_refused_with_their_path(token_ids, problem, assembly_factory):
    with pytest.raises(ConfigError) as error:
        assembly_factory(config_of("v1", token_ids=token_ids))
    assert f"components.sampler.stages[0].{problem}" in str(error.value)


def test_a_token_outside_the_vocabulary_is_refused_when_the_worker_starts(assembly_factory):
    assembly = assembly_factory(config_of("v1", token_ids=[1, 100_000]))
    with pytest.raises(UnsupportedError, match="100000 is outside"):
        assembly.worker.start()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_request_may_ban_tokens_for_itself(runner, assembly_factory):
    favourite, *_ = fake_tokens(PROMPT, 1)
    own = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args={"ban_token": [favourite]})
    engine = assembly_factory(config_of(runner)).engine
    engine.start()
    tokens = [engine.generate([PROMPT], params)[0].token_ids[0] for params in (own, GREEDY)]
    assert tokens[0] != favourite
    assert tokens[1] == favourite, "the next request in the slot is free again"


@pytest.mark.parametrize(
    ("value", "problem"), [("7", "right: a list of token ids"), ([7, 100_000], "has 100000"), ([-1], "has -1")]
)
def test_wrong_parameters_of_a_request_are_refused(value, problem, assembly_factory):
    assembly = assembly_factory(config_of("v1"))
    assembly.worker.start()
    with pytest.raises(RequestError, match=problem):
        assembly.get(roles.SAMPLER).check(SamplingParams(extra_args={"ban_token": value}))


class TestConformance(SamplerStageConformance):
    names: ClassVar = ("ban_token",)
    using: ClassVar = {"ban_token": {"extra_args": {"ban_token": [3, 9]}}}

    def make_config(self, name, registry):
        return config_of("v1")
