"""ALiBi as two elements more of queries and keys, and what a mask for torch's function of attention says."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from workerkit.components.model.transformers_attention import read_slopes, with_alibi
from workerkit.framework.errors import UnsupportedError

SLOPES = torch.tensor([0.5, 0.3, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_elements_more_make_the_biases_of_alibi(dtype):
    """Positions that bfloat16 does not hold in one number, slopes that are what remains of them in it."""
    generator = torch.Generator().manual_seed(0)
    positions, slopes = torch.arange(2300, 2600), SLOPES.to(dtype).float()
    query, key = torch.randn(300, 3, 8, generator=generator).to(dtype), torch.zeros(300, 1, 8, dtype=dtype)
    longer, keys = with_alibi(query, key, positions, slopes)
    assert longer.shape == (300, 3, 10)
    assert longer.dtype == keys.dtype == dtype
    assert torch.equal(longer[..., :8], query)
    scores = torch.einsum("qnd,kd->nqk", longer.float(), keys[:, 0].float())
    distance = (positions[:, None] - positions).float()
    expected = -slopes[:, None, None] * distance
    shifted = scores - scores.diagonal(dim1=1, dim2=2)[..., None]
    torch.testing.assert_close(shifted, expected, atol=2e-3, rtol=1e-5)


def model_with(mask):
    """One whose body calls torch's function once, with that mask."""

    def body(input_ids, **_):
        heads = torch.zeros(1, 3, input_ids.shape[1], 8)
        return scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, is_causal=mask is None)

    return SimpleNamespace(base_model=body)


CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
BIAS = SLOPES[:, None, None] * torch.arange(4)
LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "none": (None, 0 * SLOPES),
    "causal": (CAUSAL[None, None], 0 * SLOPES),
    "by key": (BIAS.masked_fill(~CAUSAL, LOWEST)[None], SLOPES),
    "by distance": ((BIAS - BIAS.transpose(1, 2)).masked_fill(~CAUSAL, LOWEST)[None], SLOPES),
}


@pytest.mark.parametrize("kind", MASKS)
def test_slopes_are_read_from_a_mask(kind):
    mask, slopes = MASKS[kind]
    (got,) = read_slopes(model_with(mask), torch.device("cpu"))
    torch.testing.assert_close(got, slopes)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 4, 4, dtype=torch.bool),
        (CAUSAL & ~CAUSAL.tril(-2))[None, None],
        pad(BIAS.masked_fill(~CAUSAL, LOWEST)[None, :, :, 1:], (1, 0), value=0.7),
        torch.where(CAUSAL, BIAS**2, LOWEST)[None],
    ],
    ids=["all see all", "a window", "a bias of the first key", "biases that do not grow with the distance"],
)
def test_a_mask_that_says_more_is_refused(mask):
    with pytest.raises(UnsupportedError, match="more than causality and ALiBi"):
        read_slopes(model_with(mask), torch.device("cpu"))
