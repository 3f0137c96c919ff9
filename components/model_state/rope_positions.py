"""Positions of models with M-RoPE: text counts on, a picture's tokens count along time, height and width."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from workerkit.components.buffers.upload import to_device
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.request import ImageInput, NewRequest
from workerkit.framework.interfaces.runner import WorkerShape


def rope_index(num_tokens: int, images: Sequence[ImageInput]) -> np.ndarray:
    """[3, num_tokens] int64: positions along time, height and width.

    Those of a text are equal. Those of a picture begin where the text before it ends, and the text behind it goes on
    from the larger of its sides, as in Hugging Face transformers (`Qwen3VLModel.get_rope_index`).
    """
    parts, end, position = [], 0, 0
    for image in images:
        length = image.start - end
        parts.append(_text(position, length))
        position += length
        frames, height, width = image.grid
        merge = math.isqrt(frames * height * width // image.num_tokens)
        sides = height // merge, width // merge
        parts.append(position + np.indices((frames, *sides)).reshape(3, -1))
        position += max(sides)
        end = image.start + image.num_tokens
    parts.append(_text(position, num_tokens - end))
    return np.concatenate(parts, axis=1)


def _text(position: int, length: int) -> np.ndarray:
    return np.broadcast_to(position + np.arange(length), (3, length))


class RopePositions:
    """By slot, for requests with pictures only: positions of the known tokens, and what is added behind them."""

    def __init__(self, shape: WorkerShape, device: torch.device) -> None:
        self._positions = torch.zeros(3, shape.max_num_batched_tokens, dtype=torch.int64, device=device)  # of a step
        self._deltas = torch.zeros(shape.max_num_reqs, dtype=torch.int64, device=device)
        self._known: dict[int, torch.Tensor] = {}  # [3, prefill_len]

    def add(self, slot: int, request: NewRequest) -> None:
        """Work out where the request's tokens stand."""
        delta = 0
        if request.images:
            known = rope_index(request.prefill_len, request.images)
            delta = int(known.max()) + 1 - request.prefill_len
            self._known[slot] = to_device(self._deltas.device, known)
        self._deltas[slot] = delta

    def clear(self, slot: int) -> None:
        """The slot's request is gone."""
        self._known.pop(slot, None)

    def of(self, batch: InputBatch) -> torch.Tensor:
        """See ModelState.rope_positions; at the same address in every step."""
        positions = self._positions[:, : batch.num_tokens_padded]
        if batch.is_dummy:
            return positions.copy_(batch.positions)
        positions.copy_(batch.positions + self._deltas[batch.idx_mapping][batch.token_rows])
        if self._known:
            self._put_known(positions, batch)
        return positions

    def _put_known(self, positions: torch.Tensor, batch: InputBatch) -> None:
        plan = batch.plan
        for row in np.flatnonzero(plan.is_prefilling):
            known = self._known.get(int(plan.slots[row]))
            if known is not None:
                start, end = batch.query_start_loc_np[row : row + 2]
                first = plan.num_computed_tokens[row]
                positions[:, start:end] = known[:, first : first + end - start]
