"""DeepSeek-V3's network: how its matrices are kept, the layers behind its last one, and what is refused. Logits and
drafts: tests/oracle."""

import attrs
import pytest
import torch
from oracles import dense_attend, dense_logits

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.layers.linear import MergedLinear
from workerkit.components.layers.mla import LatentProjection
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.families import MLAConfig
from workerkit.framework.interfaces.model import ModelConfig, MoEConfig, QuantizedTensor, RopeConfig
from workerkit.framework.interfaces.sections import QuantizationSection
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

KERNELS = OrderedKernels((CpuKernels(), ReferenceKernels()))
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
CONFIG = ModelConfig(
    architecture="DeepseekV3ForCausalLM",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=40,
    attention_scale=24**-0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    rope=RopeConfig(rotary_dim=8),
    mla=MLAConfig(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    moe=MoEConfig(
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=32,
        routing="sigmoid",
        num_groups=2,
        scaling=2.0,
        shared_intermediate_size=32,
        sparse_layers=(1,),
    ),
    num_nextn_predict_layers=1,
)


def weights_of(network, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in network.required_tensors().items():
        tensor = torch.randn(place.shape, generator=generator)
        is_norm = len(place.shape) == 1
        tensors[name] = 1 + 0.2 * tensor if is_norm else tensor * place.shape[-1] ** -0.5
    return tensors | {"lm_head.weight": torch.randn(40, 64, generator=generator)}


def build(config=CONFIG, dtype=torch.float32, **quantization):
    network = NativeLibrary(KERNELS).build(config, dtype, torch.device("cpu"))
    network.quantize(QuantizationSection(**quantization))
    return network


def filled(config=CONFIG, dtype=torch.float32, weights=None, **quantization):
    network = build(config, dtype, **quantization)
    network.load_weights((weights or weights_of(network)).items())
    return network


def packed(tensor):
    """A float as Q8_0 has it."""
    groups = tensor.view(len(tensor), -1, 32)
    scales = groups.abs().amax(-1) / 127
    codes = (groups / scales[..., None]).round().to(torch.int8).view(len(tensor), -1)
    return QuantizedTensor(codes=codes, scales=scales)


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_rounded_matrices(kind):
    """Of all that is a linear layer; what latent attention absorbs, and the router, stay as they are."""
    plain, network = filled(), filled(default=kind)
    linears = {name: m for name, m in network.named_modules() if isinstance(m, MergedLinear)}
    rounded = {name for name, linear in linears.items() if linear.quantization == kind}
    assert linears.keys() - rounded == {"layers.1.mlp.gate"}
    assert all(m.kept[0].dtype == torch.float32 for m in network.modules() if isinstance(m, LatentProjection))
    expected, got = dense_logits(plain, TOKENS), dense_logits(network, TOKENS)
    assert not torch.equal(got, expected)
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_packed_matrices():
    weights = weights_of(build())
    weights = {n: packed(t) if t.dim() == 2 and not n.endswith("mlp.gate.weight") else t for n, t in weights.items()}
    network, plain = filled(weights=weights, default="keep"), filled(weights=weights)
    projection = network.layers[1].mixer.a_proj
    assert projection.kept[0].dtype == torch.int8
    assert not projection.is_unpacked
    assert network.layers[1].mixer.kv_b_proj.kept[0].dtype == torch.float32
    torch.testing.assert_close(dense_logits(network, TOKENS), dense_logits(plain, TOKENS), atol=1e-3, rtol=0)


def test_bfloat16_and_the_float32_of_the_choice():
    network = filled(dtype=torch.bfloat16)
    bias = network.layers[1].mlp.score_bias
    assert bias.dtype == torch.float32
    assert {tensor.dtype for name, tensor in network.weights() if tensor is not bias and "inv_freq" not in name} == {
        torch.bfloat16
    }
    expected, got = dense_logits(filled(), TOKENS), dense_logits(network, TOKENS)
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_weights_are_kept_once_and_come_back():
    network = filled()
    weights = weights_of(network)
    kept = sum(tensor.numel() for name, tensor in network.weights() if "inv_freq" not in name)
    assert kept == sum(tensor.numel() for tensor in weights.values())
    expected = dense_logits(network, TOKENS)
    network.release()
    assert not any(module.kept for module in network.modules() if isinstance(module, LatentProjection))
    network.load_weights(weights.items())
    assert torch.equal(dense_logits(network, TOKENS), expected)


def test_one_key_for_all_heads_is_kept():
    for layer in build().attention_layers:
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 1, 40)
        assert (layer.latent_dim, layer.value_dim, layer.scale) == (32, 32, 24**-0.5)


def test_layers_that_draft_are_of_no_use_to_the_target():
    network = build()
    weights = weights_of(network)
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(3), "model.layers.2.mlp.gate.weight": torch.zeros(2)}
    network.load_weights((weights | extra).items())
    with pytest.raises(WeightError, match=r"unexpected tensor model\.layers\.3\.eh_proj"):
        network.load_weights((weights | {"model.layers.3.eh_proj.weight": torch.zeros(3)}).items())
    network = build(attrs.evolve(CONFIG, num_nextn_predict_layers=0))
    with pytest.raises(WeightError, match=r"unexpected tensor model\.layers\.2\.eh_proj"):
        network.load_weights((weights | extra).items())


@pytest.mark.parametrize("missing", ["mla", "moe"])
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "DeepSeekMTPModel"])
def test_a_config_of_another_family_is_refused(architecture, missing):
    config = attrs.evolve(CONFIG, architecture=architecture, **{missing: None})
    with pytest.raises(ModelError, match=rf"{architecture} needs .* model_type is 'deepseek_v3'"):
        build(config)


# The layer that drafts

MTP = attrs.evolve(CONFIG, architecture="DeepSeekMTPModel")
NAMES = {
    "mtp.pre_fc_norm_embedding": "model.layers.2.enorm",
    "mtp.pre_fc_norm_hidden": "model.layers.2.hnorm",
    "mtp.fc": "model.layers.2.eh_proj",
    "mtp.norm": "model.layers.2.shared_head.norm",
    "mtp.layers.0": "model.layers.2",
}


def stored(weights):
    """By DeepSeek's names."""
    renamed = {}
    for name, tensor in weights.items():
        ours = next(prefix for prefix in NAMES if name.startswith(prefix + "."))
        renamed[NAMES[ours] + name.removeprefix(ours)] = tensor
    return renamed


def mtp_weights():
    weights = weights_of(build(MTP), seed=1)
    del weights["lm_head.weight"]
    return stored(weights)


def step(network, hidden, ids):
    positions = torch.arange(len(ids))
    return network.step(torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(2)), hidden, positions,
                        positions + 1, dense_attend)  # fmt: skip


def test_the_draft_reads_its_layer_and_leaves_the_rest():
    network = build(MTP)
    head, table = torch.randn(40, 64), torch.randn(40, 64)
    own = {"model.layers.2.shared_head.head.weight": head, "model.layers.2.embed_tokens.weight": table}
    network.load_weights((weights_of(build()) | mtp_weights() | own).items())
    assert network.has_embeddings
    assert network.has_head
    assert torch.equal(network.embed(torch.tensor([7])), table[7:8])
    states, carried = step(network, torch.randn(8, 64), TOKENS)
    assert torch.equal(states, carried)  # after the last norm
    torch.testing.assert_close(network.compute_logits(states), states @ head.T)
    assert [layer.latent_dim for layer in network.attention_layers] == [32]


def test_embeddings_and_head_are_the_targets_where_the_checkpoint_has_none():
    network = build(MTP)
    network.load_weights(mtp_weights().items())
    assert not network.has_embeddings
    assert not network.has_head


def test_a_missing_tensor_of_the_layer_is_named():
    weights = mtp_weights()
    del weights["model.layers.2.eh_proj.weight"], weights["model.layers.2.self_attn.kv_b_proj.weight"]
    with pytest.raises(WeightError, match=r"(?s)missing tensor mtp\.fc\.weight.*mtp\.layers\.0\.self_attn\.kv_b_proj"):
        build(MTP).load_weights(weights.items())


def test_several_layers_that_draft_are_refused():
    with pytest.raises(ModelError, match="num_nextn_predict_layers 2 is not supported"):
        build(attrs.evolve(MTP, raw={"num_nextn_predict_layers": 2}))
