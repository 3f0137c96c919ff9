"""Text to tokens and back: tokenizers and chat templates."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any


class Detokenizer(abc.ABC):
    """Text of one request, token by token."""

    @abc.abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now; bytes of an unfinished character are held back."""

    @abc.abstractmethod
    def flush(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""


class Tokenizer(abc.ABC):
    """Text to ids and back."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Added tokens included."""

    @property
    @abc.abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def bos_token(self) -> str: ...

    @property
    @abc.abstractmethod
    def eos_token(self) -> str: ...

    @property
    @abc.abstractmethod
    def chat_template(self) -> str | None:
        """The jinja source that came with the model."""

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abc.abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @abc.abstractmethod
    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        """Starts after the prompt, whose last bytes may be half a character."""

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; of a special token its name, of an id that is no token b""."""

    @property
    @abc.abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are not text."""


class ChatTemplate(abc.ABC):
    """Messages to prompt text."""

    @abc.abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Raises RequestError for a template's own refusal, UnsupportedError when the model has no template."""
