"""Qwen3-Next and the text models of Qwen3.5 against Hugging Face: a sequence as a whole, in pieces, token by token,
with verified drafts, and as served."""

import json

import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from recurrent_oracle import assert_mixed_rows_are, hf_logits, native_network, recurrent_logits
from safetensors.torch import load_file, save_file
from tiny_families import DELTA, DELTAS, delta

from workerkit.components.loader.hf_config import model_config, read_hf_config
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

LIBRARIES = {"reference": (ReferenceKernels,), "cpu": (CpuKernels, ReferenceKernels)}


@pytest.mark.parametrize("libraries", LIBRARIES)
@pytest.mark.parametrize("variant", DELTAS)
def test_logits_are_hugging_faces(variant, libraries, tmp_path):
    model = delta(variant)
    network = native_network(model, tmp_path, LIBRARIES[libraries])
    (ids,) = random_prompts([90])
    expected = hf_logits(model, ids)
    for pieces in (None, [1] * 90, [64, 1, 3, 22], [7, 9, 74]):
        torch.testing.assert_close(recurrent_logits(network, ids, pieces), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", DELTAS)
def test_rows_of_all_kinds_in_one_batch(variant, tmp_path):
    model = delta(variant)
    assert_mixed_rows_are(model, native_network(model, tmp_path))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("variant", DELTAS)
def test_both_runners_serve_hugging_faces_logits(runner, variant, tmp_path):
    model = delta(variant)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = random_prompts([1, 2, 150, *torch.randint(1, 60, (13,), generator=generator).tolist()])
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 240},
        "limits": {"max_num_reqs": 16, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
        "components": {"runner": runner},
    }
    assembly = assemble(config)
    assert_served_as_by(model, prompts, serve(assembly, prompts, 6))
    long = prompts[1:3]
    assert_served_as_by(model, long, serve(assembly, long, 64))


def test_experts_that_lie_stacked_in_a_file(tmp_path):
    """As in the files of Qwen3.5, and in transformers' memory."""
    model = delta("Qwen3_5MoeText")
    network = native_network(model, tmp_path)
    (ids,) = random_prompts([20])
    expected = recurrent_logits(network, ids)
    weights = model.state_dict()
    assert weights["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 80, 64)
    for _, tensor in network.weights():
        tensor.fill_(0)
    network.load_weights(weights.items())
    assert torch.equal(recurrent_logits(network, ids), expected)


def test_old_files_are_read_like_new_ones(tmp_path):
    delta("Qwen3Next").save_pretrained(tmp_path)
    expected = read_hf_config(tmp_path)
    assert expected.recurrent_layers == (0, 1, 2)
    assert expected.rope.rotary_dim == 8
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["layer_types"], raw["rope_parameters"]
    for more in ({"full_attention_interval": 4, "partial_rotary_factor": 0.25}, {}):
        path.write_text(json.dumps(raw | {"rope_theta": 10000, "rope_scaling": None} | more))
        assert read_hf_config(tmp_path) == expected
    raw["num_local_experts"] = raw.pop("num_experts")
    path.write_text(json.dumps(raw))
    assert read_hf_config(tmp_path) == expected


def test_the_text_of_a_checkpoint_with_a_vision_tower(tmp_path):
    """Its fields are one level down, its tensors below `model.language_model`, a tower and a draft beside it."""
    model = delta("Qwen3_5Text")
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": raw.pop("architectures"), "model_type": "qwen3_5", "text_config": raw}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 128},
        "cache": {"block_size": 8, "num_blocks": 100},
    }
    prompts = random_prompts([9])
    assert_served_as_by(model, prompts, serve(assemble(config), prompts, 4))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"layer_types": ["full_attention", "mamba"]},
            "layer_types: must be 4 times linear_attention or full_attention",
        ),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: 3 must be a multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be an integer >= 2, not 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7 of 6 experts"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; silu, swish are"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(fields, problem):
    raw = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **DELTA,
        **DELTAS["Qwen3Next"],
        **fields,
    }
    with pytest.raises(ModelError) as raised:
        model_config(raw, {}, "config.json")
    assert problem in str(raised.value)
