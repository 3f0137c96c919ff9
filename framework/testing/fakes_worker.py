"""A fake worker: the shortest life in which a runner of any kind can be built and driven; and an extension for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime, ParallelGroups
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import KVCacheManager, KVLayout
from workerkit.framework.interfaces.lora import LoRA
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.runner import ModelRunner, WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import DraftWeights
from workerkit.framework.interfaces.stages import KVStage, Later
from workerkit.framework.interfaces.worker import Health, Worker
from workerkit.framework.interfaces.worker_extension import ExtensionMethods, WorkerExtension


class FakeExtension(WorkerExtension):
    """Adds one method."""

    def fake_echo(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it was given."""
        return args, kwargs


class FakeWorker(Worker):
    """Enters each stage and does nothing else there: no profiling, no sleep."""

    def __init__(
        self,
        device: DeviceRuntime,
        parallel: ParallelGroups,
        attention: AttentionBackend,
        kernels: Kernels,
        kv_cache: Later[KVCacheManager],
        context: Later[DeviceContext],
        shape: Later[WorkerShape],
        loaded: Later[LoadedModel],
        draft: Later[DraftWeights],
        lora: Later[LoRA],
        runner: Later[ModelRunner],
        extensions: tuple[WorkerExtension, ...],
        stage: KVStage,
        hooks: StepHooks,
    ) -> None:
        self._device = device
        self._parallel = parallel
        self._attention = attention
        self._kernels = kernels
        self._kv_cache = kv_cache
        self._context = context
        self._shape = shape
        self._loaded = loaded
        self._draft = draft
        self._lora = lora
        self._runner = runner
        self._extensions = ExtensionMethods(extensions)
        self._stage = stage
        self._hooks = hooks
        self._layout: KVLayout | None = None

    def init_device(self) -> None:
        self._context()
        self._shape()

    def load_model(self) -> None:
        self._loaded()
        self._draft()

    def determine_available_memory(self) -> int:
        return self._device.memory().free_bytes

    def plan_kv_cache(self, available_bytes: int) -> KVLayout:
        layers = (*self._loaded().network.attention_layers, *self._draft().attention_layers)
        return self._kv_cache().plan(layers, self._attention.kernel_block_sizes, available_bytes)

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        self._stage.enter(layout)
        self._layout = layout
        self._runner()

    def compile_or_warm_up_model(self) -> None:
        """Nothing is cold."""

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
        if self._layout is None:
            raise StageError("initialize_kv_cache comes first")
        return self._layout

    def check_request(self, params: SamplingParams) -> None:
        self._runner().check_request(params)

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._lora().adapters

    @property
    def accepts_images(self) -> bool:
        return False

    def load_adapter(self, name: str, source: str) -> None:
        self._lora().load(name, source)

    def remove_adapter(self, name: str) -> None:
        self._lora().remove(name)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self._runner().execute_model(output)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        return self._runner().sample_tokens(grammar)

    def execute_dummy_batch(self) -> None:
        self._runner().execute_dummy_batch(1, 1)

    @property
    def extension_methods(self) -> tuple[str, ...]:
        return self._extensions.names

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._extensions.call(method, *args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        """It never tires."""

    def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """It never sleeps."""

    def check_health(self) -> Health:
        return Health(degraded=self._hooks.failures)

    def profile(self, is_start: bool = True) -> None:
        """There is nothing to see."""

    def check_integrity(self) -> None:
        self._runner().check_integrity()

    def shutdown(self) -> None:
        self._parallel.shutdown()
        self._device.shutdown()
