"""A grammar's bitmask: which tokens it allows, 32 in a word."""

from __future__ import annotations

import torch


def apply_grammar_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; rows [M] int64: rows to mask; bitmask [M, ceil(V / 32)] int32: bit i % 32 of word
    i // 32 is token i; 0 -> -inf."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    allowed = (bitmask[:, token // 32] >> (token % 32)) & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))
    return logits
