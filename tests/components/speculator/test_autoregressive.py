"""Draft model, EAGLE, EAGLE-3, MTP and Medusa: what they propose is what their network says of the text alone.

Every draft of a whole run is compared with a forward without any cache over the request's own text: chunked prefills,
mixed batches, preemptions, rejected drafts and the end of the context leave no trace in the draft's keys and values.
"""

from collections import Counter

import attrs
import pytest
import torch
from draft_oracle import logits_of_drafts
from letters import VOCAB, Letters

from workerkit.components.model.draft import RandomDraft
from workerkit.components.speculator import draft_model, drawing, passes
from workerkit.components.speculator.draft_model import DraftModelSpeculator
from workerkit.components.speculator.drawing import DraftDraws, DrawingConfig, together
from workerkit.components.speculator.eagle import EagleSpeculator
from workerkit.components.speculator.medusa import MedusaSpeculator
from workerkit.components.speculator.shared import head_of
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.sampling import DrawKeys, RandomStream
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import DraftWeights
from workerkit.framework.plugins import load_plugins

LENGTH = 40
SPECULATORS = {
    "draft_model": DraftModelSpeculator,
    "eagle": EagleSpeculator,
    "eagle3": EagleSpeculator,
    "mtp": EagleSpeculator,
    "medusa": MedusaSpeculator,
}
DRAFTS = {
    "draft_model": {"architecture": "LlamaForCausalLM", "num_hidden_layers": 2},
    "eagle": {"architecture": "EagleLlamaForCausalLM", "num_hidden_layers": 2},
    "eagle3": {
        "architecture": "LlamaForCausalLMEagle3",
        "draft_vocab_size": 40,
        "fields": {"eagle_aux_hidden_state_layer_ids": [0, 2]},
    },
    "mtp": {"architecture": "MTPDraftModel"},
    "medusa": {"architecture": "MedusaModel", "draft_vocab_size": 30, "fields": {"medusa_num_heads": 8}},
}


@attrs.frozen
class Proposal:
    """What was proposed for one row behind the token at `newest`."""

    req_id: str
    newest: int
    drafts: list[int]
    confidence: list[float]
    logits: torch.Tensor | None
    keys: tuple[int, float]


def recording(speculator, proposals, unchanged):
    """A subclass that notes its proposals, and what happens to the keys of position 0."""

    class Recording(speculator):
        def propose(self, inputs):
            batch, lasting = inputs.batch, self.watched(inputs)
            before = [keys.clone() for keys in lasting]
            drafts = super().propose(inputs)
            unchanged.extend(map(torch.equal, before, self.watched(inputs)))
            last = batch.query_start_loc[1:] - 1 - inputs.sampled.num_rejected
            for row, req_id in enumerate(batch.req_ids):
                if inputs.sampled.num_sampled[row]:
                    proposal = Proposal(
                        req_id=req_id,
                        newest=int(batch.positions[last[row]]) + 1,
                        drafts=drafts.token_ids[row].tolist(),
                        confidence=drafts.confidence[row].tolist(),
                        logits=None if drafts.logits is None else drafts.logits[row].clone(),
                        keys=(int(inputs.keys.seeds[row]), float(inputs.keys.temperatures[row])),
                    )
                    proposals.append(proposal)
            return drafts

        def watched(self, inputs):
            """Keys of the draft's layer at position 0, of rows whose first token is not among this step's."""
            if speculator is MedusaSpeculator:
                return []
            caches, index = self._caches, self._draft.attention_layers[0].index
            table = inputs.tables.block_tables[caches.group_of_layer[index]]
            starts = inputs.batch.query_start_loc[: inputs.batch.num_reqs].long()
            rows = (inputs.batch.positions[starts] > 0).nonzero()[:, 0]
            return [caches.keys[index][table[row, 0], 0] for row in rows]

    return Recording


def texts(assembly, prompts, params):
    engine = assembly.engine
    engine.start()
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params[number], f"r{number}")
    outputs = {f"r{number}": list(prompt) for number, prompt in enumerate(prompts)}
    while engine.has_unfinished:
        for delta in engine.step():
            outputs[delta.req_id] += delta.token_ids
        engine.check_integrity()
    return outputs


def config(name, runner, count, budget, num_blocks, sampling, asynchronous=False):
    loader = {
        "use": "random",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "rope_type": "dynamic",  # so that it matters which context length a token is rotated for
        "rope_factor": 2.0,
        "rope_original_max_position": 16,
    }
    return {
        "model": {"source": "random", "max_model_len": LENGTH},
        "limits": {"max_num_reqs": 3, "max_num_batched_tokens": budget, "num_speculative_tokens": count},
        "cache": {"block_size": 4, "num_blocks": num_blocks},
        "components": {
            "runner": runner,
            "loader": loader,
            # a block that another request left may end with the keys of another next token
            "scheduler": {"use": "continuous", "prefix_caching": False, "async_scheduling": asynchronous},
            "tokenizer": "letters",
            "speculator": {"use": f"recording_{name}", "draft_sampling": sampling},
            "draft": {"use": "random", "seed": 7, **DRAFTS[name]},
            "rejection": "standard",
        },
    }


@pytest.fixture
def proposals():
    return []


@pytest.fixture
def unchanged():
    return []


@pytest.fixture
def registry(proposals, unchanged):
    registry = load_plugins().registry
    registry.add(roles.TOKENIZER, "letters", Letters)
    for name, speculator in SPECULATORS.items():
        registry.add(roles.SPECULATOR, f"recording_{name}", recording(speculator, proposals, unchanged))
    return registry


PROMPTS = [[(7 * i + 3 * j * j) % 60 for j in range(length)] for i, length in enumerate((5, 17, 1, 9, 26, 12))]
CASES = [
    # runner, K, tokens a step, blocks, draft_sampling, asynchronous
    ("v1", 3, 12, 33, "greedy", False),
    ("v2", 4, 7, 14, "probabilistic", False),
    ("v2", 8, 64, 33, "greedy", True),
    ("v1", 1, 20, 14, "probabilistic", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("name", SPECULATORS)
def test_drafts_are_what_the_network_says_of_the_text(name, case, registry, proposals, unchanged):
    """Whatever the cache went through. The last requests run into the end of the context (B55)."""
    params = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.3)[number % 3], seed=number, max_tokens=LENGTH - len(prompt), ignore_eos=True
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    counts = Counter()
    with assemble(config(name, *case), registry=registry) as assembly, torch.inference_mode():
        outputs = texts(assembly, PROMPTS, params)
        assert all(len(text) == LENGTH for text in outputs.values())
        counts["preemptions"] = assembly.engine.stats.num_preemptions
        target, draft = assembly.value(LoadedModel).network, assembly.value(DraftWeights).network
        kernels = assembly.get(roles.KERNELS)
        for proposal in proposals[::2]:
            check(proposal, outputs[proposal.req_id], len(PROMPTS[int(proposal.req_id[1:])]), draft, target, counts)
            if case[4] == "probabilistic":
                check_draws(proposal, draft, kernels)
    assert all(unchanged)
    assert len(unchanged) > 20 or name == "medusa"
    assert counts["drafts"] > 60
    assert counts["beyond the context"] >= 2
    assert counts["near ties"] <= 0.01 * counts["drafts"]
    if case[3] < 20:
        assert counts["preemptions"] > 0


def check(proposal, text, prompt_len, draft, target, counts):
    """One row's drafts against a forward over its text."""
    known = text[: proposal.newest + 1]
    room = max(0, LENGTH - len(known))
    real = proposal.drafts[:room]
    assert -1 not in real
    assert set(proposal.drafts[room:]) <= {-1}
    counts["beyond the context"] += len(proposal.drafts) - len(real)
    counts["drafts"] += len(real)
    if not real:
        return
    logits = logits_of_drafts(draft, target, known, prompt_len, real)
    temperature = proposal.keys[1]
    if proposal.logits is not None:
        logits = logits / (temperature or 1.0)
        ids = slice(None) if getattr(draft, "target_ids", None) is None else draft.target_ids
        torch.testing.assert_close(proposal.logits[: len(real), ids], logits, atol=2e-3, rtol=1e-3)
    ids = torch.arange(VOCAB) if getattr(draft, "target_ids", None) is None else draft.target_ids
    probs = logits.softmax(dim=-1)
    for row, token, confidence in zip(probs, real, proposal.confidence, strict=False):
        at = int((ids == token).nonzero())  # a token of the draft's vocabulary
        assert confidence == pytest.approx(float(row[at]), abs=2e-3)
        if proposal.logits is None or temperature == 0:
            top = row.topk(2)
            if top.indices[0] != at:
                assert top.values[0] - row[at] < 1e-3, proposal
                counts["near ties"] += 1


def check_draws(proposal, draft, kernels):
    """Drafts that were drawn: from their own logits, with the request's seed and a key for each draft."""
    seed, temperature = proposal.keys
    if getattr(draft, "target_ids", None) is not None:
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, draft.target_ids, False)
        assert (proposal.logits[:, others] == -torch.inf).all()
    if temperature == 0:
        return
    keys = proposal.newest + (torch.arange(len(proposal.drafts)) << 32)
    uniform = kernels.uniform_from_seed(torch.full_like(keys, seed), keys, RandomStream.DRAFTING)
    drawn = kernels.sample_from_probs(proposal.logits.softmax(dim=-1), uniform)
    real = torch.tensor(proposal.drafts)
    assert ((drawn == real) | (real == -1)).all()


@pytest.mark.parametrize("name", SPECULATORS)
def test_steps_of_partial_prefills_alone_propose_nothing(name, registry, proposals):
    """A prompt in pieces of two tokens: one proposal a sampled token, and the first is as good as any other."""
    with assemble(config(name, "v2", 3, 2, 20, "greedy"), registry=registry) as assembly, torch.inference_mode():
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        outputs = texts(assembly, [PROMPTS[1]], [params])
        target, draft = assembly.value(LoadedModel).network, assembly.value(DraftWeights).network
        assert [proposal.newest for proposal in proposals] == [len(PROMPTS[1])]
        check(proposals[0], outputs["r0"], len(PROMPTS[1]), draft, target, Counter())


@pytest.mark.parametrize("name", SPECULATORS)
def test_arithmetic_means_the_same_where_the_device_is_not_the_host(name, registry, proposals, monkeypatch):
    """There `operand` leaves tensors as they are, where a CPU takes numpy's view of them."""

    def drafts():
        proposals.clear()
        params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 1.0, 0.7)]
        with assemble(config(name, "v2", 3, 9, 33, "probabilistic"), registry=registry) as assembly:
            texts(assembly, PROMPTS[:3], params)
        return [(proposal.req_id, proposal.newest, proposal.drafts) for proposal in proposals]

    here = drafts()
    for module in (draft_model, drawing, passes):
        monkeypatch.setattr(module, "operand", lambda tensor: tensor)
    assert drafts() == here


def test_the_target_as_its_own_draft_is_always_right(registry):
    document = config("draft_model", "v2", 4, 32, 33, "greedy")
    document["components"]["draft"] = "target"
    with assemble(document, registry=registry) as assembly:
        params = [SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)] * 3
        texts(assembly, PROMPTS[:3], params)
        stats = assembly.engine.stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens == 3 * 16  # 1 + 4 * (4 + 1) tokens each


def start(document, registry):
    with assemble(document, registry=registry) as assembly:
        assembly.engine.start()


@pytest.mark.parametrize("count", [0, 9])
def test_a_number_of_drafts_that_cannot_be_is_refused(count, registry):
    """None at all, and more than Medusa has heads."""
    with pytest.raises(UnsupportedError, match=r"limits\.num_speculative_tokens"):
        start(config("medusa", "v2", count, 32, 33, "greedy"), registry)


@pytest.mark.parametrize(
    ("speculator", "draft"),
    [
        ("draft_model", "eagle"),
        ("draft_model", "medusa"),
        ("eagle", "draft_model"),
        ("eagle", "medusa"),
        ("medusa", "eagle3"),
    ],
)
def test_a_draft_of_another_kind_is_refused(speculator, draft, registry):
    document = config(speculator, "v2", 2, 32, 33, "greedy")
    document["components"]["draft"] = {"use": "random", **DRAFTS[draft]}
    with pytest.raises(UnsupportedError, match=rf"components\.speculator needs .*{DRAFTS[draft]['architecture']}"):
        start(document, registry)


def test_a_draft_model_with_another_vocabulary_is_refused(registry):
    class Other(RandomDraft):
        def load(self):
            draft = super().load()
            draft.network.config = attrs.evolve(draft.network.config, vocab_size=VOCAB + 3)
            return draft

    registry.add(roles.DRAFT, "other", Other)
    document = config("draft_model", "v2", 2, 32, 33, "greedy")
    document["components"]["draft"] = {"use": "other", **DRAFTS["draft_model"]}
    with pytest.raises(UnsupportedError, match=rf"vocabulary of {VOCAB + 3} tokens, the target one of {VOCAB};"):
        start(document, registry)


def test_b42_a_drafts_own_head_is_used_and_mapped(registry):
    """vllm-ascend #11374: a draft with a head and a d2t map of its own got the target's head."""
    document = config("eagle3", "v2", 2, 32, 33, "greedy")
    with assemble(document, registry=registry) as own:
        own.engine.start()
        loaded, draft = own.value(LoadedModel), own.value(DraftWeights).network
        assert draft.target_ids is not None
        assert head_of(draft, loaded) == draft.compute_logits
    del document["components"]["draft"]["draft_vocab_size"]
    with assemble(document, registry=registry) as shared:
        shared.engine.start()
        loaded, draft = shared.value(LoadedModel), shared.value(DraftWeights).network
        assert not draft.has_head
        assert head_of(draft, loaded) == loaded.network.compute_logits
    draws = DraftDraws(DrawingConfig(), None, 16, torch.arange(8) * 2 + 1)
    keys = DrawKeys(seeds=torch.zeros(2, dtype=torch.int64), temperatures=torch.zeros(2))
    logits = torch.tensor([[0.0, 0, 0, 5, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 0, 2]])
    assert draws.draw(logits, keys, torch.tensor([4, 9]), 0).token_ids.tolist() == [7, 15]


def test_b55_no_draft_stands_beyond_the_context():
    """vllm #32628: with 16 positions, drafts behind a newest token at 13 are real at 14 and 15."""
    drawn = DraftDraws(DrawingConfig(), None, 3, None).draw(torch.eye(3)[:2], None, torch.tensor([13, 15]), 0)
    drafts = together([drawn] * 3, torch.tensor([14, 16]), 16)
    assert drafts.token_ids.tolist() == [[0, 0, -1], [-1, -1, -1]]
    assert drafts.confidence.shape == (2, 3)
