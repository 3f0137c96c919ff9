"""`workerkit generate`: one prompt streams, several become JSON lines; so does what a stream of text cannot show."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import attrs

from workerkit.framework.assembly import Assembly
from workerkit.framework.cli import common
from workerkit.framework.cli.batch import Job, run_batch
from workerkit.framework.cli.sampling import add_completions, add_sampling, params_of, sampling_of
from workerkit.framework.errors import ConfigError, RequestError, WorkerkitError
from workerkit.framework.interfaces.engine import Engine, Prompt, PromptInputs
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.roles import CHAT_TEMPLATE

HEADLINE = "the prompts are not valid"


def add_to(group: Any) -> None:
    """Add the command to the parser group."""
    parser = common.command(
        group,
        "generate",
        _generate,
        "complete prompts",
        "One prompt streams its text; several (or --output) give JSON lines: index of the prompt, completion (which of "
        "its -n), prompt, text, token_ids, finish_reason, error; logprobs and prompt_logprobs where asked for. "
        "Exit code 1 when a prompt failed.",
    )
    common.add_config(parser)
    parser.add_argument("prompt", nargs="*", help="prompts; - reads one from standard input")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line; in .jsonl {"prompt": …, "lora": …, "max_tokens": …} with any field of SamplingParams, '
        "which win over the options given here",
    )
    parser.add_argument("--output", metavar="OUT.jsonl", help="write JSON lines here")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--chat", action="store_true", help="make each prompt a user's message of the chat template")
    how.add_argument("--raw", action="store_true", help="add no special tokens, such as a BOS token, to the prompt")
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="a picture for the model to see; repeatable, in the order of their places. With --chat they come before "
        "the prompt, else its placeholders say where",
    )
    parser.add_argument("--lora", metavar="NAME", help="adapter of components.lora that all prompts use")
    add_sampling(parser, max_tokens=256)
    add_completions(parser)


def _generate(args: argparse.Namespace) -> int:
    jobs = [*_given(args), *_from_file(args)]
    if not jobs:
        raise WorkerkitError("nothing to generate: give a prompt, or --prompts FILE")
    pictures = tuple(common.read_bytes(path) for path in args.image or ())
    assembly = common.assembly_of(args)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(common.writable(args.output)) if args.output is not None else None
        engine = stack.enter_context(common.running_engine(assembly))
        if len(jobs) == 1 and out is None and _is_plain(jobs[0].params):
            return _stream(engine, _prompt(jobs[0], pictures, args, engine, assembly), jobs[0].params)
        return run_batch(engine, jobs, lambda job: _prompt(job, pictures, args, engine, assembly), out or sys.stdout)


def _is_plain(params: SamplingParams) -> bool:
    return params.n == 1 and params.logprobs is None and params.prompt_logprobs is None and not params.logprob_token_ids


def _given(args: argparse.Namespace) -> Iterator[Job]:
    params = sampling_of(args)
    for prompt in args.prompt:
        yield Job(common.read_text("-") if prompt == "-" else prompt, params, args.lora)


def _from_file(args: argparse.Namespace) -> Iterator[Job]:
    if args.prompts is None:
        return
    params = sampling_of(args)
    problems: list[str] = []
    for number, line in enumerate(common.read_text(args.prompts).splitlines(), 1):
        if not line.strip():
            continue
        if not args.prompts.endswith(".jsonl"):
            yield Job(line, params, args.lora)
            continue
        try:
            yield _job(line, params, args.lora, f"{args.prompts}:{number}")
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems, HEADLINE)


def _job(line: str, params: SamplingParams, lora: str | None, where: str) -> Job:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError([f"{where}: no JSON: {error}"], HEADLINE) from None
    prompt: Any = record.pop("prompt", None) if isinstance(record, dict) else None
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or ids):
        raise ConfigError([f'{where}: expected {{"prompt": "text"}} (or a list of token ids), got {line}'], HEADLINE)
    lora = record.pop("lora", lora)
    if not (lora is None or isinstance(lora, str)):
        raise ConfigError([f"{where}: lora must be the name of an adapter, not {lora!r}"], HEADLINE)
    return Job(prompt, params_of({**attrs.asdict(params), **record}, where, HEADLINE), lora)


def _prompt(
    job: Job, pictures: tuple[bytes, ...], args: argparse.Namespace, engine: Engine, assembly: Assembly
) -> Prompt:
    """What the engine is given. A rendered template holds its own special tokens, so none is added to it."""
    prompt = job.prompt
    if isinstance(prompt, str) and args.chat:
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": prompt}]
        message = {"role": "user", "content": parts if pictures else prompt}
        prompt = assembly.get(CHAT_TEMPLATE).render([message])
    if isinstance(prompt, str) and (args.chat or args.raw):
        prompt = engine.tokenizer.encode(prompt, add_special_tokens=False)
    if not pictures and job.lora is None:
        return prompt
    return PromptInputs(prompt=prompt, images=pictures, lora=job.lora)


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> int:
    meter, count = common.SpeedMeter(engine), 0
    with contextlib.closing(engine.stream(prompt, params)) as deltas:  # type: ignore[type-var]  # a generator
        for delta in deltas:
            if delta.finish_reason == "error":
                raise RequestError(delta.error or "the request failed")
            count += len(delta.token_ids)
            print(delta.text, end="", flush=True)
    print()
    common.warn(meter.text(count))
    return 0
