"""Structured outputs: vLLM's engine makes the masks, our worker samples under them. A random model at temperature 1
says nothing of itself that a constraint would let pass."""

import json
import re

import jsonschema
import pytest
import vllm_engine

REGEX = r"(north|south)-[0-9]{2,4}(east|west)?"
ANYTHING = r"[^_]{20,60}"  # also lets most drafts pass
LETTERS = r"[a-z ]{20,50}"
CHOICES = ["red", "redder", "blue and green", "no"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tags": {"type": "array", "maxItems": 3}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMA["properties"]["tags"]["items"] = {"enum": ["left", "right"]}
WORD = 260  # " the"
KINDS = ("draft", "accepted")
NO_SPACE = {"disable_any_whitespace": True}
# components, and drafts a step. echo proposes on the device, and -1 for what it does not know
SPECULATION = {
    "none": ({}, 0),
    "echo": ({"speculator": "echo"}, 3),
    "ngram": ({"speculator": {"use": "ngram", "min_n": 1}}, 3),
    "itself": ({"speculator": "draft_model", "draft": "target", "rejection": "standard"}, 3),
}


def started(tiny_dir, variant, speculation, **options):
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    components, count = SPECULATION[speculation]
    workerkit = vllm_engine.config(runner, components=components, limits={"num_speculative_tokens": count})
    whole = {"structured_outputs_config": {"backend": "xgrammar", **NO_SPACE}, **options}
    return vllm_engine.vllm_engine(tiny_dir, workerkit, asynchronous, **whole)


def given(lengths, seed):
    """Prompts that end in a whole word: vLLM writes half a character at a prompt's end into the output."""
    return [{"prompt_token_ids": [*prompt, WORD]} for prompt in vllm_engine.prompts(lengths, seed)]


def requests(count, **fields):
    """(params, whether its text is right) of `count` requests of all kinds, some free. The JSON of the older vLLM has
    control characters in strings."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kinds = [
        ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text, strict=False), SCHEMA) is None),
        ({"choice": CHOICES}, lambda text: text in CHOICES),
        ({"regex": ANYTHING}, lambda text: re.fullmatch(ANYTHING, text)),
        (None, lambda text: True),
    ]
    for number in range(count):
        constraint, is_right = kinds[number % len(kinds)]
        wanted = None if constraint is None else StructuredOutputsParams(**constraint)
        yield (
            SamplingParams(max_tokens=100 if wanted else 20, seed=number, structured_outputs=wanted, **fields),
            is_right,
        )


def assert_all_right(llm, count, seed=0, **fields):
    wanted = [*requests(count, **fields)]
    prompts = given([7 * number % 41 for number in range(count)], seed)
    outputs = llm.generate(prompts, [params for params, _ in wanted], use_tqdm=False)
    texts = []
    for output, (params, is_right) in zip(outputs, wanted, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason == ("stop" if params.structured_outputs else "length")
        assert is_right(completion.text), completion.text
        texts.append(completion.text)
    llm.collective_rpc("check_integrity")
    return texts


@pytest.mark.parametrize("speculation", ["none", "itself", pytest.param("ngram", marks=pytest.mark.newest)])
@pytest.mark.parametrize("variant", vllm_engine.EACH)
def test_every_output_matches_its_constraint(tiny_dir, variant, speculation):
    with started(tiny_dir, variant, speculation) as llm:
        texts = assert_all_right(llm, 24, temperature=1.0)
        assert len({*texts}) > 16  # they were sampled
        assert_all_right(llm, 8, temperature=0.0)


@pytest.mark.parametrize("variant", vllm_engine.EACH)
def test_masks_and_drafts_that_are_unknown_or_refused_meet(tiny_dir, variant):
    """vLLM plans a step ahead with -1 for drafts, drops those that the grammar refuses, and pads; no request may end in
    an error, whatever is scheduled beside it."""
    with started(tiny_dir, variant, "echo", max_num_batched_tokens=24) as llm:
        for seed in range(3):
            assert_all_right(llm, 40, seed, temperature=1.0)
        assert vllm_engine.counter(llm, "spec_decode_num_draft_tokens") > 0


@pytest.mark.parametrize("speculation", ["echo", "itself"])
def test_masks_are_made_in_time_although_drafts_are_unknown(tiny_dir, speculation):
    """Two free requests fill the steps. A constrained one that waits beside them has no step in flight when it gets
    room, so vLLM makes its mask at once, with -1 for its drafts: what comes behind these has none."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    with started(tiny_dir, "v2", speculation, max_num_batched_tokens=8) as llm:
        free = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        letters = StructuredOutputsParams(regex=LETTERS)  # which about half of all tokens are
        constrained = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=letters)
        for seed in range(16):
            for output in llm.generate(given([1] * 4, seed), [free, free, *[constrained] * 2], use_tqdm=False)[2:]:
                assert output.outputs[0].finish_reason == "stop"
                assert re.fullmatch(LETTERS, output.outputs[0].text), output.outputs[0].text
        llm.collective_rpc("check_integrity")


@pytest.mark.newest
@pytest.mark.parametrize("speculation", ["none", "echo"])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_every_output_matches_when_requests_are_preempted(tiny_dir, variant, speculation):
    with started(tiny_dir, variant, speculation, num_gpu_blocks_override=11) as llm:
        for seed in range(2):
            assert_all_right(llm, 24, seed, temperature=1.0)
        assert vllm_engine.counter(llm, "num_preemptions") > 0


@pytest.mark.newest
@pytest.mark.parametrize("compiler", [{"backend": "guidance", **NO_SPACE}, {"backend": "outlines"}])
def test_the_other_compilers_of_vllm(tiny_dir, compiler):
    with started(tiny_dir, "v2", "echo", structured_outputs_config=compiler) as llm:
        assert_all_right(llm, 8, temperature=1.0)


@pytest.mark.newest
def test_constrained_greedy_tokens_do_not_depend_on_speculation(tiny_dir):
    texts = []
    for speculation in SPECULATION:
        with started(tiny_dir, "v2", speculation) as llm:
            texts.append(assert_all_right(llm, 15, temperature=0.0))
            if speculation == "itself":
                verified, accepted = (vllm_engine.counter(llm, f"spec_decode_num_{kind}_tokens") for kind in KINDS)
                assert accepted > verified / 2  # under masks, too: constrained requests are most of them
    assert texts[1:] == texts[:1] * (len(texts) - 1)
