"""config.json in both spellings, against transformers' own reading of the same dictionary."""

import json

import pytest
import transformers

from workerkit.components.loader.hf_config import model_config, read_hf_config
from workerkit.framework.errors import ModelError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
GEMMAS = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def read(generation=None, /, family="llama", **fields):
    raw = BASE | {"architectures": [(ARCHITECTURES | GEMMAS)[family]], "model_type": family} | fields
    return model_config({k: v for k, v in raw.items() if v != "absent"}, generation or {}, "config.json")


def problems(**fields):
    with pytest.raises(ModelError) as error:
        read(**fields)
    return str(error.value)


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 20.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_rope_spelling_mean_the_same(kind):
    values = ROPES[kind]
    new = read(rope_parameters=values | {"rope_theta": 500000.0})
    old = read(rope_theta=500000.0, rope_scaling=values)
    legacy = read(rope_theta=500000.0, rope_scaling={("type" if k == "rope_type" else k): v for k, v in values.items()})
    assert new.rope == old.rope == legacy.rope
    assert (new.rope.rope_type, new.rope.theta, new.rope.rotary_dim) == (kind, 500000.0, 16)
    assert new.rope.factor == values.get("factor", 1.0)
    assert new.rope.original_max_position == values.get("original_max_position_embeddings", 4096)
    assert new.rope.beta_fast == values.get("beta_fast", 32.0)


def test_gemma2_has_soft_caps_and_windows_unless_its_file_says_otherwise():
    fields = {"family": "gemma2", "sliding_window": 8}
    config = read(**fields)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    assert config.sliding_windows == (8, None, 8, None)
    assert (config.head_dim, config.attention_scale, config.embedding_scale) == (256, 1 / 16, 8.0)
    assert (config.hidden_act, config.norm_offset, config.sandwich_norms) == ("gelu_pytorch_tanh", 1.0, True)
    assert config.tie_word_embeddings
    config = read(**fields, attn_logit_softcapping=None, final_logit_softcapping=12)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, 12.0)
    assert "use_bidirectional_attention" in problems(**fields, use_bidirectional_attention=True)


def test_gemma3_caps_logits_only():
    fields = {"family": "gemma3_text"}
    assert read(**fields).final_logit_softcapping is None
    assert read(**fields, final_logit_softcapping=30.0).final_logit_softcapping == 30.0
    assert "attn_logit_softcapping" in problems(**fields, attn_logit_softcapping=50.0)


def test_b80_type_beside_rope_type():
    """`rope_scaling` of 2024 has both names; `rope_type` is the one that counts."""
    config = read(rope_scaling={"type": "linear", "factor": 4})
    assert (config.rope.rope_type, config.rope.factor) == ("linear", 4.0)
    assert read(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 4}).rope == config.rope
    assert read(rope_scaling={"type": "mrope", "rope_type": "default"}).rope.rope_type == "default"


def test_b67_yarn_factors_are_kept_as_written():
    rope = read(rope_scaling={"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0}).rope
    assert (rope.mscale, rope.mscale_all_dim, rope.attention_factor) == (0.707, 1.0, None)
    assert read(rope_scaling={"type": "yarn", "factor": 16, "attention_factor": 1.0}).rope.attention_factor == 1.0
    # 0 is how files write "not used"
    assert read(rope_scaling={"type": "yarn", "factor": 16, "mscale": 0, "mscale_all_dim": 0}).rope.mscale is None


def test_b166_dynamic_starts_from_the_context_of_the_model():
    rope = read(rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}).rope
    assert (rope.factor, rope.original_max_position) == (2.0, 4096)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_config_that_transformers_saved(family, tmp_path):
    cls = type(transformers.AutoConfig.for_model(family))
    fields = {key: value for key, value in BASE.items() if key not in ("architectures", "model_type")}
    oracle = cls(**fields, architectures=[ARCHITECTURES[family]], rope_parameters=ROPES["yarn"] | {"rope_theta": 2e4})
    oracle.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    for name in (*fields, "rms_norm_eps", "tie_word_embeddings", "hidden_act"):
        assert getattr(config, name) == getattr(oracle, name), name
    assert config.head_dim == (getattr(oracle, "head_dim", None) or 16)
    assert (config.rope.theta, config.rope.factor, config.rope.original_max_position) == (2e4, 8.0, 512)
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert config.sliding_windows == ((4096,) * 4 if family == "mistral" else ())


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("mistral", {"sliding_window": None}, ()),
        ("llama", {"sliding_window": 8}, ()),
        ("qwen2", {"sliding_window": 8}, ()),  # the switch is off by default
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, ()),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_sliding_windows(family, fields, windows):
    assert read(family=family, **fields).sliding_windows == windows
    oracle = type(transformers.AutoConfig.for_model(family))(
        **{k: v for k, v in BASE.items() if k != "model_type"} | fields
    )
    window = getattr(oracle, "sliding_window", None) if family != "llama" else None
    types = getattr(oracle, "layer_types", None) or ["sliding_attention"] * 4
    expected = tuple(window if kind == "sliding_attention" else None for kind in types)
    assert (windows or (None,) * 4) == expected


def test_dimensions_that_may_be_left_out():
    assert read(head_dim=None).head_dim == read().head_dim == 16
    assert read(head_dim=32).head_dim == 32
    assert read(family="qwen3").head_dim == transformers.Qwen3Config().head_dim == 128
    assert read(num_key_value_heads=None).num_key_value_heads == 4


def test_dtype_in_both_spellings():
    assert [read(torch_dtype="bfloat16").dtype, read(dtype="float16").dtype, read().dtype] == [
        "bfloat16",
        "float16",
        "float32",
    ]


def test_eos_of_both_files_counts():
    assert read({"eos_token_id": [5, 2]}, eos_token_id=2).eos_token_ids == (2, 5)
    assert read({"eos_token_id": 7}, eos_token_id=[1, 2]).eos_token_ids == (1, 2, 7)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read(bos_token_id=1).bos_token_id == 1


def test_biases():
    config = read(attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    config = read(family="qwen2")
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


def test_an_unknown_architecture_is_kept_for_the_library_to_judge():
    config = read(architectures=["NovelForCausalLM"], hidden_act="relu", rope_scaling={"rope_type": "spiral"})
    assert (config.architecture, config.hidden_act, config.rope.rope_type) == ("NovelForCausalLM", "relu", "spiral")
    assert config.raw["rope_scaling"] == {"rope_type": "spiral"}


def test_all_problems_are_reported_at_once():
    text = problems(
        vocab_size="96",
        hidden_size="absent",
        num_hidden_layers=True,
        hidden_act="gelu",
        rope_scaling={"type": "longrope"},
        tie_word_embeddings="no",
        torch_dtype="int3",
        eos_token_id="</s>",
        quantization_config={"quant_method": "gptq"},
    )
    for part in (
        "config.json (LlamaForCausalLM)",
        "vocab_size: must be an integer >= 1, not '96'",
        "hidden_size: is missing",
        "num_hidden_layers: must be an integer >= 1, not True",
        "hidden_act: 'gelu' is not supported; silu, swish are",
        "rope_scaling.rope_type: 'longrope' is not supported; default, linear, dynamic, yarn, llama3 are",
        "tie_word_embeddings: must be true or false",
        "torch_dtype: 'int3'",
        "eos_token_id: must be a token id",
        "quantization_config",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "rope_parameters.factor: must be >= 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling: must be an object"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads 4"),
        ({"head_dim": 15}, "must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a number"),
        ({"architectures": [], "model_type": "novel"}, "architectures: must be a list with one name"),
    ],
)
def test_a_problem_names_the_field(fields, part):
    assert part in problems(**fields)


def test_layer_types_must_fit():
    text = problems(family="qwen2", use_sliding_window=True, sliding_window=8, layer_types=["full_attention"])
    assert "layer_types: must be 4 times" in text


def test_the_file_itself_may_be_missing_or_broken(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert read_hf_config(tmp_path).eos_token_ids == (9,)


def test_layers_of_a_draft_are_those_of_its_model_type():
    """The architecture is the draft's; biases, norms and windows follow from `model_type`, and nothing without it."""
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32}
    llama = read(**draft, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    assert read(**draft | {"model_type": "qwen3"}).qk_norm
    plain = read(**draft | {"model_type": "absent"})
    assert (plain.architecture, plain.qkv_bias, plain.qk_norm) == ("LlamaForCausalLMEagle3", False, False)
    assert plain.raw["draft_vocab_size"] == 32


def test_fields_one_level_down_as_speculators_writes_them():
    layer = BASE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1}
    raw = {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "transformer_layer_config": layer,
        "draft_vocab_size": 32,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
    }
    config = model_config(raw, {}, "config.json")
    assert (config.architecture, config.num_hidden_layers, config.qk_norm) == ("Eagle3Speculator", 1, True)
    assert config.raw["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    del layer["num_attention_heads"]
    with pytest.raises(ModelError, match="num_attention_heads: is missing"):
        model_config(raw, {}, "config.json")


@pytest.mark.parametrize(
    "raw",
    [
        {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"},
        {"model_type": "medusa", "num_heads": 4},
    ],
)
def test_medusa_leaves_its_sizes_to_the_target(raw):
    config = model_config(raw, {}, "config.json")
    assert (config.architecture, config.hidden_size, config.vocab_size) == ("MedusaModel", 0, 0)
    assert model_config(raw | {"hidden_size": 64, "vocab_size": 96}, {}, "config.json").hidden_size == 64
