"""Attention on any device by torch's own kernels: blocks are gathered, rows of equal length make one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
import torch

from workerkit.components.attention.heads import check_heads
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor, GraphTasks
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend


@attrs.frozen(kw_only=True, eq=False)
class _Rows:
    """Neighbouring rows with `query_len` queries each, for one KV-cache group."""

    tokens: slice
    query_len: int  # Q
    block_table: torch.Tensor  # [R, W] int64
    seen: torch.Tensor  # [R, Q, W * b] bool: the keys that a query sees; never none


class SdpaAttention(AttentionBackend):
    """`scaled_dot_product_attention` for each run of rows of equal length; nothing is read on the host.

    Graphs may hold a batch of rows of one length, for which all columns of the block tables are gathered: what a
    replay needs of them is not known when it is captured.
    """

    graph_support = "uniform"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        check_heads(layers)

    def build(self, batch: InputBatch, tables: BatchTables, caches: KVCaches, extras: Mapping[str, Any]) -> Attend:
        block_size = caches.layout.kernel_block_size
        lens, upper = batch.plan.num_scheduled_tokens.tolist(), batch.host_seq_lens.upper_bound
        runs: list[tuple[slice, int, int]] = []  # rows, their length, columns that they need
        for length, group in groupby(range(batch.num_reqs), key=lens.__getitem__):
            members = list(group)
            rows = slice(members[0], members[-1] + 1)
            runs.append((rows, length, -(-int(upper[rows].max()) // block_size)))
        starts = batch.query_start_loc_np
        plans = [
            [
                _rows(
                    slice(int(starts[rows.start]), int(starts[rows.stop])),
                    length,
                    table[rows, :width],
                    batch.seq_lens[rows],
                    block_size,
                    group.spec.sliding_window,
                )
                for rows, length, width in runs
            ]
            for table, group in zip(tables.block_tables, caches.layout.groups, strict=True)
        ]

        def attend(
            layer: AttentionLayer,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            self._write(layer, key, value, tables, caches)
            plan = plans[caches.group_of_layer[layer.index]]
            if len(plan) == 1 and batch.num_tokens == len(query):
                return _attend(layer, query, plan[0], caches)
            output = torch.zeros_like(query)  # padding has to be finite
            for rows in plan:
                output[rows.tokens] = _attend(layer, query[rows.tokens], rows, caches)
            return output

        return attend

    def build_captured(
        self,
        batch: InputBatch,
        tables: BatchTables,
        caches: KVCaches,
        extras: Mapping[str, Any],
        desc: BatchDescriptor,
        tasks: GraphTasks,
    ) -> Attend:
        length, groups = desc.uniform_query_len, caches.layout.groups
        assert length is not None, "graph_support says so"
        everything = slice(0, desc.num_tokens)
        plans: dict[int, _Rows] = {}

        def attend(
            layer: AttentionLayer,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            self._write(layer, key, value, tables, caches)
            number = caches.group_of_layer[layer.index]
            group = groups[number]
            if layer.index == group.layers[0]:  # within the graph, once a forward: lengths differ with each replay
                plans[number] = _rows(
                    everything,
                    length,
                    tables.block_tables[number],
                    batch.seq_lens,
                    caches.layout.kernel_block_size,
                    group.spec.sliding_window,
                )
            return _attend(layer, query, plans[number], caches)

        return attend

    def _write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, tables: BatchTables, caches: KVCaches
    ) -> None:
        slots = tables.slot_mappings[caches.group_of_layer[layer.index]]
        self._kernels.reshape_and_cache(key, value, caches.keys[layer.index], caches.values[layer.index], slots)


def _rows(
    tokens: slice,
    query_len: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    sliding_window: int | None,
) -> _Rows:
    """Rows whose queries are the last ones of their sequences. block_table [R, W]; seq_lens [R], 0 for padding."""
    device = block_table.device
    queries = (seq_lens[:, None] - query_len) + torch.arange(query_len, device=device)  # [R, Q], < 0 for padding
    keys = torch.arange(block_table.shape[1] * block_size, device=device)
    # Who would see nothing sees the first key: a softmax over nothing is not a number.
    seen = keys <= queries.clamp(min=0)[:, :, None]
    if sliding_window is not None:
        seen &= keys > (queries - sliding_window)[:, :, None]
    return _Rows(tokens=tokens, query_len=query_len, block_table=block_table.long(), seen=seen)


def _attend(layer: AttentionLayer, query: torch.Tensor, rows: _Rows, caches: KVCaches) -> torch.Tensor:
    """query [R * Q, Nq, D] -> the same. Query heads of one key head become queries of it: G times as many."""
    table, length = rows.block_table, rows.query_len
    num_rows, num_kv_heads, head_dim = len(table), layer.num_kv_heads, layer.head_dim
    group = layer.num_heads // num_kv_heads
    keys, values = (cache[layer.index][table].flatten(1, 2).transpose(1, 2) for cache in (caches.keys, caches.values))
    queries = query.view(num_rows, length, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = rows.seen[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)  # [R, 1, G * Q, S]
    output = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=layer.scale)
    output = output.reshape(num_rows, num_kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows * length, layer.num_heads, head_dim)
