"""Hook specifications, and how a worker calls them.

Two kinds. `worker_components` is called once for each plugin, when it is loaded. The step hooks are for observers:
assembly registers each part that has `@hookimpl` methods with the worker's own plugin manager.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pluggy

from workerkit.framework.errors import RegistrationError
from workerkit.framework.interfaces.observer import StepHooks

if TYPE_CHECKING:
    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.model import ModelOutput
    from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput
    from workerkit.framework.interfaces.sampling import SamplerOutput
    from workerkit.framework.registry import Registry

API_VERSION = 1  # of the hooks and of the interfaces that are not marked version 0

hookspec = pluggy.HookspecMarker("workerkit")
hookimpl = pluggy.HookimplMarker("workerkit")

_log = logging.getLogger(__name__)


class PluginSpec:
    """Hooks of a plugin module."""

    @hookspec(historic=True)
    def worker_components(self, registry: Registry) -> None:
        """Add implementations, sections and commands. Called once; what a failing plugin added is taken back."""


class StepSpec:
    """Hooks of a part. Called in config order; an error is logged once and switches the observer off.

    Observers must not change what they are given. Arguments may be left out.
    """

    @hookspec
    def step_started(self, output: SchedulerOutput) -> None:
        """A step begins; nothing of it has happened yet."""

    @hookspec
    def batch_prepared(self, batch: InputBatch) -> None:
        """Inputs and metadata are ready; on the device's stream."""

    @hookspec
    def forward_finished(self, batch: InputBatch, output: ModelOutput) -> None:
        """Hidden states and the taps that were asked for; on the device's stream, views valid until the next step."""

    @hookspec
    def tokens_sampled(self, batch: InputBatch, output: SamplerOutput) -> None:
        """Device tensors: not to be read on the host here."""

    @hookspec
    def drafts_proposed(self, batch: InputBatch) -> None:
        """The speculator is done; not called without one. On the device's stream."""

    @hookspec
    def step_finished(self, batch: InputBatch) -> None:
        """State is committed and drafts are proposed; on the device's stream."""

    @hookspec
    def output_ready(self, output: ModelRunnerOutput) -> None:
        """The tokens are on the host; with V2 perhaps after the next step has started."""

    @hookspec
    def host_tokens_read(self, part: str) -> None:
        """A part waited for tokens on the host, once in this step; on the device's stream."""


STEP_HOOKS = tuple(name for name, _ in inspect.getmembers(StepSpec, inspect.isfunction))


def hook_methods(part: object) -> dict[str, Callable[..., None]]:
    """A part's `@hookimpl` methods. Looks at the class, so that no property is evaluated."""
    return {
        name: getattr(part, name)
        for name in dir(type(part))
        if hasattr(inspect.getattr_static(type(part), name, None), "workerkit_impl")
    }


class WorkerHooks(StepHooks):
    """The plugin manager of one worker."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("workerkit")
        self._manager.add_hookspecs(StepSpec)
        self._order: dict[str, int] = {}
        self._calls: dict[str, tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...]] = dict.fromkeys(
            STEP_HOOKS, ()
        )
        self._failures: dict[str, str] = {}

    def join(self, order: int, key: str, part: object) -> None:
        """Register a part; `order` is its place in the config. Parts without hooks are let pass.

        Raises RegistrationError for a hook that does not exist or has wrong arguments.
        """
        methods = hook_methods(part)
        if not methods or self._manager.has_plugin(key):
            return
        try:
            self._manager.register(SimpleNamespace(**methods), key)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise RegistrationError(f"{key} ({type(part).__name__}): {error}") from error
        self._order[key] = order
        self._calls = {name: self._ordered(name) for name in STEP_HOOKS}

    def _ordered(self, name: str) -> tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...]:
        impls = getattr(self._manager.hook, name).get_hookimpls()
        live = [i for i in impls if i.plugin_name not in self._failures]
        live.sort(key=lambda impl: self._order[impl.plugin_name])
        return tuple((impl.plugin_name, impl.function, impl.argnames) for impl in live)

    def _fire(self, name: str, **values: Any) -> None:
        for key, function, names in self._calls[name]:
            try:
                function(*[values[n] for n in names])
            except Exception as error:  # an observer never ends a step
                _log.exception("observer %s failed in %s and is switched off", key, name)
                self._failures[key] = f"{key}: {name}: {type(error).__name__}: {error}"
                self._calls = {hook: self._ordered(hook) for hook in STEP_HOOKS}

    def step_started(self, output: SchedulerOutput) -> None:
        self._fire("step_started", output=output)

    def batch_prepared(self, batch: InputBatch) -> None:
        self._fire("batch_prepared", batch=batch)

    def forward_finished(self, batch: InputBatch, output: ModelOutput) -> None:
        self._fire("forward_finished", batch=batch, output=output)

    def tokens_sampled(self, batch: InputBatch, output: SamplerOutput) -> None:
        self._fire("tokens_sampled", batch=batch, output=output)

    def drafts_proposed(self, batch: InputBatch) -> None:
        self._fire("drafts_proposed", batch=batch)

    def step_finished(self, batch: InputBatch) -> None:
        self._fire("step_finished", batch=batch)

    def output_ready(self, output: ModelRunnerOutput) -> None:
        self._fire("output_ready", output=output)

    def host_tokens_read(self, part: str) -> None:
        self._fire("host_tokens_read", part=part)

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(self._failures.values())
