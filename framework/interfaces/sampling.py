"""From logits to tokens, and from tokens to drafts."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.request import GrammarOutput, NewRequest
    from workerkit.framework.interfaces.sampling_params import SamplingParams


class RandomStream(enum.IntEnum):
    """What a random number is for: `stream` of `uniform_from_seed`. Numbers of different streams are independent.

    A number is keyed by the position of the token that the drawn one, or the judged one, follows. But draft i = 0, 1 …
    behind a request's newest token at position n, and its acceptance in a block, have the key n + (i << 32): a block's
    fate depends on all its drafts, and the next step drafts some of the same positions again.
    """

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


@attrs.frozen(kw_only=True, eq=False)
class DrawKeys:
    """What draws for the rows of a batch depend on, besides logits, position and RandomStream."""

    seeds: torch.Tensor  # [num_reqs] int64
    temperatures: torch.Tensor  # [num_reqs] float32; 0: greedy


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


class SlotPart(abc.ABC):  # noqa: B024  all methods have a default: most parts keep nothing for a request
    """A part with state per request. `add` and `clear` are called on the device's stream; the defaults keep nothing."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """Keys of a request's `extra_args` that it reads. A request with keys that no part reads is refused."""

    reads_host_tokens: ClassVar[bool] = False
    """It reads sampled tokens on the host, so the stream waits for them; refused with asynchronous scheduling."""

    def check(self, params: SamplingParams) -> None:  # noqa: B027
        """Raises RequestError for parameters that it cannot serve. Called on the host, before a request is admitted."""

    def add(self, slot: int, request: NewRequest) -> None:  # noqa: B027
        """A request takes the slot; whatever was there before is overwritten."""

    def clear(self, slot: int) -> None:  # noqa: B027
        """The slot's request is gone."""


class SamplerStage(SlotPart):
    """One step of logits processing, for the requests that use it."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """What it reads of a request: fields of SamplingParams, and keys of `extra_args`. A sampler refuses a request with
    parameters that none of its stages reads; what a stage cannot serve, it says in `applies_to`."""

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

    @abc.abstractmethod
    def process(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Raw logits [num_logits, V] float32 -> processed; greedy rows keep their argmax."""

    @abc.abstractmethod
    def draw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Processed logits -> [num_logits] int64; -1 in a row whose largest logit is not finite.

        Greedy: the most likely token; of several, the one with the lowest id.
        """

    @abc.abstractmethod
    def keys(self, batch: InputBatch) -> DrawKeys:
        """Seeds and temperatures of the batch's requests."""

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


class Grammar(SlotPart):
    """The worker's half of structured outputs: the engine sends bitmasks, this applies them."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput | None) -> torch.Tensor:
        """Bit 0 -> -inf on the raw logits [num_logits, V]; rows of requests without a grammar stay as they are.

        Called in every step. A structured request for which no mask came, and whose prefill ends in this step, gets
        -inf everywhere: it fails instead of being decoded freely. Masks of requests that are not in the batch are let
        be.
        """
