"""What verifiers of drawn drafts have in common: they remember by slot what the drafts were drawn from."""

from __future__ import annotations

from workerkit.components.rejection.draft_probs import DraftProbs
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import Drafts, RejectionSampler


class RememberingRejection(RejectionSampler):
    """A subclass verifies."""

    def __init__(self, shape: WorkerShape, kernels: Kernels) -> None:
        self._kernels = kernels
        self._drafts = DraftProbs(shape)

    def add(self, slot: int, request: NewRequest) -> None:
        self._drafts.forget(slot)

    def clear(self, slot: int) -> None:
        self._drafts.forget(slot)

    def remember(self, batch: InputBatch, drafts: Drafts) -> None:
        self._drafts.remember(batch, drafts)
