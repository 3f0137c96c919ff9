"""Suffix decoding: drafts from a tree of the request's own text, and from one of the outputs of earlier requests.

Trees are on the host, so each step waits for its tokens, and together with asynchronous scheduling it is refused.

The outputs of a request are seen by other requests in one way only: drafts, which are verified, so they change no
token; but a draft that fits makes a step shorter, and who can measure that may guess at what others were told. Where
users must not learn of each other, `global_tree: false`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs
import torch
from attrs import validators

from workerkit.components.speculator.limits import num_drafts
from workerkit.components.speculator.suffix_tree import Cursor, SuffixTree
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, Speculator

_TRIED = 16  # matches that went on differently, longest first: only a text of very few different tokens has more


@attrs.frozen(kw_only=True)
class SuffixConfig:
    """How much is drafted behind a match, and what is remembered."""

    max_depth: int = attrs.field(default=64, validator=validators.ge(1), metadata={"doc": "longest match, in tokens"})
    max_spec_factor: float = attrs.field(
        default=1.0, validator=validators.ge(0), metadata={"doc": "drafts for each token of the match"}
    )
    spec_offset: float = attrs.field(default=0.0, metadata={"doc": "drafts on top of those"})
    min_token_prob: float = attrs.field(
        default=0.1,
        validator=validators.and_(validators.ge(0), validators.le(1)),
        metadata={"doc": "how often a match must have gone on like this for a draft to be made"},
    )
    global_tree: bool = attrs.field(
        default=True, metadata={"doc": "draft from the outputs of other requests; false keeps requests apart"}
    )
    max_cached_requests: int = attrs.field(
        default=1000, validator=validators.ge(2), metadata={"doc": "whose outputs are kept at most, the newest"}
    )


class PastOutputs:
    """Outputs of at most so many requests, in two trees: the older one is dropped when the younger has half of all."""

    def __init__(self, depth: int, max_requests: int) -> None:
        self._depth = depth
        self._half = max_requests // 2
        self.num_added = 0
        self.trees = [SuffixTree(depth)]

    def add(self, output: Sequence[int]) -> None:
        """The output of a request that has left."""
        if self.num_added and self.num_added % self._half == 0:
            self.trees = [self.trees[-1], SuffixTree(self._depth)]
        self.num_added += 1
        self.trees[-1].start()
        self.trees[-1].extend(output)


class _Text:
    """A request's text, its tree, and where it stands in the trees of others."""

    def __init__(self, tokens: Sequence[int], depth: int) -> None:
        self.tokens = list(tokens)
        self.num_given = len(tokens)  # what is behind was generated since
        self.tree = SuffixTree(depth)
        self.tree.extend(tokens)
        self._elsewhere: list[Cursor] = []
        self._num_seen = 0  # outputs of others when the cursors were made

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.tree.append(token)
        for cursor in self._elsewhere:
            cursor.feed(token)

    def cursors(self, past: PastOutputs | None) -> Iterator[Cursor]:
        """Its end in its own tree, then in those of others."""
        yield self.tree.end
        if past is not None and past.num_added != self._num_seen:
            self._num_seen = past.num_added
            self._elsewhere = [Cursor(tree, tree.depth) for tree in past.trees]
            for token in self.tokens[-self.tree.depth :]:
                for cursor in self._elsewhere:
                    cursor.feed(token)
        yield from self._elsewhere


class SuffixSpeculator(Speculator):
    """The continuation with the highest expected number of accepted tokens wins; of equal ones that of the longest
    match, and the request's own text before others'."""

    reads_host_tokens: ClassVar[bool] = True

    def __init__(self, config: SuffixConfig, shape: WorkerShape, hooks: StepHooks) -> None:
        self._config = config
        self._count = num_drafts(shape)
        self._max_len = shape.max_model_len
        self._hooks = hooks
        self._texts: dict[int, _Text] = {}  # by slot
        self._depth = config.max_depth + self._count  # a match and what is drafted behind it
        self._past = PastOutputs(self._depth, config.max_cached_requests) if config.global_tree else None

    @property
    def num_speculative_tokens(self) -> int:
        return self._count

    def add(self, slot: int, request: NewRequest) -> None:
        self.clear(slot)
        self._texts[slot] = _Text(request.token_ids, self._depth)

    def clear(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is not None and self._past is not None and len(text.tokens) > text.num_given:
            self._past.add(text.tokens[text.num_given :])

    def propose(self, inputs: DraftInputs) -> Drafts:
        batch, sampled = inputs.batch, inputs.sampled
        counts, tokens = sampled.num_sampled.tolist(), sampled.token_ids.tolist()
        self._hooks.host_tokens_read(part=type(self).__name__)
        rows = []
        for slot, row, count in zip(batch.plan.slots.tolist(), tokens, counts, strict=True):
            found: list[int] = []
            if count:
                text = self._texts[slot]
                for token in row[:count]:
                    if token >= 0:  # -1: the request has failed
                        text.append(token)
                found = self._best(text)
            rows.append(found + [-1] * (self._count - len(found)))
        return Drafts(token_ids=torch.tensor(rows, device=sampled.token_ids.device))

    def _best(self, text: _Text) -> list[int]:
        room = min(self._count, self._max_len - len(text.tokens))
        drafts: list[int] = []
        best = 0.0
        for cursor in text.cursors(self._past):
            tokens, score = self._continuation(cursor, room)
            if score > best:
                drafts, best = tokens, score
        return drafts

    def _continuation(self, cursor: Cursor, room: int) -> tuple[list[int], float]:
        """The best continuation of a suffix of the text in one tree."""
        config, tree = self._config, cursor.tree
        drafts: list[int] = []
        best = 0.0
        for node, length in itertools.islice(cursor.suffixes(), _TRIED):
            if tree.lengths[tree.links[node]] >= config.max_depth:
                continue
            matched = min(length, config.max_depth)
            budget = min(room, math.floor(matched * config.max_spec_factor + config.spec_offset))
            if budget <= best:  # no shorter match can win
                break
            tokens, score = tree.continuation(node, budget, config.min_token_prob)
            if score > best:
                drafts, best = tokens, score
        return drafts, best
