"""The V2 runner: request state on the device in stable slots; the host never waits for a sampled token.

The host decides which rows a step has and queues the rest on the device's stream; the tokens are fetched when somebody
asks for them, so the next step can be scheduled, and queued, while this one runs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch

from workerkit.components.runner.check import check_output
from workerkit.components.runner.output import HostCopies
from workerkit.components.runner.step import ExecuteModelState, StepPhases
from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.batch import BatchPlan, SlotInputBatch, SlotRequestStates
from workerkit.framework.interfaces.device import Pending
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import BlockTableWrites, KVCaches, KVLayout, SlotBlockTables
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.request import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    StepOutput,
)
from workerkit.framework.interfaces.runner import ModelRunner, RunnerParts, WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams


@attrs.frozen(kw_only=True, eq=False)
class _Changes:
    """What the host decided, to be carried out on the stream."""

    output: SchedulerOutput
    cleared: Sequence[tuple[str, int]]  # (request, slot) of those that left
    added: Sequence[tuple[int, NewRequest]]
    writes: BlockTableWrites


class AsyncOutput(StepOutput):
    """Tokens of a step that may still be running."""

    def __init__(self, copies: Pending[HostCopies], hooks: StepHooks) -> None:
        self._copies = copies
        self._hooks = hooks
        self._lock = threading.Lock()
        self._result: ModelRunnerOutput | None = None

    def get(self) -> ModelRunnerOutput:
        with self._lock:
            if self._result is None:
                self._result = self._copies.wait().wait()
                self._hooks.output_ready(self._result)
            return self._result


class NPUModelRunner(ModelRunner):
    """Stable slots, queued steps."""

    overlaps_steps: ClassVar[bool] = True

    def __init__(
        self,
        parts: RunnerParts,
        shape: WorkerShape,
        loaded: LoadedModel,
        layout: KVLayout,
        caches: KVCaches,
        states: SlotRequestStates,
        batches: SlotInputBatch,
        tables: SlotBlockTables,
    ) -> None:
        self._parts = parts
        self._shape = shape
        self._num_groups = len(layout.groups)
        self._states = states
        self._tables = tables
        self._phases = StepPhases(parts, shape, loaded, caches, batches, tables)
        self._forward: Pending[ExecuteModelState] | None = None

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self._forward is not None:
            raise StageError("execute_model was called twice without sample_tokens")
        parts = self._parts
        check_output(output, self._states, self._shape, self._num_groups, parts)
        parts.hooks.step_started(output)
        is_eager = parts.lora.schedule(output)
        parts.kv_connector.preempted(sorted(output.preempted_req_ids))
        changes = self._change_requests(output)
        if not output.num_scheduled_tokens:
            parts.device.submit(lambda: self._carry_out(changes)).wait()
            return parts.kv_connector.no_forward(output)
        try:
            plan = self._states.plan(output)
            desc = self._phases.descriptor(plan, is_eager)
        except BaseException:
            parts.device.submit(lambda: self._carry_out(changes)).wait()  # host and device must not part
            raise
        self._forward = parts.device.submit(lambda: self._run_forward(changes, plan, desc))
        return None

    def _change_requests(self, output: SchedulerOutput) -> _Changes:
        """On the host: slots, upper bounds and blocks."""
        leaving = [r for r in self._states.req_ids if r in output.finished_req_ids or r in output.preempted_req_ids]
        cleared = [(req_id, self._states.remove(req_id)) for req_id in leaving]
        for _, slot in cleared:
            self._tables.clear(slot)
        added = [(self._states.add(request), request) for request in output.new_requests]
        for slot, request in added:
            self._tables.add(slot, request.block_ids)
        for cached in output.cached_requests:
            self._states.update(cached)
            if cached.new_block_ids:
                self._tables.append(self._states.slot(cached.req_id), cached.new_block_ids)
        return _Changes(output=output, cleared=cleared, added=added, writes=self._tables.stage())

    @torch.inference_mode()
    def _carry_out(self, changes: _Changes) -> None:
        if changes.cleared or changes.added:
            self._phases.change_slots(changes.cleared, changes.added)
        for slot, request in changes.added:
            self._states.write(slot, request)
        self._tables.apply(changes.writes)
        self._phases.move_blocks(changes.output)

    @torch.inference_mode()
    def _run_forward(self, changes: _Changes, plan: BatchPlan, desc: BatchDescriptor) -> ExecuteModelState:
        self._carry_out(changes)
        return self._phases.forward(plan, desc)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        if self._forward is None:
            raise StageError("sample_tokens needs an execute_model that scheduled tokens before it")
        forward, self._forward = self._forward, None
        copies = self._parts.device.submit(lambda: self._run_sample(forward.wait(), grammar))
        return AsyncOutput(copies, self._parts.hooks)

    @torch.inference_mode()
    def _run_sample(self, state: ExecuteModelState, grammar: GrammarOutput | None) -> HostCopies:
        parts, batch = self._parts, state.batch
        state = self._phases.restore(state)
        result = self._phases.sample(state, grammar)
        copies = HostCopies(parts.device, batch.req_ids, result)
        drafts = self._phases.finish(
            state,
            result.sampled,
            commit=lambda: self._states.commit(batch, result.sampled),
            next_tokens=lambda: self._states.next_tokens(batch),
            store_drafts=lambda drafts: self._states.store_drafts(batch, drafts),
        )
        copies.add_drafts(drafts)
        return copies

    def execute_dummy_batch(self, num_tokens: int, num_reqs: int) -> None:
        self._parts.device.submit(lambda: self._phases.dummy(num_tokens, num_reqs)).wait()

    def capture(self) -> None:
        self._parts.device.submit(self._phases.capture).wait()

    def graph_memory(self) -> int:
        return self._parts.device.submit(self._phases.graph_memory).wait()

    def release_graphs(self) -> None:
        self._parts.device.submit(self._phases.release_graphs).wait()

    def check_request(self, params: SamplingParams) -> None:
        self._phases.check_request(params)

    @property
    def num_requests(self) -> int:
        return len(self._states.req_ids)

    def check_integrity(self) -> None:
        self._parts.device.synchronize()
        self._states.check_integrity()
        self._tables.check_integrity([self._states.slot(req_id) for req_id in self._states.req_ids])
