"""The model runner: one step of a worker."""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs

from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceRuntime, ParallelGroups
from workerkit.framework.interfaces.extensions import (
    DCPManager,
    Encoder,
    EPLBController,
    KVConnector,
    ModelState,
    PCPManager,
    PipelineStage,
)
from workerkit.framework.interfaces.graph import EncoderGraphManager, GraphManager
from workerkit.framework.interfaces.kv_cache import KVCacheManager
from workerkit.framework.interfaces.lora import LoRA
from workerkit.framework.interfaces.observer import Observer, StepHooks
from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.sampling import Grammar, Sampler
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import RejectionSampler, Speculator, VerifyBudget


@attrs.frozen(kw_only=True)
class WorkerShape:
    """Stage value: the worker's limits, resolved against the model."""

    max_model_len: int  # L
    max_num_reqs: int  # R
    max_num_batched_tokens: int  # T
    vocab_size: int  # V
    num_speculative_tokens: int = 0  # K


@attrs.frozen(kw_only=True, eq=False)
class RunnerParts:
    """What every runner works with, whichever its version. Assembly fills it field by field, like a constructor."""

    device: DeviceRuntime
    parallel: ParallelGroups
    attention: AttentionBackend
    kv_cache: KVCacheManager
    graph: GraphManager
    encoder_graph: EncoderGraphManager
    model_state: ModelState
    sampler: Sampler
    rejection: RejectionSampler
    grammar: Grammar
    speculator: Speculator
    verify_budget: VerifyBudget
    lora: LoRA
    encoder: Encoder
    eplb: EPLBController
    pcp: PCPManager
    dcp: DCPManager
    pipeline: PipelineStage
    kv_connector: KVConnector
    observers: tuple[Observer, ...]
    hooks: StepHooks


class ModelRunner(abc.ABC):
    """Turns a SchedulerOutput into tokens. `execute_model` and `sample_tokens` alternate."""

    overlaps_steps: ClassVar[bool] = False
    """`sample_tokens` returns before the step's tokens are known, so the next step may be planned meanwhile."""

    @abc.abstractmethod
    def check_request(self, params: SamplingParams) -> None:
        """Ask every SlotPart. Raises RequestError for parameters that they cannot serve."""

    @abc.abstractmethod
    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Update requests and run the forward. None: `sample_tokens` must follow. An answer: nothing was scheduled.

        Raises RequestError for an output that contradicts the runner's state; nothing is then changed.
        """

    @abc.abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        """Consume the last forward, exactly once. Raises StageError when there is none."""

    @abc.abstractmethod
    def execute_dummy_batch(self, num_tokens: int, num_reqs: int) -> None:
        """A made-up step that joins every collective and touches no request."""

    @abc.abstractmethod
    def capture(self) -> None:
        """Capture graphs; again after `release_graphs`."""

    @abc.abstractmethod
    def graph_memory(self) -> int:
        """Bytes of the device that `capture` will take, estimated by capturing two graphs and forgetting them."""

    @abc.abstractmethod
    def release_graphs(self) -> None:
        """Forget captured graphs: memory that they read is about to move."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError when blocks, rows and slots disagree."""

    @property
    @abc.abstractmethod
    def num_requests(self) -> int:
        """Requests that hold a slot."""
