"""Fakes of the device and of the parts around a forward: each does the least that its interface allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import attrs
import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import (
    DeviceContext,
    DeviceRuntime,
    MemoryInfo,
    MemoryPool,
    ParallelGroups,
    Pending,
)
from workerkit.framework.interfaces.extensions import (
    DCPManager,
    Embeddings,
    Encoder,
    EPLBController,
    EPLBPolicy,
    KVConnector,
    ModelState,
    PCPManager,
)
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape, EncoderGraphManager, GraphManager
from workerkit.framework.interfaces.kernels import OPS, KernelLibrary, Kernels, Program
from workerkit.framework.interfaces.kv_cache import BatchTables, KVCaches
from workerkit.framework.interfaces.lora import LoRA
from workerkit.framework.interfaces.model import LoadedModel, ModelInputs, ModelOutput
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput
from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.interfaces.vision import Grid, VisionOutput
from workerkit.framework.testing.fakes_graph import FakeGraphDevice
from workerkit.framework.testing.fakes_model import FAKE_MODEL

T = TypeVar("T")


class _Done(Pending[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._value: list[T] = []
        self._error: BaseException | None = None
        try:
            self._value.append(work())
        except Exception as error:  # handed out by `wait`, as a real stream does
            self._error = error

    def wait(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


class FakeDevice(DeviceRuntime):
    """Host memory; work runs at once, on the calling thread. Its graphs are recorded, see fakes_graph."""

    captures_graphs = True

    def __init__(self) -> None:
        self.graph_device = FakeGraphDevice()

    @property
    def kind(self) -> str:
        return "cpu"

    def initialize(self, local_rank: int) -> DeviceContext:
        return DeviceContext(device=torch.device("cpu"), dtype=torch.float32, local_rank=local_rank)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        return _Done(work)

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def copy_to_host(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return _Done(tensor.clone)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=1 << 20, total_bytes=1 << 21)

    def reset_peak_memory(self) -> None:
        """The fake peak is always the same."""

    def peak_memory_increase(self) -> int:
        return 1 << 10

    def health_text(self) -> str:
        return "Device : fake\nHealth : OK"

    def profiler_activities(self) -> tuple[Any, ...]:
        return (torch.profiler.ProfilerActivity.CPU,)

    def graphs(self) -> FakeGraphDevice:
        return self.graph_device

    def shutdown(self) -> None:
        """There is no stream to stop."""


class FakePool(MemoryPool):
    """Overwrites what it is told to give back with zeros, so that a missing restore shows; no memory moves."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, ...]] = {}

    def track(self, tag: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors[tag] = (*self._tensors.get(tag, ()), *tensors)

    def forget(self, tag: str) -> None:
        self._tensors.pop(tag, None)

    def discard(self, tag: str) -> int:
        tensors = self._tensors.get(tag, ())
        for tensor in tensors:
            tensor.zero_()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def restore(self, tag: str) -> None:
        """The tensors never lost their memory."""


class FakeParallel(ParallelGroups):
    """One process."""

    @property
    def world_size(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return 0

    @property
    def local_rank(self) -> int:
        return 0

    def initialize(self, context: DeviceContext) -> None:
        """There is nobody to meet."""

    def agree(self, desc: BatchDescriptor) -> BatchDescriptor:
        return desc

    def shutdown(self) -> None:
        """There is nobody to leave."""


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError("fake kernels compute nothing: name real ones for a part that needs them")


class FakeKernels(Kernels):
    """Every op is there and refuses to work, but for the choice of the likeliest token, which a greedy step needs."""

    def __init__(self) -> None:
        for op in OPS:
            setattr(self, op, _refuse)
        self.greedy_tokens = lambda logits: logits.argmax(dim=-1)

    @property
    def bindings(self) -> Mapping[str, str]:
        return dict.fromkeys(OPS, "fake")

    def prepare(self, context: DeviceContext) -> None:
        """There is nothing to load."""

    def rank(self, op: str) -> int:
        return 0

    def record(self, function: Callable[[], T], num_rows: int, max_rows: int) -> tuple[Program, T]:
        raise UnsupportedError("fake kernels cannot record their calls")


class FakeKernelLibrary(KernelLibrary):
    """Offers one op, `rms_norm`, which doubles."""

    @property
    def name(self) -> str:
        return "fake"

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return {"rms_norm": lambda x, weight, eps: x * 2}


@attrs.frozen(kw_only=True)
class FakeGraphConfig:
    """Options of `graph: fake`."""

    multiple: int = attrs.field(default=1, metadata={"doc": "tokens and requests are padded to multiples of it"})


class FakeGraph(GraphManager):
    """Pads as if sizes had been captured, and runs eagerly."""

    def __init__(self, config: FakeGraphConfig) -> None:
        self._multiple = config.multiple

    @property
    def cases(self) -> tuple[BatchDescriptor, ...]:
        return (self.dispatch(BatchShape(num_tokens=1, num_reqs=1)),)

    def dispatch(self, shape: BatchShape) -> BatchDescriptor:
        m = self._multiple
        return BatchDescriptor(
            mode="eager" if m == 1 else "full",
            num_tokens=-(-shape.num_tokens // m) * m,
            num_reqs=-(-shape.num_reqs // m) * m,
        )

    def capture(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> None:
        forward(inputs)

    def run(
        self, desc: BatchDescriptor, forward: Callable[[ModelInputs], ModelOutput], inputs: ModelInputs
    ) -> ModelOutput:
        return forward(inputs)

    def release(self) -> None:
        """Nothing is kept."""


class FakeEncoderGraph(EncoderGraphManager):
    """Captures nothing."""

    def capture(self) -> None:
        """There is no encoder."""

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[VisionOutput]:
        raise UnsupportedError("the fake network sees no pictures")


class FakeModelState(ModelState):
    """Keeps nothing, and hands the backend a mark."""

    def preprocess(self, batch: InputBatch) -> None:
        """There is no recurrent state."""

    def extras(self, batch: InputBatch) -> Mapping[str, Any]:
        return {"fake": batch.num_reqs}

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        """There is no recurrent state."""


class FakeLoRA(LoRA):
    """Adapters that change nothing."""

    def __init__(self) -> None:
        self._adapters: dict[str, str] = {}

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._adapters

    def load(self, name: str, source: str) -> None:
        self._adapters[name] = source

    def remove(self, name: str) -> None:
        del self._adapters[name]

    def schedule(self, output: SchedulerOutput) -> bool:
        """Graphs hold all there is."""
        return False

    def activate(self, batch: InputBatch) -> None:
        """The base model for every row."""

    def deactivate(self) -> None:
        """Nothing was activated."""


@attrs.frozen(kw_only=True)
class FakeEncoderConfig:
    """Options of `encoder: fake`."""

    embeds: bool = attrs.field(
        default=False, metadata={"doc": "hand out the embeddings that FakeNetwork would make itself"}
    )


class FakeEncoder(Encoder):
    """Nothing to encode."""

    def __init__(self, config: FakeEncoderConfig) -> None:
        self._embeds = config.embeds

    def free(self, req_ids: Sequence[str]) -> None:
        """There are no encoder outputs."""

    def embed(self, batch: InputBatch) -> Embeddings | None:
        if not self._embeds:
            return None
        embeds = torch.zeros(batch.num_tokens_padded, FAKE_MODEL.hidden_size)
        embeds[:, 0] = batch.input_ids
        return Embeddings(inputs=embeds)


class FakeEPLB(EPLBController):
    """Balances nothing."""

    def prepare_load(self, loaded: LoadedModel) -> None:
        """There are no experts."""

    def prepare_forward(self, num_tokens: int, has_prefill: bool) -> None:
        """There are no experts."""

    def step(self, is_dummy: bool) -> None:
        """There are no experts."""


class FakeEPLBPolicy(EPLBPolicy):
    """Slot i holds expert i modulo their number."""

    def rebalance(
        self, load: torch.Tensor, num_slots: int, old: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers, experts = load.shape
        expert = torch.arange(num_slots) % experts
        counts = torch.bincount(expert, minlength=experts)
        replicas = torch.full((experts, int(counts.max())), -1)
        replicas[expert, torch.arange(num_slots) // experts] = torch.arange(num_slots)
        return expert.expand(layers, -1), replicas.expand(layers, -1, -1), counts.expand(layers, -1)


class FakePCP(PCPManager):
    """One rank."""

    def local_shape(self, shape: BatchShape) -> BatchShape:
        return shape

    def partition(
        self, batch: InputBatch, tables: BatchTables, desc: BatchDescriptor
    ) -> tuple[InputBatch, BatchTables]:
        return batch, tables

    def restore(self, output: ModelOutput, batch: InputBatch) -> ModelOutput:
        return output


class FakeDCP(DCPManager):
    """One rank."""

    def localize(self, batch: InputBatch, tables: BatchTables) -> BatchTables:
        return tables


class FakeKVConnector(KVConnector):
    """Moves nothing."""

    def register(self, caches: KVCaches) -> None:
        """Nobody else reads them."""

    def preempted(self, req_ids: Sequence[str]) -> None:
        """Nothing is under way."""

    def no_forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput()

    def start_load(self, batch: InputBatch) -> None:
        """Nothing to load."""

    def wait_saved(self) -> None:
        """Nothing to save."""

    def post_forward(self) -> None:
        """Nothing to save."""


class FakeObserver(Observer):
    """Remembers the names of the hooks that were called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def step_started(self) -> None:
        """See StepSpec."""
        self.seen.append("step_started")

    @hookimpl
    def batch_prepared(self) -> None:
        """See StepSpec."""
        self.seen.append("batch_prepared")

    @hookimpl
    def forward_finished(self) -> None:
        """See StepSpec."""
        self.seen.append("forward_finished")

    @hookimpl
    def tokens_sampled(self) -> None:
        """See StepSpec."""
        self.seen.append("tokens_sampled")

    @hookimpl
    def drafts_proposed(self) -> None:
        """See StepSpec."""
        self.seen.append("drafts_proposed")

    @hookimpl
    def step_finished(self) -> None:
        """See StepSpec."""
        self.seen.append("step_finished")

    @hookimpl
    def output_ready(self) -> None:
        """See StepSpec."""
        self.seen.append("output_ready")

    @hookimpl
    def host_tokens_read(self) -> None:
        """See StepSpec."""
        self.seen.append("host_tokens_read")
