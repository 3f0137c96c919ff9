"""Pictures in vLLM's requests: tokens are those of Hugging Face's model, whatever else is in the batch; what is no
picture is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm_engine import EACH, VARIANTS, config, counter, vllm_engine
from vllm_pictures import Seeing, feature, pil, processing, prompt_of
from vllm_steps import PROTOCOLS, enter, requests, scheduled

from workerkit.framework.errors import UnsupportedError
from workerkit.plugins.vllm.pictures import pictures, problems


@pytest.fixture(scope="module", autouse=True)
def process_pictures(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        processing(monkeypatch, tmp_path_factory.mktemp("stand-in"))
        yield


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return Seeing("Qwen3VL", tmp_path_factory.mktemp("seeing"))


def generate(llm, cases, count):
    """[(prompt, tokens)] of (prompt with a placeholder a picture, pictures)."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": [*prompt], **({"multi_modal_data": {"image": seen}} if seen else {})} for prompt, seen in cases]
    outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
    return [(output.prompt_token_ids, [*output.outputs[0].token_ids]) for output in outputs]


def expected(seeing, cases, count):
    return [seeing.greedy(prompt, seen, count) for prompt, seen in cases]


CASES = [
    (prompt_of([5, 6, 7], [9, 80]), [pil(40, 32)]),  # 20 tokens: vllm_engine steps 16 at a time
    (prompt_of([3, 4, 5, 99]), []),
    (prompt_of([5, 6, 7], [9, 80]), [pil(40, 32, seed=1)]),
    (prompt_of([], [20, 21], [22]), [pil(24, 16, seed=2), pil(40, 32)]),
    (prompt_of([5, 6, 7], [9, 80]), [pil(40, 32)]),
]


@pytest.mark.parametrize("variant", EACH)
def test_prompts_with_pictures_are_served_as_by_hugging_face(seeing, variant):
    runner, asynchronous = VARIANTS[variant]
    with vllm_engine(seeing.folder, config(runner), asynchronous) as llm:
        said, right = generate(llm, CASES, 8), expected(seeing, CASES, 8)
        assert said == right
        assert said[0][1] == said[4][1] != said[2][1]  # the same picture, and another one
        hits = counter(llm, "prefix_cache_hits")
        assert generate(llm, CASES[:1], 8) == right[:1]
        assert counter(llm, "prefix_cache_hits") - hits == 16
        content = [{"type": "image_pil", "image_pil": pil(24, 16)}, {"type": "text", "text": "w7 w9"}]
        output = llm.chat([{"role": "user", "content": content}], sampling_params=params(6), use_tqdm=False)[0]
        assert [*output.outputs[0].token_ids] == seeing.greedy(prompt_of([], [7, 9]), [pil(24, 16)], 6)[1]
        with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\)"):
            llm.generate({"prompt_token_ids": [5], "multi_modal_data": {"video": [pil(24, 16)] * 2}}, use_tqdm=False)


def params(count):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
