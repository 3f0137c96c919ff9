"""The errors a user can meet. Each message names the thing, the value, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class WorkerkitError(Exception):
    """Base of all errors that are meant for users; the command line prints them without a traceback."""


class ConfigError(WorkerkitError):
    """A config file is wrong. `problems` holds every problem that was found, each with the path of its field."""

    def __init__(self, problems: Sequence[str], headline: str = "the worker cannot be assembled") -> None:
        super().__init__("\n  - ".join([headline + ":", *problems]))
        self.problems = tuple(problems)


class RegistrationError(WorkerkitError):
    """A part or a plugin breaks the rules of registration."""


class StageError(WorkerkitError):
    """A stage of the worker's life was called out of order."""


class ModelError(WorkerkitError):
    """A model is missing, or its description is not understood."""


class WeightError(ModelError):
    """A checkpoint's tensors do not fit the network, or its files are damaged."""


class CacheError(WorkerkitError):
    """The KV cache cannot hold what is asked of it."""


class RequestError(WorkerkitError):
    """One request cannot be served; other requests are not affected."""


class UnsupportedError(WorkerkitError):
    """Something the chosen parts cannot do, said by name."""


class IntegrityError(AssertionError):
    """Internal state contradicts itself: a bug of workerkit or of a part, never of a request."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is known."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
