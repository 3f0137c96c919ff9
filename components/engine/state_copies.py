"""Copies of recurrent states: at which lengths they are kept, in which blocks, and when others may find them.

The state behind a prefix cannot be told from its keys and values, so a request of a model with recurrent layers goes on
from a prefix only where a copy was made: at multiples of KVLayout.state_interval tokens. A copy is welcome, never
necessary: nobody is preempted for one, and where no blocks are free, none is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from workerkit.components.engine.block_pool import BlockPool
from workerkit.components.engine.plan import Row, ScheduledRequest
from workerkit.components.engine.prefix_cache import PrefixCache
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import StateSave


class StateCopies:
    """For a layout with state blocks, while prefixes are cached."""

    def __init__(self, pool: BlockPool, prefixes: PrefixCache, layout: KVLayout) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._num_blocks, self._interval = layout.state_blocks, layout.state_interval
        self.num_in_flight = 0  # copies whose blocks are held, because nobody knows yet what came of them

    def cut(self, row: Row) -> None:
        """Let a row of a prefill end where a copy can be made, if it passes such a place. `row` is not committed."""
        request = row.request
        start, end = request.num_computed, request.num_computed + row.num_tokens
        num_tokens = end - end % self._interval
        if start < request.prefill_len and start < num_tokens < end and self._is_wanted(request, num_tokens):
            row.num_tokens, row.max_sampled = num_tokens - start, 0

    def save(self, rows: Sequence[Row]) -> tuple[StateSave, ...]:
        """Take blocks for a copy behind each row that may end at, or with drafts pass, a multiple of the interval."""
        for row in rows:
            num_tokens = self._target(row)
            if num_tokens <= row.request.num_computed and self._is_wanted(row.request, num_tokens):
                block_ids = tuple(self._pool.allocate(self._num_blocks))
                row.save = StateSave(req_id=row.request.req_id, num_tokens=num_tokens, block_ids=block_ids)
                self.num_in_flight += 1
        return tuple(row.save for row in rows if row.save is not None)

    def _target(self, row: Row) -> int:
        """The first multiple of the interval that the row may reach; of a row with drafts, the worker keeps the state
        behind each token, of others the one behind the last."""
        request = row.request
        # With asynchronous scheduling a decode before this one may be in flight: its drafts may all be rejected.
        uncertain = max(0, request.num_pending - row.max_sampled - 1)
        first = request.num_computed - row.num_tokens - uncertain + (1 if row.num_drafts else row.num_tokens)
        return -(-first // self._interval) * self._interval

    def _is_wanted(self, request: ScheduledRequest, num_tokens: int) -> bool:
        """Whether there is room for a copy, and use."""
        if not request.may_publish or self._pool.num_free < self._num_blocks:
            return False
        return num_tokens > len(request.token_ids) or not self._prefixes.find_state(request, num_tokens)

    def settle(self, row: Row, num_computed: int) -> None:
        """The answer of the row's step is here, which computed so many tokens behind the confirmed ones. If a copy was
        made, and is of known tokens, it stays for others to find."""
        if row.save is None:
            return
        request, save = row.request, row.save
        was_made = 0 < save.num_tokens - request.num_confirmed <= num_computed
        is_known = save.num_tokens <= len(request.token_ids)  # a request may end before the last token that it computed
        if was_made and is_known and request.may_publish and not request.finished:
            self._prefixes.publish_state(request, save.num_tokens, save.block_ids)
        self._pool.free(save.block_ids)
        self.num_in_flight -= 1
