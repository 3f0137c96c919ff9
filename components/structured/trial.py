"""Grammars are tried in a process of their own before they are compiled here: nothing in llguidance bounds what a
hostile one costs. Some compile for hours and eat memory meanwhile (patterns that are all to hold, an integer that is a
multiple of a million and of a prime), references in a chain of 1500 overflow the stack. A process can be ended.

This file is also that process's program, so it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_STACK = 4 * 2**20  # of the trial; what it can do, the usual 8 MiB can


class Vocabulary:
    """What llguidance asks of a tokenizer, in a form that can be sent."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`tokens`: as many as the model has logits; b"", of an id that is no token, is never allowed. `encode`: how
        text is cut that has to follow; without it greedily, which is good enough for a trial."""
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is a str")  # llguidance tries bytes to find out
        assert self._encode is not None
        return self._encode(text)

    def build(self) -> LLTokenizer:
        """With the tries that masks are made of."""
        tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=list(self.eos_token_ids))
        if self._encode is None:
            self._encode = tokenizer.greedy_tokenize
        return tokenizer


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """With the first mask: it costs most, and shows whether any text at all is possible. Raises ValueError."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        message = first_line(matcher.get_error())
        raise ValueError("no text is possible" if message.startswith("NoExtension") else message)
    if warnings := matcher.get_grammar_warnings():
        raise ValueError(first_line(warnings[0]))
    return matcher


def first_line(error: str) -> str:
    """And what a parser says at the end of several."""
    lines = error.splitlines() or [""]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    return " ".join(line if len(line) <= 300 else f"{line[:300]}…" for line in (lines[0], reason) if line)


class Trial:
    """The process, started when it is first needed and again after it had to be ended."""

    def __init__(self, vocabulary: Vocabulary, max_seconds: float) -> None:
        self._vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, grammar: str) -> None:
        """Raises ValueError for a grammar that cannot be compiled, or not within the time."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        timer = threading.Timer(self._max_seconds, process.kill)
        timer.start()
        try:
            error = _ask(process, grammar)
        except BaseException as broken:  # a late answer must not be taken for the next one's
            _end(process)
            if not isinstance(broken, OSError | EOFError | pickle.UnpicklingError):
                raise
            limits = f"{self._max_seconds:g} s, or with {_STACK // 2**20} MiB of stack"
            raise ValueError(f"it is too complex: it cannot be compiled in {limits}") from None
        finally:
            timer.cancel()
        if error is not None:
            raise ValueError(error)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: else the modules beside this file would hide the packages of the same names
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        weakref.finalize(self, _end, self._process)
        vocabulary = self._vocabulary
        _ask(self._process, (vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_token_ids))
        return self._process


def _ask(process: subprocess.Popen[bytes], question: Any) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(question, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not sent
            pipe.close()


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """The process: a vocabulary, then grammars. The answer to each is what is wrong with it, or None."""
    vocabulary = Vocabulary(*pickle.load(questions)).build()
    error: str | None = None
    while True:
        pickle.dump(error, answers)
        answers.flush()
        try:
            grammar = pickle.load(questions)
        except EOFError:
            return
        try:
            error = None
            compile_grammar(vocabulary, grammar)
        except ValueError as found:
            error = str(found)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
