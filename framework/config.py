"""Config files: YAML with `extends`, command-line settings, and strict structuring into attrs classes.

Every problem is collected, none is fixed silently: `"7"` is no int, `1` is no bool, an unknown key is an error.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs
import yaml

from workerkit.framework.errors import ConfigError, did_you_mean

T = TypeVar("T")
HEADLINE = "the config is not valid"
# Sections that may be a plain string, by their path: `model: smollm2`, `model: {quantization: keep}`
SHORT = {"model": "source", "model.quantization": "default", "cache.quantization": "default"}
_FLOAT = ("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML says error, PyYAML takes the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "keys must be strings", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what _Loader would read as a number, and writes the same list twice, not as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _side in (_Loader, _Dumper):  # PyYAML follows YAML 1.1, where 1e-5 is a string
    _side.add_implicit_resolver(*_FLOAT)


def dump_yaml(document: Any) -> str:
    """A document as YAML that `parse_yaml` reads back to the same values."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse_yaml(text: str, where: str) -> Any:
    """`yaml.safe_load`, stricter. Raises ConfigError with line and column."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError([f"{where}{place}: {error.problem}"], HEADLINE) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{where}: {error}"], HEADLINE) from None


def read_file(path: Path, _chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A config file with what it extends merged underneath. Raises ConfigError."""
    path = path.resolve()
    if path in _chain:
        raise ConfigError([f"extends: {' -> '.join(p.name for p in (*_chain, path))} is a circle"], HEADLINE)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read {path}: {error}"], HEADLINE) from None
    document = parse_yaml(text, path.name)
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError([f"{path.name}: expected a mapping of sections, got {_show(document)}"], HEADLINE)
    document = expand(document)
    base_name = document.pop("extends", None)
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        raise ConfigError([f"{path.name}: extends: expected a file name, got {_show(base_name)}"], HEADLINE)
    return merge(read_file(path.parent / base_name, (*_chain, path)), document)


def expand(document: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Sections given as a plain string, written out; before merging, so that the rest of a section survives."""
    result = dict(document)
    for key, value in document.items():
        path = inside + key
        if path in SHORT and isinstance(value, str):
            result[key] = {SHORT[path]: value}
        elif isinstance(value, Mapping) and any(short.startswith(path + ".") for short in SHORT):
            result[key] = expand(value, path + ".")
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins. Mappings merge, anything else is replaced; a part that names another `use` replaces the old one."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, str):
            old = old if old.get("use") != value else None
            value = base[key] if old is None else value  # the same implementation named again keeps its options
        elif isinstance(old, str) and isinstance(value, Mapping):
            value = {"use": old, **value} if "use" not in value else value
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            other = "use" in value and "use" in old and value["use"] != old["use"]
            value = value if other else merge(old, value)
        result[key] = value
    return result


def setting(text: str) -> dict[str, Any]:
    """`a.b.c=VALUE` (VALUE is YAML) as a nested mapping. Raises ConfigError."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"--set {text}: expected PATH=VALUE, like components.sampler.top_k=5"], HEADLINE)
    return nest(keys, parse_yaml(value, f"--set {path}"))


def nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of ["a", "b"]."""
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def with_overrides(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides are nested mappings, or dotted paths to values, or a mixture."""
    result = expand(document)
    for key, value in overrides.items():
        result = merge(result, expand(nest(key.split("."), value)))
    return result


def _show(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _strict(kind: type, accepted: tuple[type, ...]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) not in accepted:
            raise TypeError(f"expected {kind.__name__}, got {_show(value)}")
        return kind(value)

    return structure


def _union(converter: cattrs.Converter, value: Any, union: Any) -> Any:
    options = get_args(union)
    if value is None and type(None) in options:
        return None
    rest = [o for o in options if o is not type(None)]
    if len(rest) == 1:
        return converter.structure(value, rest[0])
    for option in rest:
        try:
            return converter.structure(value, option)
        except Exception:  # the next member may fit; the error below names them all
            continue
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise TypeError(f"expected {names}, got {_show(value)}")


def _literal(value: Any, literal: Any) -> Any:
    allowed = get_args(literal)
    if not any(value == a and type(value) is type(a) for a in allowed):
        hint = did_you_mean(str(value), map(str, allowed))
        raise ValueError(f"{_show(value)} is not one of {', '.join(map(repr, allowed))}; {hint}")
    return value


def _attrs(converter: cattrs.Converter, value: Any, cls: Any) -> Any:
    """An attrs class, field by field, so that one bad field or validator hides no other."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping, got {_show(value)}")
    hints = get_type_hints(cls)
    fields = {a.alias: a for a in attrs.fields(cls) if a.init}
    errors: list[Exception] = []
    done: dict[str, Any] = {}

    def fail(error: Exception, name: str, kind: Any) -> None:
        error.__notes__ = [
            *getattr(error, "__notes__", []),
            cattrs.AttributeValidationNote(f"in {cls.__name__}.{name}", name, kind),
        ]
        errors.append(error)

    if extra := set(value) - set(fields):
        errors.extend(
            TypeError(f"unknown key {key!r}; {did_you_mean(str(key), fields)}") for key in sorted(extra, key=str)
        )
    for name, attribute in fields.items():
        kind = _accepted(attribute, hints)
        if name not in value:
            if attribute.default is attrs.NOTHING:
                errors.append(TypeError(f"required key {name!r} is missing"))
            continue
        try:
            done[name] = converter.structure(value[name], kind)
            if attribute.validator is not None:
                attribute.validator(None, attribute, done[name])
        except Exception as error:  # collected, and raised together below
            fail(error, name, kind)
    if errors:
        raise cattrs.ClassValidationError(f"in {cls.__name__}", errors, cls)
    try:
        return cls(**done)
    except (ValueError, TypeError) as error:  # a check across fields
        raise cattrs.ClassValidationError(f"in {cls.__name__}", [error], cls) from error


def _accepted(attribute: attrs.Attribute[Any], hints: Mapping[str, Any]) -> Any:
    """What a field takes: its converter's argument, where it has one."""
    if attribute.converter is None:
        return hints[attribute.name]
    return next(kind for name, kind in get_type_hints(attribute.converter).items() if name != "return")


def _origin(kind: Any) -> Any:
    return get_origin(kind)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    for kind, accepted in ((int, (int,)), (str, (str,)), (bool, (bool,)), (float, (float, int))):
        converter.register_structure_hook(kind, _strict(kind, accepted))
    converter.register_structure_hook_func(
        lambda t: _origin(t) in (Union, types.UnionType), lambda v, t: _union(converter, v, t)
    )
    converter.register_structure_hook_func(lambda t: _origin(t) is Literal, _literal)
    converter.register_structure_hook_func(attrs.has, lambda v, t: _attrs(converter, v, t))
    converter.register_structure_hook_factory(
        lambda t: _origin(t) is tuple,
        lambda t: _tuple_hook(converter, t),
    )
    converter.register_structure_hook_func(
        lambda t: _origin(t) is Mapping, lambda v, t: _mapping(converter, v, *get_args(t))
    )
    return converter


def _tuple_hook(converter: cattrs.Converter, kind: Any) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[0]

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, got {_show(value)}")
        done, errors = [], []
        for index, entry in enumerate(value):
            try:
                done.append(converter.structure(entry, item))
            except Exception as error:  # collected, and raised together below
                error.__notes__ = [
                    *getattr(error, "__notes__", []),
                    cattrs.IterableValidationNote(f"at index {index}", index, item),
                ]
                errors.append(error)
        if errors:
            raise cattrs.IterableValidationError(f"in {kind}", errors, kind)
        return tuple(done)

    return structure


def _mapping(converter: cattrs.Converter, value: Any, key_kind: Any, kind: Any) -> dict[Any, Any]:
    """Where keys are integers, digits are taken for them: JSON and our YAML know only text as keys."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping, got {_show(value)}")
    done, errors = {}, []
    for key, entry in value.items():
        try:
            number = key_kind is int and isinstance(key, str) and re.fullmatch("-?[0-9]+", key)
            done[converter.structure(int(key) if number else key, key_kind)] = converter.structure(entry, kind)
        except Exception as error:  # collected, and raised together below
            error.__notes__ = [
                *getattr(error, "__notes__", []),
                cattrs.AttributeValidationNote(f"at {key}", str(key), kind),
            ]
            errors.append(error)
    if errors:
        raise cattrs.ClassValidationError("in a mapping", errors, dict)
    return done


def _explain(error: BaseException, kind: type | None) -> str:
    if isinstance(error, KeyError):
        return f"required key {error} is missing"
    return str(error)


def structure(value: Any, cls: type[T], path: str, problems: list[str]) -> T | None:
    """`value` as an attrs object; or None, with every problem appended as `path.field: what is wrong`."""
    try:
        return _converter().structure(value, cls)
    except Exception as error:  # whatever the converter raises is a problem of the config
        for line in cattrs.transform_error(error, path=path, format_exception=_explain):
            message, _, place = line.rpartition(" @ ")
            problems.append(f"{place}: {message}")
        return None
