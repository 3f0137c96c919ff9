"""What the block tables share: the shape of a group's rows, the checks of block ids, and the slot of a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from workerkit.components.buffers.upload import operand
from workerkit.framework.errors import CacheError, IntegrityError
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, PAD_SLOT_ID, BatchTables, KVLayout
from workerkit.framework.interfaces.runner import WorkerShape


@attrs.frozen(kw_only=True)
class GroupRows:
    """The rows of one group's table; a manager block x is kernel blocks x * stride … x * stride + ratio - 1."""

    group: int
    block_size: int  # B
    ratio: int  # B / b
    stride: int  # ratio, or more: see KVCacheGroup
    max_blocks: int  # manager blocks that max_model_len tokens take
    num_blocks: int  # of the pool
    has_window: bool  # blocks behind it are not kept: the null block stands for them

    @property
    def width(self) -> int:
        """Columns: kernel blocks."""
        return self.max_blocks * self.ratio

    def expand(self, block_ids: Sequence[int]) -> np.ndarray:
        """Manager block ids -> kernel block ids, int32. The null block stays what it is, all over."""
        ids = np.asarray(block_ids, np.int32)
        if self.stride == 1:
            return ids
        parts: np.ndarray = ids[:, None] * self.stride + np.arange(self.ratio, dtype=np.int32)
        parts[ids == NULL_BLOCK_ID] = NULL_BLOCK_ID
        return parts.reshape(-1)

    def check(self, index: int, held: int, block_ids: Sequence[int]) -> None:
        """Raises CacheError when the row, which holds `held` kernel blocks, cannot take the manager blocks."""
        have = held // self.ratio
        if have + len(block_ids) > self.max_blocks:
            raise CacheError(
                f"block table row {index} of group {self.group} holds {have} blocks and cannot take {len(block_ids)} "
                f"more: its capacity is {self.max_blocks} blocks of {self.block_size} tokens"
            )
        least = NULL_BLOCK_ID if self.has_window else NULL_BLOCK_ID + 1
        wrong = [block_id for block_id in block_ids if not least <= block_id < self.num_blocks]
        if wrong:
            raise CacheError(
                f"block ids {wrong} for row {index} of group {self.group}: right is {least} to {self.num_blocks - 1}"
            )

    def check_filled(self, table: np.ndarray, counts: np.ndarray) -> None:
        """Raises IntegrityError when rows [rows, width] do not hold as many kernel blocks as `counts` [rows] says."""
        filled, counted = table != NULL_BLOCK_ID, np.arange(self.width) < counts[:, None]
        if not np.array_equal(filled & counted if self.has_window else counted, filled):
            raise IntegrityError(f"group {self.group}: a row's blocks are not as many as it counts")

    def check_live(self, counts: np.ndarray, live: Collection[int]) -> None:
        """Raises IntegrityError when a row outside `live` has blocks."""
        if leaked := set(np.flatnonzero(counts).tolist()) - set(live):
            raise IntegrityError(f"group {self.group}: rows {sorted(leaked)} hold blocks of no request")


def groups_of(shape: WorkerShape, layout: KVLayout) -> tuple[GroupRows, ...]:
    """The groups of a layout."""
    return tuple(
        GroupRows(
            group=group,
            block_size=size,
            ratio=size // layout.kernel_block_size,
            stride=stride,
            max_blocks=-(-shape.max_model_len // size),
            num_blocks=layout.num_blocks,
            has_window=layout.groups[group].spec.sliding_window is not None,
        )
        for group, (size, stride) in enumerate(zip(layout.block_sizes, layout.strides, strict=True))
    )


def check_blocks(
    groups: Sequence[GroupRows], index: int, held: Sequence[int], block_ids: Sequence[Sequence[int]]
) -> None:
    """Check the ids of all groups before any row is changed."""
    if len(block_ids) != len(groups):
        raise CacheError(f"row {index} gets blocks for {len(block_ids)} groups, the cache has {len(groups)}")
    for group, have, ids in zip(groups, held, block_ids, strict=True):
        group.check(index, have, ids)


def check_covered(plan: BatchPlan, counts: np.ndarray, kernel_block_size: int) -> None:
    """`counts` [groups, rows]: kernel blocks. Raises CacheError when a token has no block."""
    ends = plan.num_computed_tokens + plan.num_scheduled_tokens
    short = counts * kernel_block_size < ends
    if np.count_nonzero(short):
        group, row = np.argwhere(short)[0]
        raise CacheError(
            f"request {plan.req_ids[row]!r} is scheduled up to token {ends[row]}, "
            f"but its blocks of group {group} hold {counts[group, row] * kernel_block_size}"
        )


class InputTables:
    """What a step's gather fills: tables by batch row, and slot mappings, at addresses that never change."""

    def __init__(self, groups: Sequence[GroupRows], shape: WorkerShape, layout: KVLayout, device: torch.device) -> None:
        self._shape = shape
        self._block_size = layout.kernel_block_size

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._tables = [zeros(shape.max_num_reqs, group.width) for group in groups]
        self._slot_mappings = [zeros(shape.max_num_batched_tokens) for _ in groups]
        self.tables = [operand(table) for table in self._tables]
        self._mappings = [operand(mapping) for mapping in self._slot_mappings]
        self._views: tuple[tuple[int, int], BatchTables] | None = None  # of the last padded size

    def finish(self, batch: InputBatch) -> BatchTables:
        """Pad the tables, whose rows of the batch are in place, and work the slots out. A dummy batch has no rows."""
        num_rows, num_tokens = (0, 0) if batch.is_dummy else (batch.num_reqs, batch.num_tokens)
        rows, tokens = batch.num_reqs_padded, batch.num_tokens_padded
        token_rows, positions = operand(batch.token_rows)[:num_tokens], operand(batch.positions)[:num_tokens]
        for table, mapping in zip(self.tables, self._mappings, strict=True):
            if num_rows < rows:
                table[num_rows:rows] = NULL_BLOCK_ID
            mapping[:num_tokens] = compute_slot_mapping(
                table, token_rows, positions, self._block_size, self._shape.max_model_len
            )
            if num_tokens < tokens:
                mapping[num_tokens:tokens] = PAD_SLOT_ID
        if self._views is None or self._views[0] != (rows, tokens):
            views = BatchTables(
                block_tables=tuple(table[:rows] for table in self._tables),
                slot_mappings=tuple(mapping[:tokens] for mapping in self._slot_mappings),
            )
            self._views = (rows, tokens), views
        return self._views[1]


def compute_slot_mapping(
    table: Any, token_rows: Any, positions: Any, kernel_block_size: int, max_model_len: int
) -> Any:
    """table[row, pos // b] * b + pos % b of each token [N]; everything is an operand (see `operand`).

    table [rows, W] int32; token_rows, positions [N] int64. A position beyond max_model_len or beyond the row's blocks
    (where the table reads as the null block) gets -1, the padding slot: it must never be written anywhere else.
    """
    inside = positions < max_model_len
    blocks = table[token_rows, positions * inside // kernel_block_size] * inside
    slots = blocks * kernel_block_size + positions % kernel_block_size
    return (slots + 1) * (blocks != NULL_BLOCK_ID) + PAD_SLOT_ID  # the product is 0 for a missing slot
