"""Assembly: what is found before anything is built, what is built when, and what overrides share."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ConfigError, StageError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import KVLayout, RowBlockTables
from workerkit.framework.interfaces.model import LoadedModel, ModelLibrary, ModelLoader
from workerkit.framework.interfaces.sampling import Sampler
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.stages import KVStage, Later
from workerkit.framework.testing.fakes_model import FakeLibrary, FakeLoader, fake_tokens
from workerkit.framework.testing.fakes_sampling import FakeSampler
from workerkit.framework.testing.recording import Recorder
from workerkit.framework.testing.registry import fake_config

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def problems_of(registry, config, **overrides):
    with pytest.raises(ConfigError) as error:
        assemble(config, overrides, registry)
    return "\n".join(error.value.problems)


# --- before anything is built


def test_a_circle_is_found_and_shown(workerkit_registry):
    built = []

    class Chicken(FakeLoader):
        """Needs the egg."""

        def __init__(self, library: ModelLibrary) -> None:
            built.append(self)

    class Egg(FakeLibrary):
        """Needs the chicken."""

        def __init__(self, loader: ModelLoader) -> None:
            built.append(self)

    workerkit_registry.add(roles.LOADER, "chicken", Chicken)
    workerkit_registry.add(roles.MODEL_LIBRARY, "egg", Egg)
    text = problems_of(workerkit_registry, fake_config(loader="chicken", model_library="egg"))
    assert "in a circle" in text
    assert "loader" in text
    assert "model_library" in text
    assert built == []


def test_a_circle_through_later_is_allowed(workerkit_registry):
    class Chicken(FakeLoader):
        """Asks for the egg when it is wanted."""

        def __init__(self, library: Later[ModelLibrary]) -> None:
            self.library = library

    class Egg(FakeLibrary):
        """Needs the chicken."""

        def __init__(self, loader: ModelLoader) -> None:
            self.loader = loader

    workerkit_registry.add(roles.LOADER, "chicken", Chicken)
    workerkit_registry.add(roles.MODEL_LIBRARY, "egg", Egg)
    assembly = assemble(fake_config(loader="chicken", model_library="egg"), registry=workerkit_registry)
    chicken = assembly.get(roles.LOADER)
    assert chicken.library().loader is chicken
    assert chicken.library() is chicken.library()


def test_a_part_without_its_role_is_missing_by_name(workerkit_registry):
    """eplb_policy has no default: who asks for it has to have it named."""
    from workerkit.framework.interfaces.extensions import EPLBPolicy
    from workerkit.framework.testing.fakes import FakeEPLB

    class Balanced(FakeEPLB):
        """Asks for a policy."""

        def __init__(self, policy: EPLBPolicy) -> None:
            self.policy = policy

    workerkit_registry.add(roles.EPLB, "balanced", Balanced)
    config = fake_config(eplb="balanced")
    del config["components"]["eplb_policy"]
    assert "components.eplb needs components.eplb_policy (parameter 'policy')" in problems_of(
        workerkit_registry, config
    )


def test_all_problems_come_in_one_report(workerkit_registry):
    config = fake_config(sampler={"use": "torch", "top_kk": 5, "temperature": "hot"}, lora="adaptors", samplr="torch")
    config["modell"] = {}
    config["limits"]["max_num_reqs"] = 0
    text = problems_of(workerkit_registry, config)
    for piece in (
        "components.sampler: unknown key 'top_kk'; did you mean 'top_k'?",
        "components.sampler.temperature",
        "no lora 'adaptors'",
        "components.samplr: no such role; did you mean 'sampler'?",
        "modell: no such section; did you mean 'model'?",
        "limits.max_num_reqs",
    ):
        assert piece in text, piece


def test_a_sub_interface_names_the_implementations_that_fit(workerkit_registry):
    text = problems_of(workerkit_registry, fake_config("v1", block_table="ascend"))
    assert "components.runner 'v1' needs a RowBlockTables" in text
    assert "components.block_table 'ascend' is none" in text
    fitting = text.partition("right would be: ")[2]
    assert "multi_group" in fitting
    assert "fake_slots" not in fitting


def test_the_runner_brings_the_defaults_that_go_with_it(workerkit_registry):
    config = fake_config("v1")
    for role in ("request_state", "input_batch", "block_table"):
        del config["components"][role]
    one = assemble(config, registry=workerkit_registry).plan
    two = assemble(config, {"components.runner": "v2"}, workerkit_registry).plan
    names = ("request_state", "input_batch", "block_table")
    assert [one.nodes[n].name for n in names] == ["host", "persistent", "multi_group"]
    assert [two.nodes[n].name for n in names] == ["ascend", "ascend", "ascend"]
    assert two.nodes["block_table"].why == "goes with runner: v2"


def test_only_a_worker_may_enter_the_kv_stage(workerkit_registry):
    class Greedy(FakeSampler):
        """Wants to decide when the cache comes."""

        def __init__(self, stage: KVStage) -> None:
            pass

    workerkit_registry.add(roles.SAMPLER, "greedy", Greedy)
    assert "only a worker may ask for KVStage" in problems_of(workerkit_registry, fake_config(sampler="greedy"))


def test_a_worker_that_needs_a_later_part_at_once_is_told_to_ask_for_later(workerkit_registry):
    from workerkit.framework.interfaces.runner import ModelRunner
    from workerkit.framework.testing.fakes_worker import FakeWorker

    class Hasty(FakeWorker):
        """Wants its runner before there is a cache."""

        def __init__(self, runner: ModelRunner, stage: KVStage) -> None:
            pass

    workerkit_registry.add(roles.WORKER, "hasty", Hasty)
    text = problems_of(workerkit_registry, fake_config("v1", worker="hasty"))
    assert "components.worker" in text
    assert "Later[" in text


# --- building


def test_nothing_is_built_by_assembling_and_each_part_once_by_using(workerkit_registry):
    recorder = Recorder()
    assembly = recorder.assemble(fake_config("v2"), None, workerkit_registry)
    assert recorder.calls == []
    assert assembly.get(roles.SAMPLER) is assembly.get(roles.SAMPLER)
    assert recorder.names() == ["build:sampler"]


def test_stage_values_before_their_stage_are_a_clear_error(workerkit_registry):
    assembly = assemble(fake_config("v1"), registry=workerkit_registry)
    with pytest.raises(StageError, match="KVLayout does not exist yet"):
        assembly.get(roles.RUNNER)
    with pytest.raises(StageError):
        assembly.value(KVLayout)
    assembly.worker.start()
    assert assembly.value(KVLayout) is assembly.worker.layout
    assembly.get(roles.RUNNER)
    with pytest.raises(StageError, match="can be entered once"):
        assembly.worker.initialize_kv_cache(assembly.worker.layout)


def test_a_trial_over_a_throw_away_cache_leaves_nothing(workerkit_registry):
    from workerkit.framework.interfaces.runner import ModelRunner
    from workerkit.framework.testing.fakes_worker import FakeWorker

    class Trying(FakeWorker):
        """Profiles."""

        def determine_available_memory(self):
            layout = self.plan_kv_cache(1 << 16)
            self.trial = self._stage.trial(attrs.evolve(layout, num_blocks=2), ModelRunner)
            self.trial.execute_dummy_batch(4, 2)
            return 1 << 16

    workerkit_registry.add(roles.WORKER, "trying", Trying)
    recorder = Recorder()
    assembly = recorder.assemble(fake_config("v2", worker="trying", observers=["fake"]), None, workerkit_registry)
    assembly.worker.start()
    assert assembly.worker.trial is not assembly.get(roles.RUNNER)
    allocated = [call.args["layout"].num_blocks for call in recorder.of("kv_cache.allocate")]
    assert allocated == [2, 40]
    assert recorder.names().count("build:LoadedModel") == 1, "no model is loaded twice"
    (observer,) = assembly.get_all(roles.OBSERVERS)
    assert observer.seen == [], "a trial step is not observed"
    registered = [call.args["caches"].layout.num_blocks for call in recorder.of("kv_connector.register")]
    assert registered == [2, 40]
    assert recorder.names().count("build:kv_connector") == 2, "the real connector never hears of the trial's caches"


def test_an_error_of_a_constructor_says_which_part_it_was(workerkit_registry):
    class Failing(FakeSampler):
        """Cannot be built."""

        def __init__(self) -> None:
            raise ValueError("out of luck")

    workerkit_registry.add(roles.SAMPLER, "failing", Failing)
    with pytest.raises(ValueError, match="out of luck") as error:
        assemble(fake_config(sampler="failing"), registry=workerkit_registry).get(roles.SAMPLER)
    assert "while building components.sampler (failing)" in "".join(error.value.__notes__)


def test_shutdown_builds_nothing(workerkit_registry):
    recorder = Recorder()
    assembly = recorder.assemble(fake_config("v1"), None, workerkit_registry)
    assembly.shutdown()
    assert recorder.calls == []


# --- overrides


class OtherSampler(FakeSampler):
    """Always token 1."""

    def draw(self, logits, batch):
        return super().draw(logits, batch) * 0 + 1


def test_an_override_shares_what_does_not_depend_on_the_part(workerkit_registry):
    recorder = Recorder()
    assembly = recorder.assemble(fake_config("v2", speculator="none"), None, workerkit_registry)
    assembly.engine.start()
    other = assembly.with_override(roles.SAMPLER, OtherSampler())
    other.engine.start()
    assert other.value(LoadedModel) is assembly.value(LoadedModel)
    assert recorder.names().count("build:LoadedModel") == 1
    assert recorder.names().count("build:DeviceContext") == 1
    assert other.get(roles.RUNNER) is not assembly.get(roles.RUNNER)
    assert other.worker is not assembly.worker
    assert [*other.engine.generate([5, 6], GREEDY)[0].token_ids] == [1] * 6
    assert [*assembly.engine.generate([5, 6], GREEDY)[0].token_ids] == fake_tokens([5, 6], 6)
    assert isinstance(assembly.get(roles.SAMPLER), FakeSampler)
    assert not isinstance(assembly.get(roles.SAMPLER), OtherSampler)
    other.shutdown()
    assert [*assembly.engine.generate([5, 6], GREEDY)[0].token_ids] == fake_tokens([5, 6], 6)


def test_b70_nothing_built_under_an_override_outlives_it(workerkit_registry):
    """S1 overridden, S2 built on it, override left: S2 holds the real S1 again."""

    class Holder(FakeSampler):
        """S2: holds a loader, S1."""

        def __init__(self, loader: ModelLoader) -> None:
            self.loader = loader

    workerkit_registry.add(roles.SAMPLER, "holder", Holder)
    assembly = assemble(fake_config(sampler="holder"), registry=workerkit_registry)
    mock = FakeLoader()
    with assembly.with_override(roles.LOADER, mock) as other:
        assert other.get(roles.SAMPLER).loader is mock
        inner = other.get(roles.SAMPLER)
    real = assembly.get(roles.SAMPLER)
    assert real is not inner
    assert real.loader is assembly.get(roles.LOADER)
    assert real.loader is not mock


def test_overrides_can_be_stacked(workerkit_registry):
    assembly = assemble(fake_config("v1", speculator="none"), registry=workerkit_registry)
    loader, sampler = FakeLoader(), OtherSampler()
    both = assembly.with_override(roles.LOADER, loader).with_override(roles.SAMPLER, sampler)
    assert both.get(roles.LOADER) is loader
    assert both.get(roles.SAMPLER) is sampler
    both.engine.start()
    assert both.engine.generate([5], GREEDY)[0].token_ids == (1,) * 6


def test_an_override_that_is_left_by_an_error_is_shut_down_too(workerkit_registry):
    recorder = Recorder()
    assembly = recorder.assemble(fake_config("v1"), None, workerkit_registry)
    with pytest.raises(StageError), assembly.with_override(roles.SAMPLER, OtherSampler()) as other:
        other.worker.sample_tokens()
    assert "worker.shutdown" in recorder.names()


def test_an_observing_override_sees_its_own_workers_steps_only(workerkit_registry):
    class Counting(OtherSampler):
        """Counts steps."""

        steps = 0

        @hookimpl
        def step_started(self):
            self.steps += 1

    counting = Counting()
    assembly = assemble(fake_config("v2", speculator="none"), registry=workerkit_registry)
    with assembly.with_override(roles.SAMPLER, counting) as other:
        other.engine.start()
        other.engine.generate([5], GREEDY)
    assert counting.steps == 6
    assembly.engine.start()
    assembly.engine.generate([5], GREEDY)
    assert counting.steps == 6


def test_a_list_of_parts_is_overridden_in_the_config(workerkit_registry):
    assembly = assemble(fake_config(), registry=workerkit_registry)
    with pytest.raises(TypeError, match="list of parts"):
        assembly.with_override(roles.OBSERVERS, object())


# --- threads


def test_b130_eight_threads_one_construction(workerkit_registry):
    built = []

    class Slow(FakeSampler):
        """Takes 50 ms."""

        def __init__(self) -> None:
            time.sleep(0.05)
            built.append(self)

    workerkit_registry.add(roles.SAMPLER, "slow", Slow)
    assembly = assemble(fake_config(sampler="slow"), registry=workerkit_registry)
    gate = threading.Barrier(8)

    def ask(_):
        gate.wait()
        return assembly.get(roles.SAMPLER)

    with ThreadPoolExecutor(8) as pool:
        results = [*pool.map(ask, range(8))]
    assert len(built) == 1
    assert all(result is built[0] for result in results)


def test_b130_a_constructor_that_raised_is_tried_again(workerkit_registry):
    attempts = []

    class Second(FakeSampler):
        """Succeeds the second time."""

        def __init__(self) -> None:
            attempts.append(self)
            if len(attempts) == 1:
                raise OSError("not yet")

    workerkit_registry.add(roles.SAMPLER, "second", Second)
    assembly = assemble(fake_config(sampler="second"), registry=workerkit_registry)
    with pytest.raises(OSError, match="not yet"):
        assembly.get(roles.SAMPLER)
    assert assembly.get(roles.SAMPLER) is attempts[1]
    assert assembly.get(roles.SAMPLER) is attempts[1]


def test_workers_are_assembled_and_run_from_several_threads(workerkit_registry):
    def run(index):
        assembly = assemble(fake_config("v1" if index % 2 else "v2", speculator="none"), registry=workerkit_registry)
        assembly.engine.start()
        tokens = assembly.engine.generate([index, 3], GREEDY)[0].token_ids
        assembly.shutdown()
        return assembly.worker, [*tokens]

    with ThreadPoolExecutor(6) as pool:
        results = [*pool.map(run, range(12))]
    assert [tokens for _, tokens in results] == [fake_tokens([index, 3], 6) for index in range(12)]
    assert len({id(worker) for worker, _ in results}) == 12, "each worker has a container of its own"


# --- what a component never sees


def test_b172_no_part_gets_the_registry_the_container_or_a_raw_config(workerkit_registry):
    """Constructors are typed with interfaces, stage values and attrs sections only; anything else is refused."""
    for role, offers in workerkit_registry.offers.items():
        for name in offers:
            if not workerkit_registry.missing_requirement(role, name):
                for parameter, need in workerkit_registry.entry(role, name).needs.items():
                    assert need.role or need.value or need.section or need.bundle or need.special, (
                        role,
                        name,
                        parameter,
                    )


def test_exact_annotations_of_parts_are_honoured(workerkit_registry):
    class Rows(FakeSampler):
        """Wants rows."""

        def __init__(self, tables: RowBlockTables, context: DeviceContext) -> None:
            self.tables = tables

    workerkit_registry.add(roles.SAMPLER, "rows", Rows)
    assert "needs a RowBlockTables" in problems_of(workerkit_registry, fake_config("v2", sampler="rows"))
    assembly = assemble(fake_config("v1", sampler="rows"), registry=workerkit_registry)
    assembly.worker.start()
    assert isinstance(assembly.get(roles.SAMPLER).tables, RowBlockTables)
    assert isinstance(assembly.get(roles.SAMPLER), Sampler)
