"""Proposers whose draft network goes on token by token: a first pass over what the target saw, then one token a pass.

The first pass covers the target's whole batch, rows whose prefill goes on included, so that the draft's keys and values
exist for every valid token. Rejected drafts are in it as padding: nothing is erased, the next first pass overwrites
them. Shapes follow from the target's batch alone, and the host never waits for a token.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs
import torch

from workerkit.components.speculator.drawing import DraftDraws, DrawingConfig, together
from workerkit.components.speculator.limits import num_drafts
from workerkit.components.speculator.passes import Passes
from workerkit.components.speculator.rows import draft_attend, last_valid
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, DraftWeights, Speculator


@attrs.frozen(kw_only=True, eq=False)
class Prediction:
    """What a pass says of the token that comes next in each row."""

    logits: torch.Tensor  # [R, Vd] float32
    state: torch.Tensor | None = None  # [R, H]: what the next pass wants to know of this one, besides the token


class AutoregressiveSpeculator(Speculator):
    """The loop; a subclass says what a pass is."""

    lag: ClassVar[int]
    """How many positions before the token that it reads a query stands."""

    def __init__(
        self,
        config: DrawingConfig,
        shape: WorkerShape,
        draft: DraftWeights,
        caches: KVCaches,
        attention: AttentionBackend,
        kernels: Kernels,
        target_ids: torch.Tensor | None,
    ) -> None:
        self._num_drafts = num_drafts(shape)
        self._draft = draft
        self._caches = caches
        self._attention = attention
        self._draws = DraftDraws(config, kernels, shape.vocab_size, target_ids)
        device = caches.keys[0].device
        self._passes = Passes(shape, self._num_drafts - 1, caches.layout.kernel_block_size, device)
        self.max_model_len = shape.max_model_len
        self.block_size = caches.layout.kernel_block_size

    @property
    def num_speculative_tokens(self) -> int:
        return self._num_drafts

    @abc.abstractmethod
    def first_pass(self, inputs: DraftInputs, last: torch.Tensor) -> Prediction:
        """Over the target's tokens; last [num_reqs] int64 are the last valid ones."""

    @abc.abstractmethod
    def next_pass(
        self, tokens: torch.Tensor, state: torch.Tensor | None, rows: InputBatch, attend: Attend
    ) -> Prediction:
        """Over one more token [R] int64 in each row; `rows` has one query each."""

    def attend(self, batch: InputBatch, tables: BatchTables) -> Attend:
        """For the draft's own layers."""
        return draft_attend(self._attention.build(batch, tables, self._caches, {}), self._draft)

    def propose(self, inputs: DraftInputs) -> Drafts:
        batch = inputs.batch
        last = last_valid(batch, inputs.sampled)
        prediction = self.first_pass(inputs, last)
        if batch.plan.is_partial.all():  # its keys and values are there now, and nobody looks at drafts
            return Drafts(token_ids=last.new_full((batch.num_reqs, self._num_drafts), -1))
        newest = batch.positions[last] + 1  # where the newest token stands
        drawn = [self._draws.draw(prediction.logits, inputs.keys, newest, 0)]
        goes_on = inputs.sampled.num_sampled > 0  # other rows must not write where their prefill has not come yet
        passes = self._passes.build(batch, inputs.tables, newest - self.lag, goes_on, 1 - self.lag)
        for number, (rows, tables) in enumerate(passes, start=1):
            attend = self.attend(rows, tables)
            prediction = self.next_pass(drawn[-1].token_ids, prediction.state, rows, attend)
            drawn.append(self._draws.draw(prediction.logits, inputs.keys, newest, number))
        return together(drawn, newest + 1, self.max_model_len)
