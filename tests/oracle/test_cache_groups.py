"""A tiny Gemma 3 whose layers keep their keys and values in unequal groups: of other counts, windows and types."""

import itertools

import pytest
import torch
from hf_oracle import assert_served_as_by, random_model, random_prompts, serve

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.sampling_params import SamplingParams

KINDS = (["sliding_attention"] * 3 + ["full_attention"]) * 2
PROMPTS = random_prompts([1, 2, 90, 30, 47, 64])


@pytest.fixture(scope="module")
def model():
    return random_model(
        "Gemma3Text",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(KINDS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=24,
        max_position_embeddings=256,
        sliding_window=24,
        layer_types=KINDS,
        eos_token_id=0,
        bos_token_id=1,
    )


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(path)
    return path


def worker(
    folder,
    *,
    runner="v2",
    quantization="none",
    attention="cpu",
    num_blocks=100,
    tokens=100,
    dtype="float32",
    limits=(),
    **components,
):
    return assemble(
        {
            "model": {"source": str(folder), "dtype": dtype, "max_model_len": 128},
            "limits": {"max_num_reqs": 8, "max_num_batched_tokens": tokens, **dict(limits)},
            "cache": {"block_size": 8, "num_blocks": num_blocks, "quantization": quantization},
            "components": {"runner": runner, "attention": attention, "graph": "none", **components},
        }
    )


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_groups_of_unequal_counts_serve_hugging_faces_tokens(model, folder, runner):
    assembly = worker(folder, runner=runner)
    assert_served_as_by(model, PROMPTS, serve(assembly, PROMPTS, 38))
    assembly.worker.start()
    layout = assembly.value(KVLayout)
    assert [group.layers for group in layout.groups] == [(0, 1), (2, 4), (5, 6), (3, 7)]


def test_b157_blocks_that_change_hands_between_groups_serve_the_same_tokens(model, folder):
    # One request of full length needs 16 full blocks and 6 times 16 windowed ones at most; two hardly fit.
    tokens = [serve(worker(folder, tokens=32, num_blocks=n, quantization={"sliding": "int8"}), PROMPTS * 2, 30)
              for n in (70, 400)]  # fmt: skip
    assert [row for row, _ in tokens[0]] == [row for row, _ in tokens[1]]
    for (_, few), (_, many) in zip(*tokens, strict=True):
        torch.testing.assert_close(few, many, atol=2e-2, rtol=0)


CHOICES = ["int8", {"full": "int8"}, {"sliding": "int8"}, {"layers": {"0-2": "int8", "7": "int8"}}]


@pytest.mark.parametrize(
    ("quantization", "attention"), [*itertools.product(CHOICES, ["cpu"]), ("int8", "sdpa"), ("int8", "reference")]
)
def test_int8_errs_little(model, folder, quantization, attention):
    served = serve(worker(folder, quantization=quantization, attention=attention), PROMPTS, 8)
    for prompt, (tokens, logits) in zip(PROMPTS, served, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        error, spread = (logits - expected).abs().mean(), expected.std()
        assert 0 < error < 0.05 * spread


def test_int8_does_not_depend_on_batch_and_chunks(folder):
    quantization = {"full": "int8", "layers": {"0-1": "int8"}}
    together = serve(worker(folder, quantization=quantization), PROMPTS, 8)
    chunked = serve(worker(folder, quantization=quantization, tokens=16), PROMPTS, 8)
    alone = [serve(worker(folder, quantization=quantization, runner="v1"), [prompt], 8)[0] for prompt in PROMPTS]
    for (tokens, logits), *others in zip(together, chunked, alone, strict=True):
        for other_tokens, other_logits in others:
            assert other_tokens == tokens
            torch.testing.assert_close(other_logits, logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "reference"])
def test_blocks_of_another_type_do_no_harm(folder, attention):
    """bfloat16 beside int8: what one group leaves in a block is no number to the other."""
    assembly = worker(folder, quantization={"full": "int8"}, attention=attention, dtype="bfloat16", num_blocks=110)
    for _, logits in serve(assembly, PROMPTS * 2, 30):
        assert logits.isfinite().all()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_draft_of_another_shape_shares_the_pool(folder, runner, tmp_path):
    draft = random_model(
        "Llama",
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=1,
    )
    draft.save_pretrained(tmp_path)
    plain = worker(folder, runner=runner, quantization={"full": "int8"})
    speculating = worker(
        folder,
        runner=runner,
        quantization={"full": "int8"},
        limits={"num_speculative_tokens": 3},
        speculator="draft_model",
        draft={"use": "checkpoint", "source": str(tmp_path)},
    )
    assert generated(speculating, 20) == generated(plain, 20)
    layout = speculating.value(KVLayout)
    assert [(group.spec.dtype, group.stride, group.spec.block_size) for group in layout.groups[-2:]] == [
        ("int8", 12, 32),
        ("float32", 4, 8),
    ]


def generated(assembly, count):
    """Tokens of each prompt, greedily."""
    worker = assembly.worker
    worker.start()
    scheduler = assembly.get(roles.SCHEDULER)
    tokens = {str(i): [] for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=count, temperature=0.0)
        scheduler.add(EngineRequest(req_id=str(i), prompt_token_ids=tuple(prompt), params=params))
    while scheduler.has_work:
        output = scheduler.schedule()
        answer = worker.execute_model(output) or worker.sample_tokens().get()
        for req_id, progress in scheduler.update(output, answer).items():
            tokens[req_id].extend(progress.token_ids)
        worker.check_integrity()
        scheduler.check_integrity()
    return tokens
