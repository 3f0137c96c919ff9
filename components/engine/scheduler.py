"""The standalone engine's scheduler: continuous batching, chunked prefill, prefix caching, priorities, and preemption
by recomputation. It owns the blocks, and with asynchronous scheduling it plans a step before the last one's tokens are
known: every token that a step in flight may add counts as a placeholder."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal

import attrs

from workerkit.components.engine.admission import check_cache, check_lengths, check_step, check_token_ids
from workerkit.components.engine.plan import Counts, Plan, Row, ScheduledRequest, check_answer
from workerkit.components.engine.request_blocks import RequestBlocks
from workerkit.framework.errors import IntegrityError, RequestError, StageError
from workerkit.framework.interfaces.engine import EngineRequest, FinishReason, Progress, Scheduler
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import CachedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape

_ORDER = attrgetter("order")


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
    prefix_caching: bool = attrs.field(
        default=True,
        validator=attrs.validators.instance_of(bool),
        metadata={"doc": "keep the keys and values of full blocks, for requests that begin with the same tokens"},
    )
    policy: Literal["fcfs", "priority"] = attrs.field(
        default="fcfs",
        validator=attrs.validators.in_(("fcfs", "priority")),
        metadata={"doc": "who comes first: the earliest request, or the one with the lowest priority value"},
    )


class ContinuousScheduler(Scheduler):
    """Requests are served in one order: by arrival, or by (priority, arrival).

    When a running request needs a block and none is free, the last of the running ones is preempted; the first
    therefore always gets on. A waiting request preempts nobody, however urgent it is: it is the next to be admitted,
    when there are blocks for all of its known tokens (less those found in the prefix cache) and a row. With
    asynchronous scheduling a request is neither preempted nor are its blocks handed on while a step that may write
    them is in flight; who needs them waits for that step.

    With speculation a request verifies as many drafts as the worker's last answer had for it; while that answer is not
    there yet, K, some of which may prove to be placeholders. It never verifies more than it may still produce, less the
    one token that comes anyway. Drafts are what a step has room for at the end: they are cut, evenly, before any other
    token is left out, so they keep no prompt waiting; nor is a request preempted for them.

    A request that asks for prompt logprobs needs every prompt position computed, so it does not read the prefix cache;
    others may read what it leaves there.
    """

    def __init__(self, config: SchedulerConfig, shape: WorkerShape, layout: KVLayout) -> None:
        self._config = config
        self._shape = shape
        self._num_groups = len(layout.groups)
        self._blocks = RequestBlocks(layout, shape, config.prefix_caching)
        self._states = self._blocks.states
        self._requests: dict[str, ScheduledRequest] = {}
        self._waiting: list[ScheduledRequest] = []  # in order
        self._running: list[ScheduledRequest] = []  # in order; the worker knows exactly these and `_finished_ids`
        self._leaving: list[ScheduledRequest] = []  # finished, but a step in flight may still write their blocks
        self._finished_ids: set[str] = set()  # the worker has not heard of it yet
        self._in_flight: deque[tuple[SchedulerOutput, list[Row]]] = deque()
        self._num_arrived = 0
        self._counts = Counts()

    @classmethod
    def plans_ahead(cls, config: Any) -> bool:
        return bool(config.async_scheduling)

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
            **attrs.asdict(self._counts),
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "num_free_blocks": self._blocks.num_free,
        }

    # Requests come and go

    def add(self, request: EngineRequest) -> None:
        req_id, params = request.req_id, request.params
        if req_id in self._requests:
            raise RequestError(f"request id {req_id!r} is in use")
        token_ids = check_token_ids(request.prompt_token_ids, self._shape.vocab_size)
        max_len = check_lengths(len(token_ids), params.max_tokens, self._shape.max_model_len)
        if not self._config.chunked_prefill:
            check_step(len(token_ids), self._shape.max_num_batched_tokens)
        needed = self._blocks.count(max_len - 1)  # nothing is computed for the last token
        check_cache(len(token_ids), max_len, needed, self._blocks.num_usable)
        self._num_arrived += 1
        scheduled = ScheduledRequest(
            req_id=req_id,
            order=(request.priority if self._config.policy == "priority" else 0, self._num_arrived),
            token_ids=token_ids,
            prompt_len=len(token_ids),
            max_len=max_len,
            sampling=params,
            stop_ids=request.stop_ids,
            cache_identity=request.cache_identity,
            block_ids=[[] for _ in range(self._num_groups)],
            images=request.images,
            lora=request.lora,
        )
        self._requests[req_id] = scheduled
        insort(self._waiting, scheduled, key=_ORDER)

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
            self._blocks.free(request)

    def reset_prefix_cache(self) -> None:
        self._blocks.forget_contents(self._running)

    # A step is planned

    def schedule(self) -> SchedulerOutput:
        if len(self._in_flight) >= self.max_in_flight:
            raise StageError(
                f"{len(self._in_flight)} steps are in flight: update the oldest before the next is scheduled"
            )
        plan = Plan(budget=self._shape.max_num_batched_tokens)
        self._blocks.start_step()
        self._plan_running(plan)
        if not plan.preempted:
            self._plan_waiting(plan)
        plan.hand_out_drafts()
        saves = self._states.save(plan.rows) if self._states is not None else ()
        to_zero = self._blocks.end_step()
        output = SchedulerOutput(
            new_requests=tuple(plan.new),
            cached_requests=tuple(plan.cached),
            num_scheduled_tokens={row.request.req_id: row.num_tokens for row in plan.rows},
            scheduled_drafts={row.request.req_id: row.num_drafts for row in plan.rows if row.num_drafts},
            finished_req_ids=frozenset(self._finished_ids),
            preempted_req_ids=frozenset(plan.preempted),
            blocks_to_zero=to_zero,
            block_copies=tuple(plan.copies),
            state_saves=saves,
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
            needed = self._blocks.missing(request, request.num_computed + row.num_tokens + row.max_drafts)
            new_block_ids: tuple[tuple[int, ...], ...] = ()
            if any(needed):
                if sum(needed) > self._blocks.num_free and row.max_drafts:
                    row.max_drafts = 0
                    needed = self._blocks.missing(request, request.num_computed + row.num_tokens)
                if not self._make_room(request, sum(needed), plan):
                    return
                new_block_ids = self._blocks.grow(request, needed) if any(needed) else ()
            cached = CachedRequest(
                req_id=request.req_id, num_computed_tokens=request.num_computed, new_block_ids=new_block_ids
            )
            plan.cached.append(cached)
            self._commit(row, plan)

    def _plan_waiting(self, plan: Plan) -> None:
        while self._waiting and plan.budget > 0 and len(self._running) < self._shape.max_num_reqs:
            request = self._waiting[0]
            hit = self._blocks.find(request)
            if hit is None:
                return
            request.prefill_len = len(request.token_ids)
            request.num_computed = request.num_confirmed = request.num_published = hit.num_tokens
            row = self._row(request, plan.budget)
            if row is None:
                request.num_computed = 0
                return
            plan.copies.extend(self._blocks.admit(request, hit, hit.num_tokens + row.num_tokens))
            new = NewRequest(
                req_id=request.req_id,
                token_ids=tuple(request.token_ids),
                prompt_len=request.prompt_len,
                sampling=request.sampling,
                stop_ids=request.stop_ids,
                block_ids=tuple(tuple(have) for have in request.block_ids),
                num_computed_tokens=hit.num_tokens,
                state_block_ids=hit.state,
                images=request.images,
                lora=request.lora,
            )
            plan.new.append(new)
            if request.num_cached is None:
                request.num_cached = hit.num_tokens
                self._counts.num_cached_tokens += hit.num_tokens
            insort(self._running, self._waiting.pop(0), key=_ORDER)
            self._commit(row, plan)

    def _row(self, request: ScheduledRequest, budget: int) -> Row | None:
        """The request's share of a step, or None when it has to sit this one out."""
        num_tokens = request.num_tokens
        missing = num_tokens - request.num_computed
        if num_tokens >= request.max_len:
            return None  # all that it may still produce is on its way, perhaps
        fits_alone = request.prefill_len <= self._shape.max_num_batched_tokens
        if missing > budget and fits_alone and not self._config.chunked_prefill:
            return None
        if missing > budget:
            return Row(request=request, num_tokens=budget, max_sampled=0)
        max_drafts = 0
        if request.num_computed >= request.prefill_len:  # a decode: drafts were proposed after the last step
            held = self._shape.num_speculative_tokens if request.num_in_flight else request.num_drafts
            max_drafts = min(held, request.max_len - num_tokens - 1)
        return Row(request=request, num_tokens=missing, max_sampled=1, max_drafts=max_drafts)

    def _make_room(self, request: ScheduledRequest, needed: int, plan: Plan) -> bool:
        """Preempt from the end until `needed` blocks are free; False when the request cannot run in this step."""
        while self._blocks.num_free < needed:
            victim = self._running[-1]
            if self._leaving or victim.num_in_flight or self._blocks.has_copies_in_flight:
                return False  # blocks come free when the step in flight is collected; who waits needs more than these
            insort(self._waiting, self._running.pop(), key=_ORDER)
            self._blocks.free(victim)
            victim.restart()
            self._counts.num_preemptions += 1
            plan.preempted.add(victim.req_id)
            if victim is request:
                return False
        return True

    def _commit(self, row: Row, plan: Plan) -> None:
        request = row.request
        if self._states is not None and self._config.chunked_prefill:
            self._states.cut(row)
        request.num_computed += row.num_tokens
        request.num_pending += row.max_sampled
        request.num_in_flight += 1
        self._blocks.publish(request)
        plan.budget -= row.num_tokens
        plan.rows.append(row)

    # A step's tokens arrive

    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Mapping[str, Progress]:
        if not scheduled.num_scheduled_tokens:
            return {}
        if not self._in_flight or self._in_flight[0][0] is not scheduled:
            raise StageError("steps must be updated in the order in which they were scheduled, each once")
        rows = self._in_flight[0][1]
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        num_drafts = dict(zip(output.req_ids, map(len, output.draft_token_ids), strict=bool(output.draft_token_ids)))
        check_answer(rows, sampled)
        self._in_flight.popleft()
        results: dict[str, Progress] = {}
        for row in rows:
            request, tokens = row.request, sampled.get(row.request.req_id, ())
            request.num_in_flight -= 1
            self._counts.add_answer(row, tokens)
            request.num_drafts = num_drafts.get(request.req_id, 0)
            num_rejected = row.max_sampled - len(tokens)
            if request.finished:
                self._blocks.confirm(row, num_rejected)
                if not request.num_in_flight:
                    self._leaving.remove(request)
                    self._blocks.free(request)
                continue
            request.num_pending -= row.max_sampled
            request.num_computed -= num_rejected
            reason: FinishReason | None = None
            if tokens:
                kept, reason = request.accept(tokens, self._shape.vocab_size)
                results[request.req_id] = Progress(
                    token_ids=kept, finish_reason=reason, num_cached_tokens=request.num_cached or 0
                )
            if self._blocks.needs_answers:
                self._blocks.confirm(row, num_rejected)
            if reason is not None:
                self._finish(request)
        return results

    def check_integrity(self) -> None:
        holders = [*self._running, *self._leaving]
        saving = [block for _, rows in self._in_flight for row in rows if row.save for block in row.save.block_ids]
        self._blocks.check_integrity(holders, saving)
        live = [*self._running, *self._waiting]
        in_flight = [row.request for _, rows in self._in_flight for row in rows]
        faults = {
            "known requests are not the running and the waiting ones": sorted(live, key=_ORDER)
            != sorted(self._requests.values(), key=_ORDER),
            "requests are out of order": any(
                first.order >= second.order
                for queue in (self._running, self._waiting)
                for first, second in pairwise(queue)
            ),
            "a finished request lives on": any(request.finished for request in live),
            "a request that leaves is in no step": any(not request.num_in_flight for request in self._leaving),
            "a waiting request holds blocks or computed tokens": any(
                any(request.block_ids) or request.num_computed or request.num_in_flight for request in self._waiting
            ),
            "steps in flight were miscounted": any(
                request.num_in_flight != sum(other is request for other in in_flight) for request in holders
            ),
            "a running request has fewer blocks than tokens": any(
                any(self._blocks.missing(request, request.num_computed)) for request in self._running
            ),
            "more requests run than may": len(self._running) > self._shape.max_num_reqs,
        }
        found = [fault for fault, present in faults.items() if present]
        if found:
            raise IntegrityError("; ".join(found))
