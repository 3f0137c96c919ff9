"""Where the time of a step goes: the parts of a worker, assembled with time stamps around what the hooks cannot see."""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from workerkit.framework import roles
from workerkit.framework.interfaces.device import Pending
from workerkit.framework.interfaces.engine import Engine, RequestDelta
from workerkit.framework.interfaces.observer import Phase, StepTimings
from workerkit.framework.plan import Plan
from workerkit.framework.registry import Role

T = TypeVar("T")

# In the order of a step. What is not named here (the engine's loop, submitting) is `other`.
HOST = ("schedule", "prepare", "wait", "update", "detokenise", "other")
STREAM = ("inputs", "attention", "forward", "sample", "propose", "commit")


class Recorder:
    """What the timed parts of one worker saw while it was on. The counts go on when it is off: the observer counts all
    steps, too."""

    def __init__(self) -> None:
        self.on = False
        self.slices: list[Phase] = []
        self.works: list[Phase] = []  # on the device's stream
        self.scheduled = 0  # steps
        self.collected = 0
        self.updated_at = 0  # when the scheduler had taken the newest tokens
        self._here = threading.local()

    def note(self, name: str, begin: int, step: int) -> None:
        """Something of this thread ends now."""
        if self.on:
            now = time.perf_counter_ns()
            self.slices.append(Phase(name, step, begin, now, threading.current_thread().name))

    def work(self, work: Callable[[], T]) -> Callable[[], T]:
        """The same, timed where it runs."""
        step = self.scheduled

        def timed() -> T:
            self._here.on_stream = True
            begin = time.perf_counter_ns()
            try:
                return work()
            finally:
                now = time.perf_counter_ns()
                self._here.on_stream = False
                self.works.append(Phase("work", step, begin, now, threading.current_thread().name))

        return timed

    @property
    def is_on_stream(self) -> bool:
        """Whether this thread is in the middle of a work."""
        return getattr(self._here, "on_stream", False)


class _TimedPending(Pending[T]):
    def __init__(self, pending: Pending[T], recorder: Recorder) -> None:
        self._pending = pending
        self._recorder = recorder

    def wait(self) -> T:
        begin, recorder = time.perf_counter_ns(), self._recorder
        try:
            return self._pending.wait()
        finally:
            if not recorder.is_on_stream:
                recorder.note("wait", begin, recorder.collected + 1)


def _scheduler(base: Any, recorder: Recorder) -> type:
    class TimedScheduler(base):  # type: ignore[misc]
        def schedule(self) -> Any:
            begin = time.perf_counter_ns()
            output = super().schedule()
            recorder.scheduled += bool(output.num_scheduled_tokens)
            recorder.note("schedule", begin, recorder.scheduled)
            return output

        def update(self, *args: Any) -> Any:
            begin = time.perf_counter_ns()
            result = super().update(*args)
            recorder.collected += 1
            recorder.note("update", begin, recorder.collected)
            recorder.updated_at = time.perf_counter_ns()
            return result

    return TimedScheduler


def _worker(base: Any, recorder: Recorder) -> type:
    class TimedWorker(base):  # type: ignore[misc]
        def execute_model(self, *args: Any) -> Any:
            begin = time.perf_counter_ns()
            result = super().execute_model(*args)
            recorder.note("prepare", begin, recorder.scheduled)
            return result

    return TimedWorker


def _attention(base: Any, recorder: Recorder) -> type:
    class TimedAttention(base):  # type: ignore[misc]
        def build(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = super().build(*args, **kwargs)
            recorder.note("attention", begin, 0)  # of the step whose work it is in
            return result

    return TimedAttention


def _device(base: Any, recorder: Recorder) -> type:
    class TimedDevice(base):  # type: ignore[misc]
        def submit(self, work: Callable[[], Any]) -> Any:
            if not recorder.on:
                return super().submit(work)
            return _TimedPending(super().submit(recorder.work(work)), recorder)

        def copy_to_host(self, tensor: Any) -> Any:
            pending = super().copy_to_host(tensor)
            return _TimedPending(pending, recorder) if recorder.on and self.kind != "cpu" else pending

    return TimedDevice


_TIMED: tuple[tuple[Role[Any], Callable[[Any, Recorder], type]], ...] = (
    (roles.SCHEDULER, _scheduler),
    (roles.WORKER, _worker),
    (roles.ATTENTION, _attention),
    (roles.DEVICE, _device),
)


def timed_plan(plan: Plan, recorder: Recorder) -> Plan:
    """The plan with subclasses of the parts around which time stamps are taken: they are built, wired and asked like
    the parts themselves. A part that is no class is left as it is, and what it does counts as its caller's."""
    nodes = dict(plan.nodes)
    for role, subclass in _TIMED:
        node = nodes.get(role.name)
        if node is not None and isinstance(node.factory, type):
            nodes[role.name] = attrs.evolve(node, factory=subclass(node.factory, recorder))
    return attrs.evolve(plan, nodes=nodes)


@attrs.frozen
class Recording:
    """What happened in a batch. Slices of a thread follow or contain each other."""

    slices: tuple[Phase, ...]
    steps: Mapping[int, int]  # collected step -> how many requests it added to
    began: int

    def steady(self, batch: int) -> list[int]:
        """The steps that all requests share, without the first, which may finish a prefill, and the last, behind which
        no other overlaps; all steps where there are no such."""
        full = [step for step, count in self.steps.items() if count == batch][1:-1]
        return full or list(self.steps)


def record(
    engine: Engine, timings: StepTimings, recorder: Recorder, run: Callable[[Callable[[], list[RequestDelta]]], object]
) -> Recording:
    """Records what `run(step)` does; it has to call `step` in place of the engine's."""
    steps: dict[int, int] = {}

    def step() -> list[RequestDelta]:
        begin, before = time.perf_counter_ns(), recorder.collected
        deltas = engine.step()
        if recorder.collected > before:
            recorder.note("detokenise", recorder.updated_at, recorder.collected)
            steps[recorder.collected] = len(deltas)
        recorder.note("step", begin, recorder.collected)
        return deltas

    recorder.slices, recorder.works, recorder.on = [], [], True
    timings.start()
    began = time.perf_counter_ns()
    try:
        run(step)
    finally:
        recorder.on = False
        phases = timings.stop()
    return Recording((*_steps_of(recorder.slices, recorder.works), *_on_stream(recorder.works, phases)), steps, began)


def _steps_of(slices: Iterable[Phase], works: Sequence[Phase]) -> Iterable[Phase]:
    """What was noted on the stream belongs to the step of the work that it is in."""
    begins = [work.begin for work in works]
    for part in slices:
        if part.name == "attention":
            part = attrs.evolve(part, step=works[bisect(begins, part.begin) - 1].step)
        yield part


def _on_stream(works: Sequence[Phase], phases: Sequence[Phase]) -> Iterable[Phase]:
    """Each work cut into what it does. The observer sees where phases end; one that began before this work (sampling,
    which waits for the host with V1) begins with it."""
    rest = iter(phases)
    phase = next(rest, None)
    for work in works:
        at = work.begin
        while phase is not None and phase.end <= work.end:
            begin = max(phase.begin, at)
            if phase.name == "forward":
                yield attrs.evolve(phase, name="inputs", begin=at, end=begin)
            yield attrs.evolve(phase, begin=begin)
            at, phase = phase.end, next(rest, None)
        if at == work.begin:  # requests leave or arrive, or there is nothing but blocks to move
            yield attrs.evolve(work, name="inputs")


def exclusive(slices: Iterable[Phase]) -> dict[str, dict[int, int]]:
    """Name -> step -> ns that it took, without what is inside it."""
    taken: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    by_thread: dict[str, list[Phase]] = defaultdict(list)
    for part in slices:
        by_thread[part.thread].append(part)
    for parts in by_thread.values():
        outer: list[Phase] = []
        for part in sorted(parts, key=lambda part: (part.begin, -part.end)):
            while outer and outer[-1].end <= part.begin:
                outer.pop()
            if outer:
                taken[outer[-1].name][outer[-1].step] -= part.end - part.begin
            taken[part.name][part.step] += part.end - part.begin
            outer.append(part)
    return taken


def breakdown(recording: Recording, batch: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step, medians over the steady steps. `host` and `stream` overlap where the runner lets them.

    `step`: `wall` from one step's text to the next one's, `overhead` the wall less forward, sample and propose.
    """
    taken = exclusive(recording.slices)
    steady = recording.steady(batch)

    def median(values: Iterable[float]) -> float:
        return statistics.median(values) / 1e6

    def of(name: str) -> float:
        return median(taken[name][step] for step in steady)

    ends = {part.step: part.end for part in recording.slices if part.name == "detokenise"}
    wall = {step: ends[step] - ends.get(step - 1, recording.began) for step in steady}
    computed = [sum(taken[name][step] for name in ("forward", "sample", "propose")) for step in steady]
    host = {name: of("step" if name == "other" else name) for name in HOST}
    return {
        "host": host,
        "stream": {name: of(name) for name in STREAM},
        "step": {
            "wall": median(wall.values()),
            "overhead": median(wall[step] - busy for step, busy in zip(steady, computed, strict=True)),
        },
    }


def trace_events(recordings: Mapping[str, Recording]) -> dict[str, Any]:
    """A document for Perfetto or chrome://tracing: a track for each thread; time is in microseconds."""
    threads = list(dict.fromkeys(part.thread for recording in recordings.values() for part in recording.slices))
    start = min((recording.began for recording in recordings.values()), default=0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
        for number, name in enumerate(threads)
    ]
    for case, recording in recordings.items():
        for part in sorted(recording.slices, key=lambda part: (part.begin, -part.end)):
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": threads.index(part.thread),
                    "name": part.name,
                    "ts": (part.begin - start) / 1e3,
                    "dur": (part.end - part.begin) / 1e3,
                    "args": {"step": part.step, "case": case},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}
