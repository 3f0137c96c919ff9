"""Methods that plugins add to the worker: called by name, with their arguments, in their place of a worker's life."""

import threading

import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import StageError, UnsupportedError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.device import DeviceRuntime
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.runner import ModelRunner
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.worker_extension import ExtensionMethods, WorkerExtension
from workerkit.framework.testing.fakes_sampling import FakeSampler

CONFIG = {
    "model": {"source": "random", "max_model_len": 64},
    "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 32},
    "cache": {"block_size": 4, "num_blocks": 40},
    "components": {"loader": "random", "tokenizer": "fake", "worker_extensions": ["weights", "steps"]},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7]


class Weights(WorkerExtension):
    """Reads and writes weights, and says on which thread it was called."""

    def __init__(
        self, device: DeviceRuntime, loaded: Later[LoadedModel], caches: Later[KVCaches], runner: Later[ModelRunner]
    ) -> None:
        self._device = device
        self._loaded = loaded
        self._caches = caches
        self._runner = runner

    def weight(self, name: str) -> torch.Tensor:
        """[...] on the host; a copy."""
        return self._device.submit(lambda: self._weights()[name].clone()).wait()

    def write(self, name: str, *, value: torch.Tensor) -> None:
        """Overwrite a weight."""
        self._device.submit(lambda: self._weights()[name].copy_(value)).wait()

    def cache_blocks(self) -> int:
        """Of the layout that the worker has entered."""
        return self._caches().layout.num_blocks

    def live_requests(self) -> int:
        """As the runner counts them."""
        return self._runner().num_requests

    @staticmethod
    def thread() -> int:
        """The caller's."""
        return threading.get_ident()

    def fail(self) -> None:
        """Raises."""
        raise ValueError("as it was told to")

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self._loaded().network.weights())


class Counting(WorkerExtension):
    """Counts steps, and tells."""

    def __init__(self) -> None:
        self._steps = 0

    @hookimpl
    def step_started(self) -> None:
        """See StepSpec."""
        self._steps += 1


class Steps(Counting):
    """Inherits what it does."""

    @property
    def steps(self) -> int:
        """No method."""
        raise AssertionError("nothing evaluates it")

    @classmethod
    def unit(cls, *words: str, **more: str) -> tuple:
        """What it was given."""
        return cls.__name__, words, more

    def num_steps(self) -> int:
        """So far."""
        return self._steps


@pytest.fixture
def registry(workerkit_registry):
    workerkit_registry.add(roles.WORKER_EXTENSIONS, "weights", Weights)
    workerkit_registry.add(roles.WORKER_EXTENSIONS, "steps", Steps)
    return workerkit_registry


@pytest.fixture(params=["v1", "v2"])
def assembly(registry, request):
    with assemble(CONFIG, {"components.runner": request.param}, registry) as made:
        yield made


def tokens(assembly):
    return assembly.engine.generate([PROMPT], GREEDY)[0].token_ids


def test_b176_the_methods_of_several_extensions_are_all_callable(assembly):
    worker = assembly.worker
    assembly.engine.start()
    weights = ("cache_blocks", "fail", "live_requests", "thread", "weight", "write")
    assert worker.extension_methods == (*weights, "num_steps", "unit")  # no hook, no property, nothing private
    assert worker.call("cache_blocks") == 40
    assert worker.call("num_steps") == 0
    tokens(assembly)
    assert worker.call("num_steps") > 0
    assert worker.call("thread") == threading.get_ident()


def test_an_extension_reads_and_writes_the_model_that_steps_use(assembly):
    worker = assembly.worker
    assembly.engine.start()
    before = tokens(assembly)
    kept = worker.call("weight", "norm.weight")
    assert torch.equal(kept, dict(assembly.value(LoadedModel).network.weights())["norm.weight"])
    assert worker.call("write", "norm.weight", value=torch.zeros(())) is None
    assert tokens(assembly) == (0,) * 6  # all logits are the same
    worker.call("write", "norm.weight", value=kept)
    assert tokens(assembly) == before
    worker.check_integrity()


def test_arguments_arrive_in_order_and_by_name(assembly):
    assembly.worker.start()
    named = {"method": "m", "self": "s"}  # names that `call` itself might claim
    assert assembly.worker.call("unit", "b", "a", **named) == ("Steps", ("b", "a"), named)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nome'"):
        assembly.worker.call("weight", nome="norm.weight")


def test_what_a_method_raises_reaches_the_caller_and_harms_no_request(assembly):
    engine, worker = assembly.engine, assembly.worker
    engine.start()
    expected = list(tokens(assembly))
    req_id = engine.add_request(PROMPT, GREEDY)
    got = [token for delta in engine.step() for token in delta.token_ids]
    assert worker.call("live_requests") == 1
    with pytest.raises(ValueError, match="as it was told to"):
        worker.call("fail")
    while engine.has_unfinished:
        got += [token for delta in engine.step() if delta.req_id == req_id for token in delta.token_ids]
    assert got == expected
    engine.check_integrity()


def test_an_unknown_method_names_the_nearest(assembly):
    assembly.worker.start()
    with pytest.raises(
        UnsupportedError, match=r"no worker extension has a method 'num_step'; did you mean 'num_steps'\?"
    ):
        assembly.worker.call("num_step")
    for name in ("_weights", "step_started", "steps", "start"):
        with pytest.raises(UnsupportedError, match=f"'{name}'"):
            assembly.worker.call(name)


@pytest.mark.parametrize("worker", ["npu", "fake"])
def test_without_an_extension_it_is_said_how_to_configure_one(worker, workerkit_registry):
    with assemble(
        CONFIG, {"components.worker": worker, "components.worker_extensions": []}, workerkit_registry
    ) as made:
        made.worker.start()
        assert made.worker.extension_methods == ()
        with pytest.raises(UnsupportedError, match=r"'norms'; components\.worker_extensions names no extension"):
            made.worker.call("norms")


def test_methods_are_called_from_the_cache_on_until_the_shutdown_and_in_sleep(assembly):
    worker = assembly.worker
    assert "num_steps" in worker.extension_methods
    worker.init_device()
    worker.load_model()
    with pytest.raises(StageError, match="call belongs to stage READY or ASLEEP, the worker is in stage LOADED"):
        worker.call("num_steps")
    worker.initialize_kv_cache(worker.plan_kv_cache(worker.determine_available_memory()))
    kept = worker.call("weight", "norm.weight")
    worker.sleep(2)
    worker.wake_up(("weights",))
    assert torch.equal(worker.call("weight", "norm.weight"), kept)
    worker.shutdown()
    with pytest.raises(StageError, match="SHUT_DOWN"):
        worker.call("num_steps")


def test_each_worker_has_extensions_of_its_own(assembly):
    assembly.engine.start()
    with assembly.with_override(roles.SAMPLER, FakeSampler()) as other:
        other.engine.start()
        tokens(other)
        assert other.worker.call("num_steps") > 0
    assert assembly.worker.call("num_steps") == 0


def test_two_extensions_that_assembly_could_not_compare_are_refused_too():
    with pytest.raises(UnsupportedError, match="two worker extensions offer the method 'num_steps'"):
        ExtensionMethods((Steps(), Steps()))


@pytest.mark.parametrize("runner", ["v1", "v2", "fake"])
def test_the_fakes_serve_it_too(runner, fake_config, assembly_factory):
    worker = assembly_factory(fake_config(runner, worker_extensions=["fake"])).worker
    worker.start()
    assert worker.call("fake_echo", 1, b=2) == ((1,), {"b": 2})
