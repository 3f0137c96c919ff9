"""Fakes of everything that brings a model: a network whose next token depends on the whole history through its cache.

Attention with zero queries and keys averages the values, which are the token ids, so `mean * length` is the sum of the
history. One wrong block, slot, position or length changes the tokens; `fake_tokens` says what they must be.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import (
    LoadedModel,
    Model,
    ModelConfig,
    ModelInputs,
    ModelLibrary,
    ModelLoader,
    ModelOutput,
    Network,
    QuantizedTensor,
    RopeConfig,
)
from workerkit.framework.interfaces.store import GGUFHeader, ModelStore, NamedModel

FAKE_VOCAB = 258  # the bytes, and two special tokens of FakeTokenizer
FAKE_LENGTH = 256
FAKE_SALT = 5
FAKE_LAYER = AttentionLayer(name="fake.attn", index=0, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
FAKE_MODEL = ModelConfig(
    architecture="FakeForCausalLM",
    vocab_size=FAKE_VOCAB,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=FAKE_LAYER.num_heads,
    num_key_value_heads=FAKE_LAYER.num_kv_heads,
    head_dim=FAKE_LAYER.head_dim,
    rms_norm_eps=1e-6,
    max_position_embeddings=FAKE_LENGTH,
    rope=RopeConfig(rotary_dim=FAKE_LAYER.head_dim),
    sliding_windows=(None,),
)


def next_token(history_sum: torch.Tensor, position: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
    """What follows a history whose token ids add up to `history_sum` and whose last token stands at `position`."""
    return (history_sum * 31 + position * 17 + salt) % FAKE_VOCAB


def fake_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` greedy tokens of a FakeNetwork after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(
            int(next_token(torch.tensor(sum(tokens)), torch.tensor(len(tokens) - 1), torch.tensor(FAKE_SALT)))
        )
    return tokens[len(prompt) :]


class FakeNetwork(Network):
    """hidden [T, 4] float32: token id, position, sum of the history, 0."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self._salt = torch.zeros(1, device=device)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return (FAKE_LAYER,)

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ("embed", "layers.0")

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeds = torch.zeros(len(input_ids), self.config.hidden_size, device=input_ids.device)
        embeds[:, 0] = input_ids
        return embeds

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        embeds = inputs.inputs_embeds
        token = inputs.input_ids.float() if embeds is None else embeds[:, 0]
        length = inputs.positions.float() + 1
        heads = token[:, None, None].new_zeros(len(token), FAKE_LAYER.num_heads, FAKE_LAYER.head_dim)
        key = heads[:, : FAKE_LAYER.num_kv_heads]
        value = key.clone()
        value[:, :, 0] = token[:, None]
        mean = inputs.attend(FAKE_LAYER, heads, key, value)[:, 0, 0].float()
        embed = torch.stack([token, inputs.positions.float(), torch.zeros_like(token), torch.zeros_like(token)], dim=1)
        hidden = embed.clone()
        hidden[:, 2] = (mean * length).round()
        states = {"embed": embed, "layers.0": hidden}
        return ModelOutput(hidden=hidden, taps={name: states[name] for name in inputs.taps})

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        token = next_token(hidden[:, 2].long(), hidden[:, 1].long(), self._salt.long())
        return torch.nn.functional.one_hot(token, self.config.vocab_size).float() * 10

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        found = dict(weights)
        if set(found) != {"salt"}:
            raise WeightError(f"a fake network has the tensor salt, the checkpoint has {sorted(found)}")
        assert isinstance(found["salt"], torch.Tensor)
        self._salt.copy_(found["salt"])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "salt", self._salt


class FakeLoader(ModelLoader):
    """A checkpoint of one number."""

    def read_config(self) -> ModelConfig:
        return FAKE_MODEL

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        yield "salt", torch.tensor([float(FAKE_SALT)])

    def count(self) -> int:
        return 1

    def at(self, source: str) -> ModelLoader:
        return self


class FakeLibrary(ModelLibrary):
    """Builds a FakeNetwork, whatever the architecture."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return (FAKE_MODEL.architecture,)

    def build(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Network:
        return FakeNetwork(config, device)


class FakeModel(Model):
    """A FakeNetwork with its number in place, from no file."""

    def __init__(self, context: DeviceContext) -> None:
        self._context = context

    def load(self) -> LoadedModel:
        network = FakeNetwork(FAKE_MODEL, self._context.device)
        loaded = LoadedModel(network=network, config=FAKE_MODEL, weight_bytes=4)
        self.reload_weights(loaded)
        return loaded

    def reload_weights(self, loaded: LoadedModel) -> None:
        loaded.network.load_weights(FakeLoader().weights(loaded.config))


class FakeStore(ModelStore):
    """Knows no model and finds no file."""

    def names(self) -> Mapping[str, NamedModel]:
        return {}

    def is_cached(self, name: str) -> bool:
        raise ModelError(f"no model is named {name!r}")

    def fetch(self, name: str, progress: bool | None = False) -> pathlib.Path:
        raise ModelError(f"no model is named {name!r}")

    def resolve(self, source: str) -> pathlib.Path:
        return pathlib.Path(source)

    def read_gguf(self, path: pathlib.Path) -> GGUFHeader:
        raise WeightError(f"{path}: the fake store holds no files")
