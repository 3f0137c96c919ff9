"""Attention by the one op that serves any mix of rows, straight from the block tables."""

from __future__ import annotations

import torch

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend


def attend_paged(kernels: Kernels, batch: InputBatch, tables: BatchTables, caches: KVCaches) -> Attend:
    """`reshape_and_cache`, then `paged_attention` over all rows; they read tensors of batch and tables only."""

    def attend(
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group = caches.group_of_layer[layer.index]
        key_cache, value_cache = caches.keys[layer.index], caches.values[layer.index]
        kernels.reshape_and_cache(key, value, key_cache, value_cache, tables.slot_mappings[group])
        return kernels.paged_attention(
            query,
            key_cache,
            value_cache,
            tables.block_tables[group],
            batch.query_start_loc,
            batch.seq_lens,
            layer.scale,
            layer.sliding_window,
            sinks,
        )

    return attend
