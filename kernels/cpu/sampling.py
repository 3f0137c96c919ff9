"""Truncation without sorting the vocabulary where no row needs it; the same bits as the reference."""

from __future__ import annotations

import torch

from workerkit.kernels.reference import sampling as reference

_LARGEST = 1024  # selecting more than about this many is no faster than sorting


def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """float32 [N, V], k [N] int (0 or V: off), p [N] float32 (1: off). Top-k keeps every logit tied with the k-th;
    top-p then works on the renormalised rest and keeps the smallest set whose mass reaches p, at least one token;
    tokens tied with the last one kept are kept. Others become -inf."""
    rows, vocab_size = logits.shape
    truncated = torch.zeros(rows, dtype=torch.bool) if k is None else (k > 0) & (k < vocab_size)
    narrowed = truncated if p is None else truncated | (p < 1)
    if not bool(narrowed.any()):
        return logits
    # A row whose top-p has no top-k before it needs the mass of its whole vocabulary, in order.
    largest = int(k[truncated].max()) + 1 if k is not None and bool((truncated == narrowed).all()) else vocab_size
    if k is None or largest > min(_LARGEST, vocab_size):
        return reference.apply_top_k_top_p(logits, k, p)
    descending = logits.topk(largest, dim=-1).values
    kth = descending.gather(-1, torch.where(truncated, k.long() - 1, 0)[:, None])
    tied = (kth == descending[:, -1:]) & kth.isfinite()
    if bool(tied[truncated].any()):  # ties may reach beyond what was selected
        return reference.apply_top_k_top_p(logits, k, p)
    threshold = reference.truncation_threshold(descending, vocab_size, k, p)
    return logits.masked_fill(logits < threshold, float("-inf"))
