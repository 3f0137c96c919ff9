"""Log-probabilities of sampled tokens and of prompts, for the requests that asked for them.

Rules. The most likely tokens come in descending order, of equally likely ones the lowest id first, so a request sees
the same whatever others ask for. A token's rank is 1 + how many are strictly more likely. Of prompts they are always
those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.components.sampler.tables import SlotTable, to_device
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import LogprobsSpan, LogprobsTensors, SamplerOutput

_NOT_ASKED = -1


class TokenLogprobs:
    """What each slot's request asked for, and the computation."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._shape = shape
        self._kernels = kernels
        self._device = context.device
        self._num_top = np.full(shape.max_num_reqs, _NOT_ASKED)
        self._num_prompt_top = np.full(shape.max_num_reqs, _NOT_ASKED)
        self._chosen = SlotTable(shape.max_num_reqs, context.device, torch.int64)
        self._askers: set[int] = set()  # slots whose request wants any of its output
        self._prompts: dict[int, torch.Tensor] = {}  # of requests that want log-probabilities of theirs

    def add(self, slot: int, request: NewRequest) -> None:
        """Remember what the request asks for."""
        params = request.sampling
        self._chosen.write(slot, params.logprob_token_ids)
        if params.logprobs is not None or params.logprob_token_ids:
            self._askers.add(slot)
            self._num_top[slot] = self._count(params.logprobs or 0)
        if params.prompt_logprobs is not None:
            self._num_prompt_top[slot] = self._count(params.prompt_logprobs)
            prompt = request.token_ids[: request.prompt_len]
            self._prompts[slot] = to_device(prompt, torch.int64, self._device)

    def _count(self, asked: int) -> int:
        return self._shape.vocab_size if asked == -1 else asked

    def clear(self, slot: int) -> None:
        """The slot asks for nothing."""
        self._num_top[slot] = self._num_prompt_top[slot] = _NOT_ASKED
        self._askers.discard(slot)
        self._prompts.pop(slot, None)

    def _asking(self, batch: InputBatch) -> np.ndarray:
        """Batch rows whose sampled tokens count and want log-probabilities."""
        return np.flatnonzero((self._num_top[batch.plan.slots] != _NOT_ASKED) & ~batch.plan.is_partial)

    def select(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor | None:
        """A copy of the logits rows that `of_sampled` works on, [M, V]; None when there is none."""
        if not self._askers or not len(asking := self._asking(batch)):
            return None
        if len(asking) == batch.num_reqs:
            return logits.clone()
        (rows,) = upload(logits.device, _spread(batch.cu_num_logits_np[asking], _num_logits(batch, asking)))
        return logits.index_select(0, rows)

    def of_sampled(self, selected: torch.Tensor, batch: InputBatch, sampled: SamplerOutput) -> LogprobsTensors:
        """Of the tokens that were drawn from each selected row."""
        asking = self._asking(batch)
        counts = _num_logits(batch, asking)
        requests = np.repeat(asking, counts)
        rows, columns = upload(selected.device, requests, _spread(np.zeros_like(counts), counts))
        slots = batch.plan.slots[asking]
        chosen = self._chosen.gather(batch.idx_mapping[rows], slots)
        top = int(self._num_top[slots].max())
        token_ids, logprobs, ranks = self._describe(selected, sampled.token_ids[rows, columns], top, chosen)
        spans = self._spans(batch, asking, counts, self._num_top[slots], self._chosen.lengths[slots])
        return LogprobsTensors(token_ids=token_ids, logprobs=logprobs, ranks=ranks, top=top, spans=spans)

    def of_prompts(
        self, hidden: torch.Tensor, batch: InputBatch, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> LogprobsTensors | None:
        """Of prompt tokens that follow tokens of this step. At most max_num_reqs rows of logits exist at a time."""
        if not self._prompts:
            return None
        plan = batch.plan
        ends = np.minimum(plan.num_computed_tokens + plan.num_scheduled_tokens, plan.prompt_lens - 1)
        counts = np.where(self._num_prompt_top[plan.slots] != _NOT_ASKED, ends - plan.num_computed_tokens, 0)
        asking = np.flatnonzero(counts > 0)
        if not len(asking):
            return None
        counts, slots = counts[asking], plan.slots[asking]
        (tokens,) = upload(hidden.device, _spread(batch.query_start_loc_np[asking], counts))
        firsts = plan.num_computed_tokens[asking] + 1
        following = [
            self._prompts[slot][first : first + count]
            for slot, first, count in zip(slots.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        ]
        top = int(self._num_prompt_top[slots].max())
        size = self._shape.max_num_reqs
        pieces = [
            self._describe(compute_logits(hidden[which]), targets, top, targets[:, None][:, :0])
            for which, targets in zip(torch.split(tokens, size), torch.split(torch.cat(following), size), strict=True)
        ]
        token_ids, logprobs, ranks = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        spans = self._spans(batch, asking, counts, self._num_prompt_top[slots], np.zeros_like(counts))
        return LogprobsTensors(token_ids=token_ids, logprobs=logprobs, ranks=ranks, top=top, spans=spans)

    def _describe(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[M, V], the tokens themselves [M], chosen ids [M, C] -> ids, log-probabilities, ranks."""
        known = tokens.clamp(0, logits.shape[1] - 1)[:, None]  # where nothing was sampled there is no token
        token_ids = torch.cat((known, self._kernels.most_likely_tokens(logits, top), chosen), dim=1)
        logprobs = self._kernels.compute_token_logprobs(logits, token_ids)
        ranks = torch.count_nonzero(logits > logits.gather(1, known), dim=1) + 1
        return token_ids, logprobs, ranks

    @staticmethod
    def _spans(
        batch: InputBatch, asking: np.ndarray, counts: np.ndarray, num_top: np.ndarray, num_chosen: np.ndarray
    ) -> tuple[LogprobsSpan, ...]:
        starts = np.cumsum(counts) - counts
        columns = (column.tolist() for column in (asking, starts, counts, num_top, num_chosen))
        return tuple(
            LogprobsSpan(req_id=batch.req_ids[row], start=start, count=count, num_top=top, num_chosen=chosen)
            for row, start, count, top, chosen in zip(*columns, strict=True)
        )


def _num_logits(batch: InputBatch, rows: np.ndarray) -> np.ndarray:
    counts: np.ndarray = batch.plan.num_draft_tokens[rows] + 1
    return counts


def _spread(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, … `count` times each, one after another."""
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    result: np.ndarray = np.repeat(starts, counts) + offsets
    return result
