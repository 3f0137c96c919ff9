"""Tiny random Qwen3-VL and Qwen3.5 models, saved by Hugging Face and read by our loader: the tower's embeddings are
Hugging Face's within 1e-5, logits with pictures in the prompt within 1e-4, and texts are served as by Hugging Face."""

import numpy as np
import pytest
import torch
from hf_oracle import assert_served_as_by, random_prompts, serve
from oracles import dense_attend
from recurrent_oracle import make_states
from tiny_families import (
    DEEPSTACK,
    IMAGE,
    VISION,
    VISION_END,
    VISION_LANGUAGE,
    VISION_START,
    VL_TEXT,
    vision_language,
)

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.hf_config import model_config
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.model import LoadedModel, ModelInputs
from workerkit.framework.interfaces.recurrent import RecurrentBatch
from workerkit.plugins.builtin_kernels import ReferenceKernels

GRIDS = [(1, 4, 6), (1, 2, 2), (1, 2, 2), (1, 8, 4), (1, 14, 10), (3, 4, 2)]
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=VISION_LANGUAGE)
def hf(request):
    """Hugging Face's model."""
    return vision_language(request.param)


@pytest.fixture(scope="module")
def config(hf, tmp_path_factory):
    """A worker's, over the files that Hugging Face saved."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    hf.save_pretrained(folder)
    return {
        "model": {"source": str(folder), "dtype": "float32", "max_model_len": 128},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 700},
    }


@pytest.fixture(scope="module")
def network(config):
    """Ours, of the same files."""
    assembly = assemble(config)
    assembly.worker.init_device()
    assembly.worker.load_model()
    return assembly.value(LoadedModel).network


def random_pixels(grids, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4, generator=generator)


def hf_features(hf, pixels, grids):
    """Embeddings of all tokens, and deepstack's."""
    with torch.no_grad():
        features = hf.model.get_image_features(pixels, torch.tensor(grids), return_dict=True)
    levels = getattr(features, "deepstack_features", ())
    return [torch.cat(features.pooler_output), *(torch.cat(level) for level in levels)]


def assert_features(output, expected, count=None):
    for ours, theirs in zip([output.embeds, *output.deepstack], expected, strict=True):
        torch.testing.assert_close(ours[:count], theirs, **TOLERANCE)
        assert theirs.abs().max() > 0.1


@torch.inference_mode()
def test_pictures_together_and_one_by_one_have_hugging_faces_embeddings(hf, network):
    tower, pixels = network.vision, random_pixels(GRIDS)
    assert_features(tower.encode(pixels, GRIDS), hf_features(hf, pixels, GRIDS))
    for grid in GRIDS:
        own = random_pixels([grid])
        output = tower.encode(own, [grid])
        assert len(output.embeds) == tower.num_tokens(grid)
        assert_features(output, hf_features(hf, own, [grid]))


@torch.inference_mode()
@pytest.mark.parametrize("junk", [0.0, float("nan"), float("inf")])
def test_padding_to_a_budget_changes_nothing_whatever_lies_there(hf, network, junk):
    tower, budget = network.vision, 60
    static = tower.prepare([(1, 2, 2)], num_tokens=budget, num_frames=9)
    buffer = torch.empty(budget * 4, tower.config.patch_dim)
    for grids in (GRIDS[:2], GRIDS, GRIDS[:1], GRIDS[3:5]):
        pixels = random_pixels(grids)
        buffer.fill_(junk)[: len(pixels)] = pixels
        static.copy_(tower.prepare(grids, num_tokens=budget, num_frames=9))
        output = tower.forward(buffer, static)
        expected = hf_features(hf, pixels, grids)
        assert_features(output, expected, len(expected[0]))
        assert all(len(rows) == budget and rows.isfinite().all() for rows in (output.embeds, *output.deepstack))


@torch.inference_mode()
def test_attention_from_outside_takes_the_place_of_the_towers_own(network):
    tower, pixels, calls = network.vision, random_pixels(GRIDS[:1]), []

    def attend(query, key, value, scale):
        calls.append(scale)
        return value

    inputs = tower.prepare(GRIDS[:1])
    ours = tower.forward(pixels, inputs, attend)
    assert calls == [tower.config.head_dim**-0.5] * tower.config.depth
    assert not torch.allclose(ours.embeds, tower.forward(pixels, inputs).embeds, atol=1e-2)


@pytest.mark.parametrize(
    ("grids", "budget", "match"),
    [
        ([(1, 3, 4)], {}, "multiples of 2"),
        ([(0, 2, 4)], {}, "nothing 0"),
        ([(1, 4, 4)], {"num_tokens": 3}, "pictures of 4 tokens in 1 frames do not fit into 3 tokens in 1 frames"),
        ([(2, 2, 2)], {"num_tokens": 3, "num_frames": 1}, "2 frames do not fit"),
    ],
)
def test_grids_that_do_not_fit_are_refused(network, grids, budget, match):
    with pytest.raises(ValueError, match=match):
        network.vision.prepare(grids, **budget)


def test_pixels_must_be_as_many_as_grids_say(network):
    with pytest.raises(ValueError, match=r"pixels have shape \[4, 96\]: grids .* take \[8, 96\]"):
        network.vision.encode(torch.zeros(4, 96), [(1, 2, 4)])


def prompt_with(grids, lengths):
    """Ids of a text of so many tokens before, between and behind the pictures."""
    texts = random_prompts(lengths, seed=3)
    ids = [token % IMAGE for token in texts[0]]
    for (t, h, w), text in zip(grids, texts[1:], strict=True):
        ids += [VISION_START, *[IMAGE] * (t * h * w // 4), VISION_END, *(token % IMAGE for token in text)]
    return ids


@torch.inference_mode()
@pytest.mark.parametrize("grids", [[], [(1, 4, 6)], [(1, 8, 4), (1, 2, 6)]], ids=len)
def test_logits_of_prompts_with_pictures_are_hugging_faces(hf, network, grids):
    ids = torch.tensor(prompt_with(grids, [5, 4, 3][: 1 + len(grids)]))
    types = (ids == IMAGE).int()[None]
    vision = {"image_grid_thw": torch.tensor(grids), "mm_token_type_ids": types} if grids else {}
    pixels = random_pixels(grids)
    expected = hf(ids[None], **vision, **({"pixel_values": pixels} if grids else {})).logits[0]

    embeds, deepstack, rope = network.embed(ids), (), None
    if grids:
        output = network.vision.encode(pixels, grids)
        embeds[ids == IMAGE] = output.embeds
        deepstack = tuple(torch.zeros_like(embeds) for _ in output.deepstack)
        for level, rows in zip(deepstack, output.deepstack, strict=True):
            level[ids == IMAGE] = rows
        rope = hf.model.get_rope_index(ids[None], image_grid_thw=vision["image_grid_thw"], mm_token_type_ids=types)
        rope = rope[0][:, 0]
    positions, bounds = torch.arange(len(ids)), np.array([0, len(ids)], dtype=np.int32)
    inputs = ModelInputs(
        input_ids=ids.int(),
        positions=positions,
        rope_lens=torch.full_like(positions, len(ids)),
        attend=dense_attend,
        inputs_embeds=embeds,
        deepstack=deepstack,
        rope_positions=rope,
        recurrent=RecurrentBatch(
            states=make_states(network.recurrent_layers, 1),
            initial=torch.tensor([0]),
            token_states=torch.full_like(positions, -1),
            query_start_loc=torch.from_numpy(bounds),
            query_start_loc_np=bounds,
            is_verifying_np=np.array([False]),
        ),
    )
    logits = network.compute_logits(network.forward(inputs).hidden)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_texts_are_served_as_by_hugging_face(hf, config):
    prompts = [[token % IMAGE for token in prompt] for prompt in random_prompts([1, 2, 90, 17, 40, 33])]
    for runner in ("v1", "v2"):
        assembly = assemble(config, {"components.runner": runner})
        served = serve(assembly, prompts, 6) + serve(assembly, prompts[3:4], 64)
        assert_served_as_by(hf, prompts + prompts[3:4], served)


@torch.inference_mode()
def test_three_equal_positions_are_one(network):
    positions = torch.arange(50)
    plain, threefold = (network.rotary(given, positions) for given in (positions, positions.expand(3, -1)))
    torch.testing.assert_close(threefold, plain, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_a_tower_may_be_quantised(hf, config):
    assembly = assemble(config, {"model.quantization": "int8"})
    assembly.worker.init_device()
    assembly.worker.load_model()
    tower, pixels = assembly.value(LoadedModel).network.vision, random_pixels(GRIDS)
    expected = hf_features(hf, pixels, GRIDS)[0]
    error = (tower.encode(pixels, GRIDS).embeds - expected).abs().max() / expected.abs().max()
    assert 1e-4 < error < 0.05


def raw_config(text=(), vision=(), **fields):
    """A file as the first checkpoints have it; None: without the field."""
    text = {
        **VL_TEXT,
        "rope_theta": 1000.0,
        "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
    } | dict(text)
    raw = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": IMAGE,
        "text_config": {**text, "model_type": "qwen3_vl_text"},
        "vision_config": {**VISION, **DEEPSTACK, "model_type": "qwen3_vl"} | dict(vision),
        **fields,
    }
    return {name: value for name, value in raw.items() if value is not None}


def test_fields_of_a_file():
    config = model_config(raw_config(vision_start_token_id=VISION_START), {}, "config.json")
    assert (config.rope.theta, config.rope.mrope_section, config.qk_norm) == (1000.0, (4, 2, 2), True)
    vision = config.vision
    assert (vision.image_token_id, vision.video_token_id) == (IMAGE, None)
    assert (vision.vision_start_token_id, vision.vision_end_token_id) == (VISION_START, None)
    assert (vision.depth, vision.hidden_size, vision.head_dim, vision.deepstack_indexes) == (3, 48, 24, (0, 2))
    assert (vision.patch_size, vision.temporal_patch_size, vision.merge_size, vision.patch_dim) == (4, 2, 2, 96)
    plain = model_config(raw_config({"rope_theta": None, "rope_scaling": {"mrope_section": [4, 2, 2]}}), {}, "f")
    assert plain.rope.theta == 500000.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vision_config": None}, "vision_config.depth: is missing"),
        ({"vision_config": 3}, "vision_config: must be an object, not 3"),
        ({"image_token_id": None}, "image_token_id: is missing"),
        (
            {"vision": {"hidden_act": "silu"}},
            "vision_config.hidden_act: 'silu' is not supported; gelu_pytorch_tanh are",
        ),
        ({"vision": {"patch_size": [4, 4]}}, r"vision_config.patch_size: must be an integer >= 1, not \[4, 4\]"),
        (
            {"vision": {"out_hidden_size": 32}},
            "vision_config.out_hidden_size: 32 must be the text model's hidden_size 64",
        ),
        ({"vision": {"deepstack_visual_indexes": 1}}, "deepstack_visual_indexes: must be a list of integers"),
        ({"vision": {"deepstack_visual_indexes": [0, 1, 2, 2]}}, "4 of them, for 3 text layers"),
        ({"vision": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters.rope_type: 'yarn' is not supported"),
        ({"text": {"rope_scaling": {"mrope_section": [4, 4, 4]}}}, r"mrope_section: \[4, 4, 4\] must be three numbers"),
        ({"text": {"rope_scaling": {"mrope_section": [4, 4]}}}, r"mrope_section: \[4, 4\] must be three numbers"),
        (
            {"text": {"rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": False}}},
            "mrope_interleaved: false is not supported",
        ),
        (
            {"text": {"rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "dynamic", "factor": 2.0}}},
            "rope_type: 'dynamic' is not supported with positions of three axes",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(changes, problem):
    with pytest.raises(ModelError, match=problem):
        model_config(raw_config(**changes), {}, "config.json")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_heads": 5}, "hidden_size 48 / num_heads 5 must be a multiple of 4"),
        ({"num_position_embeddings": 35}, "num_position_embeddings 35 is no square"),
        ({"deepstack_visual_indexes": [3]}, r"deepstack_visual_indexes \[3\] must be different blocks of 0..2"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(fields, problem):
    config = model_config(raw_config(vision=fields), {}, "config.json")
    kernels = OrderedKernels((ReferenceKernels(),))
    with pytest.raises(ModelError, match=problem):
        NativeLibrary(kernels).build(config, torch.float32, torch.device("cpu"))
