"""Every seam of a runner: each part is called at the right moment with the right values, the same on V1 and V2.

The order is that of "The life of a step" in ARCHITECTURE.md; the parts are recorded fakes.
"""

import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import CachedRequest, GrammarOutput, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.fakes_model import FAKE_VOCAB, fake_tokens
from workerkit.framework.testing.recording import Recorder
from workerkit.framework.testing.registry import fake_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])
PROMPT = (3, 1, 4, 1, 5)

# What every runner does around a forward and a sample, in this order.
STEP = [
    "observers[0].step_started",
    "lora.schedule",
    "kv_connector.preempted",
    "request_state.plan",
    "pcp.local_shape",
    "graph.dispatch",
    "parallel.agree",
    "model_state.schedule",
    "input_batch.build",
    "block_table.gather",
    "dcp.localize",
    "pcp.partition",
    "model_state.preprocess",
    "model_state.extras",
    "attention.build",
    "lora.activate",
    "encoder.embed",
    "eplb.prepare_forward",
    "pipeline.receive",
    "kv_connector.start_load",
    "observers[0].batch_prepared",
    "model_state.rope_positions",
    "model_state.recurrent",
    "graph.run",
    "network.forward",
    "lora.deactivate",
    "observers[0].forward_finished",
    "kv_connector.wait_saved",
    "pcp.restore",
    "network.compute_logits",
    "sampler.raw",
    "grammar.apply",
    "sampler.process",
    "sampler.draw",
    "pipeline.broadcast",
    "sampler.logprobs",
    "sampler.prompt_logprobs",
    "device.copy_to_host",
    "device.copy_to_host",
    "observers[0].tokens_sampled",
    "request_state.commit",
    "sampler.commit",
    "model_state.commit",
    "request_state.next_tokens",
    "sampler.keys",
    "speculator.propose",
    "verify_budget.trim",
    "rejection.remember",
    "request_state.store_drafts",
    "observers[0].drafts_proposed",
    "kv_connector.post_forward",
    "eplb.step",
    "observers[0].step_finished",
    "device.copy_to_host",
    "observers[0].output_ready",
]


class Started:
    """A recorded worker whose start is over, and whose recorder is empty."""

    def __init__(self, registry, runner, overrides=None, **real):
        self.recorder = Recorder()
        config = {**fake_config(runner, **real)}
        self.assembly = self.recorder.assemble(config, overrides, registry)
        self.assembly.worker.start()
        self.recorder.clear()
        self.worker = self.assembly.worker

    def step(self, output, grammar=None):
        answer = self.worker.execute_model(output)
        return answer if answer is not None else self.worker.sample_tokens(grammar).get()

    def one(self, name):
        (call,) = self.recorder.of(name)
        return call


@pytest.fixture
def start(workerkit_registry):
    started = []

    def factory(runner, overrides=None, **real):
        started.append(Started(workerkit_registry, runner, overrides, **real))
        return started[-1]

    yield factory
    for worker in started:
        worker.assembly.shutdown()


def new(req_id, tokens=PROMPT, blocks=(1, 2), **more):
    return NewRequest(
        req_id=req_id,
        token_ids=tuple(tokens),
        prompt_len=len(tokens),
        sampling=GREEDY,
        block_ids=(tuple(blocks),),
        **more,
    )


def prefill(*requests, **more):
    return SchedulerOutput(
        new_requests=requests,
        num_scheduled_tokens={r.req_id: r.prefill_len - r.num_computed_tokens for r in requests},
        **more,
    )


# --- a worker's start


@RUNNERS
@pytest.mark.parametrize("worker", ["npu", "fake"])
def test_order_of_a_workers_start(workerkit_registry, runner, worker):
    """Device, model, attention, kernels, weights, KV cache: checks before weights, weights before the cache."""
    recorder = Recorder()
    config = fake_config(runner, worker=worker, model="native", attention="cpu", kernels="ordered")
    config["cache"] = {"block_size": 4, "memory_bytes": 1 << 16}
    assembly = recorder.assemble(config, None, workerkit_registry)
    assert recorder.calls == [], "assembling builds nothing"
    assembly.worker.start()
    expected = [
        "device.initialize",
        "parallel.initialize",
        "model.load",
        "loader.read_config",
        "model_library.build",
        "kernels.prepare",
        "attention.prepare",
        "loader.weights",
        "draft.load",
        "kv_cache.plan",
        "kv_cache.allocate",
        "kv_connector.register",
        "eplb.prepare_load",
        "graph.capture",
        "encoder_graph.capture",
    ]
    seen = [name for name in recorder.names() if name in expected]
    first = list(dict.fromkeys(name for name in seen if name != "loader.read_config"))
    wanted = [name for name in expected if name != "loader.read_config"]
    if worker == "fake":  # it warms nothing up
        wanted = wanted[:-2]
    assert first == wanted
    assert seen.index("loader.read_config") < seen.index("model_library.build")
    built = [call.key for call in recorder.calls if not call.method]
    assert built.index("DeviceContext") < built.index("LoadedModel") < built.index("DraftWeights")
    assert built.index("DraftWeights") < built.index("KVCaches") < built.index("runner")
    assert len(built) == len(set(built)), "each part is built once"
    assembly.shutdown()


@RUNNERS
def test_start_hands_the_parts_what_exists(start, workerkit_registry, runner):
    recorder = Recorder()
    assembly = recorder.assemble(fake_config(runner), None, workerkit_registry)
    assembly.worker.start()
    (register,), (load,) = recorder.of("kv_connector.register"), recorder.of("eplb.prepare_load")
    assert register.args["caches"].layout == assembly.worker.layout
    assert register.args["caches"].keys[0].shape == (40, 4, 1, 8)
    assert load.args["loaded"].network is assembly.value(LoadedModel).network
    assembly.shutdown()


# --- a step


@RUNNERS
def test_order_of_a_step(workerkit_registry, runner):
    recorder = Recorder()
    config = fake_config(runner, observers=["fake"])
    config["limits"]["num_speculative_tokens"] = 2
    assembly = recorder.assemble(config, None, workerkit_registry)
    (observer,) = assembly.get_all(roles.OBSERVERS)
    seen = observer.seen = _Log(recorder)
    assembly.worker.start()
    recorder.clear()
    assert assembly.worker.execute_model(prefill(new("a"))) is None
    output = assembly.worker.sample_tokens()
    result = output.get()
    assert output.get() == result, "the same value each time"
    names = [name for name in recorder.names() if name in set(STEP)]
    assert names == STEP
    assert len(seen.names) == 7
    assembly.shutdown()


class _Log:
    """Where FakeObserver writes: straight into the recorder, so that hooks and calls share one order."""

    def __init__(self, recorder):
        self._recorder = recorder
        self.names = []

    def append(self, name):
        from workerkit.framework.testing.recording import Call

        self.names.append(name)
        self._recorder.calls.append(Call("observers[0]", name))


@RUNNERS
def test_both_runners_fire_the_same_hooks_over_many_steps(assembly_factory, runner):
    traces = {}
    for name in ("v1", "v2"):
        assembly = assembly_factory(fake_config(name, observers=["fake"], speculator="none", scheduler="continuous"))
        assembly.engine.start()
        assembly.engine.generate([[1, 2, 3], [4] * 30], GREEDY)
        (observer,) = assembly.get_all(roles.OBSERVERS)
        traces[name] = observer.seen
    assert traces["v1"] == traces["v2"]
    assert len(traces[runner]) >= 24 * 6


@RUNNERS
def test_values_of_a_step(start, runner):
    w = start(runner)
    out = w.step(prefill(new("a"), new("b", (9, 8, 7), (3,))))
    assert out.sampled_token_ids == (tuple(fake_tokens(PROMPT, 1)), tuple(fake_tokens((9, 8, 7), 1)))
    shape = w.one("graph.dispatch").args["shape"]
    assert (shape.num_tokens, shape.num_reqs, shape.uniform_query_len) == (8, 2, None)
    assert w.one("pcp.local_shape").args["shape"] == shape
    assert w.one("eplb.prepare_forward").args == {"num_tokens": 8, "has_prefill": True}
    assert w.one("eplb.step").args == {"is_dummy": False}
    batch = w.one("attention.build").args["batch"]
    assert batch.req_ids == ("a", "b")
    assert batch.input_ids.tolist() == [*PROMPT, 9, 8, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert w.one("attention.build").args["extras"] == {"fake": 2}
    tables = w.one("pcp.partition").args["tables"]
    assert tables.block_tables[0][:, :2].tolist() == [[1, 2], [3, 0]]
    assert tables.slot_mappings[0].tolist() == [4, 5, 6, 7, 8, 12, 13, 14]
    for name in (
        "model_state.preprocess",
        "lora.activate",
        "encoder.embed",
        "pipeline.receive",
        "kv_connector.start_load",
    ):
        assert w.one(name).args["batch"].req_ids == ("a", "b"), name
    hidden = w.one("pcp.restore").args["output"].hidden
    assert hidden[[4, 7], 0].tolist() == [5, 7]
    assert w.one("network.compute_logits").args["hidden"][:, 2].tolist() == [14, 24]  # sums of the histories
    sampled = w.one("pipeline.broadcast").args["output"]
    assert [tuple(row) for row in sampled.token_ids.tolist()] == list(out.sampled_token_ids)
    assert sampled.num_sampled.tolist() == [1, 1]
    assert torch.equal(w.one("model_state.commit").args["output"].token_ids, sampled.token_ids)
    assert w.one("model_state.schedule").args["output"].num_scheduled_tokens == {"a": 5, "b": 3}

    w.recorder.clear()
    decode = SchedulerOutput(
        cached_requests=(CachedRequest(req_id="a", num_computed_tokens=5),), num_scheduled_tokens={"a": 1}
    )
    assert w.step(decode).sampled_token_ids == (tuple(fake_tokens(PROMPT, 2)[1:]),)
    assert w.one("eplb.prepare_forward").args == {"num_tokens": 1, "has_prefill": False}
    assert w.one("graph.dispatch").args["shape"].uniform_query_len == 1


@RUNNERS
def test_slot_parts_hear_of_arrivals_and_departures_by_slot(start, runner):
    w = start(runner)
    w.step(prefill(new("a"), new("b", (9,), (3,))))
    parts = ("model_state", "sampler", "rejection", "grammar", "speculator", "lora", "encoder")
    slots = {call.args["request"].req_id: call.args["slot"] for call in w.recorder.of("sampler.add")}
    assert len({*slots.values()}) == 2
    for part in parts:
        assert {c.args["request"].req_id: c.args["slot"] for c in w.recorder.of(f"{part}.add")} == slots, part
    w.recorder.clear()
    w.step(prefill(new("c", (7, 7), (4,)), finished_req_ids=frozenset({"a"}), preempted_req_ids=frozenset({"b"})))
    for part in parts:
        assert {c.args["slot"] for c in w.recorder.of(f"{part}.clear")} == set(slots.values()), part
        names = w.recorder.names(f"{part}.clear", f"{part}.add")
        assert names == [f"{part}.clear"] * 2 + [f"{part}.add"], "slots are cleared before they are taken again"
    assert sorted(w.one("encoder.free").args["req_ids"]) == ["a", "b"]
    assert list(w.one("kv_connector.preempted").args["req_ids"]) == ["b"]
    first = w.recorder.names("kv_connector", "request_state", "encoder")[0]
    assert first == "kv_connector.preempted", "before blocks are reused"
    w.worker.check_integrity()


@RUNNERS
def test_blocks_are_zeroed_then_copied_before_the_forward(start, runner):
    w = start(runner)
    w.step(prefill(new("a", PROMPT, (1, 2)), blocks_to_zero=(1, 2), block_copies=((1, 5), (5, 6))))
    assert w.recorder.names("kv_cache.zero_blocks", "kv_cache.copy_blocks", "network.forward") == [
        "kv_cache.zero_blocks",
        "kv_cache.copy_blocks",
        "network.forward",
    ]
    assert tuple(w.one("kv_cache.zero_blocks").args["block_ids"]) == (1, 2)
    assert tuple(w.one("kv_cache.copy_blocks").args["pairs"]) == ((1, 5), (5, 6))


@RUNNERS
def test_what_the_model_state_says_reaches_the_network(workerkit_registry, runner):
    from workerkit.framework.testing.fakes import FakeModelState

    class Marking(FakeModelState):
        """Has positions, and something in the place of states."""

        def rope_positions(self, batch):
            return batch.positions.expand(3, -1)

        def recurrent(self, batch):
            return batch.num_reqs

    workerkit_registry.add(roles.MODEL_STATE, "marking", Marking)
    w = Started(workerkit_registry, runner, model_state="marking")
    w.step(prefill(new("a"), new("b", (9, 8, 7), (3,))))
    inputs = w.one("network.forward").args["inputs"]
    assert inputs.rope_positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 3
    assert inputs.recurrent == 2
    w.assembly.shutdown()


@RUNNERS
def test_a_step_without_tokens_asks_the_connector(start, runner):
    w = start(runner)
    w.step(prefill(new("a")))
    w.recorder.clear()
    output = SchedulerOutput(finished_req_ids=frozenset({"a"}), block_copies=((1, 3),))
    answer = w.worker.execute_model(output)
    assert answer is not None
    assert answer.req_ids == ()
    assert w.one("kv_connector.no_forward").args["output"] == output
    assert w.recorder.names("network", "sampler.draw", "eplb") == []
    assert w.recorder.names("kv_cache.copy_blocks") == ["kv_cache.copy_blocks"]
    with pytest.raises(StageError):
        w.worker.sample_tokens()
    w.worker.check_integrity()


@RUNNERS
def test_what_a_forward_left_is_consumed_once(start, runner):
    w = start(runner)
    with pytest.raises(StageError):
        w.worker.sample_tokens()
    w.worker.execute_model(prefill(new("a")))
    with pytest.raises(StageError):
        w.worker.execute_model(prefill(new("b", (1,), (3,))))
    w.worker.sample_tokens().get()
    with pytest.raises(StageError):
        w.worker.sample_tokens()


@RUNNERS
def test_a_dummy_batch_joins_collectives_and_touches_no_request(start, runner):
    w = start(runner)
    w.step(prefill(new("a")))
    w.recorder.clear()
    w.worker.execute_dummy_batch()
    names = set(w.recorder.names())
    joined = {"parallel.agree", "dcp.localize", "pcp.partition", "network.forward", "pipeline.receive", "pcp.restore"}
    assert joined <= names
    assert w.one("eplb.step").args == {"is_dummy": True}
    untouched = ("request_state", "kv_connector", "speculator", "observers[0]")
    assert w.recorder.names(*untouched) == []
    asked = {"model_state.extras", "model_state.rope_positions", "model_state.recurrent"}
    assert {*w.recorder.names("model_state")} == asked
    assert set(w.one("pcp.partition").args["tables"].slot_mappings[0].tolist()) == {-1}
    decode = SchedulerOutput(
        cached_requests=(CachedRequest(req_id="a", num_computed_tokens=5),), num_scheduled_tokens={"a": 1}
    )
    assert w.step(decode).sampled_token_ids == (tuple(fake_tokens(PROMPT, 2)[1:]),), "the cache is as it was"


@RUNNERS
def test_a_captured_size_pads_the_batch_and_changes_no_token(start, runner):
    w = start(runner, graph={"use": "fake", "multiple": 8})
    out = w.step(prefill(new("a"), new("b", (9, 8, 7, 6), (3,))))
    desc = w.one("graph.dispatch").result
    assert (desc.mode, desc.num_tokens, desc.num_reqs) == ("full", 16, 8)
    assert w.one("parallel.agree").args["desc"] == desc
    assert w.one("pcp.partition").args["desc"] == desc
    assert w.one("graph.run").args["desc"] == desc
    for name in ("model_state.extras_captured", "attention.build_captured"):
        assert w.one(name).args["desc"] == desc
    assert w.one("attention.build_captured").args["extras"] == {"fake": 2}
    assert w.recorder.names("model_state.extras_captured", "attention.build_captured", "attention.host_parameters") == [
        "model_state.extras_captured",
        "attention.build_captured",
        "attention.host_parameters",
    ]
    batch, tables = (w.one("pcp.partition").args[name] for name in ("batch", "tables"))
    assert batch.input_ids.shape == batch.positions.shape == (16,)
    assert tables.slot_mappings[0].shape == (16,)
    assert tables.slot_mappings[0][9:].tolist() == [-1] * 7
    assert tables.block_tables[0].shape[0] == batch.seq_lens.shape[0] == 8
    assert batch.seq_lens.tolist() == [5, 4, 0, 0, 0, 0, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 5, 9, 9, 9, 9, 9, 9, 9]
    assert w.one("eplb.prepare_forward").args["num_tokens"] == 9, "the unpadded count"
    assert out.sampled_token_ids == (tuple(fake_tokens(PROMPT, 1)), tuple(fake_tokens((9, 8, 7, 6), 1)))


@RUNNERS
def test_input_embeddings_of_the_encoder_reach_the_model(start, runner):
    w = start(runner, encoder={"use": "fake", "embeds": True})
    out = w.step(prefill(new("a")))
    inputs = w.one("network.forward").args["inputs"]
    assert torch.equal(inputs.inputs_embeds, w.one("encoder.embed").result.inputs)
    assert w.recorder.of("graph.run") == [], "graphs begin with the embedding of ids"
    assert out.sampled_token_ids == (tuple(fake_tokens(PROMPT, 1)),)


@RUNNERS
def test_the_first_pipeline_stage_sends_and_takes_the_tokens_of_the_last(start, runner):
    w = start(
        runner, {"limits": {"num_speculative_tokens": 2}}, pipeline={"use": "fake", "is_last": False, "token": 11}
    )
    out = w.step(prefill(new("a"), new("b", range(10), (3, 4, 5))))
    assert out.sampled_token_ids == ((11,), (11,))
    assert w.recorder.names(
        "pipeline",
        "network",
        "sampler.process",
        "sampler.draw",
        "speculator.propose",
        "request_state.commit",
        "eplb.step",
    ) == [
        "pipeline.receive",
        "network.forward",
        "pipeline.send",
        "pipeline.receive_sampled",
        "request_state.commit",
        "eplb.step",
    ]
    sent = w.one("pipeline.send").args["output"]
    assert torch.equal(sent.hidden, w.one("network.forward").result.hidden)
    w.recorder.clear()
    w.step(
        SchedulerOutput(
            cached_requests=(CachedRequest(req_id="a", num_computed_tokens=5),), num_scheduled_tokens={"a": 1}
        )
    )
    assert w.one("attention.build").args["batch"].input_ids.tolist() == [11], "the next input is the received token"


@RUNNERS
def test_a_grammar_masks_raw_logits_of_its_requests_only(start, runner):
    w = start(runner)
    allowed = 200
    mask = np.zeros((1, -(-FAKE_VOCAB // 32)), dtype=np.int32)
    mask[0, allowed // 32] = np.int32(1 << allowed % 32)
    grammar = GrammarOutput(req_ids=("b",), bitmask=mask)
    out = w.step(prefill(new("a"), new("b", (9,), (3,))), grammar)
    assert out.sampled_token_ids == (tuple(fake_tokens(PROMPT, 1)), (allowed,))
    assert w.recorder.names("network.compute_logits", "grammar.apply", "sampler.process") == [
        "network.compute_logits",
        "grammar.apply",
        "sampler.process",
    ]
    assert torch.equal(w.one("grammar.apply").args["logits"], w.one("network.compute_logits").result)
    assert w.one("grammar.apply").args["grammar"].req_ids == ("b",)


@RUNNERS
def test_partial_prefills_yield_no_token_and_no_draft(start, runner):
    w = start(runner, {"limits": {"num_speculative_tokens": 2}})
    request = new("a", range(20, 30), (1, 2, 3))
    first = SchedulerOutput(new_requests=(request,), num_scheduled_tokens={"a": 6})
    assert w.step(first).sampled_token_ids == ((),)
    assert w.one("pipeline.broadcast").args["output"].num_sampled.tolist() == [0]
    assert w.one("speculator.propose").result.token_ids.tolist() == [[-1, -1]]
    rest = SchedulerOutput(
        cached_requests=(CachedRequest(req_id="a", num_computed_tokens=6),), num_scheduled_tokens={"a": 4}
    )
    assert w.step(rest).sampled_token_ids == (tuple(fake_tokens(range(20, 30), 1)),)


# --- drafts


def run_with_drafts(w, prompts, count, num_drafts):
    """Drive a worker that speculates by hand; returns each request's tokens and how many drafts were accepted."""
    tokens, computed, accepted = {}, {}, 0
    blocks = iter(range(1, 40))
    requests = [
        new(r, p, [next(blocks) for _ in range(-(-(len(p) + count + num_drafts) // 4))]) for r, p in prompts.items()
    ]
    out = w.step(prefill(*requests))
    for req_id, row in zip(out.req_ids, out.sampled_token_ids, strict=True):
        tokens[req_id], computed[req_id] = list(row), len(prompts[req_id])
    while live := [r for r in prompts if len(tokens[r]) < count]:
        out = w.step(
            SchedulerOutput(
                cached_requests=tuple(CachedRequest(req_id=r, num_computed_tokens=computed[r]) for r in live),
                num_scheduled_tokens=dict.fromkeys(live, 1 + num_drafts),
                scheduled_drafts=dict.fromkeys(live, num_drafts),
            )
        )
        for req_id, row in zip(out.req_ids, out.sampled_token_ids, strict=True):
            tokens[req_id].extend(row)
            computed[req_id] += len(row)
            accepted += len(row) - 1
        w.worker.check_integrity()
    return {r: row[:count] for r, row in tokens.items()}, accepted


@RUNNERS
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_change_the_number_of_steps_and_no_token(start, runner, num_drafts):
    w = start(runner, {"limits": {"num_speculative_tokens": num_drafts}})
    prompts = {"a": PROMPT, "b": (9,), "c": tuple(range(13))}
    tokens, accepted = run_with_drafts(w, prompts, 24, num_drafts)
    assert tokens == {req_id: fake_tokens(prompt, 24) for req_id, prompt in prompts.items()}
    rejected = sum(int(call.result.num_rejected.sum()) for call in w.recorder.of("rejection.verify"))
    assert accepted >= 10
    assert rejected >= 10, "the fake speculator is wrong now and then"


@RUNNERS
def test_values_of_a_step_with_drafts(start, runner):
    w = start(runner, {"limits": {"num_speculative_tokens": 2}})
    w.step(prefill(new("a", PROMPT, (1, 2, 3))))
    inputs, proposed = w.one("speculator.propose").args["inputs"], w.one("speculator.propose").result
    drafts = proposed.token_ids
    known = fake_tokens(PROMPT, 3)
    assert inputs.next_tokens.tolist() == known[:1]
    assert inputs.batch.req_ids == ("a",)
    assert inputs.hidden.shape[0] == 5
    assert inputs.tables.block_tables[0][0, :3].tolist() == [1, 2, 3]
    assert torch.equal(w.one("verify_budget.trim").args["drafts"].token_ids, drafts)
    assert torch.equal(w.one("rejection.remember").args["drafts"].token_ids, drafts)
    assert w.one("request_state.next_tokens").result.tolist() == known[:1]
    stored = w.one("request_state.store_drafts").args["drafts"]
    assert (stored.tolist() if torch.is_tensor(stored) else [list(row) for row in stored]) == drafts.tolist()
    w.recorder.clear()
    step = SchedulerOutput(
        cached_requests=(CachedRequest(req_id="a", num_computed_tokens=5),),
        num_scheduled_tokens={"a": 3},
        scheduled_drafts={"a": 2},
    )
    out = w.step(step)
    verify = w.one("rejection.verify")
    batch = verify.args["batch"]
    assert batch.input_ids.tolist() == [known[0], *drafts[0].tolist()]
    assert batch.draft_ids.tolist() == [*drafts[0].tolist(), -1]
    assert batch.logits_indices.tolist() == [0, 1, 2]
    assert batch.cu_num_logits_np.tolist() == [0, 3]
    assert verify.args["logits"].shape == (3, FAKE_VOCAB)
    right = next((i for i, draft in enumerate(drafts[0].tolist()) if draft != known[1 + i]), 2)
    assert out.sampled_token_ids == (tuple(fake_tokens(PROMPT, 4)[1 : 2 + right]),)
    assert verify.result.num_rejected.tolist() == [2 - right]
    assert w.recorder.names("sampler.process", "rejection.verify", "pipeline.broadcast", "request_state.commit") == [
        "sampler.process",
        "rejection.verify",
        "pipeline.broadcast",
        "request_state.commit",
    ]


@RUNNERS
def test_the_verify_budget_trims_what_is_stored(start, runner):
    w = start(runner, {"limits": {"num_speculative_tokens": 3}}, verify_budget={"use": "fake", "keep": 1})
    w.step(prefill(new("a")))
    (row,) = w.one("speculator.propose").result.token_ids.tolist()
    stored = w.one("request_state.store_drafts").args["drafts"]
    stored = stored.tolist() if torch.is_tensor(stored) else stored
    assert [t for t in stored[0] if t >= 0] == row[:1]


def test_a_speculator_that_proposes_more_than_the_limit_is_refused(workerkit_registry):
    from workerkit.framework.errors import UnsupportedError
    from workerkit.framework.testing.fakes_sampling import FakeSpeculator

    class Eager(FakeSpeculator):
        """Knows no limit."""

        @property
        def num_speculative_tokens(self):
            return 4

    workerkit_registry.add(roles.SPECULATOR, "eager", Eager)
    for runner in ("v1", "v2"):
        assembly = Recorder().assemble(fake_config(runner, speculator="eager"), None, workerkit_registry)
        with pytest.raises(UnsupportedError, match=r"num_speculative_tokens"):
            assembly.worker.start()
        assembly.shutdown()


@RUNNERS
def test_taps_of_observers_and_speculator_are_asked_of_the_model(workerkit_registry, runner):
    from workerkit.framework.testing.fakes import FakeObserver
    from workerkit.framework.testing.fakes_sampling import FakeSpeculator

    class TapObserver(FakeObserver):
        """Wants the embeddings."""

        taps = ("embed",)

    class TapSpeculator(FakeSpeculator):
        """Wants a layer."""

        taps = ("layers.0",)

    workerkit_registry.add(roles.OBSERVERS, "tapping", TapObserver)
    workerkit_registry.add(roles.SPECULATOR, "tapping", TapSpeculator)
    w = Started(
        workerkit_registry,
        runner,
        {"limits": {"num_speculative_tokens": 1}},
        observers=["tapping"],
        speculator="tapping",
    )
    w.step(prefill(new("a")))
    assert set(w.one("network.forward").args["inputs"].taps) == {"embed", "layers.0"}
    taps = w.one("speculator.propose").args["inputs"].taps
    assert taps["layers.0"][:, 0].tolist() == list(PROMPT)
    w.assembly.shutdown()


@RUNNERS
def test_what_pcp_restores_is_what_sampler_and_speculator_see(workerkit_registry, runner):
    from workerkit.framework.interfaces.model import ModelOutput
    from workerkit.framework.testing.fakes import FakePCP

    class Marking(FakePCP):
        """Marks the hidden states that it puts back together."""

        def restore(self, output, batch):
            hidden = output.hidden.clone()
            hidden[:, 3] = 1
            return ModelOutput(hidden=hidden, taps=output.taps)

    workerkit_registry.add(roles.PCP, "marking", Marking)
    w = Started(workerkit_registry, runner, {"limits": {"num_speculative_tokens": 1}}, pcp="marking")
    w.step(prefill(new("a")))
    assert w.one("network.compute_logits").args["hidden"][:, 3].tolist() == [1]
    assert w.one("speculator.propose").args["inputs"].hidden[:, 3].tolist() == [1] * 5, (
        "the global states, not a rank's"
    )
    w.assembly.shutdown()
