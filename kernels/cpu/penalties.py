"""Penalties and bad words by the tokens of the text, not by the vocabulary; the same bits as the reference."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """float32 [N, V], in place. token_ids [N, W] int64: prompt, then output, -1 in unused columns; prompt_lens [N] says
    where the output begins; presence, frequency, repetition [N] float32. Every token of the text: divided by repetition
    if positive, else multiplied (Keskar et al., 2019, CTRL). Then, of output tokens only, minus frequency times the
    count and minus presence (OpenAI's definition)."""
    if token_ids.shape[1] == 0:
        return logits
    used = token_ids >= 0
    generated = used & (torch.arange(token_ids.shape[1]) >= prompt_lens[:, None])
    some = token_ids.amax(-1, keepdim=True)  # unused columns stand for it, so that they write what its own column does
    repetition = repetition.where(some[:, 0] >= 0, 1.0)[:, None]  # an empty text: nothing changes
    columns = torch.where(used, token_ids, some.clamp(min=0))
    before = logits.gather(1, columns)
    # The logits' own memory serves to count: nothing of the vocabulary's size is made, or read in full.
    logits.scatter_(1, columns, torch.zeros_like(before)).scatter_add_(1, columns, generated.float())
    counts = logits.gather(1, columns)
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    penalised = repeated - frequency[:, None] * counts
    return logits.scatter_(1, columns, penalised - presence[:, None] * (counts > 0))


def apply_bad_words(
    logits: torch.Tensor,
    recent: torch.Tensor,
    word_token_ids: torch.Tensor,
    word_numbers: torch.Tensor,
    word_distances: torch.Tensor,
) -> torch.Tensor:
    """float32 [N, V], in place. recent [N, P] int64: the latest P generated tokens, oldest first, -1 where there is
    none (prompt tokens are none). Words of a row lie one after another in B columns: word_token_ids [N, B] int64 with
    -1 unused, word_numbers [N, B] which word a token belongs to, counted from 0, word_distances [N, B] how many tokens
    of its word come after it (0 for the last). A word of one token is always banned."""
    width = recent.shape[1] + 1
    texts = F.pad(recent, (1, 0), value=-1)  # what lies before the window matches nothing
    there = texts.gather(1, (width - word_distances.long()).clamp(0, width - 1))
    numbers = word_numbers.long().clamp(min=0)
    used, last = word_token_ids >= 0, word_distances == 0
    missing = (used & ~last & (there != word_token_ids)).int()
    missing = torch.zeros_like(missing).scatter_add_(1, numbers, missing).gather(1, numbers)  # of the token's word
    banned = used & last & (missing == 0)
    logits.numpy()[banned.nonzero()[:, 0].numpy(), word_token_ids[banned].numpy()] = float("-inf")
    return logits
