"""The worker of one device, any device: it drives the stages of its parts' life and passes steps to the runner."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import validators

from workerkit.framework.errors import StageError, UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime, MemoryPool, ParallelGroups
from workerkit.framework.interfaces.extensions import Encoder
from workerkit.framework.interfaces.kv_cache import AttentionLayer, KVCacheManager, KVLayout
from workerkit.framework.interfaces.lora import LoRA
from workerkit.framework.interfaces.model import LoadedModel, Model, Network
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.runner import ModelRunner, WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.sections import CacheSection
from workerkit.framework.interfaces.speculation import DraftModel, DraftWeights
from workerkit.framework.interfaces.stages import KVStage, Later
from workerkit.framework.interfaces.worker import Health, Worker
from workerkit.framework.interfaces.worker_extension import ExtensionMethods, WorkerExtension

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class NPUWorkerConfig:
    """Options of the worker."""

    profile_dir: str = attrs.field(default="profiles", metadata={"doc": "folder that profiler traces are written to"})
    warm_up: bool = attrs.field(default=True, metadata={"doc": "run a dummy step before the first real one"})
    reserve_bytes: int = attrs.field(
        default=64 * 2**20,
        validator=validators.ge(0),
        metadata={"doc": "memory left alone when the cache's size is found by profiling"},
    )


class Stage(enum.IntEnum):
    """Where in its life a worker is."""

    ASSEMBLED = 0
    DEVICE = 1
    LOADED = 2
    READY = 3
    ASLEEP = 4
    SHUT_DOWN = 5


def parse_text_output(text: str) -> None:
    """Raise UnsupportedError unless every line that mentions Health ends in `: OK`.

    A report without any such line says nothing about the device's health and is refused too.
    """
    lines = [line for line in text.splitlines() if "Health" in line]
    if not lines:
        raise UnsupportedError(f"the device's health report has no Health line: {text[:200]!r}")
    for line in lines:
        if (state := line.rpartition(":")[2].strip()) != "OK":
            raise UnsupportedError(f"the device reports health {state!r}: {line.strip()!r}")


class NPUWorker(Worker):
    """Owns no tensor of its own: weights live in LoadedModel, the cache in KVCaches, requests in the runner's parts."""

    def __init__(
        self,
        config: NPUWorkerConfig,
        cache: CacheSection,
        device: DeviceRuntime,
        parallel: ParallelGroups,
        pool: MemoryPool,
        attention: Later[AttentionBackend],
        kv_cache: Later[KVCacheManager],
        context: Later[DeviceContext],
        shape: Later[WorkerShape],
        model: Later[Model],
        loaded: Later[LoadedModel],
        draft_model: Later[DraftModel],
        draft: Later[DraftWeights],
        lora: Later[LoRA],
        encoder: Later[Encoder],
        layout: Later[KVLayout],
        runner: Later[ModelRunner],
        extensions: tuple[WorkerExtension, ...],
        kv_stage: KVStage,
        hooks: StepHooks,
    ) -> None:
        self._config = config
        self._cache = cache
        self._device = device
        self._parallel = parallel
        self._pool = pool
        self._attention = attention
        self._kv_cache = kv_cache
        self._context = context
        self._shape = shape
        self._model = model
        self._loaded = loaded
        self._draft_model = draft_model
        self._draft = draft
        self._lora = lora
        self._encoder = encoder
        self._layout = layout
        self._runner = runner
        self._extensions = ExtensionMethods(extensions)
        self._kv_stage = kv_stage
        self._hooks = hooks
        self._stage = Stage.ASSEMBLED
        self._asleep: dict[str, int] = {}  # tag -> level it sleeps at
        self._cache_generation = 0
        self._profiler: torch.profiler.profile | None = None

    def _at(self, method: str, *allowed: Stage) -> None:
        if self._stage not in allowed:
            wanted = " or ".join(stage.name for stage in allowed)
            raise StageError(f"{method} belongs to stage {wanted}, the worker is in stage {self._stage.name}")

    # Starting

    def init_device(self) -> None:
        self._at("init_device", Stage.ASSEMBLED)
        self._context()
        self._shape()
        self._stage = Stage.DEVICE

    def load_model(self) -> None:
        self._at("load_model", Stage.DEVICE)
        quantized = self._cache.quantization.uses - {"none"}
        if quantized and not self._attention().reads_quantized:
            raise UnsupportedError(
                f"components.attention: {type(self._attention()).__name__} reads no quantised keys and values, and "
                f"cache.quantization asks for {', '.join(sorted(quantized))}"
            )
        self._device.submit(self._load).wait()
        self._stage = Stage.LOADED

    def _load(self) -> None:
        # On the stream, like all tensor work: on a CPU each thread that computes has a pool of its own, and two pools
        # on the same cores slow each other down.
        self._track_weights()

    def _track_weights(self) -> None:
        self._pool.forget("weights")
        self._pool.track("weights", tuple(tensor for network in self._networks() for _, tensor in network.weights()))

    def _networks(self) -> list[Network]:
        """Those with weights, each once: a draft may be the target itself."""
        target, draft = self._loaded().network, self._draft().network
        return [target] if draft is None or draft is target else [target, draft]

    def _layers(self) -> tuple[AttentionLayer, ...]:
        return (*self._loaded().network.attention_layers, *self._draft().attention_layers)

    def determine_available_memory(self) -> int:
        self._at("determine_available_memory", Stage.LOADED)
        if self._cache.num_blocks is not None or self._cache.memory_bytes is not None:
            return self._cache.memory_bytes or 0
        shape = self.shape
        memory = self._device.memory()
        wanted = int(memory.total_bytes * self._cache.memory_fraction)
        in_use = memory.total_bytes - memory.free_bytes
        layout = self._plan(wanted)
        self._device.reset_peak_memory()
        num_reqs = min(shape.max_num_reqs, shape.max_num_batched_tokens)
        two_blocks = attrs.evolve(layout, num_blocks=2)
        trial = self._device.submit(lambda: self._kv_stage.trial(two_blocks, ModelRunner)).wait()
        trial.execute_dummy_batch(shape.max_num_batched_tokens, num_reqs)
        peak = self._device.peak_memory_increase()
        graphs = trial.graph_memory()
        self._pool.forget("kv_cache")  # the trial's
        available = wanted - in_use - peak - graphs - self._config.reserve_bytes
        _log.info(
            "memory: %d of %d MiB allowed, %d in use, a step peaks at %d, graphs take %d: %d MiB for the KV cache",
            *(value >> 20 for value in (wanted, memory.total_bytes, in_use, peak, graphs, available)),
        )
        return max(available, 0)

    def plan_kv_cache(self, available_bytes: int) -> KVLayout:
        self._at("plan_kv_cache", Stage.LOADED)
        return self._plan(available_bytes)

    def _plan(self, available_bytes: int) -> KVLayout:
        states = [state for layer in self._loaded().network.recurrent_layers for state in layer.states]
        state_bytes = sum(math.prod(state.shape) * getattr(torch, state.dtype).itemsize for state in states)
        sizes = self._attention().kernel_block_sizes
        return self._kv_cache().plan(self._layers(), sizes, available_bytes, state_bytes)

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        self._at("initialize_kv_cache", Stage.LOADED)
        self._kv_stage.enter(layout)
        self._device.submit(self._runner).wait()
        self._stage = Stage.READY

    def compile_or_warm_up_model(self) -> None:
        self._at("compile_or_warm_up_model", Stage.READY)
        if self._config.warm_up:
            self.execute_dummy_batch()
        self._runner().capture()

    def start(self) -> None:
        self.init_device()
        self.load_model()
        self.initialize_kv_cache(self.plan_kv_cache(self.determine_available_memory()))
        self.compile_or_warm_up_model()

    @property
    def shape(self) -> WorkerShape:
        return self._shape()

    @property
    def layout(self) -> KVLayout:
        return self._layout()

    @property
    def cache_generation(self) -> int:
        return self._cache_generation

    def check_request(self, params: SamplingParams) -> None:
        self._at("check_request", Stage.READY, Stage.ASLEEP)
        self._runner().check_request(params)

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._lora().adapters

    @property
    def accepts_images(self) -> bool:
        return self._encoder().accepts_images

    def load_adapter(self, name: str, source: str) -> None:
        self._at("load_adapter", Stage.LOADED, Stage.READY)
        self._device.submit(lambda: self._lora().load(name, source)).wait()

    def remove_adapter(self, name: str) -> None:
        self._at("remove_adapter", Stage.LOADED, Stage.READY)
        self._device.submit(lambda: self._lora().remove(name)).wait()

    # Steps

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._at("execute_model", Stage.READY)
        return self._runner().execute_model(output)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        self._at("sample_tokens", Stage.READY)
        return self._runner().sample_tokens(grammar)

    def execute_dummy_batch(self) -> None:
        self._at("execute_dummy_batch", Stage.READY)
        self._runner().execute_dummy_batch(1, 1)

    # Between steps

    @property
    def extension_methods(self) -> tuple[str, ...]:
        return self._extensions.names

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        # Not before: what an extension asks for later would come to life out of its order.
        self._at("call", Stage.READY, Stage.ASLEEP)
        return self._extensions.call(method, *args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        self._at("sleep", Stage.READY)
        if level not in (1, 2):
            raise UnsupportedError(f"sleep level {level}: 1 (weights stay on the host) or 2 (weights are dropped)")
        if live := self._runner().num_requests:
            raise StageError(f"{live} requests are live; finish or abort them before the worker sleeps")
        self._runner().release_graphs()
        self._device.submit(self._encoder().reset).wait()
        self._device.synchronize()
        freed = self._pool.discard("kv_cache")
        self._cache_generation += 1
        self._asleep["kv_cache"] = level
        if level == 2:
            for network in self._networks():
                freed += sum(tensor.nbytes for _, tensor in network.weights())
                network.release()
            self._track_weights()  # what is left: plain tensors, which come back where they were
            self._pool.discard("weights")
            self._asleep["weights"] = level
        self._stage = Stage.ASLEEP
        _log.info("asleep at level %d: %d MiB given back", level, freed >> 20)

    def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        self._at("wake_up", Stage.ASLEEP)
        if unknown := set(tags) - {"weights", "kv_cache"}:
            raise UnsupportedError(f"wake_up: no tag {sorted(unknown)}; known: weights, kv_cache")
        self._device.submit(lambda: self._restore(tags)).wait()
        if not self._asleep:
            self._runner().capture()
            self._stage = Stage.READY

    def _restore(self, tags: tuple[str, ...]) -> None:
        for tag in tags:
            if self._asleep.pop(tag, None) is None:
                continue
            self._pool.restore(tag)
            if tag == "weights":
                self._model().reload_weights(self._loaded())
                self._draft_model().reload_weights(self._draft())
                self._track_weights()

    def check_health(self) -> Health:
        self._at("check_health", *(stage for stage in Stage if Stage.DEVICE <= stage <= Stage.ASLEEP))
        parse_text_output(self._device.health_text())
        return Health(degraded=self._hooks.failures)

    def profile(self, is_start: bool = True) -> None:
        self._at("profile", Stage.READY)
        if is_start:
            if self._profiler is not None:
                raise StageError("the profiler is running already")
            # V2's steps run on the device's stream, which on the CPU is another thread.
            everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            activities = self._device.profiler_activities()
            self._profiler = torch.profiler.profile(activities=activities, experimental_config=everywhere)
            self._profiler.start()
            return
        if self._profiler is None:
            raise StageError("the profiler is not running")
        self._device.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = Path(self._config.profile_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self._parallel.rank}-{len(list(folder.glob('*.json'))):03d}.trace.json"
        profiler.export_chrome_trace(str(path))
        _log.warning("profile written to %s", path)

    def check_integrity(self) -> None:
        if self._stage in (Stage.READY, Stage.ASLEEP):
            self._runner().check_integrity()

    def shutdown(self) -> None:
        if self._stage is Stage.SHUT_DOWN:
            return
        started = self._stage is not Stage.ASSEMBLED
        self._stage = Stage.SHUT_DOWN
        if started:
            self._device.shutdown()
            self._parallel.shutdown()
