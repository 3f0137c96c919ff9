"""Many prompts through one engine: a progress bar, and a JSON line for each, also when Ctrl-C ends it early."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import attrs

from workerkit.framework.cli import common
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.engine import Engine, Prompt, PromptLogprobs, RequestDelta, TokenLogprobs
from workerkit.framework.interfaces.sampling_params import SamplingParams


@attrs.frozen
class Job:
    """One prompt, as given."""

    prompt: str | list[int]
    params: SamplingParams
    lora: str | None = None


@attrs.define
class Record:
    """What becomes a JSON line. Logprobs are left out where nobody asked for them."""

    index: int  # of the prompt
    completion: int  # which of the prompt's n
    prompt: str | list[int]
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def add(self, delta: RequestDelta) -> None:
        """What one step added."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason, self.error = delta.finish_reason, delta.error

    def line(self) -> str:
        """As JSON, which has no infinity: null."""
        values = attrs.asdict(self, value_serializer=lambda _, __, value: _finite(value))
        optional = ("logprobs", "prompt_logprobs")
        kept = {name: value for name, value in values.items() if name not in optional or value is not None}
        return json.dumps(kept, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Lines:
    """Writes records in the order of their prompts and completions, each line in one piece."""

    def __init__(self, out: TextIO, counts: Sequence[int]) -> None:
        self._out = out
        self._counts = list(counts)  # completions of each prompt
        self._ready: dict[tuple[int, int], Record] = {}
        self._next = (0, 0)
        self.failed = False

    def refuse(self, record: Record) -> None:
        """The only one of its prompt."""
        self._counts[record.index] = 1
        self.add(record)

    def add(self, record: Record) -> None:
        self._ready[record.index, record.completion] = record
        self.failed |= record.error is not None
        while (ready := self._ready.pop(self._next, None)) is not None:
            self._write(ready)
            last = ready.completion + 1 == self._counts[ready.index]
            self._next = (ready.index + 1, 0) if last else (ready.index, ready.completion + 1)

    def rest(self) -> None:
        """What is finished but waits for one before it that will never be."""
        for key in sorted(self._ready):
            self._write(self._ready.pop(key))

    def _write(self, record: Record) -> None:
        self._out.write(record.line())
        self._out.flush()


def run_batch(engine: Engine, jobs: Sequence[Job], prompt_of: Callable[[Job], Prompt], out: TextIO) -> int:
    """Complete all jobs; a refused one gets its line too. Returns 1 when any failed, else 0.

    After the first Ctrl-C the running step ends, the rest is aborted, what is finished is written, and
    KeyboardInterrupt is raised.
    """
    from tqdm import tqdm

    running: dict[tuple[str, int], Record] = {}
    counts = [job.params.n for job in jobs]
    lines = _Lines(out, counts)
    meter, count = common.SpeedMeter(engine), 0
    with _ctrl_c() as pressed, tqdm(total=sum(counts), unit="text", file=sys.stderr) as bar:
        try:
            for index, job in enumerate(jobs):
                if pressed.is_set():
                    break
                try:
                    req_id = engine.add_request(prompt_of(job), job.params)
                except RequestError as error:
                    lines.refuse(Record(index, 0, job.prompt, finish_reason="error", error=str(error)))
                    bar.update(job.params.n)
                    continue
                running.update({(req_id, number): Record(index, number, job.prompt) for number in range(job.params.n)})
            while running and not pressed.is_set():
                for delta in engine.step():
                    key = (delta.req_id, delta.index)
                    running[key].add(delta)
                    count += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        lines.add(running.pop(key))
                        bar.update()
        finally:
            for req_id in dict.fromkeys(req_id for req_id, _ in running):
                engine.abort(req_id)
            lines.rest()
    common.warn(meter.text(count))
    if pressed.is_set():
        raise KeyboardInterrupt
    return 1 if lines.failed else 0


@contextlib.contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """The first Ctrl-C is noted, the second one breaks off."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield pressed
        return

    def note(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
