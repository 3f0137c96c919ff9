"""Attention by the one op that serves any mix of rows, straight from the block tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from workerkit.components.attention.cache import read_kv, write_kv
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend


def attend_paged(kernels: Kernels, batch: InputBatch, tables: BatchTables, caches: KVCaches) -> Attend:
    """Keys and values are written, then `paged_attention` over all rows; they read tensors of batch and tables only."""

    def attend(
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group = caches.group_of_layer[layer.index]
        write_kv(kernels, layer, key, value, caches, tables.slot_mappings[group])
        key_cache, value_cache, table = read_kv(kernels, layer, caches, tables.block_tables[group], query.dtype)
        return kernels.paged_attention(
            query,
            key_cache,
            value_cache,
            table,
            batch.query_start_loc,
            batch.seq_lens,
            layer.scale,
            layer.sliding_window,
            sinks,
            layer.softcap,
        )

    return attend


def unserved(kernels: Kernels, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> list[str]:
    """Names of the layers for whose heads `paged_attention` does not work: it says so when it is given a token of
    them, on the CPU."""
    one, starts = torch.ones(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)

    @cache
    def works(heads: int, kv_heads: int, dim: int, value_dim: int, has_sinks: bool, softcap: float | None) -> bool:
        query, keys = torch.zeros(1, heads, dim, dtype=dtype), torch.zeros(2, 1, kv_heads, dim, dtype=dtype)
        values, sinks = keys[..., :value_dim], torch.zeros(heads, dtype=dtype) if has_sinks else None
        try:
            kernels.paged_attention(query, keys, values, one[:, None], starts, one, 1.0, None, sinks, softcap)
        except NotImplementedError:
            return False
        return True

    return [
        layer.name
        for layer in layers
        if not works(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.has_sinks, layer.softcap
        )
    ]
