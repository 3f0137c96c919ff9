"""What drafts were drawn from, kept by slot from the step that proposes them to the one that verifies them."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import Drafts


class DraftProbs:
    """Probabilities [max_num_reqs, K, V] float32, allocated when the first drafts come that were drawn from some."""

    def __init__(self, shape: WorkerShape) -> None:
        self._size = (shape.max_num_reqs, shape.num_speculative_tokens, shape.vocab_size)
        self._probs: torch.Tensor | None = None
        self._known = np.zeros(shape.max_num_reqs, dtype=bool)

    def forget(self, slot: int) -> None:
        """The slot's drafts are nobody's any more."""
        self._known[slot] = False

    def remember(self, batch: InputBatch, drafts: Drafts) -> None:
        """Replaces what is known of the batch's requests."""
        self._known[batch.plan.slots] = drafts.logits is not None if drafts.drawn is None else drafts.drawn
        if drafts.logits is None:
            return
        if self._probs is None:
            self._probs = torch.zeros(self._size, device=drafts.logits.device)
        # Not a number: probability 0, and a draft of probability 0 is not accepted.
        self._probs[batch.idx_mapping, : drafts.logits.shape[1]] = drafts.logits.softmax(dim=-1).nan_to_num_(nan=0.0)

    def take(self, batch: InputBatch) -> np.ndarray:
        """[num_reqs] bool, on the host: of which requests `at` knows what to say in this step, and in no later one."""
        known: np.ndarray = self._known[batch.plan.slots]
        self._known[batch.plan.slots] = False
        return known

    def of_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """slots [R], token_ids [R, k <= K] int64 -> [R, k]."""
        assert self._probs is not None
        places = torch.arange(token_ids.shape[1], device=slots.device)
        return self._probs[slots[:, None], places, token_ids]

    def at(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """slots, places in 0..K-1, both [N] int64 -> [N, V], a copy."""
        assert self._probs is not None
        return self._probs[slots, places]
