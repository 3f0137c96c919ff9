"""The engine's side of a request: its text while it runs, and the completion that grows from its deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from workerkit.components.engine.stop import StopStrings
from workerkit.framework.interfaces.engine import Completion, Detokenizer, FinishReason, RequestDelta


@attrs.define(eq=False)
class LiveRequest:
    """A request that is not finished."""

    detokenizer: Detokenizer
    stop: StopStrings
    sink: deque[RequestDelta]  # of the call that waits for it

    def push(self, token_ids: Sequence[int], ended: bool) -> tuple[int, str, bool]:
        """(How many of the tokens count, text that is certain now, whether a stop string was completed)."""
        released = self.stop.push([self.detokenizer.push([token]) for token in token_ids])
        if released.stopped or not ended:
            return released.num_pieces, released.text, released.stopped
        rest = self.stop.push([self.detokenizer.flush()])
        text = released.text + rest.text
        return released.num_pieces, text if rest.stopped else text + self.stop.flush(), rest.stopped


@attrs.define
class GrowingCompletion:
    """What has come of one prompt so far."""

    req_id: str
    position: int  # of the prompt in its call
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = attrs.field(factory=list)
    text: str = ""

    def completion(self, reason: FinishReason, error: str | None) -> Completion:
        """The finished request."""
        return Completion(
            req_id=self.req_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=reason,
            error=error,
        )
