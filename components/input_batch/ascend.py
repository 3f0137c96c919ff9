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
        layout, buffers, state = lay_out(plan), self._buffers, self._states.device
        starts = buffers.starts(plan, desc, layout)
        num_reqs, num_tokens = plan.num_reqs, len(layout.token_rows)
        slots, logits_indices, logits_rows, token_slots, token_rows, offsets, prompt_lens, scheduled, starts_sent = (
            upload(
                self._device,
                plan.slots,
                layout.logits_indices,
                layout.logits_rows,
                plan.slots[layout.token_rows],
                layout.token_rows,
                layout.offsets,
                plan.prompt_lens[layout.token_rows],
                plan.num_scheduled_tokens,
                starts,
            )
        )
        buffers.pad(num_reqs, num_tokens, desc)
        computed, positions = state.num_computed_tokens, buffers.positions[:num_tokens]
        torch.add(computed[token_slots], offsets, out=positions)
        torch.maximum(positions + 1, prompt_lens, out=buffers.rope_lens[:num_tokens])
        torch.add(computed[slots], scheduled, out=buffers.seq_lens[:num_reqs])
        buffers.token_rows[:num_tokens].copy_(token_rows)
        buffers.query_start_loc[: len(starts)].copy_(starts_sent)
        # Known tokens end with the last sampled one: commit has put it there. Behind it come the drafts.
        input_ids = buffers.input_ids[:num_tokens]
        input_ids.copy_(state.all_token_ids[token_slots, positions])
        if len(layout.logits_rows) > num_reqs:
            drafts = layout.logits_offsets > 0
            draft_at, draft_slots, draft_columns = upload(
                self._device,
                layout.logits_indices[drafts],
                plan.slots[layout.logits_rows[drafts]],
                layout.logits_offsets[drafts] - 1,
            )
            ids = state.draft_tokens[draft_slots, draft_columns]
            input_ids[draft_at] = ids.clamp(min=0).int()  # -1, no draft, has to be some token
        return buffers.batch(
            plan,
            desc,
            layout,
            starts,
            idx_mapping=slots,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
        )

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        plan = dummy_plan(num_tokens, num_reqs, self._shape)
        return self._buffers.fill_from_host(plan, desc, lay_out(plan), np.zeros(num_tokens, np.int64), is_dummy=True)
