"""The pool of KV-cache blocks: which ids are free. One pool serves all KV-cache groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workerkit.framework.errors import CacheError, IntegrityError
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID


class BlockPool:
    """Hands out block ids 1 … num_blocks - 1; block 0 is the null block and belongs to nobody."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._free = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))  # popped from the end: low ids first
        self._is_free = [True] * num_blocks  # [NULL_BLOCK_ID] is never read

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises CacheError when fewer are free; nothing is then taken."""
        if count > len(self._free):
            raise CacheError(f"{count} blocks were asked for, {len(self._free)} are free")
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._is_free[block_id] = False
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Raises IntegrityError at the first id that is not handed out now."""
        for block_id in block_ids:
            if not NULL_BLOCK_ID < block_id <= self.num_usable:
                raise IntegrityError(f"block {block_id} was freed, but the pool has blocks 1 to {self.num_usable}")
            if self._is_free[block_id]:
                raise IntegrityError(f"block {block_id} was freed twice")
            self._is_free[block_id] = True
            self._free.append(block_id)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise IntegrityError unless each block is either free or exactly once in `owned`."""
        holders = Counter([*self._free, *owned])
        blocks = set(range(1, self.num_usable + 1))
        faults = {
            "held twice": sorted(block for block, count in holders.items() if count > 1),
            "lost": sorted(blocks - holders.keys()),
            "foreign": sorted(holders.keys() - blocks),
        }
        if any(faults.values()):
            raise IntegrityError(f"blocks do not add up: {faults}")
