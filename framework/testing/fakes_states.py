"""Fakes of the request states of both runners: dicts and lists for V1, plain tensors by slot for V2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.batch import (
    BatchPlan,
    HostRequest,
    HostRequestStates,
    InputBatch,
    RequestStates,
    SlotRequestStates,
    SlotTensors,
)
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput


class _States(RequestStates):
    def __init__(self, shape: WorkerShape) -> None:
        self._free = list(range(shape.max_num_reqs))
        self._slots: dict[str, int] = {}
        self._requests: dict[str, NewRequest] = {}
        self._computed: dict[str, int] = {}
        self._num_slots = shape.max_num_reqs

    def add(self, request: NewRequest) -> int:
        if request.req_id in self._slots:
            raise RequestError(f"request {request.req_id!r} is already known")
        if not self._free:
            raise RequestError(f"request {request.req_id!r}: all {self._num_slots} slots are taken")
        self._slots[request.req_id] = slot = self._free.pop(0)
        self._requests[request.req_id] = request
        self._computed[request.req_id] = request.num_computed_tokens
        return slot

    def remove(self, req_id: str) -> int:
        slot = self.slot(req_id)
        del self._slots[req_id], self._requests[req_id], self._computed[req_id]
        self._free.append(slot)
        return slot

    def slot(self, req_id: str) -> int:
        if req_id not in self._slots:
            raise RequestError(f"request {req_id!r} is not known")
        return self._slots[req_id]

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slots

    @property
    def req_ids(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def plan(self, output: SchedulerOutput) -> BatchPlan:
        ids = sorted(output.num_scheduled_tokens, key=lambda i: self._computed[i] < self._requests[i].prefill_len)

        def row(values: Sequence[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        return BatchPlan(
            req_ids=tuple(ids),
            slots=np.array([self._slots[i] for i in ids], dtype=np.int64),
            num_scheduled_tokens=row([output.num_scheduled_tokens[i] for i in ids]),
            num_computed_tokens=row([self._computed[i] for i in ids]),
            num_draft_tokens=row([output.scheduled_drafts.get(i, 0) for i in ids]),
            prefill_lens=row([self._requests[i].prefill_len for i in ids]),
            prompt_lens=row([self._requests[i].prompt_len for i in ids]),
        )

    def check_integrity(self) -> None:
        if sorted([*self._free, *self._slots.values()]) != list(range(self._num_slots)):
            raise IntegrityError(f"slots leak or repeat: free {self._free}, held {self._slots}")


class FakeHostStates(_States, HostRequestStates):
    """V1: a HostRequest for each id."""

    def __init__(self, shape: WorkerShape) -> None:
        super().__init__(shape)
        self._records: dict[str, HostRequest] = {}

    def add(self, request: NewRequest) -> int:
        slot = super().add(request)
        self._records[request.req_id] = HostRequest(
            slot=slot,
            request=request,
            token_ids=list(request.token_ids),
            num_computed_tokens=request.num_computed_tokens,
            block_ids=[list(ids) for ids in request.block_ids],
        )
        return slot

    def remove(self, req_id: str) -> int:
        slot = super().remove(req_id)
        del self._records[req_id]
        return slot

    def update(self, request: CachedRequest) -> None:
        record = self.get(request.req_id)
        record.num_computed_tokens = self._computed[request.req_id] = request.num_computed_tokens
        for held, new in zip(record.block_ids, request.new_block_ids, strict=False):  # () when there are none
            held.extend(new)

    def get(self, req_id: str) -> HostRequest:
        self.slot(req_id)
        return self._records[req_id]

    def commit(self, plan: BatchPlan, sampled: Sequence[Sequence[int]]) -> None:
        for req_id, tokens in zip(plan.req_ids, sampled, strict=True):
            self._records[req_id].token_ids.extend(max(token, 0) for token in tokens)
            self._records[req_id].drafts.clear()

    def next_tokens(self, plan: BatchPlan) -> np.ndarray:
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        known = [self._records[req_id].token_ids for req_id in plan.req_ids]
        return np.array([ids[min(int(end), len(ids) - 1)] for ids, end in zip(known, ends, strict=True)])

    def store_drafts(self, plan: BatchPlan, drafts: Sequence[Sequence[int]]) -> None:
        for req_id, row in zip(plan.req_ids, drafts, strict=True):
            self._records[req_id].drafts = [token for token in row if token >= 0]


class FakeSlotStates(_States, SlotRequestStates):
    """V2: rows of tensors, written one by one."""

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        super().__init__(shape)
        rows = shape.max_num_reqs

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=context.device)

        self._tensors = SlotTensors(
            all_token_ids=zeros(rows, shape.max_model_len),
            prefill_len=zeros(rows),
            prompt_len=zeros(rows),
            total_len=zeros(rows),
            num_computed_tokens=zeros(rows),
            last_sampled=zeros(rows, dtype=torch.int64),
            draft_tokens=zeros(rows, shape.num_speculative_tokens, dtype=torch.int64) - 1,
        )

    @property
    def device(self) -> SlotTensors:
        return self._tensors

    def update(self, request: CachedRequest) -> None:
        self.slot(request.req_id)
        self._computed[request.req_id] = request.num_computed_tokens

    def write(self, slot: int, request: NewRequest) -> None:
        tensors, length = self._tensors, request.prefill_len
        tensors.all_token_ids[slot] = 0
        tensors.all_token_ids[slot, :length] = torch.tensor(request.token_ids, dtype=torch.int32)
        tensors.prefill_len[slot] = tensors.total_len[slot] = length
        tensors.prompt_len[slot] = request.prompt_len
        tensors.num_computed_tokens[slot] = request.num_computed_tokens
        tensors.last_sampled[slot] = 0
        tensors.draft_tokens[slot] = -1

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        tensors = self._tensors
        for row, slot in enumerate(batch.plan.slots.tolist()):
            count, known = int(output.num_sampled[row]), int(tensors.total_len[slot])
            new = output.token_ids[row, :count].clamp(min=0)
            tensors.all_token_ids[slot, known : known + count] = new.int()
            tensors.total_len[slot] += count
            tensors.num_computed_tokens[slot] += int(batch.plan.num_scheduled_tokens[row]) - int(
                output.num_rejected[row]
            )
            tensors.draft_tokens[slot] = -1
            if count:
                tensors.last_sampled[slot] = new[-1]

    def next_tokens(self, batch: InputBatch) -> torch.Tensor:
        tensors, slots = self._tensors, batch.idx_mapping
        at = tensors.num_computed_tokens[slots].long().clamp(max=tensors.all_token_ids.shape[1] - 1)
        return tensors.all_token_ids[slots, at].long()

    def store_drafts(self, batch: InputBatch, drafts: torch.Tensor) -> None:
        self._tensors.draft_tokens[batch.idx_mapping, : drafts.shape[1]] = drafts
