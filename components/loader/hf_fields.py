"""The fields of a JSON object by their types, with every problem collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MISSING = object()


class Fields:
    """Typed access to a JSON object that collects every problem instead of stopping at the first."""

    def __init__(self, values: Mapping[str, Any], problems: list[str], path: str = "") -> None:
        self._values = values
        self._problems = problems
        self._path = path

    def problem(self, name: str, text: str) -> None:
        self._problems.append(f"{self._path}{name}: {text}")

    def below(self, name: str) -> Fields:
        """The fields of an object in the field `name`; null counts as an empty one."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            self.problem(name, f"must be an object, not {value!r}")
            value = None
        return Fields(value or {}, self._problems, f"{self._path}{name}.")

    def integer(self, name: str, default: Any = _MISSING, minimum: int = 1) -> Any:
        """An int >= minimum; null counts as absent, and absent as the default (a problem when there is none)."""
        value = self._present(name, default)
        if value is default or (type(value) is int and value >= minimum):
            return value
        self.problem(name, f"must be an integer >= {minimum}, not {value!r}")
        return minimum

    def number(self, name: str, default: Any = _MISSING, minimum: float = 0.0) -> Any:
        """A finite float > minimum; null counts as absent."""
        value = self._present(name, default)
        if value is default:
            return value
        if type(value) in (int, float) and minimum < value < float("inf"):
            return float(value)
        self.problem(name, f"must be a number > {minimum:g}, not {value!r}")
        return 1.0

    def flag(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if type(value) is not bool:
            self.problem(name, f"must be true or false, not {value!r}")
        return bool(value)

    def choice(self, name: str, known: tuple[str, ...], default: str) -> str:
        value = self._present(name, default)
        if value not in known:
            self.problem(name, f"{value!r} is not supported; {', '.join(known)} are")
        return str(value)

    def integers(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """A list of ints >= 0; null counts as absent."""
        value = self._present(name, list(default))
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            self.problem(name, f"must be a list of integers >= 0, not {value!r}")
            return tuple(default)
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int or item < 0 for item in ids):
            self.problem(name, f"must be a token id or a list of them, not {value!r}")
            return ()
        return tuple(ids)

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            self.problem(name, "is missing")
            return 1  # stands in until the problems are raised
        return default
