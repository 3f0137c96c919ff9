"""Conformance suites: what an interface means, as tests over every registered implementation of its role.

A test module subclasses the suites that it wants:

    class TestSampler(SamplerConformance):
        pass

Each suite runs once for every implementation that the registry offers, fakes excepted; one whose packages are absent is
reported as skipped, by name. `make_config` may be overridden to give an implementation what else it needs. Suites of
parts that hold blocks and requests are in `conformance_cache`; those of proposers and of what verifies drafts, in
`conformance_speculation` and `conformance_rejection`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import Assembly, assemble
from workerkit.framework.hooks import STEP_HOOKS, hook_methods
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.sampling import SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.registry import Registry, Role
from workerkit.framework.testing.fakes_batch import make_batch
from workerkit.framework.testing.fakes_model import FAKE_VOCAB, fake_tokens
from workerkit.framework.testing.registry import fake_config, fake_registry


class Conformance:
    """Base of the suites: `self.name` is the implementation under test, `part` the part in an assembled worker."""

    role: ClassVar[Role[Any]]
    names: ClassVar[tuple[str, ...] | None] = None  # implementations to test; None takes all but fakes
    besides: ClassVar[tuple[str, ...]] = ()  # and but these

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Once for each implementation."""
        if "implementation" in metafunc.fixturenames:
            offers = fake_registry().offers[self.role.name]
            real = [name for name in offers if not name.startswith("fake") and name not in self.besides]
            metafunc.parametrize("implementation", self.names or real)

    @pytest.fixture
    def registry(self) -> Registry:
        """Every installed plugin's parts; override to add your own."""
        return fake_registry()

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """A config whose part of the suite's role is `name`, and the rest fakes over real kernels."""
        return fake_config("v1", kernels="ordered", **{self.role.name: name})

    @pytest.fixture
    def assembly(self, implementation: str, registry: Registry) -> Iterator[Assembly]:
        """A started worker around the part."""
        if missing := registry.missing_requirement(self.role.name, implementation):
            pytest.skip(f"{self.role.name}: {missing}")
        assembly = assemble(self.make_config(implementation, registry), registry=registry)
        assembly.worker.start()
        yield assembly
        assembly.shutdown()

    @pytest.fixture
    def part(self, assembly: Assembly) -> Any:
        """The part under test."""
        return assembly.get(self.role)


def request(req_id: str = "r", **sampling: Any) -> NewRequest:
    """A request of four tokens and one block."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, **sampling})
    return NewRequest(req_id=req_id, token_ids=(1, 2, 3, 4), prompt_len=4, sampling=params, block_ids=((1,),))


def decode_batch(slots: list[int], positions: list[int]) -> InputBatch:
    """A batch of decodes: one token for each slot, at the given positions."""
    count, one = len(slots), np.ones(len(slots), dtype=np.int32)
    plan = BatchPlan(
        req_ids=tuple(f"r{slot}" for slot in slots),
        slots=np.array(slots, dtype=np.int64),
        num_scheduled_tokens=one,
        num_computed_tokens=np.array(positions, dtype=np.int32),
        num_draft_tokens=one * 0,
        prefill_lens=one * 4,
        prompt_lens=one * 4,
    )
    desc = BatchDescriptor(num_tokens=count, num_reqs=count)
    return make_batch(plan, positions, [[7]] * count, desc, torch.device("cpu"))


NOTHING = SamplingParams(  # asks for nothing of any stage, and leaves nothing to a sampler's defaults
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    typical_p=1.0,
    top_n_sigma=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)


class SamplerConformance(Conformance):
    """A token depends on the row's logits, the request's seed and the position; on nothing else."""

    role = roles.SAMPLER

    def _draw(self, part: Any, logits: torch.Tensor, batch: InputBatch) -> list[int]:
        tokens: list[int] = part.draw(part.process(logits.clone(), batch), batch).tolist()
        return tokens

    def test_greedy_rows_take_the_largest_logit(self, part: Any) -> None:
        for slot in range(4):
            part.add(slot, request(f"r{slot}", temperature=0.0, top_k=3, top_p=0.5))
        logits = torch.randn(4, FAKE_VOCAB, generator=torch.Generator().manual_seed(0))
        assert self._draw(part, logits, decode_batch([0, 1, 2, 3], [4] * 4)) == logits.argmax(1).tolist()

    def test_a_seeded_row_is_the_same_alone_and_in_any_batch(self, part: Any) -> None:
        """B15, B16: rows of other seeds, or none, and their order change nothing."""
        for slot in range(4):
            part.add(slot, request(f"r{slot}", temperature=1.0, seed=slot if slot != 2 else None))
        logits = torch.randn(4, FAKE_VOCAB, generator=torch.Generator().manual_seed(1))
        whole = self._draw(part, logits, decode_batch([0, 1, 2, 3], [4, 5, 6, 7]))
        turned = self._draw(part, logits.flip(0), decode_batch([3, 2, 1, 0], [7, 6, 5, 4]))
        for slot in (0, 1, 3):
            alone = self._draw(part, logits[slot : slot + 1], decode_batch([slot], [4 + slot]))
            assert alone == [whole[slot]] == [turned[3 - slot]]

    def test_seed_and_position_decide(self, part: Any) -> None:
        part.add(0, request(temperature=1.0, seed=3))
        flat = torch.zeros(1, FAKE_VOCAB)
        drawn = [self._draw(part, flat, decode_batch([0], [position]))[0] for position in range(4, 36)]
        assert drawn == [self._draw(part, flat, decode_batch([0], [position]))[0] for position in range(4, 36)]
        assert len(set(drawn)) > 16, "each position draws anew"
        part.add(0, request(temperature=1.0, seed=4))
        assert drawn != [self._draw(part, flat, decode_batch([0], [position]))[0] for position in range(4, 36)]

    def test_a_slot_forgets_the_request_before(self, part: Any) -> None:
        part.add(0, request(temperature=5.0, seed=3))
        part.clear(0)
        part.add(0, request(temperature=0.0))
        logits = torch.zeros(1, FAKE_VOCAB)
        logits[0, 9] = 0.1
        assert [self._draw(part, logits, decode_batch([0], [p]))[0] for p in range(4, 20)] == [9] * 16

    def test_a_row_without_a_possible_token_is_told_apart(self, part: Any) -> None:
        """B117: NaN, or nothing but -inf, is -1; never a token, and no other row's business."""
        for slot, temperature in enumerate((0.0, 1.0, 0.0, 1.0)):
            part.add(slot, request(f"r{slot}", temperature=temperature))
        logits = torch.zeros(4, FAKE_VOCAB)
        logits[0], logits[1] = torch.nan, -torch.inf
        drawn = self._draw(part, logits, decode_batch([0, 1, 2, 3], [4] * 4))
        assert drawn[:2] == [-1, -1]
        assert drawn[2] == 0, "of equally likely tokens the lowest id"
        assert 0 <= drawn[3] < FAKE_VOCAB


class SamplerStageConformance(Conformance):
    """What a stage does to a row depends on nothing but that row's request; it never loses every token.

    `using` is what makes a request use each stage, by its name: extend it for a stage of your own.
    """

    role = roles.SAMPLER_STAGE
    using: ClassVar[dict[str, dict[str, Any]]] = {
        "allowed_token_ids": {"allowed_token_ids": (3, 9, 200)},
        "logit_bias": {"logit_bias": {3: 5.0, 9: -2.0}},
        "min_tokens": {"min_tokens": 5},
        "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5},
        "bad_words": {"bad_words_token_ids": ((3,), (7, 8, 9))},
        "temperature": {"temperature": 0.5},
        "top_n_sigma": {"temperature": 1.0, "top_n_sigma": 1.0},
        "min_p": {"temperature": 1.0, "min_p": 0.2},
        "top_k_top_p": {"temperature": 1.0, "top_k": 3, "top_p": 0.7},
        "typical_p": {"temperature": 1.0, "typical_p": 0.5},
    }
    text: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 7, 8)  # of every request; the prompt is the first four

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """A real sampler with this stage alone."""
        return fake_config("v1", kernels="ordered", sampler={"use": "torch", "stages": [name]})

    @pytest.fixture
    def part(self, assembly: Assembly) -> Any:
        (stage,) = assembly.get_all(self.role)
        return stage

    @pytest.fixture
    def params(self, implementation: str) -> SamplingParams:
        """What a request that uses the stage asks for, with nothing left unset."""
        return attrs.evolve(NOTHING, **self.using.get(implementation, {}))

    def _admit(self, part: Any, slots: list[int], params: SamplingParams) -> None:
        for slot in slots:
            new = attrs.evolve(request(f"r{slot}"), token_ids=self.text, sampling=params, stop_ids=frozenset({2, 5}))
            part.add(slot, new)

    def _context(self, slots: list[int]) -> SamplingContext:
        rows = torch.tensor(slots)
        text = torch.tensor([self.text] * len(slots))
        return SamplingContext(
            slots=rows,
            positions=torch.full_like(rows, len(self.text) - 1),
            prompt_lens=torch.full_like(rows, 4),
            host_slots=np.array(slots),
            text=lambda: text,
        )

    def _logits(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, FAKE_VOCAB, generator=torch.Generator().manual_seed(2))

    def test_a_request_that_asks_for_it_uses_it(self, part: Any, params: SamplingParams) -> None:
        assert part.applies_to(params)

    def test_a_request_that_asks_for_nothing_does_not_use_it(self, part: Any) -> None:
        assert not part.applies_to(NOTHING)

    def test_it_declares_what_it_reads(self, part: Any, params: SamplingParams) -> None:
        """A sampler refuses what no stage declares, so `params` must be served by this one."""
        asked = {name for name, value in attrs.asdict(params).items() if value != getattr(NOTHING, name)}
        assert asked - {"extra_args"} <= set(part.parameters)
        assert set(params.extra_args) <= set(part.parameters)

    def test_a_row_is_the_same_alone_and_in_a_batch(self, part: Any, params: SamplingParams) -> None:
        self._admit(part, [0, 1, 2], params)
        logits = self._logits(3)
        whole = part.apply(logits.clone(), self._context([2, 0, 1]))
        for row, slot in enumerate([2, 0, 1]):
            assert torch.equal(part.apply(logits[row : row + 1].clone(), self._context([slot]))[0], whole[row])

    def test_slots_do_not_matter_and_forget(self, part: Any, params: SamplingParams) -> None:
        logits = self._logits(1)
        self._admit(part, [0], params)
        first = part.apply(logits.clone(), self._context([0]))
        part.clear(0)
        self._admit(part, [5, 0], params)
        for slot in (0, 5):
            assert torch.equal(part.apply(logits.clone(), self._context([slot])), first)

    def test_shape_type_and_at_least_one_token_are_kept(self, part: Any, params: SamplingParams) -> None:
        self._admit(part, [0], params)
        result = part.apply(self._logits(1), self._context([0]))
        assert (result.shape, result.dtype) == ((1, FAKE_VOCAB), torch.float32)
        assert torch.isfinite(result).any()
        assert not torch.isnan(result).any()


class ObserverConformance(Conformance):
    """Watches at least one step hook, and a worker with it gives the same tokens as one without."""

    role = roles.OBSERVERS
    options: ClassVar[dict[str, dict[str, Any]]] = {"tap": {"layers": ["layers.0"]}}

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """The observer alone, in an otherwise fake worker."""
        return fake_config("v2", speculator="none", observers=[{"use": name, **self.options.get(name, {})}])

    @pytest.fixture
    def part(self, assembly: Assembly) -> Any:
        (observer,) = assembly.get_all(self.role)
        return observer

    def test_it_watches(self, part: Any) -> None:
        assert set(hook_methods(part)) & set(STEP_HOOKS)

    def test_it_changes_no_token_and_does_not_fail(self, part: Any, assembly: Assembly) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (done,) = assembly.engine.generate([[5, 6, 7]], params)
        assert list(done.token_ids) == fake_tokens([5, 6, 7], 8)
        assert assembly.hooks.failures == ()


class KernelLibraryConformance:
    """Each op of a library against a reference with the same name: a subclass gives both.

    `assert_matches` is the whole suite for one op; inputs come from the caller, since ops differ.
    """

    tolerance: ClassVar[float] = 1e-5

    def assert_matches(self, library: Any, reference: Any, op: str, *args: Any) -> None:
        """The library's op gives what the reference's gives, in value, shape and dtype, and in what it writes."""
        ours, theirs = ([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args] for _ in range(2))
        got, expected = library.ops[op](*ours), reference.ops[op](*theirs)
        pairs = [*zip(ours, theirs, strict=True)] if expected is None else []
        results = (got, expected) if isinstance(expected, tuple) else ((got,), (expected,))
        pairs += [*zip(*results, strict=True)] if expected is not None else []
        for one, other in pairs:
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype, op
                torch.testing.assert_close(
                    one, other, atol=self.tolerance, rtol=self.tolerance, msg=lambda m: f"{op}: {m}"
                )
