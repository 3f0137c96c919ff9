"""V2's request states: tokens and counts on the device in stable slots, a mirror of upper bounds on the host."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import int32, operand, upload
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
        self._mirror = np.zeros((3, rows), np.int32)
        self._num_computed_np, self._prefill_len_np, self._prompt_len_np = self._mirror  # the first: upper bounds

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=context.device)

        # A step that ends at the last position may still sample drafts + 1 tokens; nobody reads those columns.
        self._tokens = empty(rows, shape.max_model_len + drafts + 1)
        self._device = SlotTensors(
            all_token_ids=self._tokens[:, : shape.max_model_len],
            prefill_len=empty(rows),
            prompt_len=empty(rows),
            total_len=empty(rows),
            num_computed_tokens=empty(rows),
            last_sampled=empty(rows, dtype=torch.int64),
            draft_tokens=empty(rows, drafts, dtype=torch.int64).fill_(-1),
        )
        self._columns = operand(torch.arange(drafts + 1, device=context.device))
        self._all_tokens = operand(self._tokens)
        self._total_len = operand(self._device.total_len)
        self._last_sampled = operand(self._device.last_sampled)
        self._num_computed_tokens = operand(self._device.num_computed_tokens)

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
        self._mirror[:, slot] = 0
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
        slots = np.array(self._slots.of(output.num_scheduled_tokens), np.int64)
        return plan_rows(output, self._shape, slots, *self._mirror[:, slots])

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
        slots, token_ids, num_sampled = map(operand, (batch.idx_mapping, output.token_ids, output.num_sampled))
        columns = self._columns[: token_ids.shape[1]]
        ends = self._total_len[slots]
        # A token of -1 ends its request; until the host knows, the next step needs some token in its place.
        kept = (columns < num_sampled[:, None]) & (token_ids > 0)
        self._all_tokens[slots[:, None], ends[:, None] + columns] = int32(token_ids * kept)
        ends += num_sampled
        self._total_len[slots] = ends
        self._last_sampled[slots] = self._all_tokens[slots, ends - 1] + columns[:1]  # an int64 zero, which widens
        computed = operand(batch.seq_lens)[: batch.num_reqs] - operand(output.num_rejected)
        self._num_computed_tokens[slots] = computed

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
        if self._mirror[:, free].any():
            raise IntegrityError("a free slot still remembers a request")
