"""Mixtures of experts: which layers have one, what a file must hold, and what is refused. Logits: tests/oracle."""

import pytest
import torch
from hf_oracle import random_model

from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import LoadedModel

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def save(folder, family="Mixtral", **fields):
    model = random_model(family, **SMALL, **fields)
    model.save_pretrained(folder)
    return model


def config_of(folder, **settings):
    return {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 64},
        "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 32},
        "cache": {"block_size": 8, "num_blocks": 40},
    } | settings


def loaded(folder, **settings):
    assembly = assemble(config_of(folder, **settings))
    assembly.worker.start()
    return assembly.value(LoadedModel)


def sparse_layers(network):
    return [index for index, layer in enumerate(network.layers) if type(layer.mlp).__name__ == "SparseMLP"]


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, [0, 1, 2]), ({"mlp_only_layers": [0, 2]}, [1]), ({"decoder_sparse_step": 2}, [1])]
)
def test_which_layers_have_experts(tmp_path, fields, expected):
    save(tmp_path, "Qwen3Moe", **QWEN, **fields)
    assert sparse_layers(loaded(tmp_path).network) == expected


def expert_tensors(network):
    return [tensor for name, tensor in network.weights() if ".experts." in name]


def expert_parameters(model):
    return [parameter for name, parameter in model.named_parameters() if ".experts." in name]


def test_the_experts_are_kept_once_and_counted(tmp_path):
    model = save(tmp_path, num_local_experts=3)
    counted = [tensor.nbytes for tensor in expert_tensors(loaded(tmp_path).network)]
    assert sum(counted) == sum(parameter.nbytes for parameter in expert_parameters(model))


def test_a_missing_expert_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path, num_local_experts=3)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"missing tensor model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight"):
        loaded(tmp_path)


def test_more_experts_a_token_than_there_are_is_refused(tmp_path):
    save(tmp_path, num_local_experts=3)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 4'))
    with pytest.raises(ModelError, match="num_experts_per_tok: 4 of 3 experts"):
        loaded(tmp_path)


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
@pytest.mark.parametrize(
    ("family", "fields"), [("Mixtral", {"num_local_experts": 3}), ("Qwen3Moe", QWEN | {"moe_intermediate_size": 64})]
)
def test_experts_in_8_bits_are_close_and_take_a_byte_a_weight(tmp_path, family, fields, kind):
    """A weight is off by half a step of its row's largest magnitude / 127 at most, which is evenly spread: by 1% of
    the rows' usual size. Activations in 8 bits add as much. What else the experts keep are numbers of rows."""
    model = save(tmp_path, family, **fields)
    plain = loaded(tmp_path).network
    model_section = config_of(tmp_path)["model"]
    packed = loaded(tmp_path, model=model_section | {"quantization": {"mlp": kind}}).network
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(2))
    for one, other in zip(plain.layers, packed.layers, strict=True):
        exact = one.mlp(x)
        assert 0 < (other.mlp(x) - exact).norm() / exact.norm() < 0.03
    parameters = expert_parameters(model)
    weights, rows = sum(p.numel() for p in parameters), sum(p.numel() // p.shape[-1] for p in parameters)
    kept = sum(tensor.nbytes for tensor in expert_tensors(packed))
    assert weights <= kept <= weights + 16 * rows
    attention = [sum(t.nbytes for name, t in n.weights() if "mixer" in name) for n in (plain, packed)]
    assert attention[0] == attention[1]


def test_experts_are_as_the_default_of_quantization_says(tmp_path):
    save(tmp_path, num_local_experts=3)
    network = loaded(tmp_path, model=config_of(tmp_path)["model"] | {"quantization": "int8"}).network
    assert {tensor.element_size() for tensor in expert_tensors(network) if tensor.dim() > 1} == {1}


def test_experts_of_batch_invariant_kernels_do_not_depend_on_other_tokens(tmp_path):
    save(tmp_path, num_local_experts=3)
    assembly = assemble(config_of(tmp_path, components={"kernels": {"batch_invariant": True}}))
    assembly.worker.start()
    network = assembly.value(LoadedModel).network
    x = torch.randn(9, 64)
    layer = network.layers[0].mlp
    everything = layer(x)
    for token in range(9):
        assert torch.equal(everything[token], layer(x[token : token + 1])[0])


def test_dropped_experts_come_back(tmp_path):
    save(tmp_path, num_local_experts=3)
    with assemble(config_of(tmp_path)) as assembly:
        worker = assembly.worker
        worker.start()
        network = assembly.value(LoadedModel).network
        before = network.layers[1].mlp(torch.ones(2, 64))
        worker.sleep(2)
        assert expert_tensors(network) == []
        worker.wake_up()
        assert torch.equal(network.layers[1].mlp(torch.ones(2, 64)), before)
