"""DeepSeek-V3's config.json: numbers of attention and experts, in both spellings, and what is refused."""

import pytest

from workerkit.components.layers.rope import attention_scaling
from workerkit.components.loader.hf_config import model_config
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.families import MLAConfig
from workerkit.framework.interfaces.model import MoEConfig

HUB = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 60,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,  # hidden_size is no multiple of it
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
}
YARN = {
    "type": "yarn",
    "factor": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 1024,
}


def read(**fields):
    raw = {name: value for name, value in (HUB | fields).items() if value != "absent"}
    return model_config(raw, {}, "config.json")


def test_the_numbers_of_the_family():
    config = read()
    assert config.mla == MLAConfig(
        q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, rope_interleave=True
    )
    assert config.moe == MoEConfig(
        num_experts=16,
        num_experts_per_tok=4,
        intermediate_size=24,
        normalize=True,
        routing="sigmoid",
        num_groups=4,
        top_k_groups=2,
        scaling=1.5,
        shared_intermediate_size=48,
        sparse_layers=(2, 3, 4),
    )
    assert (config.num_key_value_heads, config.head_dim, config.rope.rotary_dim) == (1, 40, 8)
    assert config.num_nextn_predict_layers == 1
    assert read(q_lora_rank=None, rope_interleave=False).mla == MLAConfig(
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, rope_interleave=False
    )


def test_b67_yarn_scales_both_sides_of_the_product():
    """0.1 ln 4 + 1, squared, on top of 24 ** -0.5; cos and sin are left alone where both mscales are equal."""
    assert read().attention_scale == pytest.approx(0.20412, abs=1e-5)
    config = read(rope_scaling=YARN)
    assert config.attention_scale == pytest.approx(0.26464, abs=1e-5)
    assert attention_scaling(config.rope) == 1.0
    config = read(rope_scaling=YARN | {"mscale": 0.707})
    assert config.attention_scale == pytest.approx(0.26464, abs=1e-5)
    assert attention_scaling(config.rope) == pytest.approx(1.09801 / 1.13863, abs=1e-5)
    config = read(rope_scaling=YARN | {"mscale_all_dim": 0})
    assert config.attention_scale == pytest.approx(0.20412, abs=1e-5)
    assert attention_scaling(config.rope) == pytest.approx(1.13863, abs=1e-5)


def test_the_new_spelling_means_the_same():
    new = {"rope_type" if name == "type" else name: value for name, value in YARN.items()} | {"rope_theta": 10000}
    assert read(rope_theta="absent", rope_parameters=new) == read(rope_scaling=YARN)


@pytest.mark.parametrize("architecture", ["DeepSeekMTPModel", "DeepseekV3MTP"])
def test_a_draft_of_the_family_has_its_numbers(architecture):
    assert read(architectures=[architecture]).mla == read().mla


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kv_lora_rank": "absent"}, "kv_lora_rank: is missing"),
        ({"qk_rope_head_dim": "absent", "hidden_size": 64}, "qk_rope_head_dim: is missing"),
        ({"attention_bias": True}, "attention_bias: is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2 must be num_attention_heads, 8"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported; sigmoid"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy' is not supported; noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: is not supported, only 1"),
        ({"n_group": 3}, "n_group: 3 groups of 16 experts must be of one size"),
        ({"n_group": 16}, "n_group: 16 groups of 16 experts must be of one size, and of two at least"),
        ({"topk_group": 5}, "topk_group: 5 of 4 groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts in 2 groups"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: is not supported, only 1"),
    ],
)
def test_what_is_refused(fields, problem):
    with pytest.raises(ModelError) as error:
        read(**fields)
    assert problem in str(error.value)
