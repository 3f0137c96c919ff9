"""Stop strings, looked for in text as it grows; nothing that may still become part of one is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workerkit.framework.errors import RequestError


class Released(NamedTuple):
    """What a step's text comes to."""

    text: str  # certain now; ends before the stop string, or behind it where that is to be shown
    num_pieces: int  # that count: up to the one that completes a stop string, that one included
    stopped: bool


class StopStrings:
    """Watches one request's text. Counts in characters, and looks at every piece of a step, however many there are.

    A stop string counts when a token after the first `min_tokens` completes it; it may have begun before. Of several
    that one token completes the leftmost counts.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        if "" in stops:
            raise RequestError("stop: '' would end every text at once; a stop string needs at least one character")
        self._stops = tuple(stops)
        self._include = include
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, pieces: Sequence[str]) -> Released:
        """`pieces` holds the new text of each token. After a stop nothing is held back."""
        if not self._stops:
            return Released("".join(pieces), len(pieces), False)
        certain = ""
        for number, piece in enumerate(pieces, 1):
            self._num_tokens += 1
            text, stopped = self._take(piece)
            certain += text
            if stopped:
                return Released(certain, number, True)
        return Released(certain, len(pieces), False)

    def finish(self, rest: str) -> Released:
        """The text ends with `rest`, which belongs to the last token. Nothing is held back any more."""
        text, stopped = self._take(rest)
        held, self._held = self._held, ""
        return Released(text + held, 0, stopped)

    def _take(self, piece: str) -> tuple[str, bool]:
        text, old = self._held + piece, len(self._held)
        if self._num_tokens > self._min_tokens:
            found = [
                (start, start + len(stop))
                for stop in self._stops
                if (start := text.find(stop, max(0, old - len(stop) + 1))) >= 0  # it ends in the piece
            ]
            if found:
                start, end = min(found)
                self._held = ""
                return text[: end if self._include else start], True
        certain = len(text) - self._may_begin_a_stop(text)
        self._held = text[certain:]
        return text[:certain], False

    def _may_begin_a_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop) - 1, len(text)) + 1)
                if text.endswith(stop[:length])
            ),
            default=0,
        )
