"""The one place where we register with transformers: an attention function that hands over to the step's `attend`.

The function keeps nothing of any worker: what it needs comes with each call of a model's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAME = "workerkit"  # of the attention implementation
ARGUMENT = "workerkit_attend"  # keyword of a model's forward, passed on to each attention layer

# (attention module, query [T, Nq, D], key [T, Nk, D], value likewise, the model's own keywords) -> [T, Nq, D]
Handover = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]


def register() -> None:
    """Idempotent. transformers makes no mask for an implementation whose masks it does not know."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] each -> [1, T, heads, D]."""
    handover: Handover = keywords.pop(ARGUMENT)
    keywords["attention_mask"] = attention_mask
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return handover(module, query, key, value, keywords).unsqueeze(0), None
