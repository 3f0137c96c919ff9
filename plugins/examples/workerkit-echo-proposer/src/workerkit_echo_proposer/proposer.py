"""The proposer `echo`: what followed the same token last time follows again."""

from __future__ import annotations

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, Speculator


class EchoProposer(Speculator):
    """Remembers for each token of a request what came after it. All on the device: no step waits for the host."""

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        if not shape.num_speculative_tokens:
            raise UnsupportedError("limits.num_speculative_tokens is 0, so echo may propose nothing")
        self._count = shape.num_speculative_tokens
        # by slot and token; -1: not seen yet
        self._next = torch.full((shape.max_num_reqs, shape.vocab_size), -1, dtype=torch.int64, device=context.device)

    @property
    def num_speculative_tokens(self) -> int:
        return self._count

    def add(self, slot: int, request: NewRequest) -> None:
        """A new request, or one that was preempted and brings what it had generated."""
        self._next[slot] = -1
        seen = dict(zip(request.token_ids, request.token_ids[1:], strict=False))  # of equal tokens the last counts
        pairs = torch.tensor([*seen.items()], dtype=torch.int64).reshape(-1, 2).to(self._next.device)
        self._next[slot, pairs[:, 0]] = pairs[:, 1]

    def propose(self, inputs: DraftInputs) -> Drafts:
        batch, sampled, slots = inputs.batch, inputs.sampled, inputs.batch.idx_mapping
        first = torch.from_numpy(batch.cu_num_logits_np[:-1]).to(slots.device)
        token = batch.input_ids[batch.logits_indices[first.long()]].long()  # the one that the sampled ones follow
        for place, following in enumerate(sampled.token_ids.unbind(1)):
            is_new = (place < sampled.num_sampled) & (following >= 0)
            self._next[slots, token] = torch.where(is_new, following, self._next[slots, token])
            token = torch.where(is_new, following, token)
        drafts = []
        for _ in range(self._count):
            found = self._next[slots, token.clamp(min=0)]
            token = torch.where(token < 0, token, found)  # behind a -1 there is nothing
            drafts.append(token)
        return Drafts(token_ids=torch.stack(drafts, dim=1))
