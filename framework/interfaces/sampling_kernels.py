"""Signatures of the ops that make tokens of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class ApplyPenalties(Protocol):
    """Penalises tokens that are there already."""

    """float32 [N, V], in place. token_ids [N, W] int64: prompt, then output, -1 in unused columns; prompt_lens [N] says
    where the output begins; presence, frequency, repetition [N] float32. Every token of the text: divided by repetition
    if positive, else multiplied (Keskar et al., 2019, CTRL). Then, of output tokens only, minus frequency times the
    count and minus presence (OpenAI's definition)."""

    def __call__(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        prompt_lens: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> torch.Tensor: ...


class ApplyBadWords(Protocol):
    """Bans the last token of a word where the text ends with the others."""

    """float32 [N, V], in place. recent [N, P] int64: the latest P generated tokens, oldest first, -1 where there is
    none (prompt tokens are none). Words of a row lie one after another in B columns: word_token_ids [N, B] int64 with
    -1 unused, word_numbers [N, B] which word a token belongs to, counted from 0, word_distances [N, B] how many tokens
    of its word come after it (0 for the last). A word of one token is always banned."""

    def __call__(
        self,
        logits: torch.Tensor,
        recent: torch.Tensor,
        word_token_ids: torch.Tensor,
        word_numbers: torch.Tensor,
        word_distances: torch.Tensor,
    ) -> torch.Tensor: ...


class ApplyMinP(Protocol):
    """Bans tokens much less likely than the likeliest."""

    """float32 [N, V], in place; min_p [N] float32 in 0..1: probabilities below min_p times the largest become 0."""

    def __call__(self, logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor: ...


class ApplyTopNSigma(Protocol):
    """Bans logits far below the largest (Tang et al., 2024)."""

    """float32 [N, V], in place; n [N] float32: logits below max - n * sigma become -inf, sigma being the (population)
    standard deviation of the row's finite logits."""

    def __call__(self, logits: torch.Tensor, n: torch.Tensor) -> torch.Tensor: ...


class ApplyTypicalP(Protocol):
    """Locally typical sampling (Meister et al., 2022)."""

    """float32 [N, V], in place; p [N] float32 in (0, 1), 1: off. Keeps the smallest set of tokens whose surprise is
    closest to the distribution's entropy and whose mass reaches p, at least one; tokens as close as the last one kept
    are kept. Others become -inf."""

    def __call__(self, logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor: ...


class ApplyGrammarBitmask(Protocol):
    """Bans tokens by bits."""

    """float32 [N, V], in place; rows [M] int64: rows to mask; bitmask [M, ceil(V / 32)] int32: bit i % 32 of word
    i // 32 is token i; 0 -> -inf."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor: ...


class ComputeTokenLogprobs(Protocol):
    """Log-probabilities of some tokens."""

    """float32 [N, V], token_ids [N, C] int64 -> [N, C] float32: logit - logsumexp of the row; -inf for a banned one."""

    def __call__(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor: ...


class MostLikelyTokens(Protocol):
    """Tokens with the largest logits."""

    """float32 [N, V] -> ids [N, count] int64 in descending order of their logits, of equal ones the lowest id first."""

    def __call__(self, logits: torch.Tensor, count: int) -> torch.Tensor: ...


class ApplyTopKTopP(Protocol):
    """Truncates distributions."""

    """float32 [N, V], in place; k [N] int (0 or V: off), p [N] float32 (1: off). Top-k keeps every logit tied with the
    k-th; top-p then works on the renormalised rest and keeps the smallest set whose mass reaches p, at least one token;
    tokens tied with the last one kept are kept. Others become -inf."""

    def __call__(self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor: ...


class UniformFromSeed(Protocol):
    """Counter-based randomness."""

    """seeds, positions [N] int64 -> [N] float64 in (0, 1): a hash, so the same whatever else is in the batch.
    `stream` separates independent uses (0 sampling)."""

    def __call__(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor: ...


class GreedyTokens(Protocol):
    """The likeliest token of each row."""

    """float32 [N, V] -> [N] int64: the first of the largest logits; -1 where that is not a number, or infinite."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor: ...


class SampleTokens(Protocol):
    """One draw a row, from logits."""

    """float32 [N, V], uniform [N] float64 -> [N] int64: inverse CDF of the softmax; -1 where the largest logit is not a
    number, or infinite."""

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor: ...


class SampleFromProbs(Protocol):
    """One draw a row."""

    """Inverse CDF. probs [N, V] float32 (rows need not be normalised), uniform [N] -> [N] int64; never a token of
    probability 0."""

    def __call__(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor: ...


class ResidualProbs(Protocol):
    """What is left of the target's distribution where a draft was rejected."""

    """probs, draft_probs [N, V] float32, weights [N] in 0..1 -> [N, V] float32: max(weight * prob - draft_prob, 0), not
    normalised."""

    def __call__(self, probs: torch.Tensor, draft_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
