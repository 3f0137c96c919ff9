"""Filling a network from a checkpoint: what is wrong is named, and nothing keeps its initial value."""

import logging

import attrs
import pytest
import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import ModelInputs
from workerkit.framework.interfaces.sections import LimitsSection
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

CPU = torch.device("cpu")


def loader(**values):
    return RandomLoader(RandomLoaderConfig(**values), LimitsSection())


def library():
    return NativeLibrary(OrderedKernels((CpuKernels(), ReferenceKernels())))


def parts(**values):
    source = loader(**values)
    config = source.read_config()
    return library().build(config, torch.float32, CPU), dict(source.weights(config))


def logits(network, ids):
    def attend(layer, query, key, value):
        return query  # loading is what is tested

    count = torch.arange(len(ids))
    inputs = ModelInputs(input_ids=torch.tensor(ids), positions=count, rope_lens=count + 1, attend=attend)
    return network.compute_logits(network.forward(inputs).hidden)


def test_every_parameter_is_filled():
    network, tensors = parts(qkv_bias=True, qk_norm=True, num_hidden_layers=3)
    for _, parameter in network.weights():
        parameter.fill_(float("nan"))
    network.load_weights(tensors.items())
    filled = dict(network.weights())
    assert all(tensor.isfinite().all() for tensor in filled.values())
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    (weight, _) = network.layers[1].mixer.qkv_proj.matrix.tensors
    assert torch.equal(weight[: q.shape[0]], q)
    size = sum(tensor.numel() for tensor in tensors.values())
    assert sum(tensor.numel() for name, tensor in filled.items() if name != "rotary.inv_freq") == size


def test_order_of_the_file_does_not_matter():
    network, tensors = parts(tie_word_embeddings=True)
    network.load_weights([("lm_head.weight", tensors["model.embed_tokens.weight"].clone()), *tensors.items()])
    other, _ = parts(tie_word_embeddings=True)
    other.load_weights(reversed(tensors.items()))
    assert torch.equal(logits(network, [1, 2, 3]), logits(other, [1, 2, 3]))


def test_all_problems_are_named_at_once():
    network, tensors = parts()
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["lm_head.weight"] = torch.zeros(5, 64)
    tensors["rotary_emb.inv_freq"] = torch.zeros(8)  # old checkpoints carry it
    with pytest.raises(WeightError) as error:
        network.load_weights([*tensors.items(), ("model.norm.weight", torch.ones(64))])
    problems = str(error.value).split("\n  - ")[1:]
    assert problems == [
        "lm_head.weight has shape [5, 64], not [256, 64]",
        "missing tensor model.layers.1.self_attn.k_proj.weight [32, 64]",
        "model.layers.0.mlp.up_proj.weight has shape [3, 4], not [128, 64]",
        "model.norm.weight comes twice",
        "unexpected tensor model.layers.0.self_attn.q_proj.bias [64]",
        "unexpected tensor model.layers.7.mlp.up_proj.weight [2]",
    ]


def test_b64_a_missing_layer_weight_is_an_error():
    network, tensors = parts(tie_word_embeddings=True)
    del tensors["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(WeightError, match=r"missing tensor model\.layers\.0\.mlp\.down_proj\.weight"):
        network.load_weights(tensors.items())


@pytest.mark.parametrize("with_head", [False, True])
def test_b64_tied_with_and_without_an_equal_head(with_head, caplog):
    network, tensors = parts(tie_word_embeddings=True)
    embed = tensors["model.embed_tokens.weight"]
    if with_head:
        tensors["lm_head.weight"] = embed.clone()
    with caplog.at_level(logging.WARNING):
        network.load_weights(tensors.items())
    assert not caplog.records
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(network.compute_logits(hidden), hidden @ embed.T)
    assert network.lm_head is network.embed_tokens  # kept once


def test_b63_a_real_head_beats_the_tie_flag(caplog):
    network, tensors = parts(tie_word_embeddings=True)
    tensors["lm_head.weight"] = torch.randn(256, 64)
    with caplog.at_level(logging.WARNING):
        network.load_weights(tensors.items())
    assert "lm_head.weight differs" in caplog.text
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(network.compute_logits(hidden), hidden @ tensors["lm_head.weight"].T)
    torch.testing.assert_close(network.embed(torch.arange(256)), tensors["model.embed_tokens.weight"])


def test_b63_untied_without_a_head_is_tied_with_a_warning(caplog):
    network, tensors = parts(tie_word_embeddings=False)
    del tensors["lm_head.weight"]
    with caplog.at_level(logging.WARNING):
        network.load_weights(tensors.items())
    assert "no lm_head.weight" in caplog.text
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(network.compute_logits(hidden), hidden @ tensors["model.embed_tokens.weight"].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_can_be_read_again_in_place(tied, dtype):
    """After a sleep that dropped everything: zero-filled memory at the same addresses, matrices made anew."""
    source = loader(tie_word_embeddings=tied, rope_type="yarn", rope_factor=4.0)
    config = source.read_config()
    network, tensors = library().build(config, dtype, CPU), dict(source.weights(config))
    network.load_weights((name, torch.ones_like(tensor)) for name, tensor in tensors.items())
    network.load_weights(tensors.items())
    expected = logits(network, [5, 6, 7])
    network.release()
    addresses = {name: tensor.data_ptr() for name, tensor in network.weights()}
    for _, tensor in network.weights():
        tensor.zero_()
    network.load_weights(tensors.items())
    again = dict(network.weights())
    assert {name: again[name].data_ptr() for name in addresses} == addresses
    assert torch.equal(logits(network, [5, 6, 7]), expected)


def test_weights_are_converted():
    source = loader()
    network = library().build(source.read_config(), torch.bfloat16, CPU)
    network.load_weights(source.weights(source.read_config()))
    assert {tensor.dtype for name, tensor in network.weights() if name != "rotary.inv_freq"} == {torch.bfloat16}


def test_unknown_architecture_names_the_nearest():
    config = attrs.evolve(loader().read_config(), architecture="LlamaForCasualLM")
    with pytest.raises(ModelError, match="did you mean 'LlamaForCausalLM'"):
        library().build(config, torch.float32, CPU)
    assert library().architectures[:4] == (
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    )  # fmt: skip


def test_numbers_that_contradict_each_other_are_refused_together():
    config = attrs.evolve(
        loader().read_config(), hidden_act="gelu", num_attention_heads=3, sliding_windows=(4,), head_dim=8
    )
    with pytest.raises(ModelError) as error:
        library().build(config, torch.float32, CPU)
    for fault in ("hidden_act 'gelu'", "no multiple", "sliding_windows has 1 entries", "rotary_dim 16"):
        assert fault in str(error.value)
