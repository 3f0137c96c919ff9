"""The structured requests of an engine: their matchers by request id, and the masks of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from workerkit.framework.interfaces.structured import GrammarMatcher


class StructuredRequests:
    """Where each structured request stands in its grammar. Requests without a grammar are unknown here.

    The engine's part of a step, for a request that was added:

    1. Before `output`, its earlier steps are collected (`waits_for` names the requests this is about): a mask depends
       on the tokens before it, and on the drafts.
    2. `output` between `execute_model` and `sample_tokens`, whose argument it makes; None when no request of the step
       is structured.
    3. `take_drafts` and `accept`, once each, when the step is collected.

    A request that is preempted stays; its matcher goes on where it was. `remove` when it has ended, however it did.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._matchers: dict[str, GrammarMatcher] = {}
        self._drafts: dict[str, tuple[int, ...]] = {}  # what the worker holds for a request's next step

    def __len__(self) -> int:
        return len(self._matchers)

    def add(self, req_id: str, matcher: GrammarMatcher) -> None:
        """The matcher stands at the first generated token and belongs to this request alone: `compile` one for each."""
        self._matchers[req_id] = matcher

    def remove(self, req_id: str) -> None:
        """Nothing happens for a request that is not known."""
        self._matchers.pop(req_id, None)
        self._drafts.pop(req_id, None)

    def take_drafts(self, output: ModelRunnerOutput) -> None:
        """Keep what a step has proposed for the structured requests."""
        for req_id, drafts in zip(output.req_ids, output.draft_token_ids, strict=bool(output.draft_token_ids)):
            if req_id in self._matchers:
                self._drafts[req_id] = drafts

    def accept(self, req_id: str, token_ids: Sequence[int]) -> int | None:
        """Go on by the tokens of a step that stay in the text; None when more may follow. A number: the text is
        complete with that many of them, and those behind do not count. Then the engine ends the request, also with
        `ignore_eos`. Raises RequestError for a token that is not allowed (the request is to be ended with "error"; no
        other is concerned)."""
        matcher = self._matchers.get(req_id)
        if matcher is None:
            return None
        for count, token_id in enumerate(token_ids):
            if matcher.is_finished:
                return count
            matcher.accept([token_id])
        return len(token_ids) if matcher.is_finished else None

    def waits_for(self, scheduled: SchedulerOutput) -> frozenset[str]:
        """The structured requests of a step."""
        return frozenset(self._matchers.keys() & scheduled.num_scheduled_tokens.keys())

    def output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        """The masks of a step, one row for each logits row of its structured requests, in the order of
        `num_scheduled_tokens`. A row behind a placeholder allows everything: nothing is drawn from it."""
        if not self._matchers:
            return None
        req_ids = tuple(req_id for req_id in scheduled.num_scheduled_tokens if req_id in self._matchers)
        if not req_ids:
            return None
        counts = [scheduled.scheduled_drafts.get(req_id, 0) for req_id in req_ids]
        ends = np.cumsum([count + 1 for count in counts])
        bitmask = np.full((int(ends[-1]), self._words), -1, dtype=np.int32)
        for req_id, rows, count in zip(req_ids, np.split(bitmask, ends[:-1]), counts, strict=True):
            drafts = self._drafts.get(req_id, ())[:count]
            self._matchers[req_id].fill(rows[: len(drafts) + 1], drafts)
        return GrammarOutput(req_ids=req_ids, bitmask=bitmask)
