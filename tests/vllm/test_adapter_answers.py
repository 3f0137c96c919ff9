"""Our answers as vLLM's: tokens, log-probabilities of output and prompt, failures; and what the worker calls."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm_steps import PROTOCOLS, enter, requests, result, scheduled, vllm_config, workerkit_config, write_config_json

from workerkit.framework.interfaces.request import Logprobs, ModelRunnerOutput, StepOutput
from workerkit.plugins.vllm import worker
from workerkit.plugins.vllm.adapter import FailingOutput

ASKS = SamplingParams(prompt_logprobs=1)


def logprobs(first, rows, num_top, num_chosen=0):
    """Columns: token `first`, `first + 1`, …, the next row goes on; the value is minus the id, the rank id + 1."""
    width = 1 + num_top + num_chosen
    ids = first + np.arange(rows * width, dtype=np.int64).reshape(rows, width)
    return Logprobs(token_ids=ids, logprobs=-ids.astype(np.float32), ranks=ids[:, 0] + 1, num_top=num_top)


def answer(req_ids, tokens, **more):
    told = requests()
    step = told.read(scheduled(new=[enter(req_id) for req_id in req_ids]))
    return told.answer(step, result(tokens, **more))


def test_tokens_come_in_the_order_of_vllm():
    """One, several, and none for a prompt that goes on."""
    found = answer("abc", {"c": [7], "b": [], "a": [5, 6]})
    assert (found.req_ids, found.sampled_token_ids) == (["a", "b", "c"], [[5, 6], [], [7]])
    assert found.req_id_to_index == {"a": 0, "b": 1, "c": 2}
    assert (found.logprobs, found.prompt_logprobs_dict, found.failed) == (None, {}, {})


def test_a_request_without_a_possible_token_fails_alone():
    found = answer(
        "abc", {"a": [5], "b": [6, -1], "c": [-1]}, logprobs={"a": logprobs(5, 1, 1), "b": logprobs(6, 2, 1)}
    )
    assert found.sampled_token_ids == [[5], [], []]
    assert found.failed.keys() == {"b", "c"}
    assert "no token was possible" in found.failed["c"]
    assert found.logprobs.slice_request(0, 1).logprob_token_ids.tolist() == [[5, 6]]
    assert len(found.logprobs.logprobs) == 1


def test_logprobs_of_requests_that_asked_for_different_things():
    """vLLM cuts the rows of each by `slice_request`, and the columns by what the request asked for."""
    tokens = {"top": [20, 24], "none": [1, 1, 1], "chosen": [40], "own": [60, 61], "partial": []}
    parts = {"top": logprobs(20, 2, 3), "chosen": logprobs(40, 1, 0, 2), "own": logprobs(60, 2, 0)}
    found = answer(tokens, dict(reversed(tokens.items())), logprobs=parts).logprobs
    assert found.cu_num_generated_tokens == [0, 2, 5, 6, 8, 8]
    wanted = {0: [[20, 21, 22, 23], [24, 25, 26, 27]], 2: [[40, 41, 42]], 3: [[60], [61]]}
    for index, ids in wanted.items():
        sliced = found.slice_request(index, len(ids))
        width = len(ids[0])
        assert sliced.logprob_token_ids[:, :width].tolist() == ids
        assert np.array_equal(sliced.logprobs[:, :width], -np.array(ids, np.float32))
        assert sliced.sampled_token_ranks.tolist() == [row[0] + 1 for row in ids]
    assert found.slice_request(4, 0).logprobs.shape == (0, 4)


def test_of_top_and_chosen_columns_vllm_gets_the_chosen():
    found = answer("a", {"a": [8]}, logprobs={"a": logprobs(8, 1, 2, 2)}).logprobs
    assert found.logprob_token_ids.tolist() == [[8, 11, 12]]


class TestPromptLogprobs:
    def test_chunks_are_delivered_whole_with_the_first_token(self):
        told = requests()
        one = enter("r", [1, 2, 3, 4, 5, 6], params=ASKS)
        step = told.read(scheduled(new=[one], counts={"r": 2}))
        found = told.answer(step, result({"r": []}, prompt_logprobs={"r": logprobs(10, 2, 1)}))
        assert found.prompt_logprobs_dict == {}
        step = told.read(scheduled(running=[("r", 2, None)], counts={"r": 3}))
        found = told.answer(step, result({"r": []}, prompt_logprobs={"r": logprobs(14, 3, 1)}))
        assert found.prompt_logprobs_dict == {}
        step = told.read(scheduled(running=[("r", 5, None)]))
        whole = told.answer(step, result({"r": [7]})).prompt_logprobs_dict["r"]
        assert whole.logprob_token_ids.tolist() == [[row, row + 1] for row in range(10, 20, 2)]
        assert whole.logprobs.tolist() == [[-row, -row - 1] for row in range(10, 20, 2)]
        assert whole.selected_token_ranks.tolist() == [11, 13, 15, 17, 19]
        step = told.read(scheduled(running=[("r", 6, None)]))
        assert told.answer(step, result({"r": [7]})).prompt_logprobs_dict == {}

    def test_of_a_prompt_of_one_token_there_are_none(self):
        told = requests()
        step = told.read(scheduled(new=[enter("r", [1], params=ASKS), enter("s", [1])]))
        [(req_id, empty)] = told.answer(step, result({"r": [7], "s": [7]})).prompt_logprobs_dict.items()
        assert (req_id, empty.logprobs.shape, len(empty.selected_token_ranks)) == ("r", (0, 1), 0)
        assert empty.logprob_token_ids.dtype == torch.int64

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_preempted_before_they_are_delivered(self, protocol):
        """The pieces that were there are computed again, and count once."""
        told = requests()
        step = told.read(scheduled(protocol, new=[enter("r", params=ASKS)], counts={"r": 2}))
        told.answer(step, result({"r": []}, prompt_logprobs={"r": logprobs(50, 2, 1)}))
        told.read(scheduled(protocol, preempted_req_ids={"r"}))
        step = told.read(scheduled(protocol, resumed=[enter("r", params=ASKS)]))
        assert step.output.new_requests[0].sampling.prompt_logprobs == 1
        found = told.answer(step, result({"r": [7]}, prompt_logprobs={"r": logprobs(10, 2, 1)}))
        assert found.prompt_logprobs_dict["r"].logprob_token_ids.tolist() == [[10, 11], [12, 13]]

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("answered", ["before", "after"])
    def test_preempted_after_they_are_delivered(self, protocol, answered):
        """`after`: the answer was on its way when the request was preempted, and vLLM still takes it."""
        told = requests()
        step = told.read(scheduled(protocol, new=[enter("r", params=ASKS)]))
        if answered == "after":
            told.read(scheduled(protocol, preempted_req_ids={"r"}))
        found = told.answer(step, result({"r": [7]}, prompt_logprobs={"r": logprobs(10, 2, 1)}))
        assert len(found.prompt_logprobs_dict["r"].logprobs) == 2
        if answered == "before":
            told.read(scheduled(protocol, preempted_req_ids={"r"}))
        step = told.read(scheduled(protocol, resumed=[enter("r", generated=[7], params=ASKS)]))
        assert step.output.new_requests[0].sampling.prompt_logprobs is None
        assert told.answer(step, result({"r": [8]})).prompt_logprobs_dict == {}

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_in_an_answer_that_vllm_drops_they_do_not_count(self, protocol):
        """`reset_prefix_cache` of running requests: what is on its way is dropped, and comes again."""
        told = requests()
        dropped = told.read(scheduled(protocol, new=[enter("r", params=ASKS)]))
        step = told.read(scheduled(protocol, resumed=[enter("r", params=ASKS)], preempted_req_ids={"r"}))
        for late in (dropped, step):
            found = told.answer(late, result({"r": [7]}, prompt_logprobs={"r": logprobs(10, 2, 1)}))
        assert found.prompt_logprobs_dict["r"].logprob_token_ids.tolist() == [[10, 11], [12, 13]]


def test_an_answer_that_comes_late_changes_nothing_of_the_next_stay():
    told = requests()
    late = told.read(scheduled(new=[enter("a"), enter("b")]))
    told.read(scheduled(preempted_req_ids={"a"}, finished_req_ids={"b"}, resumed=[enter("a", generated=[4])]))
    found = told.answer(late, result({"a": [5], "b": [6]}, draft_token_ids=((7,), (8,))))
    assert found.sampled_token_ids == [[5], [6]]
    assert (told.drafts().req_ids, told.drafts().draft_token_ids) == (["a"], [[]])


class TestSeeds:
    def seeds(self, seed, params=(None, 5, None)):
        told = requests(seed)
        new = [enter(str(index), params=SamplingParams(seed=one)) for index, one in enumerate(params)]
        return [request.sampling.seed for request in told.read(scheduled(new=new)).output.new_requests]

    def test_every_rank_draws_the_same(self):
        first, given, third = self.seeds(1)
        assert given == 5
        assert first != third
        assert self.seeds(1) == [first, given, third]
        assert not {first, third} & {*self.seeds(2)}

    def test_a_request_that_is_refused_takes_none_from_others(self):
        told = requests(1)
        refused = enter("x", more={"replay_start": 1})
        step = told.read(scheduled(new=[refused, enter("0")]))
        assert step.output.new_requests[0].sampling.seed == self.seeds(1)[0]


@attrs.define(eq=False)
class Inner:
    """What `assemble` makes, with a worker that writes down its calls. It samples token 7 for all."""

    calls: list = attrs.field(factory=list)
    extension_methods: tuple = ()
    shape: object = SimpleNamespace(vocab_size=100)

    @property
    def worker(self):
        return self

    def check_request(self, params):
        """All are served."""

    def execute_model(self, output):
        self.calls.append(("execute_model", output))

    def sample_tokens(self, grammar):
        output = self.calls[-1][1]
        self.calls.append(("sample_tokens", grammar))
        return Ready(result({req_id: [7] for req_id in output.num_scheduled_tokens}))


class Ready(StepOutput):
    def __init__(self, output):
        self.output = output

    def get(self):
        return self.output


class TestWorker:
    @pytest.fixture(params=["v1", "v2"])
    def made(self, request, monkeypatch, tmp_path):
        inner, ahead = Inner(), request.param == "v2"
        monkeypatch.setattr(worker, "assemble", lambda document: inner)
        config = vllm_config(write_config_json(tmp_path), workerkit_config(request.param))
        return worker.VllmWorker(config, 0, 0, "nowhere"), inner, ahead

    def names(self, inner):
        return [name for name, _ in inner.calls]

    def test_a_step(self, made):
        one, inner, ahead = made
        assert one.execute_model(scheduled(new=[enter("r")])) is None
        found = one.sample_tokens(None)
        assert isinstance(found, worker.PendingOutput if ahead else FailingOutput)
        assert (found.get_output() if ahead else found).sampled_token_ids == [[7]]
        assert self.names(inner) == ["execute_model", "sample_tokens"]

    def test_an_empty_step_is_answered_at_once(self, made):
        one, inner, _ = made
        found = one.execute_model(scheduled(finished_req_ids={"r"}))
        assert (found.req_ids, found.sampled_token_ids) == ([], [])
        assert inner.calls[0][1].finished_req_ids == {"r"}

    def test_a_token_beyond_the_models_vocabulary_is_refused_alone(self, made):
        """vLLM lets pass what its tokenizer knows."""
        one, *_ = made
        beyond = enter("x", prompt=(3, 100))
        assert one.execute_model(scheduled(new=[enter("r"), beyond])) is None
        found = one.sample_tokens(None)
        found = found if isinstance(found, FailingOutput) else found.get_output()
        assert found.sampled_token_ids == [[7], []]
        assert found.failed == {"x": "token id 100 is not in the model's vocabulary, 0 to 99"}

    def test_a_step_of_refused_requests_only_samples_nothing(self, made):
        one, inner, _ = made
        refused = [enter(name, more={"replay_start": 1}) for name in "xy"]
        assert one.execute_model(scheduled(new=refused)) is None
        found = one.sample_tokens(None)
        assert (found.sampled_token_ids, found.failed.keys()) == ([[], []], {"x", "y"})
        assert self.names(inner) == ["execute_model"]
        assert inner.calls[0][1].num_scheduled_tokens == {}
        assert one.execute_model(scheduled(new=[enter("r")])) is None
        assert one.sample_tokens(None) is not None
        assert self.names(inner) == ["execute_model", "execute_model", "sample_tokens"]


def test_the_answer_to_nothing_is_empty():
    assert requests().answer(requests().read(scheduled()), ModelRunnerOutput()).req_ids == []
