"""`workerkit check` and `workerkit config`: what is wrong with a config file, and what it comes to."""

from __future__ import annotations

import argparse
import json
from typing import Any

from workerkit.framework import config as configs
from workerkit.framework.cli import common
from workerkit.framework.cli.schema import config_schema
from workerkit.framework.errors import ConfigError, WorkerkitError


def add_to(group: Any) -> None:
    """Add the commands to the parser group."""
    check = common.command(group, "check", _check, "list everything that is wrong with a config file, or say ok")
    common.add_file(check)
    show = common.command(group, "config", _config, "print the resolved config: every role, every option")
    show.add_argument("config", metavar="FILE", nargs="?", help="config file of a worker (YAML)")
    show.add_argument("--schema", action="store_true", help="print the JSON Schema of config files, for editors")
    common.add_settings(show)


def _check(args: argparse.Namespace) -> int:
    try:
        common.read_plan(args)
    except ConfigError as error:
        for problem in error.problems:
            print(f"  - {problem}")
        return 1
    print("ok")
    return 0


def _config(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(config_schema(args.plugins.registry), indent=2))
        return 0
    if args.config is None:
        raise WorkerkitError("config: name a FILE, or ask for --schema")
    print(configs.dump_yaml(dict(common.read_plan(args).document)), end="")
    return 0
