"""Tiny random models of Hugging Face, of every family that is native here."""

import torch
from hf_oracle import perturb, random_model

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
DECODER = {**_SIZES, "num_hidden_layers": 3}
DECODERS = {
    "Llama": {},
    "Llama-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
    },
    "Gemma3Text": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "Gemma3Text-scaled-rope": {
        "head_dim": 16,
        "sliding_window": 8,
        "final_logit_softcapping": 5.0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 32,
    },
    "Qwen3Moe-plain-weights": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}


def decoder(family, **fields):
    """One of DECODERS."""
    return random_model(family.split("-")[0], **{**DECODER, **DECODERS[family], **fields})


LATENT = {  # what makes a DeepSeek-V3 of any size
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK = {
    **_SIZES,
    **LATENT,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-4,  # not that of the norms of latents
}


def deepseek(**fields):
    """Biases of the choice of experts are buffers, and as trivial as parameters."""
    model = random_model("DeepseekV3", **DEEPSEEK | fields)
    for layer in model.model.layers[model.config.first_k_dense_replace :]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3, generator=torch.Generator().manual_seed(5))
    return model


DELTA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
DELTAS = {
    "Qwen3Next": _DELTA_EXPERTS,
    "Qwen3Next-mixed-layers": {
        **_DELTA_EXPERTS,
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "attention_bias": True,
        "linear_num_value_heads": 6,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "Qwen3_5Text": {"linear_num_key_heads": 4},
    "Qwen3_5MoeText": _DELTA_EXPERTS,
}


def delta(variant):
    """One of DELTAS."""
    return random_model(variant.split("-")[0], **DELTA | DELTAS[variant])


BAMBA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}


def bamba(**fields):
    """Layers of both kinds."""
    return random_model("Bamba", **BAMBA | fields)


GPT_OSS = {
    **_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}


def gpt_oss(**fields):
    """Experts' biases matter, and the activation reaches its bounds."""
    model = random_model("GptOss", **GPT_OSS, attn_implementation="eager", **fields)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name:
                scale = 3 if name.endswith("gate_up_proj_bias") else 0.3
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if name.endswith("sinks"):
                parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    return model


IMAGE, VIDEO, VISION_START, VISION_END = 124, 125, 126, 127  # ids that prompts without pictures must not have
VL_TEXT = {**DECODER, "head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True}
VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 2]}
_VL_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}
_VL_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
VISION_LANGUAGE = {  # what the text's config has beyond VL_TEXT, and the tower's beyond VISION
    "Qwen3VL": ({"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}, DEEPSTACK),
    "Qwen3VL-tied-with-biases": (
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}, "attention_bias": True},
        DEEPSTACK,
    ),
    "Qwen3_5": (_VL_DELTA, {}),
    "Qwen3_5Moe": ({**_VL_DELTA, **_VL_EXPERTS}, {}),
}


def vision_language(family):
    """One of VISION_LANGUAGE."""
    import transformers

    name = family.split("-")[0]
    text, vision = VISION_LANGUAGE[family]
    config = getattr(transformers, f"{name}Config")(
        text_config=VL_TEXT | text,
        vision_config=VISION | vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings="tied" in family,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    perturb(model)
    return model
