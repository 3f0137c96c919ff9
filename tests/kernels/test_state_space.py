"""The recurrence of Mamba-2: the reference against a naive computation, the CPU library against the reference."""

import pytest
import torch
from ragged_rows import num_columns, place_rows

from workerkit.kernels import cpu, reference

HEADS, HEAD_DIM, SIZE = 6, 5, 7


class Batch:
    """Random inputs of ragged rows that go on from random states. A row verifies (keeps the state behind every token),
    keeps the last one in the place where it began, or, now and then, none."""

    def __init__(self, lens, verify=(), groups=2, dtype=torch.float32, scale=1.0):
        total = sum(lens)
        wide = torch.randn(total, HEADS * HEAD_DIM + 2 * groups * SIZE).to(dtype)
        x, b, c = wide.split([HEADS * HEAD_DIM, groups * SIZE, groups * SIZE], dim=-1)
        self.x, self.b, self.c = (
            x.view(total, HEADS, HEAD_DIM),
            b.view(total, groups, SIZE),
            c.view(total, groups, SIZE),
        )
        self.dt = torch.rand(total, HEADS) * scale
        self.a = -torch.rand(HEADS) - 0.1
        self.states = torch.randn(len(lens) * num_columns(lens, verify) + 1, HEADS, HEAD_DIM, SIZE)
        self.initial, self.starts, self.token_states = place_rows(lens, verify)

    def run(self, ops):
        states = self.states.clone()
        inputs = (self.x, self.dt, self.a, self.b, self.c)
        return ops["state_space"](*inputs, states, self.initial, self.token_states, self.starts), states


def test_the_reference_is_the_recurrence_written_out():
    batch = Batch([3, 1, 6], verify=[0], groups=3)
    output, states = batch.run(reference.OPS)
    expected_states = batch.states.double()
    for row in range(3):
        for head in range(HEADS):
            group = head // 2
            h = batch.states[batch.initial[row], head].double()
            for t in range(int(batch.starts[row]), int(batch.starts[row + 1])):
                dt, x = batch.dt[t, head].double(), batch.x[t, head].double()
                h = h * torch.exp(batch.a[head].double() * dt) + dt * torch.outer(x, batch.b[t, group].double())
                torch.testing.assert_close(
                    output[t, head].double(), h @ batch.c[t, group].double(), atol=1e-5, rtol=1e-5
                )
                if batch.token_states[t] >= 0:
                    expected_states[batch.token_states[t], head] = h
    torch.testing.assert_close(states.double(), expected_states, atol=1e-5, rtol=1e-5)


def assert_cpu_equals_the_reference(batch, tolerance=1e-4):
    (expected, expected_states), (got, got_states) = batch.run(reference.OPS), batch.run(cpu.OPS)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got_states, expected_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(
    ("lens", "verify"),
    [
        ([1], []),
        ([1] * 9, []),
        ([4, 4, 4], [0, 1, 2]),
        ([1, 4, 2, 1, 3], [1, 4]),
        ([70, 1, 20, 4, 7, 8, 9], [2, 3]),
    ],
    ids=str,
)
def test_cpu_equals_the_reference(lens, verify, groups):
    assert_cpu_equals_the_reference(Batch(lens, verify, groups))


@pytest.mark.parametrize("length", [8, 63, 64, 65, 127, 128, 129, 300])
def test_cpu_at_the_borders_of_chunks(length):
    assert_cpu_equals_the_reference(Batch([length]))
    assert_cpu_equals_the_reference(Batch([30, length, 64, 1]))


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_cpu_with_small_and_large_steps(scale):
    batch = Batch([150, 3, 1, 90], scale=scale)
    batch.dt[::3] *= 1e-4  # what a sum of large steps would swallow
    batch.x /= scale
    assert_cpu_equals_the_reference(batch)
    assert batch.run(cpu.OPS)[0].isfinite().all()


def test_cpu_in_bfloat16():
    assert_cpu_equals_the_reference(Batch([90, 1, 5], dtype=torch.bfloat16), tolerance=3e-2)


def test_cpu_on_many_random_batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        lens = torch.randint(1, 100, (6,), generator=generator).tolist()
        lens[::2] = torch.randint(1, 6, (3,), generator=generator).tolist()
        assert_cpu_equals_the_reference(Batch(lens, verify=[2]))


@pytest.mark.parametrize("ops", [reference.OPS, cpu.OPS], ids=["reference", "cpu"])
def test_a_row_in_pieces_is_the_row(ops):
    batch = Batch([150])
    whole, whole_states = batch.run(ops)
    states, place = batch.states.clone(), batch.token_states[-1:]
    initial, pieces = batch.initial, []
    for part in (slice(0, 64), slice(64, 65), slice(65, 70), slice(70, 150)):
        token_states = torch.full((part.stop - part.start,), -1)
        token_states[-1] = place
        inputs = (batch.x[part], batch.dt[part], batch.a, batch.b[part], batch.c[part])
        starts = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        pieces.append(ops["state_space"](*inputs, states, initial, token_states, starts))
        initial = place
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, whole_states, atol=1e-4, rtol=1e-4)
