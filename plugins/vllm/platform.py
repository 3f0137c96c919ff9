"""The platform that vLLM finds when a workerkit config was given: it puts our worker in, and refuses what it lacks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any, ClassVar

from vllm.exceptions import VLLMValidationError
from vllm.platforms.cpu import CpuPlatform

from workerkit.components.loader.hf_config import read_hf_config
from workerkit.framework.checks import parts
from workerkit.framework.errors import ConfigError, WorkerkitError, did_you_mean
from workerkit.framework.interfaces.runner import ModelRunner
from workerkit.framework.interfaces.sampling import SlotPart
from workerkit.framework.interfaces.sections import CacheSection, LimitsSection
from workerkit.framework.plan import Plan, make_plan
from workerkit.framework.plugins import load_plugins
from workerkit.plugins.vllm import SECTION, settings
from workerkit.plugins.vllm.params import sampling_params, served_extra_args, unserved

_log = logging.getLogger(__name__)
_HERE = "workerkit.plugins.vllm"
_WORKER = f"{_HERE}.worker.VllmWorker"
_UNSEEN = {"video": 0, "audio": 0}  # how many of each a prompt may have
_SCHEDULERS = {True: f"{_HERE}.scheduler.FailingAsyncScheduler", False: f"{_HERE}.scheduler.FailingScheduler"}


def chosen_platform() -> str:
    """The qualified name of the platform that vLLM runs on."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    return f"{kind.__module__}.{kind.__qualname__}"


class WorkerkitPlatform(CpuPlatform):
    """To vLLM it is a CPU, whatever the worker's device is: vLLM itself touches none.

    That also spares its shutdown a call that fails where torch was built without an accelerator.
    """

    device_name = "workerkit"
    additional_env_vars: ClassVar[list[str]] = ["WORKERKIT_CONFIG"]  # Ray's workers are told of it
    # What `validate_request` may check, in the processes that have seen the configuration.
    _extra_args: ClassVar[frozenset[str] | None] = None

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """There is no kernel of vLLM's to replace: none is launched."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """The block size stays as `check_and_update_config` has left it."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Raises ConfigError with every problem: in the workerkit config, and options of vLLM that are not served."""
        if vllm_config.model_config is None:  # one of vLLM's own, made to have defaults
            return
        source = settings.source_of(vllm_config)
        problems = [*settings.refusals(vllm_config), *_foreign_classes(vllm_config)]
        try:
            plan = make_plan(load_plugins().registry, settings.document(vllm_config, source, plans_ahead=False))
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems], settings.HEADLINE) from None
        if problems:
            raise ConfigError(problems, settings.HEADLINE)
        cls._extra_args = served_extra_args(
            name for _, part, _ in parts(plan.nodes, SlotPart) for name in part.parameters
        )
        vllm_config.additional_config = {**(vllm_config.additional_config or {}), SECTION: dict(source)}
        _update(vllm_config, plan)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request before it enters the engine. Raises VLLMValidationError, which the HTTP API answers with 400
        (any other with 500)."""
        if problems := [f"{name} is not served by this worker" for name in unserved(params)]:
            raise VLLMValidationError("; ".join(problems))
        for name in params.extra_args or ():
            if cls._extra_args is not None and name not in cls._extra_args:
                hint = did_you_mean(name, cls._extra_args)
                raise VLLMValidationError(f"extra_args: no part of this worker reads {name!r}; {hint}")
        try:
            sampling_params(params, 0)
        except (ValueError, TypeError) as error:
            raise VLLMValidationError(str(error.args[0])) from error  # those of attrs carry more than the message


def _foreign_classes(vllm_config: Any) -> Iterator[str]:
    for option, value, ours in (
        ("--worker-cls", vllm_config.parallel_config.worker_cls, ("auto", _WORKER)),
        ("--scheduler-cls", vllm_config.scheduler_config.scheduler_cls, (None, *_SCHEDULERS.values())),
    ):
        if value not in ours:
            yield f"{option} is not served: it is {value!r}, and the worker brings its own"


def _update(vllm_config: Any, plan: Plan) -> None:
    """vLLM's configuration for the worker of that plan."""
    from vllm.config import CompilationMode, CUDAGraphMode, MultiModalConfig, SpeculativeConfig

    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    vllm_config.parallel_config.worker_cls = _WORKER
    vllm_config.cache_config.block_size = plan.sections[CacheSection].block_size
    if scheduler.async_scheduling and (why := _why_steps_wait(plan)):
        _log.info("asynchronous scheduling is off: %s", why)
        scheduler.async_scheduling = False
    scheduler.scheduler_cls = _SCHEDULERS[bool(scheduler.async_scheduling)]
    if vllm_config.cache_config.enable_prefix_caching and _keeps_states(vllm_config):
        _log.info(
            "prefix caching is off: the model has recurrent layers, and vLLM's blocks hold nothing of their states"
        )
        vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.cache_config.mamba_cache_mode = "none"  # no longer what prefix caching asks for
        vllm_config.cache_config.mamba_block_size = None  # likewise
    if (multimodal := vllm_config.model_config.multimodal_config) is not None:
        # Our towers take normalised pixels. And what is no picture is refused by vLLM, with HTTP 400.
        multimodal.mm_device_do_normalize = False
        multimodal.limit_per_prompt.update(MultiModalConfig(limit_per_prompt=_UNSEEN).limit_per_prompt)
    # vLLM makes room for drafts when it has a speculative_config. It checks that again when its engine starts: of the
    # methods without a draft model, this alone goes with asynchronous scheduling. vLLM's scheduler knows no methods.
    if (count := plan.sections[LimitsSection].num_speculative_tokens) and vllm_config.speculative_config is None:
        vllm_config.speculative_config = SpeculativeConfig(
            method="ngram_gpu",
            model=settings.SPECULATOR,
            num_speculative_tokens=count,
            target_model_config=vllm_config.model_config,
            target_parallel_config=vllm_config.parallel_config,
        )
    # vLLM loads no network of its own, so there is nothing for it to compile or capture.
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # torch's threads do not survive a fork
    # vLLM would leave a worker in a process of its own all cores but one; the worker's threads wait for nobody.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def _keeps_states(vllm_config: Any) -> bool:
    try:
        return bool(read_hf_config(settings.model_folder(vllm_config)).recurrent_layers)
    except WorkerkitError:
        return False  # the worker reads it, too, and says what is wrong with it


def _why_steps_wait(plan: Plan) -> str | None:
    for name, runner, _ in parts(plan.nodes, ModelRunner):
        if not runner.overlaps_steps:
            return f"{name} waits for its tokens"
    for name, part, _ in parts(plan.nodes, SlotPart):
        if part.reads_host_tokens:
            return f"{name} reads sampled tokens on the host"
    return None
