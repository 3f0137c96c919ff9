"""Rows of a batch whose states lie anywhere, for ops of recurrent layers."""

import torch


def num_columns(lens, verify):
    """States that a slot has: as many as the longest row that verifies has tokens."""
    return max([1, *(lens[row] for row in verify)])


def place_rows(lens, verify, generator=None):
    """(initial, query_start_loc, token_states) of rows with so many tokens each, a slot for each in random order. Those
    in `verify` keep every token's state, of the others one in four keeps none."""
    width, total = num_columns(lens, verify), sum(lens)
    slots = torch.randperm(len(lens), generator=generator) * width
    initial = slots + torch.tensor([row % width for row in range(len(lens))])
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    token_states = torch.full((total,), -1)
    for row, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if row in verify:
            token_states[start:end] = slots[row] + torch.arange(end - start)
        elif row % 4 != 3:
            token_states[end - 1] = slots[row]
    return initial, starts, token_states
