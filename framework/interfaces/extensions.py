"""Seams of capabilities that most workers leave empty; those of version 0 have no implementation but `none`."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from workerkit.framework.interfaces.sampling import SlotPart

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape
    from workerkit.framework.interfaces.kv_cache import BatchTables, KVCaches
    from workerkit.framework.interfaces.model import LoadedModel, ModelOutput
    from workerkit.framework.interfaces.recurrent import RecurrentBatch
    from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput
    from workerkit.framework.interfaces.sampling import SamplerOutput


class ModelState(SlotPart):
    """State that a model keeps beside the paged cache (recurrent state, accepted counts, positions of pictures)."""

    def schedule(self, output: SchedulerOutput) -> None:
        """On the stream, before the forward: which states are to be kept after the step."""

    @abc.abstractmethod
    def preprocess(self, batch: InputBatch) -> None:
        """Before the metadata is built."""

    @abc.abstractmethod
    def extras(self, batch: InputBatch) -> Mapping[str, Any]:
        """Handed to the attention backend."""

    def extras_captured(self, batch: InputBatch, desc: BatchDescriptor) -> Mapping[str, Any]:
        """Like `extras`, for AttentionBackend.build_captured, whose rules hold: padded to `desc`, at addresses that
        are the same each time. A dummy batch (the capture's) reads and writes no request's state."""
        return self.extras(batch)

    def recurrent(self, batch: InputBatch) -> RecurrentBatch | None:
        """Where the recurrent states of the batch lie; None for a model without. A dummy batch gets rows that no
        request owns."""
        return None

    def rope_positions(self, batch: InputBatch) -> torch.Tensor | None:
        """[3, num_tokens_padded] int64, of time, height and width; None where positions are plain."""
        return None

    @abc.abstractmethod
    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        """After the request states have committed the step."""


@attrs.frozen(kw_only=True, eq=False)
class Embeddings:
    """What the layers get instead of the embedding of ids. T counts padding."""

    inputs: torch.Tensor  # [T, H]
    deepstack: tuple[torch.Tensor, ...] = ()  # [T, H] each, 0 where there is no picture: see ModelInputs


class Encoder(SlotPart):
    """Vision inputs."""

    @property
    def accepts_images(self) -> bool:
        """Whether requests may have pictures."""
        return False

    @abc.abstractmethod
    def free(self, req_ids: Sequence[str]) -> None:
        """Drop the encoder outputs of requests that left."""

    def reset(self) -> None:
        """Forget what was encoded, between steps: its memory is wanted, or the weights change."""

    @abc.abstractmethod
    def embed(self, batch: InputBatch) -> Embeddings | None:
        """None to embed the ids."""


class EPLBController(abc.ABC):
    """Balances experts over devices."""

    @abc.abstractmethod
    def prepare_load(self, loaded: LoadedModel) -> None:
        """Once, after the weights are in place."""

    @abc.abstractmethod
    def prepare_forward(self, num_tokens: int, has_prefill: bool) -> None:
        """Before each forward, with the unpadded token count."""

    @abc.abstractmethod
    def step(self, is_dummy: bool) -> None:
        """After each step, dummy steps included."""


class EPLBPolicy(abc.ABC):
    """Where replicas of experts go."""

    @abc.abstractmethod
    def rebalance(
        self, load: torch.Tensor, num_slots: int, old: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """load [layers, experts] -> (phy2log [layers, slots], log2phy [layers, experts, replicas], replica counts)."""


class PCPManager(abc.ABC):
    """Prefill context parallelism: splits the tokens of a step over ranks."""

    @abc.abstractmethod
    def local_shape(self, shape: BatchShape) -> BatchShape:
        """The largest rank-local shape, which is what graphs are chosen by."""

    @abc.abstractmethod
    def partition(
        self, batch: InputBatch, tables: BatchTables, desc: BatchDescriptor
    ) -> tuple[InputBatch, BatchTables]:
        """This rank's share."""

    @abc.abstractmethod
    def restore(self, output: ModelOutput, batch: InputBatch) -> ModelOutput:
        """Hidden states and taps of the global batch."""


class DCPManager(abc.ABC):
    """Decode context parallelism: each rank keeps a share of every context."""

    @abc.abstractmethod
    def localize(self, batch: InputBatch, tables: BatchTables) -> BatchTables:
        """Tables and slots of this rank's share."""


class PipelineStage(abc.ABC):
    """Pipeline parallelism: which layers run here, and what travels between stages."""

    @property
    @abc.abstractmethod
    def is_last(self) -> bool:
        """Whether this stage computes logits."""

    @abc.abstractmethod
    def receive(self, batch: InputBatch) -> torch.Tensor | None:
        """Hidden states of the stage before, [num_tokens_padded, H]; None on the first."""

    @abc.abstractmethod
    def send(self, output: ModelOutput) -> None:
        """To the stage after; called unless `is_last`."""

    @abc.abstractmethod
    def broadcast(self, output: SamplerOutput) -> None:
        """The last stage's tokens, to all others."""

    @abc.abstractmethod
    def receive_sampled(self, batch: InputBatch) -> SamplerOutput:
        """The other end of `broadcast`."""


class KVConnector(abc.ABC):
    """Moves KV blocks between workers."""

    @abc.abstractmethod
    def register(self, caches: KVCaches) -> None:
        """Once, when the caches exist."""

    @abc.abstractmethod
    def preempted(self, req_ids: Sequence[str]) -> None:
        """First thing in a step, before blocks are reused."""

    @abc.abstractmethod
    def no_forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The answer of a step that schedules no token."""

    @abc.abstractmethod
    def start_load(self, batch: InputBatch) -> None:
        """Before the forward."""

    @abc.abstractmethod
    def wait_saved(self) -> None:
        """After the forward."""

    @abc.abstractmethod
    def post_forward(self) -> None:
        """After drafts are proposed, whose KV may travel too."""
