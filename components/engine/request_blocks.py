"""The blocks of requests: how many they need, which they take, share and give back, and what others find in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workerkit.components.engine.block_pool import BlockPool
from workerkit.components.engine.plan import Row, ScheduledRequest
from workerkit.components.engine.prefix_cache import Hit, PrefixCache
from workerkit.components.engine.state_copies import StateCopies
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, KVLayout
from workerkit.framework.interfaces.runner import WorkerShape


def _held(block_ids: Iterable[int]) -> list[int]:
    return [block_id for block_id in block_ids if block_id != NULL_BLOCK_ID]


class RequestBlocks:
    """Keeps `ScheduledRequest.block_ids`. Without prefix caching nothing is published, so nothing is found.

    With speculation every request has blocks for K + 1 positions more than are computed, up to the end of the context:
    there a draft network writes its own keys and values, before it is known which of its tokens stay. They lie behind
    all known tokens that are computed, so no such block is shared or published.

    In a group with a sliding window a request gives back the blocks that neither a step in flight nor a later one sees;
    the null block takes their columns, the worker keeps the ids and does not read them. There it has blocks for the
    tokens of the next step only, in other groups for all known ones from the beginning.
    """

    def __init__(self, layout: KVLayout, shape: WorkerShape, prefix_caching: bool) -> None:
        self._specs = [group.spec for group in layout.groups]
        self._sizes = layout.block_sizes
        self._windows = [
            (group, spec.block_size, spec.sliding_window)
            for group, spec in enumerate(self._specs)
            if spec.sliding_window is not None
        ]
        self._num_ahead = shape.num_speculative_tokens + 1 if shape.num_speculative_tokens else 0
        self._step_tokens = shape.max_num_batched_tokens + self._num_ahead
        self._max_model_len = shape.max_model_len
        self._none = [0] * len(self._sizes)
        self._pool = BlockPool(layout.num_blocks)
        self._prefixes = PrefixCache(self._pool, layout)
        self._prefix_caching = prefix_caching
        is_copying = prefix_caching and layout.state_blocks > 0
        self.states = StateCopies(self._pool, self._prefixes, layout) if is_copying else None
        self.needs_answers = bool(self._windows) or self.states is not None  # see `confirm`
        self._is_zeroing = layout.needs_zeroing
        self._to_zero: dict[int, None] = {}  # blocks that were taken for this step
        self._copied: list[int] = []  # sources of this step's copies, held until it is handed out

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    @property
    def has_copies_in_flight(self) -> bool:
        """Whether blocks are held that come free by themselves."""
        return self.states is not None and self.states.num_in_flight > 0

    def _reach(self, num_tokens: int) -> int:
        return min(num_tokens + self._num_ahead, self._max_model_len)

    def count(self, num_tokens: int) -> int:
        """Blocks of all groups that a request needs at most, until so many of its tokens are computed."""
        reach = self._reach(num_tokens)
        return sum(spec.count_blocks(reach, self._step_tokens) for spec in self._specs)

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
            if self._is_zeroing:
                self._to_zero.update(dict.fromkeys(more))
        request.capacity = min(len(have) * size for size, have in zip(self._sizes, request.block_ids, strict=True))
        return tuple(tuple(more) for more in new)

    def confirm(self, row: Row, num_rejected: int) -> None:
        """The answer of a row's step is here, which rejected so many drafts: what no query sees any more is given back,
        and so are the blocks of a copy of the state, perhaps with content."""
        request, num_computed = row.request, row.num_tokens - num_rejected
        if self.states is not None:
            self.states.settle(row, num_computed)
        request.num_confirmed += num_computed
        if not self._windows or request.finished:
            return
        self.publish(request)  # the last chance for what is given back
        num_known = min(request.num_confirmed, len(request.token_ids))  # what is behind a request's end is computed too
        for group, size, window in self._windows:
            have = request.block_ids[group]
            first = end = max(0, num_known - window + 1) // size
            while first and have[first - 1] != NULL_BLOCK_ID:
                first -= 1
            self._pool.free(have[first:end])
            have[first:end] = [NULL_BLOCK_ID] * (end - first)

    def free(self, request: ScheduledRequest) -> None:
        """Of all groups' blocks those with the latest tokens are evicted first: a hit needs what is before it."""
        blocks = [
            ((index + 1) * size, block)
            for size, have in zip(self._sizes, request.block_ids, strict=True)
            for index, block in enumerate(have)
        ]
        self._pool.free(_held(block for _, block in sorted(blocks)))
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
        shared = [_held(blocks) for blocks in hit.shared]
        num_new = self.count(len(request.token_ids)) - sum(map(len, shared))
        num_held = sum(self._pool.count_free(blocks) for blocks in (*shared, hit.copied, hit.state))
        return num_new + num_held <= self._pool.num_free  # what is held for the hit is no longer free

    def admit(self, request: ScheduledRequest, hit: Hit, num_tokens: int) -> list[tuple[int, int]]:
        """Share the hit's blocks and take new ones for the rest of the known tokens, behind a window for the first
        `num_tokens`. Returns what is to be copied."""
        for have, shared in zip(request.block_ids, hit.shared, strict=True):
            self._pool.acquire(_held(shared))
            have.extend(shared)
        for sources in (hit.copied, hit.state):
            self._pool.acquire(sources)
            self._copied.extend(sources)
        needed = self.missing(request, len(request.token_ids))
        if self._windows:
            soon = self.missing(request, num_tokens)
            for group, _, _ in self._windows:
                needed[group] = soon[group]
        new = self.grow(request, needed)
        copies = [(source, blocks[0]) for source, blocks in zip(hit.copied, new, strict=False)]
        for _, target in copies:
            self._to_zero.pop(target, None)
        return copies

    def publish(self, request: ScheduledRequest) -> None:
        """Let others find what the steps scheduled so far have in full blocks."""
        if self._prefix_caching:
            self._prefixes.publish(request)

    def end_step(self) -> tuple[int, ...]:
        """The step is handed out: whatever it copies is read before anyone else can write it. Returns the blocks that
        the worker has to zero before."""
        self._pool.free(self._copied)
        self._copied.clear()
        to_zero = tuple(self._to_zero)
        self._to_zero.clear()
        return to_zero

    def forget_contents(self, running: Sequence[ScheduledRequest]) -> None:
        """Nothing can be found any more. Running requests keep their blocks, but what they add to old contents is not
        for others."""
        self._pool.forget_contents()
        for request in running:
            request.num_published = request.max_len

    def check_integrity(self, holders: Sequence[ScheduledRequest], saving: Iterable[int]) -> None:
        """Raise IntegrityError when blocks do not add up, when one of them could be written while it is shared, or when
        a request lacks one that it may still read. `saving`: blocks that a step in flight copies a state to."""
        held = [block for request in holders for have in request.block_ids for block in _held(have)]
        self._pool.check_integrity([*held, *saving])
        exposed = [
            block
            for request in holders
            for size, have in zip(self._sizes, request.block_ids, strict=True)
            for block in have[request.num_settled // size :]
            if not self._pool.is_private(block)
        ]
        if exposed:
            raise IntegrityError(f"blocks {exposed} may still be written, but others hold or find them")
        for request in holders:
            for group, (spec, have) in enumerate(zip(self._specs, request.block_ids, strict=True)):
                window = spec.sliding_window or self._max_model_len + 1
                seen = max(0, request.num_confirmed - window + 1) // spec.block_size
                if NULL_BLOCK_ID in have[seen:]:
                    raise IntegrityError(f"{request.req_id!r} gave back blocks of group {group} that it may still read")
