"""`workerkit plugins`: what is installed, what it registered, and why a broken one is broken."""

from __future__ import annotations

import argparse
from typing import Any

from workerkit.framework.cli import common


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(group, "plugins", _plugins, "list plugins, what they registered, and why one is broken")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when one is broken")


def _plugins(args: argparse.Namespace) -> int:
    reports = args.plugins.reports
    if not reports:
        print("no plugin is installed")
    for report in reports:
        state = "BROKEN" if report.error else "ok"
        print(f"{report.name} {report.version}  {report.origin}  {state}")
        for part in report.registered:
            print(f"  {part}")
        if report.error:
            print(f"  {report.error}")
            print("".join(f"    {line}\n" for line in report.traceback.rstrip().splitlines()), end="")
    return 1 if args.strict and any(report.error for report in reports) else 0
