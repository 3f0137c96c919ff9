"""`workerkit components`: roles, the implementations that are installed, and their options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from workerkit.framework.cli import common
from workerkit.framework.cli.schema import options_of
from workerkit.framework.errors import WorkerkitError, did_you_mean
from workerkit.framework.registry import Registry, Role


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(group, "components", _components, "list roles, their implementations and options")
    parser.add_argument("role", metavar="ROLE", nargs="?", help="only this role")


def _components(args: argparse.Namespace) -> int:
    registry: Registry = args.plugins.registry
    if args.role is not None and args.role not in registry.roles:
        raise WorkerkitError(f"no role {args.role!r}; {did_you_mean(args.role, registry.roles)}")
    for role in registry.roles.values() if args.role is None else (registry.roles[args.role],):
        print("\n".join(_role(registry, role)), end="\n\n")
    return 0


def _role(registry: Registry, role: Role[Any]) -> Iterator[str]:
    marks = [f"interface {role.interface.__name__}"]
    if role.default is not None:
        marks.append(f"default {role.default}")
    if role.many:
        marks.append("a list")
    if role.nested:
        marks.append("in the section of the part that uses it")
    if role.version == 0:
        marks.append("version 0: provisional")
    yield f"{role.name}: {role.doc}  ({', '.join(marks)})"
    if not registry.offers[role.name]:
        yield "  nothing installed"
    for name in registry.offers[role.name]:
        yield from _part(registry, role, name)


def _part(registry: Registry, role: Role[Any], name: str) -> Iterator[str]:
    offer = registry.offers[role.name][name]
    try:
        entry = registry.entry(role.name, name)
    except Exception as error:  # a part that cannot be imported is listed all the same
        where = f"  {name}  [{offer.plugin}]"
        missing = registry.missing_requirement(role.name, name)
        yield f"{where}  not installed: {missing}" if missing else f"{where}  CANNOT BE IMPORTED ({offer.factory})"
        if not missing:
            yield f"      {type(error).__name__}: {error}"
        return
    yield f"  {name}  [{offer.plugin}]  {entry.doc}"
    if missing := registry.missing_requirement(role.name, name):
        yield f"      missing: {missing}"
    if offer.defaults:
        yield f"      brings: {', '.join(f'{k}: {v}' for k, v in offer.defaults.items())}"
    rows = [
        (f"{parameter}:", f"{need.role.name} parts", common.plain(entry.nested_defaults.get(parameter)), need.role.doc)
        for parameter, need in entry.needs.items()
        if need.role is not None and need.role.nested
    ]
    rows += [
        (f"{o.name}:", o.type_text, "required" if o.required else f"= {common.plain(o.default)}", o.doc)
        for o in options_of(entry.config)
    ]
    yield from common.columns(rows, indent="      ")
