"""Tokens to text, one by one: every token is a string of bytes, and the bytes are decoded as UTF-8 as they come.

Both kinds of vocabulary that models use end in bytes: byte-level BPE writes each byte as one letter, sentencepiece
falls back to tokens like `<0xE2>`. Decoding bytes instead of growing prefixes costs the same for every token and cannot
drift.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from workerkit.framework.interfaces.text import Detokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """A token outside the alphabet is an added one and stands for its own text."""
    try:
        return bytes([alphabet[letter] for letter in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """`<0xE2>` is a byte, `▁` a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


class IncrementalDetokenizer(Detokenizer):
    """Holds back at most three bytes (an unfinished character); bad bytes become U+FFFD."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], prompt_token_ids: Sequence[int] = (), strip_first_space: bool = False
    ) -> None:
        """`token_bytes` of a token that is not shown is empty. `strip_first_space`: of a text that starts here."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = token_bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        self._decoder.decode(tail)  # the text is the prompt's; half a character at its end stays in the decoder
        self._strip = strip_first_space and not tail
        self._started = False

    def push(self, token_ids: Sequence[int]) -> str:
        self._started = self._started or bool(token_ids)
        return self._shown(self._decoder.decode(b"".join(map(self._token_bytes, token_ids))))

    def flush(self) -> str:
        if not self._started:  # then half a character is the prompt's own
            return ""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
