"""Adapters: each request of a batch gets what the model with its adapter merged into the weights gives, on both
runners; what does not fit, or is no plain LoRA, is refused by name."""

import json

import pytest
import torch
from adapters import merged, write_adapter
from hf_oracle import assert_served_as_by, random_model, random_prompts, serve

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, RequestError, UnsupportedError
from workerkit.framework.interfaces.engine import CacheIdentity, EngineRequest
from workerkit.framework.interfaces.sampling_params import SamplingParams

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def model():
    return random_model("Llama", **SMALL)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A model and two adapters of different ranks and layers: x, and y with rank-stabilised scaling."""
    folder = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def oracles(model, folder):
    x = write_adapter(folder / "x", model, seed=1)
    y = write_adapter(folder / "y", model, seed=2, rank=9, alpha=6, layers=[1], use_rslora=True)
    return {None: model, "x": merged(model, x, 16 / 4), "y": merged(model, y, 6 / 9**0.5)}


def config(folder, **lora):
    adapters = {name: str(folder / name) for name in ("x", "y")}
    return {
        "model": {"source": str(folder / "model"), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 40},
        "cache": {"block_size": 8, "num_blocks": 60},
        "components": {"lora": {"use": "peft", "adapters": adapters, **lora}},
    }


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("kernels", ["auto", ["reference"]])
def test_a_mixed_batch_gives_each_request_its_own_adapter(folder, oracles, runner, kernels):
    loras = ["x", None, "y", "x", "y", None]
    prompts = random_prompts([3, 50, 17, 1, 64, 9])
    prompts[3] = prompts[0]  # the same prompt with another adapter, and none, shares nothing with it
    prompts[5] = prompts[2]
    assembly = assemble(config(folder), {"components.runner": runner, "components.kernels.libraries": kernels})
    served = serve(assembly, prompts, 5, loras)
    for prompt, lora, one in zip(prompts, loras, served, strict=True):
        assert_served_as_by(oracles[lora], [prompt], [one])
    assert served[2][0] != served[5][0]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_preemption_and_prefix_hits_keep_the_adapter(folder, oracles, runner):
    prompts = [prompt for prompt in random_prompts([40, 24]) for _ in range(3)]
    loras = [None, "x", "y"] * 2
    assembly = assemble(config(folder), {"components.runner": runner, "cache.num_blocks": 20})
    for prompt, lora, one in zip(prompts, loras, serve(assembly, prompts, 30, loras), strict=True):
        assert_served_as_by(oracles[lora], [prompt], [one])


def test_the_base_model_runs_as_a_graph_beside_adapters(folder, oracles):
    """Whoever has no adapter gets the model itself, also right after steps that had one."""
    assembly = assemble(config(folder), {"components.runner": "v2"})
    prompts = random_prompts([5, 6])
    for loras in (["x", None], [None, None], [None, "y"]):
        for prompt, lora, one in zip(prompts, loras, serve(assembly, prompts, 4, loras), strict=True):
            assert_served_as_by(oracles[lora], [prompt], [one])


@pytest.mark.parametrize("speculator", ["ngram", "draft_model"])
def test_drafts_made_without_the_adapter_change_no_token(folder, oracles, speculator):
    settings = config(folder)
    settings["components"] |= {"speculator": speculator}
    settings["limits"]["num_speculative_tokens"] = 3
    if speculator == "draft_model":
        settings["components"]["draft"] = "target"
    prompts = [prompt * 4 for prompt in random_prompts([6, 7, 8])]
    loras = ["x", None, "y"]
    with assemble(settings) as assembly:
        tokens = run(assembly, prompts, 12, loras)
    expected = [tuple(greedy(oracles[lora], prompt, 12)) for prompt, lora in zip(prompts, loras, strict=True)]
    assert tokens == expected


def greedy(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def run(assembly, prompts, count, loras):
    """Tokens of each prompt, all in one batch."""
    worker = assembly.worker
    worker.start()
    scheduler = assembly.get(roles.SCHEDULER)
    tokens = {str(number): () for number in range(len(prompts))}
    for req_id, prompt, lora in zip(tokens, prompts, loras, strict=True):
        params, identity = SamplingParams(max_tokens=count, temperature=0.0), CacheIdentity(lora=lora)
        scheduler.add(
            EngineRequest(
                req_id=req_id, prompt_token_ids=tuple(prompt), params=params, cache_identity=identity, lora=lora
            )
        )
    while scheduler.has_work:
        output = scheduler.schedule()
        if worker.execute_model(output) is None:
            for req_id, progress in scheduler.update(output, worker.sample_tokens().get()).items():
                tokens[req_id] += progress.token_ids
    return list(tokens.values())


def test_adapters_come_and_go_between_steps(folder, oracles, model):
    z = write_adapter(folder / "z", model, seed=3, targets=["mlp.up_proj", "self_attn.k_proj"])
    prompts = random_prompts([9, 9])
    with assemble(config(folder, max_adapters=3)) as assembly:
        run(assembly, prompts, 2, ["x", "y"])
        worker = assembly.worker
        worker.load_adapter("z", str(folder / "z"))
        assert sorted(worker.adapters) == ["x", "y", "z"]
        with pytest.raises(UnsupportedError, match="max_adapters"):
            worker.load_adapter("w", str(folder / "z"))
        worker.remove_adapter("x")
        with pytest.raises(RequestError, match=r"'x' is not loaded; (did you mean|known)"):
            worker.remove_adapter("x")
        scheduler = assembly.get(roles.SCHEDULER)
        request = EngineRequest(
            req_id="a",
            prompt_token_ids=tuple(prompts[0]),
            params=SamplingParams(max_tokens=2, temperature=0.0),
            lora="z",
        )
        scheduler.add(request)
        output = scheduler.schedule()
        worker.execute_model(output)
        with pytest.raises(RequestError, match="'z' is in use"):
            worker.remove_adapter("z")
        tokens = scheduler.update(output, worker.sample_tokens().get())["a"].token_ids
    assert list(tokens) == greedy(merged(model, z, 4.0), prompts[0], 1)


def test_a_step_that_names_an_unknown_adapter_is_refused_whole(folder, oracles):
    with assemble(config(folder)) as assembly:
        assembly.worker.start()
        scheduler = assembly.get(roles.SCHEDULER)
        params = SamplingParams(max_tokens=2, temperature=0.0)
        scheduler.add(EngineRequest(req_id="a", prompt_token_ids=(3, 4), params=params, lora="xx"))
        with pytest.raises(RequestError, match="names adapter 'xx'; did you mean 'x'"):
            assembly.worker.execute_model(scheduler.schedule())
        assembly.worker.check_integrity()


def test_what_is_no_plain_lora_is_refused_by_name(folder, model, tmp_path):
    write_adapter(tmp_path / "dora", model, seed=1, use_dora=True, modules_to_save=["lm_head"])
    write_adapter(tmp_path / "rank", model, seed=1, rank=65)
    write_adapter(tmp_path / "head", model, seed=1, targets=["lm_head"])
    other = random_model("Llama", **SMALL | {"hidden_size": 32})
    write_adapter(tmp_path / "other", other, seed=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 1}))
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"\x08" + b"\0" * 20)
    messages = {
        "dora": (UnsupportedError, r"use_dora: True[\s\S]*modules_to_save: \['lm_head'\]"),
        "rank": (ModelError, "has rank 65, components.lora.max_rank is 64"),
        "head": (ModelError, "lm_head is no linear layer that adapters can correct"),
        "other": (ModelError, r"q_proj corrects a matrix \[32, 32\], which is \[64, 64\] in the model"),
        "empty": (ModelError, "has no adapter_config.json"),
        "broken": (ModelError, "cannot be read"),
    }
    for name, (error, message) in messages.items():
        settings = config(folder, adapters={name: str(tmp_path / name)})
        with assemble(settings) as assembly, pytest.raises(error, match=message):
            assembly.worker.start()
