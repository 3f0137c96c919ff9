"""An attention backend that makes tables expand manager blocks."""

from workerkit.components.attention.cpu import CpuAttention


class HalfBlocks(CpuAttention):
    """Wants kernel blocks of two tokens: half a manager block."""

    kernel_block_sizes = (2,)
