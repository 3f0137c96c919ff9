"""Pictures in vLLM's requests: tokens are those of Hugging Face's model, whatever else is in the batch; what is no
picture is refused by name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm_engine import EACH, VARIANTS, config, counter, vllm_engine, worker_of
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


def params(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def generate(llm, cases, count):
    """[(prompt, tokens)] of cases: (prompt with a placeholder a picture, pictures)."""
    asked = [
        {"prompt_token_ids": [*prompt]} | ({"multi_modal_data": {"image": seen}} if seen else {})
        for prompt, seen in cases
    ]
    outputs = llm.generate(asked, params(count), use_tqdm=False)
    return [(output.prompt_token_ids, [*output.outputs[0].token_ids]) for output in outputs]


def expected(seeing, cases, count):
    return [seeing.greedy(prompt, seen, count) for prompt, seen in cases]


ONE, OTHER = pil(40, 32), pil(40, 32, seed=1)  # 20 tokens: vllm_engine steps 16 at a time
CASES = [
    (prompt_of([5, 6, 7], [9, 80]), [ONE]),
    (prompt_of([3, 4, 5, 99]), []),
    (prompt_of([5, 6, 7], [9, 80]), [OTHER]),
    (prompt_of([], [20, 21], [22]), [pil(24, 16, seed=2), ONE]),
    (prompt_of([5, 6, 7], [9, 80]), [ONE]),
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

        video = np.zeros((2, 16, 24, 3), np.uint8), {"fps": 1, "total_num_frames": 2, "frames_indices": [0, 1]}
        with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\)"):
            llm.generate({"prompt_token_ids": [125], "multi_modal_data": {"video": [video]}}, use_tqdm=False)


@pytest.mark.parametrize("variant", ["v2"])
def test_a_model_with_recurrent_layers_sees_them_too(variant, tmp_path):
    runner, asynchronous = VARIANTS[variant]
    hybrid, cases = Seeing("Qwen3_5", tmp_path), CASES[:3]
    with vllm_engine(hybrid.folder, config(runner), asynchronous) as llm:
        assert generate(llm, cases, 3) == expected(hybrid, cases, 3)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_a_picture_that_was_in_the_prefix_cache_may_be_needed_after_all(seeing, variant):
    """When its request has been preempted, and others have taken the blocks that it had found."""
    runner, asynchronous = VARIANTS[variant]
    first, growing = (prompt_of([], range(60, 72)), [ONE]), (prompt_of([3, 4, 5, 99]), [])
    cases = [growing, growing, first]
    workerkit = config(runner) | {"cache": {"num_blocks": 22, "block_size": 8}}
    with vllm_engine(seeing.folder, workerkit, asynchronous) as llm:
        assert generate(llm, [first], 1) == expected(seeing, [first], 1)
        read, entered = worker_of(llm)._requests.read, []

        def record(scheduled):
            step = read(scheduled)
            entered.extend(step.output.new_requests)
            return step

        worker_of(llm)._requests.read = record
        assert generate(llm, cases, 80) == expected(seeing, cases, 80)
        seen = [request.num_computed_tokens for request in entered if request.images]
        assert max(seen) >= 21  # behind the whole picture
        assert min(seen[1:]) < 20  # amid it, after a preemption


@pytest.mark.parametrize("variant", ["v2"])
def test_a_worker_without_a_tower_serves_text_if_vllm_asks_for_no_more(seeing, variant):
    runner, asynchronous = VARIANTS[variant]
    blind = config(runner, components={"encoder": "none"})
    with (
        pytest.raises(UnsupportedError, match="Qwen3VLForConditionalGeneration reads more than text"),
        vllm_engine(seeing.folder, blind, asynchronous),
    ):
        pass
    with vllm_engine(seeing.folder, blind, asynchronous, language_model_only=True) as llm:
        assert generate(llm, CASES[1:2], 8) == expected(seeing, CASES[1:2], 8)


# --- vLLM's values as ours


def looking(name="r", prompt=range(12), features=(), **more):
    return enter(name, prompt, more={"mm_features": list(features)}, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_picture_is_translated(dtype):
    given = feature(offset=3, grid=(1, 4, 2), name="p", dtype=dtype)
    [request] = requests().read(scheduled(new=[looking(features=[given])])).output.new_requests
    [image] = request.images
    assert (image.start, image.num_tokens, image.grid) == (3, 2, (1, 4, 2))
    assert image.pixels.dtype == np.float32
    assert torch.equal(torch.from_numpy(image.pixels), given.data["pixel_values"].data.float())


def test_equal_names_are_one_picture_only_where_the_sizes_are_equal():
    grids = [(1, 4, 2), (1, 4, 2), (1, 2, 4), (1, 2, 2)]
    digests = [one.digest for one in pictures([feature(grid=grid) for grid in grids])]
    assert digests[0] == digests[1]
    assert len({*digests, pictures([feature(name="other")])[0].digest}) == 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_keeps_its_pictures_over_a_preemption(protocol):
    told = requests()
    one = looking("a", features=[feature(), feature(offset=6, name="q")])
    told.read(scheduled(protocol, new=[one]))
    told.read(scheduled(protocol, preempted_req_ids={"a"}))
    again = looking("a", generated=[7], features=[feature(), feature(offset=6, name="q")])
    [request] = told.read(scheduled(protocol, resumed=[again])).output.new_requests
    assert [image.start for image in request.images] == [1, 6]
    assert request.token_ids == (*range(12), 7)


def test_what_vllm_says_of_its_encoder_is_not_needed():
    step = scheduled(
        new=[looking(features=[feature()])], scheduled_encoder_inputs={"r": [0]}, free_encoder_mm_hashes=["p"]
    )
    assert requests().read(step).output.num_scheduled_tokens == {"r": 12}


EMBEDS = {"pixel_values": None, "image_embeds": torch.zeros(2, 8)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modality": "video"}, "sees pictures only, and the request has video"),
        ({"modality": "audio"}, "sees pictures only, and the request has audio"),
        (EMBEDS, "pixel_values is missing: image_grid_thw, image_embeds"),
        ({"pixel_values": None, "image_grid_thw": None}, "pixel_values and image_grid_thw is missing: nothing"),
        ({"is_embed": torch.tensor([True, False])}, "text between their tokens"),
    ],
)
def test_what_is_no_picture_fails_its_request_alone(given, message):
    step = requests().read(scheduled(new=[looking("x", features=[feature(**given)]), enter("y")]))
    assert message in step.failed["x"]
    assert [request.req_id for request in step.output.new_requests] == ["y"]


@pytest.mark.parametrize(
    ("patch_dim", "merge", "message"),
    [
        (4, 2, None),
        (8, 2, "has pixels of shape (8, 4), right would be (8, 8)"),
        (4, 1, "takes 2 tokens, right would be 8"),
    ],
)
def test_pictures_that_a_client_had_processed_otherwise_are_problems(patch_dim, merge, message):
    tower = SimpleNamespace(
        config=SimpleNamespace(patch_dim=patch_dim), num_tokens=lambda grid: int(np.prod(grid)) // merge**2
    )
    found = [*problems(pictures([feature()]), tower)]
    assert len(found) == (message is not None)
    assert message is None or message in found[0]
