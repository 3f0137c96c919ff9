"""What is left of a distribution where a draft was rejected."""

import torch

from workerkit.kernels import reference

residual_probs = reference.OPS["residual_probs"]


def test_against_python_numbers():
    probs = torch.tensor([[0.4, 0.1, 0.2, 0.3], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    draft = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.0, 0.0, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]])
    weights = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    kept = probs.clone(), draft.clone()
    got = residual_probs(probs, draft, weights)
    expected = [[max(w * p - q, 0) for p, q in zip(*rows, strict=True)]
                for w, *rows in zip(weights.tolist(), probs.tolist(), draft.tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(got, torch.tensor(expected))
    assert got.dtype == torch.float32
    assert torch.equal(probs, kept[0])
    assert torch.equal(draft, kept[1])


def test_rejection_and_residual_make_up_the_target():
    """min(p, q) + (1 - sum of min) * residual / its mass = p, for any q: what Leviathan's proof says."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, 100, generator=generator).mul(3).softmax(-1)
    left = residual_probs(p, q, torch.ones(50))
    accepted = torch.minimum(p, q)
    torch.testing.assert_close(left.sum(-1), 1 - accepted.sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(accepted + left, p)
