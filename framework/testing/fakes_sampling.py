"""Fakes from logits to tokens and from tokens to drafts, and the pipeline that carries them."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import PipelineStage
from workerkit.framework.interfaces.model import ModelOutput
from workerkit.framework.interfaces.request import GrammarOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import (
    DrawKeys,
    Grammar,
    Sampler,
    SamplerOutput,
    SamplerStage,
    SamplingContext,
)
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import (
    DraftInputs,
    DraftModel,
    Drafts,
    DraftWeights,
    RejectionSampler,
    Speculator,
    VerifyBudget,
)
from workerkit.framework.testing.fakes_model import FAKE_SALT, FAKE_VOCAB, next_token


class FakeStage(SamplerStage):
    """Leaves the logits alone."""

    def applies_to(self, params: SamplingParams) -> bool:
        return True

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        return logits


class FakeSampler(Sampler):
    """The likeliest token, whatever was asked for."""

    def process(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        return logits

    def draw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        largest, tokens = logits.max(dim=-1)
        return tokens.masked_fill(~largest.isfinite(), -1)

    def keys(self, batch: InputBatch) -> DrawKeys:
        zeros = torch.zeros(batch.num_reqs)
        return DrawKeys(seeds=zeros.long(), temperatures=zeros)


class FakeRejection(RejectionSampler):
    """Accepts drafts as long as they are what the sampler draws: the tokens are those of a run without drafts."""

    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        drawn = sampler.draw(logits, batch)
        num_drafts = batch.plan.num_draft_tokens
        tokens = torch.zeros(batch.num_reqs, int(num_drafts.max(initial=0)) + 1, dtype=torch.int64)
        num_sampled = torch.zeros(batch.num_reqs, dtype=torch.int32)
        num_rejected = torch.zeros(batch.num_reqs, dtype=torch.int32)
        for row in range(batch.num_reqs):
            if batch.plan.is_partial[row]:
                continue
            start, count = int(batch.cu_num_logits_np[row]), int(num_drafts[row])
            accepted = 0
            while accepted < count and batch.draft_ids[start + accepted] == drawn[start + accepted] >= 0:
                accepted += 1
            tokens[row, : accepted + 1] = drawn[start : start + accepted + 1]
            num_sampled[row], num_rejected[row] = accepted + 1, count - accepted
        return SamplerOutput(token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected)


class FakeSpeculator(Speculator):
    """Works out what FakeNetwork will say next, and is wrong on purpose about every third draft."""

    def __init__(self, shape: WorkerShape) -> None:
        self._count = shape.num_speculative_tokens

    @property
    def num_speculative_tokens(self) -> int:
        return self._count

    def propose(self, inputs: DraftInputs) -> Drafts:
        batch, sampled = inputs.batch, inputs.sampled
        drafts = torch.full((batch.num_reqs, self._count), -1, dtype=torch.int64)
        for row in range(batch.num_reqs):
            if not sampled.num_sampled[row]:
                continue
            logit = int(batch.cu_num_logits_np[row]) + int(sampled.num_sampled[row]) - 1
            _, position, history, _ = inputs.hidden[batch.logits_indices[logit]].long()
            token = inputs.next_tokens[row]
            for draft in range(self._count):
                history, position = history + token, position + 1
                token = next_token(history, position, torch.tensor(FAKE_SALT))
                if int(position) % 3 == 0:
                    token = (token + 1) % FAKE_VOCAB
                drafts[row, draft] = token
        return Drafts(token_ids=drafts)


class FakeDraft(DraftModel):
    """No weights."""

    def load(self) -> DraftWeights:
        return DraftWeights()


class FakeGrammar(Grammar):
    """Bit by bit."""

    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput | None) -> torch.Tensor:
        if grammar is None:
            return logits
        masks = iter(grammar.bitmask)
        for req_id in grammar.req_ids:
            row = batch.req_ids.index(req_id)
            for logit in range(batch.cu_num_logits_np[row], batch.cu_num_logits_np[row + 1]):
                bits = np.unpackbits(next(masks).view(np.uint8), bitorder="little")[: logits.shape[1]]
                logits[logit, torch.from_numpy(bits == 0).to(logits.device)] = float("-inf")
        return logits


@attrs.frozen(kw_only=True)
class FakeVerifyBudgetConfig:
    """Options of `verify_budget: fake`."""

    keep: int | None = attrs.field(
        default=None, metadata={"doc": "drafts of each request that are kept; null keeps all"}
    )


class FakeVerifyBudget(VerifyBudget):
    """The first few drafts of each request."""

    def __init__(self, config: FakeVerifyBudgetConfig) -> None:
        self._keep = config.keep

    def trim(self, drafts: Drafts, batch: InputBatch) -> Drafts:
        if self._keep is None:
            return drafts
        token_ids = drafts.token_ids.clone()
        token_ids[:, self._keep :] = -1
        return attrs.evolve(drafts, token_ids=token_ids)


@attrs.frozen(kw_only=True)
class FakePipelineConfig:
    """Options of `pipeline: fake`."""

    is_last: bool = attrs.field(default=True, metadata={"doc": "whether this stage computes logits"})
    token: int = attrs.field(default=7, metadata={"doc": "what an imagined last stage samples for every request"})


class FakePipeline(PipelineStage):
    """Alone, or with an imagined last stage elsewhere that always samples the same token."""

    def __init__(self, config: FakePipelineConfig) -> None:
        self._config = config

    @property
    def is_last(self) -> bool:
        return self._config.is_last

    def receive(self, batch: InputBatch) -> torch.Tensor | None:
        return None

    def send(self, output: ModelOutput) -> None:
        """Nobody is there."""

    def broadcast(self, output: SamplerOutput) -> None:
        """Nobody is there."""

    def receive_sampled(self, batch: InputBatch) -> SamplerOutput:
        return SamplerOutput(
            token_ids=torch.full((batch.num_reqs, 1), self._config.token),
            num_sampled=torch.from_numpy(~batch.plan.is_partial).int(),
            num_rejected=torch.zeros(batch.num_reqs, dtype=torch.int32),
        )
