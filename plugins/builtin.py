"""The parts that come with workerkit, registered through the same hook as anyone's.

Modules are named, not imported: listing and checking touch only the parts that a config selects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.registry import Registry, Role, Suits

WORKERKIT_API = 1
_C = "workerkit.components"


def _on(kind: str) -> Suits:
    def suits(chosen: Mapping[str, str]) -> str | None:
        return f"the device is {kind}" if chosen.get("device") == kind else None

    return suits


def _native(chosen: Mapping[str, str]) -> str | None:
    from workerkit.kernels.cpu.native.build import unavailable

    return "the CPU has AVX-512 with BF16" if chosen.get("device") == "cpu" and unavailable() is None else None


def _anywhere(chosen: Mapping[str, str]) -> str | None:
    return "works on every device"


@hookimpl
def worker_components(registry: Registry) -> None:
    """Register components/."""
    add = registry.add
    add(roles.WORKER, "npu", f"{_C}.worker.npu:NPUWorker")
    v1 = {"request_state": "host", "input_batch": "persistent", "block_table": "multi_group"}
    v2 = {"request_state": "ascend", "input_batch": "ascend", "block_table": "ascend"}
    add(roles.RUNNER, "v1", f"{_C}.runner.v1:NPUModelRunner", defaults=v1)
    add(roles.RUNNER, "v2", f"{_C}.runner.v2:NPUModelRunner", defaults=v2)
    add(roles.REQUEST_STATE, "host", f"{_C}.request_state.host:HostStates")
    add(roles.REQUEST_STATE, "ascend", f"{_C}.request_state.ascend:AscendRequestState")
    add(roles.INPUT_BATCH, "persistent", f"{_C}.input_batch.persistent:NPUInputBatch")
    add(roles.INPUT_BATCH, "ascend", f"{_C}.input_batch.ascend:AscendInputBatcher")
    add(roles.BLOCK_TABLE, "multi_group", f"{_C}.block_table.multi_group:MultiGroupBlockTable")
    add(roles.BLOCK_TABLE, "ascend", f"{_C}.block_table.ascend:AscendBlockTables")
    add(roles.BLOCK_TABLE, "reference", f"{_C}.block_table.reference:ReferenceBlockTables")
    add(roles.KV_CACHE, "paged", f"{_C}.kv_cache.paged:PagedKVCache")
    add(roles.ATTENTION, "cpu", f"{_C}.attention.cpu:CpuAttention", suits=_on("cpu"), priority=10)
    add(roles.ATTENTION, "sdpa", f"{_C}.attention.sdpa:SdpaAttention", suits=_on("cuda"), priority=10)
    add(roles.ATTENTION, "reference", f"{_C}.attention.reference:ReferenceAttention", suits=_anywhere)
    add(roles.KERNELS, "ordered", f"{_C}.kernels.ordered:OrderedKernels", parts={"libraries": "auto"})
    library = "workerkit.plugins.builtin_kernels"
    add(roles.KERNEL_LIBRARY, "native", f"{library}:NativeKernels", suits=_native, priority=20)
    add(roles.KERNEL_LIBRARY, "cpu", f"{library}:CpuKernels", suits=_on("cpu"), priority=10)
    add(roles.KERNEL_LIBRARY, "reference", f"{library}:ReferenceKernels", suits=_anywhere)
    add(roles.MODEL, "native", f"{_C}.model.native:NativeModel")
    hf = ("transformers", "transformers")
    brings = {"loader": "transformers"}
    add(roles.MODEL, "transformers", f"{_C}.model.transformers:TransformersModel", requires=hf, defaults=brings)
    add(roles.MODEL_LIBRARY, "native", f"{_C}.model.library:NativeLibrary")
    add(roles.DRAFT, "checkpoint", f"{_C}.model.draft:CheckpointDraft")
    add(roles.DRAFT, "random", f"{_C}.model.draft:RandomDraft")
    add(roles.DRAFT, "target", f"{_C}.model.draft:TargetDraft")
    add(roles.MODEL_STORE, "local", f"{_C}.loader.store:LocalModelStore")
    add(roles.LOADER, "auto_detect", f"{_C}.loader.auto:AutoLoader")
    add(roles.LOADER, "safetensors", f"{_C}.loader.safetensors:SafetensorsLoader")
    add(roles.LOADER, "gguf", f"{_C}.loader.gguf:GGUFLoader")
    add(roles.LOADER, "transformers", f"{_C}.loader.transformers:TransformersLoader", requires=hf)
    add(roles.LOADER, "random", f"{_C}.loader.random:RandomLoader")
    # In the order in which they run: what is possible, then penalties, then the shape of what is left. The bitmask of a
    # grammar comes before all of them.
    stages = {
        "allowed_token_ids": "bans:AllowedTokenIds",
        "logit_bias": "bans:LogitBias",
        "min_tokens": "bans:MinTokens",
        "penalties": "penalties:Penalties",
        "bad_words": "bans:BadWords",
        "temperature": "truncation:Temperature",
        "top_n_sigma": "truncation:TopNSigma",
        "min_p": "truncation:MinP",
        "top_k_top_p": "truncation:TopKTopP",
        "typical_p": "truncation:TypicalP",
    }
    add(
        roles.SAMPLER,
        "torch",
        f"{_C}.sampler.torch_sampler:TorchSampler",
        parts={"stages": tuple(stages)},
    )
    for name, where in stages.items():
        add(roles.SAMPLER_STAGE, name, f"{_C}.sampler.{where}")
    add(roles.REJECTION, "standard", f"{_C}.rejection.standard:StandardRejection")
    add(roles.REJECTION, "block", f"{_C}.rejection.block:BlockRejection")
    add(roles.REJECTION, "synthetic", f"{_C}.rejection.synthetic:SyntheticRejection")
    add(roles.VERIFY_BUDGET, "confidence", f"{_C}.verify_budget.confidence:ConfidenceBudget")
    add(roles.DEVICE, "cpu", f"{_C}.device.cpu:CpuDevice")
    add(roles.DEVICE, "cuda", f"{_C}.device.cuda:CudaDevice")
    add(roles.MEMORY_POOL, "storage", f"{_C}.device.memory_pool:StoragePool")
    add(roles.PARALLEL, "single", f"{_C}.parallel.single:SingleProcess")
    add(roles.OBSERVERS, "metrics", f"{_C}.observers.metrics:Metrics")
    add(roles.OBSERVERS, "tap", f"{_C}.observers.tap:Tap")
    add(roles.OBSERVERS, "timings", f"{_C}.observers.timings:Timings")
    add(roles.SCHEDULER, "continuous", f"{_C}.engine.scheduler:ContinuousScheduler")
    add(roles.TOKENIZER, "file", f"{_C}.engine.tokenizer:FileTokenizer")
    add(roles.CHAT_TEMPLATE, "jinja", f"{_C}.engine.chat_template:JinjaChatTemplate")
    add(roles.GRAMMAR, "bitmask", f"{_C}.grammar.bitmask:BitmaskGrammar")
    add(
        roles.STRUCTURED_OUTPUTS,
        "llguidance",
        f"{_C}.structured.llguidance:LLGuidance",
        requires=("llguidance", "structured"),  # `auto` passes over what is not installed
        suits=_anywhere,
        priority=10,
    )
    add(roles.STRUCTURED_OUTPUTS, "none", f"{_C}.structured.none:NoStructuredOutputs", suits=_anywhere)
    add(roles.ENGINE, "standalone", f"{_C}.engine.standalone:StandaloneEngine")
    # Each proposer may be a worker's speculator, or one of those that a composite chooses from.
    proposers = {
        "draft_model": "draft_model:DraftModelSpeculator",
        "eagle": "eagle:EagleSpeculator",
        "eagle3": "eagle:EagleSpeculator",
        "mtp": "eagle:EagleSpeculator",
        "medusa": "medusa:MedusaSpeculator",
        "dflash": "block:DFlash",
        "dspark": "block:DSpark",
        "ngram": "ngram:NgramSpeculator",
        "suffix": "suffix:SuffixSpeculator",
    }
    verified = {"rejection": "standard"}
    for name, where in proposers.items():
        add(roles.SPECULATOR, name, f"{_C}.speculator.{where}", defaults=verified)
        add(roles.PROPOSER, name, f"{_C}.speculator.{where}")
    add(roles.SPECULATOR, "composite", f"{_C}.speculator.composite:CompositeSpeculator", defaults=verified)
    add(roles.GRAPH, "compiled", f"{_C}.graph.compiled:CompiledGraphs", suits=_native, priority=10)
    add(roles.GRAPH, "cuda", f"{_C}.graph.cuda:CudaGraphManager", suits=_on("cuda"), priority=10)
    add(roles.GRAPH, "none", f"{_C}.graph.none:NoGraph", suits=_anywhere)
    add(roles.ENCODER, "vision", f"{_C}.encoder.vision:VisionEncoder")
    add(roles.ENCODER_GRAPH, "token_budget", f"{_C}.graph.encoder:EncoderAclGraphManager")
    add(roles.IMAGE_PROCESSOR, "patches", f"{_C}.image_processor.patches:PatchImageProcessor")
    add(roles.LORA, "peft", f"{_C}.lora.peft:PeftLoRA")
    add(roles.MODEL_STATE, "auto_detect", f"{_C}.model_state.auto:AutoModelState")
    add(roles.MODEL_STATE, "ascend", f"{_C}.model_state.ascend:AscendModelState")
    add(roles.MODEL_STATE, "ascend_mamba_hybrid", f"{_C}.model_state.mamba_hybrid:AscendMambaHybridModelState")
    none: tuple[tuple[Role[Any], str], ...] = (
        (roles.ENCODER_GRAPH, "graph.none:NoEncoderGraph"),
        (roles.MODEL_STATE, "model_state.none:NoModelState"),
        (roles.DRAFT, "speculator.none:NoDraft"),
        (roles.SPECULATOR, "speculator.none:NoSpeculator"),
        (roles.REJECTION, "speculator.none:NoRejection"),
        (roles.VERIFY_BUDGET, "speculator.none:NoVerifyBudget"),
        (roles.GRAMMAR, "grammar.none:NoGrammar"),
        (roles.LORA, "lora.none:NoLoRA"),
        (roles.ENCODER, "encoder.none:NoEncoder"),
        (roles.EPLB, "eplb.none:NoEPLB"),
        (roles.PCP, "context_parallel.none:NoPCP"),
        (roles.DCP, "context_parallel.none:NoDCP"),
        (roles.PIPELINE, "pipeline.none:NoPipeline"),
        (roles.KV_CONNECTOR, "kv_connector.none:NoKVConnector"),
    )
    for role, where in none:
        add(role, "none", f"{_C}.{where}")
