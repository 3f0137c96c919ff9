"""Medusa: heads on the hidden state of the last valid token, each for a token further ahead (Cai et al., 2024).

One draft a head, a chain and not a tree: the heads do not see each other's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from workerkit.components.speculator.drawing import DraftDraws, DrawingConfig, together
from workerkit.components.speculator.limits import num_drafts
from workerkit.components.speculator.rows import last_valid
from workerkit.components.speculator.shared import features_of, unfit
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.draft import HeadsDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, DraftWeights, Speculator


class MedusaSpeculator(Speculator):
    """The first K heads of a HeadsDraft."""

    def __init__(self, config: DrawingConfig, shape: WorkerShape, draft: DraftWeights, kernels: Kernels) -> None:
        network = draft.network
        if not isinstance(network, HeadsDraft):
            raise unfit(draft, "heads (medusa)")
        self._num_drafts = num_drafts(shape)
        if self._num_drafts > network.num_heads:
            raise UnsupportedError(
                f"limits.num_speculative_tokens is {self._num_drafts}; components.draft has {network.num_heads} heads"
            )
        self._network = network
        self._max_model_len = shape.max_model_len
        self._draws = DraftDraws(config, kernels, shape.vocab_size, network.target_ids)

    @property
    def num_speculative_tokens(self) -> int:
        return self._num_drafts

    @property
    def taps(self) -> Sequence[str]:
        return self._network.features

    def propose(self, inputs: DraftInputs) -> Drafts:
        last = last_valid(inputs.batch, inputs.sampled)
        hidden = features_of(self._network, inputs)[last]
        newest = inputs.batch.positions[last] + 1
        drawn = [
            self._draws.draw(self._network.head_logits(hidden, head), inputs.keys, newest, head)
            for head in range(self._num_drafts)
        ]
        return together(drawn, newest + 1, self._max_model_len)
