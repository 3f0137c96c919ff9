"""The stage alone, in a worker made of fakes, and through the suite that defines what a sampler stage is."""

from typing import ClassVar

import pytest
import torch

from workerkit.framework.errors import ConfigError, UnsupportedError
from workerkit.framework.interfaces.request import SamplingParams
from workerkit.framework.testing.conformance import SamplerStageConformance, request
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
        ([], "token_ids"),
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


class TestConformance(SamplerStageConformance):
    names: ClassVar = ("ban_token",)

    def make_config(self, name, registry):
        return config_of("v1", token_ids=[3, 9])

    def test_rows_that_do_not_use_it_are_left_as_they_are(self, part):
        """There are none: the stage is for every request. What it leaves alone is every other token."""
        part.add(0, request())
        logits = self._logits(2)
        result = part.apply(logits.clone(), self._context([0, 1]))
        changed = (result != logits).nonzero().tolist()
        assert changed == [[0, 3], [0, 9], [1, 3], [1, 9]]
        assert torch.isinf(result[:, [3, 9]]).all()
