"""`workerkit models`: models that have a name, and whether they are here."""

from __future__ import annotations

import argparse
from typing import Any, cast

from workerkit.framework.cli import common
from workerkit.framework.interfaces.store import ModelStore
from workerkit.framework.registry import Registry
from workerkit.framework.roles import MODEL_STORE


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(group, "models", _models, "list named models, or fetch one")
    parser.add_argument("--fetch", metavar="NAME", help="download this model unless it is cached, and print its path")


def _models(args: argparse.Namespace) -> int:
    store = _store(args.plugins.registry)
    if args.fetch is not None:
        print(store.fetch(args.fetch, progress=True))
        return 0
    rows = [
        (
            name,
            "cached" if store.is_cached(name) else "not cached",
            f"{model.size / 1e6:.0f} MB",
            model.license,
            model.description,
        )
        for name, model in store.names().items()
    ]
    print("\n".join(common.columns(rows)))
    return 0


def _store(registry: Registry) -> ModelStore:
    """The default store with its default options: no worker is needed for it."""
    entry = registry.entry(MODEL_STORE.name, str(MODEL_STORE.default))
    return cast(ModelStore, entry.factory(config=entry.config()) if entry.config else entry.factory())
