"""What both input batches share: where the tokens of a plan lie, and the persistent buffers they are put into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch

from workerkit.components.buffers.upload import operand, send, upload
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
    token_ends, token_rows, offsets = ragged(plan.num_scheduled_tokens)
    num_logits = plan.num_draft_tokens + 1
    logits_ends, logits_rows, logits_offsets = ragged(num_logits)
    return TokenLayout(
        query_start_loc=token_ends,
        token_rows=token_rows,
        offsets=offsets,
        cu_num_logits=logits_ends,
        logits_rows=logits_rows,
        logits_indices=(token_ends[1:] - num_logits)[logits_rows] + logits_offsets,
        logits_offsets=logits_offsets,
    )


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


@attrs.frozen(kw_only=True, eq=False)
class Placement:
    """What stays the same from step to step, for as long as the same requests have as many tokens and drafts each.

    The operands (see `operand`) are on the device.
    """

    key: tuple[Any, ...]  # everything that it follows from
    layout: TokenLayout
    shared: dict[str, Any]  # fields of the InputBatch
    slots: Any  # operand [num_reqs] int64
    scheduled: Any  # operand [num_reqs] int64
    token_slots: Any  # operand [N] int64
    offsets: Any  # operand [N] int64
    prompt_lens: Any  # operand [N] int64, of each token's request


class AscendInputBuffers:
    """Tensors at addresses that never change, which graphs replay on. Written on the stream only."""

    def __init__(self, shape: WorkerShape, device: torch.device) -> None:
        tokens, rows = shape.max_num_batched_tokens, shape.max_num_reqs
        self._device = device
        self._no_drafts = torch.full((rows,), -1, device=device)
        self._input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._by_token = torch.zeros(3, tokens, dtype=torch.int64, device=device)  # positions, rope_lens, token_rows
        self._by_row = torch.zeros(2, rows + 1, dtype=torch.int32, device=device)  # query_start_loc, seq_lens
        self._placement: Placement | None = None
        self.input_ids = operand(self._input_ids)
        self.positions, self.rope_lens, _ = operand(self._by_token)
        self.seq_lens = operand(self._by_row)[1]

    def place(self, plan: BatchPlan, desc: BatchDescriptor) -> Placement:
        """Everything of the buffers is up to date afterwards but the used parts of `input_ids`, `positions`,
        `rope_lens` and `seq_lens`. Raises IntegrityError when the buffers are too small for `desc`."""
        columns = (plan.slots, plan.num_scheduled_tokens, plan.num_draft_tokens, plan.prompt_lens)
        key = (desc.num_reqs, desc.num_tokens, *[column.tobytes() for column in columns])
        if self._placement is None or self._placement.key != key:
            self._placement = self._place(plan, desc, key)
        return self._placement

    def _place(self, plan: BatchPlan, desc: BatchDescriptor, key: tuple[Any, ...]) -> Placement:
        layout = lay_out(plan)
        num_reqs, num_tokens, num_logits = plan.num_reqs, len(layout.token_rows), len(layout.logits_rows)
        rows, tokens = self._by_row.shape[1] - 1, len(self._input_ids)
        if not (num_reqs <= desc.num_reqs <= rows and num_tokens <= desc.num_tokens <= tokens):
            raise IntegrityError(
                f"{num_reqs} rows and {num_tokens} tokens, padded to {desc.num_reqs} and {desc.num_tokens}; "
                f"the buffers hold {rows} and {tokens}"
            )
        starts = np.full(desc.num_reqs + 1, num_tokens, np.int32)
        starts[: num_reqs + 1] = layout.query_start_loc
        slots, scheduled, logits_indices, logits_rows, token_slots, offsets, prompt_lens, token_rows, starts_sent = (
            upload(
                self._device,
                plan.slots,
                plan.num_scheduled_tokens,
                layout.logits_indices,
                layout.logits_rows,
                plan.slots[layout.token_rows],
                layout.offsets,
                plan.prompt_lens[layout.token_rows],
                layout.token_rows,
                starts,
            )
        )
        by_token, by_row = self._by_token[:, : desc.num_tokens], self._by_row[:, : desc.num_reqs + 1]
        by_token[2, :num_tokens] = token_rows
        by_row[0] = starts_sent
        # Padding; query_start_loc has none of its own.
        self._input_ids[num_tokens : desc.num_tokens] = 0
        by_token[:, num_tokens:] = 0
        by_row[1, num_reqs:] = 0
        return Placement(
            key=key,
            layout=layout,
            shared={
                "num_reqs": num_reqs,
                "num_reqs_padded": desc.num_reqs,
                "num_tokens": num_tokens,
                "num_tokens_padded": desc.num_tokens,
                "max_query_len": int(plan.num_scheduled_tokens.max()),
                "idx_mapping": slots,
                "query_start_loc": by_row[0],
                "query_start_loc_np": starts,
                "seq_lens": by_row[1, :-1],
                "input_ids": self._input_ids[: desc.num_tokens],
                "positions": by_token[0],
                "rope_lens": by_token[1],
                "token_rows": by_token[2],
                "logits_indices": logits_indices,
                "logits_rows": logits_rows,
                "draft_ids": self._no_drafts[:num_logits],  # where no row has drafts
                "cu_num_logits_np": layout.cu_num_logits.astype(np.int32),
            },
            slots=operand(slots),
            scheduled=operand(scheduled),
            token_slots=operand(token_slots),
            offsets=operand(offsets),
            prompt_lens=operand(prompt_lens),
        )

    def batch(
        self, plan: BatchPlan, placement: Placement, exact: Callable[[], np.ndarray] | None = None, **own: Any
    ) -> InputBatch:
        """The views of what was written. `exact` None: exact lengths are copied from the device when asked for."""
        seq_lens, num_reqs = self._by_row[1], plan.num_reqs
        lengths = HostLengths(
            upper_bound=plan.num_computed_tokens + plan.num_scheduled_tokens,
            exact=exact or (lambda: seq_lens[:num_reqs].to("cpu", copy=True).numpy()),
        )
        return InputBatch(plan=plan, host_seq_lens=lengths, **{**placement.shared, **own})

    def fill_from_host(
        self,
        plan: BatchPlan,
        desc: BatchDescriptor,
        token_ids: np.ndarray,
        draft_ids: np.ndarray | None = None,
        is_dummy: bool = False,
    ) -> InputBatch:
        """A batch whose plan's counts are exact: everything is worked out in numpy and sent in one copy.

        `token_ids` [rows, positions]: what the rows may read. `draft_ids` as in InputBatch, None where no row has
        drafts.
        """
        placement = self.place(plan, desc)
        rows, num_reqs, num_tokens = placement.layout.token_rows, plan.num_reqs, len(placement.layout.token_rows)
        seq_lens = plan.num_computed_tokens + plan.num_scheduled_tokens
        positions = plan.num_computed_tokens[rows] + placement.layout.offsets
        ids, at, rope_lens, lens = send(
            self._device,
            token_ids[rows, positions],
            positions,
            np.maximum(plan.prompt_lens[rows], positions + 1),
            seq_lens,
        )
        self.input_ids[:num_tokens] = ids
        self.positions[:num_tokens] = at
        self.rope_lens[:num_tokens] = rope_lens
        self.seq_lens[:num_reqs] = lens
        drafts = {} if draft_ids is None else {"draft_ids": upload(self._device, draft_ids)[0]}
        return self.batch(plan, placement, seq_lens.copy, is_dummy=is_dummy, **drafts)
