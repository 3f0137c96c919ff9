"""Speculation: who proposes drafts, who verifies them, and how many are worth verifying."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from workerkit.framework.interfaces.sampling import SlotPart

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.draft import DraftNetwork
    from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables
    from workerkit.framework.interfaces.sampling import DrawKeys, Sampler, SamplerOutput


@attrs.frozen(kw_only=True, eq=False)
class DraftWeights:
    """Stage value: a draft's network, and its layers as the KV cache must know them."""

    network: DraftNetwork | None = None  # None: the proposer has no weights
    attention_layers: tuple[AttentionLayer, ...] = ()  # the network's, with indices behind the target's layers


class DraftModel(abc.ABC):
    """Weights and KV needs of a draft."""

    @abc.abstractmethod
    def load(self) -> DraftWeights:
        """After the target is loaded. Raises ModelError or WeightError, naming the draft's files."""

    def reload_weights(self, draft: DraftWeights) -> None:  # noqa: B027  most have none
        """Fill an existing network again (after sleep level 2)."""


@attrs.frozen(kw_only=True, eq=False)
class DraftInputs:
    """All that a proposer may need, after the step's tokens are known. Views, valid until the next step.

    Of a row's scheduled tokens the last `num_rejected` are drafts that were not accepted; what is before them is valid.
    """

    batch: InputBatch  # the target's: tokens, positions, rows
    tables: BatchTables  # blocks reach at least K + 1 positions beyond the batch, up to max_model_len
    hidden: torch.Tensor  # [num_tokens_padded, H], the target's, after its final norm
    taps: Mapping[str, torch.Tensor]  # tap point -> [num_tokens_padded, H]
    sampled: SamplerOutput
    # What follows each row's last valid token: the newest sampled one, or the next of a prompt whose prefill goes on.
    next_tokens: torch.Tensor  # [num_reqs] int64
    keys: DrawKeys


@attrs.frozen(kw_only=True, eq=False)
class Drafts:
    """What a proposer proposes. Rows whose prefill goes on are not looked at."""

    token_ids: torch.Tensor  # [num_reqs, K] int64, in the target's vocabulary; -1: no draft from here on
    # The drafts were drawn from the softmax of this; None: there was no choice.
    logits: torch.Tensor | None = None  # [num_reqs, K, V] float32
    # On the host: of which rows `logits` tells; of the others there was no choice. None: of all.
    drawn: np.ndarray | None = None  # [num_reqs] bool
    # How likely a draft is accepted, given that those before it are.
    confidence: torch.Tensor | None = None  # [num_reqs, K] float32 in 0..1


class Speculator(SlotPart):
    """Proposes drafts. K is `WorkerShape.num_speculative_tokens`."""

    @property
    @abc.abstractmethod
    def num_speculative_tokens(self) -> int:
        """At most K; 0 switches speculation off."""

    @property
    def taps(self) -> Sequence[str]:
        """Tap points of the target that `propose` reads."""
        return ()

    @abc.abstractmethod
    def propose(self, inputs: DraftInputs) -> Drafts:
        """Called in every step, on the device's stream, after the step's tokens are committed.

        A step whose rows are all partial prefills is one too: a draft network has to see every token of the prompt.
        """


class RejectionSampler(SlotPart):
    """Verifies drafts. The tokens that come out are distributed as the target's own: speculation changes no output."""

    def remember(self, batch: InputBatch, drafts: Drafts) -> None:
        """Keep by slot what `verify` will need of these drafts' distributions, in a later step."""

    @abc.abstractmethod
    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        """Processed logits [num_logits, V] of a batch with drafts -> accepted tokens and one more for each row.

        Each logits row judges the draft that `batch.draft_ids` names, -1 being none. A token of -1 (no token is
        possible there) ends what the row yields.
        """


class VerifyBudget(abc.ABC):
    """How many drafts of each request are worth verifying."""

    def calibrate(self, seconds: Callable[[int, int], float]) -> None:  # noqa: B027  most need no measurement
        """Once, when the worker warms up: `seconds(num_tokens, num_reqs)` runs a made-up step and measures it."""

    @abc.abstractmethod
    def trim(self, drafts: Drafts, batch: InputBatch) -> Drafts:
        """The same with the tail of some rows replaced by -1. On the device's stream."""
