"""The scheduler's own records: a request, and a step while it is being put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.engine import CacheIdentity, FinishReason
from workerkit.framework.interfaces.request import CachedRequest, ImageInput, NewRequest, StateSave
from workerkit.framework.interfaces.sampling_params import SamplingParams

if TYPE_CHECKING:
    from workerkit.components.engine.prefix_cache import BlockDigests


@attrs.define(kw_only=True, eq=False)
class ScheduledRequest:
    """A request from its arrival to its end."""

    req_id: str
    order: tuple[int, int]  # priority, then arrival: who comes first; no two are equal
    token_ids: list[int]  # prompt, then what was generated
    prompt_len: int
    max_len: int  # prompt and output together
    sampling: SamplingParams
    stop_ids: frozenset[int]
    cache_identity: CacheIdentity
    block_ids: list[list[int]]  # for each group, the null block where a window has left; empty while it waits
    images: tuple[ImageInput, ...] = ()
    lora: str | None = None
    capacity: int = 0  # tokens that they hold
    digests: dict[int, BlockDigests] = attrs.field(factory=dict)  # by block size
    num_cached: int | None = None  # prompt tokens found in the cache when it was admitted for the first time
    prefill_len: int = 0  # tokens that were known when it was admitted
    num_computed: int = 0  # tokens scheduled so far, or found in the cache
    num_confirmed: int = 0  # of a running one: of these, found or in a step whose answer is here
    num_published: int = 0  # tokens whose full blocks were published; max_len when that must not go on
    num_pending: int = 0  # tokens that the steps in flight may add, at most
    num_in_flight: int = 0  # steps in flight that hold it
    num_drafts: int = 0  # that the worker holds for it, as of its last answer; not looked at before its prefill is done
    finished: bool = False

    @property
    def num_tokens(self) -> int:
        """Known tokens and placeholders."""
        return len(self.token_ids) + self.num_pending

    @property
    def may_publish(self) -> bool:
        """Whether what is computed for it is for others."""
        return self.num_published < self.max_len

    @property
    def num_settled(self) -> int:
        """No step that is yet to be scheduled writes a position before this one."""
        return min(self.num_computed, len(self.token_ids))

    def accept(self, tokens: Sequence[int], vocab_size: int) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append tokens up to the one that ends the request. A stop id itself does not count."""
        for position, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                return tuple(tokens[:position]), "error"
            if token in self.stop_ids:
                return tuple(tokens[:position]), "stop"
            self.token_ids.append(token)
            if len(self.token_ids) >= self.max_len:
                return tuple(tokens[: position + 1]), "length"
        return tuple(tokens), None

    def restart(self) -> None:
        """After a preemption, everything has to be computed again."""
        self.num_computed = 0
        if len(self.token_ids) > self.prompt_len and self.sampling.prompt_logprobs is not None:
            # they came with the first token, and need not be recomputed: now the cache may be read
            self.sampling = attrs.evolve(self.sampling, prompt_logprobs=None)


@attrs.define(kw_only=True, eq=False)
class Row:
    """One request's share of a step."""

    request: ScheduledRequest
    num_tokens: int  # scheduled, drafts included
    max_sampled: int  # 0 for a partial prefill
    max_drafts: int = 0  # that it may verify, where the step has room for them
    num_drafts: int = 0
    save: StateSave | None = None  # copy of the state that the step makes; its blocks are held until the answer is here

    @property
    def num_real_drafts(self) -> int:
        """Those that are no placeholders; known when the answer of the request's step before is."""
        return min(self.num_drafts, self.request.num_drafts)


@attrs.define(kw_only=True)
class Counts:
    """Since the scheduler was made."""

    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add_answer(self, row: Row, tokens: Sequence[int]) -> None:
        """What became of the row's drafts."""
        if tokens and row.num_real_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += row.num_real_drafts
            self.num_accepted_tokens += len(tokens) - 1


@attrs.define(kw_only=True, eq=False)
class Plan:
    """A step while it is being put together."""

    budget: int  # tokens that still fit
    rows: list[Row] = attrs.field(factory=list)
    new: list[NewRequest] = attrs.field(factory=list)
    cached: list[CachedRequest] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    copies: list[tuple[int, int]] = attrs.field(factory=list)

    def hand_out_drafts(self) -> None:
        """What is left of the budget goes to drafts. When that is not enough for all, rows get equally many: of a row's
        drafts the first ones are the most likely to be accepted."""
        drafting = rows = [row for row in self.rows if row.max_drafts]
        while rows and self.budget:
            share = max(1, self.budget // len(rows))
            for row in rows[: self.budget]:
                more = min(share, row.max_drafts - row.num_drafts)
                row.num_drafts += more
                self.budget -= more
            rows = [row for row in rows if row.num_drafts < row.max_drafts]
        for row in drafting:
            row.num_tokens += row.num_drafts
            row.max_sampled += row.num_drafts
            row.request.num_computed += row.num_drafts
            row.request.num_pending += row.num_drafts


def check_answer(rows: Sequence[Row], sampled: Mapping[str, tuple[int, ...]]) -> None:
    """Raise IntegrityError unless the worker answered for the requests of the step, with as many tokens as it may."""
    unknown = sampled.keys() - {row.request.req_id for row in rows}
    if unknown:
        raise IntegrityError(f"the worker answered for requests that were not in the step: {sorted(unknown)}")
    for row in rows:
        count = len(sampled.get(row.request.req_id, ()))
        fewest = min(1, row.max_sampled)
        most = row.max_sampled - row.num_drafts + row.num_real_drafts  # a placeholder is never accepted
        if not row.request.finished and not fewest <= count <= most:
            raise IntegrityError(
                f"the worker returned {count} tokens for {row.request.req_id!r}, right would be {fewest} to {most}"
            )
