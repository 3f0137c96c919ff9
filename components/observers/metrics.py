"""Counters and histograms of steps, through prometheus_client. One object serves V1 and V2."""

from __future__ import annotations

import time

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@attrs.frozen(kw_only=True)
class MetricsConfig:
    """Options of `metrics`."""

    prefix: str = attrs.field(default="workerkit", metadata={"doc": "of every metric's name"})


class Metrics(Observer):
    """Each worker has a registry of its own; `exposition` is what a scrape would read."""

    def __init__(self, config: MetricsConfig) -> None:
        self.registry = CollectorRegistry()
        prefix = config.prefix

        def counter(name: str, doc: str) -> Counter:
            return Counter(f"{prefix}_{name}", doc, registry=self.registry)

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
        self._seconds = Histogram(
            f"{prefix}_step_seconds",
            "from the start of a step to its tokens on the host",
            registry=self.registry,
            buckets=STEP_BUCKETS,
        )
        self._tokens = Histogram(
            f"{prefix}_batch_tokens", "tokens of a batch", registry=self.registry, buckets=SIZE_BUCKETS
        )
        self._started: list[float] = []  # of steps in flight, oldest first

    def exposition(self) -> str:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    @hookimpl
    def step_started(self, output: SchedulerOutput) -> None:
        self._preempted.inc(len(output.preempted_req_ids))
        self._finished.inc(len(output.finished_req_ids))
        tokens = output.total_num_scheduled_tokens
        if tokens:
            self._steps.inc()
            self._scheduled.inc(tokens)
            self._started.append(time.perf_counter())

    @hookimpl
    def batch_prepared(self, batch: InputBatch) -> None:
        self._requests.set(batch.num_reqs)
        self._tokens.observe(batch.num_tokens)

    @hookimpl
    def host_tokens_read(self, part: str) -> None:
        self._host_reads.labels(part).inc()

    @hookimpl
    def output_ready(self, output: ModelRunnerOutput) -> None:
        self._generated.inc(sum(map(len, output.sampled_token_ids)))
        self._seconds.observe(time.perf_counter() - self._started.pop(0))
