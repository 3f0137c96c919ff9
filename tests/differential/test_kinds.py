"""A tiny model of each kind of network, saved by Hugging Face: the same request gets the same tokens however it is
served.

What V1 writes for one request at a time, without chunks, cached prefixes and drafts, is written by both runners, with
and without asynchronous scheduling: in batches that requests join and leave at any step, with prompts in chunks, after
preemptions, behind prefixes of other prompts and of earlier answers, and with drafts, of which some are rejected. So it
is with adapters, and with keys and values in 8 bits. The tokens themselves are compared with Hugging Face's in
tests/oracle.
"""

import random
from collections import Counter, deque
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from adapters import write_adapter
from hf_oracle import random_model
from letters import EOS, VOCAB, Letters
from sampling_oracle import OFF
from tiny_families import LATENT

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.engine import PromptInputs
from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams
from workerkit.framework.plugins import load_plugins
from workerkit.framework.registry import Registry

MAX_MODEL_LEN = 96
NUM_DRAFTS = 3
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
NGRAM = {"speculator": {"use": "ngram", "min_n": 1}}
TARGET = {"speculator": "draft_model", "draft": "target"}
DENSE = {"speculator": "draft_model", "draft": {"use": "random", "architecture": "LlamaForCausalLM", "seed": 1}}
MTP = {"speculator": "mtp", "draft": {"use": "random", "architecture": "DeepSeekMTPModel"}}


@attrs.frozen(kw_only=True)
class Kind:
    """A family, and how it is served wherever it is."""

    family: str  # what the names of transformers' classes begin with
    fields: dict
    few_blocks: int  # some requests are preempted
    drafts: tuple = (TARGET,)  # components; without any, n-grams take their place
    cache: dict = attrs.field(factory=dict)
    has_adapters: bool = False


GEMMA = {
    "head_dim": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
}
KINDS = {
    "dense": Kind(family="Qwen3", fields={"head_dim": 16, "tie_word_embeddings": True}, few_blocks=36),
    "adapters": Kind(family="Llama", fields={}, few_blocks=36, has_adapters=True),
    "experts": Kind(
        family="Qwen3Moe",
        fields={
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 32,
        },
        few_blocks=36,
    ),
    "latent": Kind(
        family="DeepseekV3",
        fields=LATENT,
        few_blocks=36,
        drafts=(MTP, TARGET),
    ),
    "delta-net": Kind(
        family="Qwen3Next",
        fields={
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
        few_blocks=40,
        drafts=(DENSE,),
        cache={"state_interval": 4},
    ),
    "mamba2": Kind(
        family="Bamba",
        fields={
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_state": 12,
            "mamba_chunk_size": 16,
        },
        few_blocks=40,
        drafts=(DENSE,),
        cache={"state_interval": 4},
    ),
    "windows": Kind(family="Gemma3Text", fields=GEMMA, few_blocks=40),
    "rounded": Kind(
        family="Gemma3Text", fields=GEMMA, few_blocks=32, drafts=(), cache={"quantization": {"sliding": "int8"}}
    ),
    "sinks": Kind(
        family="GptOss",
        fields={
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "attn_implementation": "eager",
        },
        few_blocks=40,
    ),
}


@attrs.frozen(kw_only=True)
class Way:
    """How requests are served together."""

    runner: str
    ahead: bool = False  # asynchronous scheduling
    tokens: int  # of a step at most
    few_blocks: bool = False
    drafts: int | None = None  # 0: n-grams; 1, 2: Kind.drafts
    components: dict = attrs.field(factory=dict)


# All pairs of a runner, with and without asynchronous scheduling, of proposers, and of few blocks and many.
WAYS = {
    "v1": Way(runner="v1", tokens=11, few_blocks=True),
    "v1-ngram": Way(runner="v1", tokens=64, drafts=0),
    "v1-draft": Way(runner="v1", tokens=12, drafts=1, few_blocks=True),
    "v2": Way(runner="v2", tokens=7),
    "v2-ngram": Way(runner="v2", tokens=16, drafts=0, few_blocks=True),
    "v2-draft": Way(runner="v2", tokens=40, drafts=2),
    "ahead": Way(runner="v2", ahead=True, tokens=20, few_blocks=True),
    "ahead-ngram": Way(runner="v2", ahead=True, tokens=24, drafts=0, few_blocks=True),
    "ahead-draft": Way(runner="v2", ahead=True, tokens=13, drafts=1),
}
PARAMS = (
    {},
    {"logprobs": 2},
    {"temperature": 0.8, "top_k": 8},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.7, "logprobs": 1},
    {"allowed_token_ids": (3, 4)},
    {"temperature": 1.2, "min_p": 0.05, "n": 2},
    {"stop": ("a", "Q", "7x", "c"), "include_stop_str_in_output": True},
    {"temperature": 0.9, "stop_token_ids": (3, 40, 41, 42)},
    {"prompt_logprobs": 1, "ignore_eos": True},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": {5: 3.0}, "bad_words_token_ids": ((7,), (8, 9))},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-m]{4,12}")},
)


@attrs.frozen(kw_only=True)
class Arrival:
    req_id: str
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    lora: str | None
    abort_at: int | None = None
    first_len: int = 0  # of the prompt that it goes on from the answer of


def random_tokens(rng, count):
    return tuple(rng.randrange(EOS) for _ in range(count))


def first_arrivals(rng, kind):
    """Prompts of any length, with two beginnings, and that repeat themselves."""
    beginnings = [random_tokens(rng, count) for count in (24, 41)]
    step = 0
    for number in range(2 * len(PARAMS)):
        prompt = (
            beginnings[number // 4 % 2] + random_tokens(rng, rng.randint(1, 12)),
            random_tokens(rng, rng.choice((1, 2, 9, 33, 60))),
            beginnings[number // 4 % 2] + random_tokens(rng, rng.randint(1, 12)),
            random_tokens(rng, rng.randint(2, 5)) * 6,
        )[number % 4]
        given = {"seed": number, "max_tokens": rng.randint(8, 20)} | PARAMS[number % len(PARAMS)]
        yield Arrival(
            req_id=f"first {number}",
            step=step,
            prompt=prompt,
            params=SamplingParams(**OFF | given),
            lora=(None, "x", "y")[number // 4 % 3] if kind.has_adapters else None,
            abort_at=step + rng.randint(3, 9) if number % 10 == 9 else None,
        )
        step += rng.choice((0, 1, 3))


def later_arrivals(rng, first, stories):
    """Prompts that go on behind answers to the first ones."""
    for number, arrival in enumerate(first):
        answer = tuple(stories[arrival.req_id, 0].token_ids)
        prompt = arrival.prompt + answer + random_tokens(rng, 2)
        if (number % 8 == 1 or arrival.params.allowed_token_ids) and len(prompt) <= MAX_MODEL_LEN - 12:
            params = SamplingParams(**OFF | {"max_tokens": 12, "ignore_eos": True})
            yield Arrival(
                req_id=f"later {number}",
                step=50 + 2 * number,
                prompt=prompt,
                params=params,
                lora=arrival.lora,
                first_len=len(arrival.prompt),
            )


@attrs.define
class Story:
    """What came of one completion."""

    token_ids: list = attrs.field(factory=list)
    text: str = ""
    reason: str | None = None
    logprobs: list = attrs.field(factory=list)  # of the prompt and of the answer
    num_cached: int = 0


def run(assembly, arrivals, aborts=True):
    """(request, completion) -> its story."""
    engine = assembly.engine
    stories, waiting, now = {}, deque(arrivals), 0
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].step <= now:
            arrival = waiting.popleft()
            prompt = PromptInputs(prompt=arrival.prompt, lora=arrival.lora)
            engine.add_request(prompt, arrival.params, arrival.req_id)
        for arrival in arrivals:
            if aborts and arrival.abort_at == now:
                engine.abort(arrival.req_id)
        for delta in engine.step():
            story = stories.setdefault((delta.req_id, delta.index), Story())
            story.token_ids += delta.token_ids
            story.text += delta.text
            story.reason = delta.finish_reason or story.reason
            story.num_cached += delta.num_cached_tokens
            story.logprobs += [entry for entry in delta.prompt_logprobs or () if entry is not None]
            story.logprobs += delta.logprobs or ()
        engine.check_integrity()
        now += 1
    assert assembly.get(roles.RUNNER).num_requests == 0
    assert engine.stats.num_free_blocks == engine.layout.num_blocks - 1
    return stories


def assert_same(stories, expected, arrivals, way):
    """Of aborted requests, what came before."""
    assert stories.keys() == expected.keys()
    for arrival in arrivals:
        for index in range(arrival.params.n):
            ours, theirs = stories[arrival.req_id, index], expected[arrival.req_id, index]
            where = f"{arrival}, {way}"
            if arrival.abort_at is not None and ours.reason == "abort":
                assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)], where
                continue
            assert (ours.token_ids, ours.text, ours.reason) == (theirs.token_ids, theirs.text, theirs.reason), where
            assert [entry.token_id for entry in ours.logprobs] == [entry.token_id for entry in theirs.logprobs]
            values, right = ([(e.logprob, *(v for _, v in e.top)) for e in s.logprobs] for s in (ours, theirs))
            assert np.array(values) == pytest.approx(np.array(right), abs=1e-3)


@attrs.frozen(kw_only=True)
class Saved:
    """A kind's model in a folder."""

    kind: Kind
    folder: Path
    registry: Registry

    def assemble(self, limits, cache, components):
        kind = self.kind
        adapters = {name: str(self.folder / name) for name in ("x", "y")}
        lora = {"lora": {"use": "peft", "adapters": adapters}} if kind.has_adapters else {}
        config = {
            "model": {"source": str(self.folder), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
            "limits": limits,
            "cache": {"block_size": 4, **kind.cache, **cache},
            "components": {"tokenizer": "letters", **lora, **components},
        }
        return assemble(config, registry=self.registry)

    def assemble_as(self, way):
        limits = {"max_num_reqs": 8, "max_num_batched_tokens": way.tokens}
        proposers = (NGRAM, *self.kind.drafts)
        proposer = {} if way.drafts is None else proposers[min(way.drafts, len(proposers) - 1)]
        if proposer:
            limits["num_speculative_tokens"] = NUM_DRAFTS
        cache = {"num_blocks": self.kind.few_blocks if way.few_blocks else 500}
        scheduler = {"use": "continuous", "async_scheduling": way.ahead}
        return self.assemble(
            limits, cache, {"runner": way.runner, "scheduler": scheduler, **proposer, **way.components}
        )

    def served_alone(self, seed):
        """(arrivals, their stories)."""
        rng = random.Random(seed)
        first = list(first_arrivals(rng, self.kind))
        limits = {"max_num_reqs": 1, "max_num_batched_tokens": MAX_MODEL_LEN}
        scheduler = {"use": "continuous", "prefix_caching": False}
        components = {"runner": "v1", "graph": "none", "scheduler": scheduler}
        with self.assemble(limits, {"num_blocks": 500}, components) as assembly:
            assembly.engine.start()
            stories = run(assembly, first, aborts=False)
            later = list(later_arrivals(rng, first, stories))
            stories |= run(assembly, later)
            stats = assembly.engine.stats
        assert (stats.num_preemptions, stats.num_cached_tokens, stats.num_drafts) == (0, 0, 0)
        return [*first, *later], stories


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    torch.set_num_threads(1)
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    registry = load_plugins().registry
    registry.add(roles.TOKENIZER, "letters", Letters)
    model = random_model(kind.family, **SMALL | kind.fields)
    model.save_pretrained(folder)
    if kind.has_adapters:
        write_adapter(folder / "x", model, seed=1)
        write_adapter(folder / "y", model, seed=2, rank=9, layers=[1])
    return Saved(kind=kind, folder=folder, registry=registry)


@pytest.fixture(scope="module")
def alone(saved):
    arrivals, stories = saved.served_alone(seed=1)
    reasons = Counter(story.reason for story in stories.values())
    assert min(reasons["stop"], reasons["length"]) >= 3
    assert len({token for story in stories.values() for token in story.token_ids}) > 40, "the texts are dull"
    return arrivals, stories


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_however_they_are_served(saved, alone, way):
    arrivals, expected = alone
    way = WAYS[way]
    with saved.assemble_as(way) as assembly:
        assembly.engine.start()
        stories = run(assembly, arrivals)
        stats = assembly.engine.stats
    assert_same(stories, expected, arrivals, way)
    if way.few_blocks:
        assert stats.num_preemptions > 0
        assert stats.num_cached_tokens > 0
    else:
        later = [arrival for arrival in arrivals if arrival.first_len]
        assert any(stories[arrival.req_id, 0].num_cached > arrival.first_len for arrival in later), "only prompts again"
    if way.drafts is not None:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("saved", ["delta-net", "mamba2"], indirect=True)
def test_a_target_with_recurrent_layers_does_not_draft_for_itself(saved):
    limits = {"num_speculative_tokens": NUM_DRAFTS}
    with (
        saved.assemble(limits, {"num_blocks": 100}, TARGET) as assembly,
        pytest.raises(UnsupportedError, match="recurrent layers, whose state cannot be taken back"),
    ):
        assembly.engine.start()


PARTS = (
    {},
    {"graph": "none"},
    {"kernels": ["reference"]},
    {"attention": "reference", "kernels": ["cpu", "reference"]},
    {"attention": "sdpa", "graph": "none"},
)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_the_same_tokens_in_any_combination(saved, seed):
    arrivals, expected = saved.served_alone(seed)
    rng = random.Random(seed)
    for _ in range(8):
        few_blocks, ahead = rng.random() < 0.5, rng.random() < 0.4
        way = Way(
            runner="v2" if ahead else rng.choice(("v1", "v2")),
            ahead=ahead,
            tokens=rng.randint(4, 12 if few_blocks else 80),
            few_blocks=few_blocks,
            drafts=rng.choice((None, 0, 1, 2)),
            components=rng.choice(PARTS),
        )
        with saved.assemble_as(way) as assembly:
            assembly.engine.start()
            assert_same(run(assembly, arrivals), expected, arrivals, way)
