"""vLLM's steps as ours: both of its protocols, drafts, masks, and what is refused. Its own dataclasses, no model."""

import dataclasses

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm_steps import PROTOCOLS, enter, requests, result, scheduled

from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.request import CachedRequest
from workerkit.plugins.vllm import adapter

STRUCTURED = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
A, B = enter("a", [1, 2, 3], blocks=([1, 2],)), enter("b", [4, 5], blocks=([3],))
A_AGAIN = enter("a", [1, 2, 3], generated=[9], blocks=([7, 8],))

# Steps that vLLM may send in a row, as keywords of `scheduled`.
SCRIPTS = {
    "a life": [
        {"new": [enter("a", [1, 2, 3], blocks=([1], [5]), computed=1)], "counts": {"a": 1}},
        {"running": [("a", 2, None)]},
        {"running": [("a", 3, ([2], [6]))], "new_block_ids_to_zero": [2, 6], "kv_cache_block_copies": [(1, 4)]},
        {"finished_req_ids": {"a"}},
    ],
    "preempted, then back": [
        {"new": [A, B]},
        {"running": [("b", 2, None)], "preempted_req_ids": {"a"}},
        {"running": [("b", 3, None)], "resumed": [A_AGAIN]},
        {"running": [("b", 4, None), ("a", 4, ([9],))]},
    ],
    "preempted and back in one step": [
        {"new": [A]},
        {"resumed": [A_AGAIN], "preempted_req_ids": {"a"}},
        {"running": [("a", 4, None)]},
    ],
    "preempted, then finished": [{"new": [A]}, {"preempted_req_ids": {"a"}}, {"finished_req_ids": {"a"}}],
    "sits a step out": [
        {"new": [A, B]},
        {"running": [("b", 2, None)]},
        {"running": [("a", 3, None), ("b", 3, None)]},
    ],
    "one id, two requests": [{"new": [A]}, {"new": [enter("a", [8])], "finished_req_ids": {"a"}}],
}


def translated(script, protocol):
    told = requests()
    return [told.read(scheduled(protocol, **step)).output for step in script]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_both_protocols_say_the_same(script):
    assert translated(script, "v1") == translated(script, "v2")


def test_a_life():
    first, second, third, last = translated(SCRIPTS["a life"], "v1")
    [request] = first.new_requests
    assert (request.token_ids, request.prompt_len, request.num_computed_tokens) == ((1, 2, 3), 3, 1)
    assert (request.block_ids, first.num_scheduled_tokens) == (((1,), (5,)), {"a": 1})
    assert second.cached_requests == (CachedRequest(req_id="a", num_computed_tokens=2),)
    assert third.cached_requests == (CachedRequest(req_id="a", num_computed_tokens=3, new_block_ids=((2,), (6,))),)
    assert (third.blocks_to_zero, third.block_copies) == ((2, 6), ((1, 4),))
    assert (last.finished_req_ids, last.num_scheduled_tokens) == ({"a"}, {})


@pytest.mark.parametrize("name", ["preempted, then back", "preempted and back in one step"])
def test_a_preempted_request_comes_back_as_a_new_one_with_its_parameters(name):
    outputs = translated(SCRIPTS[name], "v1")
    assert outputs[1].preempted_req_ids == {"a"}
    [back] = [request for output in outputs[1:] for request in output.new_requests]
    assert (back.token_ids, back.prompt_len, back.block_ids) == ((1, 2, 3, 9), 3, ((7, 8),))
    assert back.sampling == outputs[0].new_requests[0].sampling
    assert outputs[-1].cached_requests[-1].num_computed_tokens == 4


def test_a_request_that_vllm_resumes_unasked_leaves_first():
    """Its V1 protocol replaces the blocks of a request that it never reported as preempted."""
    told = requests()
    told.read(scheduled(new=[A]))
    output = told.read(scheduled(resumed=[A_AGAIN])).output
    assert (output.preempted_req_ids, len(output.new_requests), output.cached_requests) == ({"a"}, 1, ())


def test_a_session_goes_on_with_more_input_and_other_parameters():
    told = requests()
    told.read(scheduled(new=[enter("a", params=SamplingParams(temperature=0.5))]))
    longer = enter("a", [1, 2, 3, 9, 4], computed=3, params=SamplingParams(temperature=0.7))
    output = told.read(scheduled(new=[longer])).output
    assert output.preempted_req_ids == {"a"}
    assert (output.new_requests[0].token_ids, output.new_requests[0].sampling.temperature) == ((1, 2, 3, 9, 4), 0.7)


def test_what_the_worker_was_made_to_forget_comes_back():
    told = requests()
    told.read(scheduled(new=[A, B]))
    told.read(scheduled(preempted_req_ids={"b"}))
    assert told.forget().preempted_req_ids == {"a"}
    assert told.forget().preempted_req_ids == set()
    output = told.read(scheduled(resumed=[A_AGAIN], preempted_req_ids={"a"})).output
    assert [request.token_ids for request in output.new_requests] == [(1, 2, 3, 9)]


class TestDrafts:
    @pytest.mark.parametrize("ids", [[7, 8], [-1, -1]], ids=["known", "placeholders"])
    def test_they_are_counted_and_the_worker_knows_which(self, ids):
        told = requests()
        told.read(scheduled(new=[A, B]))
        drafts = {"scheduled_spec_decode_tokens": {"a": ids}}
        output = told.read(scheduled(running=[("a", 3, None), ("b", 2, None)], counts={"a": 3}, **drafts)).output
        assert (output.num_scheduled_tokens, output.scheduled_drafts) == ({"a": 3, "b": 1}, {"a": 2})

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("how", ["new", "resumed"])
    def test_a_request_that_enters_has_none_to_verify(self, how, protocol):
        """vLLM pads one that enters with a single token to the size of the others."""
        told, one = requests(), enter("a", [1, 2, 3], computed=2)
        if how == "resumed":
            told.read(scheduled(new=[A]))
            told.read(scheduled(preempted_req_ids={"a"}))
        padded = {"counts": {"a": 4}, "scheduled_spec_decode_tokens": {"a": [-1] * 3}}
        output = told.read(scheduled(protocol, **{how: [one]}, **padded)).output
        assert (output.num_scheduled_tokens, output.scheduled_drafts) == ({"a": 1}, {})

    @pytest.mark.parametrize(
        ("params", "ids", "masks_wait", "kept"),
        [
            (STRUCTURED, [7, -1, -1], False, 1),
            (STRUCTURED, [-1, -1, -1], False, 0),
            (STRUCTURED, [7, 8, 9], False, 3),
            (STRUCTURED, [-1, -1, -1], True, 3),
            (SamplingParams(), [-1, -1, -1], False, 3),
        ],
    )
    def test_behind_an_unknown_draft_there_is_no_mask(self, params, ids, masks_wait, kept):
        told = requests()
        told.read(scheduled(new=[enter("a", params=params)]))
        drafts = {"scheduled_spec_decode_tokens": {"a": ids}, "pending_structured_output_tokens": masks_wait}
        step = told.read(scheduled(running=[("a", 3, None)], counts={"a": 4}, **drafts))
        assert (step.output.num_scheduled_tokens, step.output.scheduled_drafts.get("a", 0)) == ({"a": 1 + kept}, kept)
        assert step.mask_rows == {"a": 4}

    def test_the_worker_tells_what_it_holds(self):
        told = requests()
        step = told.read(scheduled(new=[A, B, enter("c"), enter("d")]))
        assert told.drafts().draft_token_ids == [[], [], [], []]
        of_each = ((5, 6), (), (7,), (8,))
        told.answer(step, result({"a": [1], "b": [2], "c": [3], "d": [4]}, draft_token_ids=of_each))
        step = told.read(scheduled(running=[("b", 2, None)], preempted_req_ids={"c"}, finished_req_ids={"d"}))
        held = told.drafts()
        assert dict(zip(held.req_ids, held.draft_token_ids, strict=True)) == {"a": [5, 6], "b": []}
        told.answer(step, result({"b": [2]}, draft_token_ids=((9,),)))
        assert told.drafts().draft_token_ids == [[5, 6], [9]]


class TestMasks:
    def rows(self, step, req_ids, count):
        grammar = GrammarOutput(req_ids, np.arange(count, dtype=np.int32)[:, None].repeat(2, axis=1))
        ours = requests().masks(step, grammar)
        grammar.grammar_bitmask[:] = -1  # vLLM fills it again for the next step
        return ours.req_ids, ours.bitmask[:, 0].tolist()

    def test_rows_are_those_of_the_drafts_that_the_worker_verifies(self):
        told = requests()
        told.read(scheduled(new=[enter(name, params=STRUCTURED) for name in "abc"]))
        drafts = {"scheduled_spec_decode_tokens": {"a": [7, -1], "c": [7, 8]}}
        running = [("a", 3, None), ("b", 3, None), ("c", 3, None)]
        step = told.read(scheduled(running=running, counts={"a": 3, "c": 3}, **drafts))
        assert self.rows(step, ["c", "a", "b"], 7) == (("c", "a", "b"), [0, 1, 2, 3, 4, 6])

    def test_those_of_a_refused_request_are_left_out(self):
        told = requests()
        served, refused = [enter(name, params=STRUCTURED) for name in "ac"], enter("b", more={"replay_start": 1})
        step = told.read(scheduled(new=[served[0], refused, served[1]]))
        assert self.rows(step, ["a", "b", "c"], 3) == (("a", "c"), [0, 2])
        assert self.rows(step, ["b"], 1) == ((), [])

    def test_there_may_be_none(self):
        assert requests().masks(requests().read(scheduled(new=[A])), None) is None


def names(kind, served):
    return sorted({field.name for field in dataclasses.fields(kind)} - served)


OF_A_STEP = adapter._OF_A_STEP | adapter._OF_THE_SCHEDULER


@dataclasses.dataclass
class LaterRequest(NewRequestData):
    urgency: int = 0


@dataclasses.dataclass
class LaterStep(SchedulerOutput):
    weather: str | None = None


class TestRefusals:
    @pytest.mark.parametrize("name", names(NewRequestData, adapter._OF_A_REQUEST))
    def test_a_request_with_a_field_that_is_not_served(self, name):
        value = torch.zeros(3, 8) if name == "prompt_embeds" else [object()]
        self.refused(enter("x", more={name: value}), f"does not serve {name}")

    @pytest.mark.parametrize(
        ("entry", "reason"),
        [
            (enter("x", kind=LaterRequest, more={"urgency": 1}), "does not serve urgency"),
            (enter("x", params=SamplingParams(thinking_token_budget=9)), "sampling_params.thinking_token_budget"),
            (enter("x", more={"sampling_params": None}), "sampling parameters"),
            (enter("x", more={"prompt_token_ids": None}), "prompt tokens"),
            (enter("x", params=SamplingParams(temperature=1e-2, seed=5, extra_args={"typical_p": 2.0})), "typical_p"),
            (enter("x", params=SamplingParams(extra_args={"typical_p": "much"})), "'typical_p' must be"),
            (enter("x", params=SamplingParams(seed=99)), "seed 99"),
        ],
    )
    def test_a_request_that_cannot_be_served(self, entry, reason):
        self.refused(entry, reason)

    def refused(self, entry, reason):
        """Just this request fails, in each step until vLLM has finished it; its id is free then."""

        def check(request):
            if request.sampling.seed == 99:
                raise RequestError("seed 99 is not served")

        told = requests(check=check)
        step = told.read(scheduled(new=[A, entry, B]))
        assert [request.req_id for request in step.output.new_requests] == ["a", "b"]
        assert step.output.num_scheduled_tokens == {"a": 3, "b": 2}
        self.failed(told, step, ["a", "x", "b"], reason)
        running = [("b", 2, None), ("x", 3, ([4],)), ("a", 3, None)]
        step = told.read(scheduled(running=running))
        assert [request.req_id for request in step.output.cached_requests] == ["b", "a"]
        self.failed(told, step, ["b", "x", "a"], reason)
        step = told.read(scheduled(finished_req_ids={"x"}, new=[enter("x")]))
        assert [request.req_id for request in step.output.new_requests] == ["x"]
        assert not told.answer(step, result({"x": [5]})).failed

    def failed(self, told, step, req_ids, reason):
        answer = told.answer(step, result({"a": [5], "b": [6]}))
        assert answer.req_ids == req_ids
        assert [answer.sampled_token_ids[answer.req_id_to_index[name]] for name in "axb"] == [[5], [], [6]]
        assert answer.failed.keys() == {"x"}
        assert reason in answer.failed["x"]

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_a_refused_request_that_is_preempted_stays_refused(self, protocol):
        told = requests()
        told.read(scheduled(protocol, new=[enter("x", more={"replay_start": 1})]))
        told.read(scheduled(protocol, preempted_req_ids={"x"}))
        back = enter("x", more={"replay_start": 1})
        step = told.read(scheduled(protocol, resumed=[back]))
        assert (step.output.new_requests, step.failed.keys()) == ((), {"x"})

    @pytest.mark.parametrize("name", names(SchedulerOutput, OF_A_STEP))
    def test_a_step_with_a_field_that_is_not_served(self, name):
        with pytest.raises(UnsupportedError, match=name):
            requests().read(scheduled(**{name: {"r": [0]}}))

    def test_a_step_with_a_field_of_a_later_version(self):
        fields = {field.name: getattr(scheduled(), field.name) for field in dataclasses.fields(SchedulerOutput)}
        requests().read(LaterStep(**fields))
        with pytest.raises(UnsupportedError, match="weather"):
            requests().read(LaterStep(**fields, weather="rain"))

    def test_what_only_the_scheduler_reads_is_passed_over(self):
        present = adapter._OF_THE_SCHEDULER & {field.name for field in dataclasses.fields(SchedulerOutput)}
        output = requests().read(scheduled(new=[A], **{name: [object()] for name in present})).output
        assert output == requests().read(scheduled(new=[A])).output
