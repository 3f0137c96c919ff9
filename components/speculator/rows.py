"""A proposer's own passes over the target's paged cache: rows of one query each, their tables, and the draft's layers.

A pass gives every row of the target's batch the same number Q of queries. Each becomes a row of its own with one query,
which every backend serves as a decode: it sees positions 0 to seq_len - 1 of its table, whatever its own position is.
Since all keys of a layer are written before any query attends, queries of one request with the same seq_len see each
other in both directions. Everything that depends on the device's lengths stays on the device; what a backend plans on
the host is derived from the host's mirror of the target's batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import NULL_BLOCK_ID, PAD_SLOT_ID, AttentionLayer, BatchTables, KVCaches
from workerkit.framework.interfaces.model import Attend
from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.interfaces.speculation import DraftWeights

if TYPE_CHECKING:
    from workerkit.framework.interfaces.draft import WriteKV


def last_valid(batch: InputBatch, sampled: SamplerOutput) -> torch.Tensor:
    """[num_reqs] int64: index among the batch's tokens of each row's last one that is no rejected draft."""
    return batch.query_start_loc[1 : batch.num_reqs + 1].long() - 1 - sampled.num_rejected


def slots_at(block_table: torch.Tensor, positions: torch.Tensor, block_size: int, max_model_len: int) -> torch.Tensor:
    """Where positions [R, Q] of the rows of a table [R, W] lie in the cache: [R, Q] int32.

    -1 (never written) for positions from max_model_len on, and for those whose block is the null block (B55, B137).
    """
    columns = (positions // block_size).clamp(max=block_table.shape[1] - 1)
    blocks = block_table.long().gather(1, columns)
    known = (positions < max_model_len) & (blocks != NULL_BLOCK_ID)
    return torch.where(known, blocks * block_size + positions % block_size, PAD_SLOT_ID).int()


def one_query_rows(
    batch: InputBatch,
    tables: BatchTables,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    ahead: int,
    block_size: int,
    max_model_len: int,
) -> tuple[InputBatch, BatchTables]:
    """Q queries for each row of the target's `batch`, each as a row of one query; ready for `AttentionBackend.build`.

    positions, seq_lens: [num_reqs, Q] int64 on the device. A position may be max_model_len or more: it has no slot.
    seq_lens count what a query sees, its own position included, and are cut to max_model_len. No position lies before
    the row's first token in `batch`.
    ahead: how far a seq_len may exceed that of its row in `batch`, for the host's upper bounds.
    block_size: the layout's kernel_block_size.

    Row r's query q is row and token r * Q + q of the result, which has no padding. `input_ids` are 0: what a draft
    network reads is handed to it directly.
    """
    num_reqs, width = positions.shape
    count = num_reqs * width
    device = positions.device
    flat = positions.flatten()
    lens = seq_lens.clamp(max=max_model_len).flatten().int()
    rows = torch.arange(count, device=device)
    starts = np.arange(count + 1, dtype=np.int32)
    starts_on_device = torch.arange(count + 1, dtype=torch.int32, device=device)
    # max(prompt_len, position + 1) of the row's first token, so at least prompt_len, and at most what is right here
    rope_lens = batch.rope_lens[batch.query_start_loc[:num_reqs].long()]
    upper_bound = np.minimum(np.repeat(batch.host_seq_lens.upper_bound + ahead, width), max_model_len).astype(np.int32)
    result = InputBatch(
        plan=_plan(batch.plan, width, upper_bound),
        num_reqs=count,
        num_reqs_padded=count,
        num_tokens=count,
        num_tokens_padded=count,
        max_query_len=1,
        idx_mapping=_each(batch.idx_mapping, width),
        query_start_loc=starts_on_device,
        query_start_loc_np=starts,
        seq_lens=lens,
        host_seq_lens=HostLengths(upper_bound=upper_bound, exact=lambda: lens.to("cpu", copy=True).numpy()),
        input_ids=torch.zeros(count, dtype=torch.int32, device=device),
        positions=flat,
        rope_lens=torch.maximum(_each(rope_lens, width), flat + 1),
        token_rows=rows,
        logits_indices=rows,
        logits_rows=rows,
        draft_ids=torch.full_like(rows, -1),
        cu_num_logits_np=starts,
        is_dummy=batch.is_dummy,
    )
    own = [table[:num_reqs] for table in tables.block_tables]
    return result, BatchTables(
        block_tables=tuple(_each(table, width) for table in own),
        slot_mappings=tuple(slots_at(table, positions, block_size, max_model_len).flatten() for table in own),
    )


def draft_attend(attend: Attend, draft: DraftWeights) -> Attend:
    """`attend` of the shared cache, for a network that counts its layers from 0."""

    def attend_own(
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attend(draft.attention_layers[layer.index], query, key, value, sinks)

    return attend_own


def write_kv(kernels: Kernels, caches: KVCaches, draft: DraftWeights, tables: BatchTables) -> WriteKV:
    """Writes keys and values [N, num_kv_heads, D] of the network's layers at the slots [N] of `tables`."""

    def write(layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        index = draft.attention_layers[layer.index].index
        slots = tables.slot_mappings[caches.group_of_layer[index]]
        kernels.reshape_and_cache(key, value, caches.keys[index], caches.values[index], slots)

    return write


def _each(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Every row `width` times in a row."""
    return tensor if width == 1 else tensor.repeat_interleave(width, dim=0)


def _plan(plan: BatchPlan, width: int, upper_bound: np.ndarray) -> BatchPlan:
    one = np.ones(len(upper_bound), dtype=np.int32)
    return BatchPlan(
        req_ids=tuple(req_id for req_id in plan.req_ids for _ in range(width)),
        slots=np.repeat(plan.slots, width),
        num_scheduled_tokens=one,
        num_computed_tokens=upper_bound - 1,
        num_draft_tokens=np.zeros_like(one),
        prefill_lens=np.repeat(plan.prefill_lens, width),
        prompt_lens=np.repeat(plan.prompt_lens, width),
    )
