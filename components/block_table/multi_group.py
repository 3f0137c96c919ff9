"""V1's block tables: numpy rows on the host, copied to the device each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workerkit.components.block_table.group import GroupRows, InputTables, check_blocks, check_covered, groups_of
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, BatchTables, KVLayout, RowBlockTables
from workerkit.framework.interfaces.runner import WorkerShape


class BlockTable:
    """The table of one group."""

    def __init__(self, rows: GroupRows, counts: np.ndarray, shape: WorkerShape) -> None:
        self.rows = rows
        self.np = np.full((shape.max_num_reqs, rows.width), NULL_BLOCK_ID, np.int32)
        self.num_blocks_per_row = counts  # kernel blocks

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Behind what the row holds."""
        ids, start = self.rows.expand(block_ids), self.num_blocks_per_row[row]
        self.np[row, start : start + len(ids)] = ids
        self.num_blocks_per_row[row] += len(ids)

    def clear_row(self, row: int) -> None:
        """Nothing of the former owner stays."""
        self.np[row] = NULL_BLOCK_ID
        self.num_blocks_per_row[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another and clear the source."""
        self.np[target] = self.np[source]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]
        self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows; indexing with lists copies, so that neither overwrites the other."""
        self.np[[first, second]] = self.np[[second, first]]
        self.num_blocks_per_row[[first, second]] = self.num_blocks_per_row[[second, first]]


class MultiGroupBlockTable(RowBlockTables):
    """One BlockTable a group, moved together."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, layout: KVLayout) -> None:
        self._kernel_block_size = layout.kernel_block_size
        self._groups = groups_of(shape, layout)
        self._counts = np.zeros((len(self._groups), shape.max_num_reqs), np.int32)
        self.tables = tuple(
            BlockTable(rows, counts, shape) for rows, counts in zip(self._groups, self._counts, strict=True)
        )
        is_host = context.device.type == "cpu"
        self._rows: list[Any] = [table.np if is_host else torch.from_numpy(table.np) for table in self.tables]
        self._inputs = InputTables(self._groups, shape, layout, context.device)

    def add(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        check_blocks(self._groups, index, [0] * len(self._groups), block_ids)
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.clear_row(index)
            table.append_row(index, ids)

    def append(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        if not block_ids:
            return
        held = [int(table.num_blocks_per_row[index]) for table in self.tables]
        check_blocks(self._groups, index, held, block_ids)
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append_row(index, ids)

    def clear(self, index: int) -> None:
        for table in self.tables:
            table.clear_row(index)

    def move_row(self, source: int, target: int) -> None:
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, first: int, second: int) -> None:
        for table in self.tables:
            table.swap_row(first, second)

    def gather(self, batch: InputBatch) -> BatchTables:
        # A dummy batch owns no rows and writes no slots; the rows of live requests stay on the host.
        if not batch.is_dummy:
            num_rows = batch.num_reqs
            check_covered(batch.plan, self._counts[:, :num_rows], self._kernel_block_size)
            for rows, inputs in zip(self._rows, self._inputs.tables, strict=True):
                inputs[:num_rows] = rows[:num_rows]  # whole, because their order may change in any step
        return self._inputs.finish(batch)

    def block_ids(self, index: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(table.np[index, : table.num_blocks_per_row[index]].tolist()) for table in self.tables)

    def check_integrity(self, live: Sequence[int]) -> None:
        for table in self.tables:
            table.rows.check_filled(table.np, table.num_blocks_per_row)
            table.rows.check_live(table.num_blocks_per_row, live)
