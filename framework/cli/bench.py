"""`workerkit bench`: throughput, latencies, and where the time of a step goes; two configs side by side."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import attrs

from workerkit.framework import config as configs
from workerkit.framework.assembly import Assembly
from workerkit.framework.cli import common
from workerkit.framework.cli.bench_against import against, comparison_lines
from workerkit.framework.cli.bench_cases import DEFAULTS, Case, Runner, parse_case, run_batch, summary
from workerkit.framework.cli.bench_plot import plot
from workerkit.framework.cli.bench_timing import Recorder, Recording, breakdown, record, timed_plan, trace_events
from workerkit.framework.errors import WorkerkitError
from workerkit.framework.interfaces.observer import StepTimings
from workerkit.framework.plan import Plan, make_plan
from workerkit.framework.registry import Registry
from workerkit.framework.roles import DEVICE, ENGINE, OBSERVERS, RUNNER

_LATENCIES = {"first": "first token", "between": "between tokens", "whole": "end to end"}
_PHASES = {"attention": "attention metadata"}
HOST_TIMES = "times of the device's stream are those of the host that issues its work: the device itself runs behind"


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(
        group,
        "bench",
        _bench,
        "measure a worker: throughput, latencies, and where the time of a step goes",
        "Each run submits a batch of random prompts at once: greedy, end tokens ignored. Throughput of decoding is new "
        "tokens after the first / (time of all - time of one); that of a case with one new token counts its prompts.",
    )
    common.add_config(parser)
    names = ", ".join(f"{case.name} = {case.batch}x{case.prompt}+{case.output}" for case in DEFAULTS)
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME|BATCHxPROMPT+OUTPUT",
        help=f"what to measure, again for more (default: all of {names})",
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="that count, of each case (default: 3)")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="before them (default: 1)")
    parser.add_argument("--against", metavar="FILE", help="compare with this config, in alternating runs")
    parser.add_argument("--json", metavar="FILE", help="write all numbers here, too")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw what a step is made of")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of one run of each case, for ui.perfetto.dev")


def _bench(args: argparse.Namespace) -> int:
    cases = [parse_case(text) for text in args.case] or list(DEFAULTS)
    _check(args, cases)
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(common.writable(path))
            for name in ("json", "plot", "trace")
            if (path := getattr(args, name)) is not None
        }
        if args.against is not None:
            return _against(args, cases, files)
        return _measure(args, cases, files)


def _check(args: argparse.Namespace, cases: Sequence[Case]) -> None:
    if args.runs < 1:
        raise WorkerkitError(f"--runs must be >= 1, got {args.runs}")
    if args.warmup < 0:
        raise WorkerkitError(f"--warmup must be >= 0, got {args.warmup}")
    names = [case.name for case in cases]
    if twice := [name for name in names if names.count(name) > 1]:
        raise WorkerkitError(f"--case {twice[0]} is given twice")
    if args.plot is not None and not args.plot.endswith(".svg"):
        raise WorkerkitError(f"--plot {args.plot}: the picture is an SVG, so its name must end in .svg")
    if args.against is not None and (args.plot or args.trace):
        raise WorkerkitError("--plot and --trace show one config: leave them out, or --against")


def _plan(args: argparse.Namespace, document: Mapping[str, Any]) -> Plan:
    plan = make_plan(args.plugins.registry, document)
    if missing := [role.name for role in (ENGINE, RUNNER, DEVICE) if role.name not in plan.nodes]:
        raise WorkerkitError(f"there is nothing to measure: no installed plugin brings components.{missing[0]}")
    return plan


def _against(args: argparse.Namespace, cases: Sequence[Case], files: Mapping[str, TextIO]) -> int:
    mine, theirs = (argparse.Namespace(**{**vars(args), "config": path}) for path in (args.config, args.against))
    documents = common.read_document(mine), common.read_document(theirs)
    for document in documents:
        _plan(args, document)
    names = args.config or "defaults", args.against
    ratios = against(names, documents, cases, args.runs, args.warmup)
    for line in comparison_lines(names, ratios):
        print(line)
    if "json" in files:
        _write(files["json"], {"a": names[0], "b": names[1], "cases": {k: attrs.asdict(v) for k, v in ratios.items()}})
    return 0


def _measure(args: argparse.Namespace, cases: Sequence[Case], files: Mapping[str, TextIO]) -> int:
    from tqdm import tqdm

    recorder = Recorder()
    document = _observed(common.read_document(args), args.plugins.registry)
    plan = _plan(args, document)
    assembly = Assembly(timed_plan(plan, recorder), {}, observed=True)
    found: dict[str, dict[str, Any]] = {}
    recordings: dict[str, Recording] = {}
    with common.running_engine(assembly) as engine:
        runner = Runner(engine)
        for case in cases:
            case.check(engine.shape)
        timings = next(part for part in assembly.get_all(OBSERVERS) if isinstance(part, StepTimings))
        with tqdm(total=len(cases) * (args.warmup + args.runs + 1), unit="run", leave=False) as bar:
            for case in cases:
                bar.set_description(case.name)
                for _ in range(args.warmup):
                    runner.warm_up(case)
                    bar.update()
                samples = []
                for _ in range(args.runs):
                    samples.append(runner.measure(case))
                    bar.update()
                run = functools.partial(run_batch, engine, runner.prompts(case), case.output)
                recordings[case.name] = recording = record(engine, timings, recorder, run)
                bar.update()
                found[case.name] = {
                    **attrs.asdict(case),
                    **summary(samples),
                    "breakdown_ms": breakdown(recording, case.batch),
                }
        kind = assembly.get(DEVICE).kind
    title = f"{args.config or 'defaults'}: {plan.nodes[RUNNER.name].name} on {kind}, {args.runs} runs"
    print(title)
    for line in _lines(found):
        print(line)
    if kind != "cpu":
        print(HOST_TIMES)
    if "json" in files:
        _write(files["json"], {"config": plan.document, "device": kind, "cases": found})
    if "plot" in files:
        files["plot"].write(plot(title, found))
    if "trace" in files:
        _write(files["trace"], trace_events(recordings))
    return 0


def _observed(document: Mapping[str, Any], registry: Registry) -> Mapping[str, Any]:
    """The config with the observer that times phases. What is no list is left for the plan to complain of."""
    components = document.get("components") or {}
    observers = components.get(OBSERVERS.name) or []
    if OBSERVERS.name not in registry.roles or not isinstance(observers, list) or "timings" in observers:
        return document
    return configs.with_overrides(document, {f"components.{OBSERVERS.name}": [*observers, "timings"]})


def _lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The table: a column for each case."""
    cases = list(found.values())

    def row(label: str, values: Sequence[float | None], digits: int) -> tuple[str, ...]:
        return (label, *("-" if value is None else f"{value:.{digits}f}" for value in values))

    rows = [("", *found)]
    for name in ("median", "least", "greatest"):
        label = "tokens/s" if name == "median" else f"  {name}"
        rows.append(row(label, [case["tokens_per_second"][name] for case in cases], 1))
    for key, name in _LATENCIES.items():
        for percent in ("p50", "p90", "p99"):
            values = [case["latency_ms"].get(key, {}).get(percent) for case in cases]
            rows.append(row(f"{name}, ms, {percent}", values, 2))
    rows.append(row("a step, ms", [case["breakdown_ms"]["step"]["wall"] for case in cases], 3))
    for side in ("host", "stream"):
        for name in cases[0]["breakdown_ms"][side]:
            label = f"  {side}: {_PHASES.get(name, name)}"
            rows.append(row(label, [case["breakdown_ms"][side][name] for case in cases], 3))
    rows.append(row("  overhead", [case["breakdown_ms"]["step"]["overhead"] for case in cases], 3))
    widths = [max(len(line[i]) for line in rows) for i in range(len(rows[0]))]
    for label, *cells in rows:
        yield "  ".join([label.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])


def _write(out: TextIO, document: Mapping[str, Any]) -> None:
    json.dump(document, out, indent=1)
    out.write("\n")
