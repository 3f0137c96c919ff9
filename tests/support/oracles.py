"""What tests compare with: a cache-less forward, and "the same tokens" with its tolerance for near-ties."""

import torch

from workerkit.framework.interfaces.model import ModelInputs

KERNEL_ERROR = 1e-3  # float32 logits of SmolLM2 through different kernels; a smaller top-2 gap decides nothing


def dense_attend(layer, query, key, value):
    """Causal attention over one whole sequence, without a cache."""
    groups = layer.num_heads // layer.num_kv_heads
    q, k, v = (x.transpose(0, 1) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    length = query.shape[0]
    offsets = torch.arange(length)[:, None] - torch.arange(length)[None]
    mask = offsets >= 0
    if layer.sliding_window is not None:
        mask &= offsets < layer.sliding_window
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    return out.transpose(0, 1)


def dense_logits(network, token_ids, prompt_len=None):
    """float32 [len, V] of one sequence."""
    positions = torch.arange(len(token_ids))
    inputs = ModelInputs(
        input_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=positions,
        rope_lens=(positions + 1).clamp(min=prompt_len or len(token_ids)),
        attend=dense_attend,
    )
    with torch.inference_mode():
        return network.compute_logits(network.forward(inputs).hidden)


def first_difference(logits, prompt_len, token_ids):
    """(index, top-2 gap) of the first token that is not the argmax of `logits` [prompt + tokens, V], or None.

    If there is none, then by induction the model's own greedy continuation is exactly `token_ids`.
    """
    predictions = logits[prompt_len - 1 : prompt_len - 1 + len(token_ids)]
    wrong = (predictions.argmax(-1) != torch.tensor(token_ids)).nonzero()
    if not len(wrong):
        return None
    index = int(wrong[0])
    top = predictions[index].topk(2).values
    return index, float(top[0] - top[1])
