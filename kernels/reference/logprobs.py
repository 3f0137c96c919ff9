"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import torch


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], token_ids [N, C] int64 -> [N, C] float32: logit - logsumexp of the row; -inf for a banned one."""
    chosen = logits.gather(1, token_ids)
    logprobs = (chosen.double() - logits.double().logsumexp(-1, keepdim=True)).float()
    return logprobs.masked_fill(chosen == float("-inf"), float("-inf"))  # also where the whole row is banned


def most_likely_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """float32 [N, V] -> ids [N, count] int64 in descending order of their logits, of equal ones the lowest id first.

    What topk yields among equals is its own business, so those at the edge are looked up again, and the rest sorted.
    """
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(count)
    ids, order = ids.sort()
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    ids = ids.gather(1, order)
    vocab_size, smallest = logits.shape[1], values[:, -1:]
    falling = torch.arange(vocab_size, 0, -1, dtype=torch.float32, device=logits.device)  # exact up to 2^24
    # Lowest ids first. 1.0 is the last id: in a row of NaN nothing equals anything.
    edge = vocab_size - torch.where(logits == smallest, falling, 1.0).topk(count).values.long()
    num_above = (values > smallest).sum(1, keepdim=True)
    columns = torch.arange(count, device=logits.device)
    return torch.where(columns < num_above, ids, edge.gather(1, (columns - num_above).clamp(min=0)))
