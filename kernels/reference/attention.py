"""Attention over the paged cache: softmax(scale * q k^T) v in float32, query heads sharing key heads in groups.

With a soft cap c a score s is c * tanh(s / c) (Gemma 2, 2024).
"""

from __future__ import annotations

import torch


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """query [Q, Nq, D], keys [S, Nk, D], values [S, Nk, Dv], seen [Q, S], sinks [Nq] -> [Q, Nq, Dv]; a query that sees
    nothing yields 0."""
    group = query.shape[1] // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(group, dim=1)
    wide_values = values.float().repeat_interleave(group, dim=1)
    wide_values = wide_values.masked_fill(~seen.any(0)[:, None, None], 0.0)  # NaN, perhaps: of another owner
    scores = torch.einsum("qnd,snd->nqs", query.float(), wide_keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    if sinks is not None:  # one more logit of each head, which stands for no value
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., : len(keys)].masked_fill(blind, 0.0)
    return torch.einsum("nqs,snd->qnd", probs, wide_values).to(query.dtype)


def _seen(num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """[num_queries, seq_len] bool for the last `num_queries` positions of a sequence."""
    queries = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    seen = keys <= queries
    if sliding_window is not None:
        seen &= keys > queries - sliding_window
    return seen


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
    first, block_size = 0, key_cache.shape[1]
    if sliding_window is not None:  # what lies in blocks that no query sees may be of another request, or no number
        first = max(0, seq_len - len(query) - sliding_window + 1) // block_size * block_size
    blocks = block_ids[first // block_size :].long()
    keys, values = (cache[blocks].flatten(0, 1)[: seq_len - first] for cache in (key_cache, value_cache))
    seen = _seen(query.shape[0], seq_len, sliding_window, query.device)[:, first:]
    return _attend(query, keys, values, seen, scale, sinks, softcap)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Any mix of rows. query [T, Nq, D]; caches [blocks, b, Nk, D or Dv]; block_table [R, W]; query_start_loc [R + 1];
    seq_lens [R], the queries of a row being the last positions of its sequence. Tokens of no row yield zeros."""
    output = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    starts = query_start_loc.tolist()
    for row, (start, end, seq_len) in enumerate(zip(starts[:-1], starts[1:], seq_lens.tolist(), strict=True)):
        if end > start:
            output[start:end] = prefill_attention(
                query[start:end],
                key_cache,
                value_cache,
                block_table[row],
                seq_len,
                scale,
                sliding_window,
                sinks,
                softcap,
            )
    return output


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
    """One query a row. query [B, Nq, D]; block_table [B, W]; mask [B, W * b] bool, True where a key is seen."""
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for row, block_ids in enumerate(block_table.long()):
        keys, values = key_cache[block_ids].flatten(0, 1), value_cache[block_ids].flatten(0, 1)
        own = slice(row, row + 1)
        output[own] = _attend(query[own], keys, values, mask[own], scale, sinks, softcap)
    return output
