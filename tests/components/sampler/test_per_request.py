"""Processors that are called for one request at a time."""

import logging

import attrs
import pytest
import torch

from workerkit.components.sampler.per_request import PerRequestStage
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.hooks import WorkerHooks, hookimpl
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.fakes_model import fake_tokens
from workerkit.framework.testing.registry import fake_config, fake_registry

VOCAB = 16


class Watcher:
    """Counts what is read on the host."""

    def __init__(self):
        self.parts = []

    @hookimpl
    def host_tokens_read(self, part):
        self.parts.append(part)


class Watching(Watcher, Observer):
    """The same as a part."""


class Scripted(PerRequestStage):
    """The request brings its function along, which only a test may do."""

    parameters = ("call",)

    def processor(self, params):
        return params.extra_args.get("call")


@pytest.fixture
def watcher():
    return Watcher()


@pytest.fixture
def bench(new_bench, watcher):
    hooks = WorkerHooks()
    hooks.join(0, "watcher", watcher)
    return new_bench(extra=(Scripted(hooks),))


def no_seven_as_third(prompt, output, logits):
    if len(output) == 2:
        logits[7] = -torch.inf
    return logits


def test_it_is_shown_prompt_output_and_drafts_row_by_row(bench, watcher):
    seen = []

    def note(prompt, output, logits):
        seen.append((prompt, output, logits.tolist()))
        return logits + 1

    bench.admit(0)
    bench.admit(1, (1, 2), (3,), extra_args={"call": note}, temperature=0.0)
    logits = torch.randn(4, VOCAB)
    rows = bench.process(logits, bench.decode(0, (1, (8, 9))))
    assert seen == [([1, 2], [3, *[8, 9][:have]], logits[1 + have].tolist()) for have in range(3)]
    assert torch.equal(rows, torch.cat((logits[:1], logits[1:] + 1)))
    assert watcher.parts == ["Scripted"], "once in a step"
    bench.process(logits[:1], bench.decode(0))
    assert watcher.parts == ["Scripted"], "nobody uses it: nobody waits"


def test_b113_chunks_and_preemptions_do_not_count_as_output(bench):
    """Ban 7 as the third output token: the same ids plainly, with the prompt in three chunks, and after resuming."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    logits[0, 3] = 4.0
    params = {"extra_args": {"call": no_seven_as_third}, "temperature": 0.0}

    def run(slot, tokens, until):
        while len(tokens) < until:
            batch = bench.decode(slot)
            tokens += bench.draw(logits, batch).tolist()
            bench.commit(batch, tokens[-1:])
        return tokens

    bench.admit(0, (1, 2, 3), **params)
    plain = run(0, [], 4)
    assert plain == [7, 7, 3, 7]
    bench.admit(1, (1, 2, 3), computed=0, **params)
    for chunk in (1, 1):
        batch = bench.batch([(1, ())], [chunk])
        bench.draw(logits, batch)
        bench.commit(batch, [])
    tokens = run(1, [], 2)
    bench.drop(1)
    bench.admit(4, (1, 2, 3), tokens, **params)
    assert run(4, tokens, 4) == plain


@pytest.mark.parametrize("problem", ["raises", "wrong shape", "no tensor"])
def test_a_processor_that_fails_fails_its_request_alone_and_is_logged_once(bench, caplog, problem):
    def fail(prompt, output, logits):
        logits.fill_(3.0)
        if problem == "raises":
            raise ZeroDivisionError("my own fault")
        return logits[:3] if problem == "wrong shape" else None

    bench.admit(0, extra_args={"call": fail}, temperature=0.0)
    bench.admit(1, extra_args={"call": no_seven_as_third}, temperature=0.0)
    bench.admit(2, temperature=0.0)
    logits = torch.randn(3, VOCAB)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            drawn = bench.draw(logits, bench.decode(0, 1, 2)).tolist()
            assert drawn == [-1, *logits[1:].argmax(1).tolist()]
    assert len(caplog.records) == 1
    bench.drop(0)
    bench.admit(0, extra_args={"call": no_seven_as_third}, temperature=0.0)
    assert bench.draw(logits[:1], bench.decode(0)).tolist() == [int(logits[0].argmax())], "the slot forgets"


def seven(prompt, output, logits):
    logits[7] += 1e6
    return logits


def test_a_config_selects_it_and_metrics_see_it():
    """Built by the container, in a whole worker: the request with a processor follows it, the other its model."""
    registry = fake_registry()
    registry.add(roles.SAMPLER_STAGE, "scripted", Scripted)
    registry.add(roles.OBSERVERS, "watcher", Watching)
    sampler = {"use": "torch", "stages": ["scripted"]}
    config = fake_config("v1", kernels="ordered", speculator="none", sampler=sampler, observers=["watcher"])
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with assemble(config, registry=registry) as assembly:
        assembly.engine.start()
        (plain,) = assembly.engine.generate([[1, 2]], params)
        (done,) = assembly.engine.generate([[1, 2]], attrs.evolve(params, extra_args={"call": seven}))
        assert list(plain.token_ids) == fake_tokens([1, 2], 3)
        assert done.token_ids == (7, 7, 7)
        (watcher,) = assembly.get_all(roles.OBSERVERS)
        assert watcher.parts == ["Scripted"] * 3


def test_it_declares_that_it_reads_on_the_host():
    assert Scripted.reads_host_tokens
    assert Scripted.reads_text
