"""What the target says of the drafts of a batch, and the token behind those that were accepted."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch.nn import functional as F

from workerkit.components.buffers.upload import upload
from workerkit.components.rejection.draft_probs import DraftProbs
from workerkit.components.rejection.rows import VerifyRows, leading
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.sampling import DrawKeys, RandomStream, SamplerOutput


@attrs.frozen(kw_only=True, eq=False)
class Judgement:
    """R requests of up to K drafts x; p is the target's distribution at a draft's place, q what it was drawn from."""

    rows: VerifyRows
    slots: torch.Tensor  # [R] int64
    keys: DrawKeys
    probs: torch.Tensor  # [num_logits, V] float32: p; not numbers where no token is possible
    likeliest: torch.Tensor  # [num_logits] int64, -1 where no token is possible
    remembered: torch.Tensor  # [R] bool: q is in `drafts`; otherwise it is 1 for the draft and 0 for all else
    drafts: DraftProbs | None  # None: of no request
    num_real: torch.Tensor  # [R] int64: drafts before the first that is none, or whose place has no possible token
    ratios: torch.Tensor  # [R, K] float64: p(x) / q(x), and 0 behind num_real; a greedy request's is 1 or 0

    @staticmethod
    def of(logits: torch.Tensor, batch: InputBatch, keys: DrawKeys, drafts: DraftProbs, known: np.ndarray) -> Judgement:
        """Processed logits [num_logits, V]; `known` [num_reqs] bool: whose q is in `drafts`."""
        rows = VerifyRows.of(batch)
        (remembered,) = upload(logits.device, known)
        remembered = remembered.bool()
        probs = logits.softmax(dim=-1)
        possible = probs[:, 0].isfinite()  # otherwise all of the row's probabilities are not numbers
        likeliest = logits.max(dim=-1).indices.masked_fill_(~possible, -1)
        places, tokens = rows.index[:, :-1], rows.drafts.clamp(min=0)
        num_real = leading((rows.drafts >= 0) & possible[places])
        real = torch.arange(places.shape[1], device=logits.device) < num_real[:, None]
        p = probs[places, tokens].double()
        if known.any():
            q = torch.where(remembered[:, None], drafts.of_tokens(batch.idx_mapping, tokens).double(), 1.0)
            ratios = torch.where(q > 0, p / q, 0.0)
        else:
            ratios = p
        ratios = torch.where(_is_greedy(keys), (likeliest[places] == tokens).double(), ratios)
        return Judgement(
            rows=rows,
            slots=batch.idx_mapping,
            keys=keys,
            probs=probs,
            likeliest=likeliest,
            remembered=remembered,
            drafts=drafts if known.any() else None,
            num_real=num_real,
            ratios=torch.where(real, ratios, 0.0),
        )

    def excess(self, kernels: Kernels, weights: torch.Tensor) -> torch.Tensor:
        """[R, K] float64: for i = 1 ... K accepted drafts, the sum of max(weights[:, i - 1] * p - q, 0) at the place of
        the next one; of no meaning where there is none."""
        after = self.rows.drafts.roll(-1, dims=1)
        next_index = self.rows.index[:, 1:]
        p = self.probs[next_index, after.clamp(min=0)].double()
        one_hot = weights * (1 - p)
        last = weights.shape[1] - 1
        if self.drafts is None or not last:
            return one_hot
        places = torch.arange(1, last + 1, device=weights.device).repeat(len(weights))
        probs = self.probs[next_index[:, :last].flatten()]
        draft_probs = self.drafts.at(self.slots.repeat_interleave(last), places)
        sums = kernels.residual_probs(probs, draft_probs, weights[:, :last].flatten()).sum(dim=-1)
        sums = F.pad(sums.double().view(-1, last), (0, 1))
        return torch.where(self.remembered[:, None], sums, one_hot)

    def settle(self, kernels: Kernels, accepted: torch.Tensor, weights: torch.Tensor) -> SamplerOutput:
        """The first `accepted` [R] drafts, and a token behind them: from max(weight * p - q, 0) in place of a draft
        that was rejected, otherwise from p. `weights` [R] float64 in 0..1, above 0."""
        rows, kernel = self.rows, kernels.uniform_from_seed
        index, positions = rows.at(accepted)
        rejected = accepted < self.num_real
        probs = self.probs[index]
        left = self._left(kernels, probs, accepted, rejected, weights)
        # Rounding may leave nothing where p and q are the same.
        left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, probs)
        of_draft, bonus, plain = (
            kernel(self.keys.seeds, positions, stream)
            for stream in (RandomStream.RESIDUAL, RandomStream.BONUS, RandomStream.SAMPLING)
        )
        all_accepted = (accepted == rows.counts) & (rows.counts > 0)
        uniform = torch.where(rejected, of_draft, torch.where(all_accepted, bonus, plain))
        drawn, likeliest = kernels.sample_from_probs(left, uniform), self.likeliest[index]
        return rows.output(accepted, torch.where(_is_greedy(self.keys)[:, 0] | (likeliest < 0), likeliest, drawn))

    def _left(
        self,
        kernels: Kernels,
        probs: torch.Tensor,
        accepted: torch.Tensor,
        rejected: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """[R, V], see `settle`; `probs` are p."""
        place = accepted.clamp(max=self.rows.drafts.shape[1] - 1)
        if self.drafts is None:
            left = probs.clone()
        else:
            draft_probs = self.drafts.at(self.slots, place)
            draft_probs.masked_fill_(~(rejected & self.remembered)[:, None], 0.0)
            left = kernels.residual_probs(probs, draft_probs, torch.where(rejected, weights, 1.0))
        token = self.rows.drafts.gather(1, place[:, None]).clamp_(min=0)
        without = left.gather(1, token).masked_fill_((rejected & ~self.remembered)[:, None], 0.0)
        return left.scatter_(1, token, without)


def _is_greedy(keys: DrawKeys) -> torch.Tensor:
    """[R, 1] bool."""
    return (keys.temperatures == 0)[:, None]
