"""Ctrl-C and steps: an interrupt in the middle of a step would leave scheduler and worker at odds."""

from __future__ import annotations

# `signal` wraps these to turn numbers into enums, in ten times the time, and every step pays for it.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends; a second one gets through at once. In the main thread only."""
    handler = _signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[FrameType | None] = []

    def catch(signum: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > 1:
            handler(signum, frame)

    _signal.signal(signal.SIGINT, catch)
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, handler)
        if len(caught) == 1:
            handler(signal.SIGINT, caught[0])
