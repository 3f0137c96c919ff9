"""The worker that vLLM creates and drives: its interface on one side, an assembled worker on the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from workerkit.framework.assembly import assemble
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import LoadedModel, Network
from workerkit.framework.interfaces.request import ModelRunnerOutput, NewRequest, StepOutput
from workerkit.framework.interfaces.speculation import DraftWeights
from workerkit.framework.roles import DEVICE, ENCODER
from workerkit.plugins.vllm import settings
from workerkit.plugins.vllm.adapter import FailingOutput, Requests, Step
from workerkit.plugins.vllm.adapters import Adapters
from workerkit.plugins.vllm.cache import Blocks, layout_of, specs_of_layers
from workerkit.plugins.vllm.pictures import problems

_ANY_SIZE = 2**62  # bytes, where only the kinds of layers are asked for


class PendingOutput(AsyncModelRunnerOutput):
    """A step that may still be running."""

    def __init__(self, requests: Requests, step: Step, pending: StepOutput) -> None:
        self._requests = requests
        self._step = step
        self._pending = pending

    def get_output(self) -> FailingOutput:
        """Wait for the tokens."""
        return self._requests.answer(self._step, self._pending.get())


class VllmWorker(WorkerBase):
    """One assembled worker. Methods of its extensions are called by their names, as `collective_rpc` does."""

    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self._ahead = bool(vllm_config.scheduler_config.async_scheduling)
        source = settings.source_of(vllm_config)
        self._assembly = assemble(settings.document(vllm_config, source, self._ahead))
        self._worker = self._assembly.worker
        self._adapters = Adapters(self._worker, settings.max_adapters(vllm_config))
        self._requests = Requests(self._check, self._adapters, vllm_config.model_config.seed or 0)
        self._step: Step | None = None
        self._asleep: tuple[str, ...] = ()  # tags
        if hidden := sorted(name for name in self._worker.extension_methods if hasattr(type(self), name)):
            raise UnsupportedError(
                f"components.worker_extensions offers {', '.join(hidden)}, which vLLM's worker has already "
                "(of its own, or from --worker-extension-cls): one would hide the other"
            )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._worker.extension_methods:
            return lambda *args, **kwargs: self._worker.call(name, *args, **kwargs)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _check(self, new: NewRequest) -> None:
        """vLLM bounds prompts by what its tokenizer knows, which may be more than the model does."""
        size = self._worker.shape.vocab_size
        if wrong := [token for token in new.token_ids if not 0 <= token < size]:
            raise RequestError(f"token id {wrong[0]} is not in the model's vocabulary, 0 to {size - 1}")
        if new.images and (tower := self._network.vision) and (problem := next(problems(new.images, tower), None)):
            raise RequestError(problem)
        self._worker.check_request(new.sampling)

    # Starting

    def init_device(self) -> None:
        self._worker.init_device()
        self.device = torch.device("cpu")  # vLLM's own tensors

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise UnsupportedError("weights that arrive later (elastic expert parallelism) are not served")
        try:
            self._worker.load_model()
            self._check_pictures()
        except BaseException:
            self._worker.shutdown()  # vLLM drops a worker that fails here, and its thread would stay
            raise

    def _check_pictures(self) -> None:
        multimodal = self.model_config.multimodal_config
        if multimodal is not None and not multimodal.language_model_only and not self._worker.accepts_images:
            raise UnsupportedError(
                f"{self._network.config.architecture} reads more than text under vLLM, and this worker has no vision "
                "tower for it (components.model, components.encoder); --language-model-only serves its text"
            )

    @property
    def _network(self) -> Network:
        return self._assembly.value(LoadedModel).network

    def _layers(self) -> tuple[AttentionLayer, ...]:
        loaded, draft = self._assembly.value(LoadedModel), self._assembly.value(DraftWeights)
        return (*loaded.network.attention_layers, *draft.attention_layers)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """vLLM's KVCacheSpec of each layer, by name."""
        return specs_of_layers(self._worker.plan_kv_cache(_ANY_SIZE), self._layers())

    def determine_available_memory(self) -> int:
        """Bytes that the cache takes, by what the workerkit config says of it."""
        layout = self._worker.plan_kv_cache(self._worker.determine_available_memory())
        return layout.num_blocks * layout.block_bytes

    def update_max_model_len(self, max_model_len: int) -> None:
        """vLLM shortens it when the cache is small; to the worker it is an upper bound."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The cache as vLLM cuts it; the memory is the worker's own, and laid out as its parts like it."""
        planned = self._worker.plan_kv_cache(_ANY_SIZE)
        layout, tables = layout_of(kv_cache_config, planned, self._layers())
        self._requests.blocks = Blocks(layout, tables)
        self._worker.initialize_kv_cache(layout)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        begin = time.perf_counter()
        self._worker.compile_or_warm_up_model()
        return CompilationTimes(language_model=time.perf_counter() - begin, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the engine may be asked for."""
        return ("generate",)

    # Steps

    def execute_model(self, scheduler_output: Any) -> FailingOutput | None:
        """None: `sample_tokens` follows."""
        step = self._requests.read(scheduler_output)
        self._worker.execute_model(step.output)
        if not scheduler_output.total_num_scheduled_tokens:
            return self._requests.answer(step, ModelRunnerOutput())
        self._step = step
        return None

    def sample_tokens(self, grammar_output: Any) -> FailingOutput | PendingOutput:
        assert self._step is not None, "vLLM calls execute_model first"
        step, self._step = self._step, None
        if not step.output.num_scheduled_tokens:  # all of its requests were refused
            return self._requests.answer(step, ModelRunnerOutput())
        pending = PendingOutput(
            self._requests, step, self._worker.sample_tokens(self._requests.masks(step, grammar_output))
        )
        return pending if self._ahead else pending.get_output()

    def take_draft_token_ids(self) -> Any:
        """Drafts that the worker holds; asked for after each step, or to compute masks."""
        return self._requests.drafts()

    def execute_dummy_batch(self) -> None:
        self._worker.execute_dummy_batch()

    # Between steps

    def sleep(self, level: int = 1) -> None:
        """See `Worker.sleep`. Requests that vLLM keeps come back as preempted ones."""
        if self._asleep and level == 1:  # `discard` came before
            return
        self._worker.execute_model(self._requests.forget())
        self._worker.sleep(level)
        self._asleep = ("weights", "kv_cache") if level == 2 else ("kv_cache",)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """vLLM takes weights for asleep at level 1, too, and may wake them last: ours were never."""
        wanted = tuple(tag for tag in self._asleep if tags is None or tag in tags)
        self._asleep = tuple(tag for tag in self._asleep if tag not in wanted)
        if wanted:
            self._worker.wake_up(wanted)

    def discard(self, tags: Sequence[str]) -> None:
        """The cache alone, which is what sleep of level 1 gives back."""
        if [*tags] != ["kv_cache"]:
            raise UnsupportedError(f"discard gives back the kv_cache, not {', '.join(tags)}")
        self.sleep(1)

    def synchronize_device(self) -> None:
        self._assembly.get(DEVICE).synchronize()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **limits: Mapping[str, int]) -> None:
        """Chrome traces, in `--profiler-config.torch_profiler_dir` or the workerkit config's profile_dir."""
        if profile_prefix or limits:
            raise UnsupportedError(f"profile takes no prefix and no limits: {profile_prefix!r}, {dict(limits)}")
        self._worker.profile(is_start)

    def check_health(self) -> None:
        self._worker.check_health()

    def check_integrity(self) -> None:
        """Raise IntegrityError when blocks, rows and slots disagree."""
        self._worker.check_integrity()

    def reset_encoder_cache(self) -> None:
        """Forget the pictures that were encoded."""
        self._assembly.get(DEVICE).submit(self._assembly.get(ENCODER).reset).wait()

    def get_model(self) -> Any:
        return self._network

    def add_lora(self, lora_request: Any) -> bool:
        return self._adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        return self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        return self._adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        return self._adapters.numbers

    def shutdown(self) -> None:
        self._worker.shutdown()
