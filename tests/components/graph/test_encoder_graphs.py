"""Pictures packed into budgets: what is captured is what runs eagerly, at any mixture of sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from picture_model import make_model, save

from workerkit.components.graph.encoder import (
    EncoderAclGraphConfig,
    EncoderAclGraphManager,
    budgets_of,
    max_pictures_of,
    packs,
)
from workerkit.components.graph.none import NoEncoderGraph
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.testing.fakes_graph import FakeGraphDevice

GRIDS = [(1, 4, 6), (1, 2, 2), (1, 2, 2), (1, 8, 4), (1, 6, 6), (1, 2, 4)]  # 6, 1, 1, 8, 9 and 2 tokens


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    save(make_model("Qwen3VL"), folder)
    # What a graph replays, torch has to be asked to do: native kernels would compute beside it.
    kernels = {"components.kernels.libraries": ["reference"], "components.graph": "none"}
    assembly = assemble({"model": {"source": str(folder), "dtype": "float32"}}, kernels)
    assembly.worker.init_device()
    assembly.worker.load_model()
    return assembly.value(LoadedModel)


class Device:
    """Captures on a device that does not exist."""

    captures_graphs = True

    def __init__(self):
        self.fake = FakeGraphDevice()

    def graphs(self):
        return self.fake


def context():
    return DeviceContext(device=torch.device("cpu"), dtype=torch.float32)


def make(loaded, device=None, **options):
    return EncoderAclGraphManager(EncoderAclGraphConfig(**options), device or Device(), context(), loaded)


def random_pixels(grids, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), 96, generator=generator)


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        for mine, theirs in zip((one.embeds, *one.deepstack), (other.embeds, *other.deepstack), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_pictures_in_graphs_are_those_that_ran_eagerly(loaded):
    manager = make(loaded, budgets=(4, 8), max_pictures=3)
    manager.capture()
    for grids in (GRIDS, GRIDS[::-1], GRIDS[:1], GRIDS[1:3]):
        pixels = random_pixels(grids)
        assert_same(manager.encode(pixels, grids), NoEncoderGraph(loaded).encode(pixels, grids))
    assert manager.misses == 2  # twice the picture of 9 tokens
    assert manager.hits == 5 + 5 + 1 + 2


@torch.inference_mode()
def test_results_outlive_the_next_replay(loaded):
    manager = make(loaded, budgets=(8,))
    manager.capture()
    first = manager.encode(random_pixels(GRIDS[:1]), GRIDS[:1])[0]
    kept = first.embeds.clone()
    manager.encode(random_pixels(GRIDS[:1], seed=1), GRIDS[:1])
    assert torch.equal(first.embeds, kept)


@torch.inference_mode()
def test_after_release_all_run_eagerly_until_they_are_captured_again(loaded):
    manager = make(loaded, budgets=(16,))
    manager.capture()
    manager.release()
    pixels = random_pixels(GRIDS[:2])
    expected = NoEncoderGraph(loaded).encode(pixels, GRIDS[:2])
    assert_same(manager.encode(pixels, GRIDS[:2]), expected)
    assert (manager.hits, manager.misses) == (0, 2)
    manager.capture()
    assert_same(manager.encode(pixels, GRIDS[:2]), expected)
    assert manager.hits == 2


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 16), st.integers(1, 5))
def test_packs_hold_every_picture_once_and_keep_the_bounds(sizes, budget, most):
    found = list(packs(sizes, [1] * len(sizes), budget, most))
    assert sorted(index for pack in found for index in pack) == list(range(len(sizes)))
    for pack in found:
        assert len(pack) == 1 or (sum(sizes[index] for index in pack) <= budget and len(pack) <= most)
    order = [sizes[index] for pack in found for index in pack]
    assert order == sorted(sizes)


@pytest.mark.parametrize(
    ("options", "budgets", "pictures"),
    [
        ({"min_budget": 64, "max_budget": 300}, (64, 128, 256, 300), 4),
        ({"min_budget": 2, "max_budget": 64}, (2, 4, 8, 16, 32, 64), 2),
        ({"budgets": (32, 8, 8)}, (8, 32), 4),
        ({"budgets": (32, 8), "max_pictures": 8}, (8, 32), 8),
    ],
)
def test_budgets_and_pictures_of_a_run(options, budgets, pictures):
    config = EncoderAclGraphConfig(**options)
    assert budgets_of(config) == budgets
    assert max_pictures_of(config, budgets) == pictures


def test_what_cannot_be_is_refused(loaded):
    with pytest.raises(UnsupportedError, match="max_pictures: 9 pictures do not fit the smallest budget, 8 tokens"):
        make(loaded, budgets=(8, 16), max_pictures=9)
    with pytest.raises(UnsupportedError, match="min_budget 9 is more than max_budget 8"):
        make(loaded, min_budget=9, max_budget=8)
    with pytest.raises(ValueError, match="'budgets' must name budgets"):
        EncoderAclGraphConfig(budgets=())
