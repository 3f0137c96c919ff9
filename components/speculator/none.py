"""No speculation: no draft weights, no proposals, nothing to verify."""

from __future__ import annotations

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.sampling import Sampler, SamplerOutput
from workerkit.framework.interfaces.speculation import (
    DraftInputs,
    DraftModel,
    Drafts,
    DraftWeights,
    RejectionSampler,
    Speculator,
    VerifyBudget,
)


class NoDraft(DraftModel):
    """No weights of its own."""

    def load(self) -> DraftWeights:
        return DraftWeights()


class NoSpeculator(Speculator):
    """Proposes nothing."""

    @property
    def num_speculative_tokens(self) -> int:
        return 0

    def propose(self, inputs: DraftInputs) -> Drafts:
        raise UnsupportedError("components.speculator: none proposes no drafts")


class NoRejection(RejectionSampler):
    """Verifies nothing; a batch with drafts is refused."""

    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        raise UnsupportedError("the step carries drafts, and components.rejection is none: nobody can verify them")


class NoVerifyBudget(VerifyBudget):
    """Every draft is worth verifying."""

    def trim(self, drafts: Drafts, batch: InputBatch) -> Drafts:
        return drafts
