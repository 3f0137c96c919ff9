"""Penalties for tokens of the text, and bad words: what a text holds already changes what may come next."""

from __future__ import annotations

import torch


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
    used = token_ids >= 0
    columns = token_ids.clamp(min=0)
    generated = used & (torch.arange(token_ids.shape[1], device=logits.device) >= prompt_lens[:, None])
    in_text = torch.zeros_like(logits).scatter_add_(1, columns, used.float()) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, columns, generated.float())
    repetition = repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(in_text, repeated, logits) - frequency[:, None] * counts
    return logits.copy_(penalised - presence[:, None] * (counts > 0))


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
    width = recent.shape[1]
    texts = recent.tolist()
    for row, (tokens, numbers, distances) in enumerate(
        zip(word_token_ids.tolist(), word_numbers.tolist(), word_distances.tolist(), strict=True)
    ):
        words: dict[int, dict[int, int]] = {}
        for token, number, distance in zip(tokens, numbers, distances, strict=True):
            if token >= 0:
                words.setdefault(number, {})[distance] = token
        for word in words.values():
            last = word.pop(0)
            if all(distance <= width and texts[row][-distance] == token for distance, token in word.items()):
                logits[row, last] = float("-inf")
    return logits
