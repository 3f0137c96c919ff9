"""Two configs side by side: each in a process of its own, in alternating runs."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import attrs

from workerkit.framework.assembly import assemble
from workerkit.framework.cli import common
from workerkit.framework.cli.bench_cases import Case, Runner, Sample
from workerkit.framework.errors import WorkerkitError


class Contender(Protocol):
    """Something that runs cases. Both raise WorkerkitError."""

    def warm_up(self, case: Case) -> None:
        """A run that does not count."""

    def measure(self, case: Case) -> Sample:
        """A run that counts."""


def _serve(pipe: Connection, document: Mapping[str, Any]) -> None:
    """A contender's process: answers (method, case) until None comes, or the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end hears of Ctrl-C, and ends this one
    try:
        with assemble(document) as assembly:
            assembly.engine.start()
            runner = Runner(assembly.engine)
            pipe.send(None)
            while (asked := pipe.recv()) is not None:
                method, case = asked
                case.check(runner.engine.shape)
                pipe.send(getattr(runner, method)(case))
    except WorkerkitError as error:
        pipe.send(str(error))
    except EOFError:
        return


class Remote:
    """The near end of a contender's process."""

    def __init__(self, name: str, pipe: Connection) -> None:
        self._name = name
        self._pipe = pipe

    def answer(self, *asked: Any) -> Any:
        """What it says to a question; the first thing, unasked, is nothing: it has started."""
        try:
            if asked:
                self._pipe.send(asked)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerkitError(f"{self._name}: its process ended; what it wrote stands above") from None
        if isinstance(answer, str):
            raise WorkerkitError(f"{self._name}: {answer}")
        return answer

    def warm_up(self, case: Case) -> None:
        """See Contender."""
        self.answer("warm_up", case)

    def measure(self, case: Case) -> Sample:
        """See Contender."""
        sample: Sample = self.answer("measure", case)
        return sample


@contextmanager
def contender(name: str, document: Mapping[str, Any]) -> Iterator[Remote]:
    """A process that starts the worker that a config describes. It uses the installed plugins."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, dict(document)), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Remote(name, ours)
    finally:
        ours.close()
        process.join(timeout=10)
        process.terminate()


@attrs.frozen
class Ratio:
    """Of tokens/s, ours to the other's."""

    ours: float  # medians
    other: float
    ratio: float  # of the medians
    least: float  # of the ratios within a pair of runs
    greatest: float


def compare(ours: Contender, other: Contender, cases: Sequence[Case], runs: int, warmup: int) -> dict[str, Ratio]:
    """Alternates: ours, other, other, ours, …, so that neither has always the warmer or the quieter machine."""
    from tqdm import tqdm

    rates: dict[str, tuple[list[float], list[float]]] = {case.name: ([], []) for case in cases}
    sides = ((ours, 0), (other, 1))
    with tqdm(total=len(cases) * 2 * (runs + warmup), unit="run", leave=False) as bar:
        for number in range(-warmup, runs):
            for case in cases:
                for contender, side in sides if number % 2 == 0 else sides[::-1]:
                    if number < 0:
                        contender.warm_up(case)
                    else:
                        rates[case.name][side].append(contender.measure(case).tokens_per_second)
                    bar.update()
    return {name: _ratio(*pair) for name, pair in rates.items()}


def _ratio(ours: Sequence[float], other: Sequence[float]) -> Ratio:
    pairs = [a / b for a, b in zip(ours, other, strict=True)]
    a, b = statistics.median(ours), statistics.median(other)
    return Ratio(a, b, a / b, min(pairs), max(pairs))


def against(
    names: tuple[str, str],
    documents: tuple[Mapping[str, Any], Mapping[str, Any]],
    cases: Sequence[Case],
    runs: int,
    warmup: int,
) -> dict[str, Ratio]:
    """The comparison of two configs, by case."""
    with ExitStack() as stack:
        pairs = zip(names, documents, strict=True)
        ours, other = (stack.enter_context(contender(name, document)) for name, document in pairs)
        ours.answer()
        other.answer()
        return compare(ours, other, cases, runs, warmup)


def comparison_lines(names: tuple[str, str], ratios: Mapping[str, Ratio]) -> Iterator[str]:
    """The table."""
    yield f"A: {names[0]}"
    yield f"B: {names[1]}"
    rows = [("case", "A tokens/s", "B tokens/s", "A / B", "least..greatest")]
    for name, its in ratios.items():
        spread = f"{its.least:.3f}..{its.greatest:.3f}"
        rows.append((name, f"{its.ours:.1f}", f"{its.other:.1f}", f"{its.ratio:.3f}", spread))
    yield from common.columns(rows)
