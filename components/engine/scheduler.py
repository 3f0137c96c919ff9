"""The standalone engine's scheduler: continuous batching, chunked prefill, first come first served, and preemption by
recomputation. It owns the block pool, and with asynchronous scheduling it plans a step before the last one's tokens
are known: every token that a step in flight may add counts as a placeholder."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from workerkit.components.engine.admission import check_lengths, check_token_ids
from workerkit.components.engine.block_pool import BlockPool
from workerkit.components.engine.plan import Plan, Row, ScheduledRequest
from workerkit.framework.errors import IntegrityError, RequestError, StageError
from workerkit.framework.interfaces.engine import FinishReason, Scheduler
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import (
    CachedRequest,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    SchedulerOutput,
)
from workerkit.framework.interfaces.runner import WorkerShape


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Options of the continuous scheduler."""

    chunked_prefill: bool = attrs.field(
        default=True,
        validator=attrs.validators.instance_of(bool),
        metadata={
            "doc": "cut prompts into pieces that fit a step; without it a prompt longer than "
            "limits.max_num_batched_tokens is refused (one that outgrew it before a preemption is cut all the same)"
        },
    )
    async_scheduling: bool = attrs.field(
        default=False,
        validator=attrs.validators.instance_of(bool),
        metadata={"doc": "plan the next step while one is running; two steps are then in flight"},
    )


class ContinuousScheduler(Scheduler):
    """First come first served.

    Requests run in the order of their arrival. When a running one needs a block and none is free, the request that
    arrived last is preempted; the oldest therefore always gets on. A request is admitted when there are blocks for all
    of its known tokens. With asynchronous scheduling a request is neither preempted nor are its blocks handed on while
    a step that may write them is in flight; who needs them waits for that step.
    """

    def __init__(self, config: SchedulerConfig, shape: WorkerShape, layout: KVLayout) -> None:
        self._config = config
        self._shape = shape
        self._block_sizes = layout.block_sizes
        self._pool = BlockPool(layout.num_blocks)
        self._requests: dict[str, ScheduledRequest] = {}
        self._waiting: deque[ScheduledRequest] = deque()  # by arrival, all after the running ones
        self._running: list[ScheduledRequest] = []  # by arrival; the worker knows exactly these and `_finished_ids`
        self._leaving: list[ScheduledRequest] = []  # finished, but a step in flight may still write their blocks
        self._finished_ids: set[str] = set()  # the worker has not heard of it yet
        self._in_flight: deque[tuple[SchedulerOutput, list[Row]]] = deque()
        self._num_preemptions = 0

    @property
    def max_in_flight(self) -> int:
        return 2 if self._config.async_scheduling else 1

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._finished_ids)

    def stats(self) -> Mapping[str, int]:
        return {
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "num_free_blocks": self._pool.num_free,
            "num_preemptions": self._num_preemptions,
        }

    # Requests come and go

    def add(
        self, req_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]
    ) -> None:
        if req_id in self._requests:
            raise RequestError(f"request id {req_id!r} is in use")
        token_ids = check_token_ids(prompt_token_ids, self._shape.vocab_size)
        max_len = check_lengths(len(token_ids), params.max_tokens, self._shape.max_model_len)
        budget = self._shape.max_num_batched_tokens
        if not self._config.chunked_prefill and len(token_ids) > budget:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, a step holds {budget} (max_num_batched_tokens) "
                "and chunked_prefill is off"
            )
        needed = sum(self._num_blocks(max_len - 1))  # nothing is computed for the last token
        if needed > self._pool.num_usable:
            raise RequestError(
                f"{len(token_ids)} prompt tokens and up to {max_len - len(token_ids)} more need {needed} blocks, "
                f"the whole cache has {self._pool.num_usable}"
            )
        request = ScheduledRequest(
            req_id=req_id,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            max_len=max_len,
            sampling=params,
            stop_ids=stop_ids,
            block_ids=[[] for _ in self._block_sizes],
        )
        self._requests[req_id] = request
        self._waiting.append(request)

    def abort(self, req_id: str) -> bool:
        request = self._requests.get(req_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def _finish(self, request: ScheduledRequest) -> None:
        request.finished = True
        del self._requests[request.req_id]
        if request not in self._running:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._finished_ids.add(request.req_id)
        if request.num_in_flight:
            self._leaving.append(request)
        else:
            self._free_blocks(request)

    # A step is planned

    def schedule(self) -> SchedulerOutput:
        if len(self._in_flight) >= self.max_in_flight:
            raise StageError(
                f"{len(self._in_flight)} steps are in flight: update the oldest before the next is scheduled"
            )
        plan = Plan(budget=self._shape.max_num_batched_tokens)
        self._plan_running(plan)
        if not (plan.preempted or plan.short_of_blocks):
            self._plan_waiting(plan)
        output = SchedulerOutput(
            new_requests=tuple(plan.new),
            cached_requests=tuple(plan.cached),
            num_scheduled_tokens={row.request.req_id: row.num_tokens for row in plan.rows},
            scheduled_drafts={row.request.req_id: row.num_drafts for row in plan.rows if row.num_drafts},
            finished_req_ids=frozenset(self._finished_ids),
            preempted_req_ids=frozenset(plan.preempted),
        )
        self._finished_ids.clear()
        if plan.rows:
            self._in_flight.append((output, plan.rows))
        return output

    def _plan_running(self, plan: Plan) -> None:
        position = 0
        while position < len(self._running) and plan.budget > 0:  # the list shrinks at its end by preemptions
            request = self._running[position]
            position += 1
            row = self._row(request, plan.budget)
            if row is None:
                continue
            needed = self._missing_blocks(request, request.num_computed + row.num_tokens)
            if not self._make_room(request, sum(needed), plan):
                return
            cached = CachedRequest(
                req_id=request.req_id,
                num_computed_tokens=request.num_computed,
                new_block_ids=self._allocate(request, needed) if any(needed) else (),
            )
            plan.cached.append(cached)
            self._commit(row, plan)

    def _plan_waiting(self, plan: Plan) -> None:
        while self._waiting and plan.budget > 0 and len(self._running) < self._shape.max_num_reqs:
            request = self._waiting[0]
            request.prefill_len = len(request.token_ids)
            row = self._row(request, plan.budget)
            needed = self._num_blocks(request.prefill_len)
            if row is None or sum(needed) > self._pool.num_free:
                return
            new = NewRequest(
                req_id=request.req_id,
                token_ids=tuple(request.token_ids),
                prompt_len=request.prompt_len,
                sampling=request.sampling,
                block_ids=self._allocate(request, needed),
            )
            plan.new.append(new)
            self._running.append(self._waiting.popleft())
            self._commit(row, plan)

    def _row(self, request: ScheduledRequest, budget: int) -> Row | None:
        """The request's share of a step, or None when it has to sit this one out."""
        missing = request.num_tokens - request.num_computed
        if request.num_tokens >= request.max_len:
            return None  # all that it may still produce is on its way, perhaps
        fits_alone = request.prefill_len <= self._shape.max_num_batched_tokens
        if missing > budget and fits_alone and not self._config.chunked_prefill:
            return None
        if missing > budget:
            return Row(request=request, num_tokens=budget, num_drafts=0, max_sampled=0)
        num_drafts = 0
        if request.num_computed >= request.prefill_len:  # a decode: drafts were proposed after the last step
            room = min(budget - missing, request.max_len - request.num_tokens - 1)
            num_drafts = min(self._shape.num_speculative_tokens, room)
        return Row(request=request, num_tokens=missing + num_drafts, num_drafts=num_drafts, max_sampled=1 + num_drafts)

    def _make_room(self, request: ScheduledRequest, needed: int, plan: Plan) -> bool:
        """Preempt from the end until `needed` blocks are free; False when the request cannot run in this step."""
        while self._pool.num_free < needed:
            victim = self._running[-1]
            if self._leaving or victim.num_in_flight:
                plan.short_of_blocks = True  # blocks come free when the step in flight is collected
                return False
            self._running.pop()
            self._waiting.appendleft(victim)
            self._free_blocks(victim)
            victim.num_computed = 0
            self._num_preemptions += 1
            plan.preempted.add(victim.req_id)
            if victim is request:
                return False
        return True

    @staticmethod
    def _commit(row: Row, plan: Plan) -> None:
        row.request.num_computed += row.num_tokens
        row.request.num_pending += row.max_sampled
        row.request.num_in_flight += 1
        plan.budget -= row.num_tokens
        plan.rows.append(row)

    def _num_blocks(self, num_tokens: int) -> list[int]:
        return [-(-num_tokens // block_size) for block_size in self._block_sizes]

    def _missing_blocks(self, request: ScheduledRequest, num_tokens: int) -> list[int]:
        return [
            max(0, count - len(have))
            for count, have in zip(self._num_blocks(num_tokens), request.block_ids, strict=True)
        ]

    def _allocate(self, request: ScheduledRequest, needed: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        new = [self._pool.allocate(count) for count in needed]
        for have, more in zip(request.block_ids, new, strict=True):
            have.extend(more)
        return tuple(tuple(more) for more in new)

    def _free_blocks(self, request: ScheduledRequest) -> None:
        for have in request.block_ids:
            self._pool.free(have)
            have.clear()

    # A step's tokens arrive

    def update(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> Mapping[str, tuple[tuple[int, ...], FinishReason | None]]:
        if not scheduled.num_scheduled_tokens:
            return {}
        if not self._in_flight or self._in_flight[0][0] is not scheduled:
            raise StageError("steps must be updated in the order in which they were scheduled, each once")
        rows = self._in_flight[0][1]
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        self._check_answer(rows, sampled)
        self._in_flight.popleft()
        results: dict[str, tuple[tuple[int, ...], FinishReason | None]] = {}
        for row in rows:
            request = row.request
            request.num_in_flight -= 1
            if request.finished:
                if not request.num_in_flight:
                    self._leaving.remove(request)
                    self._free_blocks(request)
                continue
            tokens = sampled.get(request.req_id, ())
            request.num_pending -= row.max_sampled
            request.num_computed -= row.max_sampled - len(tokens)  # drafts that were rejected
            if tokens:
                kept, reason = self._accept(request, tokens)
                results[request.req_id] = kept, reason
                if reason is not None:
                    self._finish(request)
        return results

    @staticmethod
    def _check_answer(rows: Sequence[Row], sampled: Mapping[str, tuple[int, ...]]) -> None:
        unknown = sampled.keys() - {row.request.req_id for row in rows}
        if unknown:
            raise IntegrityError(f"the worker answered for requests that were not in the step: {sorted(unknown)}")
        for row in rows:
            count = len(sampled.get(row.request.req_id, ()))
            if not row.request.finished and not min(1, row.max_sampled) <= count <= row.max_sampled:
                raise IntegrityError(
                    f"the worker returned {count} tokens for {row.request.req_id!r}, "
                    f"right would be {min(1, row.max_sampled)} to {row.max_sampled}"
                )

    def _accept(self, request: ScheduledRequest, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append tokens up to the one that ends the request. A stop id itself does not count."""
        for position, token in enumerate(tokens):
            if not 0 <= token < self._shape.vocab_size:
                return tuple(tokens[:position]), "error"
            if token in request.stop_ids:
                return tuple(tokens[:position]), "stop"
            request.token_ids.append(token)
            if len(request.token_ids) >= request.max_len:
                return tuple(tokens[: position + 1]), "length"
        return tuple(tokens), None

    def check_integrity(self) -> None:
        holders = [*self._running, *self._leaving]
        self._pool.check_integrity(block for request in holders for have in request.block_ids for block in have)
        live = [*self._running, *self._waiting]
        in_flight = [row.request for _, rows in self._in_flight for row in rows]
        faults = {
            "known requests are not the running ones, then the waiting ones": list(self._requests.values()) != live,
            "a finished request lives on": any(request.finished for request in live),
            "a request that leaves is in no step": any(not request.num_in_flight for request in self._leaving),
            "a waiting request holds blocks or computed tokens": any(
                any(request.block_ids) or request.num_computed or request.num_in_flight for request in self._waiting
            ),
            "steps in flight were miscounted": any(
                request.num_in_flight != sum(other is request for other in in_flight) for request in holders
            ),
            "a running request has fewer blocks than tokens": any(
                any(self._missing_blocks(request, request.num_computed)) for request in self._running
            ),
            "more requests run than may": len(self._running) > self._shape.max_num_reqs,
        }
        found = [fault for fault, present in faults.items() if present]
        if found:
            raise IntegrityError("; ".join(found))
