"""The one place where we register with transformers: an attention function that hands over to the step's `attend`.

Models that call torch's own function instead hand over what they call it with, the mask included: it may say ALiBi.
Nothing is kept of any worker: what is handed over to is known for the time of a model's forward, in the thread that
runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from workerkit.framework.errors import UnsupportedError

NAME = "workerkit"  # of the attention implementation
TORCH = "sdpa"  # of the one that calls torch's own function

# (attention module, None where torch's function was called; query [T, Nq, D], key [T, Nk, D], value [T, Nk, Dv], the
# model's own keywords) -> [T, Nq, Dv]
Handover = Callable[[torch.nn.Module | None, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]

_handover: ContextVar[Handover] = ContextVar("workerkit_handover")


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
    """[1, heads, T, D] each, of values Dv -> [1, T, heads, Dv]."""
    return _hand_over(module, query, key, value, {**keywords, "attention_mask": attention_mask})[None], None


class _TorchAttention(TorchFunctionMode):
    """In the place of torch's function of attention."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = _torch_attention if func is scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


def _torch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[1, heads, T, D] each, of values Dv -> [1, heads, T, Dv]."""
    keywords = {"dropout": dropout_p, "scaling": scale, "mask": attn_mask}
    keywords["is_causal"] = is_causal or attn_mask is not None
    return _hand_over(None, query, key, value, keywords).transpose(0, 1)[None]


def _hand_over(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keywords: dict[str, Any],
) -> torch.Tensor:
    if keywords.get("scaling") is None:
        keywords["scaling"] = query.shape[-1] ** -0.5
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return _handover.get()(module, query, key, value, keywords)


def run(model: Any, tokens: dict[str, torch.Tensor], positions: torch.Tensor, handover: Handover, kind: str) -> Any:
    """What the body of a model of that implementation, NAME or TORCH, returns for one row of tokens, positions [1, T].
    Masks for torch's function are made of a mask that hides nobody, else transformers would look for several texts."""
    masks = {}
    if kind == TORCH:
        masks["attention_mask"] = torch.ones(positions.shape, dtype=torch.long, device=positions.device)
    token = _handover.set(handover)
    try:
        with _TorchAttention() if kind == TORCH else nullcontext():
            return model.base_model(**tokens, **masks, position_ids=positions, use_cache=False)
    finally:
        _handover.reset(token)


ALIBI_DIMS = 2  # what `with_alibi` adds to a head


def with_alibi(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, Nq, D], key [T, Nk, D], positions [T], slopes [Nq] -> the same with two elements more, whose product is
    slope * position: ALiBi but for what is the same for all keys of a query, which a softmax does not see.

    A position is two numbers below 256, times 256 and times 1, that bfloat16 holds exactly up to 65535."""
    parts = torch.stack((positions // 256, positions % 256), dim=-1).to(key.dtype)
    units = torch.stack((256 * slopes, slopes), dim=-1).to(query.dtype)
    return (
        torch.cat((query, units.expand(len(query), -1, -1)), dim=-1),
        torch.cat((key, parts[:, None].expand(-1, key.shape[1], -1)), dim=-1),
    )


def read_slopes(model: Any, device: torch.device) -> list[torch.Tensor]:
    """For each call of torch's function in a forward, slopes [heads] of ALiBi, 0 where a mask says no more than
    who is seen. Raises UnsupportedError for a mask that says something else."""
    slopes: list[torch.Tensor] = []
    ids = torch.arange(4, device=device)[None]
    causal = torch.ones(4, 4, dtype=torch.bool, device=device).tril()

    def read(_: Any, query: torch.Tensor, __: Any, value: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        mask = keywords["mask"]
        if mask is None or mask.dtype == torch.bool:
            seen, bias = causal if mask is None else mask, query.new_zeros(1, 1, 4, 4)
        else:
            seen, bias = mask > torch.finfo(mask.dtype).min / 2, mask
        steps = bias[0].diff(dim=-1).float()  # [heads, 4, 3]
        slope = steps[:, -1, 0]
        wrong = ((steps - slope[:, None, None]).abs() > 0.02 * slope[:, None, None].abs()) & causal[:, 1:]
        if (seen != causal).any() or wrong.any():
            raise UnsupportedError("a mask of attention that says more than causality and ALiBi")
        slopes.append(slope.expand(query.shape[1]))
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    with torch.no_grad():
        run(model, {"input_ids": ids}, ids, read, TORCH)
    return slopes
