"""Bamba against Hugging Face: a sequence as a whole, in pieces, token by token, with verified drafts, and as served."""

import json

import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from recurrent_oracle import RecurrentRun, recurrent_logits
from tiny_families import bamba

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.hf_config import read_hf_config
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.assembly import assemble
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

VARIANTS = {
    "plain": {},
    "groups-and-biases": {
        "mamba_n_groups": 2,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "mlp_bias": True,
        "attention_bias": True,
        "mamba_d_conv": 3,
        "tie_word_embeddings": True,
    },
    "bounded-steps": {"time_step_limit": [0.5, 1.5], "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
}
LIBRARIES = {"reference": (ReferenceKernels,), "cpu": (CpuKernels, ReferenceKernels)}


def native_of(model, folder, libraries=LIBRARIES["cpu"], dtype=torch.float32):
    """The network of a saved model, its weights Hugging Face's own."""
    model.save_pretrained(folder)
    kernels = OrderedKernels(tuple(library() for library in libraries))
    network = NativeLibrary(kernels).build(read_hf_config(folder), dtype, torch.device("cpu"))
    network.load_weights(model.state_dict().items())
    return network


def hf_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("libraries", LIBRARIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_hugging_faces(variant, libraries, tmp_path):
    model = bamba(**VARIANTS[variant])
    network = native_of(model, tmp_path, LIBRARIES[libraries])
    (ids,) = random_prompts([90])
    expected = hf_logits(model, ids)
    for pieces in (None, [1] * 90, [64, 1, 3, 22], [7, 9, 74]):
        torch.testing.assert_close(recurrent_logits(network, ids, pieces), expected, atol=1e-4, rtol=0)


def test_rows_of_all_kinds_in_one_batch(tmp_path):
    """Decoding, verifying and prefill beside each other, in slots that others had before."""
    model = bamba()
    network = native_of(model, tmp_path)
    one, two, three = random_prompts([70, 30, 40])
    run = RecurrentRun(network, num_slots=3, num_drafts=2)
    run.step({0: random_prompts([5], seed=9)[0], 2: three[:20]})
    run.clear(0)
    got = {slot: [] for slot in range(3)}
    got[2].append(hf_logits(model, three)[:20])

    def step(pieces, verifying=(), accepted=None):
        for slot, logits in run.step(pieces, verifying).items():
            got[slot].append(logits if slot not in verifying else logits[: accepted[slot]])

    step({1: two[:10], 0: one[:64], 2: three[20:21]})
    wrong = [(token + 1) % 128 for token in three[22:24]]
    step({2: [three[21], *wrong], 0: one[64:], 1: two[10:13]}, verifying=(2, 1), accepted={2: 1, 1: 3})
    run.accept(2, 1)  # both drafts were wrong
    run.accept(1, 3)  # both were right
    step({1: two[13:30], 2: three[22:25]}, verifying=(2,), accepted={2: 3})
    run.accept(2, 3)
    step({2: three[25:]})
    for slot, ids in enumerate((one, two, three)):
        torch.testing.assert_close(torch.cat(got[slot]), hf_logits(model, ids), atol=1e-4, rtol=0)


def test_old_files_are_read_like_new_ones(tmp_path):
    model = bamba()
    model.save_pretrained(tmp_path)
    expected = read_hf_config(tmp_path)
    assert expected.recurrent_layers == (0, 2)
    assert expected.rope.rotary_dim == 8
    assert expected.mamba2.time_step_limit == (0.0, float("inf"))
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"], raw["attn_layer_indices"], raw["time_step_limit"]
    raw |= {
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_d_head": "auto",
        "attn_rotary_emb": 8,
        "num_logits_to_keep": 1,
    }
    path.write_text(json.dumps(raw))
    got = read_hf_config(tmp_path)
    assert (got.recurrent_layers, got.rope, got.mamba2) == (expected.recurrent_layers, expected.rope, expected.mamba2)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("variant", ["plain", "bounded-steps"])
def test_both_runners_serve_hugging_faces_logits(runner, variant, tmp_path):
    model = bamba(**VARIANTS[variant])
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = random_prompts([1, 2, 150, *torch.randint(1, 60, (13,), generator=generator).tolist()])
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 240},
        "limits": {"max_num_reqs": 16, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
        "components": {"runner": runner},
    }
    assembly = assemble(config)
    assert_served_as_by(model, prompts, serve(assembly, prompts, 6))
    long = prompts[:3]
    assert_served_as_by(model, long, serve(assembly, long, 64))
