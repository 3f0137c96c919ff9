"""DFlash and DSpark: one pass of a draft network over a block of positions proposes all of a row's drafts."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import attrs
import torch
from attrs import validators

from workerkit.components.speculator.drawing import DraftDraws, DrawingConfig, Drawn, together
from workerkit.components.speculator.limits import num_drafts
from workerkit.components.speculator.rows import draft_attend, last_valid, one_query_rows, write_kv
from workerkit.components.speculator.shared import embeddings_of, features_of, head_of, newest_tokens, unfit
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.draft import BlockDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import DrawKeys
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, DraftWeights, Speculator


@attrs.frozen(kw_only=True)
class DSparkConfig(DrawingConfig):
    """Options of `speculator: dspark`."""

    draft_topk: int = attrs.field(
        default=0,
        validator=validators.ge(0),
        metadata={
            "doc": "correct only the most likely candidates of each position and drop the others; 0: all of them"
        },
    )


class BlockSpeculator(Speculator):
    """What both have in common: the context's keys and values, and the pass over the blocks.

    The newest token stands at position n. Of a block only the positions that K drafts need are run, which are those
    that the scheduler's look-ahead covers. Their keys and values are temporary: the next step's context overwrites
    them, as it does those of rejected tokens, before anything reads them, for seq_len ends behind the block.
    """

    def __init__(
        self,
        config: DrawingConfig,
        shape: WorkerShape,
        context: DeviceContext,
        kernels: Kernels,
        attention: AttentionBackend,
        caches: KVCaches,
        loaded: LoadedModel,
        draft: DraftWeights,
    ) -> None:
        self._num_drafts = num_drafts(shape)
        network = _checked(draft, self._num_drafts)
        self._shape = shape
        self._kernels = kernels
        self._draws = DraftDraws(config, kernels, shape.vocab_size, network.target_ids)
        self._attention = attention
        self._caches = caches
        self._draft = draft
        self._network = network
        self._embed = embeddings_of(network, loaded)
        self._logits = head_of(network, loaded)
        self._width = self._num_drafts + (not network.samples_from_anchor)
        self._offsets = torch.arange(self._width, device=context.device)
        self._mask_ids = (
            None if network.mask_token_id is None else torch.tensor([network.mask_token_id], device=context.device)
        )

    @property
    def num_speculative_tokens(self) -> int:
        return self._num_drafts

    @property
    def taps(self) -> Sequence[str]:
        return self._network.features

    def propose(self, inputs: DraftInputs) -> Drafts:
        batch = inputs.batch
        # Padding has slot -1; rejected tokens are written, and overwritten by the block at once.
        self._network.write_context(
            features_of(self._network, inputs),
            batch.positions,
            batch.rope_lens,
            write_kv(self._kernels, self._caches, self._draft, inputs.tables),
        )
        if batch.plan.is_partial.all():
            none = torch.full((batch.num_reqs, self._num_drafts), -1, device=batch.positions.device)
            return Drafts(token_ids=none)
        newest = newest_tokens(inputs)
        first = batch.positions[last_valid(batch, inputs.sampled)] + 1
        drawn = self._choose(self._run_blocks(inputs, newest, first), newest, first, inputs.keys)
        return together(drawn, first + 1, self._shape.max_model_len)

    def _run_blocks(self, inputs: DraftInputs, newest: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Newest tokens [R] and their positions [R] -> states [R, K, H] that the drafts' logits come from."""
        network = self._network
        positions = first[:, None] + self._offsets
        rows, tables = one_query_rows(
            inputs.batch,
            inputs.tables,
            positions,
            (first + self._width)[:, None].expand_as(positions),
            ahead=self._width,
            block_size=self._caches.layout.kernel_block_size,
            max_model_len=self._shape.max_model_len,
        )
        attend = draft_attend(self._attention.build(rows, tables, self._caches, {}), self._draft)
        mask = None if self._mask_ids is None else self._embed(self._mask_ids)[0]
        blocks = network.block_embeds(self._embed(newest), mask)[:, : self._width]
        hidden = network.run_block(blocks.flatten(0, 1), rows.positions, rows.rope_lens, attend)
        hidden = hidden.view(*positions.shape, -1)
        return hidden if network.samples_from_anchor else hidden[:, 1:]

    @abc.abstractmethod
    def _choose(self, hidden: torch.Tensor, newest: torch.Tensor, first: torch.Tensor, keys: DrawKeys) -> list[Drawn]:
        """States [R, K, H], newest tokens [R] and their positions [R] -> K drafts, which stand behind them."""

    def _base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, K, H] -> float32 [R, K, Vd], in one product."""
        return self._logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


class DFlash(BlockSpeculator):
    """Masks stand where the drafts will; all are drawn at once, each without knowing the others."""

    def __init__(
        self,
        config: DrawingConfig,
        shape: WorkerShape,
        context: DeviceContext,
        kernels: Kernels,
        attention: AttentionBackend,
        caches: KVCaches,
        loaded: LoadedModel,
        draft: DraftWeights,
    ) -> None:
        super().__init__(config, shape, context, kernels, attention, caches, loaded, draft)
        if self._network.samples_from_anchor:
            raise UnsupportedError(
                f"speculator dflash: the draft {self._network.config.architecture} samples from its anchor, "
                "which is for speculator dspark"
            )

    def _choose(self, hidden: torch.Tensor, newest: torch.Tensor, first: torch.Tensor, keys: DrawKeys) -> list[Drawn]:
        logits = self._base_logits(hidden)
        return [self._draws.draw(logits[:, number], keys, first, number) for number in range(self._num_drafts)]


class DSpark(BlockSpeculator):
    """A block's logits come at once, then a small head corrects each by the draft before it, one after another."""

    def __init__(
        self,
        config: DSparkConfig,
        shape: WorkerShape,
        context: DeviceContext,
        kernels: Kernels,
        attention: AttentionBackend,
        caches: KVCaches,
        loaded: LoadedModel,
        draft: DraftWeights,
    ) -> None:
        super().__init__(config, shape, context, kernels, attention, caches, loaded, draft)
        self._topk = config.draft_topk

    def _choose(self, hidden: torch.Tensor, newest: torch.Tensor, first: torch.Tensor, keys: DrawKeys) -> list[Drawn]:
        logits = self._base_logits(hidden)
        if 0 < self._topk < logits.shape[-1]:
            kept, where = logits.topk(self._topk, dim=-1)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, where, kept)
        drawn: list[Drawn] = []
        previous, state = newest, None
        for number in range(self._num_drafts):
            step = hidden[:, number]
            confidence = self._network.confidence(step, previous)
            corrected, state = self._network.correct(logits[:, number], previous, step, state)
            draft = self._draws.draw(corrected, keys, first, number)
            previous = draft.token_ids
            drawn.append(draft if confidence is None else attrs.evolve(draft, confidence=confidence))
        return drawn


def _checked(draft: DraftWeights, num_drafts: int) -> BlockDraft:
    """The draft's network. Raises UnsupportedError for one that proposes no blocks, or too short ones."""
    network = draft.network
    if not isinstance(network, BlockDraft):
        raise unfit(draft, "a draft of whole blocks (DFlash, DSpark)")
    most = network.block_size - (not network.samples_from_anchor)
    if num_drafts > most:
        raise UnsupportedError(
            f"limits.num_speculative_tokens is {num_drafts}, but the block_size {network.block_size} of the draft "
            f"{network.config.architecture} allows {most} at most"
        )
    return network
