"""The scheduler's own records: a request, and a step while it is being put together."""

from __future__ import annotations

import attrs

from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SamplingParams


@attrs.define(kw_only=True, eq=False)
class ScheduledRequest:
    """A request from its arrival to its end."""

    req_id: str
    token_ids: list[int]  # prompt, then what was generated
    prompt_len: int
    max_len: int  # prompt and output together
    sampling: SamplingParams
    stop_ids: frozenset[int]
    block_ids: list[list[int]]  # for each group; empty while it waits
    prefill_len: int = 0  # tokens that were known when it was admitted
    num_computed: int = 0  # tokens scheduled so far
    num_pending: int = 0  # tokens that the steps in flight may add, at most
    num_in_flight: int = 0  # steps in flight that hold it
    finished: bool = False

    @property
    def num_tokens(self) -> int:
        """Known tokens and placeholders."""
        return len(self.token_ids) + self.num_pending


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """One request's share of a step."""

    request: ScheduledRequest
    num_tokens: int  # scheduled, drafts included
    num_drafts: int
    max_sampled: int  # 0 for a partial prefill


@attrs.define(kw_only=True, eq=False)
class Plan:
    """A step while it is being put together."""

    budget: int  # tokens that still fit
    rows: list[Row] = attrs.field(factory=list)
    new: list[NewRequest] = attrs.field(factory=list)
    cached: list[CachedRequest] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    short_of_blocks: bool = False  # whatever is free is meant for a running request
