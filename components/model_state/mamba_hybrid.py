"""The states of recurrent layers: one for each slot, and one more for each draft that a step verifies."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.components.model_state.ascend import AscendModelState
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext, MemoryPool
from workerkit.framework.interfaces.graph import GraphManager
from workerkit.framework.interfaces.kv_cache import KVCacheManager, KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.recurrent import RecurrentBatch
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput, StateSave
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput


class AscendMambaHybridModelState(AscendModelState):
    """For decoders of which some layers are recurrent.

    A slot has K + 1 rows, the columns, of each state tensor: a step leaves the state behind a row's last token in
    column 0, and behind the j-th of a row that verifies drafts in column j. How many drafts are accepted is known on
    the device only, so is the column that the next step goes on from: accepted - 1, whatever that step is like.

    The last row of a tensor belongs to no slot and is never written: new requests go on from its zeros, as do dummy
    batches, which leave no state.
    """

    keeps_recurrent: ClassVar[bool] = True

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
        super().__init__(shape, context, loaded)
        if graph.needs_device_graphs:
            raise UnsupportedError(
                f"components.graph: a captured graph would use the recurrent states of the batch that it was captured "
                f"with, and {loaded.config.architecture} has recurrent layers; right would be `graph: none`"
            )
        self._kv_cache = kv_cache
        self._caches = caches
        self._columns = shape.num_speculative_tokens + 1
        self._zeros = shape.max_num_reqs * self._columns
        self._states = tuple(
            tuple(
                torch.zeros(self._zeros + 1, *spec.shape, dtype=getattr(torch, spec.dtype), device=context.device)
                for spec in layer.states
            )
            for layer in loaded.network.recurrent_layers
        )
        tensors = tuple(state for states in self._states for state in states)
        pool.track("kv_cache", tensors)
        self._bytes = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
        # By slot, the row that it goes on from.
        self._next = torch.full((shape.max_num_reqs,), self._zeros, device=context.device)
        self._saves: tuple[StateSave, ...] = ()

    def add(self, slot: int, request: NewRequest) -> None:
        super().add(slot, request)
        if request.num_computed_tokens and not request.state_block_ids:
            raise RequestError(
                f"request {request.req_id!r} begins behind {request.num_computed_tokens} computed tokens, and no copy "
                "of the recurrent state behind them was named"
            )
        if request.state_block_ids:
            self._restore(slot * self._columns, request.state_block_ids)
        self._next[slot] = slot * self._columns if request.state_block_ids else self._zeros

    def _restore(self, row: int, block_ids: tuple[int, ...]) -> None:
        sizes = [state.shape[1] for state in self._bytes]
        saved = self._kv_cache.read_state(self._caches, block_ids, sum(sizes))
        for state, part in zip(self._bytes, torch.split(saved, sizes), strict=True):
            state[row] = part

    def schedule(self, output: SchedulerOutput) -> None:
        self._saves = output.state_saves

    def recurrent(self, batch: InputBatch) -> RecurrentBatch:
        device = self._next.device
        token_states = torch.full((batch.num_tokens,), -1, device=device)
        if batch.is_dummy:
            initial = torch.full((batch.num_reqs,), self._zeros, device=device)
        else:
            initial = self._next[batch.idx_mapping]
            # Tokens with logits are those whose states are kept: a row's last one, and the drafts behind it.
            starts, counts = batch.cu_num_logits_np[:-1], np.diff(batch.cu_num_logits_np)
            columns = np.arange(batch.num_logits) - np.repeat(starts, counts)
            (rows,) = upload(device, np.repeat(batch.plan.slots, counts) * self._columns + columns)
            token_states[batch.logits_indices] = rows
        return RecurrentBatch(
            states=self._states,
            initial=initial,
            token_states=token_states,
            query_start_loc=batch.query_start_loc[: batch.num_reqs + 1],
            query_start_loc_np=batch.query_start_loc_np[: batch.num_reqs + 1],
            is_verifying_np=batch.plan.num_draft_tokens > 0,
        )

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        accepted = output.num_sampled.clamp(min=1)  # a prefill that goes on has accepted its tokens, too
        self._next[batch.idx_mapping] = batch.idx_mapping * self._columns + accepted - 1
        if self._saves:
            self._save(batch)

    def _save(self, batch: InputBatch) -> None:
        """Copy the states that the scheduler asked for. Only the device knows which token a column belongs to."""
        rows = {req_id: row for row, req_id in enumerate(batch.req_ids)}
        for save in self._saves:
            row = rows[save.req_id]
            first = batch.logits_indices[int(batch.cu_num_logits_np[row])]
            ahead = save.num_tokens - 1 - batch.positions[first]
            column = ahead.clamp(0, int(batch.plan.num_draft_tokens[row]))
            source = (batch.idx_mapping[row] * self._columns + column).unsqueeze(0)
            state = torch.cat([state.index_select(0, source) for state in self._bytes], dim=1)
            self._kv_cache.write_state(self._caches, save.block_ids, state[0])
