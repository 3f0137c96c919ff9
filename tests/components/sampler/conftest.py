"""A sampler over real kernels, and requests whose text the bench keeps on the host, as a model of what it must know."""

import attrs
import numpy as np
import pytest
import torch

from workerkit.components.sampler import bans, penalties, truncation
from workerkit.components.sampler.torch_sampler import TorchSampler, TorchSamplerConfig
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.fakes_batch import make_batch
from workerkit.kernels import cpu, reference

CPU = torch.device("cpu")
LIBRARIES = {"reference": reference.OPS, "cpu": {**reference.OPS, **cpu.OPS}}
STAGES = {
    "allowed_token_ids": bans.AllowedTokenIds,
    "logit_bias": bans.LogitBias,
    "min_tokens": bans.MinTokens,
    "penalties": penalties.Penalties,
    "bad_words": bans.BadWords,
    "temperature": truncation.Temperature,
    "top_n_sigma": truncation.TopNSigma,
    "min_p": truncation.MinP,
    "top_k_top_p": truncation.TopKTopP,
    "typical_p": truncation.TypicalP,
}


@attrs.define
class Live:
    """A request in a slot."""

    prompt: list
    output: list
    computed: int


class Ops:
    """Kernels of one library."""

    def __init__(self, library):
        self.__dict__.update(LIBRARIES[library])


class Bench:
    """`sampler` and the requests it was given. A batch is a list of (slot, drafts) of decodes, or (slot, tokens) of
    chunks of a prefill."""

    def __init__(
        self,
        vocab=16,
        rows=8,
        max_model_len=64,
        drafts=3,
        stages=None,
        extra=(),
        library="reference",
        wrap=lambda kernels: kernels,
        **config,
    ):
        self.shape = WorkerShape(
            max_model_len=max_model_len,
            max_num_reqs=rows,
            max_num_batched_tokens=256,
            vocab_size=vocab,
            num_speculative_tokens=drafts,
        )
        self.context = DeviceContext(device=CPU, dtype=torch.float32)
        self.kernels = wrap(Ops(library))
        names = STAGES if stages is None else stages
        built = [self.build(STAGES[name]) for name in names]
        self.sampler = TorchSampler(
            TorchSamplerConfig(**config), self.shape, self.context, self.kernels, (*built, *extra)
        )
        self.live = {}

    def build(self, stage):
        known = {"shape": self.shape, "context": self.context, "kernels": self.kernels}
        wanted = stage.__init__.__annotations__
        return stage(**{name: value for name, value in known.items() if name in wanted})

    def admit(self, slot, prompt=(1,), output=(), stop_ids=(), computed=None, **params):
        """A request whose prompt and output are known, ready to decode, or from `computed` on."""
        known = (*prompt, *output)
        request = NewRequest(
            req_id=f"r{slot}",
            token_ids=known,
            prompt_len=len(prompt),
            sampling=SamplingParams(**params),
            stop_ids=frozenset(stop_ids),
            block_ids=((1,),),
        )
        self.sampler.add(slot, request)
        self.live[slot] = Live([*prompt], [*output], len(known) - 1 if computed is None else computed)

    def drop(self, slot):
        self.sampler.clear(slot)
        del self.live[slot]

    def decode(self, *rows):
        """A batch of (slot, drafts), or of slots without drafts."""
        return self.batch([row if isinstance(row, tuple) else (row, ()) for row in rows], [None] * len(rows))

    def batch(self, rows, chunks):
        """As decode; a chunk that is not None is how many known tokens the row computes."""
        tokens, computed, drafts = [], [], []
        for (slot, drafted), chunk in zip(rows, chunks, strict=True):
            live = self.live[slot]
            known = [*live.prompt, *live.output]
            end = len(known) if chunk is None else live.computed + chunk
            tokens.append([*known[live.computed : end], *drafted])
            computed.append(live.computed)
            drafts.append(len(drafted))

        def ints(values):
            return np.array(values, dtype=np.int32)

        known_lens = [len(self.live[slot].prompt) + len(self.live[slot].output) for slot, _ in rows]
        plan = BatchPlan(
            req_ids=tuple(f"r{slot}" for slot, _ in rows),
            slots=np.array([slot for slot, _ in rows]),
            num_scheduled_tokens=ints([len(ids) for ids in tokens]),
            num_computed_tokens=ints(computed),
            num_draft_tokens=ints(drafts),
            prefill_lens=ints(known_lens),
            prompt_lens=ints([len(self.live[slot].prompt) for slot, _ in rows]),
        )
        desc = BatchDescriptor(num_tokens=sum(map(len, tokens)) + 3, num_reqs=len(rows) + 1)
        return make_batch(plan, computed, tokens, desc, CPU)

    def process(self, logits, batch):
        """The rows after all stages; the caller's logits stay as they are."""
        return self.sampler.process(logits.clone(), batch)

    def draw(self, logits, batch):
        return self.sampler.draw(self.process(logits, batch), batch)

    def commit(self, batch, *tokens):
        """Each row's tokens become final; none for a chunk of a prefill that goes on."""
        width = max(map(len, tokens))
        self.sampler.commit(batch, output_of(tokens, width))
        for slot, ids, scheduled in zip(
            batch.plan.slots.tolist(), tokens, batch.plan.num_scheduled_tokens.tolist(), strict=True
        ):
            live = self.live[slot]
            live.output += ids
            live.computed = live.computed + scheduled if not ids else len(live.prompt) + len(live.output) - 1


def output_of(tokens, width):
    """Lists of tokens -> SamplerOutput; columns past a row's tokens hold rubbish."""
    return SamplerOutput(
        token_ids=torch.tensor([[*ids, *[7] * (width - len(ids))] for ids in tokens]),
        num_sampled=torch.tensor([len(ids) for ids in tokens], dtype=torch.int32),
        num_rejected=torch.zeros(len(tokens), dtype=torch.int32),
    )


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def new_bench():
    return Bench


@pytest.fixture
def stage_classes():
    return STAGES
