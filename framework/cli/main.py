"""`workerkit`: one command group. The built-in commands and those that plugins add are treated alike."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence

from workerkit.framework.cli import bench, chat, components, config, generate, models, new_plugin, plugins, wiring
from workerkit.framework.cli.common import warn
from workerkit.framework.errors import WorkerkitError
from workerkit.framework.plugins import Plugins, load_plugins

BUILTIN = (config, components, wiring, plugins, new_plugin, models, generate, chat, bench)


def main(argv: Sequence[str] | None = None, found: Plugins | None = None) -> int:
    """The entry point. Returns the exit code: 1 for an error of the user's, 2 for wrong arguments, 130 after Ctrl-C.

    `found`: plugins and registry; None takes the installed ones.
    """
    try:
        return _run(argv, found)
    except KeyboardInterrupt:
        warn("interrupted")
        return 130
    except WorkerkitError as error:
        warn(f"workerkit: {error}")
        return 1
    except BrokenPipeError:  # `workerkit components | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: Sequence[str] | None, found: Plugins | None) -> int:
    found = found or load_plugins()
    args = _parser(found).parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=level, force=True)
    args.plugins = found
    code: int = args.run(args)
    return code


def _parser(found: Plugins) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workerkit", description="An LLM inference worker assembled from parts.", allow_abbrev=False
    )
    version = importlib.metadata.version("workerkit")
    parser.add_argument("--version", action="version", version=f"workerkit {version}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log choices and progress (before the command)")
    group = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in BUILTIN:
        module.add_to(group)
    for name, add_to in found.registry.commands.items():
        try:
            add_to(group)
        except Exception as error:  # one plugin's command must not take the others away
            warn(f"workerkit: the command {name!r} of a plugin cannot be added: {type(error).__name__}: {error}")
    return parser
