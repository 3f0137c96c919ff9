"""The worker: one device's share of an engine."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import attrs

from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams


@attrs.frozen(kw_only=True)
class Health:
    """What `check_health` found: parts that were switched off. An unhealthy device raises instead."""

    degraded: tuple[str, ...] = ()


class Worker(abc.ABC):
    """The life of a worker, in the order of its methods. One called out of order raises StageError."""

    @abc.abstractmethod
    def init_device(self) -> None:
        """Open the device and join the process groups."""

    @abc.abstractmethod
    def load_model(self) -> None:
        """Build the network and read the weights."""

    @abc.abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take, found by profiling a step of the largest size.

        `cache.memory_bytes` is returned as it is, and 0 when `cache.num_blocks` decides.
        """

    @abc.abstractmethod
    def plan_kv_cache(self, available_bytes: int) -> KVLayout:
        """How this worker would cut that much memory. Raises CacheError when one request of full length cannot fit."""

    @abc.abstractmethod
    def initialize_kv_cache(self, layout: KVLayout) -> None:
        """Allocate the caches and build the parts that live on them."""

    @abc.abstractmethod
    def compile_or_warm_up_model(self) -> None:
        """Capture graphs and run a dummy step."""

    @abc.abstractmethod
    def start(self) -> None:
        """All of the above in one call, for a worker that stands alone."""

    @property
    @abc.abstractmethod
    def shape(self) -> WorkerShape:
        """Known after `init_device`."""

    @property
    @abc.abstractmethod
    def layout(self) -> KVLayout:
        """Known after `initialize_kv_cache`."""

    @property
    def cache_generation(self) -> int:
        """Grows whenever the KV cache has lost what was in it: who keeps blocks for later use must forget them then."""
        return 0

    @abc.abstractmethod
    def check_request(self, params: SamplingParams) -> None:
        """Raises RequestError for parameters that this worker's parts cannot serve. After `initialize_kv_cache`."""

    @property
    @abc.abstractmethod
    def adapters(self) -> Mapping[str, str]:
        """Name of each adapter that requests may use -> what identifies its weights. After `load_model`."""

    @property
    @abc.abstractmethod
    def accepts_images(self) -> bool:
        """Whether requests may have pictures. After `load_model`."""

    @abc.abstractmethod
    def load_adapter(self, name: str, source: str) -> None:
        """See LoRA.load."""

    @abc.abstractmethod
    def remove_adapter(self, name: str) -> None:
        """See LoRA.remove."""

    @abc.abstractmethod
    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """See ModelRunner."""

    @abc.abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        """See ModelRunner."""

    @abc.abstractmethod
    def execute_dummy_batch(self) -> None:
        """One made-up decode step."""

    @property
    @abc.abstractmethod
    def extension_methods(self) -> tuple[str, ...]:
        """Names that `call` knows."""

    @abc.abstractmethod
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method that a worker extension adds, and return what it returns. After `initialize_kv_cache`.

        Raises UnsupportedError for a name that no extension offers, and whatever the method raises.
        """

    @abc.abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Level 1 frees the KV cache and keeps weights on the host, level 2 drops them too. No request may be live."""

    @abc.abstractmethod
    def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Undo `sleep`; weights that were dropped are read again. The cache comes back empty."""

    @abc.abstractmethod
    def check_health(self) -> Health:
        """Raises UnsupportedError when the device reports anything but OK, or when it cannot be asked."""

    @abc.abstractmethod
    def profile(self, is_start: bool = True) -> None:
        """Start a torch profiler, or stop it and write a Chrome trace."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """See ModelRunner."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Free everything; can be called at any stage, and twice."""
