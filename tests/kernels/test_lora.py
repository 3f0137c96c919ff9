"""Low-rank corrections: each token gets its own adapter's, and no other's."""

import pytest
import torch

from workerkit.kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "adapters", "rank"), [(1, 1, 1), (7, 3, 4), (5, 2, 1), (0, 2, 3)])
def test_each_token_has_its_own_adapter_or_none(dtype, tokens, adapters, rank):
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator).to(dtype)

    x, a, b = random(tokens, 6), random(adapters * rank, 6), random(adapters * rank, 9)
    own = torch.randint(-1, adapters, (tokens,), generator=generator)
    mask = (own[:, None] == torch.arange(adapters)).to(dtype)
    output = random(tokens, 9)
    expected = output.float()
    for token, adapter in enumerate(own.tolist()):
        if adapter >= 0:
            rows = slice(adapter * rank, (adapter + 1) * rank)
            expected[token] += (x[token].float() @ a[rows].float().T) @ b[rows].float()
    before = output.clone()
    reference.OPS["add_lora"](output, x, a, b, mask)
    torch.testing.assert_close(output.float(), expected, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    assert torch.equal(output[own < 0], before[own < 0])
