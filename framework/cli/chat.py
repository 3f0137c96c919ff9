"""`workerkit chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from workerkit.framework.cli import common
from workerkit.framework.cli.sampling import add_sampling, sampling_of
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.engine import Engine
from workerkit.framework.interfaces.sampling_params import SamplingParams

HELP = "/reset starts anew, /system TEXT sets the instructions, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(group, "chat", _chat, "talk to the model", f"Talk to the model. {HELP}.")
    common.add_config(parser)
    parser.add_argument("--lora", metavar="NAME", help="adapter of components.lora that answers")
    parser.add_argument("--system", metavar="TEXT", help="instructions in front of the conversation")
    parser.add_argument("--once", metavar="QUESTION", help="answer this one question and leave")
    add_sampling(parser, max_tokens=512)


def _chat(args: argparse.Namespace) -> int:
    params = sampling_of(args)
    with common.running_engine(common.assembly_of(args)) as engine:
        talk = Conversation(engine, params, args.system, args.lora)
        if args.once is not None:
            common.warn(talk.ask(args.once))
        else:
            _loop(talk)
    return 0


def _loop(talk: Conversation) -> None:
    with contextlib.suppress(ImportError):  # line editing, where the platform has it
        import readline  # noqa: F401  importing it is what changes input()
    common.warn(HELP)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        word, _, rest = line.partition(" ")
        if word == "/exit":
            return
        if word == "/reset":
            talk.reset()
        elif word == "/system":
            talk.system = rest.strip() or None
            talk.reset()
        elif word.startswith("/"):
            common.warn(f"no command {word}; {HELP}")
        elif line:
            try:
                talk.ask(line)
            except KeyboardInterrupt:
                common.warn("\n(stopped)")
            except RequestError as error:
                common.warn(f"{error}\n(/reset starts anew)")


class Conversation:
    """Messages so far, and the engine that answers."""

    def __init__(
        self, engine: Engine, params: SamplingParams, system: str | None = None, lora: str | None = None
    ) -> None:
        self._engine = engine
        self._params = params
        self.system = system
        self._lora = lora
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget the conversation, and keep the instructions."""
        self._messages = []

    def ask(self, question: str) -> str:
        """Print the answer as it comes, and return how fast it came. A part of an answer that was stopped stays in the
        conversation; a question that was refused does not. Raises RequestError."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = [*first, *self._messages, {"role": "user", "content": question}]
        meter, count, answer = common.SpeedMeter(self._engine), 0, ""
        try:
            with contextlib.closing(self._engine.chat(messages, self._params, self._lora)) as deltas:  # type: ignore[type-var]  # a generator
                for delta in deltas:
                    if delta.finish_reason == "error":
                        raise RequestError(delta.error or "the request failed")
                    count += len(delta.token_ids)
                    answer += delta.text
                    print(delta.text, end="", flush=True)
        finally:
            if count:
                self._messages = [*messages[len(first) :], {"role": "assistant", "content": answer}]
        print()
        return meter.text(count)
