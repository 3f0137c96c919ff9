"""What both input batches share: where the tokens of a plan lie, and the persistent buffers they are put into."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from workerkit.components.buffers.upload import operand, upload
from workerkit.framework.errors import IntegrityError, UnsupportedError
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.runner import WorkerShape


class TokenLayout(NamedTuple):
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
    rows = np.arange(len(counts) + 1)
    if (counts == 1).all():
        return rows, rows[:-1], np.zeros(len(counts), np.int64)
    cumulative = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    rows = np.repeat(rows[:-1], counts)
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
        self._device = device
        self._no_drafts = torch.full((rows,), -1, device=device)
        self.input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.by_token = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self.positions, self.rope_lens, self.token_rows = self.by_token
        self.by_row = torch.zeros(2, rows + 1, dtype=torch.int32, device=device)
        self.query_start_loc, self.seq_lens = self.by_row  # a row has one length less than starts

    def starts(self, plan: BatchPlan, desc: BatchDescriptor, layout: TokenLayout) -> np.ndarray:
        """The padded query_start_loc on the host. Raises IntegrityError when the buffers are too small for `desc`."""
        num_reqs, num_tokens = plan.num_reqs, len(layout.token_rows)
        rows, tokens = len(self.seq_lens) - 1, len(self.input_ids)
        if not (num_reqs <= desc.num_reqs <= rows and num_tokens <= desc.num_tokens <= tokens):
            raise IntegrityError(
                f"{num_reqs} rows and {num_tokens} tokens, padded to {desc.num_reqs} and {desc.num_tokens}; "
                f"the buffers hold {rows} and {tokens}"
            )
        result = np.empty(desc.num_reqs + 1, np.int32)
        result[: num_reqs + 1] = layout.query_start_loc
        result[num_reqs + 1 :] = num_tokens
        return result

    def pad(self, num_reqs: int, num_tokens: int, desc: BatchDescriptor) -> None:
        """Zero what lies between the used and the padded size; query_start_loc has no padding of its own."""
        if num_tokens < desc.num_tokens:
            self.input_ids[num_tokens : desc.num_tokens] = 0
            self.by_token[:, num_tokens : desc.num_tokens] = 0
        if num_reqs < desc.num_reqs:
            self.seq_lens[num_reqs : desc.num_reqs] = 0

    def batch(
        self,
        plan: BatchPlan,
        desc: BatchDescriptor,
        layout: TokenLayout,
        starts: np.ndarray,
        *,
        idx_mapping: torch.Tensor,
        logits_indices: torch.Tensor,
        logits_rows: torch.Tensor,
        draft_ids: torch.Tensor | None,
        exact: Callable[[], np.ndarray] | None = None,
        is_dummy: bool = False,
    ) -> InputBatch:
        """The views of what was written. `exact` None: exact lengths are copied from the device when asked for.
        `draft_ids` None: no row has drafts."""
        num_reqs, num_tokens = plan.num_reqs, len(layout.token_rows)
        seq_lens = self.seq_lens[: desc.num_reqs]
        return InputBatch(
            plan=plan,
            num_reqs=num_reqs,
            num_reqs_padded=desc.num_reqs,
            num_tokens=num_tokens,
            num_tokens_padded=desc.num_tokens,
            max_query_len=max(plan.num_scheduled_tokens.tolist()),
            idx_mapping=idx_mapping,
            query_start_loc=self.query_start_loc[: desc.num_reqs + 1],
            query_start_loc_np=starts,
            seq_lens=seq_lens,
            host_seq_lens=HostLengths(
                upper_bound=plan.num_computed_tokens + plan.num_scheduled_tokens,
                exact=exact or (lambda: seq_lens[:num_reqs].to("cpu", copy=True).numpy()),
            ),
            input_ids=self.input_ids[: desc.num_tokens],
            positions=self.positions[: desc.num_tokens],
            rope_lens=self.rope_lens[: desc.num_tokens],
            token_rows=self.token_rows[: desc.num_tokens],
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            draft_ids=self._no_drafts[: len(layout.logits_rows)] if draft_ids is None else draft_ids,
            cu_num_logits_np=layout.cu_num_logits.astype(np.int32),
            is_dummy=is_dummy,
        )

    def fill_from_host(
        self,
        plan: BatchPlan,
        desc: BatchDescriptor,
        layout: TokenLayout,
        input_ids: np.ndarray,
        draft_ids: np.ndarray | None = None,
        is_dummy: bool = False,
    ) -> InputBatch:
        """A batch whose plan's counts are exact: everything is worked out and padded in numpy and sent in one copy.
        `draft_ids` as in InputBatch, None where no row has drafts."""
        starts = self.starts(plan, desc, layout)
        num_reqs, num_tokens = plan.num_reqs, len(layout.token_rows)
        seq_lens = plan.num_computed_tokens + plan.num_scheduled_tokens
        tokens = np.zeros((4, desc.num_tokens), np.int64)
        ids, positions, rope_lens, token_rows = tokens[:, :num_tokens]
        ids[:] = input_ids
        np.add(plan.num_computed_tokens[layout.token_rows], layout.offsets, out=positions)
        np.maximum(plan.prompt_lens[layout.token_rows], positions + 1, out=rope_lens)
        token_rows[:] = layout.token_rows
        rows = np.zeros((2, desc.num_reqs + 1), np.int64)
        rows[0] = starts
        rows[1, :num_reqs] = seq_lens
        drafts = [] if draft_ids is None else [draft_ids]
        by_token, by_row, idx_mapping, logits_indices, logits_rows, *drafts_sent = upload(
            self._device, tokens.ravel(), rows.ravel(), plan.slots, layout.logits_indices, layout.logits_rows, *drafts
        )
        by_token, by_row = operand(by_token).reshape(4, -1), operand(by_row).reshape(2, -1)
        operand(self.input_ids)[: desc.num_tokens] = by_token[0]
        operand(self.by_token)[:, : desc.num_tokens] = by_token[1:]
        operand(self.by_row)[:, : desc.num_reqs + 1] = by_row
        return self.batch(
            plan,
            desc,
            layout,
            starts,
            idx_mapping=idx_mapping,
            logits_indices=logits_indices,
            logits_rows=logits_rows,
            draft_ids=drafts_sent[0] if drafts_sent else None,
            exact=seq_lens.copy,
            is_dummy=is_dummy,
        )
