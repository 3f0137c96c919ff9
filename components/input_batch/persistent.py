"""V1's input batch: persistent numpy rows, condensed when a request leaves and ordered as the plan says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from workerkit.components.input_batch.layout import AscendInputBuffers, dummy_plan, ragged
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.batch import BatchPlan, HostRequest, HostRequestStates, InputBatch, RowInputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVLayout, RowBlockTables
from workerkit.framework.interfaces.runner import WorkerShape


class NPUInputBatch(RowInputBatch):
    """Rows 0 to len - 1 are in use, the others are zero. Rows of the block table move with them."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, tables: RowBlockTables, layout: KVLayout) -> None:
        self._shape = shape
        self._layout = layout
        self._tables = tables
        self._buffers = AscendInputBuffers(shape, context.device)
        self.token_ids_cpu = np.zeros((shape.max_num_reqs, shape.max_model_len), np.int32)
        self.num_tokens = np.zeros(shape.max_num_reqs, np.int32)  # known tokens; drafts may lie behind them
        self._records: list[HostRequest] = []  # by row
        self._num_blocks: list[list[int]] = []  # by row: manager blocks that its table row has, for each group
        self._rows: dict[str, int] = {}
        self._row_moves = 0

    @property
    def row_moves(self) -> int:
        return self._row_moves

    def remove(self, req_id: str) -> None:
        row = self._rows.pop(req_id, None)
        if row is None:
            return
        last = len(self._records) - 1
        if row != last:
            self.token_ids_cpu[row] = self.token_ids_cpu[last]
            self.num_tokens[row] = self.num_tokens[last]
            self._records[row] = self._records[last]
            self._num_blocks[row] = self._num_blocks[last]
            self._rows[self._records[row].request.req_id] = row
            self._tables.move_row(last, row)
            self._row_moves += 1
        else:
            self._tables.clear(last)
        self.token_ids_cpu[last] = 0
        self.num_tokens[last] = 0
        self._records.pop()
        self._num_blocks.pop()

    def sync(self, plan: BatchPlan, states: HostRequestStates) -> None:
        wanted = [states.get(req_id) for req_id in plan.req_ids]
        if wanted != self._records:  # a request that left and came back under the same id has a new record
            self._arrange(wanted)
        self._write_tokens(plan)
        self._append_blocks()

    def _arrange(self, wanted: Sequence[HostRequest]) -> None:
        """Make the rows be these."""
        kept = {id(record) for record in wanted}
        for record in list(self._records):
            if id(record) not in kept:
                self.remove(record.request.req_id)
        for row, record in enumerate(wanted):
            req_id = record.request.req_id
            if req_id not in self._rows:
                self._add(record)
            if self._rows[req_id] != row:
                self._swap(self._rows[req_id], row)

    def _add(self, record: HostRequest) -> None:
        row = len(self._records)
        self._tables.add(row, record.block_ids)
        self._rows[record.request.req_id] = row
        self._records.append(record)
        self._num_blocks.append([len(ids) for ids in record.block_ids])

    def _swap(self, first: int, second: int) -> None:
        """Exchange two rows. The right-hand sides are copies: with views both rows would end up the same."""
        pair, reverse = [first, second], [second, first]
        self.token_ids_cpu[pair] = self.token_ids_cpu[reverse]
        self.num_tokens[pair] = self.num_tokens[reverse]
        self._records[first], self._records[second] = self._records[second], self._records[first]
        self._num_blocks[first], self._num_blocks[second] = self._num_blocks[second], self._num_blocks[first]
        for row in pair:
            self._rows[self._records[row].request.req_id] = row
        self._tables.swap_row(first, second)
        self._row_moves += 1

    def _write_tokens(self, plan: BatchPlan) -> None:
        """Bring the rows up to what is known, and put the scheduled drafts behind it."""
        known = self.num_tokens[: plan.num_reqs].copy()
        new: list[list[int]] = []
        for row, (record, have, num_drafts) in enumerate(
            zip(self._records, known.tolist(), plan.num_draft_tokens.tolist(), strict=True)
        ):
            # A token sampled at the last position is known but can never be an input.
            tokens = record.token_ids[have : self._shape.max_model_len]
            self.num_tokens[row] = have + len(tokens)
            if num_drafts:  # one that was scheduled but never proposed has to be some token; V2 takes the same
                drafts = record.drafts[:num_drafts]
                tokens += drafts + [0] * (num_drafts - len(drafts))
            new.append(tokens)
        _, rows, offsets = ragged(np.fromiter(map(len, new), np.int64, len(new)))
        self.token_ids_cpu[rows, known[rows] + offsets] = [*itertools.chain(*new)]

    def _append_blocks(self) -> None:
        for row, (record, have) in enumerate(zip(self._records, self._num_blocks, strict=True)):
            counts = [len(ids) for ids in record.block_ids]
            if counts != have:
                self._tables.append(row, [ids[n:] for ids, n in zip(record.block_ids, have, strict=True)])
                self._num_blocks[row] = counts

    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        if [record.request.req_id for record in self._records] != list(plan.req_ids):
            raise IntegrityError("the rows are not those of the plan: sync comes before build")
        return self._buffers.fill_from_host(plan, desc, self.token_ids_cpu, self._draft_ids(plan))

    def _draft_ids(self, plan: BatchPlan) -> np.ndarray | None:
        if not np.count_nonzero(plan.num_draft_tokens):
            return None
        ids: list[int] = []
        for record, count in zip(self._records, plan.num_draft_tokens.tolist(), strict=True):
            drafts = record.drafts[:count]
            ids += drafts + [-1] * (count + 1 - len(drafts))
        return np.array(ids)

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        plan = dummy_plan(num_tokens, num_reqs, self._shape)
        return self._buffers.fill_from_host(plan, desc, np.broadcast_to(0, (num_reqs, num_tokens)), is_dummy=True)

    def check_integrity(self, states: HostRequestStates) -> None:
        """A row may lag behind its record, which grows after the step; it must never contradict it."""
        if self._rows != {record.request.req_id: row for row, record in enumerate(self._records)}:
            raise IntegrityError(f"the map of rows {self._rows} is not the rows' order")
        for row, record in enumerate(self._records):
            req_id, known = record.request.req_id, int(self.num_tokens[row])
            if req_id not in states or states.get(req_id) is not record:
                raise IntegrityError(f"row {row} belongs to request {req_id!r}, which is gone")
            if self.token_ids_cpu[row, :known].tolist() != record.token_ids[:known]:
                raise IntegrityError(f"row {row}: the tokens are not those of request {req_id!r}")
            for ids, have, kernel_ids, stride in zip(
                record.block_ids,
                self._num_blocks[row],
                self._tables.block_ids(row),
                self._layout.strides,
                strict=True,
            ):
                ratio = len(kernel_ids) // max(have, 1)
                if [kernel_id // stride for kernel_id in kernel_ids[:: max(ratio, 1)]] != ids[:have]:
                    raise IntegrityError(f"row {row}: the blocks are not those of request {req_id!r}")
        if self.num_tokens[len(self._records) :].any() or self.token_ids_cpu[len(self._records) :].any():
            raise IntegrityError(f"a row beyond the last of {len(self._records)} is not empty")
        self._tables.check_integrity(range(len(self._records)))
