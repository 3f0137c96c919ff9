"""Tiny random DeepSeek-V3 models, saved by Hugging Face and read by our loader: logits and tokens of both runners are
Hugging Face's, and drafts of the layer behind the last one are those of its `MtpModel`."""

import json

import attrs
import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from letters import EOS, VOCAB, Letters
from safetensors.torch import load_file, save_file
from tiny_families import DEEPSEEK, deepseek

from workerkit.components.speculator.eagle import EagleSpeculator
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

LAYERS = DEEPSEEK["num_hidden_layers"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "plain": {},
    "queries-from-the-stream": {"q_lora_rank": None, "rope_interleave": False},
    "yarn": {"rope_parameters": YARN},
    "yarn-mscale": {"rope_parameters": YARN | {"mscale": 0.707}, "norm_topk_prob": False, "n_shared_experts": 1},
}


def save(folder, **fields):
    model = deepseek(**fields)
    model.save_pretrained(folder)
    return model


def config_of(folder, **model):
    return {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 128, **model},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
    }


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_of_both_runners_are_hugging_faces(case, tmp_path):
    model = save(tmp_path, **CASES[case])
    generator = torch.Generator().manual_seed(1)
    prompts = random_prompts([1, 2, 90, *torch.randint(1, 60, (29,), generator=generator).tolist()])
    for runner in ("v1", "v2"):
        assembly = assemble(config_of(tmp_path), {"components.runner": runner})
        served = serve(assembly, prompts, 6) + [serve(assembly, [prompt], 6)[0] for prompt in prompts[:4]]
        assert_served_as_by(model, prompts + prompts[:4], served)


ATTENTION = {
    # the native library's `paged_attention` has no values of another size than keys
    "reference": {"attention": "reference", "kernels": {"libraries": ["cpu", "reference"]}},
    "cpu": {"attention": "cpu"},
    "sdpa": {"attention": "sdpa", "graph": "none"},
}


@pytest.mark.parametrize("attention", ATTENTION)
def test_64_steps_behind_a_prompt_in_two_pieces(attention, tmp_path):
    model = save(tmp_path, rope_parameters=YARN)
    prompts = random_prompts([120, 3])
    assembly = assemble(config_of(tmp_path, max_model_len=200) | {"components": ATTENTION[attention]})
    assert_served_as_by(model, prompts, serve(assembly, prompts, 64))


def test_a_config_as_the_hub_has_it(tmp_path):
    """Scaling of rope in its old spelling, and fields that transformers 5 does not know any more."""
    model = save(tmp_path, rope_parameters=YARN)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    new = raw.pop("rope_parameters")
    old = {"type": new.pop("rope_type"), **{name: value for name, value in new.items() if name != "rope_theta"}}
    for name in ("head_dim", "qk_head_dim", "rope_interleave"):
        raw.pop(name, None)
    raw |= {"rope_theta": 10000, "rope_scaling": old, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    path.write_text(json.dumps(raw | {"moe_layer_freq": 1, "ep_size": 1, "torch_dtype": raw.pop("dtype")}))
    prompts = random_prompts([70])
    assert_served_as_by(model, prompts, serve(assemble(config_of(tmp_path)), prompts, 4))


# The layer that drafts


def save_with_mtp(folder):
    """Layer LAYERS of a model with one layer more is what drafts."""
    save(folder, num_hidden_layers=LAYERS + 1, vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=128)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": LAYERS}))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    hidden = DEEPSEEK["hidden_size"]
    own = {f"{name}.weight": 1 + 0.2 * torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm")}
    own["shared_head.norm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    own["eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    own["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@attrs.frozen
class Proposal:
    req_id: str
    newest: int  # position of the token that the target has not seen yet
    drafts: list[int]
    logits: torch.Tensor


@pytest.fixture
def proposals():
    return []


@pytest.fixture
def registry(proposals):
    class Recording(EagleSpeculator):
        def propose(self, inputs):
            drafts = super().propose(inputs)
            batch = inputs.batch
            last = batch.query_start_loc[1:] - 1 - inputs.sampled.num_rejected
            for row, req_id in enumerate(batch.req_ids):
                if inputs.sampled.num_sampled[row]:
                    newest = int(batch.positions[last[row]]) + 1
                    tokens, logits = drafts.token_ids[row].tolist(), drafts.logits[row].clone()
                    proposals.append(Proposal(req_id, newest, tokens, logits))
            return drafts

    registry = load_plugins().registry
    registry.add(roles.TOKENIZER, "letters", Letters)
    registry.add(roles.SPECULATOR, "recording", Recording)
    return registry


def texts(assembly, prompts, count):
    engine = assembly.engine
    engine.start()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add_request(tuple(prompt), params, f"r{number}")
    outputs = {f"r{number}": list(prompt) for number, prompt in enumerate(prompts)}
    while engine.has_unfinished:
        for delta in engine.step():
            outputs[delta.req_id] += delta.token_ids
        engine.check_integrity()
    return outputs


@torch.no_grad()
def drafts_of_hugging_face(model, mtp, text, drafts):
    """[K, V]: one pass over the text for each draft; what came out of the pass before goes in behind it."""
    hidden = model.model(torch.tensor([text[:-1]])).last_hidden_state
    tokens, logits = text[1:], []
    for draft in drafts:
        positions = torch.arange(1, len(tokens) + 1)[None]
        states = mtp.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([tokens]))
        logits.append(mtp._project_to_logits(states[0, -1]))
        hidden, tokens = torch.cat([hidden, states[:, -1:]], dim=1), [*tokens, draft]
    return torch.stack(logits)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_mtp_from_the_targets_own_checkpoint(runner, tmp_path, registry, proposals, monkeypatch):
    """Tokens are those without drafts; drafts are `MtpModel`'s of the text alone."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    save_with_mtp(tmp_path)
    ignored = [rf"model\.layers\.{LAYERS}\..*"]  # the class knows the layer of the large model
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    mtp = MtpModel.from_pretrained(model).eval()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, EOS, (length,), generator=generator).tolist() for length in (1, 30, 9)]
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 64},
        "limits": {"max_num_reqs": 3, "max_num_batched_tokens": 16, "num_speculative_tokens": 3},
        "cache": {"block_size": 4, "num_blocks": 60},
        "components": {
            "runner": runner,
            "tokenizer": "letters",
            "speculator": {"use": "recording", "draft_sampling": "probabilistic"},
            "draft": {"use": "checkpoint", "architecture": "DeepSeekMTPModel", "progress": False},
            "rejection": "standard",
        },
    }
    with assemble(config, registry=registry) as assembly, torch.inference_mode():
        outputs = texts(assembly, prompts, 12)
    for number, prompt in enumerate(prompts):
        text = outputs[f"r{number}"]
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
        assert text[len(prompt) :] == expected.argmax(-1).tolist()
    assert len(proposals) > 12
    for proposal in proposals:
        known = outputs[proposal.req_id][: proposal.newest + 1]
        expected = drafts_of_hugging_face(model, mtp, known, proposal.drafts)
        torch.testing.assert_close(proposal.logits, expected, atol=1e-4, rtol=0)
        assert proposal.drafts == expected.argmax(-1).tolist()
