"""Options of a config class in words, and the JSON Schema (draft 2020-12) of config files for editors."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from workerkit.framework.config import SHORT
from workerkit.framework.registry import Entry, Registry, Role

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


@attrs.frozen
class Option:
    """One field of a config class."""

    name: str
    type: Any
    required: bool
    default: Any
    doc: str
    validator: Any

    @property
    def type_text(self) -> str:
        """Such as `int | null`, `'auto' | 'float32'`."""
        return _text(self.type)


def options_of(config: type | None) -> list[Option]:
    """The fields of a config class; defaults as they would stand in a file."""
    if config is None:
        return []
    hints = get_type_hints(config)
    return [
        Option(
            a.alias or a.name,
            hints[a.name],
            a.default is attrs.NOTHING,
            _default(a.default),
            str(a.metadata.get("doc", "")),
            a.validator,
        )
        for a in attrs.fields(config)
        if a.init
    ]


def _default(value: Any) -> Any:
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]  # attrs types Factory as a function
        value = value.factory()
    return attrs.asdict(value) if attrs.has(type(value)) else value


def _text(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_text(member) for member in get_args(kind))
    if get_origin(kind) is Literal:
        return " | ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_text(get_args(kind)[0])}"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def config_schema(registry: Registry) -> dict[str, Any]:
    """Sections, roles with their implementations, and plugins' own sections. A part whose module cannot be imported
    keeps its name and takes any options."""
    top = {name: role for name, role in registry.roles.items() if not role.nested}
    sections = {name: _section(name, cls) for name, cls in registry.sections.items()}
    return {
        "$schema": DRAFT,
        "title": "workerkit config",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": {"type": "string", "description": "another config file, relative to this one, to build upon"},
            **sections,
            "components": _object({name: _place(role) for name, role in top.items()}),
            "plugins": _object({name: _config(cls) for name, cls in registry.plugin_sections.items()}),
        },
        "$defs": {role.name: _role(registry, role) for role in registry.roles.values()},
    }


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": ["object", "null"], "additionalProperties": False, "properties": dict(properties)}


def _section(path: str, cls: type) -> dict[str, Any]:
    whole = _config(cls)
    for name, kind in get_type_hints(cls).items():
        if f"{path}.{name}" in SHORT:
            described = {key: whole["properties"][name].pop(key) for key in ("default", "description")}
            whole["properties"][name] = _section(f"{path}.{name}", kind) | described
    if path not in SHORT:
        return whole
    short = {key: value for key, value in whole["properties"][SHORT[path]].items() if key in ("type", "enum")}
    return {"anyOf": [short, whole]}


def _config(cls: type) -> dict[str, Any]:
    options = options_of(cls)
    schema = _object({option.name: _option(option) for option in options})
    if required := [option.name for option in options if option.required]:
        schema |= {"required": required, "type": "object"}
    return schema


def _option(option: Option) -> dict[str, Any]:
    schema = {**_type(option.type), **_limits(option.validator)}
    if not option.required:
        schema["default"] = list(option.default) if isinstance(option.default, tuple) else option.default
    return {**schema, "description": option.doc} if option.doc else schema


def _type(kind: Any) -> dict[str, Any]:
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        schemas = [_type(member) for member in members]
        if all(set(schema) == {"type"} for schema in schemas):
            return {"type": [schema["type"] for schema in schemas]}
        return {"anyOf": schemas}
    if origin is Literal:
        return {"enum": list(members)}
    if origin is tuple:
        return {"type": "array", "items": _type(members[0])}
    if attrs.has(kind):
        return _config(kind)
    return {"type": "object"} if origin in (dict, Mapping) or kind is dict else {}


def _limits(validator: Any) -> dict[str, Any]:
    """What JSON Schema can say of attrs' own validators."""
    found: dict[str, Any] = {}
    for inner in getattr(validator, "_validators", ()):
        found |= _limits(inner)
    if (inner := getattr(validator, "validator", None)) is not None:  # optional(...)
        found |= _limits(inner)
    if (keyword := _BOUNDS.get(getattr(validator, "compare_op", ""))) is not None:
        found[keyword] = validator.bound
    if (length := getattr(validator, "min_length", None)) is not None:
        found["minLength"] = length
    return found


def _place(role: Role[Any]) -> dict[str, Any]:
    one = {"$ref": f"#/$defs/{role.name}"}
    if not role.many:
        return one
    return {"description": role.doc, "anyOf": [{"const": "auto"}, {"type": "array", "items": one}]}


def _role(registry: Registry, role: Role[Any]) -> dict[str, Any]:
    names = [*registry.offers[role.name], "auto"]
    lists = [{"type": "array"}] if _has_short_list(registry, role) else []
    free = role.default in (None, "auto") and not role.nested  # who is meant without `use` depends on other parts
    loose = [{"type": "object", "not": {"required": ["use"]}}] if free else []
    parts = [_part(registry, role, name) for name in registry.offers[role.name]]
    return {"description": role.doc, "oneOf": [{"enum": names}, *lists, *loose, *parts]}


def _has_short_list(registry: Registry, role: Role[Any]) -> bool:
    offer = registry.offers[role.name].get(role.default or "")
    return offer is not None and len(offer.parts) == 1


def _part(registry: Registry, role: Role[Any], name: str) -> dict[str, Any]:
    use: dict[str, Any] = {"const": name}
    try:
        entry = registry.entry(role.name, name)
    except Exception as error:  # a third party's module may fail in any way
        use["description"] = f"cannot be imported: {type(error).__name__}: {error}"
        return {"type": "object", "properties": {"use": use}, "required": ["use"]}
    properties = {"use": {**use, "description": entry.doc}, **dict(_nested(entry))}
    options = options_of(entry.config)
    properties |= {option.name: _option(option) for option in options}
    required = [option.name for option in options if option.required]
    if name != role.default or role.nested:
        required.append("use")
    return {**_object(properties), "type": "object", "required": required}


def _nested(entry: Entry) -> Iterator[tuple[str, Any]]:
    for parameter, need in entry.needs.items():
        if need.role is not None and need.role.nested:
            one = {"$ref": f"#/$defs/{need.role.name}"}
            many = {"anyOf": [{"const": "auto"}, {"type": "array", "items": one}]}
            yield parameter, {**(many if need.many else one), "default": entry.nested_defaults.get(parameter)}
