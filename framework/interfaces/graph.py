"""Graphs: which captured shape a step runs in, and running it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from workerkit.framework.interfaces.model import ModelInputs, ModelOutput


@attrs.frozen(kw_only=True)
class BatchShape:
    """What dispatch needs to know of a step, before it is built."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None = None  # when all rows schedule the same number of tokens


@attrs.frozen(kw_only=True)
class BatchDescriptor:
    """The shape a step is built for: padded to a captured size, or as it is."""

    mode: str = "eager"  # eager | piecewise | full
    num_tokens: int
    num_reqs: int


class GraphManager(abc.ABC):
    """Captures the model at chosen sizes and replays it. Version 0: `none` is the only implementation."""

    @abc.abstractmethod
    def dispatch(self, shape: BatchShape) -> BatchDescriptor:
        """The captured size to use, or eager."""

    @abc.abstractmethod
    def capture(self, forward: Callable[[ModelInputs], ModelOutput]) -> None:
        """Capture at warm-up."""

    @abc.abstractmethod
    def run(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> ModelOutput:
        """Replay, or call `forward`."""


class EncoderGraphManager(abc.ABC):
    """Captured graphs of a vision or audio encoder, by token budget. Version 0."""

    @abc.abstractmethod
    def capture(self) -> None:
        """Capture at warm-up, after the text model's graphs."""
