"""What both input batches share: where the tokens of a plan lie, and the persistent buffers they are put into."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.framework.errors import IntegrityError, UnsupportedError
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.runner import WorkerShape


@attrs.frozen(kw_only=True, eq=False)
class TokenLayout:
    """The part of a batch that follows from token counts alone; N = num_tokens, M = num_logits."""

    query_start_loc: np.ndarray  # [num_reqs + 1] int64
    token_rows: np.ndarray  # [N] int64
    offsets: np.ndarray  # [N] int64, of each token within its row
    cu_num_logits: np.ndarray  # [num_reqs + 1] int64
    logits_rows: np.ndarray  # [M] int64
    logits_indices: np.ndarray  # [M] int64
    logits_offsets: np.ndarray  # [M] int64, within the row's logits: 0 is the last known token, j > 0 draft j - 1


def lay_out(plan: BatchPlan) -> TokenLayout:
    """A row's last drafts + 1 tokens are its last known token and its drafts; those have logits."""
    token_ends, token_rows, offsets = _ragged(plan.num_scheduled_tokens)
    num_logits = plan.num_draft_tokens + 1
    logits_ends, logits_rows, logits_offsets = _ragged(num_logits)
    return TokenLayout(
        query_start_loc=token_ends,
        token_rows=token_rows,
        offsets=offsets,
        cu_num_logits=logits_ends,
        logits_rows=logits_rows,
        logits_indices=(token_ends[1:] - num_logits)[logits_rows] + logits_offsets,
        logits_offsets=logits_offsets,
    )


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts [n] -> cumulative [n + 1], row of each element, place of each element within its row."""
    cumulative = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    rows = np.repeat(np.arange(len(counts)), counts)
    return cumulative, rows, np.arange(cumulative[-1]) - cumulative[rows]


def dummy_plan(num_tokens: int, num_reqs: int, shape: WorkerShape) -> BatchPlan:
    """Made-up requests that share the tokens evenly, the last ones taking one more, and have computed nothing."""
    if not 0 < num_reqs <= min(num_tokens, shape.max_num_reqs):
        raise UnsupportedError(
            f"a dummy batch of {num_reqs} requests and {num_tokens} tokens; right: 1 to {shape.max_num_reqs} requests "
            "of at least one token each"
        )
    counts = np.full(num_reqs, num_tokens // num_reqs, np.int32)
    counts[num_reqs - num_tokens % num_reqs :] += 1
    return BatchPlan(
        req_ids=tuple(f"dummy-{row}" for row in range(num_reqs)),
        slots=np.arange(num_reqs),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros_like(counts),
        num_draft_tokens=np.zeros_like(counts),
        prefill_lens=counts.copy(),
        prompt_lens=counts.copy(),
    )


class AscendInputBuffers:
    """Tensors at addresses that never change, which graphs replay on. Written on the stream only."""

    def __init__(self, shape: WorkerShape, device: torch.device) -> None:
        tokens, rows = shape.max_num_batched_tokens, shape.max_num_reqs
        self.input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.rope_lens = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.token_rows = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)

    def fill(
        self,
        plan: BatchPlan,
        desc: BatchDescriptor,
        layout: TokenLayout,
        *,
        idx_mapping: torch.Tensor,
        token_rows: torch.Tensor,
        logits_indices: torch.Tensor,
        logits_rows: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rope_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        exact: Callable[[], np.ndarray] | None = None,
        is_dummy: bool = False,
    ) -> InputBatch:
        """Copy the unpadded tensors in, pad as `desc` says, and make the batch of views.

        `exact` gives the sequence lengths on the host; None copies them from the device when asked.
        """
        num_reqs, num_tokens = plan.num_reqs, plan.num_tokens
        if not (
            num_reqs <= desc.num_reqs <= len(self.seq_lens) and num_tokens <= desc.num_tokens <= len(self.input_ids)
        ):
            raise IntegrityError(
                f"{num_reqs} rows and {num_tokens} tokens, padded to {desc.num_reqs} and {desc.num_tokens}; "
                f"the buffers hold {len(self.seq_lens)} and {len(self.input_ids)}"
            )
        tail = np.full(desc.num_reqs - num_reqs, num_tokens)
        query_start_loc = np.concatenate([layout.query_start_loc, tail], dtype=np.int32, casting="same_kind")
        (starts,) = upload(self.query_start_loc.device, query_start_loc)
        lengths = _put(self.seq_lens, seq_lens, desc.num_reqs)
        return InputBatch(
            plan=plan,
            num_reqs=num_reqs,
            num_reqs_padded=desc.num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=desc.num_tokens,
            max_query_len=int(plan.num_scheduled_tokens.max()),
            idx_mapping=idx_mapping,
            query_start_loc=_put(self.query_start_loc, starts, desc.num_reqs + 1),
            query_start_loc_np=query_start_loc,
            seq_lens=lengths,
            host_seq_lens=HostLengths(
                upper_bound=plan.num_computed_tokens + plan.num_scheduled_tokens,
                exact=exact or (lambda: lengths[:num_reqs].to("cpu", copy=True).numpy()),
            ),
            input_ids=_put(self.input_ids, input_ids, desc.num_tokens),
            positions=_put(self.positions, positions, desc.num_tokens),
            rope_lens=_put(self.rope_lens, rope_lens, desc.num_tokens),
            token_rows=_put(self.token_rows, token_rows, desc.num_tokens),
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            cu_num_logits_np=layout.cu_num_logits.astype(np.int32),
            is_dummy=is_dummy,
        )

    def fill_from_host(
        self, plan: BatchPlan, desc: BatchDescriptor, layout: TokenLayout, input_ids: np.ndarray, is_dummy: bool = False
    ) -> InputBatch:
        """The same when the plan's counts are exact: everything is worked out in numpy and sent in one copy."""
        positions = plan.num_computed_tokens[layout.token_rows] + layout.offsets
        seq_lens = plan.num_computed_tokens + plan.num_scheduled_tokens
        sent = upload(
            self.input_ids.device,
            plan.slots,
            layout.token_rows,
            layout.logits_indices,
            layout.logits_rows,
            input_ids,
            positions,
            np.maximum(plan.prompt_lens[layout.token_rows], positions + 1),
            seq_lens,
        )
        idx_mapping, token_rows, logits_indices, logits_rows, ids, sent_positions, rope_lens, lengths = sent
        return self.fill(
            plan,
            desc,
            layout,
            idx_mapping=idx_mapping,
            token_rows=token_rows,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            input_ids=ids,
            positions=sent_positions,
            rope_lens=rope_lens,
            seq_lens=lengths,
            exact=seq_lens.copy,
            is_dummy=is_dummy,
        )


def _put(buffer: torch.Tensor, source: torch.Tensor, size: int) -> torch.Tensor:
    """Copy into the buffer's head, zero up to `size`, return that much of it."""
    used = source.shape[0]
    buffer[:used].copy_(source)
    if used < size:
        buffer[used:size].zero_()
    return buffer[:size]
