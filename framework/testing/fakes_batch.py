"""Fakes of request state, input batches, block tables, the KV cache and attention: right, plain and slow.

They keep Python lists and dicts and build each step from nothing, so they can serve as models of the real parts.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from workerkit.framework.errors import CacheError, IntegrityError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import (
    BatchPlan,
    HostLengths,
    HostRequestStates,
    InputBatch,
    InputBatchBuilder,
    RowInputBatch,
    SlotInputBatch,
    SlotRequestStates,
)
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    AttentionLayer,
    BatchTables,
    BlockTables,
    BlockTableWrites,
    KVCacheGroup,
    KVCacheManager,
    KVCaches,
    KVCacheSpec,
    KVLayout,
    RowBlockTables,
    SlotBlockTables,
)
from workerkit.framework.interfaces.model import Attend
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sections import CacheSection


def make_batch(
    plan: BatchPlan,
    computed: Sequence[int],
    tokens: Sequence[Sequence[int]],
    desc: BatchDescriptor,
    device: torch.device,
    is_dummy: bool = False,
) -> InputBatch:
    """The batch of a plan. `computed`: exact num_computed_tokens of each row; `tokens`: its scheduled token ids, with
    -1 for a draft that was scheduled and never proposed."""
    scheduled = [len(ids) for ids in tokens]
    starts = np.cumsum([0, *scheduled])
    num_tokens, num_reqs = int(starts[-1]), plan.num_reqs
    rows = [row for row, count in enumerate(scheduled) for _ in range(count)]
    positions = [computed[row] + offset for row, count in enumerate(scheduled) for offset in range(count)]
    seq_lens = [have + more for have, more in zip(computed, scheduled, strict=True)]
    logits = [
        int(starts[row + 1]) - 1 - back for row in range(num_reqs) for back in range(plan.num_draft_tokens[row], -1, -1)
    ]
    pad_tokens, pad_reqs = desc.num_tokens - num_tokens, desc.num_reqs - num_reqs

    def long(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    start_locs = [*starts.tolist(), *[num_tokens] * pad_reqs]
    return InputBatch(
        plan=plan,
        num_reqs=num_reqs,
        num_reqs_padded=desc.num_reqs,
        num_tokens=num_tokens,
        num_tokens_padded=desc.num_tokens,
        max_query_len=max(scheduled, default=0),
        idx_mapping=long(plan.slots.tolist()),
        query_start_loc=long(start_locs).int(),
        query_start_loc_np=np.array(start_locs, dtype=np.int32),
        seq_lens=long([*seq_lens, *[0] * pad_reqs]).int(),
        host_seq_lens=HostLengths(
            upper_bound=plan.num_computed_tokens + plan.num_scheduled_tokens,
            exact=lambda: np.array(seq_lens, dtype=np.int32),
        ),
        input_ids=long([*(max(t, 0) for ids in tokens for t in ids), *[0] * pad_tokens]).int(),
        positions=long([*positions, *[0] * pad_tokens]),
        rope_lens=long(
            [*(max(int(plan.prompt_lens[r]), p + 1) for r, p in zip(rows, positions, strict=True)), *[1] * pad_tokens]
        ),
        token_rows=long([*rows, *[0] * pad_tokens]),
        logits_indices=long(logits),
        logits_rows=long([row for row in range(num_reqs) for _ in range(plan.num_draft_tokens[row] + 1)]),
        draft_ids=long(
            [t for ids, n in zip(tokens, plan.num_draft_tokens, strict=True) for t in [*ids[len(ids) - n :], -1]]
        ),
        cu_num_logits_np=np.cumsum([0, *(plan.num_draft_tokens + 1)]).astype(np.int32),
        is_dummy=is_dummy,
    )


class _Dummies(InputBatchBuilder):
    def __init__(self, context: DeviceContext) -> None:
        self._device = context.device

    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        counts = [num_tokens // num_reqs + (row < num_tokens % num_reqs) for row in range(num_reqs)]
        zeros = np.zeros(num_reqs, dtype=np.int32)
        plan = BatchPlan(
            req_ids=tuple(f"dummy-{row}" for row in range(num_reqs)),
            slots=np.arange(num_reqs),
            num_scheduled_tokens=np.array(counts, dtype=np.int32),
            num_computed_tokens=zeros,
            num_draft_tokens=zeros,
            prefill_lens=np.array(counts, dtype=np.int32),
            prompt_lens=np.array(counts, dtype=np.int32),
        )
        return make_batch(plan, [0] * num_reqs, [[0] * n for n in counts], desc, self._device, is_dummy=True)


class FakeRowInputBatch(_Dummies, RowInputBatch):
    """V1: the rows are written anew each step."""

    def __init__(self, context: DeviceContext, block_table: RowBlockTables) -> None:
        super().__init__(context)
        self._tables = block_table
        self._rows: list[str] = []
        self._states: HostRequestStates | None = None

    def sync(self, plan: BatchPlan, states: HostRequestStates) -> None:
        for row in range(len(self._rows)):
            self._tables.clear(row)
        self._rows, self._states = list(plan.req_ids), states
        for row, req_id in enumerate(self._rows):
            self._tables.add(row, states.get(req_id).block_ids)

    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        assert self._states is not None, "sync comes first"
        tokens, computed = [], []
        for req_id, count in zip(plan.req_ids, plan.num_scheduled_tokens, strict=True):
            state = self._states.get(req_id)
            computed.append(state.num_computed_tokens)
            known = [*state.token_ids, *state.drafts][computed[-1] : computed[-1] + count]
            tokens.append(known + [-1] * (count - len(known)))
        return make_batch(plan, computed, tokens, desc, self._device)

    def remove(self, req_id: str) -> None:
        if req_id in self._rows:
            for row in range(len(self._rows)):
                self._tables.clear(row)
            self._rows.remove(req_id)
            for row, other in enumerate(self._rows):
                assert self._states is not None
                self._tables.add(row, self._states.get(other).block_ids)

    def check_integrity(self, states: HostRequestStates) -> None:
        if unknown := [req_id for req_id in self._rows if req_id not in states]:
            raise IntegrityError(f"rows of requests that are gone: {unknown}")

    @property
    def row_moves(self) -> int:
        return 0


class FakeSlotInputBatch(_Dummies, SlotInputBatch):
    """V2: reads the slots' tensors on the host."""

    def __init__(self, context: DeviceContext, states: SlotRequestStates) -> None:
        super().__init__(context)
        self._states = states

    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        device = self._states.device
        tokens, computed = [], []
        for slot, count in zip(plan.slots.tolist(), plan.num_scheduled_tokens, strict=True):
            start, known = int(device.num_computed_tokens[slot]), int(device.total_len[slot])
            ids = [*device.all_token_ids[slot, :known].tolist(), *device.draft_tokens[slot].tolist()]
            computed.append(start)
            tokens.append(ids[start : start + count])
        return make_batch(plan, computed, tokens, desc, self._device)


class _Tables(BlockTables, abc.ABC):
    def __init__(self, layout: KVLayout, shape: WorkerShape, context: DeviceContext) -> None:
        self._layout = layout
        self._widths = [-(-shape.max_model_len // size) for size in layout.block_sizes]
        self._device = context.device
        self._held: dict[int, list[list[int]]] = {}

    @abc.abstractmethod
    def _index(self, batch: InputBatch, row: int) -> int: ...

    def add(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        self._check(block_ids)
        self._held[index] = [list(ids) for ids in block_ids]

    def append(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        held = self._held.get(index, [[] for _ in self._widths])
        grown = [[*old, *new] for old, new in zip(held, block_ids, strict=True)]
        self._check(grown)
        self._held[index] = grown

    def _check(self, block_ids: Sequence[Sequence[int]]) -> None:
        for ids, width in zip(block_ids, self._widths, strict=True):
            if len(ids) > width:
                raise CacheError(f"{len(ids)} blocks in a row of {width}")

    def clear(self, index: int) -> None:
        self._held.pop(index, None)

    def block_ids(self, index: int) -> tuple[tuple[int, ...], ...]:
        held = self._held.get(index, [[] for _ in self._widths])
        b = self._layout.kernel_block_size
        return tuple(
            tuple(block * (size // b) + part for block in ids for part in range(size // b))
            for ids, size in zip(held, self._layout.block_sizes, strict=True)
        )

    def gather(self, batch: InputBatch) -> BatchTables:
        b = self._layout.kernel_block_size
        tables, slots = [], []
        for group, (width, size) in enumerate(zip(self._widths, self._layout.block_sizes, strict=True)):
            table = torch.full((batch.num_reqs_padded, width * (size // b)), NULL_BLOCK_ID, dtype=torch.int32)
            for row in range(0 if batch.is_dummy else batch.num_reqs):
                ids = self.block_ids(self._index(batch, row))[group]
                table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            mapping = torch.full((batch.num_tokens_padded,), PAD_SLOT_ID, dtype=torch.int32)
            for token in range(0 if batch.is_dummy else batch.num_tokens):
                position = int(batch.positions[token])
                mapping[token] = table[int(batch.token_rows[token]), position // b] * b + position % b
            tables.append(table.to(self._device))
            slots.append(mapping.to(self._device))
        return BatchTables(block_tables=tuple(tables), slot_mappings=tuple(slots))

    def check_integrity(self, live: Sequence[int]) -> None:
        if extra := set(self._held) - set(live):
            raise IntegrityError(f"block table entries {sorted(extra)} hold blocks of nobody")


class FakeRowBlockTables(_Tables, RowBlockTables):
    """V1: by batch row."""

    def _index(self, batch: InputBatch, row: int) -> int:
        return row

    def move_row(self, source: int, target: int) -> None:
        self._held[target] = self._held.pop(source)

    def swap_row(self, first: int, second: int) -> None:
        one, two = self._held.pop(first, None), self._held.pop(second, None)
        self._held.update({k: v for k, v in ((first, two), (second, one)) if v is not None})


class FakeSlotBlockTables(_Tables, SlotBlockTables):
    """V2: by stable slot."""

    def _index(self, batch: InputBatch, row: int) -> int:
        return int(batch.idx_mapping[row])

    def stage(self) -> BlockTableWrites:
        return BlockTableWrites(groups=tuple(() for _ in self._widths))

    def apply(self, writes: BlockTableWrites) -> None:
        """Nothing is staged."""


class FakeKVCache(KVCacheManager):
    """One group for all layers, which must be alike."""

    def __init__(self, cache: CacheSection, context: DeviceContext) -> None:
        self._section = cache
        self._states: dict[tuple[int, ...], torch.Tensor] = {}
        self._context = context

    def plan(
        self,
        layers: Sequence[AttentionLayer],
        kernel_block_sizes: Sequence[int],
        available_bytes: int,
        state_bytes: int = 0,
    ) -> KVLayout:
        b = next((s for s in kernel_block_sizes if self._section.block_size % s == 0), self._section.block_size)
        dtype = self._context.dtype
        spec = KVCacheSpec(
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=layers[0].head_dim,
            dtype=str(dtype).removeprefix("torch."),
            block_size=self._section.block_size,
            element_bytes=dtype.itemsize,
        )
        group = KVCacheGroup(spec=spec, layers=tuple(layer.index for layer in layers))
        num_blocks = self._section.num_blocks or min(available_bytes // (spec.page_bytes * len(layers)), 1024)
        if num_blocks < 2:
            raise CacheError(f"{available_bytes} bytes hold no two blocks of {spec.page_bytes} bytes")
        block_bytes = spec.page_bytes * len(layers)
        return KVLayout(num_blocks=num_blocks, groups=(group,), kernel_block_size=b, block_bytes=block_bytes)

    def allocate(self, layout: KVLayout, layers: Sequence[AttentionLayer]) -> KVCaches:
        spec, b = layout.groups[0].spec, layout.kernel_block_size
        blocks = layout.num_blocks * (spec.block_size // b)
        shape = (blocks, b, spec.num_kv_heads, spec.head_dim)
        storages = tuple(torch.zeros(2, *shape, dtype=self._context.dtype, device=self._context.device) for _ in layers)
        return KVCaches(
            layout=layout,
            keys=tuple(storage[0] for storage in storages),
            values=tuple(storage[1] for storage in storages),
            group_of_layer=tuple(0 for _ in layers),
            storages=storages,
        )

    def zero_blocks(self, caches: KVCaches, block_ids: Sequence[int]) -> None:
        for tensor in (*caches.keys, *caches.values):
            for block in block_ids:
                tensor[_span(caches, block)] = 0

    def copy_blocks(self, caches: KVCaches, pairs: Sequence[tuple[int, int]]) -> None:
        for tensor in (*caches.keys, *caches.values):
            sources = [tensor[_span(caches, source)].clone() for source, _ in pairs]
            for content, (_, target) in zip(sources, pairs, strict=True):
                tensor[_span(caches, target)] = content

    def write_state(self, caches: KVCaches, block_ids: Sequence[int], state: torch.Tensor) -> None:
        self._states[tuple(block_ids)] = state.clone()

    def read_state(self, caches: KVCaches, block_ids: Sequence[int], num_bytes: int) -> torch.Tensor:
        return self._states[tuple(block_ids)][:num_bytes]


def _span(caches: KVCaches, block: int) -> slice:
    ratio = caches.layout.block_sizes[0] // caches.layout.kernel_block_size
    return slice(block * ratio, (block + 1) * ratio)


class FakeAttention(AttentionBackend):
    """Writes token by token and attends row by row, in plain torch."""

    def prepare(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        """Serves every layer."""

    def build(self, batch: InputBatch, tables: BatchTables, caches: KVCaches, extras: Mapping[str, Any]) -> Attend:
        def attend(
            layer: AttentionLayer,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            group = caches.group_of_layer[layer.index]
            keys, values = caches.keys[layer.index].flatten(0, 1), caches.values[layer.index].flatten(0, 1)
            slots = tables.slot_mappings[group].long()
            keys[slots[slots >= 0]] = key[slots >= 0].to(keys.dtype)
            values[slots[slots >= 0]] = value[slots >= 0].to(values.dtype)
            output = torch.zeros_like(query)
            b = caches.layout.kernel_block_size
            for token in range(batch.num_tokens):
                row = int(batch.token_rows[token])
                last = int(batch.seq_lens[row] - batch.query_start_loc[row + 1]) + token
                first = 0 if layer.sliding_window is None else max(0, last + 1 - layer.sliding_window)
                seen = torch.arange(first, last + 1, device=query.device)
                where = tables.block_tables[group][row].long()[seen // b] * b + seen % b
                per_head = layer.num_heads // layer.num_kv_heads
                k = keys[where].repeat_interleave(per_head, dim=1).float()  # [S, Nq, D]
                v = values[where].repeat_interleave(per_head, dim=1).float()
                weights = (torch.einsum("hd,shd->hs", query[token].float(), k) * layer.scale).softmax(dim=1)
                output[token] = torch.einsum("hs,shd->hd", weights, v).to(query.dtype)
            return output

        return attend
