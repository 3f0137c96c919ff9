"""The paged KV cache: what layers need, how blocks are laid out, and who owns the memory."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workerkit.framework.interfaces.batch import InputBatch

PAD_SLOT_ID = -1  # a slot mapping entry that must never be written
NULL_BLOCK_ID = 0  # block 0 is reserved: padding of block tables points there
SCALE_BYTES = 4  # of a scale of quantised keys or values


@attrs.frozen(kw_only=True)
class AttentionLayer:
    """One attention layer as the cache and the backend see it."""

    name: str  # "model.layers.3.self_attn"
    index: int  # position among the network's attention layers
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies query · key
    sliding_window: int | None = None  # keys a query may see, its own included
    latent_dim: int | None = None  # MLA: a value is the first so many elements of its key, which alone is kept
    has_sinks: bool = False  # `attend` is given a logit for each head that stands for no value
    softcap: float | None = None  # a score s counts as softcap * tanh(s / softcap)
    is_draft: bool = False  # of the draft's network, whose layers come behind the target's

    @property
    def value_dim(self) -> int:
        """Elements of a value of one head."""
        return self.latent_dim or self.head_dim


@attrs.frozen(kw_only=True)
class KVCacheSpec:
    """What the layers of one group keep per token."""

    num_kv_heads: int
    head_dim: int
    dtype: str  # name of a torch dtype; int8: with a float32 scale for each token and head
    block_size: int  # manager block size B, in tokens
    element_bytes: int
    sliding_window: int | None = None
    latent_dim: int | None = None  # see AttentionLayer: only keys are kept

    @property
    def kind(self) -> Literal["full", "sliding_window", "mla"]:
        """What kind of attention it serves."""
        if self.latent_dim is not None:
            return "mla"
        return "full" if self.sliding_window is None else "sliding_window"

    @property
    def is_quantized(self) -> bool:
        """Whether elements are meaningless without their scales."""
        return self.dtype == "int8"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys in one layer, without scales; of its values, where they are kept, likewise."""
        return self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer: keys, values and scales."""
        kept = 2 if self.latent_dim is None else 1
        scales = SCALE_BYTES * self.num_kv_heads if self.is_quantized else 0
        return kept * self.block_size * (self.token_bytes + scales)

    def count_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """How many blocks a request of that many tokens holds at most at a time, when a step writes at most
        `step_tokens` positions (max_num_batched_tokens, and K + 1 with speculation): with a sliding window those that
        no query sees any more are given back."""
        blocks = -(-num_tokens // self.block_size)
        if self.sliding_window is None:
            return blocks
        # A step's first query sees window - 1 positions before its own; the first of n positions may end a block.
        positions = self.sliding_window - 1 + step_tokens
        return min(blocks, -(-(positions - 1) // self.block_size) + 1)


@attrs.frozen(kw_only=True)
class KVCacheGroup:
    """Layers with one block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]  # AttentionLayer.index of the members
    # Kernel blocks from the beginning of one manager block to that of the next; None: B / b, nothing is between them.
    # It is more where larger blocks of other groups have the same ids.
    stride: int | None = None
    # Where the storages of its layers begin. Groups whose blocks have the same ids at the same time share no storages.
    first_storage: int = 0


@attrs.frozen(kw_only=True)
class KVLayout:
    """Stage value: how the cache is cut. All groups draw block ids from one pool; block 0 is never handed out."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    kernel_block_size: int  # b, divides every group's block size B; tables are expanded to it
    block_bytes: int = 0  # what one block takes in all storages together
    state_blocks: int = 0  # blocks that a copy of a request's recurrent state takes; 0: the model has none
    state_interval: int = 0  # such copies are made at multiples of so many tokens, a multiple of all block sizes

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(group.spec.block_size for group in self.groups)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of each group: manager block x is kernel blocks x * stride … x * stride + B / b - 1."""
        return tuple(group.stride or group.spec.block_size // self.kernel_block_size for group in self.groups)

    @property
    def needs_zeroing(self) -> bool:
        """Whether what a former owner left in a block may be no number to the next: of another type, or a state.

        Attention multiplies what is masked by 0, and 0 times NaN is NaN: such a block is zeroed before it is used.
        """
        return self.state_blocks > 0 or len({group.spec.dtype for group in self.groups}) > 1


@attrs.frozen(kw_only=True, eq=False)
class KVCaches:
    """Stage value: the memory itself. Views are by kernel block; a manager block is B/b of them in a row."""

    layout: KVLayout
    keys: tuple[torch.Tensor, ...]  # by AttentionLayer.index: [num_blocks * stride, b, num_kv_heads, head_dim]
    values: tuple[torch.Tensor, ...]  # likewise; of a layer with latent_dim a view of its keys, [..., :latent_dim]
    group_of_layer: tuple[int, ...]  # by AttentionLayer.index
    storages: tuple[torch.Tensor, ...] = ()  # what was allocated, each once: [num_blocks, …], keys and values apart
    # By AttentionLayer.index, of quantised layers: scales of keys, of values, [num_blocks * stride, b, num_kv_heads]
    scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict)


class KVCacheManager(abc.ABC):
    """Plans and allocates the cache, and does block-wise work on it before a forward."""

    @abc.abstractmethod
    def plan(
        self,
        layers: Sequence[AttentionLayer],
        kernel_block_sizes: Sequence[int],
        available_bytes: int,
        state_bytes: int = 0,
    ) -> KVLayout:
        """Group the layers and count the blocks that fit.

        `state_bytes`: of one request's recurrent state, 0 for a model without: see KVLayout.state_blocks.
        `kernel_block_sizes`: what the attention backend accepts; () means any. Raises CacheError when not even two
        blocks fit, or when no accepted kernel block size divides the configured block size.
        """

    @abc.abstractmethod
    def allocate(self, layout: KVLayout, layers: Sequence[AttentionLayer]) -> KVCaches:
        """Zero-filled caches."""

    @abc.abstractmethod
    def zero_blocks(self, caches: KVCaches, block_ids: Sequence[int]) -> None:
        """Zero whole manager blocks. Called before `copy_blocks` and before the forward."""

    @abc.abstractmethod
    def copy_blocks(self, caches: KVCaches, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy manager blocks (source, destination); all sources are read before any destination is written."""

    @abc.abstractmethod
    def write_state(self, caches: KVCaches, block_ids: Sequence[int], state: torch.Tensor) -> None:
        """Fill manager blocks, whole, with bytes [n] uint8; n is at most what so many blocks hold."""

    @abc.abstractmethod
    def read_state(self, caches: KVCaches, block_ids: Sequence[int], num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8: what `write_state` wrote there."""


@attrs.frozen(kw_only=True, eq=False)
class BatchTables:
    """Block tables and slot mappings of one batch, one entry a KV-cache group.

    Of a group with a sliding window, columns that no query of a row sees may name blocks that are another request's by
    now: an attention backend does not read them, or lets nothing in them count, NaN included.
    """

    block_tables: tuple[torch.Tensor, ...]  # [num_reqs_padded, W] int32, kernel block ids, padded with 0
    slot_mappings: tuple[torch.Tensor, ...]  # [num_tokens_padded] int32, padded with -1


class BlockTables(abc.ABC):
    """Which blocks each request owns. `index` is a row for V1 and a stable slot for V2; see the two sub-interfaces."""

    @abc.abstractmethod
    def add(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Overwrite one entry: manager block ids for each group, the null block where a sliding window has left.
        Raises CacheError past the row's capacity."""

    @abc.abstractmethod
    def append(self, index: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Append manager block ids for each group. Raises CacheError past the row's capacity, changing nothing."""

    @abc.abstractmethod
    def clear(self, index: int) -> None:
        """Forget one entry; its tail reads as the null block afterwards."""

    @abc.abstractmethod
    def gather(self, batch: InputBatch) -> BatchTables:
        """Tables of the batch's rows, and every token's slot: table[row, pos // b] * b + pos % b; padding is -1.

        Views of tensors that lie at the same addresses in every step, because graphs replay on them.
        """

    @abc.abstractmethod
    def block_ids(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Kernel block ids that an entry holds now, for each group."""

    @abc.abstractmethod
    def check_integrity(self, live: Sequence[int]) -> None:
        """Raise IntegrityError when an entry outside `live` holds a block."""


class RowBlockTables(BlockTables):
    """V1: entries are batch rows, moved together with the rows of the input batch."""

    @abc.abstractmethod
    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another and clear the source."""

    @abc.abstractmethod
    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""


class SlotBlockTables(BlockTables):
    """V2: entries are stable slots; `gather` reads them through `batch.idx_mapping`."""

    @abc.abstractmethod
    def stage(self) -> BlockTableWrites:
        """Take the writes made since the last call, to be applied later on the stream with `apply`."""

    @abc.abstractmethod
    def apply(self, writes: BlockTableWrites) -> None:
        """Apply what `stage` returned."""


@attrs.frozen(kw_only=True, eq=False)
class BlockTableWrites:
    """Rows to overwrite from a column on: for each group (slots, first columns, contents)."""

    groups: tuple[tuple[tuple[int, int, np.ndarray], ...], ...]
