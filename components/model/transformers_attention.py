"""The one place where we register with transformers: an attention function that hands over to the step's `attend`.

The function keeps nothing of any worker: what it hands over to is known for the time of a model's forward, in the thread
that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import pad

NAME = "workerkit"  # of the attention implementation

# (attention module, query [T, Nq, D], key [T, Nk, D], value likewise, the model's own keywords) -> [T, Nq, D]
Handover = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]

_handover: ContextVar[Handover] = ContextVar("workerkit_handover")


def register() -> None:
    """Idempotent. transformers makes no mask for an implementation whose masks it does not know."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


@contextmanager
def handing_over(handover: Handover) -> Iterator[None]:
    """What the attention layers of a model that runs meanwhile call."""
    token = _handover.set(handover)
    try:
        yield
    finally:
        _handover.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] each, values of another size perhaps, Dv -> [1, T, heads, Dv]. All that is handed over has the
    larger of both sizes: elements of 0 change neither scores nor other elements."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    if keywords.get("scaling") is None:
        keywords["scaling"] = dim**-0.5
    keywords["attention_mask"] = attention_mask
    query, key, value = (
        pad(part[0].transpose(0, 1), (0, max(dim, value_dim) - part.shape[-1])).contiguous()
        for part in (query, key, value)
    )
    return _handover.get()(module, query, key, value, keywords)[None, ..., :value_dim], None
