"""Several passes of one query a row, planned at once: the next position of every row, the one behind it, and so on.

Like `rows.one_query_rows`, except that each pass is a batch of its own. What depends on the device's lengths is worked
out on the device, for all passes together, because a call for each pass would cost more than a small draft network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from workerkit.components.buffers.upload import operand
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, PAD_SLOT_ID, BatchTables
from workerkit.framework.interfaces.runner import WorkerShape


class Passes:
    """Builds the batches of `num_passes` passes."""

    def __init__(self, shape: WorkerShape, num_passes: int, block_size: int, device: torch.device) -> None:
        rows = shape.max_num_reqs
        self._max_model_len = shape.max_model_len
        self._block_size = block_size
        # The same in every step.
        self._starts_np = np.arange(rows + 1, dtype=np.int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, device=device)
        self._no_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._no_drafts = torch.full((rows,), -1, device=device)
        self._steps = torch.arange(1, num_passes + 1, device=device)[:, None]

    def build(
        self, batch: InputBatch, tables: BatchTables, first: torch.Tensor, goes_on: torch.Tensor, ahead: int
    ) -> Iterator[tuple[InputBatch, BatchTables]]:
        """The q-th pass, q = 1, 2, …, has a query at first + q in each row, which sees everything up to itself.

        first [num_reqs] int64; goes_on [num_reqs] bool. Rows that do not go on, and positions from max_model_len on,
        have no slot (B55), see one key, and are given some position below max_model_len. ahead: how many positions
        `first` may lie behind the row's last token in `batch`.
        """
        if not len(self._steps):
            return
        num_reqs, limit = batch.num_reqs, self._max_model_len
        at = operand(first) + operand(self._steps)  # [Q, R]
        is_live = operand(goes_on) & (at < limit)
        positions = at.clip(max=limit - 1)
        rope_lens = torch.as_tensor(positions + 1)  # every live row is behind its prompt
        lens = torch.as_tensor(at * is_live + 1).int()
        block_tables = tuple(table[:num_reqs] for table in tables.block_tables)
        slots = [torch.as_tensor(slots_of(table, positions, is_live, self._block_size)).int() for table in block_tables]
        positions = torch.as_tensor(positions)
        plan, ones = batch.plan, np.ones(num_reqs, np.int32)
        none = np.zeros_like(ones)
        starts, starts_np = self._starts[: num_reqs + 1], self._starts_np[: num_reqs + 1]
        each, no_tokens, no_drafts = self._rows[:num_reqs], self._no_tokens[:num_reqs], self._no_drafts[:num_reqs]
        for number, seq_lens in enumerate(lens):
            upper = np.minimum(batch.host_seq_lens.upper_bound + (ahead + number + 1), limit).astype(np.int32)
            rows = InputBatch(
                plan=BatchPlan(
                    req_ids=plan.req_ids,
                    slots=plan.slots,
                    num_scheduled_tokens=ones,
                    num_computed_tokens=upper - 1,
                    num_draft_tokens=none,
                    prefill_lens=plan.prefill_lens,
                    prompt_lens=plan.prompt_lens,
                ),
                num_reqs=num_reqs,
                num_reqs_padded=num_reqs,
                num_tokens=num_reqs,
                num_tokens_padded=num_reqs,
                max_query_len=1,
                idx_mapping=batch.idx_mapping,
                query_start_loc=starts,
                query_start_loc_np=starts_np,
                seq_lens=seq_lens,
                host_seq_lens=HostLengths(upper_bound=upper, exact=_copy(seq_lens)),
                input_ids=no_tokens,
                positions=positions[number],
                rope_lens=rope_lens[number],
                token_rows=each,
                logits_indices=each,
                logits_rows=each,
                draft_ids=no_drafts,
                cu_num_logits_np=starts_np,
                is_dummy=batch.is_dummy,
            )
            mappings = tuple([group[number] for group in slots])
            yield rows, BatchTables(block_tables=block_tables, slot_mappings=mappings)


def slots_of(table: torch.Tensor, positions: Any, is_live: Any, block_size: int) -> Any:
    """Where positions [..., R] of the rows of a table [R, W] lie in the cache; -1 for those that are not live, and for
    those whose block is the null block. Operands, see `buffers.upload`."""
    blocks = operand(table)[operand(torch.arange(len(table), device=table.device)), positions // block_size]
    # The product is 0 for a missing slot, which then gets -1, the padding slot.
    return (positions % block_size + blocks * block_size + 1) * (is_live & (blocks != NULL_BLOCK_ID)) + PAD_SLOT_ID


def _copy(lens: torch.Tensor) -> Callable[[], np.ndarray]:
    return lambda: lens.to("cpu", copy=True).numpy()
