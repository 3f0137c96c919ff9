"""The sampler: distributions, seeds, independence of the batch, defaults, and what it refuses."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_oracle import process as oracle
from sampling_oracle import softmax
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workerkit.components.sampler.torch_sampler import TorchSamplerConfig
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.sampling import RandomStream, SamplerOutput, SamplerStage
from workerkit.framework.interfaces.sampling_params import SamplingParams

VOCAB = 16
OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
DRAWS = 100_000
PROMPT, OUTPUT, STOP_IDS = (3, 4), (5, 5, 6), (1, 2)
EACH = {
    "allowed_token_ids": {"allowed_token_ids": (0, 3, 5, 6, 8, 9, 12)},
    "logit_bias": {"logit_bias": {3: 1.5, 7: -2.0}},
    "min_tokens": {"min_tokens": 9},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "bad_words": {"bad_words_token_ids": ((8,), (5, 6, 9))},
    "temperature": {"temperature": 0.7},
    "top_n_sigma": {"top_n_sigma": 2.0},
    "min_p": {"min_p": 0.05},
    "top_k_top_p": {"top_k": 9, "top_p": 0.8},
    "typical_p": {"typical_p": 0.9},
}
WHOLE = {  # every stage at once, none of them so narrow that nothing is left to test
    **{key: value for params in EACH.values() for key, value in params.items()},
    "allowed_token_ids": tuple(range(1, VOCAB)), "temperature": 1.2, "top_n_sigma": 2.5, "min_p": 0.02, "top_k": 12,
    "top_p": 0.97, "typical_p": 0.95,
}  # fmt: skip


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5


def chi_square(seen, probs):
    """How far counts are from what is expected, in standard deviations of the statistic; inf for the impossible."""
    possible = probs > 0
    if seen[~possible].any():
        return np.inf
    expected = DRAWS * probs[possible]
    degrees = possible.sum() - 1
    statistic = ((seen[possible] - expected) ** 2 / expected).sum()
    return (statistic - degrees) / np.sqrt(2 * degrees)


def drawn(bench, logits, **params):
    """Counts of 10^5 draws, each at a position of its own: rows of a request differ in nothing else."""
    bench.admit(0, PROMPT, OUTPUT, STOP_IDS, seed=11, **params)
    one = bench.decode(0)
    processed = bench.process(logits[None], one)
    batch = attrs.evolve(
        one,
        logits_rows=torch.zeros(DRAWS, dtype=torch.int64),
        logits_indices=torch.arange(DRAWS),
        positions=torch.arange(DRAWS),
        plan=attrs.evolve(one.plan, num_draft_tokens=np.array([DRAWS - 1], dtype=np.int32)),
        cu_num_logits_np=np.array([0, DRAWS], dtype=np.int32),
    )
    return np.bincount(bench.sampler.draw(processed.expand(DRAWS, -1), batch).numpy(), minlength=VOCAB)


def exact(logits, **params):
    params = SamplingParams(**{**OFF, **params})
    return softmax(oracle(logits.numpy(), params, PROMPT, OUTPUT, STOP_IDS))


@pytest.mark.parametrize("params", [{}, *EACH.values(), WHOLE], ids=["nothing", *EACH, "whole"])
def test_draws_follow_the_distribution_and_not_that_of_a_temperature_off_by_5_percent(bench, params):
    """5 standard deviations: fewer than one in 10^4 right samplers would fail at these degrees of freedom."""
    logits = randn(VOCAB, seed=3) * 1.5
    seen = drawn(bench, logits, **params)
    assert (seen > 0).sum() > 3
    assert chi_square(seen, exact(logits, **params)) < 5
    wrong = {**params, "temperature": params.get("temperature", 1.0) * 1.05}
    assert chi_square(seen, exact(logits, **wrong)) > 5
    assert chi_square(drawn(bench, logits, **wrong), exact(logits, **params)) > 5


# --- seeds


def test_b15_a_seeded_row_draws_the_same_alone_and_in_any_batch(bench):
    logits = randn(3, VOCAB, seed=1)
    bench.admit(4, seed=42, temperature=0.8)
    bench.admit(2, temperature=0.8)
    bench.admit(7, temperature=0.0)
    alone, mixed = [], []
    for _ in range(40):
        (token,) = bench.draw(logits[:1], bench.decode(4)).tolist()
        batch = bench.decode(2, 4, 7)
        rows = bench.draw(logits[[1, 0, 2]], batch).tolist()
        alone.append(token)
        mixed.append(rows[1])
        assert rows[2] == int(logits[2].argmax())
        bench.commit(batch, [0], [token], [0])
    assert mixed == alone
    assert len(set(alone)) > 3


def test_b16_the_slot_and_the_order_do_not_matter(bench):
    logits = randn(2, VOCAB, seed=2)
    seen = []
    for a, b in ((0, 1), (7, 3)):
        bench.admit(a, (1, 2), seed=1)
        bench.admit(b, (1, 2, 3), seed=2)
        forward = bench.draw(logits, bench.decode(a, b)).tolist()
        backward = bench.draw(logits.flip(0), bench.decode(b, a)).tolist()
        assert forward == backward[::-1]
        seen.append(forward)
    assert seen[0] == seen[1]


def test_a_resumed_request_draws_what_it_would_have_drawn(bench):
    logits = randn(1, VOCAB, seed=2)
    bench.admit(0, (1, 2), (3, 4), seed=9)
    plain = bench.draw(logits, bench.decode(0)).tolist()
    bench.drop(0)
    bench.admit(6, (1, 2), (3, 4), seed=9)
    assert bench.draw(logits, bench.decode(6)).tolist() == plain


def test_unseeded_requests_do_not_repeat_each_other(bench):
    logits = torch.zeros(40, VOCAB)
    streams = []
    for slot in (0, 1):
        bench.admit(slot)
        batch = bench.decode(slot)
        streams.append(
            [int(bench.draw(logits[:1], attrs.evolve(batch, positions=batch.positions + p))) for p in range(40)]
        )
    assert streams[0] != streams[1]


def test_random_streams_are_independent(bench):
    """The same seeds and positions give numbers of other streams that have nothing to do with each other."""
    seeds, positions = torch.full((20_000,), 7), torch.arange(20_000)
    numbers = np.stack([bench.kernels.uniform_from_seed(seeds, positions, stream).numpy() for stream in RandomStream])
    correlations = np.corrcoef(numbers)[~np.eye(len(RandomStream), dtype=bool)]
    assert np.abs(correlations).max() < 5 / np.sqrt(20_000)


# --- greedy rows, and rows that have no token


def test_b117_a_row_that_is_not_a_number_fails_alone(bench):
    for slot, temperature in enumerate((0.0, 1.0, 0.0, 1.0, 1.0)):
        bench.admit(slot, temperature=temperature, seed=slot)
    logits = randn(5, VOCAB)
    good = bench.draw(logits, bench.decode(0, 1, 2, 3, 4)).tolist()
    logits[0], logits[1, 3], logits[3], logits[4, 2] = torch.nan, torch.nan, -torch.inf, torch.inf
    assert bench.draw(logits, bench.decode(0, 1, 2, 3, 4)).tolist() == [-1, -1, good[2], -1, -1]


def test_a_request_whose_stages_leave_nothing_has_no_token(bench):
    bench.admit(0, temperature=0.0, allowed_token_ids=(3,), bad_words_token_ids=((3,),))
    bench.admit(1, temperature=1.0, allowed_token_ids=(3,), bad_words_token_ids=((3,),), top_k=2, top_p=0.5, min_p=0.1)
    bench.admit(2, temperature=0.0)
    logits = randn(3, VOCAB)
    assert bench.draw(logits, bench.decode(0, 1, 2)).tolist() == [-1, -1, int(logits[2].argmax())]


def test_of_equal_logits_greedy_takes_the_lowest_id(new_bench):
    bench = new_bench(vocab=5000)
    bench.admit(0, temperature=0.0)
    bench.admit(1, temperature=0.0)
    logits = torch.zeros(2, 5000)
    logits[0, [17, 4000]] = 2.0
    assert bench.draw(logits, bench.decode(0, 1)).tolist() == [17, 0]


# --- what is shown to a stage


class Spy(SamplerStage):
    """For requests that name it; writes down which slots it was shown."""

    def __init__(self, name):
        self.parameters = (name,)
        self.calls, self.added, self.cleared = [], [], []

    def applies_to(self, params):
        return self.parameters[0] in params.extra_args

    def add(self, slot, request):
        self.added.append(slot)

    def clear(self, slot):
        self.cleared.append(slot)

    def apply(self, logits, context):
        self.calls.append((context.host_slots.tolist(), logits.data_ptr(), len(logits)))
        return logits.add_(1)


def test_a_stage_is_shown_the_rows_that_use_it_and_costs_nothing_without_any(new_bench):
    a, b, c = Spy("a"), Spy("b"), Spy("c")
    bench = new_bench(extra=(a, b, c))
    bench.admit(0, extra_args={"a": 1, "b": 1})
    bench.admit(1)
    bench.admit(2, extra_args={"a": 1, "b": 1})
    assert (a.added, b.added, c.added) == ([0, 2], [0, 2], [])
    logits = torch.zeros(5, VOCAB)
    given = logits.data_ptr()
    result = bench.sampler.process(logits, bench.decode((0, (1,)), 1, (2, (1,))))
    assert result.data_ptr() == given
    assert result[:, 0].tolist() == [2, 2, 0, 2, 2]
    ((slots, where, count),) = a.calls
    assert (slots, count) == ([0, 0, 2, 2], 4)
    assert where != given
    assert b.calls == a.calls, "stages with the same rows share one copy"
    bench.sampler.process(logits, bench.decode(2, 0))
    assert a.calls[1] == ([2, 0], given, 5), "all rows use it: nothing is copied"
    calls = len(a.calls)
    assert bench.sampler.process(logits, bench.decode(1)) is logits
    assert (len(a.calls), c.calls) == (calls, [])
    bench.drop(0)
    bench.admit(2)  # over the request before
    assert (a.cleared, b.cleared, c.cleared) == ([0, 2], [0, 2], [])


class Unwatched:
    """Kernels whose insides are their own business: those of the CPU and of the reference read on the host."""

    inside = False

    def __init__(self, kernels):
        self._kernels = kernels

    def __getattr__(self, name):
        def call(*args):
            Unwatched.inside = True
            try:
                return getattr(self._kernels, name)(*args)
            finally:
                Unwatched.inside = False

        return call


class _NoSync(TorchDispatchMode):
    """Fails where torch would have to wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert Unwatched.inside or name not in self.WAITS, name
        return func(*args, **(kwargs or {}))


class _NoHost(TorchFunctionMode):
    """Fails where a tensor is read on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert Unwatched.inside or name not in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__"), name
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device(new_bench):
    """All stages, a mixed batch with drafts, a chunk of a prefill, log-probabilities of all kinds."""
    bench = new_bench(wrap=Unwatched)
    every = {**WHOLE, "logprobs": 2, "logprob_token_ids": (3,)}
    bench.admit(0, PROMPT, OUTPUT, STOP_IDS, seed=1, **every)
    bench.admit(1, PROMPT, OUTPUT, temperature=0.0)
    bench.admit(2, (1, 2, 3, 4, 5), computed=0, prompt_logprobs=2, **every)
    batch = bench.batch([(0, (3, 4)), (1, ()), (2, ())], [None, None, 3])
    logits = randn(5, VOCAB)
    hidden = randn(batch.num_tokens_padded, 4)
    head = randn(4, VOCAB)
    counts = torch.tensor([2, 1, 0], dtype=torch.int32)
    ones = torch.ones(3, 3, dtype=torch.int64)
    sampled = SamplerOutput(token_ids=ones, num_sampled=counts, num_rejected=counts * 0)
    with _NoSync(), _NoHost():
        raw = bench.sampler.raw(logits, batch)
        logits = bench.sampler.process(logits, batch)
        bench.sampler.draw(logits, batch)
        assert bench.sampler.logprobs(raw, logits, batch, sampled) is not None
        assert bench.sampler.prompt_logprobs(hidden, batch, lambda rows: rows @ head) is not None
        bench.sampler.commit(batch, sampled)


# --- defaults and refusals


def test_the_config_fills_in_what_a_request_leaves_unset(new_bench):
    bench = new_bench(top_k=1)
    logits = randn(1, VOCAB).expand(4, VOCAB)

    def tokens():
        return {*bench.draw(logits, bench.decode((0, (1, 2, 3)))).tolist()}

    bench.admit(0, seed=1)
    assert tokens() == {int(logits[0].argmax())}
    bench.admit(0, seed=1, top_k=0)  # 0 is a choice, not "unset"
    assert len(tokens()) > 1
    bench.admit(0, seed=1, temperature=0.0, top_k=0)
    assert tokens() == {int(logits[0].argmax())}


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(TorchSamplerConfig) if field.name != "logprobs"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.floats(-3, 3) | st.sampled_from([float("nan"), float("inf"), 1e-7]))
def test_a_default_may_be_what_a_request_may_say(name, value):
    def accepts(build):
        try:
            build(**{name: value})
        except ValueError as error:
            return name in str(error)  # it is named
        return None

    assert accepts(TorchSamplerConfig) == accepts(SamplingParams)


@pytest.mark.parametrize(
    ("params", "problems"),
    [
        ({"min_p": 0.1}, ["min_p"]),
        ({"min_tokens": 3, "top_k": 5, "logit_bias": {1: 1.0}}, ["min_tokens", "top_k", "logit_bias"]),
        ({"bad_words": ("x",)}, ["bad_words"]),
        ({"allowed_token_ids": (1,)}, ["allowed_token_ids"]),
        ({"extra_args": {"thinkng": 1}}, ["no stage of the sampler reads 'thinkng'; did you mean 'thinking'"]),
        ({"extra_args": {"temperature": 1}}, ["'temperature' is a sampling parameter of its own"]),
        ({"logprobs": VOCAB + 1, "prompt_logprobs": 99}, ["logprobs: 17 is more", "prompt_logprobs: 99 is more"]),
    ],
)
def test_what_nobody_serves_is_refused_by_name_and_all_at_once(new_bench, params, problems):
    bench = new_bench(stages=("temperature",), extra=(Spy("thinking"),))
    with pytest.raises(RequestError) as error:
        bench.sampler.check(SamplingParams(**params))
    assert all(problem in str(error.value) for problem in problems), error.value


def test_what_is_served_or_asks_for_nothing_is_let_pass(new_bench):
    bench = new_bench(stages=("temperature",), extra=(Spy("thinking"),))
    bench.sampler.check(SamplingParams(**{**OFF, "temperature": 0.3}, extra_args={"thinking": 1}, logprobs=VOCAB))
    bench.sampler.check(SamplingParams(logprobs=-1, prompt_logprobs=-1))
    new_bench().sampler.check(SamplingParams(**WHOLE, bad_words=("x",)))


def test_a_stage_may_refuse_its_parameters(new_bench):
    class Strict(Spy):
        def applies_to(self, params):
            if params.extra_args.get("strict") == "no":
                raise RequestError("strict: 'no'; right: yes")
            return False

    bench = new_bench(extra=(Strict("strict"),))
    bench.sampler.check(SamplingParams(extra_args={"strict": "yes"}))
    with pytest.raises(RequestError, match="right: yes"):
        bench.sampler.check(SamplingParams(extra_args={"strict": "no"}))


def test_a_default_that_no_stage_serves_is_refused_at_once(new_bench):
    with pytest.raises(UnsupportedError, match=r"min_p: no stage .*top_k: no stage|top_k: no stage .*min_p: no stage"):
        new_bench(stages=("temperature",), min_p=0.1, top_k=3)


def test_keys_by_slot(bench):
    """B118, B140: what draws depend on is the request's own, wherever its row lies; defaults are filled in."""
    bench.admit(0, temperature=0.0, seed=3)
    bench.admit(1, seed=4)
    bench.admit(4, temperature=0.25, seed=2**63 - 1)
    keys = bench.sampler.keys(bench.decode(4, (0, (1, 2)), 1))
    assert (keys.seeds.dtype, keys.temperatures.dtype) == (torch.int64, torch.float32)
    assert keys.seeds.tolist() == [2**63 - 1, 3, 4]
    assert keys.temperatures.tolist() == [0.25, 0.0, 1.0]
    bench.admit(2)
    bench.admit(3)
    unseeded = bench.sampler.keys(bench.decode(2, 3)).seeds.tolist()
    assert len({*unseeded, 0}) == 3, "a request without a seed has one of its own"
