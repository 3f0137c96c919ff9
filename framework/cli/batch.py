"""Many prompts through one engine: a progress bar, and a JSON line for each, also when Ctrl-C ends it early."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import attrs

from workerkit.framework.cli import common
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.engine import Engine, Prompt
from workerkit.framework.interfaces.request import SamplingParams


@attrs.frozen
class Job:
    """One prompt, as given."""

    prompt: Prompt
    params: SamplingParams


@attrs.define
class Record:
    """What becomes a JSON line."""

    index: int
    prompt: Prompt
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    error: str | None = None


class _Lines:
    """Writes records in the order of their prompts, each line in one piece."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._ready: dict[int, Record] = {}
        self._next = 0
        self.failed = False

    def add(self, record: Record) -> None:
        self._ready[record.index] = record
        self.failed |= record.error is not None
        while self._next in self._ready:
            self._write(self._ready.pop(self._next))
            self._next += 1

    def rest(self) -> None:
        """What is finished but waits for one before it that will never be."""
        for index in sorted(self._ready):
            self._write(self._ready.pop(index))

    def _write(self, record: Record) -> None:
        self._out.write(json.dumps(attrs.asdict(record), ensure_ascii=False) + "\n")
        self._out.flush()


def run_batch(engine: Engine, jobs: Sequence[Job], prompt_of: Callable[[Job], Prompt], out: TextIO) -> int:
    """Complete all jobs; a refused one gets its line too. Returns 1 when any failed, else 0.

    After the first Ctrl-C the running step ends, the rest is aborted, what is finished is written, and
    KeyboardInterrupt is raised.
    """
    from tqdm import tqdm

    running: dict[str, Record] = {}
    lines = _Lines(out)
    start, count = time.perf_counter(), 0
    with _ctrl_c() as pressed, tqdm(total=len(jobs), unit="prompt", file=sys.stderr) as bar:
        try:
            for index, job in enumerate(jobs):
                if pressed.is_set():
                    break
                record = Record(index, job.prompt)
                try:
                    running[engine.add_request(prompt_of(job), job.params)] = record
                except RequestError as error:
                    record.finish_reason, record.error = "error", str(error)
                    lines.add(record)
                    bar.update()
            while running and not pressed.is_set():
                for delta in engine.step():
                    record = running[delta.req_id]
                    record.text += delta.text
                    record.token_ids += delta.token_ids
                    count += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        record.finish_reason, record.error = delta.finish_reason, delta.error
                        lines.add(running.pop(delta.req_id))
                        bar.update()
        finally:
            for req_id in running:
                engine.abort(req_id)
            lines.rest()
    common.warn(common.speed(count, time.perf_counter() - start))
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
