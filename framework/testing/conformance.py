"""Conformance suites: what an interface means, as tests over every registered implementation of its role.

A test module subclasses a suite and names an assembled worker in which its part is the one under test:

    class TestSampler(SamplerConformance):
        pass

Each suite runs once for every implementation that the registry offers, fakes excepted; one whose packages are absent is
reported as skipped, by name. `make_config` may be overridden to give an implementation what else it needs.
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
from workerkit.framework.errors import CacheError, IntegrityError, RequestError
from workerkit.framework.hooks import STEP_HOOKS, hook_methods
from workerkit.framework.interfaces.batch import BatchPlan, InputBatch
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import AttentionLayer, BatchTables, KVCaches, RowBlockTables
from workerkit.framework.interfaces.request import NewRequest, SamplingParams
from workerkit.framework.interfaces.sampling import SamplingContext
from workerkit.framework.registry import Registry, Role
from workerkit.framework.testing.fakes_batch import FakeAttention, make_batch
from workerkit.framework.testing.fakes_model import FAKE_VOCAB
from workerkit.framework.testing.registry import fake_config, fake_registry


class Conformance:
    """Base of the suites: `self.name` is the implementation under test, `part` the part in an assembled worker."""

    role: ClassVar[Role[Any]]
    names: ClassVar[tuple[str, ...] | None] = None  # implementations to test; None takes all but fakes

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each suite over the implementations of its role. The pytest plugin calls it."""
    suite = metafunc.cls
    if suite is None or not issubclass(suite, Conformance) or "implementation" not in metafunc.fixturenames:
        return
    names = suite.names
    if names is None:
        names = tuple(n for n in fake_registry().offers[suite.role.name] if not n.startswith("fake"))
    metafunc.parametrize("implementation", names)


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


class BlockTablesConformance(Conformance):
    """Compared with a dict of lists, over random adds, appends and clears, for both kinds of index."""

    role = roles.BLOCK_TABLE

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """The runner that takes such tables."""
        factory = registry.entry(self.role.name, name).factory
        runner = "v1" if isinstance(factory, type) and issubclass(factory, RowBlockTables) else "v2"
        return fake_config(runner, block_table=name)

    def _gather(self, part: Any, slots: list[int], lens: list[int]) -> BatchTables:
        order = sorted(range(len(slots)), key=lambda i: lens[i])
        plan = attrs.evolve(decode_batch(slots, lens), req_ids=()).plan if False else decode_batch(slots, lens).plan
        del order
        desc = BatchDescriptor(num_tokens=len(slots) + 2, num_reqs=len(slots) + 1)
        batch = make_batch(plan, lens, [[7]] * len(slots), desc, torch.device("cpu"))
        part.apply_staged_writes()
        tables: BatchTables = part.gather(batch)
        return tables

    def test_random_histories_match_a_dict(self, part: Any, assembly: Assembly) -> None:
        rng = np.random.default_rng(0)
        b = assembly.worker.layout.kernel_block_size
        capacity = assembly.worker.shape.max_model_len // b
        model: dict[int, list[int]] = {}
        for _ in range(200):
            index = int(rng.integers(0, 6))
            blocks = rng.integers(1, 40, int(rng.integers(1, 5))).tolist()
            action = rng.integers(0, 4)
            if action == 0 or (action == 1 and index not in model):
                part.add(index, [blocks])
                model[index] = blocks
            elif action == 1 and len(model[index]) + len(blocks) <= capacity:
                part.append(index, [blocks])
                model[index] += blocks
            elif action == 2:
                part.clear(index)
                model.pop(index, None)
            part.check_integrity(list(model))
            for other in range(6):
                assert part.block_ids(other)[0] == tuple(model.get(other, ()))
            rows = sorted(model) if not isinstance(part, RowBlockTables) else [*range(len(model))]
            if rows and all(row in model for row in rows):
                lens = [int(rng.integers(0, len(model[row]) * b)) for row in rows]
                tables = self._gather(part, rows, lens)
                table, slots = tables.block_tables[0], tables.slot_mappings[0].tolist()
                for line, (row, position) in enumerate(zip(rows, lens, strict=True)):
                    held = model[row]
                    assert table[line].tolist() == held + [0] * (table.shape[1] - len(held)), "B34: the tail is null"
                    assert slots[line] == held[position // b] * b + position % b
                assert slots[len(rows) :] == [-1, -1]

    def test_more_blocks_than_a_row_holds_are_refused_and_change_nothing(self, part: Any, assembly: Assembly) -> None:
        width = assembly.worker.shape.max_model_len // assembly.worker.layout.kernel_block_size
        part.add(0, [[1] * width])
        with pytest.raises(CacheError):
            part.append(0, [[2]])
        assert part.block_ids(0) == ((1,) * width,)
        with pytest.raises(CacheError):
            part.add(1, [[1] * (width + 1)])
        assert part.block_ids(1) == ((),)

    def test_integrity_notices_an_entry_of_nobody(self, part: Any) -> None:
        part.add(3, [[1]])
        part.check_integrity([3])
        with pytest.raises(IntegrityError):
            part.check_integrity([])


class AttentionConformance(Conformance):
    """Paged attention equals the plain one of FakeAttention: mixed rows, grouped heads, sliding windows, padding."""

    role = roles.ATTENTION
    tolerance: ClassVar[float] = 1e-5

    @pytest.mark.parametrize("window", [None, 5])
    def test_mixed_batches_match_the_plain_version(self, part: Any, window: int | None) -> None:
        generator = torch.Generator().manual_seed(3)
        layer = AttentionLayer(
            name="layer", index=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, sliding_window=window
        )
        part.prepare([layer], torch.float32)
        b = next(iter(part.kernel_block_sizes), 4)
        computed, scheduled = [9, 3, 0, 6], [1, 1, 7, 5]
        for extra in (0, 3):
            caches, tables, batch = _paged(layer, b, computed, scheduled, extra, generator)
            shape = (batch.num_tokens_padded, layer.num_heads, layer.head_dim)
            query = torch.randn(shape, generator=generator)
            key, value = (torch.randn(shape[0], 2, 8, generator=generator) for _ in range(2))
            twin = attrs.evolve(caches, keys=(caches.keys[0].clone(),), values=(caches.values[0].clone(),))
            expected = FakeAttention().build(batch, tables, twin, {})(layer, query, key, value)
            got = part.build(batch, tables, caches, {})(layer, query.clone(), key.clone(), value.clone())
            assert got.shape == expected.shape
            torch.testing.assert_close(
                got[: batch.num_tokens], expected[: batch.num_tokens], atol=self.tolerance, rtol=self.tolerance
            )
            assert torch.isfinite(got).all(), "padding yields finite values"
            torch.testing.assert_close(caches.keys[0], twin.keys[0])
            torch.testing.assert_close(caches.values[0], twin.values[0])


def _paged(
    layer: AttentionLayer, b: int, computed: list[int], scheduled: list[int], extra: int, generator: torch.Generator
) -> tuple[KVCaches, BatchTables, InputBatch]:
    """Random caches of 40 blocks in which each row has blocks of its own, out of order; `extra` padding tokens."""
    from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout

    spec = KVCacheSpec(
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        dtype="float32",
        block_size=b,
        element_bytes=4,
        sliding_window=layer.sliding_window,
    )
    layout = KVLayout(num_blocks=40, groups=(KVCacheGroup(spec=spec, layers=(0,)),), kernel_block_size=b)
    keys, values = (torch.randn(40, b, layer.num_kv_heads, layer.head_dim, generator=generator) for _ in range(2))
    caches = KVCaches(layout=layout, keys=(keys,), values=(values,), group_of_layer=(0,))
    count = len(computed)
    counts = np.array(scheduled, dtype=np.int32)
    plan = BatchPlan(
        req_ids=tuple(f"r{row}" for row in range(count)),
        slots=np.arange(count),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.array(computed, dtype=np.int32),
        num_draft_tokens=counts * 0,
        prefill_lens=counts + 100,
        prompt_lens=counts + 100,
    )
    desc = BatchDescriptor(num_tokens=sum(scheduled) + extra, num_reqs=count + bool(extra))
    batch = make_batch(plan, computed, [[1] * n for n in scheduled], desc, torch.device("cpu"))
    free = (torch.randperm(39, generator=generator) + 1).tolist()
    table = torch.zeros(desc.num_reqs, 8, dtype=torch.int32)
    for row, length in enumerate(batch.seq_lens[:count].tolist()):
        for column in range(-(-length // b)):
            table[row, column] = free.pop()
    slots = torch.full((desc.num_tokens,), -1, dtype=torch.int32)
    for token in range(batch.num_tokens):
        position = int(batch.positions[token])
        slots[token] = table[int(batch.token_rows[token]), position // b] * b + position % b
    return caches, BatchTables(block_tables=(table,), slot_mappings=(slots,)), batch


class RequestStatesConformance(Conformance):
    """Slots are stable, unique and given back; refusals change nothing."""

    role = roles.REQUEST_STATE

    @pytest.fixture
    def part(self, assembly: Assembly) -> Any:
        return assembly.get(self.role)

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """Nothing but the states is used."""
        return fake_config("fake", request_state=name)

    def test_slots(self, part: Any, assembly: Assembly) -> None:
        count = assembly.worker.shape.max_num_reqs
        slots = [part.add(request(f"r{i}")) for i in range(count)]
        assert sorted(slots) == list(range(count))
        with pytest.raises(RequestError):
            part.add(request("one too many"))
        assert part.remove("r3") == slots[3]
        with pytest.raises(RequestError):
            part.slot("r3")
        with pytest.raises(RequestError):
            part.remove("r3")
        with pytest.raises(RequestError):
            part.add(request("r1"))
        assert part.add(request("new")) == slots[3]
        assert [part.slot(f"r{i}") for i in (0, 1, 2, 4)] == [slots[i] for i in (0, 1, 2, 4)]
        assert "new" in part
        assert "r3" not in part
        assert set(part.req_ids) == {*(f"r{i}" for i in range(count) if i != 3), "new"}
        part.check_integrity()
        for req_id in part.req_ids:
            part.remove(req_id)
        part.check_integrity()
        assert part.req_ids == ()


class ObserverConformance(Conformance):
    """Watches at least one step hook, and a worker with it gives the same tokens as one without."""

    role = roles.OBSERVERS
    options: ClassVar[dict[str, dict[str, Any]]] = {"tap": {"points": ["layers.0"]}}

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
        from workerkit.framework.testing.fakes_model import fake_tokens

        assembly.engine.start() if False else None
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
        ours, theirs = (
            [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args] for _ in range(2)
        )
        got, expected = library.ops[op](*ours), reference.ops[op](*theirs)
        pairs = [*zip(ours, theirs, strict=True)] if expected is None else []
        results = (got, expected) if isinstance(expected, tuple) else ((got,), (expected,))
        pairs += [*zip(*results, strict=True)] if expected is not None else []
        for one, other in pairs:
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype, op
                torch.testing.assert_close(one, other, atol=self.tolerance, rtol=self.tolerance, msg=lambda m: f"{op}: {m}")
