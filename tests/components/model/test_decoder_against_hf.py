"""The native decoder against Hugging Face: logits of tiny random models of each family, every rope type."""

import pytest
import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.interfaces.model import ModelConfig, ModelInputs, RopeConfig
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": YARN,
    "yarn mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn attention_factor": YARN | {"attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
    },
}


def hf_model(family, seed=0, **overrides):
    import transformers

    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**(SIZES | {"attn_implementation": "eager"} | overrides))).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases of 0 and norms of 1 would hide what is left out
            noise = torch.randn_like(parameter)
            parameter.copy_(
                parameter + 0.3 * noise if parameter.dim() == 1 else noise * 1.5 * parameter.shape[-1] ** -0.5
            )
    return model


def rope_config(parameters, head_dim, max_position):
    names = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    values = {names.get(name, name): value for name, value in parameters.items()}
    return RopeConfig(**({"rotary_dim": head_dim, "original_max_position": max_position} | values))


def config_of(hf, family):
    """ModelConfig of a Hugging Face config, by hand: reading files is the loaders' business."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    window = getattr(hf, "sliding_window", None)
    types = (
        getattr(hf, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * hf.num_hidden_layers
    )
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_hidden_layers=hf.num_hidden_layers,
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        rope=rope_config(hf.rope_parameters, head_dim, hf.max_position_embeddings),
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=family == "Qwen2" or getattr(hf, "attention_bias", False),
        o_bias=getattr(hf, "attention_bias", False),
        mlp_bias=getattr(hf, "mlp_bias", False),
        qk_norm=family == "Qwen3",
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
    )


def native_of(model, family, dtype=torch.float32, libraries=(CpuKernels, ReferenceKernels)):
    kernels = OrderedKernels(tuple(library() for library in libraries))
    network = NativeLibrary(kernels).build(config_of(model.config, family), dtype, torch.device("cpu"))
    network.load_weights((name, tensor) for name, tensor in model.state_dict().items())
    return network


def dense_attend(layer, query, key, value):
    """One whole sequence without a cache."""
    tokens = torch.arange(query.shape[0])
    seen = tokens[None, :] <= tokens[:, None]
    if layer.sliding_window is not None:
        seen &= tokens[None, :] > tokens[:, None] - layer.sliding_window
    group = layer.num_heads // layer.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qnd,knd->nqk", query, key).masked_fill(~seen, float("-inf"))
    return torch.einsum("nqk,knd->qnd", torch.softmax(scores * layer.scale, -1), value)


def inputs_of(ids, taps=(), **changes):
    tokens = ids.shape[0]
    values = {
        "input_ids": ids.int(),
        "positions": torch.arange(tokens),
        "rope_lens": torch.full((tokens,), tokens),
        "attend": dense_attend,
        "taps": taps,
    }
    return ModelInputs(**(values | changes))


FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True},
    "Qwen3": {"head_dim": 12},
    "Mistral": {"sliding_window": 5, "head_dim": 16},
}


@pytest.mark.parametrize("libraries", [(ReferenceKernels,), (CpuKernels, ReferenceKernels)], ids=["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_family(family, libraries):
    model = hf_model(family, **FAMILIES[family])
    network = native_of(model, family, libraries=libraries)
    ids = torch.randint(1, SIZES["vocab_size"], (40,))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    got = network.compute_logits(network.forward(inputs_of(ids)).hidden)
    assert got.dtype == torch.float32
    assert expected.std() > 0.5  # logits that are all near 0 would prove nothing
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_with_each_rope(family, rope):
    model = hf_model(family, head_dim=16, rope_parameters=dict(ROPES[rope]), max_position_embeddings=24)
    network = native_of(model, family)
    for tokens in (20, 40, 22):  # within the context, past it, and within it again
        ids = torch.randint(1, SIZES["vocab_size"], (tokens,))
        with torch.no_grad():
            expected = hf_model(family, head_dim=16, rope_parameters=dict(ROPES[rope]), max_position_embeddings=24)(
                ids[None]
            ).logits[0]
        got = network.compute_logits(network.forward(inputs_of(ids)).hidden)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_taps_are_the_stream_after_each_layer():
    model = hf_model("Llama")
    network = native_of(model, "Llama")
    ids = torch.randint(1, SIZES["vocab_size"], (9,))
    assert network.tap_points == ("embed", "layers.0", "layers.1", "layers.2")
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
    output = network.forward(inputs_of(ids, taps=network.tap_points))
    for index, name in enumerate(network.tap_points[:-1]):  # HF's last one is normed
        torch.testing.assert_close(output.taps[name], states[index][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.hidden, states[-1][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(network.norm(output.taps["layers.2"]), output.hidden)
    assert network.forward(inputs_of(ids, taps=("layers.1",))).taps.keys() == {"layers.1"}


def test_input_embeddings_replace_ids_and_are_left_as_they_were():
    network = native_of(hf_model("Llama"), "Llama")
    ids = torch.randint(1, SIZES["vocab_size"], (9,))
    embeds = network.embed(ids)
    before = embeds.clone()
    got = network.forward(inputs_of(torch.zeros_like(ids), inputs_embeds=embeds)).hidden
    torch.testing.assert_close(got, network.forward(inputs_of(ids)).hidden, atol=0, rtol=0)
    torch.testing.assert_close(embeds, before, atol=0, rtol=0)


def test_bfloat16_stays_near_float32():
    model = hf_model("Qwen3", head_dim=16)
    ids = torch.randint(1, SIZES["vocab_size"], (30,))
    wide, narrow = native_of(model, "Qwen3"), native_of(model, "Qwen3", torch.bfloat16)
    expected = wide.compute_logits(wide.forward(inputs_of(ids)).hidden)
    got = narrow.compute_logits(narrow.forward(inputs_of(ids)).hidden)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 0.15 * expected.std() * 4
