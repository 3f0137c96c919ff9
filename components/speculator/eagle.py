"""EAGLE, EAGLE-3 and MTP: a small network that goes on from the target's hidden states.

A query at position p reads the token at p + 1 and the state of position p, and predicts the token at p + 2. Its keys
and values lie at p, in layers of their own. (EAGLE: Li et al., 2024; EAGLE-3: Li et al., 2025; MTP: DeepSeek-V3, 2024.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from workerkit.components.speculator.autoregressive import AutoregressiveSpeculator, Prediction
from workerkit.components.speculator.drawing import DrawingConfig
from workerkit.components.speculator.shared import embeddings_of, features_of, head_of, newest_tokens, unfit
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.draft import HiddenDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import Attend, LoadedModel
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, DraftWeights


class EagleSpeculator(AutoregressiveSpeculator):
    """One algorithm for every HiddenDraft; what differs is the network."""

    lag: ClassVar[int] = 1

    def __init__(
        self,
        config: DrawingConfig,
        shape: WorkerShape,
        loaded: LoadedModel,
        draft: DraftWeights,
        caches: KVCaches,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        network = draft.network
        if not isinstance(network, HiddenDraft):
            raise unfit(draft, "a network that goes on from hidden states (eagle, eagle3, mtp)")
        super().__init__(config, shape, draft, caches, attention, kernels, network.target_ids)
        self._network = network
        self._embed = embeddings_of(network, loaded)
        self._head = head_of(network, loaded)

    @property
    def taps(self) -> Sequence[str]:
        return self._network.features

    def first_pass(self, inputs: DraftInputs, last: torch.Tensor) -> Prediction:
        batch, network = inputs.batch, self._network
        # Inside each row one to the left. What comes over from the next row is padding, or overwritten here.
        tokens = batch.input_ids.roll(-1).long().index_copy_(0, last, newest_tokens(inputs))
        states, carried = network.step(
            self._embed(tokens),
            network.combine(features_of(network, inputs)),
            batch.positions,
            batch.rope_lens,
            self.attend(batch, inputs.tables),
        )
        return Prediction(logits=self._head(states[last]), state=carried[last])

    def next_pass(
        self, tokens: torch.Tensor, state: torch.Tensor | None, rows: InputBatch, attend: Attend
    ) -> Prediction:
        assert state is not None, "every pass of this proposer hands one on"
        states, carried = self._network.step(self._embed(tokens), state, rows.positions, rows.rope_lens, attend)
        return Prediction(logits=self._head(states), state=carried)
