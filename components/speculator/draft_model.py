"""A second, smaller causal model as draft: it reads the same text, with keys and values of its own in the same pool.

Its first pass covers the target's tokens and one more in each row: the newest one, in the place of the first rejected
draft where there is one. (Leviathan et al., 2023; Chen et al., 2023.)
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from workerkit.components.buffers.upload import operand, upload
from workerkit.components.speculator.autoregressive import AutoregressiveSpeculator, Prediction
from workerkit.components.speculator.drawing import DrawingConfig
from workerkit.components.speculator.passes import slots_of
from workerkit.components.speculator.shared import newest_tokens, unfit
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.draft import DraftHead
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend, ModelInputs
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, DraftWeights


class DraftModelSpeculator(AutoregressiveSpeculator):
    """Any causal model with the target's vocabulary, the target itself included."""

    lag: ClassVar[int] = 0

    def __init__(
        self,
        config: DrawingConfig,
        shape: WorkerShape,
        draft: DraftWeights,
        caches: KVCaches,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        network = draft.network
        if network is None or isinstance(network, DraftHead):
            raise unfit(draft, "a causal model (draft_model)")
        if network.config.vocab_size != shape.vocab_size:
            raise UnsupportedError(
                f"components.draft: {network.config.architecture} has a vocabulary of {network.config.vocab_size} "
                f"tokens, the target one of {shape.vocab_size}; draft_model needs the same"
            )
        super().__init__(config, shape, draft, caches, attention, kernels, None)
        self._network = network

    def first_pass(self, inputs: DraftInputs, last: torch.Tensor) -> Prediction:
        rows, tables = self._with_next_tokens(inputs, last)
        return self._run(rows.input_ids, rows, self.attend(rows, tables))

    def next_pass(
        self, tokens: torch.Tensor, state: torch.Tensor | None, rows: InputBatch, attend: Attend
    ) -> Prediction:
        return self._run(tokens.int(), rows, attend)

    def _run(self, tokens: torch.Tensor, rows: InputBatch, attend: Attend) -> Prediction:
        inputs = ModelInputs(input_ids=tokens, positions=rows.positions, rope_lens=rows.rope_lens, attend=attend)
        hidden = self._network.forward(inputs).hidden
        if rows.num_logits < len(hidden):
            hidden = hidden[rows.logits_indices]
        return Prediction(logits=self._network.compute_logits(hidden))

    def _with_next_tokens(self, inputs: DraftInputs, last: torch.Tensor) -> tuple[InputBatch, BatchTables]:
        """The target's batch without padding, each row one token longer."""
        batch, limit = inputs.batch, self.max_model_len
        plan, num_reqs = batch.plan, batch.num_reqs
        counts = plan.num_scheduled_tokens + 1
        numbers = np.arange(num_reqs + 1, dtype=np.int32)
        starts_np = batch.query_start_loc_np[: num_reqs + 1] + numbers
        rows_np = np.repeat(numbers[:-1], counts)
        sources_np = np.arange(len(rows_np)) - rows_np  # the additional token of a row comes from nowhere: see `ends`
        sources_np[-1] = 0
        rows, sources, starts, prompt_lens, shifts = upload(
            last.device, rows_np, sources_np, starts_np, plan.prompt_lens[rows_np], numbers[1:]
        )
        # Where the newest tokens go: behind the last valid ones, so in the place of rejected drafts if there are any.
        newest = last + shifts
        ends = operand(starts)[1:] - 1
        behind = operand(batch.seq_lens[:num_reqs].long())  # positions of the tokens at `ends`
        is_live, behind = behind < limit, behind.clip(max=limit - 1)
        input_ids = operand(batch.input_ids)[operand(sources)]
        input_ids[operand(newest)] = operand(newest_tokens(inputs).int())
        positions = operand(batch.positions)[operand(sources)]
        positions[ends] = behind
        rope_lens = torch.as_tensor((positions + 1).clip(operand(prompt_lens)))
        block_tables = tuple(table[:num_reqs] for table in inputs.tables.block_tables)
        slots = []
        for table, mapping in zip(block_tables, inputs.tables.slot_mappings, strict=True):
            slots_here = operand(mapping)[operand(sources)]
            slots_here[ends] = operand(torch.as_tensor(slots_of(table, behind, is_live, self.block_size)).int())
            slots.append(torch.as_tensor(slots_here))
        # A row that is full already gets one token too many: its drafts are none, and what it reads does not matter.
        seq_lens = (batch.seq_lens[:num_reqs] + 1).clamp(max=limit)
        longer = InputBatch(
            plan=BatchPlan(
                req_ids=plan.req_ids,
                slots=plan.slots,
                num_scheduled_tokens=counts,
                num_computed_tokens=plan.num_computed_tokens,
                num_draft_tokens=np.zeros_like(counts),
                prefill_lens=plan.prefill_lens,
                prompt_lens=plan.prompt_lens,
            ),
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs,
            num_tokens=len(rows_np),
            num_tokens_padded=len(rows_np),
            max_query_len=batch.max_query_len + 1,
            idx_mapping=batch.idx_mapping,
            query_start_loc=starts.int(),
            query_start_loc_np=starts_np,
            seq_lens=seq_lens,
            host_seq_lens=HostLengths(
                upper_bound=np.minimum(batch.host_seq_lens.upper_bound + 1, limit),
                exact=lambda: seq_lens.to("cpu", copy=True).numpy(),
            ),
            input_ids=torch.as_tensor(input_ids),
            positions=torch.as_tensor(positions),
            rope_lens=rope_lens,
            token_rows=rows,
            logits_indices=newest,
            logits_rows=shifts - 1,
            draft_ids=torch.full_like(newest, -1),
            cu_num_logits_np=numbers,
            is_dummy=batch.is_dummy,
        )
        return longer, BatchTables(block_tables=block_tables, slot_mappings=tuple(slots))
