"""Stop strings, looked for in text as it grows; nothing that may still become part of one is shown."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from workerkit.framework.errors import RequestError


@attrs.frozen
class Released:
    """What a step's text comes to."""

    text: str  # certain now; ends before the stop string
    num_pieces: int  # that count: up to the one that completes a stop string, that one included
    stopped: bool


class StopStrings:
    """Watches one request's text. Counts in characters, and looks at every piece of a step, however many there are."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("stop: '' would end every text at once; a stop string needs at least one character")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, pieces: Sequence[str]) -> Released:
        """`pieces` holds the new text of each token. After a stop nothing is held back."""
        certain = ""
        for number, piece in enumerate(pieces, 1):
            text = self._held + piece
            starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
            if starts:
                self._held = ""
                return Released(certain + text[: min(starts)], number, True)
            keep = self._may_begin_a_stop(text)
            self._held = text[len(text) - keep :]
            certain += text[: len(text) - keep]
        return Released(certain, len(pieces), False)

    def flush(self) -> str:
        """What was held back: the text has ended, so no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held

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
