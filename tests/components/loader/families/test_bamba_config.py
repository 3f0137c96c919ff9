"""What is refused of a Bamba's config.json, by the name of its field."""

import pytest

from workerkit.components.loader.hf_config import model_config
from workerkit.framework.errors import ModelError

BASE = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
}


def read(**fields):
    return model_config(BASE | fields, {}, "config.json")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attn_layer_indices": [4]}, r"attn_layer_indices: must be a list of layers in 0..3, not \[4\]"),
        ({"attn_layer_indices": "2"}, "attn_layer_indices: must be a list"),
        ({"attn_layer_indices": None}, "attn_layer_indices: must name a layer at least"),
        ({"layer_types": ["mamba"] * 3}, "layer_types: must be 4 times"),
        ({"layers_block_type": ["conv"] * 4}, "layers_block_type: must be 4 times"),
        ({"layer_types": ["mamba", "mamba", "mamba", "attention"]}, r"layer_types: .* contradicts attn_layer_indices"),
        ({"mamba_d_head": 12}, r"mamba_d_head: 12 \* mamba_n_heads 8 is not mamba_expand \* hidden_size 128"),
        ({"mamba_n_heads": 7}, "mamba_d_head: 18"),
        ({"mamba_n_groups": 3}, "mamba_n_groups: 3 must divide mamba_n_heads 8"),
        ({"mamba_d_conv": 1}, "mamba_d_conv: must be an integer >= 2"),
        ({"mamba_d_state": "x"}, "mamba_d_state: must be an integer"),
        ({"mamba_conv_bias": 1}, "mamba_conv_bias: must be true or false"),
        ({"time_step_limit": [1.0]}, "time_step_limit: must be two numbers"),
        ({"time_step_limit": [2.0, 1.0]}, "time_step_limit: must be two numbers"),
        ({"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit: must be two numbers"),
        ({"attn_rotary_emb": 16}, "attn_rotary_emb: 16 is not the 8 dimensions"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
    ],
)
def test_what_is_not_understood_is_named(fields, text):
    with pytest.raises(ModelError, match=text):
        read(**fields)


def test_what_is_absent_has_transformers_defaults():
    config = read()
    assert config.recurrent_layers == (0, 1, 3)
    assert config.rope.rotary_dim == 8
    mamba = config.mamba2
    assert (mamba.head_dim, mamba.num_groups, mamba.state_size, mamba.conv_width) == (16, 1, 256, 4)
    assert (mamba.conv_bias, mamba.proj_bias, mamba.time_step_limit) == (True, False, (0.0, float("inf")))


def test_kinds_of_layers_may_be_given_twice():
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    assert read(layer_types=kinds).recurrent_layers == (0, 1, 3)
