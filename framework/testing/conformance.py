"""Conformance suites: what an interface means, as tests over every registered implementation of its role.

A test module subclasses the suites that it wants:

    class TestSampler(SamplerConformance):
        pass

Each suite runs once for every implementation that the registry offers, fakes excepted; one whose packages are absent is
reported as skipped, by name. `make_config` may be overridden to give an implementation what else it needs. Suites of
parts that hold blocks and requests are in `conformance_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import Assembly, assemble
from workerkit.framework.hooks import STEP_HOOKS, hook_methods
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.request import NewRequest, SamplingParams
from workerkit.framework.interfaces.sampling import SamplingContext
from workerkit.framework.registry import Registry, Role
from workerkit.framework.testing.fakes_batch import make_batch
from workerkit.framework.testing.fakes_model import FAKE_VOCAB, fake_tokens
from workerkit.framework.testing.registry import fake_config, fake_registry


class Conformance:
    """Base of the suites: `self.name` is the implementation under test, `part` the part in an assembled worker."""

    role: ClassVar[Role[Any]]
    names: ClassVar[tuple[str, ...] | None] = None  # implementations to test; None takes all but fakes

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Once for each implementation."""
        if "implementation" in metafunc.fixturenames:
            offers = fake_registry().offers[self.role.name]
            metafunc.parametrize("implementation", self.names or [n for n in offers if not n.startswith("fake")])

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


class SamplerStageConformance(Conformance):
    """A stage leaves alone what does not use it, gives the same for a row in any batch, and never loses every token."""

    role = roles.SAMPLER_STAGE
    using: ClassVar[dict[str, Any]] = {"temperature": 0.5, "top_k": 3, "top_p": 0.7}  # what makes a request use it

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """A real sampler with this stage alone."""
        return fake_config("v1", kernels="ordered", sampler={"use": "torch", "stages": [name]})

    @pytest.fixture
    def part(self, assembly: Assembly) -> Any:
        (stage,) = assembly.get_all(self.role)
        return stage

    def _context(self, slots: list[int]) -> SamplingContext:
        row = torch.tensor(slots)
        return SamplingContext(slots=row, positions=row * 0 + 4, host_slots=np.array(slots))

    def _logits(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, FAKE_VOCAB, generator=torch.Generator().manual_seed(2))

    def test_rows_that_do_not_use_it_are_left_as_they_are(self, part: Any) -> None:
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        part.add(0, request("a", **self.using))
        part.add(1, request("b", **off))
        logits = self._logits(2)
        assert torch.equal(part.apply(logits.clone(), self._context([0, 1]))[1], logits[1])
        part.clear(0)
        part.add(0, request("c", **off))
        assert torch.equal(part.apply(logits.clone(), self._context([0, 1])), logits)

    def test_a_row_is_the_same_alone_and_in_a_batch(self, part: Any) -> None:
        for slot in range(3):
            part.add(slot, request(f"r{slot}", **self.using))
        logits = self._logits(3)
        whole = part.apply(logits.clone(), self._context([2, 0, 1]))
        for row, slot in enumerate([2, 0, 1]):
            assert torch.equal(part.apply(logits[row : row + 1].clone(), self._context([slot]))[0], whole[row])

    def test_shape_type_and_at_least_one_token_are_kept(self, part: Any) -> None:
        part.add(0, request(**self.using))
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
