"""Roles, and the registry of implementations that may fill them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import attrs

from workerkit.framework.errors import RegistrationError, did_you_mean
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.stages import KVStage, Later

T = TypeVar("T")

# Given the implementation chosen for each role so far, why this one suits, or None when it does not.
Suits = Callable[[Mapping[str, str]], str | None]


@attrs.frozen
class Role(Generic[T]):
    """A named place in a worker that one implementation fills (`many`: an ordered list of them)."""

    name: str
    interface: type[T]
    doc: str
    default: str | None = None  # implementation used when neither the config nor the runner names one
    many: bool = False
    nested: bool = False  # lives in the section of the part that asks for it, never at the top of `components`
    version: int = 1  # 0: provisional, no real implementation yet
    per_worker: bool = False  # keeps state of one worker's requests or caches: another assembly never shares it


@attrs.frozen
class Need:
    """One constructor parameter. Exactly one of `role`, `value`, `section`, `bundle`, `special` is set."""

    role: Role[Any] | None = None
    many: bool = False
    named: bool = False  # many, by the names that the config gives them
    later: bool = False
    exact: type | None = None  # the annotation, a sub-interface of the role's perhaps
    value: type | None = None  # a stage value
    section: type | None = None
    bundle: Mapping[str, Need] | None = None
    bundle_class: type | None = None
    special: type | None = None  # KVStage or StepHooks


@attrs.frozen
class Entry:
    """An implementation."""

    role: Role[Any]
    name: str
    factory: Callable[..., Any]
    config: type | None
    needs: Mapping[str, Need]
    nested_defaults: Mapping[str, tuple[str, ...] | str]

    @property
    def doc(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


@attrs.frozen
class Offer:
    """What a plugin registered, before its module is imported."""

    role: Role[Any]
    name: str
    factory: Callable[..., Any] | str
    plugin: str
    requires: tuple[str, str] | None  # (module that must be importable, extra that brings it)
    suits: Suits | None
    priority: int
    defaults: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...] | str]


class Registry:
    """Everything that can be assembled."""

    def __init__(self) -> None:
        self.roles: dict[str, Role[Any]] = {}
        self.offers: dict[str, dict[str, Offer]] = {}
        self.producers: dict[type, Callable[..., Any]] = {}
        self.published: set[type] = set()
        self.sections: dict[str, type] = {}  # top-level sections of a config
        self.plugin_sections: dict[str, type] = {}
        self.bundles: set[type] = set()
        self.checks: list[Callable[..., list[str]]] = []  # of a whole plan's nodes by key -> problems
        self.commands: dict[str, Callable[..., Any]] = {}
        self.broken: dict[str, str] = {}  # plugin -> why it could not be loaded
        self._plugin = "?"
        self._entries: dict[tuple[str, str], Entry] = {}

    @contextlib.contextmanager
    def registering(self, plugin: str) -> Iterator[None]:
        """What is added inside belongs to this plugin."""
        before, self._plugin = self._plugin, plugin
        try:
            yield
        finally:
            self._plugin = before

    def snapshot(self) -> dict[str, Any]:
        """All that a plugin can add, as it is now."""
        return {
            name: {k: dict(v) if name == "offers" else v for k, v in value.items()}
            for name, value in vars(self).items()
            if isinstance(value, dict) and name != "broken"
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Back to a snapshot."""
        for name, value in snapshot.items():
            setattr(self, name, value)

    def added_by(self, plugin: str) -> tuple[str, ...]:
        """`role: name` of each implementation that a plugin added."""
        return tuple(
            f"{role}: {name}"
            for role, offers in self.offers.items()
            for name, o in offers.items()
            if o.plugin == plugin
        )

    def add_role(self, role: Role[Any]) -> None:
        """A new place. Plugins may add their own."""
        if role.name in self.roles:
            raise RegistrationError(f"role {role.name!r} is already registered")
        self.roles[role.name] = role
        self.offers[role.name] = {}

    def add(
        self,
        role: Role[T],
        name: str,
        factory: Callable[..., T] | str,
        *,
        requires: tuple[str, str] | None = None,
        suits: Suits | None = None,
        priority: int = 0,
        defaults: Mapping[str, str] | None = None,
        parts: Mapping[str, tuple[str, ...] | str] | None = None,
    ) -> None:
        """An implementation: a class (or function), or "module:name" to be imported when it is looked at.

        `requires`: (module, extra) that must be installed. `suits`, `priority`: how `auto` finds it, highest first.
        `defaults`: implementations of other roles that go with this one. `parts`: what its own nested parts are when
        the config does not say.
        Raises RegistrationError: unknown role, name taken, abstract methods left, parameters that nothing can fill.
        """
        if self.roles.get(role.name) is not role:
            raise RegistrationError(f"no role {role.name!r}; {did_you_mean(role.name, self.roles)}")
        if name in self.offers[role.name]:
            owner = self.offers[role.name][name].plugin
            raise RegistrationError(f"{role.name} {name!r} is already registered by {owner}")
        offer = Offer(role, name, factory, self._plugin, requires, suits, priority, defaults or {}, parts or {})
        if not isinstance(factory, str):
            self._entries[role.name, name] = self._inspect(offer, factory)
        self.offers[role.name][name] = offer

    def add_section(self, plugin: str, schema: type) -> None:
        """A plugin's own section, `plugins: {NAME: …}`; its parts ask for it by type."""
        if plugin in self.plugin_sections:
            raise RegistrationError(f"plugin section {plugin!r} is already registered")
        self.plugin_sections[plugin] = schema

    def add_command(self, name: str, add_to: Callable[..., Any]) -> None:
        """A subcommand of `workerkit`: called with the parser group when the command line is built."""
        if name in self.commands:
            raise RegistrationError(f"command {name!r} is already registered")
        self.commands[name] = add_to

    def entry(self, role: str, name: str) -> Entry:
        """The implementation, imported and inspected. KeyError when there is none."""
        key = role, name
        if key not in self._entries:
            offer = self.offers[role][name]
            factory = offer.factory
            if isinstance(factory, str):
                module, _, attribute = factory.partition(":")
                factory = getattr(importlib.import_module(module), attribute)
            self._entries[key] = self._inspect(offer, factory)
        return self._entries[key]

    def missing_requirement(self, role: str, name: str) -> str | None:
        """What to install before this implementation can be used, or None."""
        requires = self.offers[role][name].requires
        if requires is None or importlib.util.find_spec(requires[0]) is not None:
            return None
        return f"{name!r} needs the package {requires[0]}: pip install 'workerkit[{requires[1]}]'"

    def _inspect(self, offer: Offer, factory: Callable[..., Any]) -> Entry:
        where = f"{offer.role.name} {offer.name!r} ({getattr(factory, '__qualname__', factory)})"
        if isinstance(factory, type):
            if not issubclass(factory, offer.role.interface):
                raise RegistrationError(f"{where} is not a {offer.role.interface.__name__}")
            if left := sorted(getattr(factory, "__abstractmethods__", ())):
                raise RegistrationError(f"{where} leaves abstract: {', '.join(left)}")
        config, needs = self.needs_of(factory, where)
        known = {p for p, need in needs.items() if need.role and need.role.nested}
        if unknown := set(offer.parts) - known:
            raise RegistrationError(f"{where} has no nested parts {sorted(unknown)}")
        return Entry(offer.role, offer.name, factory, config, needs, offer.parts)

    def needs_of(self, factory: Callable[..., Any], where: str) -> tuple[type | None, dict[str, Need]]:
        """(config class, parameter -> need) of a constructor."""
        target: Any = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
        if target is object.__init__:
            return None, {}
        hints = get_type_hints(target)
        config: type | None = None
        needs: dict[str, Need] = {}
        for parameter in inspect.signature(target).parameters.values():
            if parameter.name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            hint = hints.get(parameter.name)
            if parameter.name == "config":
                if not (isinstance(hint, type) and attrs.has(hint)):
                    raise RegistrationError(f"{where}: `config` must be annotated with an attrs class")
                config = hint
                continue
            need = self._need(hint)
            if need is None:
                raise RegistrationError(
                    f"{where}: parameter {parameter.name!r} is annotated {hint!r}, which is no interface of a role, "
                    "stage value, section or bundle"
                )
            needs[parameter.name] = need
        return config, needs

    def _need(self, hint: Any, many: bool = False) -> Need | None:
        if get_origin(hint) is Later:
            inner = self._need(get_args(hint)[0])
            return inner and attrs.evolve(inner, later=True)
        if get_origin(hint) is Mapping and get_args(hint)[0] is str:
            inner = self._need(get_args(hint)[1], many=True)
            return inner and attrs.evolve(inner, many=True, named=True)
        if get_origin(hint) is tuple and len(get_args(hint)) == 2 and get_args(hint)[1] is Ellipsis:
            inner = self._need(get_args(hint)[0], many=True)
            return inner and attrs.evolve(inner, many=True)
        if not isinstance(hint, type):
            return None
        if hint in (KVStage, StepHooks):
            return Need(special=hint)
        if hint in self.producers or hint in self.published:
            return Need(value=hint)
        if hint in self.sections.values() or hint in self.plugin_sections.values():
            return Need(section=hint)
        if hint in self.bundles:
            fields = {name: self._need(h) for name, h in get_type_hints(hint).items()}
            if all(fields.values()):
                return Need(bundle={n: need for n, need in fields.items() if need}, bundle_class=hint)
            return None
        # Two roles may share an interface: one part (a speculator), and a list of them (a composite's proposers).
        for role in sorted(self.roles.values(), key=lambda role: role.many != many):
            if issubclass(hint, role.interface):
                return Need(role=role, exact=hint)
        return None
