"""V2's block tables: on the device by stable slot, written through staged writes, gathered through idx_mapping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workerkit.components.block_table.group import InputTables, check_blocks, check_covered, groups_of
from workerkit.components.buffers.upload import operand, upload
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import (
    NULL_BLOCK_ID,
    BatchTables,
    BlockTableWrites,
    KVLayout,
    SlotBlockTables,
)
from workerkit.framework.interfaces.runner import WorkerShape

Write = tuple[int, int, np.ndarray]  # slot, column where the row is cut off, kernel blocks that follow


class AscendBlockTables(SlotBlockTables):
    """The host keeps counts only; `apply` and `gather`, on the stream, have counts of their own, one step behind.

    Beyond a slot's count its table always reads as the null block.
    """

    def __init__(self, shape: WorkerShape, context: DeviceContext, layout: KVLayout) -> None:
        self._device = context.device
        self._kernel_block_size = layout.kernel_block_size
        self._groups = groups_of(shape, layout)
        rows = shape.max_num_reqs
        self._counts = np.zeros((len(self._groups), rows), np.int32)  # kernel blocks, as of the last staged write
        self._applied = np.zeros_like(self._counts)  # as of the last write applied
        self._staged: list[list[Write]] = [[] for _ in self._groups]

        self._tables = [  # by slot
            torch.zeros(rows, group.width, dtype=torch.int32, device=context.device) for group in self._groups
        ]
        self._by_slot = [operand(table) for table in self._tables]
        self._inputs = InputTables(self._groups, shape, layout, context.device)

    def add(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        check_blocks(self._groups, index, [0] * len(self._groups), block_ids)
        self._counts[:, index] = 0
        self._stage(index, block_ids)

    def append(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        if not any(block_ids):
            return
        check_blocks(self._groups, index, self._counts[:, index].tolist(), block_ids)
        self._stage(index, block_ids)

    def clear(self, index: int) -> None:
        self._counts[:, index] = 0
        self._stage(index, [()] * len(self._groups))

    def _stage(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        for group, ids in zip(self._groups, block_ids, strict=True):
            contents, column = group.expand(ids), int(self._counts[group.group, index])
            self._staged[group.group].append((index, column, contents))
            self._counts[group.group, index] += len(contents)

    def stage(self) -> BlockTableWrites:
        writes = BlockTableWrites(groups=tuple(tuple(group) for group in self._staged))
        self._staged = [[] for _ in self._groups]
        return writes

    def apply(self, writes: BlockTableWrites) -> None:
        for group, (table, group_writes) in enumerate(zip(self._tables, writes.groups, strict=True)):
            if group_writes:
                self._apply(table, self._applied[group], group_writes)

    def _apply(self, table: torch.Tensor, counts: np.ndarray, writes: tuple[Write, ...]) -> None:
        """One scatter for all writes of a group."""
        spans, values = [], []
        for slot, column, contents in writes:
            end = column + len(contents)
            stale = max(int(counts[slot]) - end, 0)  # the former owner's
            spans.append((slot * table.shape[1] + column, len(contents) + stale))
            values += [contents, np.full(stale, NULL_BLOCK_ID, np.int32)] if stale else [contents]
            counts[slot] = end
        starts, lengths = np.array(spans).T
        targets = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        contents = np.concatenate(values)
        if len({slot for slot, _, _ in writes}) < len(writes):
            # A cell may be written twice, by `clear` and `add`; a scatter promises no order: only the last one stays.
            targets, latest = np.unique(targets[::-1], return_index=True)
            contents = contents[::-1][latest]
        index, contents_on_device = upload(self._device, targets, contents)
        table.view(-1)[index] = contents_on_device.int()

    def gather(self, batch: InputBatch) -> BatchTables:
        if not batch.is_dummy:  # a dummy batch reads no slot's table and writes no slots
            check_covered(batch.plan, self._applied[:, batch.plan.slots], self._kernel_block_size)
            slots = operand(batch.idx_mapping)
            for table, rows in zip(self._by_slot, self._inputs.tables, strict=True):
                rows[: batch.num_reqs] = table[slots]
        return self._inputs.finish(batch)

    def block_ids(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Reads the device; what `stage` has handed out must have been applied."""
        result = []
        for group, table in enumerate(self._tables):
            row = table[index].cpu().numpy().copy()
            for slot, column, contents in self._staged[group]:
                if slot == index:
                    row[column : column + len(contents)] = contents
            result.append(tuple(row[: self._counts[group, index]].tolist()))
        return tuple(result)

    def check_integrity(self, live: Sequence[int]) -> None:
        """Reads the device; to be called when the stream is idle."""
        for group, table, applied in zip(self._groups, self._tables, self._applied, strict=True):
            group.check_filled(table.cpu().numpy(), applied)
            group.check_live(self._counts[group.group], live)
