"""EAGLE, EAGLE-3, MTP and Medusa against their formulas in plain torch, with the official names of their weights."""

import pytest
import torch
from oracles import dense_attend

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.errors import IntegrityError, ModelError, WeightError
from workerkit.framework.interfaces.draft import HeadsDraft, HiddenDraft
from workerkit.framework.interfaces.model import ModelConfig, MoEConfig, RopeConfig
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

CPU = torch.device("cpu")
H, INNER, HEADS, KV_HEADS, D, VOCAB, DRAFT_VOCAB, TOKENS = 32, 48, 4, 2, 8, 40, 12, 9
THETA, EPS = 500.0, 1e-5
EXPERTS = MoEConfig(
    num_experts=5,
    num_experts_per_tok=2,
    intermediate_size=20,
    normalize=False,
    shared_intermediate_size=12,
    sparse_layers=(0, 1),
)


def config(architecture, num_layers=1, **raw):
    qk_norm, moe = raw.pop("qk_norm", False), raw.pop("moe", None)
    return ModelConfig(
        architecture=architecture,
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=D,
        rms_norm_eps=EPS,
        max_position_embeddings=64,
        rope=RopeConfig(rotary_dim=D, theta=THETA, original_max_position=64),
        qk_norm=qk_norm,
        moe=moe,
        raw=raw,
    )


def build(architecture, num_layers=1, **raw):
    kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
    return NativeLibrary(kernels).build(config(architecture, num_layers, **raw), torch.float32, CPU)


def filled(architecture, weights, num_layers=1, **raw):
    network = build(architecture, num_layers, **raw)
    for _, tensor in network.weights():  # what the checkpoint does not fill would show
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    network.load_weights(weights.items())
    return network


def random(*shape):
    return torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3) + (len(shape) == 1)


def layer_weights(prefix, width=H, input_norm=True, qk_norm=False):
    names = {
        "self_attn.q_proj": (HEADS * D, width),
        "self_attn.k_proj": (KV_HEADS * D, width),
        "self_attn.v_proj": (KV_HEADS * D, width),
        "self_attn.o_proj": (H, HEADS * D),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
        "post_attention_layernorm": (H,),
    }
    if input_norm:
        names["input_layernorm"] = (H,)
    if qk_norm:
        names |= {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)}
    return {f"{prefix}{name}.weight": random(*shape) for name, shape in names.items()}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


# The formulas again, each in the simplest way


def rms(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x, positions):
    angles = positions[:, None, None] * THETA ** (-torch.arange(0, D, 2) / D)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attention(w, prefix, x, positions):
    q, *gate = (x @ w[prefix + "q_proj.weight"].T).view(len(x), HEADS, -1).split(D, -1)
    k = (x @ w[prefix + "k_proj.weight"].T).view(-1, KV_HEADS, D)
    v = (x @ w[prefix + "v_proj.weight"].T).view(-1, KV_HEADS, D).repeat_interleave(HEADS // KV_HEADS, 1)
    if prefix + "q_norm.weight" in w:
        q, k = rms(q, w[prefix + "q_norm.weight"]), rms(k, w[prefix + "k_norm.weight"])
    q, k = rotate(q, positions), rotate(k, positions).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    if gate:
        out = out * gate[0].sigmoid()
    return out.flatten(1) @ w[prefix + "o_proj.weight"].T


def mlp(w, prefix, x):
    gate = torch.nn.functional.silu(x @ w[prefix + "gate_proj.weight"].T)
    return (gate * (x @ w[prefix + "up_proj.weight"].T)) @ w[prefix + "down_proj.weight"].T


def experts(w, prefix, x):
    """Those with the largest probabilities, which do not add up to 1, and the shared one behind a gate of its own."""
    rows = []
    for row in x:
        probs = (w[prefix + "gate.weight"] @ row).softmax(-1)
        best = probs.topk(EXPERTS.num_experts_per_tok).indices.tolist()
        routed = sum(probs[e] * mlp(w, f"{prefix}experts.{e}.", row) for e in best)
        gate = (w[prefix + "shared_expert_gate.weight"] @ row).sigmoid()
        rows.append(routed + gate * mlp(w, prefix + "shared_expert.", row))
    return torch.stack(rows)


def decoder_layer(w, prefix, x, positions, norm_first=True):
    read = rms(x, w[prefix + "input_layernorm.weight"]) if norm_first else x
    x = x + attention(w, prefix + "self_attn.", read, positions)
    second = experts if prefix + "mlp.gate.weight" in w else mlp
    return x + second(w, prefix + "mlp.", rms(x, w[prefix + "post_attention_layernorm.weight"]))


def step(network, embeds, hidden):
    """`step` for positions that do not start at 0; neither input may change."""
    positions = torch.arange(3, 3 + TOKENS)
    before = embeds.clone(), hidden.clone()
    got = network.step(embeds, hidden, positions, torch.full_like(positions, 64), dense_attend)
    assert torch.equal(embeds, before[0])
    assert torch.equal(hidden, before[1])
    return positions, *got


def close(got, expected):
    assert expected.std() > 0.1  # values that are all near 0 would prove nothing
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


# EAGLE


def eagle_weights(num_layers=1, bias=True):
    w = {"fc.weight": random(H, 2 * H)}
    if bias:
        w["fc.bias"] = torch.randn(H)
    for index in range(num_layers):
        w |= layer_weights(f"layers.{index}.", input_norm=index > 0)
    return w


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle(bias, num_layers):
    w = eagle_weights(num_layers, bias)
    network = filled("EagleLlamaForCausalLM", w, num_layers)
    assert isinstance(network, HiddenDraft)
    assert network.features == ()
    assert [layer.index for layer in network.attention_layers] == list(range(num_layers))
    embeds, hidden = torch.randn(TOKENS, H), torch.randn(TOKENS, H)
    assert torch.equal(network.combine(hidden), hidden)
    positions, state, carried = step(network, embeds, hidden)
    x = torch.cat([embeds, hidden], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    for index in range(num_layers):
        x = decoder_layer(w, f"layers.{index}.", x, positions, norm_first=index > 0)
    close(state, x)
    assert torch.equal(state, carried)
    assert not network.has_head
    assert not network.has_embeddings
    assert network.target_ids is None


def test_eagle_of_speculators_with_norms_of_both_inputs():
    """fusion_fc, transformer., pre_lm_head_layernorm; `add_para_norm` is HASS."""
    w = eagle_weights(bias=False) | {name: random(H) for name in ("embedding", "hidden")}
    theirs = {"fc.weight": "fusion_fc.weight", "embedding": "embedding_layernorm.weight"}
    theirs["hidden"] = "pre_lm_head_layernorm.weight"
    stored = {theirs.get(name, name.replace("layers.0.", "transformer.")): tensor for name, tensor in w.items()}
    network = filled("EagleSpeculator", stored, add_para_norm=True)
    embeds, hidden = torch.randn(TOKENS, H), torch.randn(TOKENS, H)
    positions, state, _ = step(network, embeds, hidden)
    x = torch.cat([rms(embeds, w["embedding"]), rms(hidden, w["hidden"])], -1) @ w["fc.weight"].T
    close(state, decoder_layer(w, "layers.0.", x, positions, norm_first=False))


def test_b91_embeddings_of_the_checkpoint_are_used():
    """A draft that brings its embeddings uses them, whatever the target has."""
    w = eagle_weights() | {"embed_tokens.weight": torch.randn(VOCAB, H)}
    network = filled("EagleLlamaForCausalLM", w)
    assert network.has_embeddings
    ids = torch.tensor([3, 0, 39])
    assert torch.equal(network.embed(ids), w["embed_tokens.weight"][ids])


# EAGLE-3


def eagle3_weights(first="midlayer.", num_layers=1, streams=3, draft_vocab=DRAFT_VOCAB, width=H):
    w = {"fc.weight": random(H, streams * width), "norm.weight": random(H)}
    w |= layer_weights(first, width=2 * H) | {f"{first}hidden_norm.weight": random(H)}
    for index in range(1, num_layers):
        w |= layer_weights(f"layers.{index}.")
    if draft_vocab < VOCAB:
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
        w["d2t"] = ids - torch.arange(draft_vocab)
        w["t2d"] = torch.zeros(VOCAB).index_fill(0, ids, 1).bool()
        w["lm_head.weight"] = random(draft_vocab, H)
    return w


IDS = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "draft_vocab_size": DRAFT_VOCAB}


def eagle3_oracle(w, first, embeds, u, positions, num_layers=1, before=False):
    normed = rms(u, w[first + "hidden_norm.weight"])
    x = torch.cat([rms(embeds, w[first + "input_layernorm.weight"]), normed], -1)
    r = (normed if before else u) + attention(w, first + "self_attn.", x, positions)
    r = r + mlp(w, first + "mlp.", rms(r, w[first + "post_attention_layernorm.weight"]))
    for index in range(1, num_layers):
        r = decoder_layer(w, f"layers.{index}.", r, positions)
    return rms(r, w["norm.weight"]), r


@pytest.mark.parametrize("first", ["midlayer.", "layers.0.", "model.layers.0."])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle3(first, before, num_layers):
    w = eagle3_weights(first, num_layers)
    network = filled("LlamaForCausalLMEagle3", w, num_layers, norm_before_residual=before, **IDS)
    assert isinstance(network, HiddenDraft)
    assert network.features == ("embed", "layers.1", "layers.4")  # what leaves the layer before enters the next
    features, embeds = torch.randn(TOKENS, 3 * H), torch.randn(TOKENS, H)
    u = network.combine(features)
    close(u, features @ w["fc.weight"].T)
    positions, state, carried = step(network, embeds, u)
    expected, stream = eagle3_oracle(w, first, embeds, u, positions, num_layers, before)
    close(state, expected)
    close(carried, stream)
    # its own state is what it goes on from
    _, again, _ = step(network, embeds, carried)
    close(again, eagle3_oracle(w, first, embeds, stream, positions, num_layers, before)[0])
    close(network.compute_logits(state), expected @ w["lm_head.weight"].T)


def test_b42_own_head_and_offsets_to_target_ids():
    """A draft vocabulary of 12 in 40: its head is its own, and `d2t` holds distances, not ids."""
    w = eagle3_weights()
    network = filled("LlamaForCausalLMEagle3", w, **IDS)
    assert network.has_head
    expected = w["t2d"].nonzero()[:, 0]
    assert torch.equal(network.target_ids, expected)
    hidden = w["lm_head.weight"][7:8] * 50  # points to draft id 7
    assert network.target_ids[network.compute_logits(hidden).argmax(-1)] == expected[7]
    network.load_weights(w.items())  # offsets are added once
    assert torch.equal(network.target_ids, expected)


def test_b42_without_a_head_the_targets_is_used():
    network = filled("LlamaForCausalLMEagle3", eagle3_weights(draft_vocab=VOCAB), **IDS | {"draft_vocab_size": VOCAB})
    assert not network.has_head
    assert network.target_ids is None
    with pytest.raises(IntegrityError, match="use the target's"):
        network.compute_logits(torch.randn(1, H))
    with pytest.raises(IntegrityError, match="use the target's"):
        network.embed(torch.tensor([0]))


@pytest.mark.parametrize("offsets", ["none", "zeros", "permutation"])
def test_own_head_for_the_whole_vocabulary(offsets):
    w = eagle3_weights(draft_vocab=VOCAB) | {"lm_head.weight": random(VOCAB, H)}
    ids = torch.arange(VOCAB) if offsets == "zeros" else torch.randperm(VOCAB)
    if offsets != "none":
        w["d2t"] = ids - torch.arange(VOCAB)
    network = filled("LlamaForCausalLMEagle3", w, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert network.has_head
    assert (network.target_ids is None) == (offsets != "permutation")
    if offsets == "permutation":
        assert torch.equal(network.target_ids, ids)


def test_b138_attention_reads_2h_and_returns_h():
    network = filled("LlamaForCausalLMEagle3", eagle3_weights(), **IDS)
    first = network.layers[0]
    assert first.mixer.qkv_proj.matrix.tensors[0].shape == ((HEADS + 2 * KV_HEADS) * D, 2 * H)
    assert first.mixer.o_proj.matrix.tensors[0].shape == (H, HEADS * D)
    positions, state, carried = step(network, torch.randn(TOKENS, H), torch.randn(TOKENS, H))
    assert state.shape == carried.shape == (len(positions), H)


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_eagle3_norms_around_fc(place):
    """norm_before_fc norms the streams side by side, fc_norm each of them; norm_output feeds the normed state back."""
    features = torch.randn(TOKENS, 3 * H) * torch.tensor([1.0, 3.0, 9.0]).repeat_interleave(H)

    def fields(**values):
        return values if place == "top" else {"eagle_config": values}

    w = eagle3_weights() | {"input_norm.weight": random(3 * H)}
    network = filled("Eagle3Speculator", w, **IDS, **fields(norm_before_fc=True))
    close(network.combine(features), rms(features, w["input_norm.weight"]) @ w["fc.weight"].T)

    w = eagle3_weights() | {f"fc_norm.{index}.weight": random(H) for index in range(3)}
    network = filled("Eagle3Speculator", w, **IDS, **fields(fc_norm=True, norm_output=True))
    parts = [rms(part, w[f"fc_norm.{index}.weight"]) for index, part in enumerate(features.chunk(3, -1))]
    close(network.combine(features), torch.cat(parts, -1) @ w["fc.weight"].T)
    _, state, carried = step(network, torch.randn(TOKENS, H), torch.randn(TOKENS, H))
    assert torch.equal(state, carried)

    with pytest.raises(ModelError, match="exclude each other"):
        build("Eagle3Speculator", **IDS, **fields(norm_before_fc=True, fc_norm=True))


def test_eagle3_of_a_wider_target():
    w = eagle3_weights(streams=2, width=48) | {"embed_tokens.weight": torch.randn(VOCAB, H)}
    ids = IDS | {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    network = filled("Eagle3DraftModel", w, target_hidden_size=48, **ids)
    features = torch.randn(TOKENS, 96)
    close(network.combine(features), features @ w["fc.weight"].T)


def test_eagle3_layer_ids_by_default():
    network = build("LlamaForCausalLMEagle3", num_target_layers=30)
    assert network.features == ("layers.1", "layers.14", "layers.26")  # entering 2, 15 and 27


@pytest.mark.parametrize("ids", [[0, 1, 6], [-1, 1, 2], [], [1, "2", 3], [True, 1, 2], 3])
def test_eagle3_layer_ids_that_the_target_does_not_have(ids):
    """Layer 6 of 6 would be what leaves the last layer."""
    with pytest.raises(ModelError, match=r"eagle_aux_hidden_state_layer_ids must name some of the target's 6 layers"):
        build("LlamaForCausalLMEagle3", num_target_layers=6, eagle_aux_hidden_state_layer_ids=ids)


def test_default_layer_ids_of_a_target_with_too_few_layers():
    with pytest.raises(ModelError, match=r"eagle_aux_hidden_state_layer_ids.*not \[2, 1, -1\]"):
        build("LlamaForCausalLMEagle3", num_target_layers=2)
    with pytest.raises(ModelError, match="neither eagle_aux_hidden_state_layer_ids nor num_target_layers"):
        build("LlamaForCausalLMEagle3")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size must be an integer >= 1, not 0"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 is more than vocab_size 40"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false, not 'yes'"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state false is not supported"),
    ],
)
def test_fields_that_are_wrong_are_named(raw, text):
    with pytest.raises(ModelError, match=text):
        build("LlamaForCausalLMEagle3", **IDS | raw)


# MTP


def mtp_weights(qk_norm, gated=False, moe=False):
    w = {"mtp.fc.weight": random(H, 2 * H)} | layer_weights("mtp.layers.0.", qk_norm=qk_norm)
    if gated:
        w["mtp.layers.0.self_attn.q_proj.weight"] = random(2 * HEADS * D, H)
    if moe:
        room, inner, shared = "mtp.layers.0.mlp.", EXPERTS.intermediate_size, EXPERTS.shared_intermediate_size
        w = {name: tensor for name, tensor in w.items() if not name.startswith(room)}
        w |= {f"{room}gate.weight": random(EXPERTS.num_experts, H), f"{room}shared_expert_gate.weight": random(1, H)}
        sizes = {f"experts.{expert}": inner for expert in range(EXPERTS.num_experts)} | {"shared_expert": shared}
        for name, size in sizes.items():
            shapes = {"gate_proj": (size, H), "up_proj": (size, H), "down_proj": (H, size)}
            w |= {f"{room}{name}.{end}.weight": random(*shape) for end, shape in shapes.items()}
    return w | {f"mtp.{name}.weight": random(H) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}


def speculators_name(name):
    changes = {
        "mtp.fc": "mtp_layers.0.input_proj",
        "mtp.pre_fc_norm_hidden": "mtp_layers.0.hidden_layernorm",
        "mtp.pre_fc_norm_embedding": "mtp_layers.0.token_layernorm",
        "mtp.norm": "mtp_layers.0.final_layernorm",
        "mtp.layers.0.": "mtp_layers.0.",
    }
    ours = next(key for key in changes if name.startswith(key))
    return changes[ours] + name.removeprefix(ours)


@pytest.mark.parametrize(
    ("architecture", "raw", "one"),
    [
        ("Qwen3NextMTP", {"moe": EXPERTS}, 1),
        ("Qwen3_5MTP", {}, 1),
        ("MTPDraftModel", {"model_type": "qwen3_5_text"}, 1),
        ("MTPDraftModel", {"model_type": "qwen3", "qk_norm": True}, 0),
        ("MTPDraftModel", {"model_type": "llama"}, 0),
    ],
)
@pytest.mark.parametrize("names", ["mtp", "speculators"])
def test_mtp(architecture, raw, one, names):
    """Queries of Qwen3-Next come with gates, and its norms multiply by 1 + weight; the rest of the checkpoint is the
    target."""
    w = mtp_weights(qk_norm=raw.get("model_type") != "llama", gated=bool(one), moe="moe" in raw)
    stored = w if names == "mtp" else {speculators_name(name): tensor for name, tensor in w.items()}
    rest = {"model.embed_tokens.weight": torch.zeros(1), "model.layers.0.mlp.up_proj.weight": torch.zeros(1)}
    network = filled(architecture, rest | stored | {"lm_head.weight": torch.zeros(1)}, num_layers=24, **raw)
    assert isinstance(network, HiddenDraft)
    assert network.features == ()
    assert len(network.attention_layers) == 1
    embeds, hidden = torch.randn(TOKENS, H), torch.randn(TOKENS, H)
    positions, state, carried = step(network, embeds, network.combine(hidden))
    w = {name: tensor + one if "norm" in name else tensor for name, tensor in w.items()}
    inputs = (
        rms(embeds, w["mtp.pre_fc_norm_embedding.weight"]),
        rms(hidden, w["mtp.pre_fc_norm_hidden.weight"]),
    )
    z = torch.cat(inputs, -1) @ w["mtp.fc.weight"].T
    expected = rms(decoder_layer(w, "mtp.layers.0.", z, positions), w["mtp.norm.weight"])
    close(state, expected)
    assert torch.equal(state, carried)
    assert not network.has_head
    network.load_weights(stored.items())  # 1 is added once
    close(step(network, embeds, hidden)[1], expected)


def test_mtp_with_experts_that_lie_stacked():
    w = mtp_weights(qk_norm=True, gated=True, moe=True)
    single, room = dict(w), "mtp.layers.0.mlp.experts."
    parts = {
        end: torch.stack([w.pop(f"{room}{number}.{end}.weight") for number in range(EXPERTS.num_experts)])
        for end in ("gate_proj", "up_proj", "down_proj")
    }
    w[f"{room}gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
    w[f"{room}down_proj"] = parts["down_proj"]
    inputs = torch.randn(TOKENS, H), torch.randn(TOKENS, H)
    one, other = (step(filled("Qwen3_5MTP", tensors, moe=EXPERTS), *inputs)[1] for tensors in (single, w))
    assert torch.equal(one, other)


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_mtp_of_several_layers_is_refused(field):
    with pytest.raises(ModelError, match=f"{field} 2 is not supported"):
        build("Qwen3NextMTP", **{field: 2})


def test_a_target_ignores_the_mtp_head_in_its_checkpoint():
    network = build("LlamaForCausalLM")
    weights = {name: torch.randn(place.shape) for name, place in network.required_tensors().items()}
    network.load_weights([*weights.items(), ("mtp.fc.weight", torch.zeros(3))])
    assert torch.equal(network.embed(torch.tensor([3])), weights["model.embed_tokens.weight"][3:4])


# Medusa


def medusa_weights(num_heads, num_layers, bias, vocab=VOCAB):
    w = {f"lm_heads.{k}.weight": random(vocab, H) for k in range(num_heads)}
    for k in range(num_heads):
        for j in range(num_layers):
            w[f"blocks.{k}.layers.{j}.weight"] = random(H, H)
            if bias:
                w[f"blocks.{k}.layers.{j}.bias"] = torch.randn(H)
    return w


def authors_name(name, num_layers):
    kind, k, *rest = name.split(".")
    return f"{k}.{num_layers}.weight" if kind == "lm_heads" else f"{k}.{rest[1]}.linear.{rest[2]}"


def medusa_oracle(w, hidden, head, num_layers):
    for j in range(num_layers):
        prefix = f"blocks.{head}.layers.{j}."
        hidden = hidden + torch.nn.functional.silu(hidden @ w[prefix + "weight"].T + w.get(prefix + "bias", 0))
    return hidden @ w[f"lm_heads.{head}.weight"].T


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("names", ["authors", "authors, heads alone", "vllm", "vllm, prefixed"])
def test_medusa(num_layers, names):
    bias = names.startswith("authors")
    w = medusa_weights(3, num_layers, bias)
    prefix = {"authors": "medusa_head.", "vllm, prefixed": "medusa_heads."}.get(names, "")
    stored = {prefix + (authors_name(name, num_layers) if bias else name): tensor for name, tensor in w.items()}
    fields = {"medusa_num_heads": 3, "medusa_num_layers": num_layers} if bias else {"num_heads": 3}
    network = filled("MedusaModel", stored, 1 if bias else num_layers, **fields)
    assert isinstance(network, HeadsDraft)
    assert (network.num_heads, network.features, network.attention_layers) == (3, (), ())
    assert network.target_ids is None
    hidden = torch.randn(TOKENS, H)
    for head in range(3):
        got = network.head_logits(hidden, head)
        assert got.dtype == torch.float32
        close(got, medusa_oracle(w, hidden, head, num_layers))


def test_medusa_with_a_truncated_vocabulary():
    w = medusa_weights(2, 1, False, DRAFT_VOCAB)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB]
    network = filled("MedusaModel", w | {"token_map": ids}, num_heads=2, truncated_vocab_size=DRAFT_VOCAB)
    assert torch.equal(network.target_ids, ids)
    network.load_weights((w | {"token_map": ids}).items())
    assert torch.equal(network.target_ids, ids)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_medusa_with_one_head_for_all(name):
    w = medusa_weights(2, 1, False)
    w["lm_heads.1.weight"] = w["lm_heads.0.weight"]
    blocks = {key: tensor for key, tensor in w.items() if key.startswith("blocks")}
    network = filled("MedusaModel", blocks | {name: w["lm_heads.0.weight"]}, num_heads=2, original_lm_head=True)
    hidden = torch.randn(TOKENS, H)
    for head in range(2):
        close(network.head_logits(hidden, head), medusa_oracle(w, hidden, head, 1))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({}, "num_heads must be an integer >= 1, not None"),
        ({"medusa_num_heads": 0}, "medusa_num_heads must be an integer >= 1, not 0"),
        ({"num_heads": 2, "truncated_vocab_size": 41}, "truncated_vocab_size 41 is more than vocab_size 40"),
    ],
)
def test_medusa_fields_that_are_wrong_are_named(raw, text):
    with pytest.raises(ModelError, match=text):
        build("MedusaModel", **raw)


# Checkpoints that do not fit


def problems(network, weights):
    with pytest.raises(WeightError) as error:
        network.load_weights(weights.items())
    return str(error.value).split("\n  - ")[1:]


def test_all_problems_of_a_checkpoint_are_named_as_the_file_names_them():
    w = eagle3_weights() | {"rotary_emb.inv_freq": torch.zeros(4)}
    del w["fc.weight"], w["d2t"]
    w["midlayer.hidden_norm.weight"] = torch.zeros(3)
    w["layers.1.mlp.up_proj.weight"] = torch.zeros(2)
    w["lm_head.weight"] = torch.zeros(VOCAB, H)
    assert problems(build("LlamaForCausalLMEagle3", **IDS), w) == [
        "lm_head.weight has shape [40, 32], not [12, 32]",
        "midlayer.hidden_norm.weight has shape [3], not [32]",
        "missing tensor d2t [12]",
        "missing tensor fc.weight [32, 96]",
        "unexpected tensor layers.1.mlp.up_proj.weight [2]",
    ]


def test_one_tensor_under_two_names_comes_twice():
    w = eagle3_weights() | {"layers.0.hidden_norm.weight": torch.zeros(H)}
    assert problems(build("LlamaForCausalLMEagle3", **IDS), w) == ["layers.0.hidden_norm.weight comes twice"]


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([0] * 11 + [29], "d2t leads to token ids from 0 to 40 of 40"),
        ([-1] + [0] * 11, "d2t leads to token ids from -1 to 11 of 40"),
        ([0] * 10 + [1, 0], "d2t leads to the same token id more than once"),
    ],
)
def test_offsets_that_lead_nowhere(offsets, text):
    w = eagle3_weights() | {"d2t": torch.tensor(offsets)}
    assert problems(build("LlamaForCausalLMEagle3", **IDS), w) == [text]


def test_offsets_without_a_head():
    w = eagle3_weights(draft_vocab=VOCAB) | {"d2t": torch.randperm(VOCAB) - torch.arange(VOCAB)}
    network = build("LlamaForCausalLMEagle3", eagle_aux_hidden_state_layer_ids=[1])
    w["fc.weight"] = random(H, H)
    assert problems(network, w) == ["d2t without lm_head.weight: the target's head knows no draft vocabulary"]


def test_queries_without_gates_are_refused():
    assert problems(build("Qwen3NextMTP"), mtp_weights(qk_norm=True)) == [
        "mtp.layers.0.self_attn.q_proj.weight has shape [32, 32], not [64, 32]"
    ]


def test_drafts_have_no_forward_of_their_own():
    for network in (build("EagleLlamaForCausalLM"), build("MedusaModel", num_heads=1)):
        assert network.tap_points == ()
        with pytest.raises(IntegrityError, match="no forward pass"):
            network.forward(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_again(dtype):
    """After a sleep of level 2: plain tensors are where they were, matrices are made anew."""
    w = eagle3_weights(draft_vocab=VOCAB) | {"lm_head.weight": random(VOCAB, H)}
    w |= {"embed_tokens.weight": torch.randn(VOCAB, H), "d2t": torch.randperm(VOCAB) - torch.arange(VOCAB)}
    kernels = OrderedKernels((CpuKernels(), ReferenceKernels()))
    described = config("LlamaForCausalLMEagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    network = NativeLibrary(kernels).build(described, dtype, CPU)
    network.load_weights(w.items())
    hidden, ids = torch.randn(2, H, dtype=dtype), network.target_ids.clone()
    expected, embeds = network.compute_logits(hidden), network.embed(ids)
    network.release()
    addresses = {name: tensor.data_ptr() for name, tensor in network.weights()}
    for _, tensor in network.weights():
        tensor.zero_()
    network.load_weights(w.items())
    again = dict(network.weights())
    assert {name: again[name].data_ptr() for name in addresses} == addresses
    assert torch.equal(network.compute_logits(hidden), expected)
    assert torch.equal(network.target_ids, ids)
    assert torch.equal(network.embed(ids), embeds)
