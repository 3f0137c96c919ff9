"""The pool of KV-cache blocks: who holds which, what the full ones contain, and which content goes first when blocks
run short. One pool serves all KV-cache groups."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from workerkit.framework.errors import CacheError, IntegrityError
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID

BlockKey = tuple[int, bytes]  # KV-cache group (< 0: a copy of a recurrent state), and the digest of all before its end


class BlockPool:
    """Hands out block ids 1 … num_blocks - 1; block 0 is the null block and belongs to nobody.

    A block may have several holders. One without holders is free, but keeps its published content until it is handed
    out again: blocks without content go first, then those that were given back the longest time ago. Every operation
    is O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._empty = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))  # popped from the end: low ids first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free blocks with content, oldest first
        self._num_holders = [0] * num_blocks  # [NULL_BLOCK_ID] is never read
        self._keys: dict[int, BlockKey] = {}  # block -> its content
        self._blocks: dict[BlockKey, int] = {}  # and back

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out, those with content included."""
        return len(self._empty) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks without content. Raises CacheError when fewer are free; nothing is then taken."""
        if count > self.num_free:
            raise CacheError(f"{count} blocks were asked for, {self.num_free} are free")
        block_ids = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        del self._blocks[self._keys.pop(block_id)]
        return block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Hold published blocks together with whoever holds them already. Raises IntegrityError without content."""
        for block_id in block_ids:
            if block_id not in self._keys:
                raise IntegrityError(f"block {block_id} has no published content that could be shared")
            self._evictable.pop(block_id, None)
            self._num_holders[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up a hold on each block, the last one first: of a sequence's blocks the tail is evicted before the head
        without which it cannot be found. Raises IntegrityError at the first id that nobody holds."""
        for block_id in reversed(block_ids):
            if not NULL_BLOCK_ID < block_id <= self.num_usable:
                raise IntegrityError(f"block {block_id} was freed, but the pool has blocks 1 to {self.num_usable}")
            if not self._num_holders[block_id]:
                raise IntegrityError(f"block {block_id} was freed twice")
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            if block_id in self._keys:
                self._evictable[block_id] = None
            else:
                self._empty.append(block_id)

    # Content

    def publish(self, block_id: int, key: BlockKey) -> bool:
        """Say what a held block contains; False when another block has that content already, which then stays."""
        if key in self._blocks:
            return False
        if block_id in self._keys or not self._num_holders[block_id]:
            raise IntegrityError(f"block {block_id} is not held, or its content is published already")
        self._keys[block_id], self._blocks[key] = key, block_id
        return True

    def find(self, key: BlockKey) -> int | None:
        """The block with that content, free or held."""
        return self._blocks.get(key)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds: `acquire` takes them out of `num_free`."""
        return sum(not self._num_holders[block_id] for block_id in block_ids)

    def is_private(self, block_id: int) -> bool:
        """Whether its holder may write it: nobody else holds it, nobody else can find it."""
        return self._num_holders[block_id] == 1 and block_id not in self._keys

    def forget_contents(self) -> None:
        """Nothing can be found any more. Who holds a block keeps it."""
        self._empty.extend(self._evictable)
        for table in (self._evictable, self._keys, self._blocks):
            table.clear()

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise IntegrityError unless each block is either free, once, or has exactly its holders in `held`."""
        holders, free = Counter(held), Counter([*self._empty, *self._evictable])
        blocks = set(range(1, self.num_usable + 1))
        faults = {
            "held too often": sorted(b for b in blocks if holders[b] > self._num_holders[b]),
            "lost": sorted(b for b in blocks if holders[b] < self._num_holders[b] or not (free[b] or holders[b])),
            "free, but not once": sorted(b for b in free if free[b] > 1 or b not in blocks or self._num_holders[b]),
            "foreign": sorted(holders.keys() - blocks),
            "content mixed up": sorted(b for b, key in self._keys.items() if self._blocks.get(key) != b),
            "evictable without content": sorted(self._evictable.keys() - self._keys.keys()),
            "empty with content": sorted(self._keys.keys() & set(self._empty)),
        }
        if any(faults.values()) or len(self._keys) != len(self._blocks):
            raise IntegrityError(f"blocks do not add up: { {name: ids for name, ids in faults.items() if ids} }")
