"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import torch


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], token_ids [N, C] int64 -> [N, C] float32: logit - logsumexp of the row; -inf for a banned one."""
    chosen = logits.gather(1, token_ids)
    logprobs = (chosen.double() - logits.double().logsumexp(-1, keepdim=True)).float()
    return logprobs.masked_fill(chosen == float("-inf"), float("-inf"))  # also where the whole row is banned
