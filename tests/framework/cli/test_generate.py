"""`workerkit generate`: streaming, batches, files of prompts, Ctrl-C."""

from __future__ import annotations

import io
import json
import shlex
import signal
import sys

import attrs
import pytest

from workerkit.framework.cli.sampling import FIELDS
from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_streams_and_ends_with_its_speed(cli, engines, capsys):
    assert cli("generate", "abc") == 0
    out, err = capsys.readouterr()
    assert out == "ABC\n"
    assert err.startswith("3 tokens in ")
    assert err.rstrip().endswith("tokens/s")
    assert engines[0].calls == ["start(progress=True)", "shutdown"]
    assert engines[0].asked == [("abc", SamplingParams(max_tokens=256))]


def test_the_speed_names_the_mean_accepted_length_when_drafts_were_verified(cli, capsys):
    for prompts in (["abc"], ["abc", "de"]):
        assert cli("generate", *prompts, "--set", "components.engine.drafts_a_step=2") == 0
        assert capsys.readouterr().err.rstrip().endswith("tokens/s, mean accepted length 1.50")


def test_without_a_config_all_is_default_and_model_wins(cli, engines):
    cli("generate", "x")
    cli("generate", "x", "--model", "other")
    assert [engine.model.source for engine in engines] == ["smollm2", "other"]


@pytest.mark.parametrize("written", ["model: first", "model: {source: first, dtype: float32}"])
@pytest.mark.parametrize("spelling", [["-c", "F"], ["--config", "F"], ["--config=F"], ["-cF"]])
def test_b150_each_spelling_of_the_config_option_is_read(cli, engines, tmp_path, spelling, written):
    """B150: `--config=f.yaml` and `--config f.yaml`."""
    path = tmp_path / "f.yaml"
    path.write_text(written)
    arguments = [a.replace("F", str(path)) for a in spelling]
    assert cli("generate", *arguments, "x") == 0
    assert cli("generate", *arguments, "--model", "cli", "x") == 0
    assert [engine.model.source for engine in engines] == ["first", "cli"]
    assert engines[1].model.dtype == ("float32" if "dtype" in written else "auto")


@pytest.mark.parametrize(("value", "expected"), [("false", False), ("true", True)])
def test_b149_set_wins_over_the_file_over_the_default(cli, engines, tmp_path, value, expected):
    """B149: for both values, and null too."""
    path = tmp_path / "f.yaml"
    engine = f"{{eager: {str(not expected).lower()}, ctrl_c_at_step: 99}}"
    path.write_text(f"components: {{engine: {engine}}}\nmodel: {{max_model_len: 8}}")
    settings = [f"components.engine.eager={value}", "components.engine.ctrl_c_at_step=null", "model.max_model_len=null"]
    assert cli("generate", "-c", path, *(a for s in settings for a in ("--set", s)), "x") == 0
    assert engines[0].config.eager is expected
    assert engines[0].config.ctrl_c_at_step is None
    assert engines[0].model.max_model_len is None


def test_sampling_options_reach_the_engine_zero_included(cli, engines):
    options = [
        "--max-tokens",
        "2",
        "--temperature",
        "0",
        "--top-k",
        "0",
        "--top-p",
        "1",
        "--seed",
        "0",
        "--stop",
        "a",
        "--stop",
        "b",
    ]
    assert cli("generate", "abc", *options) == 0
    expected = SamplingParams(max_tokens=2, temperature=0.0, top_k=0, top_p=1.0, seed=0, stop=("a", "b"))
    assert engines[0].asked == [("abc", expected)]


def test_every_sampling_option_reaches_the_engine(cli, engines, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    options = shlex.split(
        "--min-p 0.1 --typical-p 0.9 --top-n-sigma 1.5 --presence-penalty -1 --frequency-penalty 0.5 "
        "--repetition-penalty 1.1 --min-tokens 2 --bad-word x --bad-word y --logit-bias 17=-5.5 --logit-bias 0=1 "
        "--allowed-token 1 --allowed-token 2 --stop . --stop-token 9 --include-stop --ignore-eos --special-tokens "
        "-n 2 --logprobs 3 --prompt-logprobs 0 --seed 7"
    )
    assert cli("generate", "abc", *options, "--json-schema", tmp_path / "schema.json") == 0
    expected = SamplingParams(
        n=2,
        min_p=0.1,
        typical_p=0.9,
        top_n_sigma=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        seed=7,
        max_tokens=256,
        min_tokens=2,
        stop=(".",),
        stop_token_ids=(9,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        bad_words=("x", "y"),
        allowed_token_ids=(1, 2),
        logit_bias={17: -5.5, 0: 1.0},
        logprobs=3,
        prompt_logprobs=0,
        structured_outputs=StructuredOutputsParams(json='{"type": "object"}'),
    )
    assert engines[0].asked == [("abc", expected)]


def test_the_command_line_knows_every_field_but_those_for_files():
    fields = {attribute.name for attribute in attrs.fields(SamplingParams)}
    only_in_files = {"bad_words_token_ids", "logprob_token_ids", "extra_args"}
    assert fields - set(FIELDS) == only_in_files | {"structured_outputs"}  # five options of their own


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--regex", "a+", {"regex": "a+"}),
        ("--grammar", "FILE", {"grammar": 'root ::= "a"'}),
        ("--json-object", None, {"json_object": True}),
    ],
)
def test_the_form_of_the_text(cli, engines, tmp_path, option, value, expected):
    (tmp_path / "FILE").write_text('root ::= "a"')
    values = [] if value is None else [tmp_path / value if value == "FILE" else value]
    assert cli("generate", "abc", option, *values) == 0
    assert engines[0].asked[0][1].structured_outputs == StructuredOutputsParams(**expected)
    assert cli("chat", "--once", "abc", option, *values) == 0
    assert engines[1].asked[0][1].structured_outputs == StructuredOutputsParams(**expected)


def test_choices_are_repeated(cli, engines):
    assert cli("generate", "abc", "--choice", "yes", "--choice", "no") == 0
    assert engines[0].asked[0][1].structured_outputs == StructuredOutputsParams(choice=("yes", "no"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "17"], "argument --logit-bias: expected ID=VALUE, like 17=-5.5, got '17'"),
        (["--min-p", "much"], "argument --min-p: invalid float value: 'much'"),
        (["--regex", "a", "--choice", "b"], "argument --choice: not allowed with argument --regex"),
    ],
)
def test_options_that_cannot_be_read_are_wrong_arguments(cli, engines, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        cli("generate", "x", *options)
    assert capsys.readouterr().err.rstrip().endswith(message)
    assert engines == []


def test_n_gives_json_lines_in_the_order_of_prompts_and_completions(cli, capsys):
    assert cli("generate", "abcd", "-n", "3") == 0
    assert [(r["index"], r["completion"], r["text"]) for r in records(capsys.readouterr().out)] == [
        (0, 0, "ABCD"),
        (0, 1, "BCD"),
        (0, 2, "CD"),
    ]
    assert cli("generate", "abcd", "", "xyz", "-n", "2") == 1
    out, err = capsys.readouterr()
    assert [(r["index"], r["completion"], r["text"], r["error"]) for r in records(out)] == [
        (0, 0, "ABCD", None),
        (0, 1, "BCD", None),
        (1, 0, "", "the prompt is empty"),
        (2, 0, "XYZ", None),
        (2, 1, "YZ", None),
    ]
    assert "6/6" in err


def test_logprobs_are_lines_too_and_no_probability_is_null(cli, capsys):
    assert cli("generate", "a", "--logprobs", "2") == 0
    (line,) = records(capsys.readouterr().out)
    assert line["logprobs"] == [
        {"token_id": 65, "logprob": -65.0, "rank": 1, "top": [[65, -65.0], [0, None]], "chosen": []}
    ]
    assert "prompt_logprobs" not in line


def test_wrong_sampling_options_are_refused_all_at_once_before_anything_is_built(cli, engines, capsys):
    assert cli("generate", "x", "--temperature=-1", "--top-p", "3", "--max-tokens", "0") == 1
    error = capsys.readouterr().err
    for name in ("temperature", "top_p", "max_tokens"):
        assert f"options.{name}: " in error
    assert "Traceback" not in error
    assert engines == []


def test_chat_wraps_and_raw_adds_no_special_token(cli, engines):
    for option in ("--chat", "--raw"):
        assert cli("generate", option, "hi") == 0
    assert [bytes(engine.asked[0][0]).decode() for engine in engines] == ["user: hi\nassistant:", "hi"]
    with pytest.raises(SystemExit, match="2"):
        cli("generate", "--chat", "--raw", "hi")


def test_several_prompts_are_json_lines_in_order_with_a_progress_bar(cli, capsys):
    assert cli("generate", "abcd", "x", "ef") == 0
    out, err = capsys.readouterr()
    assert [(r["index"], r["prompt"], r["text"], r["token_ids"]) for r in records(out)] == [
        (0, "abcd", "ABCD", [65, 66, 67, 68]),
        (1, "x", "X", [88]),
        (2, "ef", "EF", [69, 70]),
    ]
    keys = {"index", "completion", "prompt", "text", "token_ids", "finish_reason", "error"}
    assert all(set(r) == keys for r in records(out))
    assert "3/3" in err
    assert "7 tokens in " in err


def test_a_refused_and_a_failed_prompt_have_their_lines_and_the_exit_code_says_so(cli, capsys):
    assert cli("generate", "ab", "", "c!d", "é") == 1
    done = records(capsys.readouterr().out)
    assert [(r["text"], r["finish_reason"], r["error"]) for r in done] == [
        ("AB", "length", None),
        ("", "error", "the prompt is empty"),
        ("C", "error", "a bad character"),
        ("É", "length", None),
    ]


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt is empty"), ("a!", "a bad character")])
def test_one_prompt_that_fails_is_an_error_without_traceback(cli, engines, capsys, prompt, message):
    assert cli("generate", prompt) == 1
    assert capsys.readouterr().err == f"workerkit: {message}\n"
    assert engines[0].calls[-1] == "shutdown"


def test_a_text_file_is_a_prompt_a_line(cli, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("ab\n\n  \nc d\n")
    assert cli("generate", "--prompts", tmp_path / "p.txt") == 0
    assert [r["text"] for r in records(capsys.readouterr().out)] == ["AB", "C D"]


def test_a_jsonl_file_may_have_options_that_win(cli, engines, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab", "temperature": 0, "stop": ["x"]}\n{"prompt": [104, 105]}\n')
    assert cli("generate", "--prompts", tmp_path / "p.jsonl", "--temperature", "0.5", "--seed", "7") == 0
    assert engines[0].asked == [
        ("ab", SamplingParams(max_tokens=256, temperature=0.0, seed=7, stop=("x",))),
        ([104, 105], SamplingParams(max_tokens=256, temperature=0.5, seed=7)),
    ]


def test_a_jsonl_line_takes_every_field_of_sampling_params(cli, engines, tmp_path):
    fields = {
        "n": 2,
        "logit_bias": {"102": 5, "7": -1.5},
        "bad_words_token_ids": [[1, 2]],
        "logprob_token_ids": [3],
        "logprobs": 0,
        "extra_args": {"mine": {"strength": [1, 2]}},
        "structured_outputs": {"json": {"type": "object", "required": ["a"]}},
    }
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "ab", **fields}) + '\n{"prompt": "cd"}\n')
    assert cli("generate", "--prompts", tmp_path / "p.jsonl", "--regex", "x", "--logit-bias", "1=1") == 0
    expected = SamplingParams(
        max_tokens=256,
        n=2,
        logit_bias={102: 5.0, 7: -1.5},
        bad_words_token_ids=((1, 2),),
        logprob_token_ids=(3,),
        logprobs=0,
        extra_args={"mine": {"strength": [1, 2]}},
        structured_outputs=StructuredOutputsParams(json='{"type": "object", "required": ["a"]}'),
    )
    given = SamplingParams(max_tokens=256, logit_bias={1: 1.0}, structured_outputs=StructuredOutputsParams(regex="x"))
    assert engines[0].asked == [("ab", expected), ("cd", given)]


def test_wrong_fields_of_a_jsonl_file_say_where_and_what_would_be_right(cli, engines, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    lines = [
        {"temprature": 1},
        {"logit_bias": {"x": 1, "5": "a"}},
        {"structured_outputs": {"jsn": {}}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"min_tokens": 999},
    ]
    path.write_text("\n".join(json.dumps({"prompt": "x", **line}) for line in lines))
    assert cli("generate", "--prompts", path) == 1
    error = capsys.readouterr().err
    for message in (
        f"{path}:1: unknown key 'temprature'; did you mean 'temperature'?",
        f"{path}:2.logit_bias.x: expected int, got 'x' (str)",
        f"{path}:2.logit_bias.5: expected float, got 'a' (str)",
        f"{path}:3.structured_outputs: unknown key 'jsn'; did you mean 'json'?",
        f"{path}:4.structured_outputs: structured_outputs needs exactly one of",
        f"{path}:5: min_tokens is 999, more than max_tokens: 256",
    ):
        assert message in error
    assert engines == []


def test_every_problem_of_a_jsonl_file_is_listed_with_its_line(cli, engines, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "ok"}\n{"promt": "x"}\nnope\n{"prompt": "x", "top_k": "5", "seed": -1}\n[1]\n{"prompt": [true]}\n'
    )
    assert cli("generate", "--prompts", path) == 1
    error = capsys.readouterr().err
    for line in (2, 3, 4, 5, 6):
        assert f"{path}:{line}" in error
    assert f"{path}:1" not in error
    assert f"{path}:4.top_k: expected int, got '5' (str)" in error
    assert f"{path}:4.seed: " in error
    assert engines == []


def test_standard_input_is_read(cli, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert cli("generate", "-") == 0
    assert capsys.readouterr().out == "FROM A PIPE\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert cli("generate", "--prompts", "-") == 0
    assert [r["text"] for r in records(capsys.readouterr().out)] == ["A", "B"]


def test_output_writes_json_lines_even_for_one_prompt(cli, tmp_path, capsys):
    assert cli("generate", "ab", "--output", tmp_path / "out.jsonl") == 0
    assert capsys.readouterr().out == ""
    assert records((tmp_path / "out.jsonl").read_text())[0]["text"] == "AB"


def test_ctrl_c_in_a_batch_writes_what_is_finished_and_nothing_half(cli, engines, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    before = signal.getsignal(signal.SIGINT)
    code = cli("generate", "abcdef", "xy", "", "uvw", "--output", out, "--set", "components.engine.ctrl_c_at_step=3")
    assert code == 130
    # the step in which Ctrl-C came has ended: `uvw` is whole; `abcdef` is not there
    assert [(r["index"], r["text"], r["error"]) for r in records(out.read_text())] == [
        (1, "XY", None),
        (2, "", "the prompt is empty"),
        (3, "UVW", None),
    ]
    assert engines[0].aborted == ["r1"]
    assert engines[0].calls[-1] == "shutdown"
    engines[0].check_integrity()
    error = capsys.readouterr().err
    assert error.endswith("interrupted\n")
    assert "Traceback" not in error
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_a_stream_aborts_it(cli, engines, capsys):
    assert cli("generate", "abcdef", "--set", "components.engine.ctrl_c_at_step=3") == 130
    out, err = capsys.readouterr()
    assert out == "AB"
    assert err == "interrupted\n"
    assert engines[0].aborted == ["r1"]
    assert engines[0].calls[-1] == "shutdown"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to generate"),
        (["--prompts", "gone.txt"], "cannot read gone.txt"),
        (["x", "-c", "gone.yaml"], "cannot read"),
        (["x", "--output", "no/such/folder/o.jsonl"], "cannot write no/such/folder/o.jsonl"),
        (["x", "--set", "a.b"], "expected PATH=VALUE"),
        (["x", "--set", "components.engin=y"], "did you mean 'engine'?"),
    ],
)
def test_what_cannot_be_done_is_said_and_no_engine_starts(
    cli, engines, capsys, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert cli("generate", *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert engines == []
