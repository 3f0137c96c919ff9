"""From a draft network's logits to drafts: the likeliest token, or a seeded draw, in the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import torch
from attrs import validators

from workerkit.components.buffers.upload import operand
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.sampling import DrawKeys, RandomStream
from workerkit.framework.interfaces.speculation import Drafts


@attrs.frozen(kw_only=True)
class DrawingConfig:
    """Options of every proposer with a network."""

    draft_sampling: Literal["greedy", "probabilistic"] = attrs.field(
        default="greedy",
        validator=validators.in_(("greedy", "probabilistic")),
        metadata={
            "doc": "greedy: the draft's likeliest token. probabilistic: drawn at the request's temperature, verified "
            "against what it was drawn from"
        },
    )


@attrs.frozen(kw_only=True, eq=False)
class Drawn:
    """One draft of each row."""

    token_ids: torch.Tensor  # [R] int64, in the target's vocabulary
    logits: torch.Tensor | None  # [R, V] float32: what they were drawn from
    confidence: torch.Tensor  # [R] float32: their probability under the draft


class DraftDraws:
    """Draws drafts one position at a time, and puts them together."""

    def __init__(
        self, config: DrawingConfig, kernels: Kernels, vocab_size: int, target_ids: torch.Tensor | None
    ) -> None:
        self._kernels = kernels
        self._probabilistic = config.draft_sampling == "probabilistic"
        self._vocab_size = vocab_size
        self._target_ids = target_ids

    def draw(self, logits: torch.Tensor, keys: DrawKeys, newest: torch.Tensor, number: int) -> Drawn:
        """Draft number 0, 1, … of each row from logits [R, Vd] float32; newest [R] int64: where its last token is."""
        # numpy's argmax is twenty times as fast as torch's on a CPU
        tokens = torch.as_tensor(operand(logits).argmax(-1))
        if not self._probabilistic:
            confidence = logits.softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
            return Drawn(token_ids=self._of_target(tokens), logits=None, confidence=confidence)
        is_greedy = keys.temperatures == 0
        logits = logits / torch.where(is_greedy, 1.0, keys.temperatures)[:, None]
        probs = logits.softmax(dim=-1)
        uniform = self._kernels.uniform_from_seed(keys.seeds, newest + (number << 32), RandomStream.DRAFTING)
        tokens = torch.where(is_greedy, tokens, self._kernels.sample_from_probs(probs, uniform))
        confidence = probs.gather(1, tokens[:, None])[:, 0]
        if self._target_ids is not None:
            everywhere = logits.new_full((len(logits), self._vocab_size), -torch.inf)
            logits = everywhere.index_copy_(1, self._target_ids, logits)
        return Drawn(token_ids=self._of_target(tokens), logits=logits, confidence=confidence)

    def _of_target(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._target_ids is None else self._target_ids[tokens]


def together(drawn: Sequence[Drawn], first_positions: torch.Tensor, max_model_len: int) -> Drafts:
    """Drafts that stand at first_positions [R] int64 and behind; nothing is at max_model_len and beyond (B55)."""
    token_ids = torch.stack([draft.token_ids for draft in drawn], dim=1)
    confidence = torch.stack([draft.confidence for draft in drawn], dim=1)
    logits = [draft.logits for draft in drawn if draft.logits is not None]
    positions = first_positions[:, None] + torch.arange(len(drawn), device=first_positions.device)
    return Drafts(
        token_ids=token_ids.masked_fill_(positions >= max_model_len, -1),
        logits=torch.stack(logits, dim=1) if logits else None,
        confidence=confidence,
    )
