"""The gated delta rule: the reference against its formula and Hugging Face's functions, the CPU library against it."""

import pytest
import torch
from ragged_rows import num_columns, place_rows
from transformers.models.qwen3_next import modeling_qwen3_next

from workerkit.kernels import cpu, reference

KEY_HEADS, SIZE, VALUE_SIZE = 2, 6, 5


class Batch:
    """Random inputs of ragged rows that go on from random states. A row verifies (keeps the state behind every token),
    keeps the last one in the place where it began, or, now and then, none."""

    def __init__(self, lens, verify=(), groups=2, dtype=torch.float32, decay=1.0, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        total, heads = sum(lens), KEY_HEADS * groups
        wide = random(total, 2 * KEY_HEADS * SIZE + heads * VALUE_SIZE).to(dtype)
        query, key, value = wide.split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, heads * VALUE_SIZE], dim=-1)
        self.query, self.key = query.view(total, KEY_HEADS, SIZE), key.view(total, KEY_HEADS, SIZE)
        self.value = value.view(total, heads, VALUE_SIZE)
        self.decay = -decay * torch.rand(total, heads, generator=generator)
        self.beta = torch.rand(total, heads, generator=generator)
        self.states = random(len(lens) * num_columns(lens, verify) + 1, heads, SIZE, VALUE_SIZE)
        self.initial, self.starts, self.token_states = place_rows(lens, verify, generator)

    def run(self, ops):
        states = self.states.clone()
        inputs = (self.query, self.key, self.value, self.decay, self.beta)
        return ops["gated_delta_rule"](*inputs, states, self.initial, self.token_states, self.starts), states

    def rows(self):
        return enumerate(zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True))


def test_the_reference_is_the_formula():
    batch = Batch([3, 1, 6], verify=[0], groups=3)
    output, states = batch.run(reference.OPS)
    expected_states = batch.states.double()
    for row, (start, end) in batch.rows():
        for head in range(KEY_HEADS * 3):
            state = batch.states[batch.initial[row], head].double()
            for t in range(start, end):
                q, k = (x[t, head // 3].double() for x in (batch.query, batch.key))
                q, k = q / (q @ q + 1e-6) ** 0.5 / SIZE**0.5, k / (k @ k + 1e-6) ** 0.5
                erase = torch.eye(SIZE, dtype=torch.float64) - batch.beta[t, head].double() * torch.outer(k, k)
                state = erase @ state * batch.decay[t, head].double().exp()
                state = state + batch.beta[t, head].double() * torch.outer(k, batch.value[t, head].double())
                torch.testing.assert_close(output[t, head].double(), q @ state, atol=1e-5, rtol=1e-5)
                if batch.token_states[t] >= 0:
                    expected_states[batch.token_states[t], head] = state
    torch.testing.assert_close(states.double(), expected_states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("length", [1, 70])
def test_the_reference_is_hugging_faces(function, length):
    batch = Batch([length])
    inputs = (x[None] for x in (batch.query, batch.key, batch.value, batch.decay, batch.beta))
    expected, state = getattr(modeling_qwen3_next, function)(
        *inputs,
        initial_state=batch.states[batch.initial],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    output, states = batch.run(reference.OPS)
    torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[batch.token_states[-1]], state[0], atol=1e-5, rtol=1e-5)


def assert_cpu_equals_the_reference(batch, atol=1e-5):
    (expected, expected_states), (got, got_states) = batch.run(reference.OPS), batch.run(cpu.OPS)
    assert got.dtype == expected.dtype == batch.value.dtype
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-4)
    torch.testing.assert_close(got_states, expected_states, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("lens", "verify"),
    [
        ([1], []),
        ([1] * 9, []),
        ([4, 4, 4], [0, 1, 2]),
        ([9, 9], [0, 1]),
        ([1, 4, 2, 1, 3], [1, 4]),
        ([70, 1, 20, 4, 7, 8, 9], [2, 3]),
    ],
    ids=str,
)
def test_cpu_equals_the_reference(lens, verify, groups):
    assert_cpu_equals_the_reference(Batch(lens, verify, groups))


@pytest.mark.parametrize("length", [8, 63, 64, 65, 127, 128, 129, 130])
def test_cpu_at_the_borders_of_chunks(length):
    assert_cpu_equals_the_reference(Batch([length]))
    assert_cpu_equals_the_reference(Batch([30, length, 64, 1]))


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 1e4, 1e30])
def test_cpu_with_weak_and_strong_decay(decay):
    batch = Batch([150, 3, 1, 90], decay=decay)
    batch.decay[1::3] *= 1e-5  # what a float32 sum with strong ones would swallow
    assert_cpu_equals_the_reference(batch)
    output, states = batch.run(cpu.OPS)
    assert output.isfinite().all()
    assert states.isfinite().all()


def test_cpu_with_keys_that_are_all_alike():
    """The system of a chunk is at its worst: every token overwrites what the one before wrote."""
    batch = Batch([130, 64], decay=1e-3)
    batch.key[:] = batch.key[:1]
    batch.beta[:] = 1.0
    assert_cpu_equals_the_reference(batch, atol=1e-4)


def test_cpu_with_vectors_of_zeros():
    batch = Batch([70, 1])
    batch.query[3:9], batch.key[5:20], batch.value[8:30] = 0, 0, 0
    assert_cpu_equals_the_reference(batch)


def test_cpu_in_bfloat16():
    assert_cpu_equals_the_reference(Batch([90, 1, 5], dtype=torch.bfloat16), atol=1e-2)


def test_cpu_on_many_random_batches():
    generator = torch.Generator().manual_seed(5)
    for seed in range(20):
        lens = torch.randint(1, 100, (6,), generator=generator).tolist()
        lens[::2] = torch.randint(1, 6, (3,), generator=generator).tolist()
        assert_cpu_equals_the_reference(Batch(lens, verify=[2], seed=seed))


@pytest.mark.parametrize("ops", [reference.OPS, cpu.OPS], ids=["reference", "cpu"])
def test_a_row_in_pieces_is_the_row(ops):
    batch = Batch([150])
    whole, whole_states = batch.run(ops)
    states, place = batch.states.clone(), batch.token_states[-1:]
    initial, pieces = batch.initial, []
    for part in (slice(0, 64), slice(64, 65), slice(65, 70), slice(70, 150)):
        token_states = torch.full((part.stop - part.start,), -1)
        token_states[-1] = place
        inputs = (x[part] for x in (batch.query, batch.key, batch.value, batch.decay, batch.beta))
        starts = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        pieces.append(ops["gated_delta_rule"](*inputs, states, initial, token_states, starts))
        initial = place
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, whole_states, atol=1e-5, rtol=1e-4)


def test_a_verified_row_goes_on_from_any_of_its_tokens():
    """What is kept behind token j is the state of a row that ends there."""
    batch = Batch([5], verify=[0])
    _, states = batch.run(cpu.OPS)
    for length in range(1, 6):
        shorter = Batch([5], verify=[0])
        kept = shorter.token_states[length - 1]
        inputs = (x[:length] for x in (batch.query, batch.key, batch.value, batch.decay, batch.beta))
        target = torch.full((length,), -1)
        target[-1] = kept
        alone = batch.states.clone()
        starts = torch.tensor([0, length], dtype=torch.int32)
        cpu.OPS["gated_delta_rule"](*inputs, alone, batch.initial, target, starts)
        torch.testing.assert_close(states[kept], alone[kept], atol=1e-6, rtol=1e-5)
