"""Mixtures of experts: which layers have one, what a file must hold, and what is refused. Logits: tests/oracle."""

import pytest
import torch
from hf_oracle import random_model

from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, UnsupportedError, WeightError
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


def test_the_experts_are_kept_once_and_counted(tmp_path):
    model = save(tmp_path, num_local_experts=3)
    network = loaded(tmp_path).network
    expected = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert sum(tensor.nbytes for layer in network.layers for tensor in layer.mlp.experts.kept) == expected
    counted = [tensor.nbytes for name, tensor in network.weights() if ".experts." in name]
    assert sum(counted) == expected


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


def test_experts_are_not_quantised_silently(tmp_path):
    save(tmp_path, num_local_experts=3)
    config = config_of(tmp_path)
    config["model"]["quantization"] = "int8"
    with pytest.raises(UnsupportedError, match=r"model\.quantization\.mlp: experts"):
        assemble(config).worker.start()
    config["model"]["quantization"] = {"attention": "int8"}
    assemble(config).worker.start()


def test_batch_invariant_kernels_serve_experts_token_by_token(tmp_path):
    save(tmp_path, num_local_experts=3)
    assembly = assemble(config_of(tmp_path, components={"kernels": {"batch_invariant": True}}))
    assembly.worker.start()
    network = assembly.value(LoadedModel).network
    x = torch.randn(9, 64)
    layer = network.layers[0].mlp
    assert torch.equal(layer(x)[4], layer(x[4:5])[0])


def test_dropped_experts_come_back(tmp_path):
    save(tmp_path, num_local_experts=3)
    with assemble(config_of(tmp_path)) as assembly:
        worker = assembly.worker
        worker.start()
        network = assembly.value(LoadedModel).network
        before = network.layers[1].mlp(torch.ones(2, 64))
        worker.sleep(2)
        assert network.layers[1].mlp.experts.kept == ()
        worker.wake_up()
        assert torch.equal(network.layers[1].mlp(torch.ones(2, 64)), before)
