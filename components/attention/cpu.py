"""Attention on a CPU: by the op for any mix of rows if there is a fast one, else all rows with one query in one call
and the others one by one, planned once a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from workerkit.components.attention.cache import read_kv, write_kv
from workerkit.components.attention.heads import check_heads
from workerkit.components.attention.paged import attend_paged, unserved
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend
from workerkit.framework.interfaces.sections import CacheSection

_log = logging.getLogger(__name__)
_NO_CHOICES = CacheSection()


@attrs.frozen(kw_only=True, eq=False)
class _Decodes:
    """The rows with one query."""

    tokens: slice | torch.Tensor  # where their tokens are: a slice when they lead the batch, as they should
    block_table: torch.Tensor  # [B, W] int64, only columns with keys that some row sees
    mask: torch.Tensor  # [B, W * b] bool


@attrs.frozen(kw_only=True, eq=False)
class _Prefill:
    """One row with several queries."""

    tokens: slice
    block_ids: torch.Tensor  # [W] int64
    seq_len: int


@attrs.frozen(eq=False)
class _GroupPlan:
    slots: torch.Tensor  # [num_tokens] int64
    decodes: _Decodes | None
    prefills: tuple[_Prefill, ...]


class CpuAttention(AttentionBackend):
    """`paged_attention` if its library comes before that of `decode_attention` and serves all layers, none of them
    quantised; then graphs may hold it.

    Otherwise `decode_attention` and `prefill_attention` over a plan for each KV-cache group, which reads
    `batch.seq_lens` on the host: on a CPU that is the exact length, and waits for nothing.
    """

    reads_quantized = True

    def __init__(self, kernels: Kernels, cache: CacheSection = _NO_CHOICES) -> None:
        self._kernels = kernels
        self._quantization = cache.quantization
        self._may_be_paged = kernels.rank("paged_attention") < kernels.rank("decode_attention")
        self._is_paged = False  # until layers are known, of target and draft

    def prepare(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        check_heads(layers)
        quantized = [layer.name for layer in layers if self._quantization.of(layer) != "none"]
        if quantized and self._may_be_paged:
            _log.info(
                "attention is planned on the host, for %d layers are quantised: no graph holds it", len(quantized)
            )
            self._may_be_paged = False
        self._may_be_paged = self._is_paged = self._may_be_paged and not unserved(self._kernels, layers, dtype)
        self.graph_support = "always" if self._is_paged else "never"

    def build(self, batch: InputBatch, tables: BatchTables, caches: KVCaches, extras: Mapping[str, Any]) -> Attend:
        kernels = self._kernels
        if self._is_paged:
            return attend_paged(kernels, batch, tables, caches)
        num_tokens, padded = batch.num_tokens, batch.num_tokens_padded > batch.num_tokens
        plans = [
            _plan(batch, table, slots, caches.layout.kernel_block_size, group.spec.sliding_window)
            for table, slots, group in zip(tables.block_tables, tables.slot_mappings, caches.layout.groups, strict=True)
        ]
        plan_of_layer = [plans[group] for group in caches.group_of_layer]

        def attend(
            layer: AttentionLayer,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            plan = plan_of_layer[layer.index]
            if padded:
                key, value = key[:num_tokens], value[:num_tokens]
            write_kv(kernels, layer, key, value, caches, plan.slots)
            decodes = plan.decodes
            if decodes is not None:
                key_cache, value_cache, table = read_kv(kernels, layer, caches, decodes.block_table, query.dtype)
                decoded = kernels.decode_attention(
                    query[decodes.tokens],
                    key_cache,
                    value_cache,
                    table,
                    decodes.mask,
                    layer.scale,
                    sinks,
                    layer.softcap,
                )
                if decoded.shape[0] == query.shape[0]:
                    return decoded
            allocate = query.new_zeros if padded else query.new_empty
            output = allocate((*query.shape[:2], layer.value_dim))
            if decodes is not None:
                output[decodes.tokens] = decoded
            for row in plan.prefills:
                key_cache, value_cache, block_ids = read_kv(kernels, layer, caches, row.block_ids, query.dtype)
                output[row.tokens] = kernels.prefill_attention(
                    query[row.tokens],
                    key_cache,
                    value_cache,
                    block_ids,
                    row.seq_len,
                    layer.scale,
                    layer.sliding_window,
                    sinks,
                    layer.softcap,
                )
            return output

        return attend


def _plan(
    batch: InputBatch, block_table: torch.Tensor, slots: torch.Tensor, block_size: int, sliding_window: int | None
) -> _GroupPlan:
    starts = batch.query_start_loc_np
    num_reqs = batch.num_reqs
    slots = slots[: batch.num_tokens].long()
    if batch.max_query_len == 1:
        everything = slice(0, num_reqs)
        columns, mask = _seen(block_table[:num_reqs], batch.seq_lens[:num_reqs], block_size, sliding_window)
        return _GroupPlan(slots, _Decodes(tokens=everything, block_table=columns, mask=mask), ())
    query_lens = np.diff(starts[: num_reqs + 1])
    decode_rows = np.flatnonzero(query_lens == 1)
    decodes = None
    if len(decode_rows):
        leading = decode_rows[-1] == len(decode_rows) - 1
        rows = slice(0, len(decode_rows)) if leading else torch.from_numpy(decode_rows)
        tokens = rows if leading else torch.from_numpy(starts[decode_rows].astype(np.int64))
        columns, mask = _seen(block_table[rows], batch.seq_lens[rows], block_size, sliding_window)
        decodes = _Decodes(tokens=tokens, block_table=columns, mask=mask)
    seq_lens = batch.seq_lens[:num_reqs].tolist()
    prefills = tuple(
        _Prefill(
            tokens=slice(int(starts[row]), int(starts[row + 1])),
            block_ids=block_table[row, : -(-seq_lens[row] // block_size)].long(),
            seq_len=seq_lens[row],
        )
        for row in np.flatnonzero(query_lens > 1)
    )
    return _GroupPlan(slots, decodes, prefills)


def _seen(
    block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of each row that hold keys its last position sees, [B, W] int64, and which keys it sees, [B, W * b].

    W is the largest number of columns that a row needs; with a sliding window each row starts at its own column.
    """
    if sliding_window is None:
        width = -(-int(seq_lens.max()) // block_size)
        return block_table[:, :width].long(), torch.arange(width * block_size) < seq_lens[:, None]
    last = (seq_lens - 1).clamp(min=0)
    first = (last - sliding_window + 1).clamp(min=0)
    first_column = first // block_size
    width = int((last // block_size - first_column).max()) + 1
    columns = first_column[:, None] + torch.arange(width)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
    mask = (positions >= first[:, None]) & (positions < seq_lens[:, None])
    return block_table.long().gather(1, columns.clamp(max=block_table.shape[1] - 1)), mask
