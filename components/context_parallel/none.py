"""One rank holds every context."""

from __future__ import annotations

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import DCPManager, PCPManager
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape
from workerkit.framework.interfaces.kv_cache import BatchTables
from workerkit.framework.interfaces.model import ModelOutput


class NoPCP(PCPManager):
    """The local batch is the global one."""

    def local_shape(self, shape: BatchShape) -> BatchShape:
        return shape

    def partition(
        self, batch: InputBatch, tables: BatchTables, desc: BatchDescriptor
    ) -> tuple[InputBatch, BatchTables]:
        return batch, tables

    def restore(self, output: ModelOutput, batch: InputBatch) -> ModelOutput:
        return output


class NoDCP(DCPManager):
    """The local cache is the whole one."""

    def localize(self, batch: InputBatch, tables: BatchTables) -> BatchTables:
        return tables
