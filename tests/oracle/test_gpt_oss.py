"""Tiny random models of GPT-OSS against Hugging Face: sinks, biases, windows smaller than prompts, experts, YaRN."""

import json

import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from safetensors.torch import load_file, save_file
from tiny_families import GPT_OSS, gpt_oss

from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import LoadedModel

OTHERS = {
    "published": {},
    "no-biases-all-windows": {"attention_bias": False, "layer_types": ["sliding_attention"] * 4},
}


def config_of(folder, **model):
    return {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 192, **model},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
    }


def network(folder, **model):
    assembly = assemble(config_of(folder, **model))
    assembly.worker.start()
    return assembly.value(LoadedModel).network


@pytest.mark.parametrize("fields", OTHERS)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_logits_and_tokens_are_hugging_faces(fields, runner, tmp_path):
    model = gpt_oss(**OTHERS[fields])
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = random_prompts([1, 2, 110, *torch.randint(1, 60, (20,), generator=generator).tolist()])
    assembly = assemble(config_of(tmp_path), {"components.runner": runner})
    served = serve(assembly, prompts, 6) + serve(assembly, prompts[2:4], 64)
    assert_served_as_by(model, prompts + prompts[2:4], served)


@pytest.mark.parametrize(
    "components",
    [
        {"attention": "sdpa", "graph": "none"},
        {"attention": "cpu", "kernels": ["reference"]},
        {"attention": "reference", "kernels": ["cpu", "reference"]},
    ],
    ids=lambda components: components["attention"],
)
def test_other_backends_and_kernels_serve_it_too(components, tmp_path):
    model = gpt_oss()
    model.save_pretrained(tmp_path)
    prompts = random_prompts([3, 40, 110])
    assembly = assemble(config_of(tmp_path) | {"components": components})
    assert_served_as_by(model, prompts, serve(assembly, prompts, 12))


def pack_experts(folder):
    """A copy of the checkpoint whose experts are random 4-bit floats, in `folder / "packed"`; returns the model that
    has the numbers that Hugging Face reads there."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = gpt_oss()
    model.save_pretrained(folder)
    packed = folder / "packed"
    packed.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, size_in, size_out = tensors.pop(name).shape
            shape = (experts, size_out, size_in // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, packed / "model.safetensors")
    return model


def expert_bytes(network):
    return sum(tensor.nbytes for name, tensor in network.weights() if ".experts." in name)


@pytest.mark.parametrize("kept", ["none", "keep"])
def test_experts_in_4_bit_floats_are_the_numbers_that_hugging_face_reads(kept, tmp_path):
    model = pack_experts(tmp_path)
    prompts = random_prompts([3, 40, 110])
    config = config_of(tmp_path / "packed", quantization={"mlp": kept})
    kernels = ["cpu", "reference"]  # native products with kept weights round activations to 8 bits
    assert_served_as_by(model, prompts, serve(assemble(config, {"components.kernels": kernels}), prompts, 12))


def test_kept_4_bit_floats_take_a_byte_a_weight_and_scales(tmp_path):
    """A code of 8 bits, which holds all of them, and for 32 of them a scale, of two bytes or four."""
    model = pack_experts(tmp_path)
    weights = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("up_proj", "down_proj")))
    biases = sum(p.numel() for name, p in model.named_parameters() if "experts" in name) - weights
    kept = network(tmp_path / "packed", quantization={"mlp": "keep"})
    assert expert_bytes(kept) - 4 * biases in (weights + weights // 16, weights + weights // 8)


def test_what_is_packed_otherwise_or_cannot_be_is_refused(tmp_path):
    gpt_oss().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for values, message in (
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: 'gptq' is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 90}, "intermediate_size: 90 is no"),
        ({"swiglu_limit": 5.0}, r"swiglu_limit: 5\.0 is not supported, only 7\.0"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok: 6 of 5 experts"),
        ({"rope_parameters": {**GPT_OSS["rope_parameters"], "rope_theta": None}}, "rope_theta: is missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | values))
        with pytest.raises(ModelError, match=message):
            network(tmp_path)


def test_packed_experts_miss_a_tensor_by_name(tmp_path):
    pack_experts(tmp_path)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, path)
    with pytest.raises(WeightError, match=r"missing tensor model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        network(tmp_path / "packed")


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_experts_in_8_bits_are_close_and_small(kind, tmp_path):
    model = gpt_oss()
    model.save_pretrained(tmp_path)
    plain, packed = network(tmp_path), network(tmp_path, quantization={"mlp": kind})
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(2))
    for one, other in zip(plain.layers, packed.layers, strict=True):
        exact = one.mlp(x)
        assert 0 < (other.mlp(x) - exact).norm() / exact.norm() < 0.03
