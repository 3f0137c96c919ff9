"""A tokenizer of bytes and a few words, and what a matcher allows."""

import numpy as np
import pytest

from workerkit.components.structured.llguidance import LLGuidance, LLGuidanceConfig
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.text import Tokenizer

EOS = 256
WORDS = [b"<eos>", b"<eot>", b"<user>", b'{"', b'":', b"true", b" the", b"12", "é".encode(), "😀".encode()[:2], b"a"]


class BytesTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; then two ends, a special token, words, and "a" a second time."""

    eos_token_ids = (EOS, EOS + 1)
    bos_token = ""
    eos_token = "<eos>"
    chat_template = None
    vocab_size = 256 + len(WORDS)
    special_token_ids = frozenset({EOS, EOS + 2})

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=True):
        raise NotImplementedError

    def detokenizer(self, prompt_token_ids, skip_special_tokens=True):
        raise NotImplementedError

    def token_bytes(self, token_id):
        if token_id < 256:
            return bytes([token_id])
        return WORDS[token_id - 256] if token_id < self.vocab_size else b""


class Probe:
    """A part, and questions about it."""

    vocab_size = 300  # the model's output layer is wider than the tokenizer's vocabulary

    def __init__(self, **options):
        self.tokenizer = tokenizer = BytesTokenizer()
        shape = WorkerShape(max_model_len=8, max_num_reqs=4, max_num_batched_tokens=8, vocab_size=self.vocab_size)
        self.part = LLGuidance(LLGuidanceConfig(**options), Later(lambda: tokenizer), shape)

    def compile(self, **params):
        return self.part.compile(StructuredOutputsParams(**params))

    def masks(self, matcher, drafts=()):
        """The ids that each row allows; None: all."""
        bitmask = np.zeros((len(drafts) + 1, -(-self.vocab_size // 32)), dtype=np.int32)
        matcher.fill(bitmask, drafts)
        unpacked = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
        return [
            None if (row == -1).all() else set(np.flatnonzero(bits))
            for row, bits in zip(bitmask, unpacked, strict=True)
        ]

    def allowed(self, matcher):
        return self.masks(matcher)[0]

    def matches(self, text, **params):
        """Whether the whole text is one that the matcher allows to end with, byte after byte of it allowed."""
        matcher = self.compile(**params)
        for byte in text if isinstance(text, bytes) else text.encode():
            if matcher.is_finished or byte not in self.allowed(matcher):
                return False
            matcher.accept([byte])
        return EOS in self.allowed(matcher)


@pytest.fixture(scope="session")
def probe():
    return Probe()


@pytest.fixture(scope="session")
def make_probe():
    return Probe
