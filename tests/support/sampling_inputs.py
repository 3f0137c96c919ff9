"""Random logits and arguments of the sampling ops, with what makes them hard: ties, banned tokens, odd sizes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

INF = float("inf")


@st.composite
def rows_of_logits(draw: st.DrawFn, max_rows: int = 40) -> tuple[torch.Tensor, torch.Generator]:
    """float32 [N, V]: rounded to a grid in some cases, with banned tokens in some; a view of a wider tensor in some."""
    rows = draw(st.integers(1, max_rows))
    vocab = draw(st.sampled_from([1, 5, 33, 100, 128, 129, 1000, 3001]))
    scale = draw(st.sampled_from([0.3, 2.0, 6.0]))
    grid = draw(st.sampled_from([None, None, 0.25, 2.0]))
    banned = draw(st.sampled_from([0.0, 0.1, 0.95, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wide = torch.randn(rows, vocab + draw(st.sampled_from([0, 7])), generator=generator) * scale + draw(
        st.sampled_from([0.0, -20.0])
    )
    logits = wide[:, :vocab]
    if grid is not None:
        logits.div_(grid).round_().mul_(grid)
    logits[torch.rand(logits.shape, generator=generator) < banned] = -INF
    return logits, generator


def arguments(name: str, rows: int, vocab: int, generator: torch.Generator) -> tuple[Any, ...]:
    """What an op takes after the logits."""

    def uniform() -> torch.Tensor:
        return torch.rand(rows, generator=generator)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    if name == "apply_penalties":
        width = int(integers(40, 1))
        few = 1 + int(integers(vocab, 1))  # duplicates
        texts = integers(few, rows, width)
        lengths = integers(width + 1, rows)
        texts[torch.arange(width) >= lengths[:, None]] = -1
        return texts, (uniform() * (lengths + 1)).long(), uniform() * 2 - 1, uniform() * 2 - 1, uniform() + 0.5
    if name == "apply_bad_words":
        few, width, words, longest = 1 + min(vocab - 1, 3), int(integers(5, 1)), int(integers(6, 1)), 4
        recent = integers(few, rows, width)
        recent[torch.arange(width) < integers(width + 1, rows)[:, None]] = -1
        columns = torch.full((3, rows, words * longest), -1)
        for row in range(rows):
            length = [1 + int(integers(longest, 1)) for _ in range(int(integers(words + 1, 1)))]
            at = 0
            for number, n in enumerate(length):
                columns[0, row, at : at + n] = integers(few, n)
                columns[1, row, at : at + n] = number
                columns[2, row, at : at + n] = torch.arange(n).flip(0)
                at += n
        return recent, *columns
    if name == "apply_min_p":
        return (torch.where(uniform() < 0.2, 0.0, uniform() ** 3),)
    if name == "apply_top_n_sigma":
        return (uniform() * 3,)
    if name == "apply_typical_p":
        return (torch.where(uniform() < 0.2, 1.0, uniform() * 0.98 + 0.01),)
    if name == "apply_top_k_top_p_npu":
        k = torch.where(uniform() < 0.5, 0, integers(vocab + 1, rows).clamp(max=60))
        p = torch.where(uniform() < 0.3, 1.0, uniform())
        kind = int(integers(3, 1))
        return (k, p) if kind == 0 else (k, None) if kind == 1 else (None, p)
    if name == "apply_grammar_bitmask":
        chosen = torch.randperm(rows, generator=generator)[: 1 + int(integers(rows, 1))]
        words = torch.randint(-(2**31), 2**31, (len(chosen), -(-vocab // 32)), generator=generator)
        return chosen, words.to(torch.int32)
    if name == "compute_token_logprobs":
        return (integers(vocab, rows, 20),)
    raise KeyError(name)
