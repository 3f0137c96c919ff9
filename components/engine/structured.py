"""The structured requests of an engine: their matchers by request id, and the masks of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from workerkit.framework.interfaces.request import GrammarOutput, SchedulerOutput
from workerkit.framework.interfaces.structured import GrammarMatcher


class StructuredRequests:
    """Where each structured request stands in its grammar. Requests without a grammar are unknown here.

    The engine's part of a step, for a request that was added:

    1. Before `output`, its earlier steps are collected (`waits_for` names the requests this is about): a mask depends
       on the tokens before it.
    2. `output` between `execute_model` and `sample_tokens`, whose argument it makes; None when no request of the step
       is structured.
    3. `accept` with the tokens of the step that stay in the text, once. True: nothing can follow, so the engine ends
       the request, also with `ignore_eos`.

    A request that is preempted stays; its matcher goes on where it was. `remove` when it has ended, however it did.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._matchers: dict[str, GrammarMatcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def add(self, req_id: str, matcher: GrammarMatcher) -> None:
        """The matcher stands at the first generated token and belongs to this request alone: `compile` one for each."""
        self._matchers[req_id] = matcher

    def remove(self, req_id: str) -> None:
        """Nothing happens for a request that is not known."""
        self._matchers.pop(req_id, None)

    def accept(self, req_id: str, token_ids: Sequence[int]) -> bool:
        """Go on by the tokens; whether the text is complete. Raises RequestError for a token that is not allowed (the
        request is to be ended with "error"; no other is concerned)."""
        matcher = self._matchers.get(req_id)
        if matcher is None:
            return False
        matcher.accept(token_ids)
        return matcher.is_finished

    def waits_for(self, scheduled: SchedulerOutput) -> frozenset[str]:
        """The structured requests of a step."""
        return frozenset(self._matchers.keys() & scheduled.num_scheduled_tokens.keys())

    def output(
        self, scheduled: SchedulerOutput, drafts: Mapping[str, Sequence[int]] | None = None
    ) -> GrammarOutput | None:
        """The masks of a step, one row for each logits row of its structured requests, in the order of
        `num_scheduled_tokens`. `drafts`: the ids of the drafts that each request verifies in it."""
        drafts = drafts or {}
        req_ids = tuple(req_id for req_id in scheduled.num_scheduled_tokens if req_id in self._matchers)
        if not req_ids:
            return None
        ends = np.cumsum([len(drafts.get(req_id, ())) + 1 for req_id in req_ids])
        bitmask = np.empty((int(ends[-1]), self._words), dtype=np.int32)
        for req_id, rows in zip(req_ids, np.split(bitmask, ends[:-1]), strict=True):
            self._matchers[req_id].fill(rows, drafts.get(req_id, ()))
        return GrammarOutput(req_ids=req_ids, bitmask=bitmask)
