"""V2's input batch: gathered on the device from the slots' state, without waiting for anything."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import maximum, operand, upload
from workerkit.components.input_batch.layout import AscendInputBuffers, TokenLayout, dummy_plan
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch, SlotInputBatch, SlotRequestStates
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.runner import WorkerShape

AscendInputBatch = InputBatch  # the reference system's name of the result


class AscendInputBatcher(SlotInputBatch):
    """Token counts come from the plan, everything that depends on sampled tokens from the device."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, states: SlotRequestStates) -> None:
        self._shape = shape
        self._device = context.device
        self._states = states
        self._buffers = AscendInputBuffers(shape, context.device)
        self._num_computed_tokens = operand(states.device.num_computed_tokens)
        self._all_token_ids = operand(states.device.all_token_ids)

    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        buffers, computed = self._buffers, self._num_computed_tokens
        placed = buffers.place(plan, desc)
        num_tokens, token_slots = len(placed.layout.token_rows), placed.token_slots
        positions = computed[token_slots] + placed.offsets
        buffers.positions[:num_tokens] = positions
        buffers.rope_lens[:num_tokens] = maximum(positions + 1, placed.prompt_lens)
        buffers.seq_lens[: plan.num_reqs] = computed[placed.slots] + placed.scheduled
        # Known tokens end with the last sampled one: commit has put it there. Behind it come the drafts.
        buffers.input_ids[:num_tokens] = self._all_token_ids[token_slots, positions]
        if len(placed.layout.logits_rows) == plan.num_reqs:
            return buffers.batch(plan, placed)
        return buffers.batch(plan, placed, draft_ids=self._put_drafts(plan, placed.layout))

    def _put_drafts(self, plan: BatchPlan, layout: TokenLayout) -> torch.Tensor:
        """Into the ids; returns InputBatch.draft_ids."""
        drafts = layout.logits_offsets > 0
        judges, draft_at, draft_slots, draft_columns = upload(
            self._device,
            np.flatnonzero(drafts) - 1,
            layout.logits_indices[drafts],
            plan.slots[layout.logits_rows[drafts]],
            layout.logits_offsets[drafts] - 1,
        )
        ids = self._states.device.draft_tokens[draft_slots, draft_columns]
        # -1, no draft, has to be some token
        self._buffers.input_ids[operand(draft_at)] = operand(ids.clamp(min=0).int())
        judged = torch.full((len(layout.logits_rows),), -1, device=self._device)
        return judged.index_copy_(0, judges, ids)

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        plan = dummy_plan(num_tokens, num_reqs, self._shape)
        return self._buffers.fill_from_host(plan, desc, np.broadcast_to(0, (num_reqs, num_tokens)), is_dummy=True)
