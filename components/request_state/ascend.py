"""V2's request states: tokens and counts on the device in stable slots, a mirror of upper bounds on the host."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import operand, upload
from workerkit.components.request_state.slots import SlotMap, check_request, plan_rows
from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch, SlotRequestStates, SlotTensors
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput


class AscendRequestState(SlotRequestStates):
    """`add`, `remove`, `update` and `plan` touch the host only; `write`, `commit`, `store_drafts` the device only.

    So the host can plan a step while the stream still works on the one before.
    """

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        self._shape = shape
        self._slots = SlotMap(shape.max_num_reqs)
        rows, drafts = shape.max_num_reqs, shape.num_speculative_tokens
        self._num_computed_np = np.zeros(rows, np.int32)  # upper bounds
        self._prefill_len_np = np.zeros(rows, np.int32)
        self._prompt_len_np = np.zeros(rows, np.int32)

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=context.device)

        # A step that ends at the last position may still sample drafts + 1 tokens; nobody reads those columns.
        self._tokens = empty(rows, shape.max_model_len + drafts + 1)
        self._columns = torch.arange(drafts + 1, device=context.device)
        self._device = SlotTensors(
            all_token_ids=self._tokens[:, : shape.max_model_len],
            prefill_len=empty(rows),
            prompt_len=empty(rows),
            total_len=empty(rows),
            num_computed_tokens=empty(rows),
            last_sampled=empty(rows, dtype=torch.int64),
            draft_tokens=empty(rows, drafts, dtype=torch.int64).fill_(-1),
        )

    @property
    def device(self) -> SlotTensors:
        return self._device

    def add(self, request: NewRequest) -> int:
        check_request(request, self._shape)
        slot = self._slots.take(request.req_id)
        self._num_computed_np[slot] = request.num_computed_tokens
        self._prefill_len_np[slot] = request.prefill_len
        self._prompt_len_np[slot] = request.prompt_len
        return slot

    def remove(self, req_id: str) -> int:
        slot = self._slots.release(req_id)
        for mirror in (self._num_computed_np, self._prefill_len_np, self._prompt_len_np):
            mirror[slot] = 0
        return slot

    def slot(self, req_id: str) -> int:
        return self._slots[req_id]

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slots

    @property
    def req_ids(self) -> tuple[str, ...]:
        return self._slots.req_ids

    def update(self, request: CachedRequest) -> None:
        slot = self._slots[request.req_id]
        self._num_computed_np[slot] = request.num_computed_tokens

    def plan(self, output: SchedulerOutput) -> BatchPlan:
        slots = np.array([self._slots[req_id] for req_id in output.num_scheduled_tokens], np.int64)
        return plan_rows(
            output,
            self._shape,
            slots,
            self._num_computed_np[slots],
            self._prefill_len_np[slots],
            self._prompt_len_np[slots],
        )

    def write(self, slot: int, request: NewRequest) -> None:
        state, known = self._device, request.prefill_len
        (tokens,) = upload(self._tokens.device, np.array(request.token_ids))
        self._tokens[slot, :known] = tokens
        self._tokens[slot, known:] = 0
        state.prefill_len[slot] = known
        state.prompt_len[slot] = request.prompt_len
        state.total_len[slot] = known
        state.num_computed_tokens[slot] = request.num_computed_tokens
        state.last_sampled[slot] = request.token_ids[-1]
        state.draft_tokens[slot] = -1

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        self._refuse_dummy(batch)
        state, slots = self._device, operand(batch.idx_mapping)
        # A token of -1 ends its request; until the host knows, the next step needs some token in its place.
        token_ids, num_sampled = operand(output.token_ids.clamp(min=0).int()), operand(output.num_sampled)
        all_tokens, total_len = operand(self._tokens), operand(state.total_len)
        columns = operand(self._columns)[: token_ids.shape[1]]
        ends = total_len[slots]
        drawn = columns < num_sampled[:, None]
        all_tokens[slots[:, None], ends[:, None] + columns] = token_ids * drawn  # 0 where nothing was sampled
        ends += num_sampled
        total_len[slots] = ends
        newest = all_tokens[slots, ends - 1] + columns[:1]  # an int64 zero, which widens
        operand(state.last_sampled)[slots] = newest
        computed = operand(batch.seq_lens)[: batch.num_reqs] - operand(output.num_rejected)
        operand(state.num_computed_tokens)[slots] = computed

    def next_tokens(self, batch: InputBatch) -> torch.Tensor:
        slots = batch.idx_mapping
        return self._tokens[slots, self._device.num_computed_tokens[slots].long()].long()

    def store_drafts(self, batch: InputBatch, drafts: torch.Tensor) -> None:
        self._refuse_dummy(batch)
        if drafts.shape != (batch.num_reqs, self._shape.num_speculative_tokens):
            raise RequestError(
                f"drafts have shape {tuple(drafts.shape)}; "
                f"right: {(batch.num_reqs, self._shape.num_speculative_tokens)}"
            )
        self._device.draft_tokens[batch.idx_mapping] = drafts

    @staticmethod
    def _refuse_dummy(batch: InputBatch) -> None:
        if batch.is_dummy:
            raise IntegrityError("a dummy batch has no requests to change")

    def check_integrity(self) -> None:
        self._slots.check_integrity()
        free = list(self._slots.free)
        if self._num_computed_np[free].any() or self._prefill_len_np[free].any() or self._prompt_len_np[free].any():
            raise IntegrityError("a free slot still remembers a request")
