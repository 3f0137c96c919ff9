import pytest
import torch

from workerkit.kernels import cpu, reference


def inputs(tokens, experts, per_token, dtype=torch.float32, seed=0):
    """x, ids, their weights, and experts: linear functions with biases."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 16
    weights = torch.randn(experts, hidden, hidden, generator=generator, dtype=dtype) / 4
    biases = torch.randn(experts, hidden, generator=generator, dtype=dtype)
    x = torch.randn(tokens, hidden, generator=generator, dtype=dtype)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    mlps = [lambda rows, e=e: torch.nn.functional.linear(rows, weights[e], biases[e]) for e in range(experts)]
    return x, ids, torch.rand(tokens, per_token, generator=generator), mlps


@pytest.mark.parametrize(("tokens", "experts", "per_token"), [(1, 4, 1), (1, 8, 8), (7, 5, 2), (40, 3, 2), (3, 64, 6)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_both_add_up_what_the_experts_make_of_a_token(tokens, experts, per_token, dtype, atol):
    x, ids, weights, mlps = inputs(tokens, experts, per_token, dtype)
    everything = torch.stack([mlp(x) for mlp in mlps]).float()  # [E, T, H]
    shares = torch.zeros(tokens, experts).scatter_(1, ids, weights)
    expected = torch.einsum("eth,te->th", everything, shares)
    for library in (reference, cpu):
        got = library.OPS["experts"](x, ids, weights, mlps)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, atol=atol, rtol=1e-2 if dtype == torch.bfloat16 else 0)


def test_an_expert_is_called_once_with_all_its_tokens_and_not_at_all_without():
    x, ids, weights, mlps = inputs(9, 12, 2)
    ids = ids % 5
    calls = {}
    counting = [lambda rows, e=e: (calls.setdefault(e, []).append(len(rows)), mlps[e](rows))[1] for e in range(12)]
    cpu.OPS["experts"](x, ids, weights, counting)
    assert calls == {e: [int((ids == e).sum())] for e in set(ids.flatten().tolist())}


def test_parts_are_added_up_in_the_order_of_the_router():
    """So that a token's bits do not depend on the experts of other tokens."""
    x, ids, weights, _ = inputs(30, 8, 4)
    mlps = [lambda rows, e=e: rows * (10.0**e) for e in range(8)]  # exact for each row, and sums differ by their order
    got = cpu.OPS["experts"](x, ids, weights, mlps)
    assert torch.equal(got, reference.OPS["experts"](x, ids, weights, mlps))
    for token in range(30):
        own = slice(token, token + 1)
        assert torch.equal(got[own], cpu.OPS["experts"](x[own], ids[own], weights[own], mlps))
