"""Attention backends: how queries meet the paged cache."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.graph import BatchDescriptor, GraphTasks
    from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches
    from workerkit.framework.interfaces.model import Attend


class AttentionBackend(abc.ABC):
    """Builds a step's metadata once; the returned callable is then called once a layer."""

    kernel_block_sizes: tuple[int, ...] = ()  # accepted kernel block sizes, preferred first; () accepts any
    host_lengths: Literal["upper_bound", "exact"] = "upper_bound"  # which HostLengths it reads
    reads_quantized: bool = False  # serves layers whose keys and values have scales: KVCaches.scales
    graph_support: Literal["never", "uniform", "always"] = "never"  # batches whose attention a graph may hold

    @abc.abstractmethod
    def prepare(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        """Check that every layer can be served, before weights are read. Raises UnsupportedError naming the layer."""

    @abc.abstractmethod
    def build(self, batch: InputBatch, tables: BatchTables, caches: KVCaches, extras: Mapping[str, Any]) -> Attend:
        """Metadata of one batch, bound to the caches.

        The result, for each layer: writes its keys and values at the group's slots (slot -1 is never written) and
        returns softmax(scale * q k^T) v over positions <= the query's own, within the layer's sliding window. That is
        said by `seq_lens`: the last query of a row sees the first seq_len positions of its table, the one before it one
        less, and so on. Rows of one query may share a table and see more than their own position: all of a layer is
        written before any query looks, so they see each other.
        Padding tokens yield finite values that nobody reads. `extras` comes from the model state.
        """

    def build_captured(
        self,
        batch: InputBatch,
        tables: BatchTables,
        caches: KVCaches,
        extras: Mapping[str, Any],
        desc: BatchDescriptor,
        tasks: GraphTasks,
    ) -> Attend:
        """Like `build`, for a batch padded to `desc`, whose whole forward a graph holds: called for the capture, and
        again for each step that replays it.

        A replay reads what lay at the addresses of the capture, so the result of the capture's call must work from
        tensors that later calls find again (those of `batch` and `tables` are such), without looking at their values
        on the host and with shapes that follow from `desc` alone; it is also called outside a capture. Later results
        are not called. Ops whose host lengths a graph would remember are launched through `tasks`.
        """
        return self.build(batch, tables, caches, extras)

    def host_parameters(self, batch: InputBatch, tables: BatchTables) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """For a step that replays a graph: by provider, new parameters of each `GraphTasks.launch`, in order."""
        return {}
