"""Which implementation fills each role: what the config names, what goes with it, what `auto` finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.framework.errors import did_you_mean
from workerkit.framework.registry import Registry, Role


@attrs.define
class Choice:
    """One implementation, picked for one place."""

    role: Role[Any]
    key: str  # of its node
    name: str
    options: dict[str, Any]  # as given, nested parts included
    why: str  # "" when the config names it


def _use(value: Any) -> Any:
    """The implementation that a role's entry names, if it names one."""
    return value.get("use") if isinstance(value, Mapping) else value


class Chooser:
    """Chooses for one config, collecting problems as it goes."""

    def __init__(self, registry: Registry, given: Mapping[str, Any], problems: list[str]) -> None:
        self._registry = registry
        self._given = given  # the section `components`
        self.problems = problems
        self.chosen: dict[str, str] = {}  # role -> implementation, top level

    def choose(self) -> tuple[list[Choice], dict[str, list[Choice]]]:
        """(Of roles that one part fills, of roles of many by role): what the config names, or what goes with a part
        chosen before, or the role's own default."""
        given = self._given
        top = {name: role for name, role in self._registry.roles.items() if not role.nested}
        for name in given:
            if name not in top:
                nested = name in self._registry.roles
                where = " (it belongs into the section of the part that uses it)" if nested else ""
                self.problems.append(f"components.{name}: no such role{where}; {did_you_mean(name, top)}")
        # First what the config names: it decides the defaults of the rest, and what `auto` finds.
        named = [name for name, value in given.items() if name in top and _use(value) not in (None, "auto")]
        single: dict[str, Choice] = {}
        many: dict[str, list[Choice]] = {}
        implied: dict[str, tuple[str | None, str]] = {}
        for name in (*named, *(name for name in top if name not in named)):
            role, path = top[name], f"components.{name}"
            if role.many:
                many[name] = self.many(role, given.get(name, []), path, name)
                continue
            default, why = implied.get(name, (role.default, "default"))
            value = given.get(name, default)
            if isinstance(value, Mapping) and "use" not in value:
                value = {"use": default, **value}
            if (name in given or default is not None) and (choice := self.one(role, value, path, name)):
                if name not in named:
                    choice.why = choice.why or why
                single[name] = choice
                implied = {**self._implied(choice), **implied}
        return [*single.values()], many

    def _implied(self, choice: Choice) -> dict[str, tuple[str | None, str]]:
        offer = self._registry.offers[choice.role.name][choice.name]
        return {role: (name, f"goes with {choice.role.name}: {choice.name}") for role, name in offer.defaults.items()}

    def many(self, role: Role[Any], value: Any, path: str, key: str) -> list[Choice]:
        """A list of parts, or `auto`: all that suit."""
        if value == "auto":
            suited = self._suited(role)
            return [Choice(role, f"{key}[{i}]", name, {}, why) for i, (name, why) in enumerate(suited)]
        if not isinstance(value, list | tuple):
            self.problems.append(f"{path}: expected a list of {role.name} parts, got {value!r}")
            return []
        found = (self.one(role, v, f"{path}[{i}]", f"{key}[{i}]") for i, v in enumerate(value))
        return [choice for choice in found if choice]

    def one(self, role: Role[Any], value: Any, path: str, key: str) -> Choice | None:
        """A name, a mapping with `use`, a list short for the one nested list, or `auto`. None: a problem was noted."""
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
            self.problems.append(
                f"{path}: expected the name of a part or a mapping with `use`, got {value!r}; known: {', '.join(known)}"
            )
            return None
        why = ""
        if name == "auto":
            suited = self._suited(role)
            if not suited and role.default not in (None, "auto"):
                suited = [(str(role.default), "default")]  # `kernels: auto`: its nested parts are what is found
            if not suited:
                self.problems.append(f"{path}: nothing suits `auto`; known: {', '.join(known)}")
                return None
            name, why = suited[0]
        if name not in known:
            self.problems.append(f"{path}.use: no {role.name} {name!r}; {did_you_mean(name, known)}{self.broken()}")
            return None
        if missing := self._registry.missing_requirement(role.name, name):
            self.problems.append(f"{path}.use: {missing}")
            return None
        if not role.nested and not role.many:
            self.chosen[role.name] = name
        return Choice(role, key, name, options, why)

    def _suited(self, role: Role[Any]) -> list[tuple[str, str]]:
        offers = sorted(self._registry.offers[role.name].values(), key=lambda offer: -offer.priority)
        chosen = {**{r.name: r.default for r in self._registry.roles.values() if r.default}, **self.chosen}
        return [
            (offer.name, f"auto: {why}")
            for offer in offers
            if offer.suits
            and (why := offer.suits(chosen))
            and not self._registry.missing_requirement(role.name, offer.name)
        ]

    def is_settled(self, role: Role[Any]) -> bool:
        """Whether the role has a part, or had one that was refused, which is a problem already."""
        return role.name in self.chosen or role.name in self._given

    def broken(self) -> str:
        """What to add to "no such part": plugins that might have brought it."""
        if not self._registry.broken:
            return ""
        names = "; ".join(f"plugin {name!r} could not be loaded: {why}" for name, why in self._registry.broken.items())
        return f" ({names}; see `workerkit plugins`)"
