"""Tiny random models of each family, saved by Hugging Face and read by our loader: the logits that each runner samples
from are Hugging Face's within 1e-4, alone and in a mixed batch of 32, and so are the tokens."""

import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.sampling import Sampler
from workerkit.framework.interfaces.sampling_params import SamplingParams

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
FAMILIES = {
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


def hf_model(family):
    import transformers

    name = family.split("-")[0]
    config = getattr(transformers, f"{name}Config")(**SMALL, **FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # wide apart logits, and 1-D parameters that are not trivial
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)
    return model


class Recording(Sampler):
    """Greedy, and keeps the logits of each request in order."""

    def __init__(self):
        self.rows = {}

    def process(self, logits, batch):
        if not batch.is_dummy:
            for row, (req_id, partial) in enumerate(zip(batch.req_ids, batch.plan.is_partial, strict=True)):
                if not partial:
                    self.rows.setdefault(req_id, []).append(logits[row].clone())
        return logits

    def draw(self, logits, batch):
        return logits.argmax(-1)

    def keys(self, batch):
        raise NotImplementedError("nobody speculates here")


def serve(assembly, prompts, count):
    """[(tokens, logits [count, V])] of each prompt, all in one batch."""
    recording = Recording()
    with assembly.with_override(roles.SAMPLER, recording) as other:
        worker = other.worker
        worker.start()
        scheduler = other.get(roles.SCHEDULER)
        tokens = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=count)
            scheduler.add(EngineRequest(req_id=str(i), prompt_token_ids=tuple(prompt), params=params))
        while scheduler.has_work:
            output = scheduler.schedule()
            if worker.execute_model(output) is None:
                for req_id, progress in scheduler.update(output, worker.sample_tokens().get()).items():
                    tokens[req_id].extend(progress.token_ids)
    return [(tokens[req_id], torch.stack(recording.rows[req_id])) for req_id in tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_of_both_runners_are_hugging_faces(family, tmp_path):
    model = hf_model(family)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 90, *torch.randint(1, 60, (29,), generator=generator).tolist()]
    prompts = [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
    }
    for runner in ("v1", "v2"):
        assembly = assemble(config, {"components.runner": runner})
        served = serve(assembly, prompts, 6) + [serve(assembly, [prompt], 6)[0] for prompt in prompts[:4]]
        for prompt, (tokens, logits) in zip(prompts + prompts[:4], served, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            assert tokens == expected.argmax(-1).tolist()
