"""A network with two recurrent layers and one with attention, in whole numbers: one wrong state, slot or position and
its tokens are others. Its text counts up from 0 to 7, over and over, but for the places where the state says otherwise:
drafts that repeat the text are accepted in part."""

import itertools

import attrs
import torch

from workerkit.framework import roles
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.model import LoadedModel, Model, ModelOutput
from workerkit.framework.interfaces.recurrent import RecurrentLayer, StateSpec
from workerkit.framework.testing.fakes_model import FAKE_LAYER, FAKE_MODEL, FakeLoader, FakeNetwork

PRIME = 1009
LAYERS = (
    RecurrentLayer(
        name="toy.0",
        index=0,
        states=(
            StateSpec(name="conv", shape=(3,), dtype="int8"),  # the last tokens, the newest last
            StateSpec(name="hash", shape=(1,), dtype="int64"),  # of all tokens, in their order
        ),
    ),
    RecurrentLayer(name="toy.1", index=1, states=(StateSpec(name="ssm", shape=(2, 2), dtype="float32"),)),
)
STATE_BYTES = 3 + 8 + 16
CONFIG = attrs.evolve(FAKE_MODEL, num_hidden_layers=3, recurrent_layers=(0, 1), sliding_windows=())


def advance(state, token):
    """(last tokens, hash, [2, 2] matrix) behind one more token."""
    conv, number, matrix = state
    number = (number * 31 + token + 1) % PRIME
    matrix = [[matrix[0][1], (matrix[0][0] + 3 * token) % 97], [matrix[1][1], (matrix[1][0] + number) % 89]]
    return [*conv[1:], token], number, matrix


def next_token(state, total, position):
    conv, number, matrix = state
    mixed = number + 7 * total + 13 * position + sum(conv) + sum(map(sum, matrix))
    return mixed // 5 % 16 if mixed % 5 == 0 else (conv[-1] + 1) % 8


def new_state():
    return [0, 0, 0], 0, [[0, 0], [0, 0]]


def state_after(tokens):
    state = new_state()
    for token in tokens:
        state = advance(state, token)
    return state


def toy_tokens(prompt, count):
    """The `count` tokens behind a prompt, worked out without a cache."""
    tokens, state = list(prompt), state_after(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(state, sum(tokens), len(tokens) - 1))
        state = advance(state, tokens[-1])
    return tokens[len(prompt) :]


def read(states, row):
    """State tensors of both layers -> the state in one of their rows."""
    (conv, number), (matrix,) = states
    return conv[row].tolist(), int(number[row]), [[int(value) for value in line] for line in matrix[row].tolist()]


class ToyHybrid(FakeNetwork):
    """hidden [T, 4]: the token that follows, then zeros. Records the RecurrentBatch of each forward."""

    def __init__(self, device):
        super().__init__(CONFIG, device)
        self.batches = []

    @property
    def recurrent_layers(self):
        return LAYERS

    def forward(self, inputs):
        recurrent, tokens = inputs.recurrent, inputs.input_ids
        assert len(recurrent.token_states) == len(tokens)
        self.batches.append(recurrent)
        length = inputs.positions.float() + 1
        heads = torch.zeros(len(tokens), FAKE_LAYER.num_heads, FAKE_LAYER.head_dim)
        key = heads[:, : FAKE_LAYER.num_kv_heads]
        value = key + tokens[:, None, None]
        totals = (inputs.attend(FAKE_LAYER, heads, key, value)[:, 0, 0].float() * length).round()
        hidden = torch.zeros(len(tokens), 4)
        starts = recurrent.query_start_loc_np
        assert starts.tolist() == recurrent.query_start_loc.tolist()
        for row, (start, end) in enumerate(itertools.pairwise(starts)):
            state = read(recurrent.states, int(recurrent.initial[row]))
            kept = (recurrent.token_states[start:end] >= 0).tolist()
            if recurrent.is_verifying_np[row]:
                assert all(kept)
            for index in range(start, end):
                state = advance(state, int(tokens[index]))
                if (target := int(recurrent.token_states[index])) >= 0:
                    self.write(recurrent.states, target, state)
                hidden[index, 0] = next_token(state, int(totals[index]), int(inputs.positions[index]))
        return ModelOutput(hidden=hidden)

    @staticmethod
    def write(states, row, state):
        for tensor, value in zip((*states[0], *states[1]), (state[0], [state[1]], state[2]), strict=True):
            tensor[row] = torch.tensor(value).to(tensor.dtype)

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long(), self.config.vocab_size).float() * 10


class ToyLoader(FakeLoader):
    def read_config(self):
        return CONFIG


class ToyModel(Model):
    def __init__(self, context: DeviceContext) -> None:
        self._context = context

    def load(self):
        return LoadedModel(network=ToyHybrid(self._context.device), config=CONFIG, weight_bytes=4)

    def reload_weights(self, loaded):
        """There are none."""


def add_toy_hybrid(registry):
    """Register `model: toy_hybrid` and `loader: toy_hybrid`."""
    registry.add(roles.LOADER, "toy_hybrid", ToyLoader)
    registry.add(roles.MODEL, "toy_hybrid", ToyModel)
    return registry
