"""Applies the bitmasks that the engine sends for its structured requests."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import GrammarOutput, NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import Grammar


class BitmaskGrammar(Grammar):
    """One call of `apply_grammar_bitmask` a step, for the structured rows alone.

    Masks find their rows by request id. A request of the masks that is not in the batch takes one mask row, which is
    let be.
    """

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._words = -(-shape.vocab_size // 32)
        self._device = context.device
        self._kernels = kernels
        self._structured = np.zeros(shape.max_num_reqs, dtype=bool)  # by slot

    def add(self, slot: int, request: NewRequest) -> None:
        self._structured[slot] = request.sampling.structured_outputs is not None

    def clear(self, slot: int) -> None:
        self._structured[slot] = False

    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput | None) -> torch.Tensor:
        """Raises RequestError when the masks have not one row for each logits row, or too few words."""
        structured = self._structured[batch.plan.slots]
        if grammar is None and not np.count_nonzero(structured):
            return logits
        # Which mask row each logits row gets; without one: those that may sample get 0 bits, the others stay.
        mask_rows = np.full(batch.num_logits, -1)
        if grammar is not None:
            self._place(grammar, batch, mask_rows)
        must = np.repeat(structured & ~batch.plan.is_partial, np.diff(batch.cu_num_logits_np))
        rows = np.flatnonzero(must | (mask_rows >= 0))
        if not len(rows):
            return logits
        taken = np.zeros((len(rows), self._words), dtype=np.int32)
        if grammar is not None:
            given = mask_rows[rows] >= 0
            taken[given] = grammar.bitmask[mask_rows[rows[given]], : self._words]
        (where,) = upload(self._device, rows)
        return self._kernels.apply_grammar_bitmask(logits, where, self._upload(taken))

    def _place(self, grammar: GrammarOutput, batch: InputBatch, mask_rows: np.ndarray) -> None:
        batch_rows = {req_id: row for row, req_id in enumerate(batch.req_ids)}
        num_rows, num_words = grammar.bitmask.shape
        begin = 0
        for req_id in grammar.req_ids:
            row = batch_rows.get(req_id)
            if row is None:
                begin += 1
                continue
            start, end = batch.cu_num_logits_np[row : row + 2]
            mask_rows[start:end] = np.arange(begin, begin + end - start)
            begin += end - start
        if begin != num_rows or num_words < self._words:
            raise RequestError(
                f"the bitmasks of {list(grammar.req_ids)} are {num_rows} rows of {num_words} words; "
                f"right: {begin} rows, one a logits row, of {self._words} words"
            )

    def _upload(self, bitmask: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(bitmask)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)
