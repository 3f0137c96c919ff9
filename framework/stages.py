"""How stage values come to be: each from the parts and values that exist before it, once for each worker."""

from __future__ import annotations

from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime, MemoryPool, ParallelGroups
from workerkit.framework.interfaces.kv_cache import KVCacheManager, KVCaches, KVLayout
from workerkit.framework.interfaces.model import LoadedModel, Model, ModelLoader
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sections import LimitsSection, ModelSection
from workerkit.framework.interfaces.speculation import DraftModel, DraftWeights


def open_device(device: DeviceRuntime, parallel: ParallelGroups) -> DeviceContext:
    """The device, with the process groups joined."""
    context = device.initialize(parallel.local_rank)
    parallel.initialize(context)
    return context


def resolve_shape(model: ModelSection, limits: LimitsSection, loader: ModelLoader) -> WorkerShape:
    """The limits, checked against what the model's file says of itself."""
    config = loader.read_config()
    length = model.max_model_len or config.max_position_embeddings
    if length > config.max_position_embeddings:
        raise ModelError(
            f"model.max_model_len: {length} is more than the {config.max_position_embeddings} positions "
            f"that {model.source} was made for"
        )
    return WorkerShape(
        max_model_len=length,
        max_num_reqs=limits.max_num_reqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=config.vocab_size,
        num_speculative_tokens=limits.num_speculative_tokens,
    )


def load_model(model: Model, context: DeviceContext) -> LoadedModel:
    """The target network; on an open device."""
    return model.load()


def load_draft(draft: DraftModel, loaded: LoadedModel) -> DraftWeights:
    """The draft, after the target that it may share weights with."""
    return draft.load()


def allocate_caches(
    kv_cache: KVCacheManager, pool: MemoryPool, layout: KVLayout, loaded: LoadedModel, draft: DraftWeights
) -> KVCaches:
    """The cache of the target's layers and the draft's; freed while the worker sleeps."""
    caches = kv_cache.allocate(layout, (*loaded.network.attention_layers, *draft.attention_layers))
    pool.track("kv_cache", caches.storages)
    return caches
