"""Plugin discovery. Entry points of the group `workerkit` are loaded one by one; a broken one harms nobody else.

A plugin is a module with a `@hookimpl` function `worker_components(registry)`, and `WORKERKIT_API = 1`. The built-in
parts are such a plugin. `WORKERKIT_DISABLE_PLUGINS` (names, separated by commas) leaves some out; with
`WORKERKIT_STRICT_PLUGINS=1` the first failure is raised.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import traceback
from collections.abc import Iterable
from typing import Any

import attrs
import pluggy

from workerkit.framework.errors import RegistrationError, did_you_mean
from workerkit.framework.hooks import API_VERSION, PluginSpec
from workerkit.framework.registry import Registry
from workerkit.framework.roles import new_registry

GROUP = "workerkit"
_log = logging.getLogger(__name__)


@attrs.frozen
class PluginReport:
    """What became of one plugin."""

    name: str
    version: str
    origin: str  # "module (distribution)"
    registered: tuple[str, ...] = ()  # "sampler_stage: ban_token"
    error: str = ""
    traceback: str = ""


@attrs.frozen
class Plugins:
    """The registry that the plugins have filled, and how that went."""

    registry: Registry
    reports: tuple[PluginReport, ...]


class PluginHost:
    """Loads plugins into a registry, each in a transaction."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = registry or new_registry()
        self.reports: list[PluginReport] = []
        self._manager = pluggy.PluginManager("workerkit")
        self._manager.add_hookspecs(PluginSpec)
        self._manager.hook.worker_components.call_historic(kwargs={"registry": self.registry})

    def load(self, name: str, plugin: Any, version: str = "", origin: str = "") -> PluginReport:
        """Register one plugin object (a module, or anything with hook functions). Never raises, unless strict.

        What a failing plugin had added before it failed is taken back.
        """
        before = self.registry.snapshot()
        try:
            if isinstance(plugin, importlib.metadata.EntryPoint):
                plugin = plugin.load()
            self._check_version(plugin)
            with self.registry.registering(name):
                self._run(name, plugin)
            report = PluginReport(name, version, origin, self.registry.added_by(name))
            self.registry.broken.pop(name, None)
        except Exception as error:  # a plugin may fail in any way
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self.registry.restore(before)
            report = PluginReport(name, version, origin, (), f"{type(error).__name__}: {error}", traceback.format_exc())
            self.registry.broken[name] = report.error
            _log.warning("plugin %r could not be loaded: %s (see `workerkit plugins`)", name, report.error)
            if os.environ.get("WORKERKIT_STRICT_PLUGINS") == "1":
                raise
        self.reports.append(report)
        return report

    def _run(self, name: str, plugin: Any) -> None:
        """One plugin's hooks, run alone so that a failure is its own."""
        for attribute in dir(plugin):  # before pluggy: it says nothing of a misspelt hook until it is too late
            if hasattr(getattr(plugin, attribute, None), "workerkit_impl") and not hasattr(PluginSpec, attribute):
                raise RegistrationError(f"no hook {attribute!r}; {did_you_mean(attribute, self._hooks())}")
        self._manager.register(plugin, name)  # runs `worker_components`, a historic hook
        self._manager.check_pending()

    @staticmethod
    def _hooks() -> list[str]:
        return [name for name in vars(PluginSpec) if not name.startswith("_")]

    @staticmethod
    def _check_version(plugin: Any) -> None:
        version = getattr(plugin, "WORKERKIT_API", None)
        if version != API_VERSION:
            raise RegistrationError(
                f"it was made for interface version {version!r} (WORKERKIT_API), this workerkit has {API_VERSION}"
            )


def entry_points() -> list[importlib.metadata.EntryPoint]:
    """Installed plugins, `builtin` first, then by name."""
    found = importlib.metadata.entry_points(group=GROUP)
    return sorted(found, key=lambda point: (point.name != "builtin", point.name))


def load_plugins(points: Iterable[importlib.metadata.EntryPoint] | None = None) -> Plugins:
    """A fresh registry, filled by every installed plugin."""
    disabled = {name.strip() for name in os.environ.get("WORKERKIT_DISABLE_PLUGINS", "").split(",")}
    host = PluginHost()
    for point in entry_points() if points is None else points:
        if point.name in disabled:
            continue
        distribution = point.dist.name if point.dist else "?"
        host.load(point.name, point, point.dist.version if point.dist else "", f"{point.value} ({distribution})")
    return Plugins(host.registry, tuple(host.reports))
