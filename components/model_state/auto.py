"""Chooses the model state by the layers of the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workerkit.components.model_state.ascend import AscendModelState
from workerkit.components.model_state.mamba_hybrid import AscendMambaHybridModelState
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext, MemoryPool
from workerkit.framework.interfaces.extensions import ModelState
from workerkit.framework.interfaces.graph import BatchDescriptor, GraphManager
from workerkit.framework.interfaces.kv_cache import KVCacheManager, KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.recurrent import RecurrentBatch
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput


class AutoModelState(ModelState):
    """`ascend_mamba_hybrid` for a network with recurrent layers, `ascend` for any other."""

    def __init__(
        self,
        shape: WorkerShape,
        context: DeviceContext,
        loaded: LoadedModel,
        kv_cache: KVCacheManager,
        caches: KVCaches,
        pool: MemoryPool,
        graph: GraphManager,
    ) -> None:
        self._delegate: ModelState
        if loaded.network.recurrent_layers:
            self._delegate = AscendMambaHybridModelState(shape, context, loaded, kv_cache, caches, pool, graph)
        else:
            self._delegate = AscendModelState(shape, context, loaded)

    def add(self, slot: int, request: NewRequest) -> None:
        self._delegate.add(slot, request)

    def clear(self, slot: int) -> None:
        self._delegate.clear(slot)

    def schedule(self, output: SchedulerOutput) -> None:
        self._delegate.schedule(output)

    def preprocess(self, batch: InputBatch) -> None:
        self._delegate.preprocess(batch)

    def extras(self, batch: InputBatch) -> Mapping[str, Any]:
        return self._delegate.extras(batch)

    def extras_captured(self, batch: InputBatch, desc: BatchDescriptor) -> Mapping[str, Any]:
        return self._delegate.extras_captured(batch, desc)

    def recurrent(self, batch: InputBatch) -> RecurrentBatch | None:
        return self._delegate.recurrent(batch)

    def rope_positions(self, batch: InputBatch) -> torch.Tensor | None:
        return self._delegate.rope_positions(batch)

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        self._delegate.commit(batch, output)
