"""Attention over the paged cache: blocks gathered whole, then torch's flash kernel with the heads of a group folded."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def _gather(cache: torch.Tensor, block_table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cache [blocks, b, Nk, D], block_table [B, W] -> [B, Nk, W * b, D]."""
    rows = cache.index_select(0, block_table.flatten())
    return rows.view(block_table.shape[0], -1, *cache.shape[2:]).transpose(1, 2).to(dtype)


def _widened(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [T, Nq, D], keys [..., S, D], values [..., S, Dv] -> the same, all of one width, without which torch does
    not use its flash kernel. With sinks there is one more key, last, of value 0: an element that is 1 there and 0 in
    other keys makes its score the head's sink."""
    dim, more = query.shape[-1], int(sinks is not None)
    width = max(dim + more, values.shape[-1])

    def widened(tensor: torch.Tensor, more: int) -> torch.Tensor:
        missing = width - tensor.shape[-1]
        return pad(tensor, (0, missing, 0, more)) if missing or more else tensor

    query, keys, values = widened(query, 0), widened(keys, more), widened(values, more)
    if sinks is not None:
        query[..., dim] = sinks / scale
        keys[..., -1, dim] = 1
    return query, keys, values


def _soft_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
    num_keys: int,
) -> torch.Tensor:
    """query [..., Q, D], keys [..., S, D], values [..., S, Dv], seen [..., Q, S] -> [..., Q, Dv]. torch's kernel has no
    soft cap, so scores are made here, in float32; those of keys behind num_keys are sinks, which are not capped."""
    scores = torch.matmul(query.float() * scale, keys.float().transpose(-1, -2))
    scores[..., :num_keys].div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(~seen, float("-inf"))
    probs = torch.softmax(scores, dim=-1).masked_fill_(~seen.any(-1, keepdim=True), 0.0)
    return torch.matmul(probs, values.float()).to(query.dtype)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One query a row. query [B, Nq, D]; block_table [B, W]; mask [B, W * b] bool, True for keys seen; sinks [Nq].

    The query heads of a group become rows of one small matrix, so a key is read once a group, not once a head.
    """
    keys = _gather(key_cache, block_table, query.dtype)
    values = _gather(value_cache, block_table, query.dtype)
    query, keys, values = _widened(query, keys, values, scale, sinks)
    if sinks is not None:
        mask = pad(mask, (0, 1), value=True)
    folded, seen = query.view(query.shape[0], keys.shape[1], -1, query.shape[2]), mask[:, None, None, :]
    if softcap is None:
        output = scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=scale)
    else:
        num_keys = keys.shape[2] - int(sinks is not None)
        output = _soft_capped(folded, keys, values, seen, scale, softcap, num_keys)
    return output.reshape(query.shape)[..., : value_cache.shape[-1]]


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One request. query [Q, Nq, D], the last Q positions of seq_len; block_ids [W], W * b >= seq_len; sinks [Nq]."""
    num_queries, num_heads = query.shape[:2]
    block_size, num_kv_heads = key_cache.shape[1:3]
    first_query = seq_len - num_queries
    first_key = 0
    if sliding_window is not None and first_query >= sliding_window:
        first_key = (
            (first_query - sliding_window + 1) // block_size * block_size
        )  # blocks that no query sees are left out
    blocks = block_ids[None, first_key // block_size : -(-seq_len // block_size)]
    # The groups are the batch and a group's keys are repeated by a stride of 0: nothing is copied, and causality holds.
    group = num_heads // num_kv_heads
    keys, values = (
        _gather(cache, blocks, query.dtype)[0, :, None, : seq_len - first_key] for cache in (key_cache, value_cache)
    )
    query, keys, values = _widened(query, keys, values, scale, sinks)
    folded = query.transpose(0, 1).view(num_kv_heads, group, num_queries, -1)
    plain = softcap is None and (sliding_window is None or sliding_window >= seq_len)
    wide_keys, wide_values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
    if num_queries == 1 and plain:
        output = scaled_dot_product_attention(folded, wide_keys, wide_values, scale=scale)
    elif num_queries == seq_len and plain and sinks is None:
        output = scaled_dot_product_attention(folded, wide_keys, wide_values, is_causal=True, scale=scale)
    else:
        positions = torch.arange(first_key, seq_len, device=query.device)
        queries = positions[first_query - first_key :, None]
        mask = positions <= queries
        if sliding_window is not None:
            mask &= positions > queries - sliding_window
        if sinks is not None:
            mask = pad(mask, (0, 1), value=True)
        if softcap is None:
            output = scaled_dot_product_attention(folded, wide_keys, wide_values, attn_mask=mask, scale=scale)
        else:  # the queries of a group's heads are rows of one matrix here: keys that are repeated would be copied
            folded, mask, num_keys = folded.flatten(1, 2), mask.repeat(group, 1), seq_len - first_key
            output = _soft_capped(folded, keys[:, 0], values[:, 0], mask, scale, softcap, num_keys)
    return output.view(num_heads, num_queries, -1).transpose(0, 1)[..., : value_cache.shape[-1]]
