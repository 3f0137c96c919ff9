"""Attention by the one op that serves any mix of rows: slow, and right on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workerkit.components.attention.heads import check_heads
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend


class ReferenceAttention(AttentionBackend):
    """`reshape_and_cache`, then `paged_attention` over all rows."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        check_heads(layers)

    def build(self, batch: InputBatch, tables: BatchTables, caches: KVCaches, extras: Mapping[str, Any]) -> Attend:
        def attend(layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            group = caches.group_of_layer[layer.index]
            key_cache, value_cache = caches.keys[layer.index], caches.values[layer.index]
            self._kernels.reshape_and_cache(key, value, key_cache, value_cache, tables.slot_mappings[group])
            return self._kernels.paged_attention(
                query,
                key_cache,
                value_cache,
                tables.block_tables[group],
                batch.query_start_loc,
                batch.seq_lens,
                layer.scale,
                layer.sliding_window,
            )

        return attend
