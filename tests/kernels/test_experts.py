import pytest
import torch

from workerkit.kernels import cpu, reference


def inputs(tokens, experts, per_token, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = 16, 24
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=generator, dtype=dtype) / 4
    down = torch.randn(experts, hidden, inner, generator=generator, dtype=dtype) / 5
    x = torch.randn(tokens, hidden, generator=generator, dtype=dtype)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    return gate_up, down, x, ids, torch.rand(tokens, per_token, generator=generator)


@pytest.mark.parametrize(("tokens", "experts", "per_token"), [(1, 4, 1), (1, 8, 8), (7, 5, 2), (40, 3, 2), (3, 64, 6)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_grouped_experts_are_the_reference_ones(tokens, experts, per_token, dtype, atol):
    gate_up, down, *arguments = inputs(tokens, experts, per_token, dtype)
    expected = reference.OPS["experts"](gate_up, down)(*arguments)
    got = cpu.OPS["experts"](gate_up, down)(*arguments)
    assert got.dtype == expected.dtype == dtype
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def test_the_reference_is_the_formula():
    gate_up, down, x, ids, weights = inputs(3, 4, 2)
    expected = torch.zeros_like(x)
    for t in range(3):
        for e, w in zip(ids[t], weights[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += w * (down[e] @ (gate / (1 + (-gate).exp()) * up))
    torch.testing.assert_close(reference.OPS["experts"](gate_up, down)(x, ids, weights), expected)


def test_what_is_kept_is_all_of_it_once():
    gate_up, down, *_ = inputs(1, 2, 1)
    for library in (reference, cpu):
        kept = library.OPS["experts"](gate_up, down).tensors
        assert sum(tensor.nbytes for tensor in kept) == gate_up.nbytes + down.nbytes
