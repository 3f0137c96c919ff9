"""vLLM's SamplingParams as ours: values, and that no field goes unread."""

import attrs
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from workerkit.framework.interfaces import sampling_params as ours
from workerkit.plugins.vllm import params

FIELDS = SamplingParams.__struct_fields__
SEED = 17  # for requests that bring none
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": SEED}
OFF |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


def translate(extra_seed=SEED, **fields):
    """What differs from our SamplingParams with everything off."""
    found = params.sampling_params(SamplingParams(**fields), extra_seed)
    off = attrs.asdict(ours.SamplingParams(**OFF))
    return {name: value for name, value in attrs.asdict(found, recurse=False).items() if value != off[name]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, None),
        ({"top_k": -1}, {}),
        ({"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}, None),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -2}, {"seed": 2**63 - 2}),
        ({"seed": 2**63}, {"seed": 0}),
        ({"seed": -1}, {}),  # to vLLM that is none
        ({"min_tokens": 3, "max_tokens": 9}, {"min_tokens": 3}),
        ({"logprobs": 3, "prompt_logprobs": 0}, None),
        ({"logprobs": -1}, {"logprobs": -1}),
        ({"logprob_token_ids": [4, 5]}, {"logprobs": 0, "logprob_token_ids": (4, 5)}),
        ({"logprob_token_ids": [4, 5], "logprobs": 2}, {"logprobs": 2, "logprob_token_ids": (4, 5)}),
        ({"logit_bias": {3: -1.5}}, {"logit_bias": {3: -1.5}}),
        ({"allowed_token_ids": [7, 8]}, {"allowed_token_ids": (7, 8)}),
        ({"extra_args": {"typical_p": 0.6, "mine": 4}}, {"typical_p": 0.6, "extra_args": {"mine": 4}}),
        ({"extra_args": {"top_n_sigma": 1.5}}, {"top_n_sigma": 1.5}),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, {"structured_outputs": params._STRUCTURED}),
        # what vLLM's front end and scheduler serve
        ({"n": 3, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True, "bad_words": ["w"], "max_tokens": 1}, {}),
        ({"detokenize": False, "skip_special_tokens": False, "flat_logprobs": True, "watermarking": True}, {}),
    ],
)
def test_values(fields, expected):
    assert translate(**fields) == (fields if expected is None else expected)


def test_structured_outputs_without_a_constraint_ask_for_nothing():
    empty = StructuredOutputsParams(regex="a")
    empty.regex = None
    assert translate(structured_outputs=empty) == {}


def test_bad_words_come_as_the_ids_of_vllms_tokenizer():
    given = SamplingParams(bad_words=["x"])
    given._bad_words_token_ids = [[3], [4, 5]]
    assert params.sampling_params(given, SEED).bad_words_token_ids == ((3,), (4, 5))


def test_a_request_without_a_seed_gets_the_one_it_is_given():
    assert translate(extra_seed=3) == {"seed": 3}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"extra_args": {"typical_p": 0.0}}, "typical_p"),
        ({"extra_args": {"top_n_sigma": -1.0}}, "top_n_sigma"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias"),
    ],
)
def test_values_that_ours_may_not_have(fields, name):
    with pytest.raises(ValueError, match=name):
        translate(**fields)


UNKNOWN = sorted({*FIELDS} - params._KNOWN)


def test_no_field_of_this_version_goes_unread():
    """A field is translated, served elsewhere, or refused when it is set; there is no fourth."""
    kinds = ({*params._SAME}, params._TRANSLATED, params._ELSEWHERE, {*UNKNOWN})
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert {*FIELDS} <= set().union(*kinds)
    assert "thinking_token_budget" in UNKNOWN
    assert [*params.unserved(SamplingParams())] == []


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("value", [1, [[1]], np.zeros((1, 1), np.int32)], ids=["number", "list", "array"])
def test_a_field_that_nobody_serves_is_refused_by_name(name, value):
    given = SamplingParams()
    setattr(given, name, value)
    assert [*params.unserved(given)] == [name]


def test_fields_of_a_later_version_are_refused_when_they_are_set():
    class Later(SamplingParams):
        mood: str = "calm"

    assert [*params.unserved(Later())] == []
    assert [*params.unserved(Later(mood="wild"))] == ["mood"]


def test_extra_args_are_those_of_parts_and_the_two_that_vllm_lacks():
    assert params.served_extra_args(["mine", "top_k", "top_n_sigma"]) == {"mine", "typical_p", "top_n_sigma"}
