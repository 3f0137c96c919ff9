"""Prefix caching: which of a request's blocks are in the cache already, and which of them others may find.

A full block is known by a digest of everything that its keys and values depend on: SHA-256 over the digest of the block
before it, its token ids and the multimodal content that reaches into it; the first one builds on the adapter and the
salt. Equal digests therefore mean equal content, wherever the block lies, and tokens need not be compared. A key holds
the KV-cache group too, since groups cut the same tokens into blocks of different sizes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import attrs

from workerkit.components.engine.block_pool import BlockKey, BlockPool
from workerkit.components.engine.plan import ScheduledRequest
from workerkit.framework.interfaces.engine import CacheIdentity
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, KVLayout


class BlockDigests:
    """The digests of one sequence's full blocks of one size, each computed when it is first asked for."""

    def __init__(self, block_size: int, identity: CacheIdentity) -> None:
        self._block_size = block_size
        self._spans = identity.multimodal
        self._pack = struct.Struct(f"<{block_size}q").pack
        root = ascii((block_size, identity.salt, identity.lora))  # quotes and escapes strings: nothing else reads alike
        self._root = hashlib.sha256(root.encode()).digest()
        self._digests: list[bytes] = []

    def get(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The digest of block `index`, all of whose tokens are in `token_ids`."""
        digests = self._digests
        while len(digests) <= index:
            start = len(digests) * self._block_size
            end = start + self._block_size
            content = self._pack(*token_ids[start:end])
            spans = [
                (span.start - start, span.length, span.digest)
                for span in self._spans
                if span.start < end and start < span.start + span.length
            ]
            parent = digests[-1] if digests else self._root
            digests.append(hashlib.sha256(parent + content + ascii(spans).encode()).digest())
        return digests[index]


def _digests(request: ScheduledRequest, block_size: int) -> BlockDigests:
    if block_size not in request.digests:
        request.digests[block_size] = BlockDigests(block_size, request.cache_identity)
    return request.digests[block_size]


@attrs.frozen(kw_only=True)
class Hit:
    """A prefix that is in the cache, as far as the tokens behind it depend on it."""

    num_tokens: int
    shared: tuple[tuple[int, ...], ...]  # for each group: blocks to be held as they are, the null block behind a window
    copied: tuple[int, ...] = ()  # for each group: the block after those, to be copied; () when none
    state: tuple[int, ...] = ()  # a copy of the recurrent state behind the prefix; () when the model has none


@attrs.frozen(kw_only=True, eq=False)
class _Chain:
    """What one group has of a sequence."""

    size: int
    window: int | None
    blocks: list[int]  # by column; the null block where there is none
    starts: list[int]  # by column: where the run of blocks that ends there begins

    def columns(self, num_tokens: int) -> range:
        """Those with keys of the first `num_tokens` tokens that queries behind them see."""
        behind = 0 if self.window is None else max(0, num_tokens - self.window + 1)
        return range(behind // self.size, -(-num_tokens // self.size))

    def reaches(self, num_tokens: int) -> bool:
        """Whether it has those, num_tokens >= 1; and where there is none, with a window of 1, the one before them:
        else whatever nobody ever computed would be a hit."""
        columns = self.columns(num_tokens)
        last = columns.stop - 1
        return last < len(self.blocks) and self.starts[last] <= min(columns.start, last)

    def shared(self, num_tokens: int) -> tuple[int, ...]:
        """The columns' full blocks, for a prefix that it reaches."""
        first = self.columns(num_tokens).start
        return (NULL_BLOCK_ID,) * first + tuple(self.blocks[first : num_tokens // self.size])


class PrefixCache:
    """Finds and publishes blocks in a pool.

    Only full blocks are published whose tokens are all known: neither drafts nor the placeholders of asynchronous
    scheduling. That happens when the step that fills them is scheduled, since it writes them before anyone attends to
    them; a request that is admitted to the same step may share them.

    A copy of a recurrent state is known by the digest of all tokens before it, and published when it is made: where a
    step ends is not known before.

    A draft network's layers lie in the same blocks. Theirs at a block's last token may depend on the token behind it,
    which may be another where the block is shared: that can cost a request a draft, but changes none of its tokens.
    """

    def __init__(self, pool: BlockPool, layout: KVLayout) -> None:
        self._pool = pool
        self._groups = tuple((group.spec.block_size, group.spec.sliding_window) for group in layout.groups)
        self._finest = math.gcd(*layout.block_sizes)  # no block of any group ends between multiples of it
        self._common = math.lcm(*layout.block_sizes)
        self._num_state_blocks, self._state_interval = layout.state_blocks, layout.state_interval
        self._new: set[int] = set()  # blocks that the step being planned fills: nothing is in them before it runs

    def start_step(self) -> None:
        """Whatever is published from now on is written by the step after all those before."""
        self._new.clear()

    def hits(self, request: ScheduledRequest) -> list[Hit]:
        """What the cache has of the request's known tokens, the longest first; at least the last token is left over.

        All groups have to reach a prefix, so it is a multiple of their block sizes; a group with a sliding window needs
        the blocks of the last window only. When that is all of the request, the last block of each group may be
        copied, for the request to write its last token again; but a copy is made before the step runs, so it cannot be
        of a block that this very step fills. Then, or when there is no block to spare for the copy, the last blocks are
        computed anew: the second hit.

        With recurrent layers a prefix ends where a copy of their state was made. That is held for a step, so where
        blocks are short, nothing at all is found: the second hit.
        """
        chains = [self._chain(request, group) for group in range(len(self._groups))]
        if self._num_state_blocks:
            return self._hits_with_state(request, chains)
        most = len(request.token_ids) - 1
        shorter = self._hit(chains, self._longest(chains, most - most % self._common))
        last = [chain.blocks[most // chain.size] for chain in chains if most // chain.size < len(chain.blocks)]
        if (
            (most + 1) % self._common
            or self._common == 1
            or len(last) < len(chains)
            or NULL_BLOCK_ID in last
            or self._new.intersection(last)
            or not all(chain.reaches(most) for chain in chains)
        ):
            return [shorter]
        return [attrs.evolve(self._hit(chains, most), copied=tuple(last)), shorter]

    def _chain(self, request: ScheduledRequest, group: int) -> _Chain:
        size, window = self._groups[group]
        digests = _digests(request, size)
        chain, start = _Chain(size=size, window=window, blocks=[], starts=[]), 0
        for index in range(len(request.token_ids) // size):
            block = self._pool.find((group, digests.get(index, request.token_ids)))
            if block is None:
                if window is None:
                    break
                block, start = NULL_BLOCK_ID, index + 1
            chain.blocks.append(block)
            chain.starts.append(start)
        return chain

    def _longest(self, chains: Sequence[_Chain], most: int) -> int:
        """The longest prefix that all groups reach, of at most `most` tokens, a multiple of their block sizes."""
        whole = min(len(chain.blocks) * chain.size for chain in chains)
        lengths = range(min(most, whole - whole % self._common), 0, -self._common)
        return next((length for length in lengths if all(chain.reaches(length) for chain in chains)), 0)

    @staticmethod
    def _hit(chains: Sequence[_Chain], num_tokens: int) -> Hit:
        return Hit(num_tokens=num_tokens, shared=tuple(chain.shared(num_tokens) for chain in chains))

    def publish(self, request: ScheduledRequest) -> None:
        """Publish the blocks that are full with what is scheduled by now."""
        num_tokens, published = min(len(request.token_ids), request.num_computed), request.num_published
        if num_tokens // self._finest <= published // self._finest:
            return
        request.num_published = num_tokens
        for group, (size, _) in enumerate(self._groups):
            for index in range(published // size, num_tokens // size):
                block = request.block_ids[group][index]
                digest = _digests(request, size).get(index, request.token_ids)
                if self._pool.publish(block, (group, digest)):
                    self._new.add(block)

    # Copies of recurrent states

    def _hits_with_state(self, request: ScheduledRequest, chains: Sequence[_Chain]) -> list[Hit]:
        most = len(request.token_ids) - 1
        nothing = self._hit(chains, 0)
        for length in range(most - most % self._state_interval, 0, -self._state_interval):
            if all(chain.reaches(length) for chain in chains) and (state := self.find_state(request, length)):
                return [attrs.evolve(self._hit(chains, length), state=state), nothing]
        return [nothing]

    def find_state(self, request: ScheduledRequest, num_tokens: int) -> tuple[int, ...]:
        """The blocks with a copy of the state behind so many of the request's known tokens; () when there is none."""
        blocks = [self._pool.find(key) for key in self._state_keys(request, num_tokens)]
        found = tuple(block for block in blocks if block is not None)
        return found if len(found) == len(blocks) else ()

    def publish_state(self, request: ScheduledRequest, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Publish held blocks with a copy of the state behind so many known tokens."""
        for block, key in zip(block_ids, self._state_keys(request, num_tokens), strict=True):
            self._pool.publish(block, key)

    def _state_keys(self, request: ScheduledRequest, num_tokens: int) -> list[BlockKey]:
        """Numbers below 0 stand for no group."""
        interval = self._state_interval
        digest = _digests(request, interval).get(num_tokens // interval - 1, request.token_ids)
        return [(~number, digest) for number in range(self._num_state_blocks)]
