"""What the commands share: reading `-c`, `--set` and `--model` in one place, and output that a user can rely on.

The command line wins over the file, the file over the defaults; `false`, `0` and `null` count as values on each level.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from workerkit.framework import config as configs
from workerkit.framework.assembly import Assembly, assemble
from workerkit.framework.errors import ConfigError, WorkerkitError
from workerkit.framework.interfaces.engine import Engine
from workerkit.framework.plan import Plan, make_plan

Run = Callable[[argparse.Namespace], int]  # `args.plugins` holds what was loaded


def command(group: Any, name: str, run: Run, doc: str, description: str = "") -> argparse.ArgumentParser:
    """A subcommand whose `run(args)` returns the exit code."""
    parser: argparse.ArgumentParser = group.add_parser(
        name, help=doc, description=description or doc[:1].upper() + doc[1:] + "."
    )
    parser.set_defaults(run=run)
    return parser


def add_file(parser: argparse.ArgumentParser) -> None:
    """The positional FILE, and `--set`."""
    parser.add_argument("config", metavar="FILE", help="config file of a worker (YAML)")
    add_settings(parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    """`-c FILE`, `--model` and `--set`, of commands that run a worker."""
    parser.add_argument("-c", "--config", metavar="FILE", help="config file of a worker (default: all defaults)")
    parser.add_argument("--model", metavar="PATH|NAME", help="wins over model.source; NAME as in `workerkit models`")
    add_settings(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """`--set`."""
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="wins over the file; VALUE is YAML: --set components.sampler.use=torch --set limits.max_num_reqs=4",
    )


def read_document(args: argparse.Namespace) -> dict[str, Any]:
    """The config file with the command line's settings on top. Raises ConfigError with every problem of these."""
    document = configs.read_file(Path(args.config)) if args.config is not None else {}
    problems: list[str] = []
    for text in args.settings:
        try:
            document = configs.with_overrides(document, configs.setting(text))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems, configs.HEADLINE)
    if getattr(args, "model", None) is not None:
        document = configs.with_overrides(document, {"model.source": args.model})
    return configs.expand(document)


def read_plan(args: argparse.Namespace) -> Plan:
    """The checked plan; nothing is built."""
    return make_plan(args.plugins.registry, read_document(args))


def assembly_of(args: argparse.Namespace) -> Assembly:
    """The assembly that the arguments describe, not started."""
    return assemble(read_document(args), registry=args.plugins.registry)


@contextmanager
def running_engine(assembly: Assembly) -> Iterator[Engine]:
    """The assembly's engine, started; shut down whatever happens."""
    try:
        engine = assembly.engine
        engine.start(progress=True)
        yield engine
    finally:
        assembly.shutdown()


def read_text(path: str) -> str:
    """A file's text, or standard input's for `-`."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkerkitError(f"cannot read {path}: {error}") from error


def read_bytes(path: str) -> bytes:
    """A file, as it is."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise WorkerkitError(f"cannot read {path}: {error}") from error


@contextmanager
def writable(path: str) -> Iterator[TextIO]:
    """A file that is written anew. Raises WorkerkitError when it cannot be."""
    try:
        handle = open(path, "w", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise WorkerkitError(f"cannot write {path}: {error}") from error
    with handle:
        yield handle


def warn(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


class SpeedMeter:
    """How fast an engine goes from now on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.stats
        self._start = time.perf_counter()

    def text(self, num_tokens: int) -> str:
        """In words; with the mean accepted length when drafts were verified."""
        seconds = time.perf_counter() - self._start
        text = f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / max(seconds, 1e-9):.1f} tokens/s"
        stats = self._engine.stats
        num_drafts = stats.num_drafts - self._before.num_drafts
        if not num_drafts:
            return text
        num_accepted = stats.num_accepted_tokens - self._before.num_accepted_tokens
        return f"{text}, mean accepted length {1 + num_accepted / num_drafts:.2f}"


def columns(rows: Sequence[tuple[str, ...]], indent: str = "") -> Iterator[str]:
    """Lines with aligned columns; the last one runs free."""
    if not rows:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        yield (indent + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])).rstrip()


def plain(value: Any) -> str:
    """A value as it would stand in YAML, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    return configs.dump_yaml(value).removesuffix("...\n").strip()
