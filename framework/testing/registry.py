"""The fakes as a plugin, and configs that use them."""

from __future__ import annotations

from typing import Any

from workerkit.framework import roles
from workerkit.framework.errors import RegistrationError
from workerkit.framework.hooks import API_VERSION, hookimpl
from workerkit.framework.plugins import PluginHost, load_plugins
from workerkit.framework.registry import Registry, Role
from workerkit.framework.testing import (
    fakes,
    fakes_batch,
    fakes_engine,
    fakes_model,
    fakes_sampling,
    fakes_states,
    fakes_text,
    fakes_worker,
)

SLOTTED = {"request_state": "fake_slots", "input_batch": "fake_slots", "block_table": "fake_slots"}  # what V2 asks for


class FakesPlugin:
    """Registers a fake named `fake` for every role; V2's three sub-interfaces have theirs under `fake_slots`."""

    WORKERKIT_API = API_VERSION

    @hookimpl
    def worker_components(self, registry: Registry) -> None:
        """See PluginSpec."""
        parts: tuple[tuple[Role[Any], type], ...] = (
            (roles.DEVICE, fakes.FakeDevice),
            (roles.PARALLEL, fakes.FakeParallel),
            (roles.MEMORY_POOL, fakes.FakePool),
            (roles.KERNELS, fakes.FakeKernels),
            (roles.KERNEL_LIBRARY, fakes.FakeKernelLibrary),
            (roles.ATTENTION, fakes_batch.FakeAttention),
            (roles.MODEL_STORE, fakes_model.FakeStore),
            (roles.LOADER, fakes_model.FakeLoader),
            (roles.MODEL_LIBRARY, fakes_model.FakeLibrary),
            (roles.MODEL, fakes_model.FakeModel),
            (roles.DRAFT, fakes_sampling.FakeDraft),
            (roles.KV_CACHE, fakes_batch.FakeKVCache),
            (roles.RUNNER, fakes_engine.FakeRunner),
            (roles.REQUEST_STATE, fakes_states.FakeHostStates),
            (roles.INPUT_BATCH, fakes_batch.FakeRowInputBatch),
            (roles.BLOCK_TABLE, fakes_batch.FakeRowBlockTables),
            (roles.MODEL_STATE, fakes.FakeModelState),
            (roles.GRAPH, fakes.FakeGraph),
            (roles.ENCODER_GRAPH, fakes.FakeEncoderGraph),
            (roles.SAMPLER, fakes_sampling.FakeSampler),
            (roles.SAMPLER_STAGE, fakes_sampling.FakeStage),
            (roles.REJECTION, fakes_sampling.FakeRejection),
            (roles.GRAMMAR, fakes_sampling.FakeGrammar),
            (roles.SPECULATOR, fakes_sampling.FakeSpeculator),
            (roles.PROPOSER, fakes_sampling.FakeSpeculator),
            (roles.VERIFY_BUDGET, fakes_sampling.FakeVerifyBudget),
            (roles.LORA, fakes.FakeLoRA),
            (roles.ENCODER, fakes.FakeEncoder),
            (roles.EPLB, fakes.FakeEPLB),
            (roles.EPLB_POLICY, fakes.FakeEPLBPolicy),
            (roles.PCP, fakes.FakePCP),
            (roles.DCP, fakes.FakeDCP),
            (roles.PIPELINE, fakes_sampling.FakePipeline),
            (roles.KV_CONNECTOR, fakes.FakeKVConnector),
            (roles.OBSERVERS, fakes.FakeObserver),
            (roles.WORKER_EXTENSIONS, fakes_worker.FakeExtension),
            (roles.WORKER, fakes_worker.FakeWorker),
            (roles.SCHEDULER, fakes_engine.FakeScheduler),
            (roles.TOKENIZER, fakes_text.FakeTokenizer),
            (roles.CHAT_TEMPLATE, fakes_text.FakeChatTemplate),
            (roles.IMAGE_PROCESSOR, fakes_text.FakeImageProcessor),
            (roles.STRUCTURED_OUTPUTS, fakes_text.FakeStructuredOutputs),
            (roles.ENGINE, fakes_engine.FakeEngine),
        )
        for role, factory in parts:
            registry.add(role, "fake", factory)
        registry.add(roles.REQUEST_STATE, "fake_slots", fakes_states.FakeSlotStates)
        registry.add(roles.INPUT_BATCH, "fake_slots", fakes_batch.FakeSlotInputBatch)
        registry.add(roles.BLOCK_TABLE, "fake_slots", fakes_batch.FakeSlotBlockTables)


fakes_plugin = FakesPlugin()


def fake_registry() -> Registry:
    """A registry with every installed plugin and the fakes."""
    registry = load_plugins().registry
    report = PluginHost(registry).load("fakes", fakes_plugin)
    if report.error:
        raise RegistrationError(report.error)
    return registry


def fake_config(runner: str = "v1", **real: Any) -> dict[str, Any]:
    """A config for `fake_registry` in which every part is a fake but the runner and the roles in `real`.

    `runner`: `v1`, `v2` or `fake`. `real`: what `components` says of other roles, `sampler="torch"` for instance. The
    worker holds 8 requests, 64 tokens a step, 40 blocks of 4 tokens, and
    requests of up to 128 tokens.
    """
    components: dict[str, Any] = {role.name: "fake" for role in roles.ROLES if not role.nested and not role.many}
    components["runner"] = runner
    if runner == "v2":
        components.update(SLOTTED)
    return {
        "model": {"source": "fake", "max_model_len": 128},
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 64},
        "cache": {"block_size": 4, "num_blocks": 40},
        "components": {**components, **real},
    }
