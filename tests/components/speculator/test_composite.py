"""The composite: who is asked, how rows are put together, what is refused; in whole workers, requests choose."""

import attrs
import numpy as np
import pytest
import torch

from workerkit.components.rejection.draft_probs import DraftProbs
from workerkit.components.speculator.composite import CompositeConfig, CompositeSpeculator
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ConfigError, RequestError, UnsupportedError
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import Drafts, DraftWeights, Speculator
from workerkit.framework.testing.conformance_speculation import Row, draft_inputs, write
from workerkit.framework.testing.registry import fake_registry

SHAPE = WorkerShape(max_model_len=64, max_num_reqs=4, max_num_batched_tokens=64, vocab_size=5, num_speculative_tokens=2)


class Scripted(Speculator):
    """Proposes one token everywhere, and remembers what it was told."""

    def __init__(self, token, *, drawn=False, confident=False, taps=()):
        self._token, self._drawn, self._confident, self._taps = token, drawn, confident, taps
        self.asked = 0
        self.slots = set()

    @property
    def num_speculative_tokens(self):
        return 2

    @property
    def taps(self):
        return self._taps

    def add(self, slot, request):
        self.slots.add(slot)

    def clear(self, slot):
        self.slots.discard(slot)

    def propose(self, inputs):
        self.asked += 1
        shape = (inputs.batch.num_reqs, 2)
        return Drafts(
            token_ids=torch.full(shape, self._token),
            logits=torch.full((*shape, 5), float(self._token)) if self._drawn else None,
            confidence=torch.full(shape, 0.5) if self._confident else None,
        )


def composite(default=None, **proposers):
    return CompositeSpeculator(CompositeConfig(default=default), SHAPE, proposers)


def request(name=None):
    extra = {} if name is None else {"speculator": name}
    return NewRequest(
        req_id="r", token_ids=(1,), prompt_len=1, sampling=SamplingParams(extra_args=extra), block_ids=((1,),)
    )


def propose(part, *slots):
    return part.propose(
        draft_inputs([Row(slot=slot, computed=0, tokens=[1], sampled=[1], prompt_len=1) for slot in slots])
    )


def test_each_row_gets_the_drafts_of_its_request():
    one, two = Scripted(1), Scripted(2)
    part = composite(one=one, two=two)
    for slot, name in enumerate(["one", "two", "none", None]):
        part.add(slot, request(name))
    drafts = propose(part, 3, 2, 1, 0)
    assert drafts.token_ids.tolist() == [[1, 1], [-1, -1], [2, 2], [1, 1]]
    assert (drafts.logits, drafts.drawn, drafts.confidence) == (None, None, None)


def test_only_those_are_asked_that_a_row_uses_but_all_hear_of_all_requests():
    one, two = Scripted(1), Scripted(2)
    part = composite("none", one=one, two=two)
    for slot, name in enumerate(["two", "two", None]):
        part.add(slot, request(name))
    assert propose(part, 0, 1).token_ids.tolist() == [[2, 2], [2, 2]]
    assert propose(part, 2).token_ids.tolist() == [[-1, -1]]
    assert (one.asked, two.asked) == (0, 1)
    assert one.slots == two.slots == {0, 1, 2}
    part.clear(1)
    assert one.slots == two.slots == {0, 2}
    part.add(1, request("one"))
    assert propose(part, 1, 0).token_ids.tolist() == [[1, 1], [2, 2]], "the slot's next request has its own choice"


def test_drawn_and_sure_drafts_are_told_from_others():
    """What verifies a row depends on that row alone: a neighbour's drawn drafts change nothing."""
    part = composite(plain=Scripted(1), drawn=Scripted(2, drawn=True), sure=Scripted(3, confident=True))
    for slot, name in enumerate(["plain", "drawn", "sure", "none"]):
        part.add(slot, request(name))
    drafts = propose(part, 0, 1, 2, 3)
    assert drafts.drawn.tolist() == [False, True, False, False]
    assert drafts.logits[1].unique().tolist() == [2.0]
    assert drafts.confidence.tolist() == [[1.0] * 2, [1.0] * 2, [0.5] * 2, [1.0] * 2]
    batch = draft_inputs([Row(slot=s, computed=0, tokens=[1], sampled=[1], prompt_len=1) for s in range(4)]).batch
    probs = DraftProbs(SHAPE)
    probs.remember(batch, drafts)
    assert probs.take(batch).tolist() == [False, True, False, False]
    probs.remember(batch, attrs.evolve(drafts, drawn=None))
    assert probs.take(batch).all()
    probs.remember(batch, attrs.evolve(drafts, logits=None, drawn=None))
    assert not np.any(probs.take(batch))


def test_taps_are_those_of_all():
    part = composite(one=Scripted(1, taps=("layers.0", "embed")), two=Scripted(2, taps=("layers.0",)))
    assert list(part.taps) == ["embed", "layers.0"]


def test_what_no_proposer_is_called_is_refused():
    part = composite(ngram=Scripted(1))
    for name in ("ngram", "none"):
        part.check(request(name).sampling)
    with pytest.raises(RequestError, match="no speculator 'ngarm' in this worker; did you mean 'ngram'"):
        part.check(request("ngarm").sampling)
    with pytest.raises(RequestError, match="no speculator 3"):
        part.check(request(3).sampling)
    with pytest.raises(UnsupportedError, match=r"default: no proposer 'ngarm'"):
        composite("ngarm", ngram=Scripted(1))
    with pytest.raises(UnsupportedError, match="needs at least one"):
        composite()


def worker(speculator, runner="v2", registry=None, count=3, **components):
    return assemble(
        {
            "model": {"source": "random", "max_model_len": 64},
            "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 32, "num_speculative_tokens": count},
            "cache": {"block_size": 4, "num_blocks": 80},
            "components": {
                "runner": runner,
                "loader": {"use": "random", "vocab_size": 24, "hidden_size": 32, "intermediate_size": 32},
                "tokenizer": "fake",
                "chat_template": "fake",
                "speculator": speculator,
                **components,
            },
        },
        registry=registry or fake_registry(),
    )


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_requests_of_one_batch_choose_and_write_what_they_would_without(runner):
    prompts = {name: [5, 6, 7, 8] * 4 for name in ("ngram", "suffix", "none", "nothing said")}
    with worker({"use": "composite", "proposers": ["ngram", {"use": "suffix", "max_depth": 8}]}, runner) as assembly:
        engine = assembly.engine
        engine.start()
        tokens = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            extra = {} if name == "nothing said" else {"speculator": name}
            engine.add_request(
                prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, extra_args=extra), name
            )
        drafted = dict.fromkeys(prompts, 0)
        while engine.has_unfinished:
            for delta in engine.step():
                tokens[delta.req_id].extend(delta.token_ids)
                drafted[delta.req_id] += len(delta.token_ids) > 1
        assert drafted["none"] == 0
        assert min(drafted[name] for name in prompts if name != "none") > 0
    with worker("none", runner, count=0) as assembly:
        assembly.engine.start()
        (plain,) = write(assembly.engine, {"plain": prompts["none"]}).values()
    assert all(tokens[name] == plain[:40] for name in prompts)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_worker_refuses_unknown_names_before_a_request_is_admitted(runner):
    with worker({"use": "composite", "proposers": ["ngram"]}, runner) as assembly:
        assembly.worker.start()
        assembly.worker.check_request(SamplingParams(extra_args={"speculator": "ngram"}))
        with pytest.raises(RequestError, match="no speculator 'eagle'"):
            assembly.worker.check_request(SamplingParams(extra_args={"speculator": "eagle"}))
        with pytest.raises(RequestError, match="no stage of the sampler reads 'speculatro'"):
            assembly.worker.check_request(SamplingParams(extra_args={"speculatro": "ngram"}))
    with worker("ngram", runner) as assembly:
        assembly.worker.start()
        with pytest.raises(RequestError, match="reads 'speculator'"):
            assembly.worker.check_request(SamplingParams(extra_args={"speculator": "ngram"}))


def test_what_a_config_gets_wrong_is_told_by_name():
    class Deep(Scripted):
        def __init__(self, draft: DraftWeights) -> None:
            super().__init__(1)

    registry = fake_registry()
    for name in ("deep", "deeper"):
        registry.add(roles.PROPOSER, name, Deep)
    worker({"use": "composite", "proposers": ["deep", "ngram"]}, registry=registry)
    with pytest.raises(ConfigError, match=r"proposers\[0\] 'deep' and .*proposers\[2\] 'deeper' each need a draft"):
        worker({"use": "composite", "proposers": ["deep", "ngram", "deeper"]}, registry=registry)
    with pytest.raises(ConfigError, match="proposers: ngram more than once"):
        worker({"use": "composite", "proposers": ["ngram", "ngram"]})
    with pytest.raises(ConfigError, match="no proposer 'composite'"):
        worker({"use": "composite", "proposers": ["composite"]})
    with pytest.raises(ConfigError, match=r"proposers\[0\] 'suffix' reads sampled tokens on the host"):
        worker(
            {"use": "composite", "proposers": ["suffix"]},
            scheduler={"use": "continuous", "async_scheduling": True},
        )
