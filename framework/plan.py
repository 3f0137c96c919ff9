"""From a config and a registry to a checked plan: which parts, with which options, wired how. Nothing is built here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import attrs

from workerkit.framework.config import expand, structure
from workerkit.framework.errors import ConfigError, RegistrationError, did_you_mean
from workerkit.framework.interfaces.stages import KVStage
from workerkit.framework.registry import Entry, Need, Registry, Role


@attrs.frozen
class Wire:
    """What one constructor parameter gets: nodes by key, or a ready value, or a bundle of wires."""

    keys: tuple[str, ...] = ()
    many: bool = False
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
    has_config: bool = False
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


def _use(value: Any) -> Any:
    """The implementation that a role's entry names, if it names one."""
    return value.get("use") if isinstance(value, Mapping) else value


@attrs.define
class _Choice:
    role: Role[Any]
    key: str
    name: str
    options: dict[str, Any]
    why: str


class Planner:
    """Makes one plan, collecting problems as it goes."""

    def __init__(self, registry: Registry, document: Mapping[str, Any]) -> None:
        self._registry = registry
        self._document = document
        self._problems: list[str] = []
        self._nodes: dict[str, Node] = {}
        self._chosen: dict[str, str] = {}  # role -> implementation, top level
        self._members: dict[str, tuple[str, ...]] = {}  # role of many -> node keys
        self._entries: dict[str, Entry] = {}
        self._resolved: dict[str, Any] = {}

    def plan(self) -> Plan:
        """Raises ConfigError with every problem."""
        sections = self._sections()
        choices = self._choices()
        for order, choice in enumerate(choices):
            self._open(choice, order)
        for key, entry in list(self._entries.items()):
            wires = {p: self._wire(key, p, need, sections) for p, need in entry.needs.items()}
            self._nodes[key] = attrs.evolve(self._nodes[key], wires=wires)
        self._stages(sections)
        published = {t.__name__: t for t in self._registry.published}
        if not self._problems:
            self._check_order(set(published))
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
        plugins = self._mapping("plugins")
        for name in plugins:
            if name not in self._registry.plugin_sections:
                hint = did_you_mean(name, self._registry.plugin_sections)
                self._problems.append(f"plugins.{name}: no installed plugin owns this section; {hint}{self._broken()}")
        for name, schema in self._registry.plugin_sections.items():
            given = plugins.get(name)
            result[schema] = structure({} if given is None else given, schema, f"plugins.{name}", self._problems)
        for name, schema in (*self._registry.sections.items(),):
            self._resolved[name] = attrs.asdict(result[schema]) if result[schema] is not None else None
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

    def _choices(self) -> list[_Choice]:
        """The implementation of every role: the config's, or the default of a part chosen before, or the role's own."""
        given = self._mapping("components")
        top = {name: role for name, role in self._registry.roles.items() if not role.nested}
        for name in given:
            if name not in top:
                nested = name in self._registry.roles
                where = " (it belongs into the section of the part that uses it)" if nested else ""
                self._problems.append(f"components.{name}: no such role{where}; {did_you_mean(name, top)}")
        # First what the config names: it decides the defaults of the rest, and what `auto` finds.
        named = [name for name, value in given.items() if name in top and _use(value) not in (None, "auto")]
        single: dict[str, _Choice] = {}
        many: dict[str, list[_Choice]] = {}
        implied: dict[str, tuple[str | None, str]] = {}
        for name in (*named, *(name for name in top if name not in named)):
            role, path = top[name], f"components.{name}"
            if role.many:
                many[name] = self._many(role, given.get(name, []), path, name)
                continue
            default, why = implied.get(name, (role.default, "default"))
            value = given.get(name, default)
            if isinstance(value, Mapping) and "use" not in value:
                value = {"use": default, **value}
            if (name in given or default is not None) and (choice := self._one(role, value, path, name)):
                if name not in named:
                    choice.why = choice.why or why
                single[name] = choice
                implied = {**self._implied(choice), **implied}
        for name, choices in many.items():
            self._members[name] = tuple(choice.key for choice in choices)
        self._resolved["components"] = {}
        return [*single.values(), *(choice for choices in many.values() for choice in choices)]

    def _implied(self, choice: _Choice) -> dict[str, tuple[str | None, str]]:
        offer = self._registry.offers[choice.role.name][choice.name]
        return {role: (name, f"goes with {choice.role.name}: {choice.name}") for role, name in offer.defaults.items()}

    def _many(self, role: Role[Any], value: Any, path: str, key: str) -> list[_Choice]:
        if value == "auto":
            suited = self._suited(role)
            return [_Choice(role, f"{key}[{i}]", name, {}, why) for i, (name, why) in enumerate(suited)]
        if not isinstance(value, list | tuple):
            self._problems.append(f"{path}: expected a list of {role.name} parts, got {value!r}")
            return []
        found = (self._one(role, v, f"{path}[{i}]", f"{key}[{i}]") for i, v in enumerate(value))
        return [choice for choice in found if choice]

    def _one(self, role: Role[Any], value: Any, path: str, key: str) -> _Choice | None:
        options: dict[str, Any] = {}
        name: Any = value
        if isinstance(value, Mapping):
            options = dict(value)
            name = options.pop("use", role.default)
        elif isinstance(value, list | tuple) and role.default:
            name = role.default  # `kernels: [a, b]` is short for its one nested list
            offer = self._registry.offers[role.name].get(name)
            if offer and len(offer.parts) == 1:
                options = {next(iter(offer.parts)): value}
        known = self._registry.offers[role.name]
        if not isinstance(name, str):
            self._problems.append(
                f"{path}: expected the name of a part or a mapping with `use`, got {value!r}; known: {', '.join(known)}"
            )
            return None
        why = ""
        if name == "auto":
            suited = self._suited(role)
            if not suited and role.default not in (None, "auto"):
                suited = [(str(role.default), "default")]  # `kernels: auto`: its nested parts are what is found
            if not suited:
                self._problems.append(f"{path}: nothing suits `auto`; known: {', '.join(known)}")
                return None
            name, why = suited[0]
        if name not in known:
            self._problems.append(f"{path}.use: no {role.name} {name!r}; {did_you_mean(name, known)}{self._broken()}")
            return None
        if missing := self._registry.missing_requirement(role.name, name):
            self._problems.append(f"{path}.use: {missing}")
            return None
        if not role.nested and not role.many:
            self._chosen[role.name] = name
        return _Choice(role, key, name, options, why)

    def _suited(self, role: Role[Any]) -> list[tuple[str, str]]:
        offers = sorted(self._registry.offers[role.name].values(), key=lambda offer: -offer.priority)
        chosen = {**{r.name: r.default for r in self._registry.roles.values() if r.default}, **self._chosen}
        return [
            (offer.name, f"auto: {why}")
            for offer in offers
            if offer.suits
            and (why := offer.suits(chosen))
            and not self._registry.missing_requirement(role.name, offer.name)
        ]

    def _broken(self) -> str:
        if not self._registry.broken:
            return ""
        names = "; ".join(f"plugin {name!r} could not be loaded: {why}" for name, why in self._registry.broken.items())
        return f" ({names}; see `workerkit plugins`)"

    def _open(self, choice: _Choice, order: int) -> None:
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
                nested = self._many(need.role, [] if value is None else value, where, key)
            else:
                one = self._one(need.role, value, where, key)
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
            has_config=entry.config is not None,
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
            return Wire(keys=keys, many=need.many, later=need.later)
        if role.name not in self._nodes:
            if role.name not in self._chosen and role.name not in self._mapping("components"):
                self._problems.append(f"components.{key} needs components.{role.name} (parameter {parameter!r})")
            return Wire()
        self._check_exact(key, parameter, need, role)
        return Wire(keys=(role.name,), later=need.later)

    def _check_exact(self, key: str, parameter: str, need: Need, role: Role[Any]) -> None:
        node = self._nodes[role.name]
        if isinstance(node.factory, type) and need.exact and not issubclass(node.factory, need.exact):
            asker = self._nodes[key]
            fitting = [
                name
                for name in self._registry.offers[role.name]
                if not self._registry.missing_requirement(role.name, name)
                and isinstance(factory := self._registry.entry(role.name, name).factory, type)
                and issubclass(factory, need.exact)
            ]
            self._problems.append(
                f"components.{key} {asker.name!r} needs a {need.exact.__name__} (parameter {parameter!r}), and "
                f"components.{role.name} {node.name!r} is none; right would be: {', '.join(fitting) or 'nothing known'}"
            )

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
