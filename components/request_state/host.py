"""V1's request states: one plain record a request, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workerkit.components.request_state.slots import SlotMap, check_request, plan_rows
from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.batch import BatchPlan, HostRequest, HostRequestStates
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape


class HostStates(HostRequestStates):
    """Records by request id; counts are exact, because a step's tokens are known before the next one is planned."""

    def __init__(self, shape: WorkerShape) -> None:
        self._shape = shape
        self._slots = SlotMap(shape.max_num_reqs)
        self._records: dict[str, HostRequest] = {}

    def add(self, request: NewRequest) -> int:
        check_request(request, self._shape)
        slot = self._slots.take(request.req_id)
        self._records[request.req_id] = HostRequest(
            slot=slot,
            request=request,
            token_ids=list(request.token_ids),
            num_computed_tokens=request.num_computed_tokens,
            block_ids=[list(group) for group in request.block_ids],
        )
        return slot

    def remove(self, req_id: str) -> int:
        slot = self._slots.release(req_id)
        del self._records[req_id]
        return slot

    def slot(self, req_id: str) -> int:
        return self._slots[req_id]

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slots

    @property
    def req_ids(self) -> tuple[str, ...]:
        return self._slots.req_ids

    def get(self, req_id: str) -> HostRequest:
        try:
            return self._records[req_id]
        except KeyError:
            raise RequestError(f"request {req_id!r} is not known") from None

    def update(self, request: CachedRequest) -> None:
        record = self.get(request.req_id)
        if request.new_block_ids and len(request.new_block_ids) != len(record.block_ids):
            raise RequestError(
                f"request {request.req_id!r} gets blocks for {len(request.new_block_ids)} groups, "
                f"it has {len(record.block_ids)}"
            )
        record.num_computed_tokens = request.num_computed_tokens
        if request.new_block_ids:
            for known, new in zip(record.block_ids, request.new_block_ids, strict=True):
                known.extend(new)

    def plan(self, output: SchedulerOutput) -> BatchPlan:
        records = [self.get(req_id) for req_id in output.num_scheduled_tokens]
        facts = np.array(
            [(r.slot, r.num_computed_tokens, r.request.prefill_len, r.request.prompt_len) for r in records], np.int32
        )
        plan = plan_rows(output, self._shape, facts[:, 0].astype(np.int64), *facts.T[1:])
        for record, (req_id, count) in zip(records, output.num_scheduled_tokens.items(), strict=True):
            known = len(record.token_ids)
            end = record.num_computed_tokens + count - output.scheduled_drafts.get(req_id, 0)
            if end > known:
                raise RequestError(f"request {req_id!r} is scheduled up to token {end}, but {known} tokens are known")
        return plan

    def commit(self, plan: BatchPlan, sampled: Sequence[Sequence[int]]) -> None:
        for req_id, tokens in zip(plan.req_ids, sampled, strict=True):
            record = self.get(req_id)
            record.token_ids += [max(token, 0) for token in tokens]  # -1 ends the request, which may run once more
            record.drafts.clear()

    def next_tokens(self, plan: BatchPlan) -> np.ndarray:
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        known = [self.get(req_id).token_ids for req_id in plan.req_ids]
        # Behind the newest token lies nothing: there drafts were rejected, or none was left to compute.
        return np.array([ids[min(end, len(ids) - 1)] for ids, end in zip(known, ends.tolist(), strict=True)], np.int64)

    def store_drafts(self, plan: BatchPlan, drafts: Sequence[Sequence[int]]) -> None:
        for req_id, tokens in zip(plan.req_ids, drafts, strict=True):
            self.get(req_id).drafts = [token for token in tokens if token >= 0]

    def check_integrity(self) -> None:
        self._slots.check_integrity()
        if {req_id: record.slot for req_id, record in self._records.items()} != {
            req_id: self._slots[req_id] for req_id in self._slots.req_ids
        }:
            raise IntegrityError(f"records {sorted(self._records)} do not match slots {sorted(self._slots.req_ids)}")
