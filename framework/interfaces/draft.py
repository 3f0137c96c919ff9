"""Draft networks, of three kinds: what a proposer asks of them. Plain causal models are drafts too, as they are."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workerkit.framework.interfaces.model import Network

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.kv_cache import AttentionLayer
    from workerkit.framework.interfaces.model import Attend

    # (layer, key [N, num_kv_heads, D], value likewise): writes them into the cache, at slots that the caller chose
    WriteKV = Callable[["AttentionLayer", torch.Tensor, torch.Tensor], None]


class DraftHead(abc.ABC):
    """What a draft network has in common with others. `H` is its own width, `Vd` its own vocabulary.

    Networks of this kind are built by the ModelLibrary like any, from a config whose `raw` has the checkpoint's own
    fields; they know nothing of the target. What they share with it (embeddings, head) is handed to them.
    """

    @property
    @abc.abstractmethod
    def features(self) -> Sequence[str]:
        """Tap points of the target whose states, side by side, are its input; () means the final hidden state."""

    @property
    @abc.abstractmethod
    def target_ids(self) -> torch.Tensor | None:
        """[Vd] int64: the target's id of each draft id; None where they are the same."""

    @property
    @abc.abstractmethod
    def has_embeddings(self) -> bool:
        """Whether `embed` is its own; otherwise the target's is to be used."""

    @property
    @abc.abstractmethod
    def has_head(self) -> bool:
        """Whether `compute_logits` is its own; otherwise the target's is to be used."""


class HiddenDraft(DraftHead, Network):
    """EAGLE, EAGLE-3, MTP: goes on from hidden states. `forward` of Network is not served: see `step`."""

    @abc.abstractmethod
    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """The target's states [T, n * Ht] -> [T, H], what `step` takes as `hidden`. Never for its own states."""

    @abc.abstractmethod
    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rope_lens: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding of token p + 1 [T, Ht], state of position p [T, H], positions p [T] -> (state that `compute_logits`
        turns into logits of token p + 2, state to feed back as `hidden` of p + 1), both [T, H]."""


class HeadsDraft(DraftHead, Network):
    """Medusa: several heads on the target's final hidden state, no attention."""

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """How many tokens ahead it looks."""

    @abc.abstractmethod
    def head_logits(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """Final hidden state of position p [N, Ht], head k = 0, 1, … -> logits [N, Vd] of token p + 2 + k."""


class BlockDraft(DraftHead, Network):
    """DFlash, DSpark: a block of positions at once, which see each other and the context, in both directions."""

    @property
    @abc.abstractmethod
    def block_size(self) -> int:
        """B: positions of a block, the newest token's included."""

    @property
    @abc.abstractmethod
    def samples_from_anchor(self) -> bool:
        """True: position j of the block predicts the token after it, B drafts. False: it predicts its own, B - 1."""

    @abc.abstractmethod
    def write_context(
        self, features: torch.Tensor, positions: torch.Tensor, rope_lens: torch.Tensor, write: WriteKV
    ) -> None:
        """The target's states [T, n * Ht] at their positions [T]: keys and values of every layer, computed once."""

    @property
    @abc.abstractmethod
    def mask_token_id(self) -> int | None:
        """The token whose embedding a mask has, to be looked up where that of the newest token is; None: its own."""

    @abc.abstractmethod
    def block_embeds(self, embeds: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Embedding of the newest tokens [R, Ht], and of `mask_token_id` [Ht] if that is not None -> inputs of their
        blocks [R, B, H], the masks behind the token."""

    @abc.abstractmethod
    def run_block(
        self, embeds: torch.Tensor, positions: torch.Tensor, rope_lens: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[R * B, H] at their positions -> states [R * B, H] after the final norm; fewer than B for each will do.
        `attend` lets every query of a block see the context and the whole block."""

    def correct(
        self, logits: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sequential head: base logits [R, Vd] of one position, the token before it [R] (the target's ids), its state
        [R, H], what the last call returned -> corrected logits and the state for the next position."""
        return logits, None

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """State of a position [R, H] and the token before it [R] -> [R] float32 in 0..1; None without such a head."""
        return None


DraftNetwork = Network  # a plain causal model, or one of the above
