"""V1's input batch: persistent numpy rows, condensed when a request leaves and ordered as the plan says."""

from __future__ import annotations

import numpy as np

from workerkit.components.input_batch.layout import AscendInputBuffers, dummy_plan, lay_out
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.batch import BatchPlan, HostRequest, HostRequestStates, InputBatch, RowInputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import RowBlockTables
from workerkit.framework.interfaces.runner import WorkerShape


class NPUInputBatch(RowInputBatch):
    """Rows 0 to len - 1 are in use, the others are zero. Rows of the block table move with them."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, tables: RowBlockTables) -> None:
        self._shape = shape
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
        wanted = {req_id: states.get(req_id) for req_id in plan.req_ids}
        for record in list(self._records):
            # A request that left and came back under the same id has a new record.
            if wanted.get(record.request.req_id) is not record:
                self.remove(record.request.req_id)
        for row, (req_id, drafts) in enumerate(zip(plan.req_ids, plan.num_draft_tokens.tolist(), strict=True)):
            if req_id not in self._rows:
                self._add(wanted[req_id])
            if self._rows[req_id] != row:
                self._swap(self._rows[req_id], row)
            self._refresh(row, drafts)

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

    def _refresh(self, row: int, num_drafts: int) -> None:
        """Bring tokens, drafts and blocks up to the record's."""
        record = self._records[row]
        # A token sampled at the last position is known but can never be an input. A draft that was scheduled but
        # never proposed has to be some token; V2 takes the same.
        known, total = int(self.num_tokens[row]), min(len(record.token_ids), self._shape.max_model_len)
        self.token_ids_cpu[row, known:total] = record.token_ids[known:total]
        drafts = record.drafts[:num_drafts]
        self.token_ids_cpu[row, total : total + num_drafts] = drafts + [0] * (num_drafts - len(drafts))
        self.num_tokens[row] = total
        new = [ids[have:] for ids, have in zip(record.block_ids, self._num_blocks[row], strict=True)]
        if any(new):
            self._tables.append(row, new)
            self._num_blocks[row] = [len(ids) for ids in record.block_ids]

    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        if tuple(record.request.req_id for record in self._records) != plan.req_ids:
            raise IntegrityError("the rows are not those of the plan: sync comes before build")
        layout = lay_out(plan)
        positions = plan.num_computed_tokens[layout.token_rows] + layout.offsets
        input_ids = self.token_ids_cpu[layout.token_rows, positions]
        return self._buffers.fill_from_host(plan, desc, layout, input_ids, self._draft_ids(plan))

    def _draft_ids(self, plan: BatchPlan) -> np.ndarray | None:
        if not plan.num_draft_tokens.any():
            return None
        ids: list[int] = []
        for record, count in zip(self._records, plan.num_draft_tokens.tolist(), strict=True):
            drafts = record.drafts[:count]
            ids += drafts + [-1] * (count + 1 - len(drafts))
        return np.array(ids)

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        plan = dummy_plan(num_tokens, num_reqs, self._shape)
        return self._buffers.fill_from_host(plan, desc, lay_out(plan), np.zeros(num_tokens, np.int64), is_dummy=True)

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
            for ids, have, kernel_ids in zip(
                record.block_ids, self._num_blocks[row], self._tables.block_ids(row), strict=True
            ):
                ratio = len(kernel_ids) // max(have, 1)
                if [kernel_id // max(ratio, 1) for kernel_id in kernel_ids[:: max(ratio, 1)]] != ids[:have]:
                    raise IntegrityError(f"row {row}: the blocks are not those of request {req_id!r}")
        if self.num_tokens[len(self._records) :].any() or self.token_ids_cpu[len(self._records) :].any():
            raise IntegrityError(f"a row beyond the last of {len(self._records)} is not empty")
        self._tables.check_integrity(range(len(self._records)))
