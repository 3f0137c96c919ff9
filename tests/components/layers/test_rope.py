"""Frequencies and scaling of each rope type against Hugging Face and against values worked out by hand."""

import math

import pytest
import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.layers.rope import (
    RotaryEmbedding,
    attention_scaling,
    dynamic_inverse_frequencies,
    inverse_frequencies,
)
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.model import RopeConfig
from workerkit.plugins.builtin_kernels import ReferenceKernels

CPU = torch.device("cpu")
KERNELS = OrderedKernels((ReferenceKernels(),))
NAMES = {"theta": "rope_theta", "original_max_position": "original_max_position_embeddings"}
CASES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position": 2048},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position": 32, "beta_fast": 8.0, "beta_slow": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position": 512, "attention_factor": 0.9, "theta": 1e6},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position": 8192, "theta": 500000.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "original_max_position": 256,
        "low_freq_factor": 2.0,
        "high_freq_factor": 6.0,
    },
]


@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("values", CASES, ids=lambda values: values["rope_type"])
def test_equal_to_transformers(values, partial):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = RopeConfig(**({"theta": 10000.0, "rotary_dim": int(64 * partial)} | values))
    parameters = {NAMES.get(name, name): value for name, value in ({"theta": 10000.0} | values).items()}
    if rope.rope_type == "llama3":
        parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | parameters
    hf = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters=parameters | {"partial_rotary_factor": partial},
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope.rope_type](hf, CPU)
    torch.testing.assert_close(inverse_frequencies(rope), inv_freq, atol=0, rtol=1e-6)
    assert attention_scaling(rope) == pytest.approx(scaling, abs=1e-12)
    cos, sin = RotaryEmbedding(rope, KERNELS, torch.float32, CPU)(torch.arange(50), torch.arange(50))
    angles = torch.arange(50)[:, None].float() * inv_freq
    torch.testing.assert_close(cos, angles.cos() * scaling, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * scaling, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({"factor": 16.0}, 1.27726),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, 0.92104),
        ({"factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0}, 1.27726),  # one alone says nothing
    ],
)
def test_b67_yarn_attention_scaling(values, right):
    rope = RopeConfig(rope_type="yarn", rotary_dim=64, original_max_position=4096, **values)
    assert attention_scaling(rope) == pytest.approx(right, abs=1e-5)


def test_b80_linear_divides_the_position():
    plain = RotaryEmbedding(RopeConfig(rotary_dim=16), KERNELS, torch.float32, CPU)
    linear = RotaryEmbedding(RopeConfig(rope_type="linear", factor=4.0, rotary_dim=16), KERNELS, torch.float32, CPU)
    positions = torch.arange(0, 64, 4)
    for got, expected in zip(linear(positions, positions), plain(positions // 4, positions), strict=True):
        torch.testing.assert_close(got, expected)


def test_b166_dynamic_base_of_each_context_length():
    rope = RopeConfig(rope_type="dynamic", theta=10000.0, rotary_dim=4, factor=2.0, original_max_position=8)
    lengths = torch.tensor([1, 8, 16, 8])
    bases = dynamic_inverse_frequencies(rope, lengths)[:, 1] ** -2  # the second of two frequencies is base ^ -1/2
    torch.testing.assert_close(bases, torch.tensor([10000.0, 10000.0, 90000.0, 10000.0]), rtol=1e-5, atol=0)
    assert attention_scaling(rope) == 1.0


def test_b166_dynamic_depends_on_the_tokens_own_context_only():
    """Chunks give what the whole prompt gives, and a long request leaves nothing behind for a short one."""
    rope = RopeConfig(rope_type="dynamic", rotary_dim=8, factor=2.0, original_max_position=8)
    embedding = RotaryEmbedding(rope, KERNELS, torch.float32, CPU)
    positions, lens = torch.arange(20), torch.full((20,), 20)
    whole = embedding(positions, lens)
    chunks = [embedding(positions[a:b], lens[a:b]) for a, b in ((0, 7), (7, 8), (8, 20))]
    for i in range(2):
        assert torch.equal(torch.cat([chunk[i] for chunk in chunks]), whole[i])
    short = embedding(torch.arange(5), torch.full((5,), 5))
    plain = RotaryEmbedding(RopeConfig(rotary_dim=8), KERNELS, torch.float32, CPU)(torch.arange(5), torch.arange(5))
    assert torch.equal(short[0], plain[0])
    assert not torch.allclose(whole[0][:5], plain[0])


def test_dtype_and_shape():
    embedding = RotaryEmbedding(RopeConfig(rotary_dim=6), KERNELS, torch.bfloat16, CPU)
    cos, sin = embedding(torch.tensor([0, 3]), torch.tensor([1, 4]))
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert cos.shape == sin.shape == (2, 3)
    assert cos[1, 0] == torch.tensor(math.cos(3)).bfloat16()


def test_unknown_type_is_refused_with_the_nearest():
    with pytest.raises(ModelError, match=r"'yarm'.*did you mean 'yarn'"):
        RotaryEmbedding(RopeConfig(rope_type="yarm", rotary_dim=8), KERNELS, torch.float32, CPU)
