"""DFlash and DSpark networks against formulas without a cache, and what they refuse."""

import attrs
import block_oracle
import pytest
import torch
from block_oracle import SIZES, BlockOracle, random_weights, raw_config

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.hf_config import model_config
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.errors import IntegrityError, ModelError, WeightError
from workerkit.framework.interfaces.draft import BlockDraft
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

KERNELS = {
    "cpu": lambda: OrderedKernels((CpuKernels(), ReferenceKernels())),
    "reference": lambda: OrderedKernels((ReferenceKernels(),)),
}
EMBED = torch.randn(SIZES["vocab_size"], SIZES["hidden_size"], generator=torch.Generator().manual_seed(8))


def build(raw, kernels="cpu"):
    config = model_config(raw, {}, "config.json")
    return NativeLibrary(KERNELS[kernels]()).build(config, torch.float32, torch.device("cpu"))


def network(raw, weights, kernels="cpu"):
    built = build(raw, kernels)
    built.load_weights(weights.items())
    return built


def drafted(net, features, newest, width, batch=1):
    """The block's states [width, H] by the network: keys and values in a dict, attention dense over all of them."""
    start = len(features)
    stored = {}
    net.write_context(
        features,
        torch.arange(start),
        torch.arange(start) + 1,
        lambda layer, key, value: stored.__setitem__(layer.index, (key, value)),
    )
    assert sorted(stored) == [layer.index for layer in net.attention_layers]

    def attend(layer, query, key, value):
        keys, values = (
            torch.cat((old, new)).repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
            for old, new in zip(stored[layer.index], (key, value), strict=True)
        )
        scores = torch.einsum("qnd,snd->nqs", query, keys) * layer.scale
        return torch.einsum("nqs,snd->qnd", scores.softmax(-1), values)

    table = net.embed(torch.arange(SIZES["vocab_size"])) if net.has_embeddings else EMBED
    mask = None if net.mask_token_id is None else table[net.mask_token_id]
    embeds = net.block_embeds(table[torch.tensor([newest, newest + 1])], mask)
    assert embeds.shape == (2, net.block_size, SIZES["hidden_size"])
    positions = torch.arange(start, start + width)
    return net.run_block(embeds[0, :width], positions, positions + 1, attend)


def features(count, raw, seed=1):
    ids = raw["dflash_config"]["target_layer_ids"]
    return torch.randn(count, len(ids) * SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


BACKBONES = {
    "official: q/k norm, everything shared": (raw_config(mask_token_id=7), ()),
    "no q/k norm, own mask, head and draft vocabulary": (
        raw_config(qk_norm=False, draft_vocab_size=20),
        ("mask_embedding", "lm_head.weight", "d2t"),
    ),
    "own embeddings, biases": (
        raw_config("DSparkDraftModel", attention_bias=True, mask_token_id=3),
        ("embed_tokens.weight", "lm_head.weight"),
    ),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_block_sees_context_and_itself_in_both_directions(name, kernels):
    raw, own = BACKBONES[name]
    weights = random_weights(raw, own)
    net = network(raw, weights, kernels)
    assert isinstance(net, BlockDraft)
    for width in (raw["block_size"], 3):
        states = features(6, raw)
        expected = BlockOracle(raw, weights, EMBED).run(states, 11, width)
        torch.testing.assert_close(drafted(net, states, 11, width).double(), expected, atol=2e-4, rtol=1e-3)
    assert net.has_embeddings == ("embed_tokens.weight" in own)
    assert net.has_head == ("lm_head.weight" in own)
    if net.has_head:
        logits = net.compute_logits(torch.ones(1, SIZES["hidden_size"]))
        assert (logits.dtype, logits.shape[1]) == (torch.float32, raw.get("draft_vocab_size", SIZES["vocab_size"]))
        torch.testing.assert_close(logits[0], weights["lm_head.weight"].sum(1), atol=1e-4, rtol=1e-4)


def test_without_a_context_the_block_stands_alone():
    raw = raw_config(mask_token_id=7)
    weights = random_weights(raw, ())
    states = features(0, raw)
    expected = BlockOracle(raw, weights, EMBED).run(states, 4, 5)
    torch.testing.assert_close(drafted(network(raw, weights), states, 4, 5).double(), expected, atol=2e-4, rtol=1e-3)


def test_keys_are_computed_once_and_by_token_alone():
    """A chunk's context is what the whole text's is there."""
    raw = raw_config()
    net = network(raw, random_weights(raw))
    states, positions = features(7, raw), torch.arange(7)
    runs = []
    for rows in (slice(0, 7), slice(3, 5)):
        run = []
        net.write_context(
            states[rows], positions[rows], positions[rows] + 1, lambda layer, k, v, run=run: run.append((k, v))
        )
        runs.append(run)
    for (whole_key, whole_value), (key, value) in zip(*runs, strict=True):
        torch.testing.assert_close(key, whole_key[3:5], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(value, whole_value[3:5], atol=1e-5, rtol=1e-4)
        assert key.shape == (2, SIZES["num_key_value_heads"], SIZES["head_dim"])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_and_confidence(kind):
    raw = raw_config(
        "DSparkDraftModel", markov_rank=6, markov_head_type=kind, draft_vocab_size=20, layer_ids=(1,), block_size=4
    )
    weights = random_weights(
        raw, ("mask_embedding", "lm_head.weight", "d2t"), confidence=SIZES["hidden_size"] + raw["markov_rank"]
    )
    net, oracle = network(raw, weights), BlockOracle(raw, weights)
    hidden = torch.randn(2, 4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    state, expected_states = None, [None, None]
    for number in range(4):
        previous = torch.tensor([5 + number, 60 - number])
        base = net.compute_logits(hidden[:, number])
        corrected, state = net.correct(base, previous, hidden[:, number], state)
        sure = net.confidence(hidden[:, number], previous)
        assert (corrected.dtype, sure.dtype) == (torch.float32, torch.float32)
        for row in range(2):
            step = hidden[row, number].double()
            bias, expected_states[row] = oracle.markov(int(previous[row]), step, expected_states[row])
            torch.testing.assert_close(corrected[row].double(), base[row].double() + bias, atol=1e-4, rtol=1e-4)
            assert float(sure[row]) == pytest.approx(oracle.confidence(int(previous[row]), step), abs=1e-5)
    assert (state is not None) == (kind == "rnn")


def test_confidence_without_markov_and_none_at_all():
    """`confidence_head_with_markov: false` shows in the tensor's width."""
    raw = raw_config("Qwen3DSparkModel", markov_rank=6, markov_head_type="vanilla")
    weights = random_weights(raw, confidence=SIZES["hidden_size"])
    hidden, previous = torch.randn(1, SIZES["hidden_size"]), torch.tensor([3])
    sure = network(raw, weights).confidence(hidden, previous)
    assert float(sure) == pytest.approx(BlockOracle(raw, weights).confidence(3, hidden[0].double()), abs=1e-5)
    assert network(raw, random_weights(raw)).confidence(hidden, previous) is None
    plain = raw_config("DSparkDraftModel")
    logits = torch.randn(1, 9)
    assert network(plain, random_weights(plain)).correct(logits, previous, hidden, None) == (logits, None)


def test_what_the_configs_say():
    def features_of(**fields):
        raw = {name: value for name, value in raw_config(**fields).items() if name != "dflash_config"}
        return build(raw).features

    net = build(raw_config())
    assert net.features == ("embed", "layers.1", "layers.3"), "ids are layers' outputs, -1 the embeddings"
    assert (net.block_size, net.samples_from_anchor) == (5, False)
    assert build(raw_config("DSparkDraftModel")).samples_from_anchor
    assert not build(raw_config("Qwen3DSparkModel", sample_from_anchor=False)).samples_from_anchor
    assert features_of(target_layer_ids=[0, 2]) == ("layers.0", "layers.2"), "DeepSpec's place"
    assert features_of(aux_hidden_state_layer_ids=[0, 2]) == ("embed", "layers.1"), "speculators: layers entered"
    assert features_of(num_target_layers=36, num_hidden_layers=5) == tuple(f"layers.{i}" for i in (1, 9, 17, 25, 33))
    assert features_of(num_target_layers=30, num_hidden_layers=1) == ("layers.15",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dflash_config": {"mask_token_id": 1}, "mask_token_id": 2}, 1),
        ({"mask_token_id": 2, "dspark_noise_token_id": 3}, 2),
        ({"dspark_noise_token_id": 3, "pard_token": 4}, 3),
        ({"pard_token": 4, "ptd_token_id": 5}, 4),
        ({"ptd_token_id": 0}, 0),
        ({}, None),
    ],
)
def test_mask_token_ids_are_looked_up_in_order(fields, expected):
    raw = raw_config()
    raw["dflash_config"] = raw["dflash_config"] | fields.pop("dflash_config", {})
    assert build(raw | fields).mask_token_id == expected


def test_an_own_mask_embedding_wins_over_the_token():
    raw = raw_config(mask_token_id=7)
    assert network(raw, random_weights(raw, ())).mask_token_id == 7
    assert network(raw, random_weights(raw, ("mask_embedding",))).mask_token_id is None


def test_b42_the_draft_keeps_its_own_head_and_maps_its_ids():
    """d2t holds offsets; a hidden state that only the head's row 3 answers to is the target's id 3 + d2t[3]."""
    raw = raw_config(draft_vocab_size=20)
    weights = random_weights(raw, ("mask_embedding", "lm_head.weight", "d2t"))
    net = network(raw, weights)
    assert net.has_head
    index = int(net.compute_logits(weights["lm_head.weight"][3:4] * 10)[0].argmax())
    assert index == 3
    assert int(net.target_ids[3]) == 3 + int(weights["d2t"][3])
    assert net.target_ids.dtype == torch.int64


def test_weights_are_filled_in_place_again():
    """Sleep at level 2: plain tensors in the same memory, matrices made anew, optional tensors too."""
    raw = raw_config("DSparkDraftModel", draft_vocab_size=20, markov_rank=4)
    own = ("mask_embedding", "lm_head.weight", "d2t")
    weights = random_weights(raw, own, confidence=SIZES["hidden_size"])
    net = network(raw, weights)
    expected = {name: tensor.clone() for name, tensor in net.weights()}
    states = features(4, raw)
    before = drafted(net, states, 3, 4)
    net.release()
    places = {name: tensor.data_ptr() for name, tensor in net.weights()}
    for name, tensor in net.weights():
        if "inv_freq" not in name:
            tensor.zero_()
    net.load_weights(weights.items())
    again = dict(net.weights())
    assert {name: again[name].data_ptr() for name in places} == places
    for name, tensor in net.weights():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(drafted(net, states, 3, 4), before)


def test_training_tensors_and_prefixes_are_passed_over():
    raw = raw_config()
    weights = {f"model.{name}": tensor for name, tensor in random_weights(raw).items()}
    weights |= {"t2d": torch.ones(64, dtype=torch.bool), "verifier_lm_head.weight": torch.ones(64, 32)}
    assert network(raw, weights).mask_token_id is None


def test_wrong_checkpoints_are_refused_with_everything_that_is_wrong():
    raw = raw_config(draft_vocab_size=20)
    weights = random_weights(raw, ())
    del weights["fc.weight"]
    weights |= {"extra.weight": torch.ones(1), "d2t": torch.zeros(19, dtype=torch.int64)}
    with pytest.raises(WeightError) as error:
        network(raw, weights)
    for part in (
        "missing tensor fc.weight",
        "unexpected tensor extra.weight",
        "d2t has shape [19], not [20]",
    ):
        assert part in str(error.value)
    with pytest.raises(WeightError) as error:
        network(raw, random_weights(raw, ()))
    assert "missing tensor lm_head.weight [20, 32]" in str(error.value)
    assert "missing tensor d2t [20]" in str(error.value)
    with pytest.raises(WeightError, match="missing tensor mask_embedding, as the config has none of mask_token_id"):
        network(raw_config(), random_weights(raw, ()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention"),
        ({"block_size": None}, "block_size must be an integer"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dflash_config": {"target_layer_ids": [1], "causal": True}}, "causal is not supported"),
        ({"dflash_config": {"target_layer_ids": [-2]}}, "-1 its embeddings"),
        ({"dflash_config": {}, "num_target_layers": None}, "num_target_layers"),
        ({"mask_token_id": 64}, "mask_token_id 64 is none of 64 tokens"),
        ({"architectures": ["DSparkDraftModel"], "markov_rank": 4, "markov_head_type": "gatet"}, "gated"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(fields, message):
    with pytest.raises(ModelError, match=message):
        build(raw_config() | fields)


def test_what_it_has_not_it_does_not_do():
    raw = raw_config(mask_token_id=1)
    net = network(raw, random_weights(raw, ()))
    with pytest.raises(IntegrityError, match="use the target's"):
        net.embed(torch.tensor([1]))
    with pytest.raises(IntegrityError, match="use the target's"):
        net.compute_logits(torch.ones(1, SIZES["hidden_size"]))
    assert net.tap_points == ()
    assert attrs.asdict(net.config)["qk_norm"] is True, "the default of official checkpoints"
    assert block_oracle.NUM_TARGET_LAYERS == 5
