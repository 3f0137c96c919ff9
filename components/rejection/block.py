"""Drafts verified together (Sun et al., "Block Verification Accelerates Speculative Decoding", 2024).

The output is distributed like plain sampling, and at least as many drafts are accepted as one by one. With w_0 = 1,
w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1) is how likely the first i drafts x may stand; S_i = sum over v of
max(w_i p_{i+1}(v) - q_{i+1}(v), 0); h_i = S_i / (S_i + 1 - w_i), and w_n for the last of n drafts. The largest i with
u_i <= h_i is accepted, and the next token drawn from max(w_i p_{i+1} - q_{i+1}, 0), or from p where all were accepted.

How many are accepted depends on all of a block's drafts and all u_i. The next step drafts some of the same positions
again, so a number of its own is needed for each of (first position of the block, i): with one for each position the
second block would be verified with numbers, and made of drafts, that the first has selected among.
"""

from __future__ import annotations

import torch

from workerkit.components.rejection.remembering import RememberingRejection
from workerkit.components.rejection.target import Judgement
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.sampling import RandomStream, Sampler, SamplerOutput


class BlockRejection(RememberingRejection):
    """All of a request's drafts at once."""

    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        known = self._drafts.take(batch)
        judgement = Judgement.of(logits, batch, sampler.keys(batch), self._drafts, known)
        keys, num_real = judgement.keys, judgement.num_real[:, None]
        weights = prefix_weights(judgement.ratios)
        counts = torch.arange(1, weights.shape[1] + 1, device=weights.device)
        excess = judgement.excess(self._kernels, weights)
        plain = (counts == num_real) | (keys.temperatures == 0)[:, None] | (weights == 1)  # 1: also without any excess
        chances = torch.where(plain, weights, excess / (excess + 1 - weights))
        positions = judgement.rows.positions[:, :1] + (counts - 1 << 32)
        seeds = keys.seeds[:, None].expand_as(positions)
        uniform = self._kernels.uniform_from_seed(seeds.flatten(), positions.flatten(), RandomStream.ACCEPTANCE)
        may_stand = (uniform.view_as(positions) <= chances) & (counts <= num_real)
        accepted = (may_stand * counts).amax(dim=1)
        stands = weights.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
        return judgement.settle(self._kernels, accepted, torch.where(accepted > 0, stands, 1.0))


def prefix_weights(ratios: torch.Tensor) -> torch.Tensor:
    """p(x) / q(x) [R, K] float64 -> w_1 ... w_K [R, K]: the running product, held at 1 whenever it would exceed it."""
    product = ratios.log().cumsum(dim=1)
    return (product - product.cummax(dim=1).values.clamp(min=0)).exp()
