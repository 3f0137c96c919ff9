"""What the block tables share: the shape of a group's rows, the checks of block ids, and the slot of a token."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from workerkit.components.buffers.upload import operand
from workerkit.framework.errors import CacheError
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, PAD_SLOT_ID, KVLayout
from workerkit.framework.interfaces.runner import WorkerShape


@attrs.frozen(kw_only=True)
class GroupRows:
    """The rows of one group's table; a manager block x is kernel blocks x * ratio … x * ratio + ratio - 1."""

    group: int
    block_size: int  # B
    ratio: int  # B / b
    max_blocks: int  # manager blocks that max_model_len tokens take
    num_blocks: int  # of the pool

    @property
    def width(self) -> int:
        """Columns: kernel blocks."""
        return self.max_blocks * self.ratio

    def expand(self, block_ids: Sequence[int]) -> np.ndarray:
        """Manager block ids -> kernel block ids, int32."""
        ids = np.asarray(block_ids, np.int32)[:, None] * self.ratio + np.arange(self.ratio, dtype=np.int32)
        return ids.reshape(-1)

    def check(self, index: int, held: int, block_ids: Sequence[int]) -> None:
        """Raises CacheError when the row, which holds `held` kernel blocks, cannot take the manager blocks."""
        have = held // self.ratio
        if have + len(block_ids) > self.max_blocks:
            raise CacheError(
                f"block table row {index} of group {self.group} holds {have} blocks and cannot take {len(block_ids)} "
                f"more: its capacity is {self.max_blocks} blocks of {self.block_size} tokens"
            )
        wrong = [block_id for block_id in block_ids if not 0 < block_id < self.num_blocks]
        if wrong:
            raise CacheError(
                f"block ids {wrong} for row {index} of group {self.group}: right is 1 to {self.num_blocks - 1}"
            )


def groups_of(shape: WorkerShape, layout: KVLayout) -> tuple[GroupRows, ...]:
    """The groups of a layout."""
    return tuple(
        GroupRows(
            group=group,
            block_size=size,
            ratio=size // layout.kernel_block_size,
            max_blocks=-(-shape.max_model_len // size),
            num_blocks=layout.num_blocks,
        )
        for group, size in enumerate(layout.block_sizes)
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
    if short.any():
        group, row = np.argwhere(short)[0]
        raise CacheError(
            f"request {plan.req_ids[row]!r} is scheduled up to token {ends[row]}, "
            f"but its blocks of group {group} hold {counts[group, row] * kernel_block_size}"
        )


def compute_slot_mapping(
    table: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    kernel_block_size: int,
    max_model_len: int,
    out: torch.Tensor,
) -> None:
    """out[t] = table[row, pos // b] * b + pos % b, and -1 from len(positions) on.

    table [rows, W] int32; token_rows, positions [N] int64; out [T >= N] int32. A position beyond max_model_len or
    beyond the row's blocks (where the table reads as the null block) gets -1: it must never be written anywhere else.
    """
    num_tokens = len(positions)
    table, token_rows, positions, mapping = map(operand, (table, token_rows, positions, out))
    inside = positions < max_model_len
    blocks = table[token_rows, positions * inside // kernel_block_size] * inside
    slots = blocks * kernel_block_size + positions % kernel_block_size
    # The product is 0 for a missing slot, which then gets -1, the padding slot.
    mapping[:num_tokens] = (slots + 1) * (blocks != NULL_BLOCK_ID) + PAD_SLOT_ID
    if num_tokens < len(mapping):
        mapping[num_tokens:] = PAD_SLOT_ID
