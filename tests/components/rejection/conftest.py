"""Many requests that generate at once with drafts, through the real sampler: what comes out can be counted."""

import itertools

import attrs
import numpy as np
import pytest
import torch
from sampling_oracle import process, softmax

from workerkit.components.rejection.block import BlockRejection
from workerkit.components.rejection.standard import StandardRejection
from workerkit.components.sampler import bans, penalties, truncation
from workerkit.components.sampler.torch_sampler import TorchSampler, TorchSamplerConfig
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import RandomStream
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import Drafts
from workerkit.kernels import cpu, reference

METHODS = {"standard": StandardRejection, "block": BlockRejection}
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


class Ops:
    """The reference's kernels, which are the fastest for many short rows; some replaced."""

    def __init__(self, **replaced):
        short = {"uniform_from_seed": cpu.OPS["uniform_from_seed"], "sample_from_probs": inverse_cdf}
        self.__dict__.update({**reference.OPS, **short, **replaced})


def inverse_cdf(probs, uniform):
    """`sample_from_probs` without its blocks of 128."""
    cdf = probs.double().cumsum(-1)
    return (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1).clamp(max=probs.shape[1] - 1)


def verify_batch(computed, tokens, num_drafts=None, slots=None):
    """computed [R], tokens [R, n + 1] int64 tensors: the newest token of each request and its drafts, -1 for one that
    was never proposed. `num_drafts` [R]: rows that have fewer than n."""
    rows, width = tokens.shape
    counts = np.full(rows, width - 1) if num_drafts is None else np.array(num_drafts)
    used = torch.arange(width) <= torch.from_numpy(counts)[:, None]
    where = torch.arange(rows)[:, None].expand(-1, width)[used]
    positions = (computed[:, None] + torch.arange(width))[used]
    draft_ids = torch.cat([tokens[:, 1:], torch.full((rows, 1), -1)], 1)
    draft_ids[torch.arange(rows), torch.from_numpy(counts)] = -1
    starts = np.concatenate([[0], np.cumsum(counts + 1)]).astype(np.int32)
    ends = (computed.numpy() + counts + 1).astype(np.int32)
    slots = np.arange(rows) if slots is None else np.array(slots)
    count = len(where)
    return InputBatch(
        plan=BatchPlan(
            req_ids=tuple(map(str, slots)),
            slots=slots,
            num_scheduled_tokens=(counts + 1).astype(np.int32),
            num_computed_tokens=computed.numpy().astype(np.int32),
            num_draft_tokens=counts.astype(np.int32),
            prefill_lens=np.ones(rows, np.int32),
            prompt_lens=np.ones(rows, np.int32),
        ),
        num_reqs=rows,
        num_reqs_padded=rows,
        num_tokens=count,
        num_tokens_padded=count,
        max_query_len=width,
        idx_mapping=torch.from_numpy(slots),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(ends),
        host_seq_lens=HostLengths(upper_bound=ends, exact=lambda: ends),
        input_ids=tokens[used].clamp(min=0).int(),
        positions=positions,
        rope_lens=positions + 1,
        token_rows=where,
        logits_indices=torch.arange(count),
        logits_rows=where,
        draft_ids=draft_ids[used],
        cu_num_logits_np=starts,
    )


class World:
    """Requests that all go on from the same text, with a target and a draft that look at the previous token only.

    target, draft: float32 [V, V] logits. `one_hot`: drafts without a distribution, the draft's likeliest tokens.
    `draft_keys`: position of the first draft, its number -> position whose random number draws it.
    """

    PROMPT = (1, 3, 0, 3)

    def __init__(
        self,
        method,
        target,
        draft,
        num_drafts=3,
        rows=4_000,
        one_hot=False,
        draft_keys=lambda first, number: first + (number << 32),
        kernels=None,
        **params,
    ):
        vocab = len(target)
        self.shape = WorkerShape(
            max_model_len=64, max_num_reqs=rows, max_num_batched_tokens=1, vocab_size=vocab,
            num_speculative_tokens=num_drafts,
        )  # fmt: skip
        context = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
        self.kernels = kernels or Ops()
        given = {"shape": self.shape, "context": context, "kernels": self.kernels}
        stages = (bans.LogitBias, penalties.Penalties, truncation.Temperature, truncation.TopKTopP)
        built = [stage(**{k: v for k, v in given.items() if k in stage.__init__.__annotations__}) for stage in stages]
        self.sampler = TorchSampler(TorchSamplerConfig(), self.shape, context, self.kernels, tuple(built))
        self.rejection = METHODS[method](self.shape, self.kernels)
        self.target, self.draft, self.one_hot, self.draft_keys = target, draft, one_hot, draft_keys
        self.params = SamplingParams(**{**NEUTRAL, **params})
        for slot in range(rows):
            request = NewRequest(
                req_id=str(slot), token_ids=self.PROMPT, prompt_len=len(self.PROMPT), block_ids=((1,),),
                sampling=attrs.evolve(self.params, seed=slot),
            )  # fmt: skip
            self.sampler.add(slot, request)
            self.rejection.add(slot, request)

    def step(self, newest, position, shift):
        """newest, position [R] int64: the newest token and where it stands -> what the step yields."""
        tokens, logits = newest[:, None], []
        keys = self.sampler.keys(verify_batch(position, tokens))
        for number in range(self.shape.num_speculative_tokens):
            logits.append(self.draft[tokens[:, -1]])
            key = self.draft_keys(position + shift, number)
            uniform = self.kernels.uniform_from_seed(keys.seeds, key, RandomStream.DRAFTING)
            drawn = self.kernels.sample_from_probs(logits[-1].softmax(-1), uniform)
            drafted = logits[-1].argmax(-1) if self.one_hot else drawn
            tokens = torch.cat([tokens, drafted[:, None]], 1)
        batch = verify_batch(position, tokens)
        drafts = Drafts(token_ids=tokens[:, 1:], logits=None if self.one_hot else torch.stack(logits, 1))
        self.rejection.remember(batch, drafts)
        processed = self.sampler.process(self.target[tokens.flatten()], batch)
        # Other positions, other random numbers; nothing else looks at them.
        shifted = attrs.evolve(batch, positions=batch.positions + shift)
        output = self.rejection.verify(processed, shifted, self.sampler)
        self.sampler.commit(batch, output)
        return output

    def generate(self, length, repeats):
        """[repeats * R, length] int64, and how many drafts of the first step were accepted on average."""
        rows, known = self.shape.max_num_reqs, len(self.PROMPT)
        texts, accepted = [], []
        for repeat in range(repeats):
            text = torch.full((rows, length + self.shape.num_speculative_tokens + 1), -1)
            done = torch.zeros(rows, dtype=torch.int64)
            newest = torch.full((rows,), self.PROMPT[-1])
            while done.min() < length:
                # Requests that have enough go on at the end, where nobody looks.
                output = self.step(newest, known - 1 + done, repeat * 1000)
                places = done[:, None] + torch.arange(output.token_ids.shape[1])
                text = text.scatter(1, places.clamp(max=text.shape[1] - 1), output.token_ids)
                accepted += [output.num_sampled.double().mean() - 1] if done.max() == 0 else []
                newest = output.token_ids.gather(1, output.num_sampled[:, None].long() - 1)[:, 0]
                done = (done + output.num_sampled).clamp(max=length)
            texts.append(text[:, :length])
        return torch.cat(texts).numpy(), float(np.mean(accepted))

    def exact(self, length, **other):
        """[V] * length: how likely each text is, computed with `other` parameters."""
        vocab = len(self.target)
        params, probs = attrs.evolve(self.params, **other), np.zeros((vocab,) * length)
        following = {}
        for size in range(length):
            for text in itertools.product(range(vocab), repeat=size):
                logits = self.target[text[-1] if text else self.PROMPT[-1]].numpy()
                following[text] = softmax(process(logits, params, self.PROMPT, text))
        for text in itertools.product(range(vocab), repeat=length):
            probs[text] = np.prod([following[text[:size]][text[size]] for size in range(length)])
        return probs


def chi_square(texts, probs):
    """How far counts are from what is expected, in standard deviations of the statistic; inf for the impossible."""
    seen = np.bincount(np.ravel_multi_index(texts.T, probs.shape), minlength=probs.size)
    expected = len(texts) * probs.flatten()
    if seen[expected == 0].any():
        return np.inf
    rare = expected < 5  # together as one class
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    degrees = len(seen) - 1
    return float((((seen - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.fixture
def new_world():
    return World


@pytest.fixture
def distance():
    return chi_square


@pytest.fixture
def new_ops():
    return Ops


@pytest.fixture
def new_batch():
    return verify_batch


def new_part(method, vocab, num_drafts, rows, kernels=None):
    shape = WorkerShape(
        max_model_len=64, max_num_reqs=rows, max_num_batched_tokens=64, vocab_size=vocab,
        num_speculative_tokens=num_drafts,
    )  # fmt: skip
    return METHODS[method](shape, kernels or Ops())


@pytest.fixture
def new_rejection():
    return new_part
