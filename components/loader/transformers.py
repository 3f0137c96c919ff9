"""The config of any checkpoint that transformers knows, as transformers itself reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from workerkit.framework.errors import ModelError, UnsupportedError
from workerkit.framework.interfaces.model import ModelConfig, ModelLoader, RopeConfig
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import ModelStore


class TransformersLoader(ModelLoader):
    """For `model: transformers`, which fills its network itself."""

    def __init__(self, section: ModelSection, files: ModelStore) -> None:
        self._section = section
        self._files = files

    def read_config(self) -> ModelConfig:
        import transformers

        folder = self._files.resolve(self._section.source)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            return self._config(config, config.get_text_config())
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise ModelError(f"{folder}: transformers cannot read the config of a decoder there: {error}") from error

    def _config(self, config: Any, text: Any) -> ModelConfig:
        heads, hidden = text.num_attention_heads, text.hidden_size
        head_dim = _of_all_layers(text, "head_dim") or hidden // heads
        positions = getattr(text, "max_position_embeddings", None) or self._section.max_model_len
        if positions is None:
            raise ModelError(f"{type(config).__name__} names no longest sequence: set model.max_model_len")
        eos = config.eos_token_id
        return ModelConfig(
            architecture=(config.architectures or [type(config).__name__])[0],
            vocab_size=text.vocab_size,
            hidden_size=hidden,
            intermediate_size=_of_all_layers(text, "intermediate_size") or 4 * hidden,
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=_of_all_layers(text, "num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
            max_position_embeddings=positions,
            rope=RopeConfig(rotary_dim=head_dim),  # transformers' modules rotate by their own config
            tie_word_embeddings=bool(config.tie_word_embeddings),
            bos_token_id=config.bos_token_id,
            eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
            dtype=str(config.dtype or "float32").removeprefix("torch."),
            raw=config.to_dict(),
        )

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        raise UnsupportedError("components.loader: transformers hands out no tensors: `model: transformers` reads them")

    def count(self) -> int:
        return 0

    def at(self, source: str) -> ModelLoader:
        return TransformersLoader(attrs.evolve(self._section, source=source), self._files)


def _of_all_layers(text: Any, name: str) -> int | None:
    """A number of a config; None where it has none, or one for each layer."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # so transformers answers where layers differ
        return None
    return value if isinstance(value, int) else None
