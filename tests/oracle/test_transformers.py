"""`model: transformers`: families without a line of native code, different in structure, give Hugging Face's logits
over the paged cache, in chunks and mixed batches, with both runners. What cannot run there is refused by name."""

import json

import pytest
import torch
from hf_oracle import assert_served_as_by, random_model, random_prompts, serve
from tiny_families import decoder, deepseek, gpt_oss

from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, UnsupportedError
from workerkit.framework.interfaces.model import LoadedModel

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
GPT = {"vocab_size": 128, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "eos_token_id": 0}
GPT_NEO = {"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256}
BART = {"d_model": 64, "decoder_ffn_dim": 96, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 128}
FAMILIES = {
    "GPT2": GPT,  # learned positions, LayerNorm
    "GPTBigCode": {**GPT, "multi_query": True},  # all heads share one key head
    "GPTJ": {**GPT, "rotary_dim": 8},  # parallel residual with one norm
    "GPTNeoX": SMALL,  # parallel residual with two, partly rotated heads
    "OPT": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},  # learned positions from 2 on, ReLU
    "StableLm": {**SMALL, "num_key_value_heads": 2},  # tells its layers nothing of what its forward is given
    "Starcoder2": {**SMALL, "num_key_value_heads": 2, "sliding_window": 8},  # LayerNorm, windows
    "Cohere": {**SMALL, "num_key_value_heads": 2},  # parallel residual, LayerNorm without bias, scaled logits
    "Falcon": {**SMALL, "alibi": True, "multi_query": False, "new_decoder_architecture": False},
    "Falcon-rotary": {**SMALL, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "GraniteMoe": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
}
# Families that are native here, too, for what they ask of attention.
ATTENTION = {
    "Gemma2": lambda: decoder("Gemma2"),  # soft caps of scores and of logits
    "GptOss": gpt_oss,  # sinks
    "DeepseekV3": deepseek,  # values smaller than keys
}


def config_of(folder, runner="v2", **sections):
    return {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 40},
        "cache": {"block_size": 8, "num_blocks": 200},
        "components": {"runner": runner, "model": "transformers"},
    } | sections


@pytest.mark.parametrize("family", [*FAMILIES, *ATTENTION])
def test_logits_and_tokens_of_both_runners_are_hugging_faces(family, tmp_path):
    model = random_model(family.split("-")[0], **FAMILIES[family]) if family in FAMILIES else ATTENTION[family]()
    model.save_pretrained(tmp_path)
    prompts = random_prompts([1, 2, 60, 17, 33, 5])
    for runner in ("v1", "v2"):
        with assemble(config_of(tmp_path, runner)) as assembly:
            served = serve(assembly, prompts, 8) + serve(assembly, prompts[2:3], 64)
            assert_served_as_by(model, prompts + prompts[2:3], served)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("Bloom", {"vocab_size": 128, "hidden_size": 64, "n_head": 4, "n_layer": 2}, "make scores by themselves"),
        ("Mpt", {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2}, "make scores by themselves"),
        ("GPTNeo", {**GPT_NEO, "attention_types": [[["global", "local"], 1]]}, "its attention cannot be replaced"),
        ("Doge", {**SMALL, "num_key_value_heads": 2}, "asks for attention_mask"),
        ("DiffLlama", SMALL, "do not each call the attention function once"),
        ("Bart", {**BART, "is_decoder": True, "is_encoder_decoder": False}, "does not read the positions"),
        (
            "Bamba",
            {**SMALL, "num_key_value_heads": 2, "mamba_d_state": 16, "attn_layer_indices": [1], "mamba_n_heads": 8},
            "layers of kind linear_attention",
        ),
    ],
)
def test_what_the_paged_cache_does_not_serve_is_refused_at_load(family, fields, message, tmp_path):
    random_model(family, **fields).save_pretrained(tmp_path)
    worker = assemble(config_of(tmp_path)).worker
    with pytest.raises(ModelError, match=message):
        worker.start()


def test_a_rotary_embedding_that_looks_at_other_requests_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    random_model("GPTNeoX", **{**SMALL, "rope_parameters": rope}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="dynamic"):
        assemble(config_of(tmp_path)).worker.start()


def test_layers_whose_kind_only_a_mask_knows_are_refused(tmp_path):
    """transformers makes no mask for our attention function: chunks of Llama 4 would be passed over in silence."""
    random_model("Starcoder2", **SMALL, num_key_value_heads=2, sliding_window=8).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "layer_types": ["chunked_attention"] * 3}))
    with pytest.raises(ModelError, match="chunked_attention"):
        assemble(config_of(tmp_path)).worker.start()


def test_a_window_that_only_a_mask_knows_is_refused(tmp_path):
    random_model("GPTNeoX", **SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 8}))
    with pytest.raises(ModelError, match="leaves its sliding window to a mask"):
        assemble(config_of(tmp_path)).worker.start()


def test_a_config_without_a_longest_sequence_needs_one_of_ours(tmp_path):
    random_model("Bloom", vocab_size=128, hidden_size=64, n_head=4, n_layer=2).save_pretrained(tmp_path)
    config = config_of(tmp_path)
    del config["model"]["max_model_len"]
    with pytest.raises(ModelError, match=r"BloomConfig names no longest sequence: set model\.max_model_len"):
        assemble(config).worker.start()


def test_a_cache_of_8_bits_is_refused_where_keys_hold_positions(tmp_path):
    random_model("Falcon", **FAMILIES["Falcon"]).save_pretrained(tmp_path)
    config = config_of(tmp_path)
    config["cache"]["quantization"] = "int8"
    with pytest.raises(UnsupportedError, match="ALiBi"):
        assemble(config).worker.start()


def test_quantization_is_refused(tmp_path):
    random_model("GPT2", **GPT).save_pretrained(tmp_path)
    config = config_of(tmp_path)
    config["model"]["quantization"] = "int8"
    with pytest.raises(UnsupportedError, match="quantization"):
        assemble(config).worker.start()


def test_dropped_weights_come_back(tmp_path):
    random_model("GPT2", **GPT).save_pretrained(tmp_path)
    with assemble(config_of(tmp_path)) as assembly:
        assembly.worker.start()
        network = assembly.value(LoadedModel).network
        before = {name: tensor.clone() for name, tensor in network.weights()}
        assembly.worker.sleep(2)
        assembly.worker.wake_up()
        assert before
        for name, tensor in network.weights():
            assert torch.equal(tensor, before[name]), name
