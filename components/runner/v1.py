"""The V1 runner: request state on the host in numpy rows, condensed when a request leaves.

Inputs are copied to the device each step, and a step waits for its tokens, so the host always knows everything.
"""

from __future__ import annotations

import attrs
import torch

from workerkit.components.runner.check import check_output
from workerkit.components.runner.output import HostCopies, ReadyOutput, cut_drafts
from workerkit.components.runner.step import ExecuteModelState, StepPhases
from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.batch import BatchPlan, HostRequestStates, RowInputBatch
from workerkit.framework.interfaces.device import Pending
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVCaches, KVLayout, RowBlockTables
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.runner import ModelRunner, RunnerParts, WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams


class GPUModelRunner(ModelRunner):
    """The bookkeeping half: requests, rows and blocks on the host."""

    def __init__(
        self,
        parts: RunnerParts,
        shape: WorkerShape,
        loaded: LoadedModel,
        layout: KVLayout,
        caches: KVCaches,
        states: HostRequestStates,
        batches: RowInputBatch,
        tables: RowBlockTables,
    ) -> None:
        self._parts = parts
        self._shape = shape
        self._num_groups = len(layout.groups)
        self._states = states
        self._batches = batches
        self._tables = tables
        self._phases = StepPhases(parts, shape, loaded, caches, batches, tables)

    def _update_states(self, output: SchedulerOutput) -> None:
        """Requests finish, are preempted, are added and advance."""
        leaving = [r for r in self._states.req_ids if r in output.finished_req_ids or r in output.preempted_req_ids]
        cleared = []
        for req_id in leaving:
            self._batches.remove(req_id)
            cleared.append((req_id, self._states.remove(req_id)))
        added = [(self._states.add(request), request) for request in output.new_requests]
        if cleared or added:
            self._parts.device.submit(lambda: self._phases.change_slots(cleared, added)).wait()
        for cached in output.cached_requests:
            self._states.update(cached)

    def check_request(self, params: SamplingParams) -> None:
        self._phases.check_request(params)

    @property
    def num_requests(self) -> int:
        return len(self._states.req_ids)

    def check_integrity(self) -> None:
        self._states.check_integrity()
        self._batches.check_integrity(self._states)


class NPUModelRunner(GPUModelRunner):
    """The step: bookkeeping at once, device work on the device's stream, and a wait for the tokens."""

    _forward: Pending[ExecuteModelState] | None = None

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self._forward is not None:
            raise StageError("execute_model was called twice without sample_tokens")
        parts = self._parts
        check_output(output, self._states, self._shape, self._num_groups, parts)
        parts.hooks.step_started(output)
        is_eager = parts.lora.schedule(output)
        parts.kv_connector.preempted(sorted(output.preempted_req_ids))
        self._update_states(output)
        if not output.num_scheduled_tokens:
            parts.device.submit(lambda: self._phases.move_blocks(output)).wait()
            return parts.kv_connector.no_forward(output)
        plan = self._states.plan(output)
        desc = self._phases.descriptor(plan, is_eager)
        self._batches.sync(plan, self._states)
        self._forward = parts.device.submit(lambda: self._run_forward(output, plan, desc))
        return None

    @torch.inference_mode()
    def _run_forward(self, output: SchedulerOutput, plan: BatchPlan, desc: BatchDescriptor) -> ExecuteModelState:
        self._phases.move_blocks(output)
        return self._phases.forward(plan, desc)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        if self._forward is None:
            raise StageError("sample_tokens needs an execute_model that scheduled tokens before it")
        forward, self._forward = self._forward, None
        result = self._parts.device.submit(lambda: self._run_sample(forward.wait(), grammar)).wait()
        self._parts.hooks.output_ready(result)
        return ReadyOutput(result)

    @torch.inference_mode()
    def _run_sample(self, state: ExecuteModelState, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        parts, batch = self._parts, state.batch
        state = self._phases.restore(state)
        result = self._phases.sample(state, grammar)
        output = HostCopies(parts.device, batch.req_ids, result).wait()
        drafts = self._phases.finish(
            state,
            result.sampled,
            commit=lambda: self._states.commit(batch.plan, output.sampled_token_ids),
            next_tokens=lambda: torch.from_numpy(self._states.next_tokens(batch.plan)).to(batch.positions.device),
            store_drafts=lambda drafts: self._states.store_drafts(batch.plan, drafts.tolist()),
        )
        if drafts is None:
            return output
        return attrs.evolve(output, draft_token_ids=cut_drafts(parts.device.copy_to_host(drafts).wait().tolist()))

    def execute_dummy_batch(self, num_tokens: int, num_reqs: int) -> None:
        self._parts.device.submit(lambda: self._phases.dummy(num_tokens, num_reqs)).wait()

    def capture(self) -> None:
        self._parts.device.submit(self._phases.capture).wait()

    def graph_memory(self) -> int:
        return self._parts.device.submit(self._phases.graph_memory).wait()

    def release_graphs(self) -> None:
        self._parts.device.submit(self._phases.release_graphs).wait()
