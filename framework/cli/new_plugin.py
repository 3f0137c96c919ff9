"""`workerkit new-plugin`: a package that adds one part, with tests that pass from the start."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workerkit.framework.cli import common, skeletons
from workerkit.framework.cli.schema import options_of
from workerkit.framework.errors import WorkerkitError, did_you_mean
from workerkit.framework.hooks import API_VERSION
from workerkit.framework.registry import Registry, Role


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(
        group,
        "new-plugin",
        _new_plugin,
        "write a package that adds one part",
        f"Writes a package with one part of ROLE. {', '.join(skeletons.EXAMPLES)} start from a small example, other "
        "roles from an implementation that is installed.",
    )
    parser.add_argument("role", metavar="ROLE")
    parser.add_argument("name", metavar="NAME", help="of the part, as configs will name it: letters, digits, _")
    parser.add_argument("--dir", metavar="DIR", help="where to write it (default: ./workerkit-NAME)")
    parser.add_argument("--base", metavar="PART", help="the implementation to start from")


def _new_plugin(args: argparse.Namespace) -> int:
    registry: Registry = args.plugins.registry
    role = _check(registry, args.role, args.name)
    folder = Path(args.dir or f"workerkit-{args.name.replace('_', '-')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkerkitError(f"{folder} is there already, and not empty")
    values = {
        "role": role.name,
        "name": args.name,
        "module": f"workerkit_{args.name}",
        "dist": f"workerkit-{args.name.replace('_', '-')}",
        "cls": "".join(word.capitalize() for word in args.name.split("_")),
        "api": str(API_VERSION),
    }
    if role.name in skeletons.EXAMPLES and args.base is None:
        files = skeletons.example(role.name, values)
    else:
        files = _derived(registry, role, args.base, values)
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkerkitError(f"cannot write {folder}: {error}") from error
    print(f"{folder}: pip install -e {folder}, then name {args.name!r} in a config; its README says how")
    return 0


def _check(registry: Registry, role: str, name: str) -> Role[Any]:
    problems = []
    if role not in registry.roles:
        problems.append(f"no role {role!r}; {did_you_mean(role, registry.roles)}")
    elif name in registry.offers[role]:
        problems.append(f"{role} {name!r} is already registered by {registry.offers[role][name].plugin}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or name == "auto":
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").lstrip("0123456789_")
        hint = f"; did you mean {near!r}?" if near and not keyword.iskeyword(near) and near != "auto" else ""
        problems.append(f"name {name!r}: expected lower-case letters, digits and single _, no keyword{hint}")
    if problems:
        raise WorkerkitError("; ".join(problems))
    return registry.roles[role]


def _derived(registry: Registry, role: Role[Any], base: str | None, values: dict[str, str]) -> Mapping[str, str]:
    """A class under an installed one, each method of the interface handed on."""
    bases = dict(_classes(registry, role))
    if base is None:
        base = role.default if role.default in bases else next(iter(bases), None)
    if base is None:
        able = sorted({*skeletons.EXAMPLES, *(r.name for r in registry.roles.values() if dict(_classes(registry, r)))})
        raise WorkerkitError(f"{role.name} has no implementation to start from; roles that can: {', '.join(able)}")
    if base not in bases:
        hint = did_you_mean(base, bases)
        raise WorkerkitError(f"--base {base!r}: no {role.name} that can be imported and needs no options; {hint}")
    goes_with = {
        offer.role.name: offer.name
        for offers in registry.offers.values()
        for offer in offers.values()
        if offer.defaults.get(role.name) == base
    }
    offer = registry.offers[role.name][base]
    return skeletons.derived(bases[base], offer, _abstract(bases[base]), goes_with, values)


def _classes(registry: Registry, role: Role[Any]) -> Iterator[tuple[str, type]]:
    for name in registry.offers[role.name]:
        try:
            entry = registry.entry(role.name, name)
        except Exception:  # what cannot be imported cannot be a base; `workerkit components` says why
            continue
        required = any(option.required for option in options_of(entry.config))  # a config would have to make them up
        if isinstance(entry.factory, type) and not required:
            yield name, entry.factory


def _abstract(cls: type) -> list[str]:
    """What the interfaces of a class leave to it, in their order."""
    found: dict[str, None] = {}
    for interface in reversed(cls.__mro__):
        if interface.__module__.startswith("workerkit.framework.interfaces."):
            found |= {n: None for n in vars(interface) if n in getattr(interface, "__abstractmethods__", ())}
    return list(found)
