"""What a step does between the runner's own bookkeeping: the same phases, in the same order, for V1 and V2."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from workerkit.components.buffers.upload import to_device
from workerkit.components.runner.output import StepResult
from workerkit.framework.errors import ModelError, UnsupportedError, did_you_mean
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch, InputBatchBuilder
from workerkit.framework.interfaces.extensions import Embeddings
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape
from workerkit.framework.interfaces.kv_cache import BatchTables, BlockTables, KVCaches
from workerkit.framework.interfaces.model import Attend, LoadedModel, ModelInputs, ModelOutput
from workerkit.framework.interfaces.request import GrammarOutput, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import RunnerParts, WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput, SlotPart
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import DraftInputs


@attrs.frozen(kw_only=True, eq=False)
class ExecuteModelState:
    """Handed from `execute_model` to `sample_tokens`, which consumes it exactly once."""

    batch: InputBatch  # the global batch
    tables: BatchTables
    output: ModelOutput


class StepPhases:
    """Forward, sampling and proposing over the parts of a runner.

    All of it runs on the device's stream, in torch's inference mode, which the runner enters once for each half of a
    step.
    """

    def __init__(
        self,
        parts: RunnerParts,
        shape: WorkerShape,
        loaded: LoadedModel,
        caches: KVCaches,
        batches: InputBatchBuilder,
        tables: BlockTables,
    ) -> None:
        self._parts = parts
        self._network = loaded.network
        self._caches = caches
        self._batches = batches
        self._tables = tables
        self._taps = self._wanted_taps()
        self.slot_parts: tuple[SlotPart, ...] = (
            parts.model_state,
            parts.sampler,
            parts.rejection,
            parts.grammar,
            parts.speculator,
            parts.lora,
            parts.encoder,
        )
        if parts.speculator.num_speculative_tokens > shape.num_speculative_tokens:
            raise UnsupportedError(
                f"components.speculator proposes {parts.speculator.num_speculative_tokens} drafts a request, "
                f"limits.num_speculative_tokens allows {shape.num_speculative_tokens}"
            )
        if shape.num_speculative_tokens and not parts.speculator.num_speculative_tokens:
            raise UnsupportedError(
                f"limits.num_speculative_tokens is {shape.num_speculative_tokens}, and components.speculator proposes "
                "nothing: name a speculator, or leave the limit at 0"
            )
        parts.kv_connector.register(caches)
        parts.eplb.prepare_load(loaded)

    def _wanted_taps(self) -> tuple[str, ...]:
        wanted = set(self._parts.speculator.taps).union(*(observer.taps for observer in self._parts.observers))
        if unknown := sorted(wanted - set(self._network.tap_points)):
            hint = did_you_mean(unknown[0], self._network.tap_points)
            raise ModelError(f"the model has no tap point {unknown[0]!r}; {hint}")
        return tuple(sorted(wanted))

    @torch.inference_mode()
    def change_slots(self, cleared: Sequence[tuple[str, int]], added: Sequence[tuple[int, NewRequest]]) -> None:
        """Requests (id, slot) leave and (slot, request) arrive, in every part that keeps something by slot."""
        for _, slot in cleared:
            for part in self.slot_parts:
                part.clear(slot)
        if cleared:
            self._parts.encoder.free([req_id for req_id, _ in cleared])
        for slot, request in added:
            for part in self.slot_parts:
                part.add(slot, request)

    def check_request(self, params: SamplingParams) -> None:
        """See ModelRunner. The sampler knows its own parameters, and hears nothing of those that other parts read."""
        sampler = self._parts.sampler
        others = [part for part in self.slot_parts if part is not sampler]
        for part in others:
            part.check(params)
        read = {name for part in others for name in part.parameters}
        own = {name: value for name, value in params.extra_args.items() if name not in read}
        sampler.check(attrs.evolve(params, extra_args=own))

    def descriptor(self, plan: BatchPlan, is_eager: bool) -> BatchDescriptor:
        """The shape to build for, the same on all ranks. `is_eager`: the step cannot be a graph's."""
        num_tokens, num_reqs, first = plan.num_tokens, plan.num_reqs, int(plan.num_scheduled_tokens[0])
        is_uniform = num_tokens == first * num_reqs and (first == 1 or (plan.num_scheduled_tokens == first).all())
        shape = BatchShape(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_query_len=first if is_uniform else None,
            max_query_len=first if is_uniform else int(plan.num_scheduled_tokens.max()),
        )
        if is_eager:
            return self._parts.parallel.agree(BatchDescriptor(mode="eager", num_tokens=num_tokens, num_reqs=num_reqs))
        return self._parts.parallel.agree(self._parts.graph.dispatch(self._parts.pcp.local_shape(shape)))

    def move_blocks(self, output: SchedulerOutput) -> None:
        """New blocks are zeroed, then blocks are copied; and what is to be kept after the step."""
        if output.blocks_to_zero:
            self._parts.kv_cache.zero_blocks(self._caches, output.blocks_to_zero)
        if output.block_copies:
            self._parts.kv_cache.copy_blocks(self._caches, output.block_copies)
        self._parts.model_state.schedule(output)

    def forward(self, plan: BatchPlan, desc: BatchDescriptor) -> ExecuteModelState:
        """Build the batch and run the model."""
        return self._forward(self._batches.build(plan, desc), desc)

    @torch.inference_mode()
    def dummy(self, num_tokens: int, num_reqs: int) -> torch.Tensor | None:
        """A made-up step, sampling included; joins every collective, fires no hook and moves no KV.

        Returns what was drawn; None where this is not the last stage of a pipeline.
        """
        parts = self._parts
        shape = BatchShape(num_tokens=num_tokens, num_reqs=num_reqs)
        desc = parts.parallel.agree(parts.graph.dispatch(parts.pcp.local_shape(shape)))
        state = self._forward(self._batches.dummy(num_tokens, num_reqs, desc), desc)
        drawn = None
        if parts.pipeline.is_last:
            hidden = self.restore(state).output.hidden
            logits = self._network.compute_logits(hidden[state.batch.logits_indices])
            drawn = parts.sampler.draw(parts.sampler.process(logits, state.batch), state.batch)
        parts.eplb.step(is_dummy=True)
        return drawn

    def _forward(self, batch: InputBatch, desc: BatchDescriptor) -> ExecuteModelState:
        parts = self._parts
        real = not batch.is_dummy
        tables, local, local_tables = self._localize(batch, desc)
        if real:
            parts.model_state.preprocess(local)
        attend, host_parameters = self._attention(local, local_tables, desc)
        parts.lora.activate(local)
        embeds = parts.encoder.embed(local)
        parts.eplb.prepare_forward(local.num_tokens, bool(np.count_nonzero(local.plan.is_prefilling)))
        received = parts.pipeline.receive(local)
        if real:
            parts.kv_connector.start_load(local)
            parts.hooks.batch_prepared(local)
        if received is not None:
            embeds = Embeddings(inputs=received)
        inputs = self._inputs(local, attend, host_parameters, embeds)
        if embeds is None:
            output = parts.graph.run(desc, self._network.forward, inputs)
        else:  # graphs begin with the embedding of ids
            output = self._network.forward(inputs)
        parts.lora.deactivate()
        if real:
            parts.hooks.forward_finished(local, output)
            parts.kv_connector.wait_saved()
        if not parts.pipeline.is_last:
            parts.pipeline.send(output)
        return ExecuteModelState(batch=batch, tables=tables, output=output)

    def _localize(self, batch: InputBatch, desc: BatchDescriptor) -> tuple[BatchTables, InputBatch, BatchTables]:
        """The global tables, and this rank's batch and tables."""
        tables = self._parts.dcp.localize(batch, self._tables.gather(batch))
        return (tables, *self._parts.pcp.partition(batch, tables, desc))

    def _attention(
        self, local: InputBatch, tables: BatchTables, desc: BatchDescriptor
    ) -> tuple[Attend, Mapping[str, Sequence[Mapping[str, Any]]]]:
        """Metadata for the step, or for the capture, and what a replay has to be told from the host."""
        attention, state, caches = self._parts.attention, self._parts.model_state, self._caches
        if desc.mode != "full":
            return attention.build(local, tables, caches, state.extras(local)), {}
        extras = state.extras_captured(local, desc)
        attend = attention.build_captured(local, tables, caches, extras, desc, self._parts.graph.tasks)
        return attend, attention.host_parameters(local, tables)

    def _inputs(
        self,
        local: InputBatch,
        attend: Attend,
        host_parameters: Mapping[str, Sequence[Mapping[str, Any]]],
        embeds: Embeddings | None = None,
    ) -> ModelInputs:
        state = self._parts.model_state
        return ModelInputs(
            input_ids=local.input_ids,
            positions=local.positions,
            rope_lens=local.rope_lens,
            attend=attend,
            inputs_embeds=None if embeds is None else embeds.inputs,
            deepstack=() if embeds is None else embeds.deepstack,
            rope_positions=state.rope_positions(local),
            recurrent=state.recurrent(local),
            taps=self._taps,
            host_parameters=host_parameters,
        )

    def restore(self, state: ExecuteModelState) -> ExecuteModelState:
        """Hidden states of the global batch, which sampling and proposing work on."""
        if not self._parts.pipeline.is_last:
            return state
        output = self._parts.pcp.restore(state.output, state.batch)
        return state if output is state.output else attrs.evolve(state, output=output)

    def sample(self, state: ExecuteModelState, grammar: GrammarOutput | None) -> StepResult:
        """Tokens of each row, none for rows whose prefill goes on; and log-probabilities."""
        parts, batch = self._parts, state.batch
        if not parts.pipeline.is_last:
            return StepResult(sampled=parts.pipeline.receive_sampled(batch))
        hidden = state.output.hidden
        if batch.num_logits < hidden.shape[0]:  # otherwise every token predicts, in order
            hidden = hidden[batch.logits_indices]
        logits = self._network.compute_logits(hidden)
        raw = parts.sampler.raw(logits, batch)
        logits = parts.sampler.process(parts.grammar.apply(logits, batch, grammar), batch)
        sampled = self._tokens(logits, batch)
        parts.pipeline.broadcast(sampled)
        return StepResult(
            sampled=sampled,
            logprobs=parts.sampler.logprobs(raw, logits, batch, sampled),
            prompt_logprobs=parts.sampler.prompt_logprobs(state.output.hidden, batch, self._network.compute_logits),
        )

    def _tokens(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        partial = batch.plan.is_partial
        if batch.num_logits == batch.num_reqs:
            counts = (~partial).astype(np.int32)
            return SamplerOutput(
                token_ids=self._parts.sampler.draw(logits, batch).unsqueeze(1),
                num_sampled=to_device(logits.device, counts),
                num_rejected=to_device(logits.device, np.zeros_like(counts)),
            )
        verified = self._parts.rejection.verify(logits, batch, self._parts.sampler)
        mask = to_device(logits.device, partial)
        return SamplerOutput(
            token_ids=verified.token_ids,
            num_sampled=verified.num_sampled.masked_fill(mask, 0),
            num_rejected=verified.num_rejected.masked_fill(mask, 0),
        )

    def finish(
        self,
        state: ExecuteModelState,
        sampled: SamplerOutput,
        commit: Callable[[], None],
        next_tokens: Callable[[], torch.Tensor],
        store_drafts: Callable[[torch.Tensor], None],
    ) -> torch.Tensor | None:
        """All that follows the tokens; returns the drafts [num_reqs, K], None without speculation.

        The callables are the runner's own state: `next_tokens` is DraftInputs.next_tokens, asked for after `commit`.
        """
        parts, batch = self._parts, state.batch
        parts.hooks.tokens_sampled(batch, sampled)
        commit()
        parts.sampler.commit(batch, sampled)
        parts.model_state.commit(batch, sampled)
        drafts = None
        if parts.pipeline.is_last and parts.speculator.num_speculative_tokens:
            drafts = self._propose(state, sampled, next_tokens())
            store_drafts(drafts)
            parts.hooks.drafts_proposed(batch)
        parts.kv_connector.post_forward()
        parts.eplb.step(is_dummy=False)
        parts.hooks.step_finished(batch)
        return drafts

    def _propose(self, state: ExecuteModelState, sampled: SamplerOutput, next_tokens: torch.Tensor) -> torch.Tensor:
        parts, batch = self._parts, state.batch
        inputs = DraftInputs(
            batch=batch,
            tables=state.tables,
            hidden=state.output.hidden,
            taps=state.output.taps,
            sampled=sampled,
            next_tokens=next_tokens,
            keys=parts.sampler.keys(batch),
        )
        drafts = parts.verify_budget.trim(parts.speculator.propose(inputs), batch)
        parts.rejection.remember(batch, drafts)
        # A row whose prefill goes on has nothing to verify yet.
        return drafts.token_ids.masked_fill(sampled.num_sampled.unsqueeze(1) == 0, -1)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture graphs, the text model's before the encoder's; then measure what verification costs."""
        self._capture_cases()
        self._parts.encoder_graph.capture()
        self._parts.verify_budget.calibrate(self._seconds)

    def release_graphs(self) -> None:
        """Forget all of them."""
        self._parts.graph.release()
        self._parts.encoder_graph.release()

    def _capture_cases(self) -> None:
        from tqdm import tqdm

        for case in tqdm(self._parts.graph.cases, "capture graphs", leave=False, unit="graph", disable=None):
            self._capture_case(case)

    def _capture_case(self, case: BatchDescriptor) -> None:
        batch = self._batches.dummy(case.num_tokens, case.num_reqs, case)
        _, local, tables = self._localize(batch, case)
        attend, host_parameters = self._attention(local, tables, case)
        self._parts.lora.activate(local)
        self._parts.graph.capture(case, self._network.forward, self._inputs(local, attend, host_parameters))

    @torch.inference_mode()
    def graph_memory(self) -> int:
        """See ModelRunner: first + (n - 1) * max(second, 1 MiB), for n cases of which the two largest are captured."""
        graph, device = self._parts.graph, self._parts.device
        if not graph.needs_device_graphs:
            return 0
        sizes = []
        for case in sorted(graph.cases, key=lambda case: case.num_tokens, reverse=True)[:2]:
            before = device.memory().free_bytes
            self._capture_case(case)
            sizes.append(max(0, before - device.memory().free_bytes))
        graph.release()
        return sizes[0] + (len(graph.cases) - 1) * max(sizes[-1], 2**20)

    def _seconds(self, num_tokens: int, num_reqs: int) -> float:
        begin = time.perf_counter()
        drawn = self.dummy(num_tokens, num_reqs)
        if drawn is not None:
            drawn.cpu()  # waits
        return time.perf_counter() - begin
