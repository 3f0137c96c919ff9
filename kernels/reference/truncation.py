"""Truncation: which tokens stay possible. Every rule computes in float64 from the float32 logits, and rounds what it
compares logits with to float32, so that two implementations agree on which tokens stay."""

from __future__ import annotations

import torch


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; min_p [N] float32 in 0..1: probabilities below min_p times the largest become 0."""
    return ban_below(logits, min_p_threshold(logits, min_p))


def min_p_threshold(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that `apply_min_p` keeps in each row, [N, 1]."""
    return (logits.amax(-1).double() + min_p.double().log()).float()[:, None]


def apply_top_n_sigma(logits: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; n [N] float32: logits below max - n * sigma become -inf, sigma being the (population)
    standard deviation of the row's finite logits."""
    exact = logits.double()
    finite = exact.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    mean = exact.where(finite, 0.0).sum(-1, keepdim=True) / count
    variance = (exact - mean).square().where(finite, 0.0).sum(-1, keepdim=True) / count
    threshold = exact.amax(-1, keepdim=True) - n[:, None].double() * variance.sqrt()
    return ban_below(logits, threshold.float())


def apply_top_k_top_p_npu(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """float32 [N, V], in place; k [N] int (0 or V: off), p [N] float32 (1: off). Top-k keeps every logit tied with the
    k-th; top-p then works on the renormalised rest and keeps the smallest set whose mass reaches p, at least one token;
    tokens tied with the last one kept are kept. Others become -inf."""
    descending = logits.sort(dim=-1, descending=True).values
    return ban_below(logits, top_k_top_p_threshold(descending, logits.shape[-1], k, p))


def top_k_top_p_threshold(
    descending: torch.Tensor, vocab_size: int, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """The smallest logit that `apply_top_k_top_p_npu` keeps in each row, [N, 1]; -inf in a row that uses neither.

    `descending` [N, M] holds the largest logits of each row in order; M < vocab_size serves when every row uses top-k,
    and what it keeps lies within M.
    """
    threshold = torch.full_like(descending[:, :1], float("-inf"))
    if k is not None:
        k = k.long()[:, None]
        on = (k > 0) & (k < vocab_size)
        threshold = torch.where(on, descending.gather(-1, torch.where(on, k - 1, 0)), threshold)
    if p is not None:
        p = p[:, None]
        weights = (descending.double() - descending[:, :1].double()).exp().masked_fill(descending < threshold, 0.0)
        mass = weights.cumsum(-1)
        last = (mass < p.double() * mass[:, -1:]).sum(-1, keepdim=True)  # the first token with which the mass reaches p
        threshold = torch.where(p < 1, torch.maximum(descending.gather(-1, last), threshold), threshold)
    return threshold


def apply_typical_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; p [N] float32 in (0, 1), 1: off. Keeps the smallest set of tokens whose surprise is
    closest to the distribution's entropy and whose mass reaches p, at least one; tokens as close as the last one kept
    are kept. Others become -inf."""
    logprobs = logits.double().log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nansum(-1, keepdim=True)  # NaN: 0 times the -inf of a banned token
    distance = (-logprobs - entropy).abs().float()  # tokens on both sides of the entropy may be equally close
    nearest, order = distance.sort(-1)
    mass = probs.gather(-1, order).cumsum(-1)
    goal = p[:, None].double() * mass[:, -1:]
    last = nearest.gather(-1, (mass < goal).sum(-1, keepdim=True))
    return logits.masked_fill_((distance > last) & (p[:, None] < 1), float("-inf"))


def ban_below(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """float32 [N, V], in place; threshold [N, 1] float32. NaN on either side bans nothing."""
    return logits.masked_fill_(logits < threshold, float("-inf"))
