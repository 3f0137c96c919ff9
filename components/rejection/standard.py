"""Drafts verified one by one (Leviathan et al., 2023).

Where there was no choice of drafts, every row is drawn as it would be without them, and a draft is accepted if it is
what was drawn: the output is that of plain sampling, token for token. Drafts that were drawn from a distribution q are
accepted with probability min(1, p / q), which is more often, and what comes out is distributed like plain sampling.
"""

from __future__ import annotations

import torch

from workerkit.components.buffers.upload import upload
from workerkit.components.rejection.remembering import RememberingRejection
from workerkit.components.rejection.rows import VerifyRows, chosen, leading
from workerkit.components.rejection.target import Judgement
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.sampling import RandomStream, Sampler, SamplerOutput


class StandardRejection(RememberingRejection):
    """Token by token. A request's way of verification depends on its own drafts, not on the batch."""

    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        known = self._drafts.take(batch)
        if not known.any():
            return VerifyRows.of(batch).matching(sampler.draw(logits, batch))
        judgement = Judgement.of(logits, batch, sampler.keys(batch), self._drafts, known)
        rows, keys = judgement.rows, judgement.keys
        positions = rows.positions[:, :-1]
        seeds = keys.seeds[:, None].expand_as(positions)
        uniform = self._kernels.uniform_from_seed(seeds.flatten(), positions.flatten(), RandomStream.ACCEPTANCE)
        accepted = leading(uniform.view_as(positions) < judgement.ratios)
        result = judgement.settle(self._kernels, accepted, torch.ones_like(judgement.ratios[:, 0]))
        if known.all():
            return result
        (by_chance,) = upload(logits.device, known)
        return chosen(by_chance.bool(), result, rows.matching(sampler.draw(logits, batch)))
