"""What a draft network must say of a text, worked out without blocks, batches or slots."""

import torch
from oracles import dense_attend, dense_logits

from workerkit.framework.interfaces.draft import DraftHead, HeadsDraft
from workerkit.framework.interfaces.model import ModelInputs


class GrowingAttend:
    """Attention of one text whose tokens come bit by bit: keys and values in one list a layer."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def __call__(self, layer, query, key, value):
        for held, new in ((self.keys, key), (self.values, value)):
            held[layer.index] = torch.cat([held[layer.index], new]) if layer.index in held else new
        keys, values = self.keys[layer.index], self.values[layer.index]
        padding = torch.zeros(len(keys) - len(query), *query.shape[1:])
        return dense_attend(layer, torch.cat([padding, query]), keys, values)[len(padding) :]


def logits_of_drafts(draft, target, token_ids, prompt_len, drafts):
    """[K, Vd]: what the draft's K drafts were chosen by, behind a text whose last token the target has not seen yet.

    The drafts themselves say how it went on from one to the next.
    """
    count = len(drafts)
    if not isinstance(draft, DraftHead):
        return dense_logits(draft, [*token_ids, *drafts], prompt_len)[len(token_ids) - 1 :][:count]
    positions = torch.arange(len(token_ids) - 1)
    inputs = ModelInputs(
        input_ids=torch.tensor(token_ids[:-1], dtype=torch.int32),
        positions=positions,
        rope_lens=(positions + 1).clamp(min=prompt_len),
        attend=dense_attend,
        taps=tuple(draft.features),
    )
    output = target.forward(inputs)
    if isinstance(draft, HeadsDraft):
        return torch.cat([draft.head_logits(output.hidden[-1:], head) for head in range(count)])
    features = torch.cat([output.taps[name] for name in draft.features], -1) if draft.features else output.hidden
    embed = draft.embed if draft.has_embeddings else target.embed
    head = draft.compute_logits if draft.has_head else target.compute_logits
    attend = GrowingAttend()
    state, tokens, first, logits = draft.combine(features), token_ids[1:], 0, []
    for token in drafts:
        positions = torch.arange(first, first + len(tokens))
        rope_lens = (positions + 1).clamp(min=prompt_len)
        states, carried = draft.step(embed(torch.tensor(tokens)), state, positions, rope_lens, attend)
        logits.append(head(states[-1:]))
        first, state, tokens = first + len(tokens), carried[-1:], [token]
    return torch.cat(logits)
