"""Fakes at both ends of an engine: tokenizer, chat template and structured outputs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.image import ImageProcessor, ProcessedImage
from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams
from workerkit.framework.interfaces.structured import GrammarMatcher, StructuredOutputs
from workerkit.framework.interfaces.text import ChatTemplate, Detokenizer, Tokenizer
from workerkit.framework.testing.fakes_model import FAKE_VOCAB


class _Bytes(Detokenizer):
    def __init__(self, tokenizer: FakeTokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.push(prompt_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        kept = (token for token in token_ids if token not in self._skipped)
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, kept)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeTokenizer(Tokenizer):
    """Bytes of UTF-8; 256 begins a text, 257 ends one."""

    @property
    def vocab_size(self) -> int:
        return FAKE_VOCAB

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (257,)

    @property
    def bos_token(self) -> str:
        return "<s>"

    @property
    def eos_token(self) -> str:
        return "</s>"

    @property
    def chat_template(self) -> str | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([256] if add_special_tokens else []), *text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer((), skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        return _Bytes(self, prompt_token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return {256: b"<s>", 257: b"</s>"}.get(token_id, b"")

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset((256, 257))


class FakeImageProcessor(ImageProcessor):
    """A picture is one patch a byte, and takes a token for each."""

    @property
    def placeholder_id(self) -> int:
        return 0

    def process(self, data: bytes) -> ProcessedImage:
        pixels = np.frombuffer(data, np.uint8).astype(np.float32)[:, None]
        return ProcessedImage(pixels=pixels, grid=(1, 1, len(data)), num_tokens=len(data), digest=data.hex())


class FakeChatTemplate(ChatTemplate):
    """`role: content`, a line each."""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join([*lines, "assistant:" if add_generation_prompt else ""])


class _Choices(GrammarMatcher):
    def __init__(self, choices: Sequence[Sequence[int]], end: int) -> None:
        self._choices, self._end = choices, end
        self._done: list[int] = []

    def _after(self, token_ids: Sequence[int]) -> set[int]:
        count = len(token_ids)
        fitting = [choice for choice in self._choices if list(choice[:count]) == list(token_ids)]
        return {choice[count] if len(choice) > count else self._end for choice in fitting}

    def fill(self, bitmask: np.ndarray, drafts: Sequence[int] = ()) -> None:
        bitmask[:] = 0
        for row in range(len(drafts) + 1):
            allowed = self._after([*self._done, *drafts[:row]])
            for token in allowed:
                bitmask[row].view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
            if not allowed:
                bitmask[row] = -1

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token not in self._after(self._done):
                raise RequestError(f"token {token} is not allowed after {self._done}")
            self._done.append(token)

    @property
    def is_finished(self) -> bool:
        return self._after(self._done) <= {self._end}


class FakeStructuredOutputs(StructuredOutputs):
    """Knows `choice` alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        if not params.choice:
            raise RequestError("this fake understands structured_outputs.choice alone")
        texts = [self._tokenizer.encode(text, add_special_tokens=False) for text in params.choice]
        return _Choices(texts, self._tokenizer.eos_token_ids[0])
