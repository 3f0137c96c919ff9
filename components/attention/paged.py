"""Attention by the one op that serves any mix of rows, straight from the block tables."""

from __future__ import annotations

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
