"""Adapters: low-rank corrections of linear layers, chosen by each request."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from workerkit.framework.interfaces.sampling import SlotPart

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.request import SchedulerOutput


class AdaptedLinear(Protocol):
    """A linear layer that may be corrected."""

    in_features: int
    outputs: dict[str, int]  # name of each projection -> its output size; they lie side by side
    adapter: Callable[[torch.Tensor, torch.Tensor], None] | None
    """Given the input [T, in_features] and the output [T, sum of outputs], it adds to the latter in place."""


class LoRA(SlotPart):
    """Adapters, several of which may be in one batch."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Name of each that is loaded -> what identifies its weights."""
        return {}

    @abc.abstractmethod
    def load(self, name: str, source: str) -> None:
        """Read an adapter, between steps; one of that name is replaced. Raises ModelError when it does not fit the
        model, UnsupportedError for kinds that are not supported; nothing changes then."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Forget an adapter, between steps. Raises RequestError for an unknown name, or one in use."""

    def schedule(self, output: SchedulerOutput) -> bool:
        """On the host, first thing in a step: whether it needs what graphs do not hold."""
        return False

    @abc.abstractmethod
    def activate(self, batch: InputBatch) -> None:
        """Before the forward: which adapter each token uses."""

    def deactivate(self) -> None:
        """After the forward: drafts come from the network as it is."""
