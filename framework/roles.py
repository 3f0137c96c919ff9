"""The roles of a worker. See ARCHITECTURE.md for the table; `workerkit components` prints it with what is installed."""

from __future__ import annotations

from typing import Any

from workerkit.framework.checks import (
    extension_methods_are_distinct,
    extensions_open_no_device,
    graphs_are_captured_by_the_device,
    host_tokens_are_known,
    one_draft_is_enough,
)
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import InputBatchBuilder, RequestStates
from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime, MemoryPool, ParallelGroups
from workerkit.framework.interfaces.engine import Engine, Scheduler
from workerkit.framework.interfaces.extensions import (
    DCPManager,
    Encoder,
    EPLBController,
    EPLBPolicy,
    KVConnector,
    ModelState,
    PCPManager,
    PipelineStage,
)
from workerkit.framework.interfaces.graph import EncoderGraphManager, GraphManager
from workerkit.framework.interfaces.image import ImageProcessor
from workerkit.framework.interfaces.kernels import KernelLibrary, Kernels
from workerkit.framework.interfaces.kv_cache import BlockTables, KVCacheManager, KVCaches, KVLayout
from workerkit.framework.interfaces.lora import LoRA
from workerkit.framework.interfaces.model import LoadedModel, Model, ModelLibrary, ModelLoader
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.runner import ModelRunner, RunnerParts, WorkerShape
from workerkit.framework.interfaces.sampling import Grammar, Sampler, SamplerStage
from workerkit.framework.interfaces.sections import CacheSection, LimitsSection, ModelSection
from workerkit.framework.interfaces.speculation import (
    DraftModel,
    DraftWeights,
    RejectionSampler,
    Speculator,
    VerifyBudget,
)
from workerkit.framework.interfaces.store import ModelStore
from workerkit.framework.interfaces.structured import StructuredOutputs
from workerkit.framework.interfaces.text import ChatTemplate, Tokenizer
from workerkit.framework.interfaces.worker import Worker
from workerkit.framework.interfaces.worker_extension import WorkerExtension
from workerkit.framework.registry import Registry, Role
from workerkit.framework.stages import allocate_caches, load_draft, load_model, open_device, resolve_shape

WORKER_EXTENSIONS = Role(
    "worker_extensions", WorkerExtension, "methods that plugins add to the worker", many=True, per_worker=True
)
WORKER = Role("worker", Worker, "one device's share of an engine", default="npu")
RUNNER = Role("runner", ModelRunner, "turns a scheduler's step into tokens", default="v2")
REQUEST_STATE = Role(
    "request_state", RequestStates, "stable slots, and what each request has computed", per_worker=True
)
INPUT_BATCH = Role("input_batch", InputBatchBuilder, "tensors of a step from its plan", per_worker=True)
BLOCK_TABLE = Role("block_table", BlockTables, "which blocks each request owns", per_worker=True)
KV_CACHE = Role("kv_cache", KVCacheManager, "groups, layout and memory of the paged cache", default="paged")
ATTENTION = Role("attention", AttentionBackend, "how queries meet the paged cache", default="auto")
GRAPH = Role("graph", GraphManager, "captured graphs", default="auto", per_worker=True)
ENCODER_GRAPH = Role(
    "encoder_graph", EncoderGraphManager, "captured graphs of an encoder", default="token_budget", per_worker=True
)
MODEL = Role("model", Model, "produces the target network", default="native")
MODEL_STATE = Role("model_state", ModelState, "state beside the paged cache", default="auto_detect", per_worker=True)
MODEL_LIBRARY = Role("model_library", ModelLibrary, "networks by architecture name", default="native")
LOADER = Role("loader", ModelLoader, "reads checkpoints", default="auto_detect")
MODEL_STORE = Role("model_store", ModelStore, "named models and where files are", default="local")
DRAFT = Role("draft", DraftModel, "weights of a draft", default="none")
SPECULATOR = Role("speculator", Speculator, "proposes drafts", default="none", per_worker=True)
PROPOSER = Role("proposer", Speculator, "proposers of a composite", many=True, nested=True, per_worker=True)
REJECTION = Role("rejection", RejectionSampler, "verifies drafts", default="standard", per_worker=True)
SAMPLER = Role("sampler", Sampler, "logits to tokens", default="torch", per_worker=True)
SAMPLER_STAGE = Role(
    "sampler_stage", SamplerStage, "one step of logits processing", many=True, nested=True, per_worker=True
)
LORA = Role("lora", LoRA, "adapters", default="none", per_worker=True)
ENCODER = Role("encoder", Encoder, "pictures of a batch", default="vision", per_worker=True)
GRAMMAR = Role("grammar", Grammar, "applies the bitmasks of structured outputs", default="bitmask", per_worker=True)
VERIFY_BUDGET = Role("verify_budget", VerifyBudget, "how many drafts are verified", default="none", per_worker=True)
MEMORY_POOL = Role("memory_pool", MemoryPool, "gives memory back during sleep", default="storage", per_worker=True)
EPLB = Role("eplb", EPLBController, "balances experts", default="none", version=0, per_worker=True)
EPLB_POLICY = Role("eplb_policy", EPLBPolicy, "where replicas of experts go", version=0)
PCP = Role("pcp", PCPManager, "prefill context parallelism", default="none", version=0)
DCP = Role("dcp", DCPManager, "decode context parallelism", default="none", version=0)
PIPELINE = Role("pipeline", PipelineStage, "pipeline parallelism", default="none", version=0)
KV_CONNECTOR = Role(
    "kv_connector", KVConnector, "moves KV blocks between workers", default="none", version=0, per_worker=True
)
PARALLEL = Role("parallel", ParallelGroups, "process groups", default="single")
DEVICE = Role("device", DeviceRuntime, "memory, streams and copies of one device", default="cpu")
KERNELS = Role("kernels", Kernels, "named tensor functions, bound op by op", default="ordered")
KERNEL_LIBRARY = Role("kernel_library", KernelLibrary, "offers tensor functions", many=True, nested=True)
OBSERVERS = Role("observers", Observer, "parts that watch steps", many=True, per_worker=True)
SCHEDULER = Role("scheduler", Scheduler, "decides what each step computes", default="continuous")
TOKENIZER = Role("tokenizer", Tokenizer, "text to ids and back", default="file")
CHAT_TEMPLATE = Role("chat_template", ChatTemplate, "messages to prompt text", default="jinja")
IMAGE_PROCESSOR = Role("image_processor", ImageProcessor, "picture files to patches", default="patches")
STRUCTURED_OUTPUTS = Role("structured_outputs", StructuredOutputs, "compiles schemas and grammars", default="auto")
ENGINE = Role("engine", Engine, "one worker with a scheduler in front", default="standalone")

# In the order of a worker's construction, which is also the order of `auto`: device first.
ROLES: tuple[Role[Any], ...] = (
    DEVICE,
    PARALLEL,
    MEMORY_POOL,
    KERNELS,
    KERNEL_LIBRARY,
    ATTENTION,
    MODEL_STORE,
    LOADER,
    MODEL_LIBRARY,
    MODEL,
    DRAFT,
    KV_CACHE,
    RUNNER,
    REQUEST_STATE,
    INPUT_BATCH,
    BLOCK_TABLE,
    MODEL_STATE,
    GRAPH,
    ENCODER_GRAPH,
    SAMPLER,
    SAMPLER_STAGE,
    REJECTION,
    GRAMMAR,
    SPECULATOR,
    PROPOSER,
    VERIFY_BUDGET,
    LORA,
    ENCODER,
    EPLB,
    EPLB_POLICY,
    PCP,
    DCP,
    PIPELINE,
    KV_CONNECTOR,
    OBSERVERS,
    WORKER_EXTENSIONS,
    WORKER,
    SCHEDULER,
    TOKENIZER,
    CHAT_TEMPLATE,
    IMAGE_PROCESSOR,
    STRUCTURED_OUTPUTS,
    ENGINE,
)


def new_registry() -> Registry:
    """The roles and stage values of a worker, and no implementation yet."""
    registry = Registry()
    for role in ROLES:
        registry.add_role(role)
    registry.sections.update(model=ModelSection, limits=LimitsSection, cache=CacheSection)
    registry.bundles.add(RunnerParts)
    registry.checks += [
        extension_methods_are_distinct,
        extensions_open_no_device,
        graphs_are_captured_by_the_device,
        host_tokens_are_known,
        one_draft_is_enough,
    ]
    registry.published.add(KVLayout)
    registry.producers.update(
        {
            DeviceContext: open_device,
            WorkerShape: resolve_shape,
            LoadedModel: load_model,
            DraftWeights: load_draft,
            KVCaches: allocate_caches,
        }
    )
    return registry
