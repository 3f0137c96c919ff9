"""The ragged logits rows of a batch with drafts as a rectangle, and the answer from how many drafts were accepted."""

from __future__ import annotations

import attrs
import torch
from torch.nn import functional as F

from workerkit.components.buffers.upload import upload
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.sampling import SamplerOutput


@attrs.frozen(kw_only=True, eq=False)
class VerifyRows:
    """R requests, K = the most drafts that one of them has in this batch, at least 1."""

    counts: torch.Tensor  # [R] int64, scheduled drafts, placeholders included
    index: torch.Tensor  # [R, K + 1] int64, logits row of each place; the last one again behind a request's own
    positions: torch.Tensor  # [R, K + 1] int64, of the token that produced the row
    drafts: torch.Tensor  # [R, K] int64, -1: none, or a placeholder

    @staticmethod
    def of(batch: InputBatch) -> VerifyRows:
        """Sizes are known on the host: nothing waits for the device."""
        counts, starts = upload(batch.draft_ids.device, batch.plan.num_draft_tokens, batch.cu_num_logits_np[:-1])
        width = int(batch.plan.num_draft_tokens.max(initial=1))
        places = torch.arange(width + 1, device=counts.device)
        index = starts[:, None] + torch.minimum(places, counts[:, None])
        return VerifyRows(
            counts=counts,
            index=index,
            positions=batch.positions[batch.logits_indices[index]],
            drafts=batch.draft_ids[index[:, :width]],  # a request's last row judges none
        )

    def at(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits row and position [R] of one place [R] of each request."""
        column = places[:, None]
        return self.index.gather(1, column)[:, 0], self.positions.gather(1, column)[:, 0]

    def output(self, accepted: torch.Tensor, last: torch.Tensor) -> SamplerOutput:
        """The first `accepted` [R] drafts of each request, and the token [R] behind them."""
        return SamplerOutput(
            token_ids=F.pad(self.drafts, (0, 1)).scatter_(1, accepted[:, None], last[:, None]),
            num_sampled=(accepted + 1).int(),
            num_rejected=(self.counts - accepted).int(),
        )

    def matching(self, drawn: torch.Tensor) -> SamplerOutput:
        """Drafts are accepted as long as they are what was drawn [num_logits]; what comes out is what was drawn."""
        tokens = drawn[self.index]
        accepted = leading((self.drafts == tokens[:, :-1]) & (self.drafts >= 0))
        return self.output(accepted, tokens.gather(1, accepted[:, None])[:, 0])


def leading(true: torch.Tensor) -> torch.Tensor:
    """[R, K] bool -> [R] int64: how many are true before the first that is not."""
    return true.long().cumprod(dim=1).sum(dim=1)


def chosen(rows: torch.Tensor, one: SamplerOutput, other: SamplerOutput) -> SamplerOutput:
    """`one` for the rows [R] bool that are true, `other` for the rest."""
    return SamplerOutput(
        token_ids=torch.where(rows[:, None], one.token_ids, other.token_ids),
        num_sampled=torch.where(rows, one.num_sampled, other.num_sampled),
        num_rejected=torch.where(rows, one.num_rejected, other.num_rejected),
    )
