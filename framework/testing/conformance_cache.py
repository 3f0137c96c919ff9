"""Conformance suites of the parts that hold requests and blocks: states, block tables, attention, schedulers."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import Assembly
from workerkit.framework.errors import CacheError, IntegrityError, RequestError
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import (
    AttentionLayer,
    BatchTables,
    KVCacheGroup,
    KVCaches,
    KVCacheSpec,
    KVLayout,
    RowBlockTables,
    SlotBlockTables,
)
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.registry import Registry
from workerkit.framework.testing.conformance import Conformance, decode_batch, request
from workerkit.framework.testing.fakes_batch import FakeAttention, make_batch
from workerkit.framework.testing.fakes_model import FAKE_VOCAB, fake_tokens
from workerkit.framework.testing.registry import fake_config


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


class BlockTablesConformance(Conformance):
    """Compared with a dict of lists, over random adds, appends and clears, for both kinds of index."""

    role = roles.BLOCK_TABLE

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """The runner that takes such tables."""
        factory = registry.entry(self.role.name, name).factory
        runner = "v1" if isinstance(factory, type) and issubclass(factory, RowBlockTables) else "v2"
        return fake_config(runner, block_table=name)

    def _gather(self, part: Any, slots: list[int], lens: list[int]) -> BatchTables:
        plan = decode_batch(slots, lens).plan
        desc = BatchDescriptor(num_tokens=len(slots) + 2, num_reqs=len(slots) + 1)
        batch = make_batch(plan, lens, [[7]] * len(slots), desc, torch.device("cpu"))
        if isinstance(part, SlotBlockTables):
            part.apply(part.stage())
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

    def test_graphs_find_the_tables_of_each_step_where_the_last_ones_lay(self, part: Any) -> None:
        part.add(0, [[3]])
        first = self._gather(part, [0], [1])
        part.append(0, [[5]])
        second = self._gather(part, [0], [4])
        for one, other in ((first.block_tables, second.block_tables), (first.slot_mappings, second.slot_mappings)):
            assert [tensor.data_ptr() for tensor in one] == [tensor.data_ptr() for tensor in other]
        assert first.block_tables[0][0, :2].tolist() == [3, 5]

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

    @pytest.mark.parametrize("window", [None, 5])
    def test_rows_of_one_query_may_share_a_table_and_see_each_other(self, part: Any, window: int | None) -> None:
        """What a proposer of whole blocks asks for: three positions each of two requests, none masked from another."""
        generator = torch.Generator().manual_seed(4)
        layer = AttentionLayer(
            name="layer", index=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, sliding_window=window
        )
        part.prepare([layer], torch.float32)
        b = next(iter(part.kernel_block_sizes), 4)
        caches, tables, batch = _paged(layer, b, [9, 10, 11, 4, 5, 6], [1] * 6, 0, generator)
        (table,), lens = tables.block_tables, torch.tensor([12] * 3 + [7] * 3, dtype=torch.int32)
        table = table[torch.tensor([2, 2, 2, 5, 5, 5])]
        slots = (table.gather(1, batch.positions[:, None] // b)[:, 0] * b + batch.positions % b).int()
        tables = BatchTables(block_tables=(table,), slot_mappings=(slots,))
        host = HostLengths(upper_bound=lens.numpy(), exact=lens.numpy)
        batch = attrs.evolve(batch, seq_lens=lens, host_seq_lens=host)
        query = torch.randn(6, 4, 8, generator=generator)
        key, value = (torch.randn(6, 2, 8, generator=generator) for _ in range(2))
        twin = attrs.evolve(caches, keys=(caches.keys[0].clone(),), values=(caches.values[0].clone(),))
        expected = FakeAttention().build(batch, tables, twin, {})(layer, query, key, value)
        got = part.build(batch, tables, caches, {})(layer, query.clone(), key.clone(), value.clone())
        torch.testing.assert_close(got, expected, atol=self.tolerance, rtol=self.tolerance)


def _paged(
    layer: AttentionLayer, b: int, computed: list[int], scheduled: list[int], extra: int, generator: torch.Generator
) -> tuple[KVCaches, BatchTables, InputBatch]:
    """Random caches of 40 blocks in which each row has blocks of its own, out of order; `extra` padding tokens."""
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


class SchedulerConformance(Conformance):
    """Every request ends with the tokens it would get alone, no step breaks a limit, and nothing is left behind."""

    role = roles.SCHEDULER

    def make_config(self, name: str, registry: Registry) -> dict[str, Any]:
        """A cache so small that not all requests fit at once."""
        config = fake_config("v2", speculator="none", scheduler=name)
        config["limits"] = {"max_num_reqs": 3, "max_num_batched_tokens": 16}
        config["cache"]["num_blocks"] = 34
        return config

    def test_random_arrivals_and_aborts(self, part: Any, assembly: Assembly) -> None:
        worker, rng = assembly.worker, np.random.default_rng(0)
        free = dict(part.stats())["num_free_blocks"]
        prompts = [rng.integers(0, FAKE_VOCAB, int(rng.integers(1, 40))).tolist() for _ in range(16)]
        tokens: dict[str, list[int]] = {}
        arriving = [f"r{i}" for i in range(len(prompts))]
        aborted = set()
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        for step in range(2000):
            if arriving and step % 3 == 0:
                req_id = arriving.pop(0)
                prompt = tuple(prompts[int(req_id[1:])])
                part.add(EngineRequest(req_id=req_id, prompt_token_ids=prompt, params=params))
                tokens[req_id] = []
            if step in (20, 40):
                aborted.add(victim := next(r for r in tokens if r not in aborted and len(tokens[r]) < 20))
                assert part.abort(victim)
                assert not part.abort("never heard of")
            if not arriving and not part.has_work:
                break
            output = part.schedule()
            assert output.total_num_scheduled_tokens <= worker.shape.max_num_batched_tokens
            assert len(output.num_scheduled_tokens) <= worker.shape.max_num_reqs
            answer = worker.execute_model(output)
            if answer is None:
                answer = worker.sample_tokens().get()
            for req_id, progress in part.update(output, answer).items():
                tokens[req_id].extend(progress.token_ids)
            part.check_integrity()
            worker.check_integrity()
        else:
            raise AssertionError("2000 steps were not enough")
        assert not part.has_requests
        assert part.stats()["num_free_blocks"] == free
        for req_id, got in tokens.items():
            expected = fake_tokens(prompts[int(req_id[1:])], 20)
            assert got == (expected[: len(got)] if req_id in aborted else expected)
