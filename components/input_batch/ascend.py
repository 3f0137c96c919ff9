"""V2's input batch: gathered on the device from the slots' state, without waiting for anything."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import operand, upload
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
        by_token, input_ids = operand(buffers.by_token)[:, :num_tokens], operand(buffers.input_ids)[:num_tokens]
        computed, token_slots = operand(state.num_computed_tokens), operand(token_slots)
        positions = computed[token_slots] + operand(offsets)
        by_token[0] = positions
        by_token[1] = (positions + 1).clip(operand(prompt_lens))
        by_token[2] = operand(token_rows)
        operand(buffers.seq_lens)[:num_reqs] = computed[operand(slots)] + operand(scheduled)
        operand(buffers.query_start_loc)[: len(starts)] = operand(starts_sent)
        # Known tokens end with the last sampled one: commit has put it there. Behind it come the drafts.
        input_ids[:] = operand(state.all_token_ids)[token_slots, positions]
        draft_ids = None
        if len(layout.logits_rows) > num_reqs:
            drafts = layout.logits_offsets > 0
            judges, draft_at, draft_slots, draft_columns = upload(
                self._device,
                np.flatnonzero(drafts) - 1,
                layout.logits_indices[drafts],
                plan.slots[layout.logits_rows[drafts]],
                layout.logits_offsets[drafts] - 1,
            )
            ids = state.draft_tokens[draft_slots, draft_columns]
            buffers.input_ids[draft_at] = ids.clamp(min=0).int()  # -1, no draft, has to be some token
            draft_ids = torch.full_like(logits_rows, -1).index_copy_(0, judges, ids)
        return buffers.batch(
            plan,
            desc,
            layout,
            starts,
            idx_mapping=slots,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            draft_ids=draft_ids,
        )

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        plan = dummy_plan(num_tokens, num_reqs, self._shape)
        return self._buffers.fill_from_host(plan, desc, lay_out(plan), np.zeros(num_tokens, np.int64), is_dummy=True)
