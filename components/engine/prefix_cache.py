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

from workerkit.components.engine.block_pool import BlockPool
from workerkit.components.engine.plan import ScheduledRequest
from workerkit.framework.interfaces.engine import CacheIdentity


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


@attrs.frozen(kw_only=True)
class Hit:
    """A prefix whose keys and values are in the cache."""

    num_tokens: int
    shared: tuple[tuple[int, ...], ...]  # for each group: blocks to be held as they are
    copied: tuple[int, ...] = ()  # for each group: the block after those, to be copied; () when none


class PrefixCache:
    """Finds and publishes blocks in a pool.

    Only full blocks are published whose tokens are all known: neither drafts nor the placeholders of asynchronous
    scheduling. That happens when the step that fills them is scheduled, since it writes them before anyone attends to
    them; a request that is admitted to the same step may share them.

    A draft network's layers lie in the same blocks. Theirs at a block's last token may depend on the token behind it,
    which may be another where the block is shared: that can cost a request a draft, but changes none of its tokens.
    """

    def __init__(self, pool: BlockPool, block_sizes: Sequence[int]) -> None:
        self._pool = pool
        self._block_sizes = tuple(block_sizes)
        self._finest = math.gcd(*block_sizes)  # no block of any group ends between multiples of it
        self._common = math.lcm(*block_sizes)
        self._new: set[int] = set()  # blocks that the step being planned fills: nothing is in them before it runs

    def start_step(self) -> None:
        """Whatever is published from now on is written by the step after all those before."""
        self._new.clear()

    def hits(self, request: ScheduledRequest) -> list[Hit]:
        """What the cache has of the request's known tokens, the longest first; at least the last token is left over.

        All groups have to hold a prefix, so it is a multiple of their block sizes. When that is all of the request, the
        last block of each group may be copied, for the request to write its last token again; but a copy is made
        before the step runs, so it cannot be of a block that this very step fills. Then, or when there is no block to
        spare for the copy, the last blocks are computed anew: the second hit.
        """
        num_tokens = len(request.token_ids)
        found = [self._find(request, group) for group in range(len(self._block_sizes))]
        shortest = min(len(blocks) * size for blocks, size in zip(found, self._block_sizes, strict=True))
        longest = shortest - shortest % self._common
        if longest < num_tokens:
            return [self._hit(found, longest)]
        shorter = self._hit(found, longest - self._common)
        last = [blocks[num_tokens // size - 1] for blocks, size in zip(found, self._block_sizes, strict=True)]
        return [shorter] if self._new.intersection(last) else [self._hit(found, num_tokens - 1), shorter]

    def _find(self, request: ScheduledRequest, group: int) -> list[int]:
        size = self._block_sizes[group]
        digests = self._digests(request, size)
        blocks: list[int] = []
        for index in range(len(request.token_ids) // size):
            block = self._pool.find((group, digests.get(index, request.token_ids)))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hit(self, found: Sequence[Sequence[int]], num_tokens: int) -> Hit:
        groups = list(zip(found, self._block_sizes, strict=True))
        shared = tuple(tuple(blocks[: num_tokens // size]) for blocks, size in groups)
        is_whole = num_tokens % self._common == 0
        return Hit(
            num_tokens=num_tokens,
            shared=shared,
            copied=() if is_whole else tuple(blocks[num_tokens // size] for blocks, size in groups),
        )

    @staticmethod
    def _digests(request: ScheduledRequest, size: int) -> BlockDigests:
        if size not in request.digests:
            request.digests[size] = BlockDigests(size, request.cache_identity)
        return request.digests[size]

    def publish(self, request: ScheduledRequest) -> None:
        """Publish the blocks that are full with what is scheduled by now."""
        num_tokens, published = min(len(request.token_ids), request.num_computed), request.num_published
        if num_tokens // self._finest <= published // self._finest:
            return
        request.num_published = num_tokens
        for group, size in enumerate(self._block_sizes):
            for index in range(published // size, num_tokens // size):
                block = request.block_ids[group][index]
                digest = self._digests(request, size).get(index, request.token_ids)
                if self._pool.publish(block, (group, digest)):
                    self._new.add(block)
