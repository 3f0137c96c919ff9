"""Extensions of the worker, at assembly: no name means two things, and none opens the device before the worker."""

import pytest

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ConfigError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.runner import ModelRunner
from workerkit.framework.interfaces.sampling import Sampler
from workerkit.framework.interfaces.sections import LimitsSection
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.worker import Worker
from workerkit.framework.interfaces.worker_extension import WorkerExtension, offered_methods
from workerkit.framework.testing.recording import Recorder

PUBLIC = sorted(name for name in dir(Worker) if not name.startswith("_"))


def extension(*names, base=WorkerExtension, **more):
    """A class that offers methods of these names."""
    return type("Extension", (base,), {**{name: lambda self: None for name in names}, **more})


@pytest.fixture
def problems_of(workerkit_registry, fake_config):
    """Of a worker with these extensions, which are registered as a, b, …"""

    def problems(*classes):
        names = [*"abcdef"[: len(classes)]]
        for name, cls in zip(names, classes, strict=True):
            workerkit_registry.add(roles.WORKER_EXTENSIONS, name, cls)
        with pytest.raises(ConfigError) as error:
            assemble(fake_config(worker_extensions=names), registry=workerkit_registry)
        return error.value.problems

    return problems


def test_b176_two_extensions_with_one_method_are_a_problem_that_names_both(problems_of):
    assert problems_of(extension("load", "reload"), extension("other"), extension("reload")) == (
        "components.worker_extensions[0] 'a' and components.worker_extensions[2] 'c' each offer the method 'reload': "
        "rename it in one of them, or leave one out",
    )


def test_b176_the_server_needs_an_extension_of_its_own_beside_the_configured_one(workerkit_registry, fake_config):
    """Both are there, in config order; in the fault the second replaced the first."""
    workerkit_registry.add(roles.WORKER_EXTENSIONS, "users", extension("x", answer=lambda self: "user"))
    workerkit_registry.add(roles.WORKER_EXTENSIONS, "servers", extension(update=lambda self, v: ("server", v)))
    with assemble(fake_config(worker_extensions=["users", "servers"]), registry=workerkit_registry) as assembly:
        assert assembly.worker.extension_methods == ("answer", "x", "update")
        assert assembly.worker.call("answer") == "user"
        assert assembly.worker.call("update", 3) == ("server", 3)


def test_a_method_that_comes_from_a_shared_base_is_offered_twice(problems_of):
    class Base(WorkerExtension):
        def shared(self):
            """Of both."""

    problems = problems_of(extension("one", base=Base), extension("two", base=Base), extension("three", base=Base))
    (problem,) = problems
    assert "[0] 'a' and components.worker_extensions[1] 'b' and components.worker_extensions[2] 'c' each" in problem
    assert "'shared'" in problem


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_of_the_worker_itself_is_a_problem(problems_of, name):
    assert problems_of(extension("fine", name)) == (
        f"components.worker_extensions[0] 'a' offers the method {name!r}, which every worker has itself: "
        "it needs another name",
    )


def test_the_worker_has_names_to_take():
    assert {"sleep", "call", "extension_methods", "layout", "cache_generation"} <= set(PUBLIC)


def test_what_is_offered_and_what_is_not():
    class Base:
        def inherited(self):
            """From a class that is no extension."""

    class Mine(WorkerExtension, Base):
        value = 3

        class Options:
            """No method."""

        def plain(self):
            """A method."""

        @staticmethod
        def static():
            """A method."""

        @classmethod
        def of_class(cls):
            """A method."""

        @property
        def asked(self):
            """No method."""

        @hookimpl
        def step_started(self):
            """For the worker's hooks only."""

        def _private(self):
            """For the extension itself."""

    assert offered_methods(Mine) == ("inherited", "of_class", "plain", "static")
    assert offered_methods(WorkerExtension) == ()


def test_two_extensions_may_watch_the_same_hook(workerkit_registry, fake_config):
    seen = []
    watch = {"step_started": hookimpl(lambda self: seen.append(self))}
    for name in "ab":
        workerkit_registry.add(roles.WORKER_EXTENSIONS, name, extension(f"of_{name}", **watch))
    with assemble(fake_config(worker_extensions=["a", "b"]), registry=workerkit_registry) as assembly:
        assembly.engine.start()
        assembly.engine.generate([5, 6])
        first, second = assembly.get_all(roles.WORKER_EXTENSIONS)
    assert seen[:2] == [first, second]


@pytest.mark.parametrize(("asked", "key"), [(DeviceContext, "DeviceContext"), (LoadedModel, "LoadedModel")])
def test_what_opens_the_device_is_asked_for_later(problems_of, asked, key):
    def hasty(self, it: asked, limits: LimitsSection) -> None:
        """It would load the model when the worker is made."""

    assert problems_of(extension("mine", __init__=hasty)) == (
        f"components.worker_extensions[0] 'a' needs {key} at once, which opens the device before the worker does: "
        "ask for Later[…]",
    )


def test_what_lives_on_the_cache_is_asked_for_later(problems_of):
    def hasty(self, runner: ModelRunner, caches: KVCaches) -> None:
        """It could never be built."""

    *_, problem = problems_of(extension("mine", __init__=hasty))
    assert problem.startswith("components.worker_extensions[0] 'a' needs KVCaches, runner at once")


def test_asking_for_all_of_it_later_builds_nothing_of_it(workerkit_registry, fake_config):
    def patient(
        self,
        device: DeviceRuntime,
        hooks: StepHooks,
        context: Later[DeviceContext],
        loaded: Later[LoadedModel],
        caches: Later[KVCaches],
        runner: Later[ModelRunner],
        sampler: Later[Sampler],
    ) -> None:
        self.later = (context, loaded, caches, runner, sampler)

    workerkit_registry.add(roles.WORKER_EXTENSIONS, "patient", extension("mine", __init__=patient))
    recorder = Recorder()
    assembly = recorder.assemble(fake_config("v2", worker_extensions=["patient"]), None, workerkit_registry)
    assert assembly.worker.extension_methods == ("mine",)
    built = {call.key for call in recorder.calls if not call.method}
    assert "worker_extensions[0]" in built
    assert not built & {"DeviceContext", "LoadedModel", "KVCaches", "runner", "sampler"}
    assembly.worker.start()
    (extended,) = assembly.get_all(roles.WORKER_EXTENSIONS)
    assert extended.later[3]() is assembly.get(roles.RUNNER)
    assembly.shutdown()
