"""A tokenizer of 60 letters and an end: every token is one character."""

from workerkit.components.engine.detokenizer import IncrementalDetokenizer
from workerkit.framework.interfaces.text import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567"
EOS = len(LETTERS)
VOCAB = EOS + 1


class Letters(Tokenizer):
    """A letter a token, and an end."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)
    bos_token = ""
    eos_token = "<end>"
    chat_template = None
    special_token_ids = frozenset({EOS})

    def encode(self, text, add_special_tokens=True):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(LETTERS[token] for token in token_ids if token != EOS)

    def token_bytes(self, token_id):
        return LETTERS[token_id].encode() if token_id < EOS else b"<end>"

    def detokenizer(self, prompt_token_ids, skip_special_tokens=True):
        return IncrementalDetokenizer(lambda token: b"" if token == EOS else self.token_bytes(token), prompt_token_ids)
