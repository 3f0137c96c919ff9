"""Truncation without sorting the vocabulary; the same tokens stay as in the reference."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.kernels.cpu.candidates import LOWEST, block_maxima, bounds, descending, select
from workerkit.kernels.cpu.nearest import top_p_threshold, typical_span
from workerkit.kernels.reference import truncation as reference

_CHUNK = 8  # rows at a time, which stay in the processor's cache
_PIECE = 30_000  # tokens; torch wakes its threads for a little more, which takes longer than the work
_FEW_BLOCKS = 64  # some thousand tokens at most, in fact hundreds
_INF = float("inf")


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; min_p [N] float32 in 0..1: probabilities below min_p times the largest become 0."""
    return _ban_below(logits, reference.min_p_threshold(logits, min_p))


def apply_top_n_sigma(logits: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; n [N] float32: logits below max - n * sigma become -inf, sigma being the (population)
    standard deviation of the row's finite logits."""
    num_rows, vocab_size = logits.shape
    sums, squares = torch.empty(2, num_rows, dtype=torch.float64)
    counts = torch.full((num_rows,), vocab_size)
    for start in range(0, num_rows, _CHUNK):
        rows = slice(start, start + _CHUNK)
        exact = logits[rows].double()
        finite = [np.count_nonzero(row > -np.inf) for row in logits[rows].numpy()]
        if min(finite) < vocab_size:
            counts[rows] = torch.tensor(finite).clamp(min=1)
            torch.threshold_(exact, -_INF, 0.0)
        sums[rows] = exact.sum(-1)
        squares[rows] = exact.square_().sum(-1)
    sigma = (squares / counts - (sums / counts).square()).clamp(min=0.0).sqrt()
    return _ban_below(logits, (logits.amax(-1).double() - n.double() * sigma).float()[:, None])


def apply_top_k_top_p_npu(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """float32 [N, V], in place; k [N] int (0 or V: off), p [N] float32 (1: off). Top-k keeps every logit tied with the
    k-th; top-p then works on the renormalised rest and keeps the smallest set whose mass reaches p, at least one token;
    tokens tied with the last one kept are kept. Others become -inf."""
    num_rows, vocab_size = logits.shape
    k = torch.zeros(num_rows, dtype=torch.long) if k is None else torch.where(k < vocab_size, k.long(), 0)
    p = torch.ones(num_rows) if p is None else p
    truncated = k > 0
    free = ~truncated & (p < 1)
    threshold = torch.full((num_rows, 1), -_INF)
    if bool(truncated.any()):
        threshold[truncated] = _top_k(_take(logits, truncated), k[truncated], p[truncated])
    if bool(free.any()):
        threshold[free] = top_p_threshold(_take(logits, free), p[free])
    return _ban_below(logits, threshold)


def _top_k(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """-> the smallest logit that stays, [n, 1]. Whatever is tied with the k-th reaches the bound too."""
    chosen = descending(select(logits, logits, bounds(logits, k.numpy()), int(k.max())))
    return reference.top_k_top_p_threshold(chosen, logits.shape[1], k, p)


def apply_typical_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; p [N] float32 in (0, 1), 1: off. Keeps the smallest set of tokens whose surprise is
    closest to the distribution's entropy and whose mass reaches p, at least one; tokens as close as the last one kept
    are kept. Others become -inf."""
    least, most = torch.full((len(logits), 1), -_INF), torch.full((len(logits), 1), _INF)  # of the logits that stay
    few = torch.from_numpy(np.count_nonzero(block_maxima(logits) > -np.inf, axis=1) <= _FEW_BLOCKS)
    rows = (p < 1) & ~few
    if bool(rows.any()):
        least[rows], most[rows] = typical_span(_take(logits, rows), p[rows])
    rows = (p < 1) & few
    if bool(rows.any()):  # most tokens are banned: without them the reference's way is short
        some = _take(logits, rows)
        finite = torch.from_numpy(select(some, some, np.full(len(some), LOWEST)))
        kept = reference.apply_typical_p(finite.clone(), p[rows]) > -_INF
        least[rows] = finite.where(kept, _INF).amin(-1, keepdim=True)
        most[rows] = finite.where(kept, -_INF).amax(-1, keepdim=True)
    _ban_below(logits, least)
    for row, largest, bound in zip(logits.numpy(), logits.amax(-1).tolist(), most[:, 0].tolist(), strict=True):
        if largest > bound:
            row[np.flatnonzero(row > bound)] = -np.inf
    return logits


def _take(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return logits if bool(mask.all()) else logits[mask]


def _ban_below(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; threshold [N, 1] float32; NaN bans nothing. torch's threshold takes a number and bans
    what equals it too, and is much faster than a mask."""
    numbers = torch.nextafter(threshold[:, 0], torch.tensor(-_INF)).tolist()
    for start in range(0, logits.shape[1], _PIECE):
        for row, number in zip(logits[:, start : start + _PIECE].unbind(), numbers, strict=True):
            if number > -_INF:
                torch.threshold_(row, number, -_INF)
    return logits
