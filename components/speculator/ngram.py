"""Drafts from the request's own text: what followed the last few tokens when they stood there before.

The text is kept by slot on the device, so a step that was planned before the tokens of the one before it were known
still sees them all, and nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from attrs import validators

from workerkit.components.buffers.history import TokenHistory
from workerkit.components.buffers.upload import operand, upload
from workerkit.components.speculator.limits import num_drafts
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, Speculator


@attrs.frozen(kw_only=True)
class NgramConfig:
    """How many of the last tokens must have stood there before."""

    min_n: int = attrs.field(default=2, validator=validators.ge(1), metadata={"doc": "fewest tokens that must match"})
    max_n: int = attrs.field(default=4, validator=validators.ge(1), metadata={"doc": "most tokens that are compared"})


class NgramSpeculator(Speculator):
    """The longest match wins; of several that long, the one that stands first.

    The drafts are the K tokens behind the match, which may reach into the last tokens themselves; fewer where the text
    or the context ends.
    """

    def __init__(self, config: NgramConfig, shape: WorkerShape, context: DeviceContext) -> None:
        if config.min_n > config.max_n:
            raise UnsupportedError(f"min_n: {config.min_n} is more than max_n, {config.max_n}")
        self._config = config
        self._count = num_drafts(shape)
        self._max_len = shape.max_model_len
        self._history = TokenHistory(shape, context.device)
        # For rows, and for columns of the text: as many as there may be.
        self._numbers = torch.arange(max(shape.max_model_len, self._count, shape.max_num_reqs), device=context.device)
        self._one = torch.ones(1, dtype=torch.int8, device=context.device)

    @property
    def num_speculative_tokens(self) -> int:
        return self._count

    def add(self, slot: int, request: NewRequest) -> None:
        self._history.add(slot, request)

    def clear(self, slot: int) -> None:
        self._history.clear(slot)

    def propose(self, inputs: DraftInputs) -> Drafts:
        batch, sampled = inputs.batch, inputs.sampled
        self._history.commit(batch, sampled)
        drafts = torch.full((batch.num_reqs, self._count), -1, dtype=torch.int64, device=batch.positions.device)
        searched = np.flatnonzero(~batch.plan.is_partial)
        if len(searched):
            rows, first = upload(drafts.device, searched, batch.cu_num_logits_np[searched])
            lengths = batch.positions[batch.logits_indices[first]] + 1 + sampled.num_sampled[rows]
            width = min(int(batch.host_seq_lens.upper_bound[searched].max()) + 1, self._max_len)
            found = self._search(self._history.tokens(batch.idx_mapping[rows], width), lengths)
            drafts[rows] = torch.as_tensor(found, dtype=torch.int64)
        return Drafts(token_ids=drafts)

    def _search(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        """Texts [N, W] int32 of these lengths [N] -> drafts [N, K], -1 where there is none; as `operand` gives."""
        one, numbers = operand(self._one), operand(self._numbers)
        text, ends = operand(tokens), operand(lengths)[:, None]
        width = text.shape[1]
        every, offsets = numbers[: len(text), None], numbers[None, : self._count]
        starts = ends * 0 - 1  # where the drafts begin in the text; -1: nothing matches
        # alive[:, j]: the n tokens up to column j + n - 1 are the last n tokens of the text, which ends later.
        alive = numbers[None, :width] < ends - 1
        for n in range(1, min(self._config.max_n, width) + 1):
            last = text[every, (ends - n).clip(min=0, max=width - 1)]
            alive = alive[:, int(n > 1) :] & (text[:, : width - n + 1] == last)
            if n >= self._config.min_n:  # a longer match replaces a shorter one
                first = (alive * one).argmax(1)[:, None]  # of equal values the leftmost
                starts = starts + alive[every, first] * (first + n - starts)
        wanted = starts + offsets
        known = (starts > 0) & (wanted < ends) & (ends + offsets < self._max_len)
        return (text[every, wanted.clip(min=0, max=width - 1)] + 1) * known - 1
