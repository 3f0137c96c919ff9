"""A worker on a real GPU: replayed steps give the tokens of eager ones."""

import pytest
import torch
from graph_workers import RUNNERS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none")


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", ["full_decode_only", "piecewise", "full_and_piecewise"])
def test_replayed_steps_give_the_same_tokens(make, runner, mode):
    overrides = {"model.dtype": "float32"}
    parts = {"device": "cuda", "overrides": overrides}
    captured = make(runner, {"use": "cuda", "mode": mode}, **parts)
    assert captured.tokens() == make(runner, **parts).tokens()
    assert captured.replayed()
