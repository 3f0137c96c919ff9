"""From logits to tokens, and from tokens to drafts."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables
    from workerkit.framework.interfaces.request import GrammarOutput, NewRequest


@attrs.frozen(kw_only=True, eq=False)
class SamplingContext:
    """What a sampler stage may look at, for N logits rows."""

    slots: torch.Tensor  # [N] int64, stable slot of each logits row
    positions: torch.Tensor  # [N] int64, position of the token that produced the row
    host_slots: np.ndarray  # [num_reqs] int64, slots of the batch on the host: to see without a sync who needs a stage


@attrs.frozen(kw_only=True, eq=False)
class SamplerOutput:
    """Tokens of a batch; K = 0 without drafts."""

    token_ids: torch.Tensor  # [num_reqs, K + 1] int64; columns past num_sampled are undefined
    num_sampled: torch.Tensor  # [num_reqs] int32; 0 for partial prefills
    num_rejected: torch.Tensor  # [num_reqs] int32, drafts that were not accepted


class SlotPart(abc.ABC):  # noqa: B024  both methods have a default: most parts keep nothing for a request
    """A part with state per request. Both are called on the device's stream; the defaults keep nothing."""

    def add(self, slot: int, request: NewRequest) -> None:  # noqa: B027
        """A request takes the slot; whatever was there before is overwritten."""

    def clear(self, slot: int) -> None:  # noqa: B027
        """The slot's request is gone."""


class SamplerStage(SlotPart):
    """One step of logits processing."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """float32 [N, V] -> [N, V]; may work in place. A row whose request does not use the stage is left as it is."""


class Sampler(SlotPart):
    """Stages in order, then one token a row, which depends on the row's logits, the request's seed and the position."""

    @abc.abstractmethod
    def process(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Raw logits [num_logits, V] float32 -> processed; greedy rows keep their argmax."""

    @abc.abstractmethod
    def draw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Processed logits -> [num_logits] int64."""


class RejectionSampler(SlotPart):
    """Verifies drafts. Version 0."""

    @abc.abstractmethod
    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        """Processed logits [num_logits, V] of a batch with drafts -> accepted tokens and one more for each row."""


class Grammar(SlotPart):
    """Structured outputs. Version 0."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput) -> torch.Tensor:
        """Bit 0 -> -inf on the raw logits; rows without a grammar stay as they are."""


class VerifyBudget(abc.ABC):
    """How many drafts of each request are worth verifying. Version 0."""

    @abc.abstractmethod
    def trim(self, drafts: torch.Tensor) -> torch.Tensor:
        """[num_reqs, K] -> the same with the tail of some rows replaced by -1."""


@attrs.frozen(kw_only=True, eq=False)
class DraftWeights:
    """Stage value: a draft's network layers, as far as the KV cache must know them."""

    attention_layers: tuple[AttentionLayer, ...] = ()


class DraftModel(abc.ABC):
    """Weights and KV needs of a draft. Version 0."""

    @abc.abstractmethod
    def load(self) -> DraftWeights:
        """After the target is loaded."""


@attrs.frozen(kw_only=True, eq=False)
class DraftInputs:
    """All that a proposer may need, after the step's tokens are known."""

    batch: InputBatch
    tables: BatchTables
    hidden: torch.Tensor  # [num_tokens_padded, H], the target's, after its final norm
    taps: Mapping[str, torch.Tensor]
    sampled: SamplerOutput
    last_sampled: torch.Tensor  # [num_reqs] int64: newest committed token of each row


class Speculator(SlotPart):
    """Proposes drafts. Version 0."""

    @property
    @abc.abstractmethod
    def num_speculative_tokens(self) -> int:
        """K; 0 switches speculation off."""

    @property
    def taps(self) -> Sequence[str]:
        """Tap points of the target that `propose` reads."""
        return ()

    @abc.abstractmethod
    def propose(self, inputs: DraftInputs) -> torch.Tensor:
        """[num_reqs, K] int64, -1 = no draft from here on."""
