"""Both runners: steps that contradict their state are refused whole, failed steps lose nothing, hooks fire alike."""

import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, RequestError, UnsupportedError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

CONFIG = {
    "model": {"source": "random", "max_model_len": 64},
    "limits": {"max_num_reqs": 2, "max_num_batched_tokens": 16},
    "cache": {"block_size": 4, "num_blocks": 40},
    "components": {"loader": "random", "sampler": {"use": "torch", "temperature": 0.0}},
}


def new(req_id, tokens=(1, 2, 3), blocks=((1, 2),), **more):
    return NewRequest(
        req_id=req_id, token_ids=tokens, prompt_len=len(tokens), sampling=SamplingParams(), block_ids=blocks, **more
    )


def cached(req_id, computed, blocks=()):
    return CachedRequest(req_id=req_id, num_computed_tokens=computed, new_block_ids=blocks)


@pytest.fixture(params=["v1", "v2"])
def worker(request):
    with assemble(CONFIG, {"components.runner": request.param}) as assembly:
        assembly.worker.start()
        yield assembly.worker


def step(worker, *news, cached_requests=(), scheduled, **more):
    output = SchedulerOutput(new_requests=news, cached_requests=cached_requests, num_scheduled_tokens=scheduled, **more)
    assert worker.execute_model(output) is None
    return worker.sample_tokens().get()


REFUSED = {
    "known": ({"new_requests": (new("a"),), "num_scheduled_tokens": {"a": 3}}, "already here"),
    "unknown": ({"cached_requests": (cached("z", 3),), "num_scheduled_tokens": {"z": 1}}, "'z' is not known"),
    "unscheduled": ({"cached_requests": (cached("a", 3),), "num_scheduled_tokens": {}}, "does not name exactly"),
    "twice": (
        {"cached_requests": (cached("a", 3), cached("a", 3)), "num_scheduled_tokens": {"a": 1}},
        "scheduled twice",
    ),
    "nothing": ({"cached_requests": (cached("a", 3),), "num_scheduled_tokens": {"a": 0}}, ">= 1"),
    "budget": (
        {"new_requests": (new("b", tuple(range(17)), ((3, 4, 5, 6, 7),)),), "num_scheduled_tokens": {"b": 17}},
        "17 tokens are scheduled, max_num_batched_tokens is 16",
    ),
    "slots": (
        {"new_requests": (new("b"), new("c")), "num_scheduled_tokens": {"b": 3, "c": 3}},
        "3 requests would be live, max_num_reqs is 2",
    ),
    "vocabulary": ({"new_requests": (new("b", (1, 256)),), "num_scheduled_tokens": {"b": 2}}, r"outside 0\.\.255"),
    "length": (
        {"new_requests": (new("b", tuple(range(65))),), "num_scheduled_tokens": {"b": 4}},
        "65 tokens .* max_model_len is 64",
    ),
    "groups": (
        {"new_requests": (new("b", blocks=((3,), (4,))),), "num_scheduled_tokens": {"b": 3}},
        "blocks for 2 of 1 cache groups",
    ),
    "position": (
        {"cached_requests": (cached("a", 64),), "num_scheduled_tokens": {"a": 1}},
        "position 65, max_model_len is 64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradicting_step_is_refused_and_changes_nothing(worker, name):
    values, message = REFUSED[name]
    first = step(worker, new("a"), scheduled={"a": 3}).sampled_token_ids
    with pytest.raises(RequestError, match=message):
        worker.execute_model(SchedulerOutput(**values))
    worker.check_integrity()
    second = step(worker, cached_requests=(cached("a", 3),), scheduled={"a": 1}).sampled_token_ids
    again = [
        step(worker, new("b", blocks=((5, 6),)), scheduled={"b": 3}, finished_req_ids=frozenset({"a"})),
        step(worker, cached_requests=(cached("b", 3),), scheduled={"b": 1}),
    ]
    assert [output.sampled_token_ids for output in again] == [first, second]


def test_an_id_may_end_and_begin_again_in_one_step(worker):
    first = step(worker, new("a"), scheduled={"a": 3}).sampled_token_ids
    second = step(worker, new("a"), scheduled={"a": 3}, finished_req_ids=frozenset({"a"})).sampled_token_ids
    assert first == second
    worker.check_integrity()


def test_grammars_are_refused_by_name_where_nobody_serves_them():
    from workerkit.framework.interfaces.request import GrammarOutput

    for runner in ("v1", "v2"):
        with assemble(CONFIG, {"components.runner": runner, "components.grammar": "none"}) as assembly:
            worker = assembly.worker
            worker.start()
            output = SchedulerOutput(new_requests=(new("a"),), num_scheduled_tokens={"a": 3})
            worker.execute_model(output)
            with pytest.raises(UnsupportedError, match=r"components\.grammar is none"):
                worker.sample_tokens(GrammarOutput(req_ids=("a",), bitmask=torch.zeros(1, 8).numpy())).get()


class Trace(Observer):
    """Writes down every hook."""

    def __init__(self) -> None:
        self.calls = []

    @hookimpl
    def step_started(self, output):
        self.calls.append(("step_started", dict(output.num_scheduled_tokens)))

    @hookimpl
    def batch_prepared(self, batch):
        self.calls.append(("batch_prepared", batch.req_ids, batch.num_tokens))

    @hookimpl
    def forward_finished(self, batch, output):
        self.calls.append(("forward_finished", batch.req_ids, tuple(output.hidden.shape)))

    @hookimpl
    def tokens_sampled(self, batch, output):
        self.calls.append(("tokens_sampled", batch.req_ids, output.num_sampled.tolist()))

    @hookimpl
    def step_finished(self, batch):
        self.calls.append(("step_finished", batch.req_ids))

    @hookimpl
    def output_ready(self, output):
        self.calls.append(("output_ready", output.req_ids, output.sampled_token_ids))


def traced(runner, registry):
    config = {**CONFIG, "components": {**CONFIG["components"], "observers": ["trace", "metrics"], "runner": runner}}
    with assemble(config, registry=registry) as assembly:
        engine_worker = assembly.worker
        engine_worker.start()
        scheduler = assembly.get(roles.SCHEDULER)
        for number, length in enumerate((20, 3, 7)):  # chunked, and one that waits for a slot
            prompt = (number + 1,) * length
            scheduler.add(
                EngineRequest(req_id=f"r{number}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=4))
            )
        while scheduler.has_work:
            output = scheduler.schedule()
            if engine_worker.execute_model(output) is None:
                scheduler.update(output, engine_worker.sample_tokens().get())
        trace, metrics = assembly.get_all(roles.OBSERVERS)
        return trace.calls, metrics.exposition()


def test_both_runners_fire_the_same_hooks_with_the_same_values():
    registry = load_plugins().registry
    registry.add(roles.OBSERVERS, "trace", Trace)
    (first, metrics), (second, _) = traced("v1", registry), traced("v2", registry)
    assert first == second
    names = [name for name, *_ in first]
    whole = ["step_started", "batch_prepared", "forward_finished", "tokens_sampled", "step_finished", "output_ready"]
    assert names == whole * (len(names) // 6) + ["step_started"]  # the last step only hears of finished requests
    assert "workerkit_generated_tokens_total 12.0" in metrics
    assert "workerkit_finished_requests_total 3.0" in metrics
    assert "workerkit_scheduled_tokens_total 39.0" in metrics  # 30 of the prompts and 3 x 3 of the output


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_tap_hands_out_hidden_states_of_named_layers(runner):
    observers = [{"use": "tap", "layers": ["layers.0", "embed"]}]
    with assemble(CONFIG, {"components.runner": runner, "components.observers": observers}) as assembly:
        worker = assembly.worker
        worker.start()
        rows = []
        assembly.get_all(roles.OBSERVERS)[0].subscribe(rows.append)
        step(worker, new("a"), scheduled={"a": 2})
        step(worker, cached_requests=(cached("a", 2),), scheduled={"a": 1})
        whole = []
        assembly.get_all(roles.OBSERVERS)[0].subscribe(whole.append)
        step(worker, new("b", blocks=((5,),)), scheduled={"b": 3})
        assert [(row.req_id, row.first_position) for row in rows] == [("a", 0), ("a", 2), ("b", 0)]
        for name in ("layers.0", "embed"):
            chunks = torch.cat([row.states[name] for row in rows[:2]])
            torch.testing.assert_close(chunks, whole[0].states[name])
            assert whole[0].states[name].shape == (3, 64)


def test_a_tap_of_a_layer_that_is_not_there_is_refused_with_the_nearest():
    observers = [{"use": "tap", "layers": ["layer.0"]}]
    refused = pytest.raises(ModelError, match=r"'layer\.0'; did you mean 'layers\.0'")
    with assemble(CONFIG, {"components.observers": observers}) as assembly, refused:
        assembly.worker.start()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_v2_queues_a_step_before_the_last_ones_tokens_are_read(runner):
    """The tokens of a step are the same whether they are fetched before the next step is queued or after it."""
    with assemble(CONFIG, {"components.runner": runner}) as assembly:
        worker = assembly.worker
        worker.start()
        late = []
        worker.execute_model(SchedulerOutput(new_requests=(new("a"),), num_scheduled_tokens={"a": 3}))
        late.append(worker.sample_tokens())
        for computed in (3, 4, 5):
            output = SchedulerOutput(cached_requests=(cached("a", computed),), num_scheduled_tokens={"a": 1})
            worker.execute_model(output)
            late.append(worker.sample_tokens())
        tokens = [output.get().sampled_token_ids[0][0] for output in late]
        again = [step(worker, new("b", blocks=((5, 6),)), scheduled={"b": 3}, finished_req_ids=frozenset({"a"}))]
        again += [step(worker, cached_requests=(cached("b", n),), scheduled={"b": 1}) for n in (3, 4, 5)]
        assert tokens == [output.sampled_token_ids[0][0] for output in again]
        assert late[0].get() is late[0].get()
