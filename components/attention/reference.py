"""Attention by the one op that serves any mix of rows: slow, and right on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workerkit.components.attention.heads import check_heads
from workerkit.components.attention.paged import attend_paged, unserved
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend


class ReferenceAttention(AttentionBackend):
    """Keys and values are written, then `paged_attention` over all rows."""

    reads_quantized = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        check_heads(layers)
        if names := unserved(self._kernels, layers, dtype):
            library = self._kernels.bindings["paged_attention"]
            raise UnsupportedError(
                f"components.attention: paged_attention of kernel library {library!r} does not serve {names[0]} and "
                f"{len(names) - 1} others; right would be attention: cpu, or kernels: [reference]"
            )

    def build(self, batch: InputBatch, tables: BatchTables, caches: KVCaches, extras: Mapping[str, Any]) -> Attend:
        return attend_paged(self._kernels, batch, tables, caches)
