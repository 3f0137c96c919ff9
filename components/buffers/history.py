"""The text so far of requests whose stages read it: kept by slot on the device, so that no step waits for the host.

It is written when a request is added (a resumed one brings what it had generated) and when a step's tokens are final.
Both happen on the device's stream, so a step that was planned before the tokens of the one before it were known still
reads them all.
"""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput


class TokenHistory:
    """Token ids by slot and position. Slots that were not added are let be."""

    def __init__(self, shape: WorkerShape, device: torch.device) -> None:
        # A step that ends at the last position may still sample drafts + 1 tokens; nobody reads those columns.
        width = shape.max_model_len + shape.num_speculative_tokens + 1
        self._tokens = torch.zeros(shape.max_num_reqs, width, dtype=torch.int32, device=device)
        self._kept = np.zeros(shape.max_num_reqs, dtype=bool)

    def add(self, slot: int, request: NewRequest) -> None:
        """All that is known of the request."""
        self._kept[slot] = True
        (tokens,) = upload(self._tokens.device, np.array(request.token_ids))
        self._tokens[slot, : len(tokens)] = tokens

    def clear(self, slot: int) -> None:
        """The slot's text is no longer kept."""
        self._kept[slot] = False

    def commit(self, batch: InputBatch, sampled: SamplerOutput) -> None:
        """Append the step's tokens; a -1 (none was possible) is kept as such, and counts as no token.

        Columns past num_sampled are written too: they lie behind the text, and the next step overwrites them.
        """
        if not np.count_nonzero(self._kept):
            return
        kept = np.flatnonzero(self._kept[batch.plan.slots] & ~batch.plan.is_partial)
        if not len(kept):
            return
        rows, first = upload(self._tokens.device, kept, batch.cu_num_logits_np[kept])
        tokens = sampled.token_ids[rows]
        starts = batch.positions[batch.logits_indices[first]] + 1
        columns = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self._tokens[batch.idx_mapping[rows][:, None], columns] = tokens.int()

    def tokens(self, slots: torch.Tensor, width: int) -> torch.Tensor:
        """[N, width] int32, a copy: the texts of some slots [N]; what lies behind a text is undefined."""
        return self._tokens[:, :width].index_select(0, slots)

    def text(
        self, batch: InputBatch, requests: np.ndarray, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """What some logits rows continue; batch row, slot and position [N] of each -> [N, W], see SamplingContext."""
        width = int(batch.host_seq_lens.upper_bound[requests].max())
        text = self._tokens[:, :width].index_select(0, slots).long()
        columns = torch.arange(width, device=text.device)
        if batch.num_logits > batch.num_reqs:  # drafts follow the newest token of their request, in the batch's ids
            (firsts,) = upload(text.device, batch.cu_num_logits_np[requests])
            newest = batch.logits_indices[firsts][:, None]
            ahead = columns - batch.positions[newest]
            drafts = batch.input_ids[(newest + ahead).clamp(0, batch.num_tokens - 1)]
            text = torch.where(ahead > 0, drafts, text)
        return text.masked_fill_(columns > positions[:, None], -1)
