"""From vLLM's configuration and the workerkit config to one document: who decides what, and what is refused.

vLLM decides what its engine and the worker must agree on: the model, lengths and limits, the seed. The workerkit config
decides everything else: the parts, the type of weights and cache (`model.dtype`, unless it is `auto`), quantization,
the size of blocks and cache (unless vLLM's options name them), and how many drafts are proposed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workerkit.framework import config as configs
from workerkit.framework.errors import ConfigError
from workerkit.plugins.vllm import SECTION, VARIABLE

_log = logging.getLogger(__name__)
HEADLINE = "vLLM cannot run with this workerkit worker"
SPECULATOR = "workerkit.speculator"  # stands for ours in vLLM's speculative_config

# Option of vLLM, where it is in its configuration, and the values that ask for nothing of a worker. A field that a
# version of vLLM does not have is passed over.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("--tensor-parallel-size", "parallel_config.tensor_parallel_size", (1,)),
    ("--pipeline-parallel-size", "parallel_config.pipeline_parallel_size", (1,)),
    ("--data-parallel-size", "parallel_config.data_parallel_size", (1,)),
    ("--decode-context-parallel-size", "parallel_config.decode_context_parallel_size", (1,)),
    ("--prefill-context-parallel-size", "parallel_config.prefill_context_parallel_size", (1,)),
    ("--enable-expert-parallel", "parallel_config.enable_expert_parallel", (False,)),
    ("--enable-eplb", "parallel_config.enable_eplb", (False,)),
    ("--enable-dbo", "parallel_config.enable_dbo", (False,)),
    ("--enable-elastic-ep", "parallel_config.enable_elastic_ep", (False,)),
    ("--fully-sharded-loras", "lora_config.fully_sharded_loras", (False,)),
    ("--default-mm-loras", "lora_config.default_mm_loras", (None, {})),
    ("--enable-tower-connector-lora", "lora_config.enable_tower_connector_lora", (False,)),
    ("--kv-transfer-config", "kv_transfer_config", (None,)),
    ("--ec-transfer-config", "ec_transfer_config", (None,)),
    ("--weight-transfer-config", "weight_transfer_config", (None,)),
    ("watermarking", "watermark_config", (None,)),
    ("a diffusion model", "diffusion_config", (None,)),
    ("--enable-mm-embeds", "model_config.multimodal_config.enable_mm_embeds", (False,)),
    ("--mm-encoder-only", "model_config.multimodal_config.mm_encoder_only", (False,)),
    ("--mm-encoder-attn-backend", "model_config.multimodal_config.mm_encoder_attn_backend", (None,)),
    ("--mm-encoder-attn-dtype", "model_config.multimodal_config.mm_encoder_attn_dtype", (None,)),
    ("--ec-manager-config", "ec_manager_config.encoder_cache_manager_cls", (None,)),
    ("--runner", "model_config.runner_type", ("generate",)),
    ("--quantization", "model_config.quantization", (None,)),
    ("--enable-prompt-embeds", "model_config.enable_prompt_embeds", (False,)),
    ("--logits-processors", "model_config.logits_processors", (None, [])),
    ("--hf-overrides", "model_config.hf_overrides", (None, {})),
    ("--hf-config-path", "model_config.hf_config_path", (None,)),
    ("--logprobs-mode", "model_config.logprobs_mode", ("raw_logprobs", "processed_logprobs")),
    ("--return-sampling-mask", "model_config.return_sampling_mask", (False,)),
    ("--enable-return-routed-experts", "aux_output_config.enable_return_routed_experts", (False,)),
    ("--disable-sliding-window", "model_config.disable_sliding_window", (False,)),
    ("--sleep-preserve-parameter-names", "model_config.sleep_preserve_parameter_names", (None, [], ())),
    ("--kv-cache-dtype", "cache_config.cache_dtype", ("auto",)),
    ("--kv-sharing-fast-prefill", "cache_config.kv_sharing_fast_prefill", (False,)),
    ("--kv-offloading-size", "cache_config.kv_offloading_size", (None,)),
    ("--cpu-offload-gb", "offload_config.uva.cpu_offload_gb", (0,)),
    ("--load-format", "load_config.load_format", ("auto", "safetensors")),
    ("--attention-backend", "attention_config.backend", (None,)),
)


def source_of(vllm_config: Any) -> Mapping[str, Any]:
    """The workerkit config that was given, as a mapping. Raises ConfigError."""
    given = (vllm_config.additional_config or {}).get(SECTION) or os.environ.get(VARIABLE)
    if isinstance(given, str):
        return configs.read_file(Path(given))
    if isinstance(given, Mapping) and given:
        return given
    raise ConfigError([f"additional_config.{SECTION}: expected a file name or a mapping, got {given!r}"], HEADLINE)


def refusals(vllm_config: Any) -> Iterator[str]:
    """Options of vLLM that are set and that this worker does not serve."""
    for option, path, nothing in _REFUSED:
        value = _look_up(vllm_config, path, nothing[0])
        if value not in nothing:
            yield f"{option} ({path}) is not served: it is {_short(value)}, right would be {_short(nothing[0])}"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.model != SPECULATOR:
        yield (
            "--speculative-config is not served: the workerkit config names the speculator "
            "(components.speculator, limits.num_speculative_tokens)"
        )


def _look_up(value: Any, path: str, default: Any) -> Any:
    for name in path.split("."):
        if value is None or not hasattr(value, name):
            return default
        value = getattr(value, name)
    return value


def _short(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def document(vllm_config: Any, source: Mapping[str, Any], plans_ahead: bool) -> dict[str, Any]:
    """The config of the worker, with what vLLM decides. `plans_ahead`: whether a step is planned before the tokens of
    the one before are known. Raises ConfigError."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    decided: dict[str, Any] = {
        "model.source": str(model_folder(vllm_config)),
        "model.max_model_len": model.max_model_len,
        "limits.max_num_reqs": vllm_config.scheduler_config.max_num_seqs,
        "limits.max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "limits.seed": model.seed,
        # Stands for vLLM's: assembly checks that no part needs tokens sooner than it gets them.
        "components.scheduler": {"use": "continuous", "async_scheduling": plans_ahead},
    }
    if cache.user_specified_block_size:
        decided["cache.block_size"] = cache.block_size
    if _get(source, "model.dtype", "auto") == "auto":
        decided["model.dtype"] = str(model.dtype).removeprefix("torch.")
    if cache.kv_cache_memory_bytes:
        decided["cache.memory_bytes"] = cache.kv_cache_memory_bytes
        decided["cache.num_blocks"] = None
    if model.enforce_eager:
        decided["components.graph"] = "none"
    if (lora := vllm_config.lora_config) is not None:
        decided["components.lora"] = {
            "use": "peft",
            # Each request that the worker holds may have another one for a while: see `Adapters`.
            "max_adapters": max_adapters(vllm_config) + vllm_config.scheduler_config.max_num_seqs,
            "max_rank": lora.max_lora_rank,
        }
    if model.logprobs_mode == "processed_logprobs":
        decided["components.sampler.logprobs"] = "processed"
    if folder := vllm_config.profiler_config.torch_profiler_dir:
        decided["components.worker.profile_dir"] = folder
    for path, value in decided.items():
        if path.startswith(("limits.", "model.max")) and _get(source, path, value) != value:
            _log.info("%s is %s, from vLLM; the workerkit config says %s", path, value, _get(source, path, None))
    return configs.with_overrides(source, decided)


def max_adapters(vllm_config: Any) -> int:
    """How many may be loaded at a time; 0 without --enable-lora."""
    lora = vllm_config.lora_config
    return 0 if lora is None else max(lora.max_loras, lora.max_cpu_loras or 0)


def _get(document: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = configs.expand(document)
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def model_folder(vllm_config: Any) -> Path:
    """Where vLLM's model lies: a folder, or the snapshot of a repository that the hub's own library finds in its cache
    or fetches. Raises ConfigError."""
    model = vllm_config.model_config
    if (folder := Path(model.model)).is_dir():
        return folder.resolve()
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                allow_patterns=["*.json", "*.safetensors"],
            )
        )
    except Exception as error:  # of the network or of the hub, in many kinds
        raise ConfigError(
            [f"model {model.model!r} is no folder, and cannot be fetched: {type(error).__name__}: {error}"], HEADLINE
        ) from error
