"""Hands out hidden states of named layers while the worker serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from attrs import validators

from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.model import ModelOutput
from workerkit.framework.interfaces.observer import Observer


@attrs.frozen(kw_only=True)
class TapConfig:
    """Options of `tap`."""

    layers: tuple[str, ...] = attrs.field(
        validator=validators.min_len(1), metadata={"doc": "tap points of the model: embed, layers.0, layers.1 …"}
    )


@attrs.frozen(kw_only=True, eq=False)
class TappedRow:
    """Hidden states that one step computed for one request."""

    req_id: str
    first_position: int  # of the first row of each tensor
    states: dict[str, torch.Tensor]  # tap point -> [num_scheduled_tokens, H], a copy


class Tap(Observer):
    """Calls its subscribers with the states of each row of each step, on the device's stream."""

    def __init__(self, config: TapConfig) -> None:
        self._layers = config.layers
        self._subscribers: list[Callable[[TappedRow], None]] = []

    @property
    def taps(self) -> Sequence[str]:
        return self._layers

    def subscribe(self, subscriber: Callable[[TappedRow], None]) -> None:
        """From the next step on. Without subscribers nothing is copied."""
        self._subscribers.append(subscriber)

    @hookimpl
    def forward_finished(self, batch: InputBatch, output: ModelOutput) -> None:
        if not self._subscribers:
            return
        copies = {name: output.taps[name].clone() for name in self._layers}
        starts = np.asarray(batch.query_start_loc_np)
        for row, req_id in enumerate(batch.req_ids):
            begin, end = int(starts[row]), int(starts[row + 1])
            states = {name: tensor[begin:end] for name, tensor in copies.items()}
            tapped = TappedRow(req_id=req_id, first_position=int(batch.plan.num_computed_tokens[row]), states=states)
            for subscriber in self._subscribers:
                subscriber(tapped)
