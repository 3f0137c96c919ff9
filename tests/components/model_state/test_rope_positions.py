"""Positions of models with M-RoPE: the formula against transformers, and tables by slot through both runners."""

import attrs
import numpy as np
import pytest
import torch

from workerkit.components.encoder.none import NoEncoder
from workerkit.components.model_state.rope_positions import rope_index
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.model import LoadedModel, Model
from workerkit.framework.interfaces.request import CachedRequest, ImageInput, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.fakes_model import FAKE_MODEL, FakeLoader, FakeNetwork
from workerkit.framework.testing.registry import fake_registry

MERGE = 2
MROPE = attrs.evolve(FAKE_MODEL, rope=attrs.evolve(FAKE_MODEL.rope, mrope_section=(2, 1, 1)))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def image(start, grid):
    return ImageInput(
        start=start,
        num_tokens=int(np.prod(grid)) // MERGE**2,
        digest=str(start),
        pixels=np.zeros((int(np.prod(grid)), 1), np.float32),
        grid=grid,
    )


def lay(*parts):
    """Lengths of texts and grids of pictures, in order -> (tokens in all, pictures)."""
    count, images = 0, []
    for part in parts:
        if isinstance(part, int):
            count += part
        else:
            images.append(image(count, part))
            count += images[-1].num_tokens
    return count, images


CASES = [
    lay(7),
    lay(3, (1, 4, 4), 5),
    lay(0, (1, 2, 8), 4),
    lay(2, (1, 8, 2)),
    lay(1, (1, 4, 6), 2, (1, 6, 4), 1, (1, 2, 2), 9),
]


@pytest.mark.parametrize(("count", "images"), CASES)
def test_the_formula_is_that_of_transformers(count, images):
    qwen = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    vision = type("Vision", (), {"spatial_merge_size": MERGE})
    model = type("Stand-in", (), {"config": type("Config", (), {"vision_config": vision})})()
    model.get_vision_position_ids = qwen.Qwen3VLModel.get_vision_position_ids.__get__(model)
    kinds = torch.zeros(1, count, dtype=torch.int32)
    for each in images:
        kinds[0, each.start : each.start + each.num_tokens] = 1
    grids = torch.tensor([each.grid for each in images]) if images else None
    ids = torch.zeros(1, count, dtype=torch.int64)
    positions, deltas = qwen.Qwen3VLModel.get_rope_index(model, ids, kinds, image_grid_thw=grids)
    found = rope_index(count, images)
    assert found.tolist() == positions[:, 0].tolist()
    assert found.max() + 1 - count == int(deltas[0])


def test_positions_of_a_small_picture():
    _, images = lay(2, (1, 4, 6), 2)
    assert rope_index(10, images).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


# --- through a worker


class MRopeNetwork(FakeNetwork):
    """Records the positions that it is given."""

    def __init__(self, device):
        super().__init__(MROPE, device)
        self.seen = []

    def forward(self, inputs):
        assert inputs.rope_positions.shape == (3, len(inputs.input_ids))
        self.seen.append((inputs.rope_positions.clone(), inputs.rope_positions.data_ptr()))
        return super().forward(inputs)


class Blind(NoEncoder):
    """Lets pictures in and does not look at them."""

    accepts_images = True


class MRopeLoader(FakeLoader):
    def read_config(self):
        return MROPE


class MRopeModel(Model):
    def __init__(self, context: DeviceContext) -> None:
        self._context = context

    def load(self):
        return LoadedModel(network=MRopeNetwork(self._context.device), config=MROPE, weight_bytes=4)

    def reload_weights(self, loaded):
        """There are none."""


@pytest.fixture(params=["v1", "v2"])
def make(request):
    made = []

    def factory(model="mrope", **components):
        registry = fake_registry()
        registry.add(roles.LOADER, "mrope", MRopeLoader)
        registry.add(roles.MODEL, "mrope", MRopeModel)
        registry.add(roles.ENCODER, "blind", Blind)
        config = {
            "model": {"source": "mrope", "max_model_len": 64},
            "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 32, "num_speculative_tokens": 2},
            "cache": {"block_size": 4, "num_blocks": 120},
            "components": {
                "runner": request.param,
                "model": model,
                "loader": model,
                "attention": "reference",
                "kernels": ["reference"],
                "tokenizer": "fake",
                "graph": "none",
                "encoder": "blind",
                "speculator": "fake",
                "rejection": "standard",
                **components,
            },
        }
        made.append(assemble(config, registry=registry))
        return made[-1]

    yield factory
    for assembly in made:
        assembly.shutdown()


class Driven:
    def __init__(self, assembly):
        assembly.worker.start()
        self.worker = assembly.worker
        self.network = assembly.value(LoadedModel).network

    def step(self, new=(), cached=None, counts=None, drafts=None, **more):
        cached, drafts = cached or {}, drafts or {}
        counts = {r.req_id: r.prefill_len for r in new} | dict.fromkeys(cached, 1) | (counts or {})
        output = SchedulerOutput(
            new_requests=tuple(new),
            cached_requests=tuple(CachedRequest(req_id=r, num_computed_tokens=n) for r, n in cached.items()),
            num_scheduled_tokens={r: count + drafts.get(r, 0) for r, count in counts.items()},
            scheduled_drafts=drafts,
            **more,
        )
        self.worker.execute_model(output)
        result = self.worker.sample_tokens().get()
        self.lengths = dict(zip(result.req_ids, map(len, result.sampled_token_ids), strict=True))
        return self.network.seen[-1][0]


def new(req_id, count, images=(), blocks=range(1, 13)):
    return NewRequest(
        req_id=req_id,
        token_ids=tuple(range(count)),
        prompt_len=count,
        sampling=GREEDY,
        block_ids=(tuple(blocks),),
        images=tuple(images),
    )


COUNT, IMAGES = lay(3, (1, 4, 6), 2, (1, 2, 8), 3)
KNOWN = rope_index(COUNT, IMAGES)
BEHIND = int(KNOWN.max()) + 1


def test_chunks_decodes_and_drafts_go_on_from_the_prompts_positions(make):
    w = Driven(make())
    request = new("a", COUNT, IMAGES)
    plain = new("b", 4, blocks=range(13, 25))
    rows = w.step([request, plain], counts={"a": 7})
    assert torch.cat([rows[:, :7], rows[:, 7:]], 1).tolist() in (
        [[*line[:7], *range(4)] for line in KNOWN.tolist()],
        [[*range(4), *line[:7]] for line in KNOWN.tolist()],
    )
    rows = w.step(cached={"a": 7, "b": 4}, counts={"a": COUNT - 7})
    assert rows.tolist() == [[4, *line[7:]] for line in KNOWN.tolist()], "decodes come first"
    rows = w.step(cached={"a": COUNT}, drafts={"a": 2})
    assert rows.tolist() == [[BEHIND, BEHIND + 1, BEHIND + 2]] * 3
    accepted = w.lengths["a"]
    rows = w.step(cached={"a": COUNT + accepted})
    assert rows.tolist() == [[BEHIND + accepted]] * 3
    assert len({address for _, address in w.network.seen}) == 1, "graphs find them where they were"


def test_a_slot_that_is_taken_again_has_plain_positions(make):
    w = Driven(make())
    w.step([new("a", COUNT, IMAGES)])
    rows = w.step([new("b", 6)], finished_req_ids=frozenset({"a"}))
    assert rows.tolist() == [list(range(6))] * 3
    assert w.step(cached={"b": 6}).tolist() == [[6]] * 3


def test_a_request_that_returns_has_its_generated_tokens_behind_the_picture(make):
    w = Driven(make())
    w.step([new("a", COUNT, IMAGES)])
    rows = w.step([attrs.evolve(new("a", COUNT + 3, IMAGES), prompt_len=COUNT)], preempted_req_ids=frozenset({"a"}))
    assert rows.tolist() == [[*line, BEHIND, BEHIND + 1, BEHIND + 2] for line in KNOWN.tolist()]
    assert w.step(cached={"a": COUNT + 3}).tolist() == [[BEHIND + 3]] * 3


def test_a_dummy_batch_has_positions_of_its_own(make):
    w = Driven(make())
    w.step([new("a", COUNT, IMAGES)])
    w.worker.execute_dummy_batch()
    assert w.network.seen[-1][0].tolist() == [[0]] * 3
    assert w.step(cached={"a": COUNT}).tolist() == [[BEHIND]] * 3


def test_none_is_refused_by_name(make):
    with pytest.raises(UnsupportedError, match=r"model_state: none.*FakeForCausalLM.*mrope_section.*auto_detect"):
        make(model_state="none").worker.start()


@pytest.mark.parametrize("name", ["auto_detect", "ascend", "none"])
def test_a_plain_decoder_gets_nothing_and_keeps_nothing(make, name):
    assembly = make(model="fake", model_state=name)
    assembly.worker.start()
    part = assembly.get(roles.MODEL_STATE)
    part = getattr(part, "_delegate", part)
    assert not any(torch.is_tensor(value) for value in vars(part).values())
    batch = None  # is not looked at
    assert part.rope_positions(batch) is None
    assert part.recurrent(batch) is None
    assert part.commit(batch, None) is None
    assert part.extras(batch) == {}
