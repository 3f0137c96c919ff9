"""Options of SamplingParams on the command line. What is left out is the sampler's own default."""

from __future__ import annotations

import argparse
from typing import Any

from workerkit.framework import config as configs
from workerkit.framework.cli import common
from workerkit.framework.errors import ConfigError
from workerkit.framework.interfaces.sampling_params import SamplingParams

NUMBERS: tuple[tuple[str, type, str, str], ...] = (
    ("temperature", float, "T", "0 is greedy"),
    ("top-k", int, "K", "0 is off"),
    ("top-p", float, "P", "1 is off"),
    ("min-p", float, "P", "0 is off"),
    ("typical-p", float, "P", "1 is off"),
    ("top-n-sigma", float, "N", "0 is off"),
    ("presence-penalty", float, "X", "-2 to 2, 0 is off"),
    ("frequency-penalty", float, "X", "-2 to 2, 0 is off"),
    ("repetition-penalty", float, "X", "1 is off"),
    ("seed", int, "S", "the same seed gives the same text"),
)
FIELDS = (
    *(name.replace("-", "_") for name, *_ in NUMBERS),
    *("n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("skip_special_tokens", "bad_words", "allowed_token_ids", "logit_bias", "logprobs", "prompt_logprobs"),
)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Options that make sense wherever text is generated."""
    group = parser.add_argument_group("choice of tokens", "What is left out is the sampler's own default.")
    for name, kind, metavar, doc in NUMBERS:
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=doc)
    _many(group, "--bad-word", "bad_words", "TEXT", "never write this")
    _many(group, "--allowed-token", "allowed_token_ids", "ID", "nothing but these tokens", type=int)
    _many(group, "--logit-bias", "logit_bias", "ID=VALUE", "add to a token's logit", type=_bias)

    group = parser.add_argument_group("end of the text")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="default: %(default)s")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before them")
    _many(group, "--stop", "stop", "TEXT", "end before this text")
    _many(group, "--stop-token", "stop_token_ids", "ID", "end before this token", type=int)
    group.add_argument(
        "--include-stop",
        dest="include_stop_str_in_output",
        action="store_true",
        default=None,
        help="show the text that ended it",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's own end")
    group.add_argument(
        "--special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        default=None,
        help="show special tokens in the text",
    )

    group = parser.add_argument_group("form of the text", "One of them.")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="JSON that fits this schema")
    form.add_argument("--json-object", action="store_true", help="any JSON object")
    form.add_argument("--regex", metavar="REGEX", help="what this regular expression matches as a whole")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")
    form.add_argument("--grammar", metavar="FILE", help="what this context-free grammar (Lark, GBNF) derives")


def add_completions(parser: argparse.ArgumentParser) -> None:
    """Options whose results need JSON lines."""
    group = parser.add_argument_group("JSON lines", "Each of them gives JSON lines, for a single prompt too.")
    group.add_argument("-n", type=int, metavar="N", help="completions of each prompt (default: 1)")
    group.add_argument("--logprobs", type=int, metavar="N", help="of each token and the N most likely; -1: all")
    group.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Raises ConfigError with every option that is out of range."""
    values = {name: value for name in FIELDS if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    forms = {
        "json": None if args.json_schema is None else common.read_text(args.json_schema),
        "json_object": args.json_object or None,
        "regex": args.regex,
        "choice": args.choice,
        "grammar": None if args.grammar is None else common.read_text(args.grammar),
    }
    if given := {name: value for name, value in forms.items() if value is not None}:
        values["structured_outputs"] = given
    return params_of(values, "options")


def params_of(values: dict[str, Any], where: str, headline: str = "the options are not valid") -> SamplingParams:
    """Raises ConfigError with every field that is unknown, of another type or out of range."""
    problems: list[str] = []
    params = configs.structure(values, SamplingParams, where, problems)
    if params is None:
        raise ConfigError(problems, headline)
    return params


def _many(group: argparse._ArgumentGroup, option: str, field: str, metavar: str, doc: str, **how: Any) -> None:
    group.add_argument(option, dest=field, action="append", metavar=metavar, help=f"{doc}; repeatable", **how)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=VALUE, like 17=-5.5, got {text!r}") from None
