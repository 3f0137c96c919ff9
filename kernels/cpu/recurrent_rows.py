"""How recurrences over ragged rows are cut into pieces that are computed at once."""

from __future__ import annotations

import torch

CHUNK = 64  # tokens of a long row that are computed at once
STATE_NUMBERS = 2**18  # of rows that are computed at once: their states stay in the CPU's cache
_SHORT = 8  # tokens from which on a row is cheaper in chunks


def short_and_long(token_states: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    """Rows to go step by step, since they are short or since states within them are kept, and rows to go in chunks;
    the longest of each first. token_states [T]; lens, starts [R] int64."""
    rows = torch.arange(len(lens), device=lens.device)
    if len(token_states) == len(lens):
        return [rows, rows[:0]]
    is_kept = token_states >= 0
    is_kept[starts + lens - 1] = False
    is_short = lens < _SHORT
    is_short[torch.repeat_interleave(rows, lens)[is_kept]] = True
    order = torch.argsort(lens, descending=True, stable=True)
    return [order[is_short[order]], order[~is_short[order]]]


def rows_of(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[places], of any shape, copied row by row."""
    return x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:])


def keep(states: torch.Tensor, places: torch.Tensor, state: torch.Tensor) -> None:
    """Rows of state [n, ...] go to these places of states, -1: nowhere."""
    kept = (places >= 0).nonzero().squeeze(1)
    if len(kept) < len(places):
        places, state = places[kept], rows_of(state, kept)
    states.index_copy_(0, places, state)
