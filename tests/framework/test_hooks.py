"""Step hooks: order, isolation of failing observers, refusal of what cannot be right, and their documentation."""

import inspect
import logging
import pathlib

import pytest

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import RegistrationError
from workerkit.framework.hooks import STEP_HOOKS, PluginSpec, StepSpec, WorkerHooks, hook_methods, hookimpl
from workerkit.framework.interfaces.observer import Observer, StepHooks
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.fakes import FakeObserver
from workerkit.framework.testing.fakes_model import fake_tokens
from workerkit.framework.testing.fakes_sampling import FakeSampler
from workerkit.framework.testing.registry import fake_config

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "hooks.md"


class Named:
    """Writes its name into a shared list."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    @hookimpl
    def step_started(self):
        self.log.append(self.name)


def test_hooks_are_called_in_config_order_whatever_the_order_of_construction():
    hooks, log = WorkerHooks(), []
    for order, name in ((2, "c"), (0, "a"), (1, "b")):
        hooks.join(order, name, Named(name, log))
    hooks.step_started(output=None)
    assert log == ["a", "b", "c"]


def test_config_order_in_a_worker(workerkit_registry):
    log = []

    class One(Observer):
        """Says one."""

        @hookimpl
        def step_finished(self):
            log.append("one")

    class Two(Observer):
        """Says two."""

        @hookimpl
        def step_finished(self, batch):
            log.append("two")

    workerkit_registry.add(roles.OBSERVERS, "one", One)
    workerkit_registry.add(roles.OBSERVERS, "two", Two)
    for names in (["one", "two"], ["two", "one"]):
        log.clear()
        assembly = assemble(fake_config("v2", speculator="none", observers=names), registry=workerkit_registry)
        assembly.engine.start()
        assembly.engine.generate([1], GREEDY)
        assert log == names * 4


def test_arguments_are_those_of_the_spec_and_may_be_left_out():
    seen = []

    class Picky:
        @hookimpl
        def forward_finished(self, output):
            seen.append(output)

        @hookimpl
        def tokens_sampled(self, output, batch):
            seen.append((batch, output))

    hooks = WorkerHooks()
    hooks.join(0, "picky", Picky())
    hooks.forward_finished(batch="batch", output="hidden")
    hooks.tokens_sampled(batch="batch", output="tokens")
    assert seen == ["hidden", ("batch", "tokens")]


def test_an_observers_error_is_logged_once_switches_it_off_and_ends_no_step(workerkit_registry, caplog):
    calls = []

    class Broken(Observer):
        """Fails in its second hook of the first step."""

        @hookimpl
        def step_started(self):
            calls.append("step_started")

        @hookimpl
        def batch_prepared(self):
            calls.append("batch_prepared")
            raise ValueError("no luck")

        @hookimpl
        def step_finished(self):
            calls.append("step_finished")

    workerkit_registry.add(roles.OBSERVERS, "broken", Broken)
    for runner in ("v1", "v2"):
        calls.clear()
        caplog.clear()
        config = fake_config(runner, worker="npu", speculator="none", observers=["fake", "broken"])
        assembly = assemble(config, registry=workerkit_registry)
        assembly.engine.start()
        with caplog.at_level(logging.WARNING, logger="workerkit"):
            (done,) = assembly.engine.generate([1], GREEDY)
        assert list(done.token_ids) == fake_tokens([1], 4)
        assert calls == ["step_started", "batch_prepared"]
        records = [r for r in caplog.records if "switched off" in r.getMessage()]
        assert len(records) == 1
        assert records[0].exc_info
        assert assembly.worker.check_health().degraded == ("observers[1]: batch_prepared: ValueError: no luck",)
        assert len(assembly.get_all(roles.OBSERVERS)[0].seen) == 4 * (len(STEP_HOOKS) - 2), (
            "the other goes on"
        )  # no part reads tokens on the host
        assembly.shutdown()


def test_two_observers_that_fail_in_the_same_hook_are_both_switched_off():
    class Bad(Named):
        @hookimpl
        def step_started(self):
            super().step_started()
            raise RuntimeError

    hooks, log = WorkerHooks(), []
    for order, part in enumerate([Bad("a", log), Bad("b", log), Named("c", log)]):
        hooks.join(order, part.name, part)
    hooks.step_started(output=None)
    hooks.step_started(output=None)
    assert log == ["a", "b", "c", "c"]
    assert len(hooks.failures) == 2


def test_no_property_is_evaluated_when_a_part_is_looked_at():
    class Touchy(Named):
        @property
        def weights(self):
            raise AssertionError("evaluated")

    assert set(hook_methods(Touchy("a", []))) == {"step_started"}
    WorkerHooks().join(0, "touchy", Touchy("a", []))


def test_a_hook_that_does_not_exist_is_refused():
    class Misspelt:
        @hookimpl
        def step_startd(self):
            pass

    with pytest.raises(RegistrationError, match="step_startd"):
        WorkerHooks().join(0, "misspelt", Misspelt())


def test_an_argument_that_does_not_exist_is_refused():
    class Wrong:
        @hookimpl
        def step_started(self, batch):
            pass

    with pytest.raises(RegistrationError, match="batch"):
        WorkerHooks().join(0, "wrong", Wrong())


def test_a_refused_part_fails_the_build_and_names_itself(workerkit_registry):
    class Misspelt(FakeSampler):
        """Has a hook of its own invention."""

        @hookimpl
        def token_sampled(self):
            pass

    workerkit_registry.add(roles.SAMPLER, "misspelt", Misspelt)
    assembly = assemble(fake_config(sampler="misspelt"), registry=workerkit_registry)
    with pytest.raises(RegistrationError, match=r"sampler \(Misspelt\).*token_sampled"):
        assembly.get(roles.SAMPLER)


def test_a_part_without_hooks_is_let_pass_and_one_joins_once():
    hooks, log = WorkerHooks(), []
    hooks.join(0, "plain", object())
    part = Named("a", log)
    hooks.join(0, "a", part)
    hooks.join(0, "a", part)
    hooks.step_started(output=None)
    assert log == ["a"]


def test_every_part_may_observe_not_only_observers(workerkit_registry):
    class Watching(FakeSampler):
        """Counts its worker's steps."""

        steps = 0

        @hookimpl
        def step_finished(self):
            self.steps += 1

    workerkit_registry.add(roles.SAMPLER, "watching", Watching)
    for runner in ("v1", "v2"):
        assembly = assemble(fake_config(runner, speculator="none", sampler="watching"), registry=workerkit_registry)
        assembly.engine.start()
        assembly.engine.generate([1], GREEDY)
        assert assembly.get(roles.SAMPLER).steps == 4


def signature(function):
    return ", ".join(name for name in inspect.signature(function).parameters if name != "self")


def test_each_hook_is_fired_and_watched_under_the_same_arguments():
    assert set(STEP_HOOKS) == {
        "step_started",
        "batch_prepared",
        "forward_finished",
        "tokens_sampled",
        "step_finished",
        "output_ready",
        "host_tokens_read",
        "drafts_proposed",
    }
    for name in STEP_HOOKS:
        assert signature(getattr(StepSpec, name)) == signature(getattr(StepHooks, name))
        assert callable(getattr(FakeObserver, name))


def test_hooks_are_documented_with_their_exact_arguments():
    text = DOCS.read_text()
    specs = [
        (spec, name) for spec in (PluginSpec, StepSpec) for name, _ in inspect.getmembers(spec, inspect.isfunction)
    ]
    assert len(specs) == 9
    for spec, name in specs:
        assert f"- `{name}({signature(getattr(spec, name))})`" in text, name
    for line in text.splitlines():
        if line.startswith("- `"):
            assert line.split("`")[1].partition("(")[0] in {name for _, name in specs}, (
                f"documented, does not exist: {line}"
            )
