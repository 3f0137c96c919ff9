"""Bad input from the command line: a clear error, no traceback, and nothing lost. Real processes, tiny real files."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

CONFIG = """
model: {source: MODEL, max_model_len: 32}
limits: {max_num_reqs: 4, max_num_batched_tokens: 32}
cache: {block_size: 4, num_blocks: 64}
components:
  runner: v1
  sampler: {use: torch, temperature: 0.0}
"""


def workerkit(*arguments, timeout=60):
    command = [sys.executable, "-m", "workerkit.framework.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=299,
        bos_token_id=298,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def config(folder, tmp_path):
    path = tmp_path / "worker.yaml"
    path.write_text(CONFIG.replace("MODEL", str(folder)))
    return path


def refused(done, *words):
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr + done.stdout
    return done


def test_the_model_works_before_we_break_it(config):
    done = workerkit("generate", "-c", config, "--max-tokens", 4, "hello")
    assert done.returncode == 0, done.stderr


def test_yaml_that_does_not_parse_gives_line_and_column(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("model: smollm2\ncomponents: [\n")
    refused(workerkit("check", path), "bad.yaml, line 3, column 1")


def test_every_problem_of_a_config_comes_in_one_report(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        "cache: {block_size: '16'}\nlimit: {}\ncomponents: {sampler: {use: torch, top_p: 2.0}, runer: v1}\n"
    )
    refused(
        workerkit("check", path),
        "cache.block_size: expected int, got '16'",
        "limit: no such section; did you mean 'limits'?",
        "components.sampler.top_p: 'top_p' must be <= 1.0: 2.0",
        "components.runer: no such role; did you mean 'runner'?",
    )


def test_an_unknown_part_names_the_nearest(config):
    done = workerkit("generate", "-c", config, "--set", "components.runner=v3", "hello")
    refused(done, "components.runner.use: no runner 'v3'; known: v1, v2")
    done = workerkit("generate", "-c", config, "--set", "components.sampler.use=torhc", "hello")
    refused(done, "components.sampler.use: no sampler 'torhc'; did you mean 'torch'?")


def test_a_missing_model_names_what_was_looked_for(config):
    refused(workerkit("generate", "-c", config, "--model", "smollm3", "hello"), "smollm3", "did you mean 'smollm2'?")


def test_a_corrupt_checkpoint_names_file_and_tensor(folder, config, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = workerkit("generate", "-c", config, "--model", broken, "hello")
    refused(done, "model.safetensors")


def test_a_checkpoint_without_a_layer_names_the_tensor(folder, config, tmp_path):
    from safetensors.torch import load_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    done = workerkit("generate", "-c", config, "--model", broken, "hello")
    refused(done, "missing tensor model.layers.1.mlp.up_proj.weight [48, 32]")


def test_bad_prompts_harm_no_other(config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = ["hello", "", "x" * 33, "world"]
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    done = workerkit("generate", "-c", config, "--prompts", prompts, "--output", out, "--max-tokens", 4)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    records = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda record: record["index"])
    assert [record["finish_reason"] for record in records] == ["length", "error", "error", "length"]
    assert "empty" in records[1]["error"]
    assert "33" in records[2]["error"]
    assert "32" in records[2]["error"]


def test_ctrl_c_in_the_middle_of_a_batch_keeps_what_is_finished(config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "hello", "max_tokens": 1 if i == 0 else 3000} for i in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "workerkit.framework.cli", "generate", "-c", str(config)]
    command += ["--set", "model.max_model_len=4000", "--set", "cache.num_blocks=4100"]
    command += ["--prompts", str(prompts), "--output", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text().endswith("\n")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["finish_reason"] for record in records if record["index"] == 0] == ["length"]
    assert len(records) < 40
