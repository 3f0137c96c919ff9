"""Layers that carry a state from token to token instead of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import numpy as np
    import torch


@attrs.frozen(kw_only=True)
class StateSpec:
    """One tensor of a layer's state, of one sequence."""

    name: str  # "conv", "ssm"
    shape: tuple[int, ...]
    dtype: str  # name of a torch dtype


@attrs.frozen(kw_only=True)
class RecurrentLayer:
    """One recurrent layer as the model state sees it."""

    name: str  # "model.layers.3.linear_attn"
    index: int  # position among the network's recurrent layers
    states: tuple[StateSpec, ...]


@attrs.frozen(kw_only=True, eq=False)
class RecurrentBatch:
    """Where the states of a batch's rows lie, the same places for all layers. T is the unpadded number of tokens.

    A slot owns K + 1 rows of each state tensor. Row 0 of them holds the state behind a request's last token; after a
    row that verifies drafts, row j holds the state behind its j-th token, since nobody knows yet which of them stay.
    An op reads all of a row's initial state before it writes any: they may be the same. It writes to no other rows than
    `token_states` names.
    """

    states: tuple[tuple[torch.Tensor, ...], ...]  # [layer][state]: [S, *shape], S > max_num_reqs * (K + 1)
    initial: torch.Tensor  # [num_reqs] int64: where each row of the batch goes on from; zeros are there for a new one
    token_states: torch.Tensor  # [T] int64: row that takes the state behind this token, -1: nobody asks for it
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    query_start_loc_np: np.ndarray  # the same on the host
    is_verifying_np: np.ndarray  # [num_reqs] bool: every token's state is kept; else the last one's only
