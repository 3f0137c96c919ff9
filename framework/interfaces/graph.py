"""Graphs: which captured shape a step runs in, and running it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.model import ModelInputs, ModelOutput
    from workerkit.framework.interfaces.vision import Grid, VisionOutput

    Forward = Callable[[ModelInputs], ModelOutput]


@attrs.frozen(kw_only=True)
class BatchShape:
    """What dispatch needs to know of a step, before it is built."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None = None  # when all rows schedule the same number of tokens
    max_query_len: int | None = None  # None: nobody counted


@attrs.frozen(kw_only=True)
class BatchDescriptor:
    """The shape a step is built for: padded to a captured size, or as it is.

    `full`: one graph holds the whole forward. `piecewise`: graphs hold what lies between calls of `attend`, which
    runs eagerly. What is captured for a `uniform_query_len`, or up to a `max_query_len`, serves no other rows.
    """

    mode: Literal["eager", "piecewise", "full"] = "eager"
    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None = None
    max_query_len: int | None = None


class GraphTasks:
    """Launches ops that take lengths from the host, which a captured graph remembers as they were at its capture.

    This one only launches: nothing is being captured, or ops read all lengths on the device. A manager that captures
    hands out one that has the ops of a graph launched again, with new parameters, each time the graph is replayed.
    """

    def launch(self, provider: str, op: Callable[[Mapping[str, Any]], None], parameters: Mapping[str, Any]) -> None:
        """`op(parameters)`, which writes into tensors that outlive the graph. The i-th launch of a provider gets the
        i-th parameters of AttentionBackend.host_parameters at replay."""
        op(parameters)


class GraphManager(abc.ABC):
    """Captures the model at chosen sizes and replays it."""

    needs_device_graphs: ClassVar[bool] = False  # whether it works on a device with `captures_graphs` only

    tasks: GraphTasks = GraphTasks()  # what attention launches its ops through, see AttentionBackend.build_captured

    @property
    @abc.abstractmethod
    def cases(self) -> tuple[BatchDescriptor, ...]:
        """What is to be captured, in this order: piecewise before full, large before small."""

    @abc.abstractmethod
    def dispatch(self, shape: BatchShape) -> BatchDescriptor:
        """The captured size to use, or eager, at the step's own size. Eager until all cases have been captured."""

    @abc.abstractmethod
    def capture(self, desc: BatchDescriptor, forward: Forward, inputs: ModelInputs) -> None:
        """Capture one case, on the stream. `inputs` are a made-up batch at the addresses that every step of this
        size will have; its slots are -1."""

    @abc.abstractmethod
    def run(self, desc: BatchDescriptor, forward: Forward, inputs: ModelInputs) -> ModelOutput:
        """Replay, or call `forward`. What a replay returns is valid until the next one."""

    @abc.abstractmethod
    def release(self) -> None:
        """Forget all that was captured, because addresses are about to change: dispatch says eager again."""


class EncoderGraphManager(abc.ABC):
    """Runs a vision tower over any pictures, packed into captured sizes: budgets of tokens."""

    @abc.abstractmethod
    def capture(self) -> None:
        """Capture at warm-up, after the text model's graphs."""

    @abc.abstractmethod
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[VisionOutput]:
        """pixels [patches, patch_dim] of pictures one after another -> what the tower makes of each, in memory of its
        own. Raises UnsupportedError for a network without a tower."""

    def release(self) -> None:  # noqa: B027  nothing was captured
        """Forget all that was captured, because addresses are about to change."""
