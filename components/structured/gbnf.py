"""Context-free grammars: Lark as it is, GBNF (the EBNF of llama.cpp, rules with `::=`) converted to Lark."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_MAX_RULES = 500  # the conversion is quadratic: 0.1 s
_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_TEMPERATURE = re.compile(r"^\s*[\w-]+\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)
_NOT_ASCII = re.compile(r"\\u(00[a-fA-F][0-9a-fA-F]|0[1-9a-fA-F]..|[1-9a-cA-CefEF]...|d[0-7]..)")


def lark_of(grammar: str) -> str:
    """Raises ValueError for what would be ignored, or cannot be converted."""
    num_rules = len(_RULE.findall(grammar))
    if num_rules == 0:
        if _TEMPERATURE.search(grammar):
            raise ValueError("the attribute temperature of a Lark rule is not supported: set it for the request")
        return grammar
    if num_rules > _MAX_RULES:
        raise ValueError(f"it has {num_rules} rules of GBNF; right: at most {_MAX_RULES}")
    # the converter writes such escapes in a form that Lark does not read
    text = _NOT_ASCII.sub(lambda escape: chr(int(escape[1], 16)), grammar)
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises bare Exception
        raise ValueError(f"the GBNF is not understood: {error or type(error).__name__}") from error
