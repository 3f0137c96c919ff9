"""What a draft network may share with its target: the embeddings that it reads with, the head that it predicts with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.draft import BlockDraft, DraftHead, HiddenDraft
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.speculation import DraftInputs, DraftWeights


def features_of(network: DraftHead, inputs: DraftInputs) -> torch.Tensor:
    """The target's states that the draft reads, side by side: [num_tokens_padded, n * Ht]."""
    taps = [inputs.taps[name] for name in network.features]
    return torch.cat(taps, dim=-1) if taps else inputs.hidden


def newest_tokens(inputs: DraftInputs) -> torch.Tensor:
    """[num_reqs] int64, `next_tokens` as ids that can be looked up: where no token was possible the request ends."""
    return inputs.next_tokens.clamp(min=0)


def embeddings_of(network: HiddenDraft | BlockDraft, loaded: LoadedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The draft's own, or the target's where it has none."""
    return network.embed if network.has_embeddings else loaded.network.embed


def head_of(network: HiddenDraft | BlockDraft, loaded: LoadedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The draft's own, or the target's where it has none. Raises UnsupportedError when that cannot fit (B42)."""
    name, config, target = network.config.architecture, network.config, loaded.config
    if network.has_head:
        if network.target_ids is None and config.vocab_size != target.vocab_size:
            raise UnsupportedError(
                f"components.draft: {name} predicts {config.vocab_size} tokens, the target has {target.vocab_size}, "
                "and nothing says which of them are meant"
            )
        return network.compute_logits
    if network.target_ids is not None or config.hidden_size != target.hidden_size:
        raise UnsupportedError(
            f"components.draft: {name} has no head of its own, and the target's, of {target.hidden_size} x "
            f"{target.vocab_size}, does not fit its states of {config.hidden_size} numbers or its own vocabulary"
        )
    return loaded.network.compute_logits


def unfit(draft: DraftWeights, wanted: str) -> UnsupportedError:
    """The draft is not of the kind that the proposer works with."""
    got = "no weights" if draft.network is None else draft.network.config.architecture
    return UnsupportedError(f"components.speculator needs {wanted}; components.draft brings {got}")
