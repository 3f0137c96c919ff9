"""The simplest block tables: Python lists by slot, from which every step's tables are filled anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workerkit.components.block_table.group import check_blocks, check_covered, groups_of
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    BatchTables,
    BlockTableWrites,
    KVLayout,
    SlotBlockTables,
)
from workerkit.framework.interfaces.runner import WorkerShape


class ReferenceBlockTables(SlotBlockTables):
    """Takes V2's place, slowly; the oracle of the other tables."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, layout: KVLayout) -> None:
        self._shape = shape
        self._kernel_block_size = layout.kernel_block_size
        self._groups = groups_of(shape, layout)
        slots = range(shape.max_num_reqs)
        self._entries: list[list[list[int]]] = [[[] for _ in slots] for _ in self._groups]  # kernel blocks, on the host
        self._applied: list[list[list[int]]] = [[[] for _ in slots] for _ in self._groups]  # the same on the stream
        self._changed: set[int] = set()
        self._tables = [
            torch.zeros(shape.max_num_reqs, group.width, dtype=torch.int32, device=context.device)
            for group in self._groups
        ]
        self._slot_mappings = [
            torch.zeros(shape.max_num_batched_tokens, dtype=torch.int32, device=context.device) for _ in self._groups
        ]

    def add(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        check_blocks(self._groups, index, [0] * len(self._groups), block_ids)
        self.clear(index)
        self.append(index, block_ids)

    def append(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        if not block_ids:
            return
        check_blocks(self._groups, index, [len(entries[index]) for entries in self._entries], block_ids)
        self._changed.add(index)
        for group, ids in zip(self._groups, block_ids, strict=True):
            for block_id in ids:
                first = block_id * group.stride
                is_null = block_id == NULL_BLOCK_ID
                parts = [NULL_BLOCK_ID] * group.ratio if is_null else range(first, first + group.ratio)
                self._entries[group.group][index] += parts

    def clear(self, index: int) -> None:
        self._changed.add(index)
        for entries in self._entries:
            entries[index] = []

    def stage(self) -> BlockTableWrites:
        writes = BlockTableWrites(
            groups=tuple(
                tuple((slot, 0, np.array(entries[slot], np.int32)) for slot in sorted(self._changed))
                for entries in self._entries
            )
        )
        self._changed.clear()
        return writes

    def apply(self, writes: BlockTableWrites) -> None:
        for applied, group_writes in zip(self._applied, writes.groups, strict=True):
            for slot, _, contents in group_writes:
                applied[slot] = contents.tolist()

    def gather(self, batch: InputBatch) -> BatchTables:
        if not batch.is_dummy:
            counts = np.array([[len(applied[slot]) for slot in batch.plan.slots] for applied in self._applied])
            check_covered(batch.plan, counts, self._kernel_block_size)
        block_tables, slot_mappings = [], []
        for group, applied in zip(self._groups, self._applied, strict=True):
            rows = [[] if batch.is_dummy else applied[slot] for slot in batch.plan.slots]
            rows += [[] for _ in range(batch.num_reqs_padded - batch.num_reqs)]
            table = [row + [NULL_BLOCK_ID] * (group.width - len(row)) for row in rows]
            slots = [self._slot(rows[row], position) for row, position in self._tokens(batch)]
            slots += [PAD_SLOT_ID] * (batch.num_tokens_padded - len(slots))
            block_tables.append(self._tables[group.group][: len(table)].copy_(torch.tensor(table)))
            slot_mappings.append(self._slot_mappings[group.group][: len(slots)].copy_(torch.tensor(slots)))
        return BatchTables(block_tables=tuple(block_tables), slot_mappings=tuple(slot_mappings))

    @staticmethod
    def _tokens(batch: InputBatch) -> list[tuple[int, int]]:
        """Row and position of every token."""
        pairs = zip(batch.token_rows.tolist(), batch.positions.tolist(), strict=True)
        return list(pairs)[: batch.num_tokens]

    def _slot(self, row: list[int], position: int) -> int:
        column, offset = divmod(position, self._kernel_block_size)
        if position >= self._shape.max_model_len or column >= len(row):
            return PAD_SLOT_ID
        return row[column] * self._kernel_block_size + offset

    def block_ids(self, index: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(entries[index]) for entries in self._entries)

    def check_integrity(self, live: Sequence[int]) -> None:
        for group, entries in enumerate(self._entries):
            leaked = {slot for slot, row in enumerate(entries) if row} - set(live)
            if leaked:
                raise IntegrityError(f"group {group}: slots {sorted(leaked)} hold blocks of no request")
