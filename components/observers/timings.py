"""How long the phases of a step take, as the hooks see them. It records only while it is asked to."""

from __future__ import annotations

import threading
import time

from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.observer import Phase, StepTimings


class Timings(StepTimings):
    """Phases on the device's stream, which follow each other: `forward`, `sample` (from the forward's end: where the
    stream waits for the host in between, that is in it), `propose` (from the tokens to the new drafts, only with a
    speculator) and `commit` (the rest). On an accelerator these are the times of the host that issues the work.
    """

    def __init__(self) -> None:
        self._phases: list[Phase] | None = None  # None: not recording
        self._step = 0
        self._at = 0  # where the running phase began; 0: before the recording, so it is left out

    def start(self) -> None:
        self._at = 0
        self._phases = []

    def stop(self) -> tuple[Phase, ...]:
        phases, self._phases = self._phases, None
        return tuple(phases or ())

    def _end(self, name: str) -> None:
        if (phases := self._phases) is None:
            return
        now = time.perf_counter_ns()
        if self._at:
            phases.append(Phase(name, self._step, self._at, now, threading.current_thread().name))
            self._at = now

    @hookimpl
    def batch_prepared(self) -> None:
        self._step += 1
        if self._phases is not None:
            self._at = time.perf_counter_ns()

    @hookimpl
    def forward_finished(self) -> None:
        self._end("forward")

    @hookimpl
    def tokens_sampled(self) -> None:
        self._end("sample")

    @hookimpl
    def drafts_proposed(self) -> None:
        self._end("propose")

    @hookimpl
    def step_finished(self) -> None:
        self._end("commit")
