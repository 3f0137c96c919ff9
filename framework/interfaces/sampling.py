"""From logits to tokens, and from tokens to drafts."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables
    from workerkit.framework.interfaces.request import GrammarOutput, NewRequest
    from workerkit.framework.interfaces.sampling_params import SamplingParams


class RandomStream(enum.IntEnum):
    """What a random number is for: `stream` of `uniform_from_seed`. Numbers of different streams are independent."""

    SAMPLING = 0
    ACCEPTANCE = 1  # whether a draft is accepted
    RESIDUAL = 2  # the token in place of a draft that was not
    BONUS = 3  # the token after drafts that all were
    DRAFTING = 4


@attrs.frozen(kw_only=True, eq=False)
class SamplingContext:
    """What a sampler stage may look at, for the N logits rows that it is shown: those of requests that use it."""

    slots: torch.Tensor  # [N] int64, stable slot of each row's request
    positions: torch.Tensor  # [N] int64, of the token that produced the row; the row predicts the one at position + 1
    prompt_lens: torch.Tensor  # [N] int64
    host_slots: np.ndarray  # [N] int64, the slots on the host
    text: Callable[[], torch.Tensor]  # -> [N, W] int64: what the row continues, prompt, output and the drafts before
    # it, in columns 0 to its position; -1 behind. Only for stages with `reads_text`.


@attrs.frozen(kw_only=True, eq=False)
class SamplerOutput:
    """Tokens of a batch; K = 0 without drafts."""

    token_ids: torch.Tensor  # [num_reqs, K + 1] int64; columns past num_sampled are undefined; -1: none was possible
    num_sampled: torch.Tensor  # [num_reqs] int32; 0 for partial prefills
    num_rejected: torch.Tensor  # [num_reqs] int32, drafts that were not accepted


@attrs.frozen(kw_only=True)
class LogprobsSpan:
    """Where one request's positions lie in LogprobsTensors."""

    req_id: str
    start: int  # first row
    count: int  # rows; of sampled tokens the first num_sampled count
    num_top: int
    num_chosen: int


@attrs.frozen(kw_only=True, eq=False)
class LogprobsTensors:
    """Log-probabilities at M positions, on the device. Columns: the token itself, then the `top` most likely ones in
    descending order, then chosen ones; a request uses the first of each kind."""

    token_ids: torch.Tensor  # [M, 1 + top + chosen] int64
    logprobs: torch.Tensor  # likewise, float32
    ranks: torch.Tensor  # [M] int64, of the token itself: 1 + how many tokens are more likely
    top: int
    spans: tuple[LogprobsSpan, ...]


class SlotPart(abc.ABC):  # noqa: B024  both methods have a default: most parts keep nothing for a request
    """A part with state per request. Both are called on the device's stream; the defaults keep nothing."""

    reads_host_tokens: ClassVar[bool] = False
    """It reads sampled tokens on the host, so the stream waits for them; refused with asynchronous scheduling."""

    def add(self, slot: int, request: NewRequest) -> None:  # noqa: B027
        """A request takes the slot; whatever was there before is overwritten."""

    def clear(self, slot: int) -> None:  # noqa: B027
        """The slot's request is gone."""


class SamplerStage(SlotPart):
    """One step of logits processing, for the requests that use it."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """What it reads of a request: fields of SamplingParams, and keys of `extra_args`. A sampler refuses a request with
    parameters that none of its stages reads."""

    reads_text: ClassVar[bool] = False
    """It asks for `SamplingContext.text`."""

    @abc.abstractmethod
    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a request uses the stage. Defaults of the sampler are filled in: its parameters are never None.

        Only then are `add` and `clear` called for the request, and its rows shown to `apply`. Raises RequestError for
        parameters that it cannot serve.
        """

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """float32 [N, V] -> [N, V]; may work in place. A row's result depends on nothing but that row's request."""


class Sampler(SlotPart):
    """Stages in order, then one token a row, which depends on the row's logits, the request's seed and the position.

    A step calls `raw`, `process`, `draw` (or a rejection sampler's `verify`), `logprobs`, `prompt_logprobs`, `commit`.
    """

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for parameters that it cannot serve. Called on the host, before a request is admitted."""

    @abc.abstractmethod
    def process(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Raw logits [num_logits, V] float32 -> processed; greedy rows keep their argmax."""

    @abc.abstractmethod
    def draw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Processed logits -> [num_logits] int64; -1 in a row whose largest logit is not finite.

        Greedy: the most likely token; of several, the one with the lowest id.
        """

    def raw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor | None:
        """What `logprobs` will need of the logits before anything changes them, or None."""
        return None

    def logprobs(
        self, raw: torch.Tensor | None, logits: torch.Tensor, batch: InputBatch, sampled: SamplerOutput
    ) -> LogprobsTensors | None:
        """Of the sampled tokens, for requests that asked for them; None when there is none. `logits` are processed."""
        return None

    def prompt_logprobs(
        self, hidden: torch.Tensor, batch: InputBatch, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> LogprobsTensors | None:
        """Of the prompt tokens that follow tokens of this step (the last one's successor is sampled and not among
        them); hidden is [num_tokens_padded, H]."""
        return None

    def commit(self, batch: InputBatch, sampled: SamplerOutput) -> None:
        """The step's tokens are final."""


class RejectionSampler(SlotPart):
    """Verifies drafts. Version 0."""

    @abc.abstractmethod
    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        """Processed logits [num_logits, V] of a batch with drafts -> accepted tokens and one more for each row."""


class Grammar(SlotPart):
    """The worker's half of structured outputs: the engine sends bitmasks, this applies them."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput | None) -> torch.Tensor:
        """Bit 0 -> -inf on the raw logits [num_logits, V]; rows of requests without a grammar stay as they are.

        Called in every step. A structured request for which no mask came, and whose prefill ends in this step, gets
        -inf everywhere: it fails instead of being decoded freely. Masks of requests that are not in the batch are let
        be.
        """


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
