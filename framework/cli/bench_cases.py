"""What `workerkit bench` measures: batches of random prompts through an engine, and the numbers that come of them."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Sequence

import attrs

from workerkit.framework.errors import WorkerkitError, did_you_mean
from workerkit.framework.interfaces.engine import Engine, RequestDelta
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams

Prompts = Sequence[Sequence[int]]
PERCENTILES = (50, 90, 99)
_now = time.perf_counter


@attrs.frozen
class Case:
    """`batch` prompts of `prompt` random token ids at once, `output` new tokens each: greedy, end tokens ignored."""

    name: str
    batch: int
    prompt: int
    output: int

    @property
    def is_prefill(self) -> bool:
        """Whether its throughput counts prompt tokens, not new ones."""
        return self.output == 1

    def check(self, shape: WorkerShape) -> None:
        """Raises WorkerkitError for a worker that cannot run it as it is meant: all at once."""
        if self.batch > shape.max_num_reqs:
            raise WorkerkitError(
                f"case {self.name}: {self.batch} requests at once, limits.max_num_reqs is {shape.max_num_reqs}"
            )
        if self.prompt + self.output > shape.max_model_len:
            raise WorkerkitError(
                f"case {self.name}: {self.prompt} + {self.output} tokens, max_model_len is {shape.max_model_len}"
            )


DEFAULTS = (Case("b1", 1, 32, 128), Case("b8", 8, 32, 128), Case("b32", 32, 32, 128), Case("prefill", 8, 512, 1))


def parse_case(text: str) -> Case:
    """A default case by name, or BATCHxPROMPT+OUTPUT. Raises WorkerkitError."""
    for case in DEFAULTS:
        if case.name == text:
            return case
    if (sizes := re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)) is None:
        hint = did_you_mean(text, [case.name for case in DEFAULTS])
        raise WorkerkitError(f"--case {text}: no such case; {hint}; or your own, BATCHxPROMPT+OUTPUT, like 4x128+64")
    batch, prompt, output = map(int, sizes.groups())
    if not (batch and prompt and output):
        raise WorkerkitError(f"--case {text}: BATCH, PROMPT and OUTPUT must be >= 1")
    return Case(text, batch, prompt, output)


@attrs.frozen(kw_only=True)
class Latencies:
    """Seconds, of all requests of a batch."""

    first: tuple[float, ...] = ()  # from the batch's submission to a request's first token
    between: tuple[float, ...] = ()  # between two tokens of a request; k tokens of one step have k equal shares
    whole: tuple[float, ...] = ()  # from the batch's submission to a request's last token


@attrs.frozen
class Sample:
    """One measured run of a case."""

    tokens_per_second: float
    latencies: Latencies


def run_batch(
    engine: Engine, prompts: Prompts, output: int, step: Callable[[], list[RequestDelta]] | None = None
) -> tuple[float, Latencies]:
    """(Seconds until the last token, latencies) of a batch. `step`: in place of the engine's own.

    Raises WorkerkitError for a request that fails.
    """
    step = step or engine.step
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    begin = at = _now()
    newest: dict[str, float | None] = {engine.add_request(prompt, params): None for prompt in prompts}
    first: list[float] = []
    between: list[float] = []
    whole: list[float] = []
    while engine.has_unfinished:
        deltas = step()
        at = _now() if deltas else at  # the worker may still have to hear that the last request is gone
        for delta in deltas:
            if delta.finish_reason == "error":
                raise WorkerkitError(f"a request of the benchmark failed: {delta.error}")
            count = len(delta.token_ids)
            before = newest[delta.req_id]
            if before is None:
                first.append(at - begin)
            else:
                between += [(at - before) / count] * count
            newest[delta.req_id] = at
            if delta.finish_reason is not None:
                whole.append(at - begin)
    return at - begin, Latencies(first=tuple(first), between=tuple(between), whole=tuple(whole))


class Runner:
    """Runs cases on an engine, with fresh prompts each time, so that no prefix cache shortens a run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._random = random.Random(0)

    def prompts(self, case: Case) -> Prompts:
        """[batch][prompt] token ids."""
        vocab_size = self.engine.shape.vocab_size
        return [[self._random.randrange(vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]

    def warm_up(self, case: Case) -> None:
        """Both lengths that are measured, the long one cut short."""
        for output in {1, min(case.output, 8)}:
            run_batch(self.engine, self.prompts(case), output)

    def measure(self, case: Case) -> Sample:
        """Prefill: prompt tokens / t(1 new token). Otherwise new tokens after the first / (t(all) - t(1))."""
        first, latencies = run_batch(self.engine, self.prompts(case), 1)
        if case.is_prefill:
            return Sample(case.batch * case.prompt / first, latencies)
        seconds, latencies = run_batch(self.engine, self.prompts(case), case.output)
        if seconds <= first:
            raise WorkerkitError(f"case {case.name}: {case.output} tokens took no longer than 1, ask for more of them")
        return Sample(case.batch * (case.output - 1) / (seconds - first), latencies)


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest of `values`, linearly; of at least one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(samples: Sequence[Sample]) -> dict[str, object]:
    """What is reported of a case: tokens/s of all runs, and percentiles in milliseconds over all of them."""
    rates = [sample.tokens_per_second for sample in samples]
    pooled = {
        name: [value for sample in samples for value in getattr(sample.latencies, name)]
        for name in ("first", "between", "whole")
    }
    return {
        "tokens_per_second": {"median": statistics.median(rates), "least": min(rates), "greatest": max(rates)},
        "runs": rates,
        "latency_ms": {
            name: {f"p{percent}": 1e3 * percentile(values, percent) for percent in PERCENTILES}
            for name, values in pooled.items()
            if values
        },
    }
