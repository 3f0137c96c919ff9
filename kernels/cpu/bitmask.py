"""A grammar's bitmask by arithmetic: masks of booleans are slow on a CPU. The same bits as the reference."""

from __future__ import annotations

import numpy as np
import torch

_CHUNK = 8  # rows at a time, whose limits stay in the processor's cache


def apply_grammar_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; rows [M] int64: rows to mask; bitmask [M, ceil(V / 32)] int32: bit i % 32 of word
    i // 32 is token i; 0 -> -inf. NaN stays NaN."""
    to_sign = torch.arange(31, -1, -1, dtype=torch.int32)  # how far each of 32 bits lies from a float's sign
    banned = bitmask.bitwise_not().unsqueeze(-1)
    values = logits.numpy()
    vocab_size = values.shape[1]
    all_rows = rows.tolist()
    for start in range(0, len(all_rows), _CHUNK):
        signs = torch.bitwise_left_shift(banned[start : start + _CHUNK], to_sign).bitwise_and_(-(2**31))
        limits = signs.view(torch.float32).reciprocal_().flatten(1)  # of -0, which is banned, and 0: -inf and inf
        for row, limit in zip(all_rows[start : start + _CHUNK], limits.numpy(), strict=True):
            np.minimum(values[row], limit[:vocab_size], out=values[row])
    return logits
