"""Role draft: checkpoints in the official layouts, random drafts, and the target as its own draft."""

import json

import attrs
import pytest
import torch
from oracles import dense_attend, dense_logits
from safetensors.torch import save_file
from tiny_gguf import write_tiny_gguf

from workerkit.components.attention.reference import ReferenceAttention
from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.auto import AutoLoader
from workerkit.components.loader.hf_config import model_config
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.loader.store import LocalModelStore, LocalModelStoreConfig
from workerkit.components.model.decoder import Decoder
from workerkit.components.model.draft import (
    CheckpointDraft,
    CheckpointDraftConfig,
    RandomDraft,
    RandomDraftConfig,
    TargetDraft,
)
from workerkit.components.model.library import NativeLibrary
from workerkit.components.model.native import NativeModel, NativeModelConfig
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, UnsupportedError, WeightError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.draft import HeadsDraft, HiddenDraft
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.sections import LimitsSection, ModelSection, QuantizationSection
from workerkit.framework.interfaces.speculation import DraftWeights
from workerkit.framework.testing.fakes_model import FakeLibrary
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
H, LAYERS, VOCAB = 32, 4, 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS}
EAGLE3 = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 16,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
}


def library():
    return NativeLibrary(OrderedKernels((CpuKernels(), ReferenceKernels())))


def random_tensors(config, seed=0):
    """Of every tensor that a network of this config must have, through its own list."""
    generator = torch.Generator().manual_seed(seed)
    network = library().build(config, torch.float32, CONTEXT.device)
    tensors = {
        name: torch.randn(target.shape, generator=generator) * 0.2
        for name, target in network.required_tensors().items()
    }
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(16) * 2  # 0, 3, 6, …
    return tensors


@pytest.fixture
def store(tmp_path):
    return LocalModelStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "cache"), offline=True))


@pytest.fixture
def save(tmp_path, store):
    """(name, config.json, tensors, or None for random ones; more tensors) -> folder"""

    def run(name, raw, tensors=None, /, **more):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        if tensors is None:
            config = AutoLoader(ModelSection(source=str(folder)), store).read_config()
            tensors = random_tensors(
                attrs.evolve(
                    config,
                    hidden_size=config.hidden_size or H,
                    vocab_size=config.vocab_size or VOCAB,
                    raw={**config.raw, "num_target_layers": config.raw.get("num_target_layers", LAYERS)},
                )
            )
        save_file(tensors | more, folder / "model.safetensors")
        return folder

    return run


@pytest.fixture
def target_folder(save):
    return str(save("target", LLAMA))


@pytest.fixture
def loader(target_folder, store):
    return AutoLoader(ModelSection(source=target_folder), store)


@pytest.fixture
def loaded(loader):
    return load_target(loader)


def load_target(loader):
    kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
    attention = ReferenceAttention(kernels)
    config = NativeModelConfig(progress=False)
    return NativeModel(config, ModelSection(), CONTEXT, loader, library(), attention, kernels).load()


@pytest.fixture
def draft_from(loader, loaded):
    def run(source, quantization="none", **options):
        kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
        section = ModelSection(quantization=QuantizationSection(default=quantization))
        config = CheckpointDraftConfig(source=None if source is None else str(source), progress=False, **options)
        return CheckpointDraft(
            config, section, CONTEXT, loader, library(), loaded, ReferenceAttention(kernels), kernels
        )

    return run


@pytest.fixture
def random_draft(loaded):
    def run(architecture, model_library=None, **options):
        kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
        config = RandomDraftConfig(architecture=architecture, **options)
        attention = ReferenceAttention(kernels)
        return RandomDraft(config, CONTEXT, model_library or library(), loaded, attention, kernels)

    return run


# Loaders


def test_a_loader_reads_another_checkpoint_too(save, loader):
    other = loader.at(str(save("draft", EAGLE3)))
    assert (other.read_config().architecture, loader.read_config().architecture) == (
        "LlamaForCausalLMEagle3",
        "LlamaForCausalLM",
    )
    assert other.count() == len(list(other.weights(other.read_config()))) == 14
    assert loader.count() == 9 * LAYERS + 2


def test_the_random_loader_reads_no_draft():
    with pytest.raises(UnsupportedError, match="loader: random reads no files, so it cannot read somewhere"):
        RandomLoader(RandomLoaderConfig(), LimitsSection()).at("somewhere")


# Checkpoints


def test_eagle3_from_a_folder(save, draft_from, loaded):
    folder = save("draft", EAGLE3, t2d=torch.ones(VOCAB).bool())
    weights = draft_from(folder).load()
    assert isinstance(weights, DraftWeights)
    assert isinstance(weights.network, HiddenDraft)
    assert weights.network.features == ("embed", "layers.0", "layers.2")
    assert torch.equal(weights.network.target_ids, 3 * torch.arange(16))
    (layer,) = weights.attention_layers
    (own,) = weights.network.attention_layers
    assert (layer.index, layer.name) == (LAYERS, "draft.layers.0.self_attn")
    assert attrs.evolve(layer, index=0, name=own.name, is_draft=False) == own
    assert [layer.index for layer in loaded.network.attention_layers] == list(range(LAYERS))


def test_an_eagle_checkpoint_that_calls_itself_llama(save, draft_from):
    """As the authors' own do; the config of the worker says what it is."""
    raw = LLAMA | {"num_hidden_layers": 1}
    tensors = eagle_tensors()
    folder = save("draft", raw, tensors)
    with pytest.raises(WeightError, match=r"components\.draft \(.*draft\): .*does not fit LlamaForCausalLM"):
        draft_from(folder).load()
    weights = draft_from(folder, architecture="EagleLlamaForCausalLM").load()
    assert torch.equal(weights.network.fc.matrix.tensors[0], tensors["fc.weight"])
    assert weights.network.has_embeddings


def eagle_tensors():
    shapes = {
        "embed_tokens": (VOCAB, H),
        "fc": (H, 2 * H),
        "layers.0.self_attn.q_proj": (32, H),
        "layers.0.self_attn.k_proj": (16, H),
        "layers.0.self_attn.v_proj": (16, H),
        "layers.0.self_attn.o_proj": (H, 32),
        "layers.0.mlp.gate_proj": (40, H),
        "layers.0.mlp.up_proj": (40, H),
        "layers.0.mlp.down_proj": (H, 40),
        "layers.0.post_attention_layernorm": (H,),
    }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def test_a_folder_of_speculators_has_the_layers_fields_one_level_down(save, draft_from):
    layer = {key: value for key, value in EAGLE3.items() if key in SIZES} | {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "architectures": ["Qwen3ForCausalLM"],
    }
    raw = {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 16,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    network = draft_from(save("draft", raw)).load().network
    assert network.config.qk_norm
    assert network.layers[0].norm_before_residual
    assert network.features == ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize("fields", [{"medusa_num_heads": 2, "medusa_num_layers": 1}, {"num_heads": 2}])
def test_medusa_heads_take_their_sizes_from_the_target(save, draft_from, fields):
    """The authors' config.json says nothing of the model that the heads belong to."""
    raw = fields if "medusa_num_heads" in fields else fields | {"architectures": ["MedusaModel"], "hidden_size": H}
    weights = draft_from(save("draft", raw)).load()
    assert isinstance(weights.network, HeadsDraft)
    assert weights.attention_layers == ()
    assert weights.network.head_logits(torch.randn(3, H), 1).shape == (3, VOCAB)


def test_mtp_from_the_targets_own_checkpoint(save, store):
    """`source: null`: the target leaves out mtp.*, the draft all else."""
    raw = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    files = AutoLoader(ModelSection(source=str(save("config", raw))), store)
    config = files.read_config()
    head = random_tensors(attrs.evolve(config, architecture="MTPDraftModel"), seed=1)
    loader = AutoLoader(ModelSection(source=str(save("both", raw, random_tensors(config) | head))), store)
    loaded = load_target(loader)
    kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
    draft = CheckpointDraft(
        CheckpointDraftConfig(architecture="MTPDraftModel", progress=False),
        *(ModelSection(), CONTEXT, loader, library(), loaded, ReferenceAttention(kernels), kernels),
    ).load()
    assert torch.equal(draft.network.fc.matrix.tensors[0], head["mtp.fc.weight"])
    assert [layer.index for layer in draft.attention_layers] == [LAYERS]


def test_a_draft_is_not_rounded_to_8_bits_with_its_target(save, draft_from):
    network = draft_from(save("draft", EAGLE3), quantization="w8a8").load().network
    assert network.layers[0].mixer.o_proj.matrix.tensors[0].dtype == torch.float32


def test_a_packed_draft_stays_packed_where_its_target_does(tmp_path, draft_from):
    path = tmp_path / "draft.gguf"
    write_tiny_gguf(path, {}, vocab_size=VOCAB, hidden_size=32, head_dim=16, num_attention_heads=2)
    types = {"keep": torch.uint8, "none": torch.float32, "int8": torch.float32}
    for quantization, dtype in types.items():
        network = draft_from(path, quantization=quantization).load().network
        assert network.layers[0].mixer.o_proj.matrix.tensors[0].dtype == dtype


def test_a_plain_model_as_draft(save, draft_from):
    folder = save("draft", LLAMA | {"num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_size": 16})
    weights = draft_from(folder).load()
    assert isinstance(weights.network, Decoder)
    assert [layer.name for layer in weights.attention_layers] == [
        "draft.model.layers.0.self_attn",
        "draft.model.layers.1.self_attn",
    ]


def test_reloading_fills_the_same_network(save, draft_from):
    part = draft_from(save("draft", EAGLE3))
    draft = part.load()
    before = {name: tensor.clone() for name, tensor in draft.network.weights()}
    for _, tensor in draft.network.weights():
        tensor.zero_()
    part.reload_weights(draft)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.network.weights())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"vocab_size": 50}, "vocab_size is 50, the target's is 48"),
        ({"num_target_layers": 30}, "num_target_layers is 30, the target's is 4"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, the target's is 32"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            "eagle_aux_hidden_state_layer_ids must name some of the .* 4",
        ),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, "did you mean 'LlamaForCausalLMEagle3'"),
        ({"hidden_size": 64}, "fc.weight has shape .*"),
    ],
)
def test_a_draft_of_another_target_is_refused(save, draft_from, fields, text):
    tensors = random_tensors(model_config(EAGLE3, {}, "config.json")) if "hidden_size" in fields else {}
    folder = save("draft", EAGLE3 | fields, tensors)
    with pytest.raises(ModelError, match=rf"(?s)components\.draft \({folder}\): .*{text}"):
        draft_from(folder).load()


def test_final_states_of_another_width_are_refused(save, draft_from):
    raw = EAGLE3 | {"architectures": ["EagleLlamaForCausalLM"], "hidden_size": 24, "draft_vocab_size": VOCAB}
    with pytest.raises(ModelError, match="hidden_size 24 is not the target's, 32, whose final states it reads"):
        draft_from(save("draft", raw, {})).load()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (("embed_tokens.weight", "lm_head.weight"), None),
        (("lm_head.weight",), "no embeddings of its own, and the target's are 32 wide, not 24"),
        (("embed_tokens.weight",), "no head of its own, and the target's are 32 wide, not 24"),
        ((), "no embeddings and no head of its own"),
    ],
)
def test_b42_nothing_is_shared_that_does_not_fit(save, draft_from, own, text):
    raw = EAGLE3 | {"hidden_size": 24, "draft_vocab_size": VOCAB, "target_hidden_size": H}
    folder = save("draft", raw, None, **{name: torch.randn(VOCAB, 24) for name in own})
    if text is None:
        network = draft_from(folder).load().network
        assert network.has_head
        assert network.has_embeddings
    else:
        with pytest.raises(ModelError, match=text):
            draft_from(folder).load()


def test_a_tap_of_the_last_layer_is_refused(save, draft_from):
    """What leaves it is not what the target's hidden state is; ids of DFlash name outputs."""
    raw = EAGLE3 | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [0, LAYERS], "mask_token_id": 1},
    }
    with pytest.raises(ModelError, match=r"reads layers\.4 of its target, which has embed, layers\.0, .*layers\.2$"):
        draft_from(save("draft", raw, {})).load()


# Random drafts


ARCHITECTURES = {
    "EagleLlamaForCausalLM": {},
    "LlamaForCausalLMEagle3": {"fields": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "draft_vocab_size": 10},
    "Qwen3NextMTP": {},
    "MedusaModel": {"fields": {"num_heads": 3}, "draft_vocab_size": 10},
    "DFlashDraftModel": {
        "fields": {"block_size": 4, "mask_token_id": 1, "target_layer_ids": [0, 2]},
        "num_hidden_layers": 2,
        "draft_vocab_size": 10,
    },
    "LlamaForCausalLM": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_drafts(random_draft, architecture):
    part, other = (random_draft(architecture, seed=seed, **ARCHITECTURES[architecture]) for seed in (0, 1))
    draft = part.load()
    tensors = dict(draft.network.weights())
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    again, different = dict(part.load().network.weights()), dict(other.load().network.weights())
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    assert any(not torch.equal(tensor, different[name]) for name, tensor in tensors.items())
    assert [layer.index for layer in draft.attention_layers] == [
        LAYERS + layer.index for layer in draft.network.attention_layers
    ]
    if "draft_vocab_size" in ARCHITECTURES[architecture]:
        ids = draft.network.target_ids
        assert len(ids) == len(set(ids.tolist())) == 10
        assert 0 <= ids.min() <= ids.max() < VOCAB


def test_a_random_draft_computes(random_draft):
    draft = random_draft("LlamaForCausalLMEagle3", **ARCHITECTURES["LlamaForCausalLMEagle3"]).load()
    positions, states = torch.arange(5), draft.network.combine(torch.randn(5, 3 * H))
    state, _ = draft.network.step(torch.randn(5, H), states, positions, positions + 1, dense_attend)
    logits = draft.network.compute_logits(state)
    assert logits.shape == (5, 10)
    assert logits.std() > 0.5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"architecture": "Eagle9"}, "'Eagle9' is not known"),
        ({"architecture": "MedusaModel"}, "num_heads must be an integer >= 1"),
        ({"architecture": "MedusaModel", "fields": {"num_heads": 1, "hidden_size": 3}}, "hidden_size cannot be chosen"),
        ({"architecture": "LlamaForCausalLM", "draft_vocab_size": 4}, "LlamaForCausalLM has no vocabulary of its own"),
    ],
)
def test_random_drafts_that_cannot_be(random_draft, options, text):
    with pytest.raises(ModelError, match=text):
        random_draft(**options).load()


def test_a_network_whose_tensors_have_no_names_cannot_be_made_up(random_draft):
    with pytest.raises(UnsupportedError, match="tensors of FakeForCausalLM are not known by name"):
        random_draft("FakeForCausalLM", FakeLibrary()).load()


# The target itself


def test_the_target_as_its_own_draft(loaded):
    draft = TargetDraft(loaded).load()
    assert draft.network is loaded.network
    assert [layer.index for layer in draft.attention_layers] == [*range(LAYERS, 2 * LAYERS)]
    assert draft.attention_layers[1].name == "draft.model.layers.1.self_attn"
    assert [layer.index for layer in loaded.network.attention_layers] == [*range(LAYERS)]


# In a worker


@pytest.mark.parametrize("draft", ["random", "target", "checkpoint"])
def test_sleep_of_level_2_drops_and_restores_the_drafts_weights(save, target_folder, draft):
    options = {
        "random": {"architecture": "LlamaForCausalLMEagle3", **ARCHITECTURES["LlamaForCausalLMEagle3"]},
        "target": {},
        "checkpoint": {"source": str(save("draft", EAGLE3))},
    }
    config = {
        "model": {"source": target_folder, "dtype": "bfloat16"},
        "cache": {"block_size": 4, "num_blocks": 40},
        "limits": {"max_num_reqs": 2},
        "components": {"draft": {"use": draft, **options[draft]}},
    }
    with assemble(config) as assembly:
        worker = assembly.worker
        worker.start()
        weights = assembly.value(DraftWeights)
        assert len(worker.layout.groups[0].layers) == LAYERS + len(weights.attention_layers)
        network, hidden = weights.network, torch.randn(2, H, dtype=torch.bfloat16)
        logits = network.compute_logits(hidden)
        worker.sleep(2)
        assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in network.weights())
        worker.wake_up()
        assert torch.equal(network.compute_logits(hidden), logits)
        worker.execute_dummy_batch()
        network = assembly.value(LoadedModel).network
        assert dense_logits(network, [1, 2, 3]).isfinite().all()
        worker.sleep(2)
