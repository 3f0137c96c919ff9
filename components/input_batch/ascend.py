"""V2's input batch: gathered on the device from the slots' state, without waiting for anything."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.components.input_batch.layout import AscendInputBuffers, dummy_plan, lay_out
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

    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        layout = lay_out(plan)
        drafts = layout.logits_offsets > 0
        slots, token_rows, offsets, logits_indices, logits_rows, scheduled, draft_at, draft_rows, draft_columns = (
            upload(
                self._device,
                plan.slots,
                layout.token_rows,
                layout.offsets,
                layout.logits_indices,
                layout.logits_rows,
                plan.num_scheduled_tokens,
                layout.logits_indices[drafts],
                layout.logits_rows[drafts],
                layout.logits_offsets[drafts] - 1,
            )
        )
        state = self._states.device
        computed = state.num_computed_tokens[slots].long()
        token_slots = slots[token_rows]
        positions = computed[token_rows] + offsets
        # Known tokens end with the last sampled one: commit has put it there. Behind it come the drafts.
        input_ids = state.all_token_ids[token_slots, positions]
        if drafts.any():
            ids = state.draft_tokens[slots[draft_rows], draft_columns]
            input_ids[draft_at] = ids.clamp(min=0).int()  # -1, no draft, has to be some token
        return self._buffers.fill(
            plan,
            desc,
            layout,
            idx_mapping=slots,
            token_rows=token_rows,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            input_ids=input_ids,
            positions=positions,
            rope_lens=torch.maximum(state.prompt_len[token_slots], positions + 1),
            seq_lens=computed + scheduled,
        )

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        plan = dummy_plan(num_tokens, num_reqs, self._shape)
        return self._buffers.fill_from_host(plan, desc, lay_out(plan), np.zeros(num_tokens, np.int64), is_dummy=True)
