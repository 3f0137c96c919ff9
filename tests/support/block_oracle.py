"""DFlash and DSpark once more, without a cache: every pass recomputes the context from the whole text."""

import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 1000.0,
}
NUM_TARGET_LAYERS = 5


def raw_config(architecture="DFlashDraftModel", block_size=5, layer_ids=(-1, 1, 3), **fields):
    """A config.json."""
    inner = {"target_layer_ids": list(layer_ids), "mask_token_id": None}
    return {
        "architectures": [architecture],
        "block_size": block_size,
        "num_target_layers": NUM_TARGET_LAYERS,
        "dflash_config": inner,
        **SIZES,
        **fields,
    }


def random_weights(raw, own=("mask_embedding",), confidence=None, seed=0):
    """Checkpoint name -> tensor. `own`: optional tensors to make; `confidence`: width of that head's input."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, scale=1.0):
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def norm(size):
        return 1 + 0.3 * torch.randn(size, generator=generator)

    hidden, inter, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim
    vocab, draft_vocab = raw["vocab_size"], raw.get("draft_vocab_size") or raw["vocab_size"]
    ids = (raw.get("dflash_config") or {}).get("target_layer_ids") or raw.get("target_layer_ids")
    weights = {
        "fc.weight": matrix(hidden, len(ids) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for layer in range(raw["num_hidden_layers"]):
        at = f"layers.{layer}."
        for name, rows, columns, scale in (
            ("self_attn.q_proj", queries, hidden, 2.0),
            ("self_attn.k_proj", keys, hidden, 2.0),
            ("self_attn.v_proj", keys, hidden, 1.0),
            ("self_attn.o_proj", hidden, queries, 1.0),
            ("mlp.gate_proj", inter, hidden, 1.0),
            ("mlp.up_proj", inter, hidden, 1.0),
            ("mlp.down_proj", hidden, inter, 1.0),
        ):
            weights[f"{at}{name}.weight"] = matrix(rows, columns, scale)
            if raw.get("attention_bias") and "self_attn" in name:
                weights[f"{at}{name}.bias"] = torch.randn(rows, generator=generator)
        weights[at + "input_layernorm.weight"] = norm(hidden)
        weights[at + "post_attention_layernorm.weight"] = norm(hidden)
        if raw.get("qk_norm", True):
            weights[at + "self_attn.q_norm.weight"] = norm(dim)
            weights[at + "self_attn.k_norm.weight"] = norm(dim)
    optional = {
        "mask_embedding": torch.randn(hidden, generator=generator),
        "embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "lm_head.weight": 3 * torch.randn(draft_vocab, hidden, generator=generator) * hidden**-0.5,
    }
    chosen = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    optional["d2t"] = chosen - torch.arange(draft_vocab)
    weights |= {name: optional[name] for name in own}
    if rank := raw.get("markov_rank"):
        weights["markov_head.markov_w1.weight"] = torch.randn(vocab, rank, generator=generator)
        weights["markov_head.markov_w2.weight"] = matrix(draft_vocab, rank, 3.0)
        kind = raw.get("markov_head_type", "vanilla")
        heads = {"gated": ("gate_proj", hidden + rank, rank), "rnn": ("joint_proj", 2 * rank + hidden, 3 * rank)}
        if kind in heads:
            name, columns, rows = heads[kind]
            weights[f"markov_head.{name}.weight"] = matrix(rows, columns, 2.0)
            weights[f"markov_head.{name}.bias"] = torch.randn(rows, generator=generator)
    if confidence:
        weights["confidence_head.proj.weight"] = matrix(1, confidence, 2.0)
        weights["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    return weights


class BlockOracle:
    """A draft as formulas over its weights; `embed` [V, H] and `head` [V, H] are the target's."""

    def __init__(self, raw, weights, embed=None, head=None):
        self.raw, self.w = raw, {name: tensor.double() for name, tensor in weights.items()}
        self.embed = self.w.get("embed_tokens.weight", None if embed is None else embed.double())
        self.head = self.w.get("lm_head.weight", None if head is None else head.double())
        self.anchor = raw.get("sample_from_anchor", "Spark" in raw["architectures"][0])
        draft_vocab = raw.get("draft_vocab_size") or raw["vocab_size"]
        self.target_ids = torch.arange(draft_vocab)
        if "d2t" in weights:
            self.target_ids = self.target_ids + weights["d2t"]

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).rsqrt() * self.w[name + ".weight"]

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0.0)

    def heads(self, x, at, name, positions):
        """Projected, normed and rotated [T, N, D]; values are neither normed nor rotated."""
        dim = self.raw["head_dim"]
        x = self.linear(x, f"{at}self_attn.{name}_proj").view(len(x), -1, dim)
        if name == "v":
            return x
        if self.raw.get("qk_norm", True):
            x = self.norm(x, f"{at}self_attn.{name}_norm")
        inv_freq = 1.0 / self.raw["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
        angles = (positions[:, None].float() * inv_freq).double()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )

    def context(self, features):
        """[n, F * H] -> [n, H]."""
        return self.norm(self.linear(features.double(), "fc"), "hidden_norm")

    def mask(self):
        if "mask_embedding" in self.w:
            return self.w["mask_embedding"]
        inner = self.raw["dflash_config"].get("mask_token_id")
        return self.embed[self.raw["mask_token_id"] if inner is None else inner]

    def run(self, features, newest, width):
        """States of the text's n tokens [n, F * H] and the token behind them -> the block's states [width, H]."""
        start = len(features)
        context = self.context(features)
        x = torch.stack([self.embed[newest]] + [self.mask()] * (width - 1))
        block, all_positions = torch.arange(start, start + width), torch.arange(start + width)
        for layer in range(self.raw["num_hidden_layers"]):
            at = f"layers.{layer}."
            normed = self.norm(x, at + "input_layernorm")
            group = self.raw["num_attention_heads"] // self.raw["num_key_value_heads"]
            query = self.heads(normed, at, "q", block)
            both = torch.cat((context, normed))
            key = self.heads(both, at, "k", all_positions).repeat_interleave(group, dim=1)
            value = self.heads(both, at, "v", all_positions).repeat_interleave(group, dim=1)
            scores = torch.einsum("qnd,snd->nqs", query, key) * self.raw["head_dim"] ** -0.5
            attended = torch.einsum("nqs,snd->qnd", scores.softmax(-1), value).flatten(1)
            x = x + self.linear(attended, at + "self_attn.o_proj")
            normed = self.norm(x, at + "post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(normed, at + "mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(normed, at + "mlp.up_proj"), at + "mlp.down_proj")
        return self.norm(x, "norm")

    def markov(self, previous, hidden, state):
        """(bias [Vd], next state) of one position."""
        if not self.raw.get("markov_rank"):
            return 0.0, None
        kind = self.raw.get("markov_head_type", "vanilla")
        embed = self.w["markov_head.markov_w1.weight"][previous]
        if kind == "gated":
            embed = torch.sigmoid(self.linear(torch.cat((hidden, embed)), "markov_head.gate_proj")) * embed
        if kind == "rnn":
            state = torch.zeros_like(embed) if state is None else state
            g, c, o = self.linear(torch.cat((state, embed, hidden)), "markov_head.joint_proj").chunk(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            embed = torch.tanh(o)
        return self.linear(embed, "markov_head.markov_w2"), state

    def confidence(self, previous, hidden):
        weight = self.w.get("confidence_head.proj.weight")
        if weight is None:
            return None
        if weight.shape[1] > len(hidden):
            hidden = torch.cat((hidden, self.w["markov_head.markov_w1.weight"][previous]))
        return float(torch.sigmoid(self.linear(hidden, "confidence_head.proj")))

    def drafts(self, features, newest, count, width=None, topk=0, choose=None):
        """(ids of the target, corrected logits [count, Vd], confidences), greedy unless `choose(logits, number)`.

        width: how many positions of the block there are, as many as the drafts need if None."""
        hidden = self.run(features, newest, width or (count if self.anchor else count + 1))
        hidden = hidden if self.anchor else hidden[1:]
        tokens, logits, confidences, previous, state = [], [], [], newest, None
        for number in range(count):
            base = hidden[number] @ self.head.T
            if topk:
                base = base.masked_fill(base < base.topk(topk).values[-1], -torch.inf)
            confidences.append(self.confidence(previous, hidden[number]))
            bias, state = self.markov(previous, hidden[number], state)
            logits.append(base + bias)
            index = int(logits[-1].argmax()) if choose is None else choose(logits[-1], number)
            previous = int(self.target_ids[index])
            tokens.append(previous)
        return tokens, torch.stack(logits), confidences
