"""Attention on any device by torch's own kernels: blocks are gathered, rows of equal length make one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from workerkit.components.attention.cache import read_kv, write_kv
from workerkit.components.attention.heads import check_heads
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor, GraphTasks
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, AttentionLayer, BatchTables, KVCaches
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
    reads_quantized = True

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
                return self._attend(layer, query, plan[0], caches, sinks)
            output = query.new_zeros(*query.shape[:2], layer.value_dim)  # padding has to be finite
            for rows in plan:
                output[rows.tokens] = self._attend(layer, query[rows.tokens], rows, caches, sinks)
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
            return self._attend(layer, query, plans[number], caches, sinks)

        return attend

    def _write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, tables: BatchTables, caches: KVCaches
    ) -> None:
        slots = tables.slot_mappings[caches.group_of_layer[layer.index]]
        write_kv(self._kernels, layer, key, value, caches, slots)

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, rows: _Rows, caches: KVCaches, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        key_cache, value_cache, table = read_kv(self._kernels, layer, caches, rows.block_table, query.dtype)
        return _attend(layer, query, rows, table, key_cache, value_cache, sinks)


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
        # A block that no query of its row sees may belong to someone else by now, and NaN times 0 is NaN.
        ends = torch.arange(block_size, len(keys) + 1, block_size, device=device)
        block_table = block_table.masked_fill(ends <= queries[:, :1] - sliding_window + 1, NULL_BLOCK_ID)
    return _Rows(tokens=tokens, query_len=query_len, block_table=block_table.long(), seen=seen)


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    rows: _Rows,
    table: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [R * Q, Nq, D] -> [R * Q, Nq, Dv]. Query heads of one key head become queries of it: G times as many."""
    length, num_rows, num_kv_heads = rows.query_len, len(table), layer.num_kv_heads
    group = layer.num_heads // num_kv_heads
    keys, values = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
    seen = rows.seen
    if sinks is not None:
        # One more key, which all see, of value 0: an element that is 1 there and 0 in others makes its score the sink.
        query = torch.cat((query, (sinks / layer.scale).to(query.dtype).expand(len(query), -1)[..., None]), dim=-1)
        keys, values, seen = pad(keys, (0, 1, 0, 1)), pad(values, (0, 0, 0, 1)), pad(seen, (0, 1), value=True)
        keys[..., -1, -1] = 1
    queries = query.view(num_rows, length, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = seen[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)  # [R, 1, G * Q, S]
    if layer.softcap is None:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=layer.scale)
    else:  # torch's kernels have no soft cap
        scores = torch.matmul(queries.float() * layer.scale, keys.float().transpose(-1, -2))
        scores[..., : rows.seen.shape[-1]].div_(layer.softcap).tanh_().mul_(layer.softcap)  # a sink is not capped
        probs = torch.softmax(scores.masked_fill_(~seen, float("-inf")), dim=-1)
        output = torch.matmul(probs, values.float()).to(query.dtype)
    output = output.reshape(num_rows, num_kv_heads, group, length, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows * length, layer.num_heads, -1)
