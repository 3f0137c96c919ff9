"""Tiny random models of each family, saved by Hugging Face and read by our loader: the logits that each runner samples
from are Hugging Face's within 1e-4, alone and in a mixed batch of 32, and so are the tokens."""

import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from tiny_families import DECODERS, decoder

from workerkit.framework.assembly import assemble


@pytest.mark.parametrize("family", DECODERS)
def test_logits_and_tokens_of_both_runners_are_hugging_faces(family, tmp_path):
    model = decoder(family)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = random_prompts([1, 2, 90, *torch.randint(1, 60, (29,), generator=generator).tolist()])
    config = {
        "model": {"source": str(tmp_path), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
    }
    for runner in ("v1", "v2"):
        assembly = assemble(config, {"components.runner": runner})
        served = serve(assembly, prompts, 6) + [serve(assembly, [prompt], 6)[0] for prompt in prompts[:4]]
        served += serve(assembly, prompts[3:4], 64)
        assert_served_as_by(model, [*prompts, *prompts[:4], prompts[3]], served)
