"""From a config and a registry to a checked plan: which parts, with which options, wired how. Nothing is built here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import attrs

from workerkit.framework.choices import Choice, Chooser
from workerkit.framework.config import expand, structure
from workerkit.framework.errors import ConfigError, RegistrationError, did_you_mean
from workerkit.framework.interfaces.stages import KVStage
from workerkit.framework.registry import Entry, Need, Registry, Role


@attrs.frozen
class Wire:
    """What one constructor parameter gets: nodes by key, or a ready value, or a bundle of wires."""

    keys: tuple[str, ...] = ()
    many: bool = False
    names: tuple[str, ...] | None = None  # of the nodes: they come as a mapping
    later: bool = False
    value: Any = None
    special: type | None = None
    bundle: Mapping[str, Wire] | None = None
    bundle_class: type | None = None

    def edges(self, lazy: bool) -> Iterator[str]:
        """Keys of the nodes it points to; `lazy` includes those that are built later."""
        if self.bundle is not None:
            for wire in self.bundle.values():
                yield from wire.edges(lazy)
        elif lazy or not self.later:
            yield from self.keys


@attrs.frozen
class Node:
    """One thing that the container will build."""

    key: str  # "sampler", "sampler.stages[0]", "LoadedModel"
    factory: Callable[..., Any]
    wires: Mapping[str, Wire] = attrs.field(factory=dict)
    config: Any = None
    role: Role[Any] | None = None
    name: str = ""  # implementation
    why: str = ""  # how it was chosen, when the config did not say
    order: int = 0  # place in the config, for hooks

    def edges(self, lazy: bool = True) -> set[str]:
        """Keys that it depends on."""
        return {key for wire in self.wires.values() for key in wire.edges(lazy)}


@attrs.frozen
class Plan:
    """A worker that can be built."""

    nodes: Mapping[str, Node]
    published: Mapping[str, type]  # values that only a stage of the worker's life brings
    sections: Mapping[type, Any]
    document: Mapping[str, Any]  # the config as resolved: every role, every option

    def dependents(self, keys: set[str]) -> set[str]:
        """`keys` and every node that depends on one of them, lazily too."""
        result = set(keys)
        grown = True
        while grown:
            more = {k for k, node in self.nodes.items() if k not in result and node.edges() & result}
            result |= more
            grown = bool(more)
        return result


class Planner:
    """Makes one plan, collecting problems as it goes."""

    def __init__(self, registry: Registry, document: Mapping[str, Any]) -> None:
        self._registry = registry
        self._document = document
        self._problems: list[str] = []
        self._nodes: dict[str, Node] = {}
        self._members: dict[str, tuple[str, ...]] = {}  # role of many -> node keys
        self._entries: dict[str, Entry] = {}
        self._resolved: dict[str, Any] = {"components": {}}
        self._chooser = Chooser(registry, self._mapping("components"), self._problems)

    def plan(self) -> Plan:
        """Raises ConfigError with every problem."""
        sections = self._sections()
        single, many = self._chooser.choose()
        self._members.update({name: tuple(choice.key for choice in choices) for name, choices in many.items()})
        for order, choice in enumerate((*single, *(choice for choices in many.values() for choice in choices))):
            self._open(choice, order)
        for key, entry in list(self._entries.items()):
            wires = {p: self._wire(key, p, need, sections) for p, need in entry.needs.items()}
            self._nodes[key] = attrs.evolve(self._nodes[key], wires=wires)
        self._stages(sections)
        published = {t.__name__: t for t in self._registry.published}
        if not self._problems:
            self._check_order(set(published))
            self._problems.extend(problem for check in self._registry.checks for problem in check(self._nodes))
        if self._problems:
            raise ConfigError(self._problems)
        parts = self._resolved["components"]
        self._resolved["components"] = {
            name: parts[name] if name in parts else [parts[key] for key in self._members[name]]
            for name in self._registry.roles
            if name in parts or name in self._members
        }
        return Plan(self._nodes, published, sections, self._resolved)

    def _sections(self) -> dict[type, Any]:
        known = {**self._registry.sections, "components": None, "plugins": None}
        for key in self._document:
            if key not in known:
                self._problems.append(f"{key}: no such section; {did_you_mean(key, [*known, 'extends'])}")
        result: dict[type, Any] = {}
        for name, schema in self._registry.sections.items():
            given = self._document.get(name)
            result[schema] = structure({} if given is None else given, schema, name, self._problems)
            self._resolved[name] = None if result[schema] is None else attrs.asdict(result[schema])
        plugins = self._mapping("plugins")
        for name in plugins:
            if name not in self._registry.plugin_sections:
                hint = did_you_mean(name, self._registry.plugin_sections)
                self._problems.append(
                    f"plugins.{name}: no installed plugin owns this section; {hint}{self._chooser.broken()}"
                )
        for name, schema in self._registry.plugin_sections.items():
            given = plugins.get(name)
            result[schema] = structure({} if given is None else given, schema, f"plugins.{name}", self._problems)
        self._resolved["plugins"] = {
            name: attrs.asdict(result[schema])
            for name, schema in self._registry.plugin_sections.items()
            if result[schema] is not None
        }
        return result

    def _mapping(self, section: str) -> Mapping[str, Any]:
        value = self._document.get(section)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._problems.append(f"{section}: expected a mapping, got {value!r} ({type(value).__name__})")
            return {}
        return value

    def _open(self, choice: Choice, order: int) -> None:
        """The node of a part and those nested in it; wires follow when all nodes are known."""
        path = f"components.{choice.key}"
        try:
            entry = self._registry.entry(choice.role.name, choice.name)
        except (RegistrationError, ImportError) as error:
            self._problems.append(f"{path}: {choice.name!r} cannot be used: {type(error).__name__}: {error}")
            return
        options = dict(choice.options)
        resolved: dict[str, Any] = {"use": choice.name}
        for parameter, need in entry.needs.items():
            if need.role is None or not need.role.nested:
                continue
            value = options.pop(parameter, entry.nested_defaults.get(parameter))
            where, key = f"{path}.{parameter}", f"{choice.key}.{parameter}"
            if need.many:
                nested = self._chooser.many(need.role, [] if value is None else value, where, key)
            else:
                one = self._chooser.one(need.role, value, where, key)
                nested = [one] if one else []
            self._members[key] = tuple(c.key for c in nested)
            for inner in nested:
                if parameter not in choice.options:
                    inner.why = inner.why or f"default of {choice.role.name}: {choice.name}"
                self._open(inner, order)
            parts = [self._resolved["components"].pop(c.key, {"use": c.name}) for c in nested]
            resolved[parameter] = parts if need.many else parts[0] if parts else None
        config = None
        if entry.config is not None:
            config = structure(options, entry.config, path, self._problems)
            if config is not None:
                resolved.update(attrs.asdict(config))
        elif options:
            self._problems.extend(f"{path}: {choice.name!r} has no option {key!r}" for key in sorted(options))
        self._resolved["components"][choice.key] = resolved
        self._entries[choice.key] = entry
        self._nodes[choice.key] = Node(
            key=choice.key,
            factory=entry.factory,
            config=config,
            role=choice.role,
            name=choice.name,
            why=choice.why,
            order=order,
        )

    def _wire(self, key: str, parameter: str, need: Need, sections: Mapping[type, Any]) -> Wire:
        if need.special is not None:
            if need.special is KVStage and key != "worker":
                self._problems.append(f"components.{key}: only a worker may ask for KVStage (parameter {parameter!r})")
            return Wire(special=need.special)
        if need.section is not None:
            return Wire(value=sections[need.section])
        if need.value is not None:
            return Wire(keys=(need.value.__name__,), later=need.later)
        if need.bundle is not None:
            wires = {name: self._wire(key, name, inner, sections) for name, inner in need.bundle.items()}
            return Wire(bundle=wires, bundle_class=need.bundle_class)
        assert need.role is not None
        role = need.role
        members = self._members.get(f"{key}.{parameter}" if role.nested else role.name)
        if role.nested or role.many:
            keys = members or ()
            if not need.many and len(keys) != 1:
                self._problems.append(f"components.{key}.{parameter}: expected one {role.name}, got {len(keys)}")
            names = tuple(self._nodes[k].name for k in keys) if need.named else None
            if twice := sorted({name for name in names or () if (names or ()).count(name) > 1}):
                self._problems.append(f"components.{key}.{parameter}: {', '.join(twice)} more than once")
            return Wire(keys=keys, many=need.many, names=names, later=need.later)
        if role.name not in self._nodes:
            if not self._chooser.is_settled(role):
                self._problems.append(f"components.{key} needs components.{role.name} (parameter {parameter!r})")
            return Wire()
        self._check_exact(key, parameter, need, role)
        return Wire(keys=(role.name,), later=need.later)

    def _check_exact(self, key: str, parameter: str, need: Need, role: Role[Any]) -> None:
        node = self._nodes[role.name]
        if isinstance(node.factory, type) and need.exact and not issubclass(node.factory, need.exact):
            asker = self._nodes[key]
            fitting = [name for name in self._registry.offers[role.name] if self._fits(role, name, need.exact)]
            self._problems.append(
                f"components.{key} {asker.name!r} needs a {need.exact.__name__} (parameter {parameter!r}), and "
                f"components.{role.name} {node.name!r} is none; right would be: {', '.join(fitting) or 'nothing known'}"
            )

    def _fits(self, role: Role[Any], name: str, exact: type) -> bool:
        try:
            factory = self._registry.entry(role.name, name).factory
        except (RegistrationError, ImportError):  # its packages are not here
            return False
        return isinstance(factory, type) and issubclass(factory, exact)

    def _stages(self, sections: Mapping[type, Any]) -> None:
        for value, producer in self._registry.producers.items():
            _, needs = self._registry.needs_of(producer, value.__name__)
            wires = {p: self._wire(value.__name__, p, need, sections) for p, need in needs.items()}
            self._nodes[value.__name__] = Node(key=value.__name__, factory=producer, wires=wires)

    def _check_order(self, published: set[str]) -> None:
        eager = {key: node.edges(lazy=False) for key, node in self._nodes.items()}
        try:
            order = [*TopologicalSorter(eager).static_order()]
        except CycleError as error:
            self._problems.append("parts need each other in a circle: " + " -> ".join(reversed(error.args[1])))
            return
        late: set[str] = set(published)
        for key in order:
            if eager.get(key, set()) & late:
                late.add(key)
        for key, node in self._nodes.items():
            asks_late = any(w.later or w.special is KVStage for w in node.wires.values())
            if asks_late and key in late:
                first = next(k for k in sorted(eager[key]) if k in late)
                self._problems.append(
                    f"components.{key} drives the stages but needs {first} at once, which exists only after "
                    f"{', '.join(sorted(published))}: ask for Later[…]"
                )


def make_plan(registry: Registry, document: Mapping[str, Any]) -> Plan:
    """Raises ConfigError."""
    return Planner(registry, expand(document)).plan()
