"""Networks with recurrent layers without a worker: their states and their keys and values are kept here, by hand."""

import numpy as np
import torch
from hf_oracle import random_prompts
from oracles import dense_attend
from safetensors.torch import load_file

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.hf_config import read_hf_config
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.interfaces.model import ModelInputs
from workerkit.framework.interfaces.recurrent import RecurrentBatch
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels


def make_states(layers, num_rows, fill=0.0):
    """`RecurrentBatch.states` of these RecurrentLayers: S = num_rows."""
    return tuple(
        tuple(torch.full((num_rows, *spec.shape), fill, dtype=getattr(torch, spec.dtype)) for spec in layer.states)
        for layer in layers
    )


class RecurrentRun:
    """Sequences that go through a network in pieces, each in a slot with num_drafts + 1 rows of every state.

    States that nobody may read are not a number: one that is read after all shows up in the logits.
    """

    def __init__(self, network, num_slots=1, num_drafts=0):
        self.network = network
        self.rows = num_drafts + 1
        self.states = make_states(network.recurrent_layers, num_slots * self.rows, float("nan"))
        for slot in range(num_slots):
            self.clear(slot)

    def clear(self, slot):
        """A new sequence begins in the slot."""
        self.kept = {**getattr(self, "kept", {}), slot: {}}  # layer name -> (keys, values) of all its tokens
        self.length = {**getattr(self, "length", {}), slot: 0}
        self.row = {**getattr(self, "row", {}), slot: slot * self.rows}  # of the state that it goes on from
        for state in self._tensors():
            state[self.row[slot]] = 0

    def accept(self, slot, count):
        """Of the piece that was verified last, the first `count` tokens stay."""
        self.length[slot] -= self.verified[slot] - count
        self.row[slot] = slot * self.rows + count - 1
        for name, pair in self.kept[slot].items():
            self.kept[slot][name] = tuple(tensor[: self.length[slot]] for tensor in pair)

    def step(self, pieces, verifying=()):
        """One forward. {slot: its next token ids} in the order of the batch -> {slot: logits float32 [tokens, V]}.

        Slots in `verifying` keep the state behind each of their tokens, of which there are up to num_drafts + 1.
        """
        lengths = [len(ids) for ids in pieces.values()]
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        positions = [torch.arange(self.length[slot], self.length[slot] + len(ids)) for slot, ids in pieces.items()]
        token_states = []
        for slot, ids in pieces.items():
            row, unseen = slot * self.rows, [-1] * (len(ids) - 1)
            token_states += range(row, row + len(ids)) if slot in verifying else [*unseen, row]
        batch = RecurrentBatch(
            states=self.states,
            initial=torch.tensor([self.row[slot] for slot in pieces]),
            token_states=torch.tensor(token_states),
            query_start_loc=torch.from_numpy(bounds),
            query_start_loc_np=bounds,
            is_verifying_np=np.array([slot in verifying for slot in pieces]),
        )
        inputs = ModelInputs(
            input_ids=torch.tensor([token for ids in pieces.values() for token in ids], dtype=torch.int32),
            positions=torch.cat(positions),
            rope_lens=torch.cat(positions) + 1,
            attend=lambda *arguments: self._attend(pieces, *arguments),
            recurrent=batch,
        )
        with torch.inference_mode():
            logits = self.network.compute_logits(self.network.forward(inputs).hidden)
        self.verified = {slot: len(pieces[slot]) for slot in verifying}
        for slot, ids in pieces.items():
            self.length[slot] += len(ids)
            self.row[slot] = slot * self.rows
        return dict(zip(pieces, logits.split(lengths), strict=True))

    def _attend(self, pieces, layer, query, key, value, *rest):
        outputs, start = [], 0
        for slot, ids in pieces.items():
            here = slice(start, start := start + len(ids))
            pair = (key[here], value[here])
            if layer.name in self.kept[slot]:
                pair = tuple(torch.cat(both) for both in zip(self.kept[slot][layer.name], pair, strict=True))
            self.kept[slot][layer.name] = pair
            before = query.new_zeros(self.length[slot], *query.shape[1:])
            outputs.append(dense_attend(layer, torch.cat((before, query[here])), *pair, *rest)[len(before) :])
        return torch.cat(outputs)

    def _tensors(self):
        return (state for layer in self.states for state in layer)


def recurrent_logits(network, token_ids, lengths=None):
    """float32 [len, V] of one sequence that comes in pieces of these lengths, or as a whole."""
    run = RecurrentRun(network)
    pieces = torch.tensor(token_ids).split(lengths or [len(token_ids)])
    return torch.cat([run.step({0: piece.tolist()})[0] for piece in pieces])


def native_network(model, folder, libraries=(CpuKernels, ReferenceKernels)):
    """The network of a model of Hugging Face's, in float32, through the files that it saves."""
    model.save_pretrained(folder)
    kernels = OrderedKernels(tuple(library() for library in libraries))
    network = NativeLibrary(kernels).build(read_hf_config(folder), torch.float32, torch.device("cpu"))
    network.load_weights(load_file(folder / "model.safetensors").items())
    return network


def hf_logits(model, token_ids):
    """float32 [len, V]."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def assert_mixed_rows_are(model, network):
    """Decoding, verifying and prefill beside each other, in slots that others had before: `model`'s logits."""
    one, two, three = random_prompts([70, 30, 40])
    run = RecurrentRun(network, num_slots=3, num_drafts=2)
    run.step({0: random_prompts([5], seed=9)[0], 2: three[:20]})
    run.clear(0)
    got = {0: [], 1: [], 2: [hf_logits(model, three)[:20]]}

    def step(pieces, accepted=None):
        accepted = accepted or {}
        for slot, logits in run.step(pieces, verifying=tuple(accepted)).items():
            got[slot].append(logits[: accepted.get(slot)])
        for slot, count in accepted.items():
            run.accept(slot, count)

    step({1: two[:10], 0: one[:64], 2: three[20:21]})
    wrong = [(token + 1) % 128 for token in three[22:24]]
    step({2: [three[21], *wrong], 0: one[64:], 1: two[10:13]}, {2: 1, 1: 3})
    step({1: two[13:30], 2: three[22:25]}, {2: 2})
    step({2: three[24:]})
    for slot, ids in enumerate((one, two, three)):
        torch.testing.assert_close(torch.cat(got[slot]), hf_logits(model, ids), atol=1e-4, rtol=0)
