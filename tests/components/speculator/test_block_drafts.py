"""DFlash and DSpark over a paged cache: what they propose is what a pass over the whole text, without a cache, does."""

import random

import attrs
import numpy as np
import pytest
import torch
from block_oracle import NUM_TARGET_LAYERS, SIZES, BlockOracle, random_weights, raw_config
from oracles import dense_attend

from workerkit.components.attention.cpu import CpuAttention
from workerkit.components.attention.reference import ReferenceAttention
from workerkit.components.block_table.reference import ReferenceBlockTables
from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.kv_cache.paged import PagedKVCache
from workerkit.components.loader.hf_config import model_config
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.model.library import NativeLibrary
from workerkit.components.speculator.block import DFlash, DSpark, DSparkConfig
from workerkit.components.speculator.drawing import DrawingConfig
from workerkit.components.speculator.rows import last_valid
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel, ModelInputs
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import DrawKeys, RandomStream, SamplerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.sections import CacheSection, LimitsSection
from workerkit.framework.interfaces.speculation import DraftInputs, DraftModel, DraftWeights
from workerkit.framework.plugins import load_plugins
from workerkit.framework.testing.fakes_batch import make_batch
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

CPU = torch.device("cpu")
KERNELS = OrderedKernels((CpuKernels(), ReferenceKernels()))
PLAIN = OrderedKernels((ReferenceKernels(),))
BACKENDS = {"cpu": (CpuAttention, KERNELS), "reference": (ReferenceAttention, PLAIN)}
LENGTH, BLOCK, NUM_REQS = 40, 4, 4
GAP = 1e-3  # between two logits: less decides nothing
OWN = ("mask_embedding", "lm_head.weight", "d2t")
CONTEXT = DeviceContext(device=CPU, dtype=torch.float32)

VARIANTS = {
    "dflash": (raw_config(draft_vocab_size=40), OWN, None, 4),
    "dflash, K below the block's drafts": (raw_config(qk_norm=False), ("mask_embedding",), None, 2),
    "dflash, everything shared": (raw_config(mask_token_id=9, block_size=4), (), None, 3),
    "dspark": (
        raw_config("DSparkDraftModel", markov_rank=6, draft_vocab_size=40, block_size=4, qk_norm=False),
        OWN,
        SIZES["hidden_size"] + 6,
        4,
    ),
    "dspark rnn, own embeddings": (
        raw_config("Qwen3DSparkModel", markov_rank=6, markov_head_type="rnn", mask_token_id=5),
        ("embed_tokens.weight", "lm_head.weight"),
        SIZES["hidden_size"],
        3,
    ),
    "dspark gated, not from the anchor": (
        raw_config("DSparkDraftModel", markov_rank=6, markov_head_type="gated", sample_from_anchor=False),
        ("mask_embedding",),
        None,
        4,
    ),
}


def make_target():
    sizes = {name: value for name, value in SIZES.items() if name not in ("rms_norm_eps", "max_position_embeddings")}
    config = RandomLoaderConfig(**sizes | {"num_hidden_layers": NUM_TARGET_LAYERS})
    loader = RandomLoader(config, LimitsSection())
    model = loader.read_config()
    network = NativeLibrary(KERNELS).build(model, torch.float32, CPU)
    network.load_weights(loader.weights(model))
    return LoadedModel(network=network, config=model, weight_bytes=0)


TARGET = make_target()
TARGET_TENSORS = (TARGET.network.embed_tokens.matrix.tensors[0], TARGET.network.lm_head.matrix.tensors[0])


def draft_weights(raw, weights):
    network = NativeLibrary(KERNELS).build(model_config(raw, {}, "config.json"), torch.float32, CPU)
    network.load_weights(weights.items())
    layers = (attrs.evolve(layer, index=NUM_TARGET_LAYERS + layer.index) for layer in network.attention_layers)
    return DraftWeights(network=network, attention_layers=tuple(layers))


@attrs.define
class Request:
    """A text that is given beforehand, whatever the models think of it."""

    text: list[int]
    prompt_len: int
    computed: int = 0


class Bench:
    """A target, a draft and their paged cache; steps are driven by hand."""

    def __init__(self, raw, own, confidence, num_drafts, backend="cpu", kernel_block=BLOCK, draw=None, seed=0):
        self.raw, self.num_drafts = raw, num_drafts
        weights = random_weights(raw, own, confidence, seed)
        self.draft = draft_weights(raw, weights)
        self.oracle = BlockOracle(raw, weights, *TARGET_TENSORS)
        self.shape = WorkerShape(
            max_model_len=LENGTH,
            max_num_reqs=NUM_REQS + 1,  # a step may be padded by a row
            max_num_batched_tokens=64,
            vocab_size=SIZES["vocab_size"],
            num_speculative_tokens=num_drafts,
        )
        manager = PagedKVCache(CacheSection(block_size=BLOCK, num_blocks=NUM_REQS * 10 + 1), self.shape, CONTEXT)
        layers = (*TARGET.network.attention_layers, *self.draft.attention_layers)
        layout = manager.plan(layers, (kernel_block,), 0)
        self.caches = manager.allocate(layout, layers)
        for cache in (*self.caches.keys, *self.caches.values):
            cache.fill_(9.0)  # what a former request left behind
        self.tables = ReferenceBlockTables(self.shape, CONTEXT, layout)
        self.free = list(range(1, layout.num_blocks))
        random.Random(seed).shuffle(self.free)
        kind, self.kernels = BACKENDS[backend]
        self.attention = kind(self.kernels)
        is_dspark = "Spark" in raw["architectures"][0]
        config = draw or (DSparkConfig() if is_dspark else DrawingConfig())
        self.speculator = (DSpark if is_dspark else DFlash)(
            config, self.shape, CONTEXT, self.kernels, self.attention, self.caches, TARGET, self.draft
        )
        self.requests = {}
        self.features = {}

    def add(self, slot, text, prompt_len):
        self.requests[slot] = Request(text=list(text), prompt_len=prompt_len)
        positions = torch.arange(len(text))
        with torch.inference_mode():
            taps = self.forward(torch.tensor(text).int(), positions, positions + 1, dense_attend)
        self.features[slot] = taps

    def forward(self, ids, positions, rope_lens, attend):
        points = self.speculator.taps
        inputs = ModelInputs(input_ids=ids, positions=positions, rope_lens=rope_lens, attend=attend, taps=tuple(points))
        self.output = TARGET.network.forward(inputs)
        return torch.cat([self.output.taps[point] for point in points], dim=-1)

    def cover(self, slot, length):
        """Blocks for the first `length` positions, not beyond max_model_len."""
        have = len(self.tables.block_ids(slot)[0]) // (BLOCK // self.caches.layout.kernel_block_size)
        missing = -(-min(length, LENGTH) // BLOCK) - have
        self.tables.append(slot, [[self.free.pop() for _ in range(max(missing, 0))]])

    @torch.inference_mode()
    def step(self, work, pad=0, keys=None, covered=None):
        """work: (slot, known tokens to schedule, drafts behind them, how many of these are right) -> Drafts."""
        tokens, accepted = [], []
        for slot, count, drafts, right in work:
            r = self.requests[slot]
            known = r.text[r.computed : r.computed + count]
            truth = r.text[r.computed + count :][:drafts]
            wrong = [(token + 1) % SIZES["vocab_size"] for token in truth]
            tokens.append(known + truth[:right] + wrong[right:])
            accepted.append(right)
            self.cover(slot, covered or r.computed + len(tokens[-1]) + self.num_drafts + 1)
        before = [self.requests[slot] for slot, *_ in work]
        counts = np.array([len(ids) for ids in tokens], dtype=np.int32)
        computed = [r.computed for r in before]
        plan = BatchPlan(
            req_ids=tuple(f"r{slot}" for slot, *_ in work),
            slots=np.array([slot for slot, *_ in work], dtype=np.int64),
            num_scheduled_tokens=counts,
            num_computed_tokens=np.array(computed, dtype=np.int32),
            num_draft_tokens=np.array([drafts for _, _, drafts, _ in work], dtype=np.int32),
            prefill_lens=np.array([r.prompt_len for r in before], dtype=np.int32),
            prompt_lens=np.array([r.prompt_len for r in before], dtype=np.int32),
        )
        desc = BatchDescriptor(num_tokens=int(counts.sum()) + pad, num_reqs=len(work) + (pad > 0))
        batch = make_batch(plan, computed, tokens, desc, CPU)
        self.tables.apply(self.tables.stage())
        tables = self.tables.gather(batch)
        self.forward(
            batch.input_ids, batch.positions, batch.rope_lens, self.attention.build(batch, tables, self.caches, {})
        )
        taps = {
            name: tap.index_fill(0, torch.arange(batch.num_tokens, desc.num_tokens), torch.nan)
            for name, tap in self.output.taps.items()
        }  # padding is nobody's business
        rejected = [drafts - right for _, _, drafts, right in work]
        for r, count, lost in zip(before, counts, rejected, strict=True):
            r.computed += int(count) - lost
        partial = plan.is_partial
        zeros = torch.zeros(len(work))
        self.inputs = DraftInputs(
            batch=batch,
            tables=tables,
            hidden=self.output.hidden,
            taps=taps,
            sampled=SamplerOutput(
                token_ids=torch.full((len(work), self.num_drafts + 1), -1),
                num_sampled=torch.tensor([0 if p else 1 + a for p, a in zip(partial, accepted, strict=True)]).int(),
                num_rejected=torch.tensor(rejected).int(),
            ),
            next_tokens=torch.tensor([r.text[r.computed] for r in before]),
            keys=keys or DrawKeys(seeds=zeros.long(), temperatures=zeros),
        )
        return self.speculator.propose(self.inputs)

    def expected(self, slot, **options):
        """The oracle's drafts behind what the request has computed; fewer than K at the context's end."""
        r = self.requests[slot]
        n = r.computed
        anchor = self.oracle.anchor
        width = min(self.num_drafts + (not anchor), LENGTH - n)
        count = max(0, min(self.num_drafts, LENGTH - 1 - n))
        if count == 0:
            return [], torch.empty(0), []
        return self.oracle.drafts(self.features[slot][:n], r.text[n], count, width, **options)

    def check(self, slot, row):
        """Row of token ids against the oracle; from a near-tie on, nothing is decided. How many were compared."""
        tokens, logits, _ = self.expected(slot)
        assert len(row) == self.num_drafts
        assert row[len(tokens) :] == [-1] * (self.num_drafts - len(tokens)), "no drafts past the context's end"
        for number, (ours, token) in enumerate(zip(row, tokens, strict=False)):
            top = logits[number].topk(2).values
            if top[0] - top[1] < GAP:
                return number
            assert ours == token, f"slot {slot} at {self.requests[slot].computed}, draft {number}: {row}, {tokens}"
        return len(tokens)


def text(rng, length=LENGTH + 1):
    return [rng.randrange(SIZES["vocab_size"]) for _ in range(length)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_a_pass_without_a_cache(name, backend):
    """Chunked prefills, requests at different positions, rejection of none to all, padding, the context's end."""
    bench = Bench(*VARIANTS[name], backend=backend, kernel_block=2 if name == "dspark" else BLOCK)
    rng = random.Random(len(name))
    for slot, prompt_len in enumerate((3, 14, 7, 1)):
        bench.add(slot, text(rng), prompt_len)
    compared, rejections = 0, set()
    while any(r.computed < LENGTH for r in bench.requests.values()):
        work = []
        for slot, r in bench.requests.items():
            if r.computed >= LENGTH or rng.random() < 0.15:
                continue
            if r.computed < r.prompt_len:
                work.append((slot, rng.randint(1, min(6, r.prompt_len - r.computed)), 0, 0))
                continue
            drafts = min(rng.choice((0, 1, bench.num_drafts, bench.num_drafts)), LENGTH - 1 - r.computed)
            right = rng.randint(0, drafts)
            rejections.add((drafts, drafts - right))
            work.append((slot, 1, drafts, right))
        if not work:
            continue
        drafts = bench.step(work, pad=rng.choice((0, 3)))
        assert (drafts.token_ids.dtype, drafts.logits) == (torch.int64, None)
        for row, (slot, *_) in zip(drafts.token_ids.tolist(), work, strict=True):
            r = bench.requests[slot]
            if r.computed >= r.prompt_len:  # otherwise nobody looks
                compared += bench.check(slot, row)
        if drafts.confidence is not None:
            assert drafts.confidence.shape == drafts.token_ids.shape
            assert ((drafts.confidence >= 0) & (drafts.confidence <= 1)).all()
    assert {(bench.num_drafts, lost) for lost in range(bench.num_drafts + 1)} <= rejections
    assert compared > 80
    for cache in (*bench.caches.keys, *bench.caches.values):
        assert (cache[: BLOCK // bench.caches.layout.kernel_block_size] == 9.0).all(), "the null block is never written"


def test_b137_all_drafts_rejected_in_the_last_block():
    """Nothing beyond the committed tokens and the context's end is read or written; drafts stop where tokens must."""
    bench = Bench(*VARIANTS["dflash"])
    rng = random.Random(5)
    bench.add(0, text(rng), LENGTH - 6)
    bench.add(1, text(rng), 5)
    bench.step([(0, LENGTH - 6, 0, 0), (1, 5, 0, 0)])
    (row,) = bench.step([(0, 1, 4, 0)]).token_ids.tolist()  # up to the last position but one, and back
    assert bench.requests[0].computed == LENGTH - 5
    assert bench.check(0, row) == 4
    for _ in range(3):
        (row,) = bench.step([(0, 1, 1, 0)]).token_ids.tolist()
        bench.check(0, row)
    assert bench.requests[0].computed == LENGTH - 2
    assert row[1:] == [-1, -1, -1], "one more token fits behind the newest"
    assert bench.step([(0, 1, 0, 0)]).token_ids.tolist() == [[-1] * 4]
    assert bench.step([(0, 1, 0, 0)]).token_ids.tolist() == [[-1] * 4], "the newest token stands at max_model_len"
    (row,) = bench.step([(1, 1, 4, 2)]).token_ids.tolist()
    assert bench.check(1, row) == 4, "the other request's keys are as they were"
    held = set(bench.tables.block_ids(0)[0]) | set(bench.tables.block_ids(1)[0])
    others = [block for block in range(len(bench.caches.keys[0])) if block not in held]
    for cache in (*bench.caches.keys, *bench.caches.values):
        assert (cache[others] == 9.0).all()


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_b55_positions_past_the_end_and_without_a_block_are_not_written(name):
    """The request's first slot, and every other one that it has computed, keeps its bytes."""
    bench = Bench(*VARIANTS[name])
    bench.add(0, text(random.Random(2)), LENGTH - 1)
    bench.step([(0, LENGTH - 1, 0, 0)])
    index = bench.draft.attention_layers[0].index
    table = list(bench.tables.block_ids(0)[0])
    before = bench.caches.keys[index][table].flatten(0, 1).clone()
    bench.speculator.propose(bench.inputs)
    after = bench.caches.keys[index][table].flatten(0, 1)
    assert torch.equal(after[: LENGTH - 1], before[: LENGTH - 1])
    bare = Bench(*VARIANTS[name])
    bare.add(0, text(random.Random(2)), 8)
    bare.step([(0, 8, 0, 0)], covered=8)  # two full blocks, and none for the drafts
    for cache in (*bare.caches.keys, *bare.caches.values):
        assert (cache[0] == 9.0).all()
        assert sum(bool((block != 9.0).any()) for block in cache) == 2


def test_a_step_of_partial_prefills_writes_the_context_and_runs_no_block():
    bench = Bench(*VARIANTS["dflash"])
    bench.add(0, text(random.Random(3)), 12)
    built = []
    bench.speculator._attention = type("Watched", (), {"build": lambda self, *args: built.append(args)})()
    drafts = bench.step([(0, 5, 0, 0)])
    assert drafts.token_ids.tolist() == [[-1] * 4]
    assert not built
    bench.speculator._attention = bench.attention
    (row,) = bench.step([(0, 7, 0, 0)]).token_ids.tolist()
    assert bench.check(0, row) == 4


def test_confidence_is_the_heads_and_depends_on_the_token_before():
    bench = Bench(*VARIANTS["dspark"])
    bench.add(0, text(random.Random(4)), 9)
    drafts = bench.step([(0, 9, 0, 0)])
    assert bench.check(0, drafts.token_ids[0].tolist()) == 4
    assert drafts.confidence[0].tolist() == pytest.approx(bench.expected(0)[2], abs=1e-4)


@pytest.mark.parametrize("topk", [1, 3])
def test_only_the_likeliest_candidates_are_corrected(topk):
    bench = Bench(*VARIANTS["dspark"], draw=DSparkConfig(draft_topk=topk))
    changed = 0
    for slot in range(NUM_REQS):
        bench.add(slot, text(random.Random(slot)), 8)
        drafts = bench.step([(slot, 8, 0, 0)])
        assert drafts.token_ids[0].tolist() == bench.expected(slot, topk=topk)[0]
        changed += drafts.token_ids[0].tolist() != bench.expected(slot)[0]
    assert changed, "or the test says nothing"


@pytest.mark.parametrize("name", ["dflash", "dflash, everything shared", "dspark"])
def test_probabilistic_drafts_are_drawn_by_seed_and_position(name):
    """From the softmax that is handed over, with the stream for drafts; a greedy request has no choice."""
    raw, own, confidence, count = VARIANTS[name]
    kind = DSparkConfig if "dspark" in name else DrawingConfig
    bench = Bench(raw, own, confidence, count, draw=kind(draft_sampling="probabilistic"))
    rng, heat = random.Random(6), 3.0
    bench.add(0, text(rng), 9)
    bench.add(1, text(rng), 6)
    seeds, temperatures = [77, 5], [heat, 0.0]
    keys = DrawKeys(seeds=torch.tensor(seeds), temperatures=torch.tensor(temperatures))
    drafts = bench.step([(0, 9, 0, 0), (1, 6, 0, 0)], keys=keys)
    assert drafts.logits.shape == (2, count, SIZES["vocab_size"])
    assert drafts.logits.dtype == torch.float32
    uniform = KERNELS.uniform_from_seed(
        torch.tensor([77] * count), 9 + (torch.arange(count) << 32), RandomStream.DRAFTING
    )

    def choose(logits, number):
        probs = (logits / heat).softmax(-1).float()[None]
        return int(KERNELS.sample_from_probs(probs, uniform[number : number + 1]))

    tokens, logits, _ = bench.expected(0, choose=choose)
    assert drafts.token_ids[0].tolist() == tokens
    wide = torch.full((count, SIZES["vocab_size"]), -torch.inf)
    wide[:, bench.oracle.target_ids] = (logits / heat).float()
    torch.testing.assert_close(drafts.logits[0], wide, atol=2e-3, rtol=1e-3)
    assert bench.check(1, drafts.token_ids[1].tolist()) == count
    assert drafts.token_ids[0].tolist() != bench.expected(0)[0], "chance had a say"
    alone = Bench(raw, own, confidence, count, draw=kind(draft_sampling="probabilistic"))
    alone.add(3, bench.requests[0].text, 9)
    only = DrawKeys(seeds=torch.tensor([77]), temperatures=torch.tensor([heat]))
    alone.step([(3, 4, 0, 0)], keys=only)
    assert alone.step([(3, 5, 0, 0)], keys=only).token_ids[0].tolist() == tokens


def test_a_row_without_a_possible_token_is_served():
    """next_tokens of -1: the request is about to end; no other row notices."""
    bench = Bench(*VARIANTS["dspark"])
    rng = random.Random(8)
    bench.add(0, text(rng), 5)
    bench.add(1, text(rng), 7)
    bench.step([(0, 5, 0, 0), (1, 7, 0, 0)])
    inputs = attrs.evolve(bench.inputs, next_tokens=torch.tensor([-1, bench.requests[1].text[7]]))
    assert bench.check(1, bench.speculator.propose(inputs).token_ids[1].tolist()) == 4


def construct(raw, own=("mask_embedding",), count=3, kind=DFlash, target=TARGET, vocab_size=SIZES["vocab_size"]):
    draft = raw if isinstance(raw, DraftWeights) else draft_weights(raw, random_weights(raw, own))
    shape = WorkerShape(
        max_model_len=LENGTH,
        max_num_reqs=2,
        max_num_batched_tokens=8,
        vocab_size=vocab_size,
        num_speculative_tokens=count,
    )
    bench = Bench(*VARIANTS["dflash"])
    config = DSparkConfig() if kind is DSpark else DrawingConfig()
    return kind(config, shape, CONTEXT, KERNELS, bench.attention, bench.caches, target, draft)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"raw": raw_config(), "count": 5}, "num_speculative_tokens is 5, but the block_size 5 .* allows 4 at most"),
        (
            {"raw": raw_config("DSparkDraftModel"), "count": 6, "kind": DSpark},
            "block_size 5 of the draft DSparkDraftModel allows 5",
        ),
        ({"raw": raw_config(), "count": 0}, "limits.num_speculative_tokens is 0"),
        ({"raw": DraftWeights()}, "no weights"),
        ({"raw": raw_config("DSparkDraftModel")}, "speculator dspark"),
    ],
)
def test_what_does_not_suit_is_refused(case, message):
    with pytest.raises(UnsupportedError, match=message):
        construct(**case)


def test_b42_a_reduced_vocabulary_never_gets_the_targets_head():
    """Proposed ids are the target's, by the draft's own head and map."""
    bench = Bench(*VARIANTS["dflash"])
    assert bench.speculator._logits == bench.draft.network.compute_logits
    bench.add(0, text(random.Random(1)), 6)
    allowed = set(bench.oracle.target_ids.tolist())
    assert set(bench.step([(0, 6, 0, 0)]).token_ids[0].tolist()) <= allowed
    assert len(allowed) == 40
    shared = Bench(*VARIANTS["dflash, everything shared"])
    assert shared.speculator._logits == TARGET.network.compute_logits


# In whole workers


def generate(name, runner, asynchronous, prompts, truth=None):
    """(tokens of each prompt up to the context's end, [(prompt, position of the newest token, drafts)]) of a worker.
    Without a `truth` it does not speculate. The truth stands in for some drafts, so that any number is accepted."""
    raw, own, confidence, count = VARIANTS[name]
    weights, seen, added = random_weights(raw, own, confidence), [], []
    kind, options = (DSpark, DSparkConfig) if "dspark" in name else (DFlash, DrawingConfig)

    class OwnDraft(DraftModel):
        def __init__(self, loaded: LoadedModel) -> None:
            self._loaded = loaded

        def load(self):
            return draft_weights(raw, weights)

    class Watched(kind):
        def __init__(
            self,
            config: options,
            shape: WorkerShape,
            context: DeviceContext,
            kernels: Kernels,
            attention: AttentionBackend,
            caches: KVCaches,
            loaded: LoadedModel,
            draft: DraftWeights,
        ) -> None:
            super().__init__(config, shape, context, kernels, attention, caches, loaded, draft)
            self.prompts = {}

        def add(self, slot, request):
            self.prompts[slot] = tuple(request.token_ids[: request.prompt_len])
            added.append(slot)

        def propose(self, inputs):
            drafts = super().propose(inputs)
            batch, tokens = inputs.batch, drafts.token_ids.clone()
            newest = (batch.positions[last_valid(batch, inputs.sampled)] + 1).tolist()
            for row, slot in enumerate(batch.plan.slots.tolist()):
                if batch.is_dummy or not inputs.sampled.num_sampled[row]:
                    continue
                prompt, n = self.prompts[slot], newest[row]
                seen.append((prompt, n, tokens[row].tolist()))
                right = [*prompt, *truth[prompt]][n + 1 :][: (n + slot) % (count + 1)]
                right = [token for token, draft in zip(right, seen[-1][2], strict=False) if draft >= 0]
                tokens[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
            return attrs.evolve(drafts, token_ids=tokens)

    registry = load_plugins().registry
    registry.add(roles.DRAFT, "own", OwnDraft)
    registry.add(roles.SPECULATOR, "watched", Watched)
    sizes = {key: value for key, value in SIZES.items() if key not in ("rms_norm_eps", "max_position_embeddings")}
    components = {
        "runner": runner,
        "loader": {"use": "random", **sizes, "num_hidden_layers": NUM_TARGET_LAYERS},
        "scheduler": {"use": "continuous", "async_scheduling": asynchronous},
    }
    if truth is not None:
        components |= {"speculator": "watched", "draft": "own", "rejection": "standard"}
    limits = {"max_num_reqs": 3, "max_num_batched_tokens": 12}
    config = {
        "model": {"dtype": "float32", "max_model_len": LENGTH},
        "limits": limits | {"num_speculative_tokens": 0 if truth is None else count},
        "cache": {"block_size": BLOCK, "num_blocks": 22},
        "components": components,
    }
    assembly = assemble(config, registry=registry)
    try:
        assembly.worker.start()
        params = [
            SamplingParams(temperature=0.0, max_tokens=LENGTH - len(prompt), ignore_eos=True) for prompt in prompts
        ]
        done = assembly.engine.generate([list(prompt) for prompt in prompts], params)
    finally:
        assembly.shutdown()
    assert truth is None or len(added) > len(prompts), "a request was preempted and came again"
    return [list(completion.token_ids) for completion in done], seen


@pytest.mark.parametrize(("runner", "asynchronous"), [("v1", False), ("v2", False), ("v2", True)])
@pytest.mark.parametrize("name", ["dflash", "dspark rnn, own embeddings"])
def test_in_both_runners_drafts_and_outputs_are_right(name, runner, asynchronous):
    """Waiting and preempted requests, chunks, 0 to K accepted, up to the context's end: plain decoding's output."""
    rng = random.Random(11)
    prompts = [tuple(text(rng, length)) for length in (3, 19, 8, 1, 14)]
    plain, _ = generate(name, runner, asynchronous, prompts)
    truth = dict(zip(prompts, plain, strict=True))
    ours, seen = generate(name, runner, asynchronous, prompts, truth)
    assert ours == plain
    assert [len(prompt) + len(tokens) for prompt, tokens in truth.items()] == [LENGTH] * len(prompts)
    assert len(seen) < 0.7 * sum(map(len, plain)), "several tokens a step"
    bench = Bench(*VARIANTS[name])
    for slot, (prompt, tokens) in enumerate(truth.items()):
        bench.add(slot, [*prompt, *tokens, 0], len(prompt))
    slots = {prompt: slot for slot, prompt in enumerate(truth)}
    compared = 0
    for prompt, newest, row in seen:
        bench.requests[slots[prompt]].computed = newest
        if newest < LENGTH:
            compared += bench.check(slots[prompt], row)
    assert compared > 100
