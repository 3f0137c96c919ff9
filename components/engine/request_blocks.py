"""The blocks of requests: how many they need, which they take, share and give back, and what others find in them."""

from __future__ import annotations

from collections.abc import Sequence

from workerkit.components.engine.block_pool import BlockPool
from workerkit.components.engine.plan import ScheduledRequest
from workerkit.components.engine.prefix_cache import Hit, PrefixCache
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.runner import WorkerShape


class RequestBlocks:
    """Keeps `ScheduledRequest.block_ids`. Without prefix caching nothing is published, so nothing is found.

    With speculation every request has blocks for K + 1 positions more than are computed, up to the end of the context:
    there a draft network writes its own keys and values, before it is known which of its tokens stay. They lie behind
    all known tokens that are computed, so no such block is shared or published.
    """

    def __init__(self, layout: KVLayout, shape: WorkerShape, prefix_caching: bool) -> None:
        self._sizes = layout.block_sizes
        self._num_ahead = shape.num_speculative_tokens + 1 if shape.num_speculative_tokens else 0
        self._max_model_len = shape.max_model_len
        self._none = [0] * len(self._sizes)
        self._pool = BlockPool(layout.num_blocks)
        self._prefixes = PrefixCache(self._pool, layout.block_sizes)
        self._prefix_caching = prefix_caching
        self._copied: list[int] = []  # sources of this step's copies, held until it is handed out

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    def _reach(self, num_tokens: int) -> int:
        return min(num_tokens + self._num_ahead, self._max_model_len)

    def count(self, num_tokens: int) -> int:
        """Blocks of all groups for that many computed tokens."""
        return sum(-(-self._reach(num_tokens) // size) for size in self._sizes)

    def missing(self, request: ScheduledRequest, num_tokens: int) -> list[int]:
        """How many more blocks of each group a request needs to have that many tokens computed."""
        reach = self._reach(num_tokens)
        if reach <= request.capacity:
            return self._none
        return [
            max(0, -(-reach // size) - len(have)) for size, have in zip(self._sizes, request.block_ids, strict=True)
        ]

    def grow(self, request: ScheduledRequest, needed: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Take new blocks of each group and return them. Raises CacheError when there are not enough."""
        new = [self._pool.allocate(count) for count in needed]
        for have, more in zip(request.block_ids, new, strict=True):
            have.extend(more)
        request.capacity = min(len(have) * size for size, have in zip(self._sizes, request.block_ids, strict=True))
        return tuple(tuple(more) for more in new)

    def free(self, request: ScheduledRequest) -> None:
        """Of all groups' blocks those with the latest tokens are evicted first: a hit needs what is before it."""
        blocks = [
            ((index + 1) * size, block)
            for size, have in zip(self._sizes, request.block_ids, strict=True)
            for index, block in enumerate(have)
        ]
        self._pool.free([block for _, block in sorted(blocks)])
        for have in request.block_ids:
            have.clear()
        request.capacity = 0

    # Prefixes

    def start_step(self) -> None:
        """A step is about to be planned."""
        self._prefixes.start_step()

    def find(self, request: ScheduledRequest) -> Hit | None:
        """The longest usable prefix in the cache for which there are blocks, perhaps of no tokens; None when there are
        not enough blocks to admit the request."""
        hits = [Hit(num_tokens=0, shared=((),) * len(self._sizes))]
        if self._prefix_caching and request.sampling.prompt_logprobs is None:
            hits = self._prefixes.hits(request)
        return next((hit for hit in hits if self._has_room(request, hit)), None)

    def _has_room(self, request: ScheduledRequest, hit: Hit) -> bool:
        num_new = self.count(len(request.token_ids)) - sum(len(blocks) for blocks in hit.shared)
        num_held = sum(self._pool.count_free(blocks) for blocks in (*hit.shared, hit.copied))
        return num_new + num_held <= self._pool.num_free  # what is held for the hit is no longer free

    def admit(self, request: ScheduledRequest, hit: Hit) -> list[tuple[int, int]]:
        """Share the hit's blocks and take new ones for the rest of the known tokens. Returns what is to be copied."""
        for have, shared in zip(request.block_ids, hit.shared, strict=True):
            self._pool.acquire(shared)
            have.extend(shared)
        self._pool.acquire(hit.copied)
        self._copied.extend(hit.copied)
        new = self.grow(request, self.missing(request, len(request.token_ids)))
        return [(source, blocks[0]) for source, blocks in zip(hit.copied, new, strict=False)]

    def publish(self, request: ScheduledRequest) -> None:
        """Let others find what the steps scheduled so far have in full blocks."""
        if self._prefix_caching:
            self._prefixes.publish(request)

    def end_step(self) -> None:
        """The step is handed out: whatever it copies is read before anyone else can write it."""
        self._pool.free(self._copied)
        self._copied.clear()

    def forget_contents(self, running: Sequence[ScheduledRequest]) -> None:
        """Nothing can be found any more. Running requests keep their blocks, but what they add to old contents is not
        for others."""
        self._pool.forget_contents()
        for request in running:
            request.num_published = request.max_len

    def check_integrity(self, holders: Sequence[ScheduledRequest]) -> None:
        """Raise IntegrityError when blocks do not add up, or when one of them could be written while it is shared."""
        self._pool.check_integrity(block for request in holders for have in request.block_ids for block in have)
        exposed = [
            block
            for request in holders
            for size, have in zip(self._sizes, request.block_ids, strict=True)
            for block in have[request.num_settled // size :]
            if not self._pool.is_private(block)
        ]
        if exposed:
            raise IntegrityError(f"blocks {exposed} may still be written, but others hold or find them")
