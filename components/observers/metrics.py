"""Counters and histograms of steps, through prometheus_client. One object serves V1 and V2. docs/metrics.md defines
each metric."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
DRAFT_BUCKETS = (0.0001, 0.0002, 0.0005, *STEP_BUCKETS)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@attrs.frozen(kw_only=True)
class MetricsConfig:
    """Options of `metrics`."""

    prefix: str = attrs.field(default="workerkit", metadata={"doc": "of every metric's name"})


class SpeculationMetrics:
    """What became of the drafts of each step: fed with the steps in order, wherever they overlap."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def counter(name: str, doc: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"{prefix}_spec_{name}", doc, labels, registry=registry)

        self._drafts = counter("drafts", "times that a request verified drafts in a step")
        self._draft_tokens = counter("draft_tokens", "drafts that were verified, without placeholders")
        self._accepted = counter("accepted_tokens", "drafts that were accepted")
        self._by_position = counter("accepted_tokens_per_position", "accepted drafts by position", ["position"])
        self._positions: list[Counter] = []
        self._rate = Gauge(f"{prefix}_spec_acceptance_rate", "accepted tokens / draft tokens", registry=registry)
        self._length = Gauge(
            f"{prefix}_spec_mean_accepted_length", "1 + accepted tokens / drafts: tokens a step", registry=registry
        )
        self._num_drafts = self._num_draft_tokens = self._num_accepted = 0
        self._held: dict[str, int] = {}  # drafts that the worker holds for a request, as of its last answer

    def forget(self, req_ids: Iterable[str]) -> None:
        """Requests have left the worker."""
        for req_id in req_ids:
            self._held.pop(req_id, None)

    def take(self, scheduled: Mapping[str, int], output: ModelRunnerOutput) -> None:
        """A step's answer; `scheduled`: how many drafts, placeholders included, it had for each request."""
        drafts = draft_tokens = 0
        accepted_at: list[int] = []  # by position
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            count = min(scheduled.get(req_id, 0), self._held.get(req_id, 0)) if scheduled else 0
            if not (count and tokens):
                continue
            drafts += 1
            draft_tokens += count
            accepted_at.extend([0] * (count - len(accepted_at)))
            for index in range(len(tokens) - 1):
                accepted_at[index] += 1
        self._held.update(zip(output.req_ids, map(len, output.draft_token_ids), strict=False))  # () without speculation
        if not drafts:
            return
        while len(self._positions) < len(accepted_at):
            self._positions.append(self._by_position.labels(len(self._positions) + 1))
        for metric, accepted in zip(self._positions, accepted_at, strict=False):
            metric.inc(accepted)
        self._drafts.inc(drafts)
        self._draft_tokens.inc(draft_tokens)
        self._accepted.inc(sum(accepted_at))
        self._num_drafts += drafts
        self._num_draft_tokens += draft_tokens
        self._num_accepted += sum(accepted_at)
        self._rate.set(self._num_accepted / self._num_draft_tokens)
        self._length.set(1 + self._num_accepted / self._num_drafts)


@attrs.define(eq=False)
class _Step:
    """One on its way."""

    started: float
    drafts: Mapping[str, int]
    leaving: set[str] = attrs.field(factory=set)  # requests that have left since: after its answer they are forgotten


class Metrics(Observer):
    """Each worker has a registry of its own; `exposition` is what a scrape would read.

    Answers arrive in the order of their steps, perhaps after the next step has started. The hooks on the device's
    stream never mix two steps: a step's forward follows the drafts of the one before.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self.registry = CollectorRegistry()
        prefix = config.prefix

        def counter(name: str, doc: str) -> Counter:
            return Counter(f"{prefix}_{name}", doc, registry=self.registry)

        def seconds(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}_{name}", doc, registry=self.registry, buckets=buckets)

        self._steps = counter("steps", "steps that scheduled at least one token")
        self._scheduled = counter("scheduled_tokens", "tokens scheduled, prompt and output")
        self._generated = counter("generated_tokens", "tokens that reached the host")
        self._preempted = counter("preempted_requests", "requests that lost their blocks")
        self._finished = counter("finished_requests", "requests that left, aborted ones too")
        self._host_reads = Counter(
            f"{prefix}_host_token_reads",
            "times that a part made the stream wait for tokens on the host",
            ["part"],
            registry=self.registry,
        )
        self._requests = Gauge(f"{prefix}_batch_requests", "requests in the last batch", registry=self.registry)
        self._seconds = seconds("step_seconds", "from the start of a step to its tokens on the host", STEP_BUCKETS)
        self._tokens = Histogram(
            f"{prefix}_batch_tokens", "tokens of a batch", registry=self.registry, buckets=SIZE_BUCKETS
        )
        self._draft_seconds = seconds("spec_draft_seconds", "from a step's tokens to its new drafts", DRAFT_BUCKETS)
        self._verify_seconds = seconds(
            "spec_verify_seconds", "forward and sampling of a step with drafts", DRAFT_BUCKETS
        )
        self._speculation = SpeculationMetrics(prefix, self.registry)
        self._in_flight: deque[_Step] = deque()  # oldest first
        self._now: Callable[[], float] = time.perf_counter
        self._verifying_since: float | None = None  # None: the step on the stream has no drafts
        self._sampled_at = 0.0

    def exposition(self) -> str:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    @hookimpl
    def step_started(self, output: SchedulerOutput) -> None:
        self._preempted.inc(len(output.preempted_req_ids))
        self._finished.inc(len(output.finished_req_ids))
        leaving = output.finished_req_ids | output.preempted_req_ids
        if self._in_flight:
            self._in_flight[-1].leaving |= leaving
        else:
            self._speculation.forget(leaving)
        tokens = output.total_num_scheduled_tokens
        if tokens:
            self._steps.inc()
            self._scheduled.inc(tokens)
            self._in_flight.append(_Step(self._now(), output.scheduled_drafts))

    @hookimpl
    def batch_prepared(self, batch: InputBatch) -> None:
        self._requests.set(batch.num_reqs)
        self._tokens.observe(batch.num_tokens)
        self._verifying_since = self._now() if batch.plan.num_draft_tokens.any() else None

    @hookimpl
    def host_tokens_read(self, part: str) -> None:
        self._host_reads.labels(part).inc()

    @hookimpl
    def tokens_sampled(self) -> None:
        self._sampled_at = self._now()
        if self._verifying_since is not None:
            self._verify_seconds.observe(self._sampled_at - self._verifying_since)

    @hookimpl
    def drafts_proposed(self) -> None:
        self._draft_seconds.observe(self._now() - self._sampled_at)

    @hookimpl
    def output_ready(self, output: ModelRunnerOutput) -> None:
        step = self._in_flight.popleft()
        self._generated.inc(sum(map(len, output.sampled_token_ids)))
        self._seconds.observe(self._now() - step.started)
        self._speculation.take(step.drafts, output)
        self._speculation.forget(step.leaving)
