"""What both backends ask of a layer."""

from __future__ import annotations

from collections.abc import Sequence

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.kv_cache import AttentionLayer


def check_heads(layers: Sequence[AttentionLayer]) -> None:
    """Raise UnsupportedError for a layer that the backend cannot serve."""
    for layer in layers:
        if layer.num_heads % layer.num_kv_heads:
            raise UnsupportedError(
                f"{layer.name}: {layer.num_heads} heads are no multiple of {layer.num_kv_heads} key heads"
            )
