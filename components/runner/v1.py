"""The V1 runner: request state on the host in numpy rows, condensed when a request leaves.

Inputs are copied to the device each step, and a step waits for its tokens, so the host always knows everything.
"""

from __future__ import annotations

from workerkit.components.runner.step import ExecuteModelState, ReadyOutput, StepPhases, check_output, to_lists
from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.batch import HostRequestStates, RowInputBatch
from workerkit.framework.interfaces.kv_cache import KVCaches, KVLayout, RowBlockTables
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.runner import ModelRunner, RunnerParts, WorkerShape


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
        """Requests finish, are preempted, are added and advance; then the rows follow the plan."""
        leaving = [r for r in self._states.req_ids if r in output.finished_req_ids or r in output.preempted_req_ids]
        for req_id in leaving:
            self._batches.remove(req_id)
            slot = self._states.remove(req_id)
            for part in self._phases.slot_parts:
                part.clear(slot)
        self._parts.encoder.free(leaving)
        for request in output.new_requests:
            slot = self._states.add(request)
            for part in self._phases.slot_parts:
                part.add(slot, request)
        for cached in output.cached_requests:
            self._states.update(cached)

    @property
    def num_requests(self) -> int:
        return len(self._states.req_ids)

    def check_integrity(self) -> None:
        self._states.check_integrity()
        self._batches.check_integrity(self._states)


class NPUModelRunner(GPUModelRunner):
    """The step."""

    _state: ExecuteModelState | None = None

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self._state is not None:
            raise StageError("execute_model was called twice without sample_tokens")
        check_output(output, self._states, self._shape, self._num_groups)
        parts = self._parts
        parts.hooks.step_started(output)
        parts.kv_connector.preempted(sorted(output.preempted_req_ids))
        self._update_states(output)
        self._phases.move_blocks(output)
        if not output.num_scheduled_tokens:
            return parts.kv_connector.no_forward(output)
        plan = self._states.plan(output)
        self._batches.sync(plan, self._states)
        self._state = self._phases.forward(plan, self._phases.descriptor(plan))
        return None

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        if self._state is None:
            raise StageError("sample_tokens needs an execute_model that scheduled tokens before it")
        state, self._state = self._state, None
        state = self._phases.restore(state)
        parts, batch = self._parts, state.batch
        sampled = self._phases.sample(state, grammar)
        tokens = to_lists(
            parts.device.copy_to_host(sampled.token_ids).wait(), parts.device.copy_to_host(sampled.num_sampled).wait()
        )
        parts.hooks.tokens_sampled(batch, sampled)
        self._states.commit(batch.plan, tokens)
        parts.model_state.commit(batch, sampled)
        if parts.pipeline.is_last and (drafts := self._phases.propose(state, sampled)) is not None:
            self._states.store_drafts(batch.plan, drafts.tolist())
        parts.kv_connector.post_forward()
        parts.eplb.step(is_dummy=False)
        parts.hooks.step_finished(batch)
        result = ModelRunnerOutput(req_ids=batch.req_ids, sampled_token_ids=tuple(map(tuple, tokens)))
        parts.hooks.output_ready(result)
        return ReadyOutput(result)

    def execute_dummy_batch(self, num_tokens: int, num_reqs: int) -> None:
        self._phases.dummy(num_tokens, num_reqs)

    def capture(self) -> None:
        self._phases.capture()
