"""What an annotation says of a JSON value: the value that a program expects, and the schema for who makes it.

Annotations that say nothing (``Any``, no annotation) take JSON as it is. Integers of any size stay exact, and so do
decimals, which JSON carries as text.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NoReturn, cast
from uuid import UUID

from loom_django.errors import InvalidInputError, shown
from loom_django.kernel import codec
from loom_django.kernel.advice import type_name

# Reading.


def convert(kind: Any, value: Any, path: str) -> Any:
    """The JSON value as what an annotation says it is; as it is where an annotation says nothing.

    ``path`` names the value in messages.

    Raises:
        InvalidInputError: with what is wrong and where.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin is typing.Literal:
        return (
            value if value in arguments else _misfit(value, f"one of {', '.join(map(repr, arguments))}", path)
        )
    if origin is typing.Annotated:
        return convert(arguments[0], value, path)
    cls = origin or kind
    if cls in (None, type(None)):
        return None if value is None else _misfit(value, "null", path)
    if isinstance(cls, type):
        converter = _CONVERTERS.get(cls)
        if converter is not None:
            return converter(arguments, value, path)
        if is_dataclass(cls) and codec.recordable(cls):
            return _convert_dataclass(cls, value, path)
        if issubclass(cls, enum.Enum) and codec.recordable(cls):
            return _convert_enum(cls, value, path)
        if typing.is_typeddict(cls):
            return _convert_mapping((), value, path)
    return _plain(value)


def _convert_union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    problems = []
    for member in members:
        try:
            return convert(member, value, path)
        except InvalidInputError as exc:
            problems.append(str(exc))
    raise InvalidInputError("; or: ".join(problems))


def _convert_dataclass(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        _misfit(value, f"an object with the fields of {cls.__name__}", path)
    hints = typing.get_type_hints(cls)
    known = {field.name for field in fields(cls) if field.init}
    for name in value:
        if name not in known:
            raise InvalidInputError(
                f"{path} has no field {name!r}; the fields are {', '.join(sorted(known))}"
            )
    given = {name: convert(hints.get(name, Any), item, f"{path}.{name}") for name, item in value.items()}
    try:
        return cls(**given)
    except Exception as exc:  # whatever its __post_init__ makes of values that nobody has looked at
        raise InvalidInputError(f"{path} makes no {cls.__name__}: {exc}") from exc


def _convert_enum(cls: type[enum.Enum], value: Any, path: str) -> Any:
    if isinstance(value, str) and value in cls.__members__:
        return cls[value]
    try:
        return cls(_plain(value))
    except Exception:  # its _missing_ may expect text
        return _misfit(value, f"one of {', '.join(cls.__members__)}", path)


def _convert_text(cls: Any, example: str) -> Callable[[Any, Any, str], Any]:
    read = getattr(cls, "fromisoformat", cls)

    def converter(arguments: Any, value: Any, path: str) -> Any:
        if not isinstance(value, str):
            _misfit(value, f'text as "{example}"', path)
        try:
            return read(value)
        except ValueError:
            return _misfit(value, f'text as "{example}"', path)

    return converter


def _convert_decimal(arguments: Any, value: Any, path: str) -> Decimal:
    if isinstance(value, str | int | float | Decimal) and not isinstance(value, bool):
        with contextlib.suppress(InvalidOperation):
            number = Decimal(str(value) if isinstance(value, float) else value)
            if number.is_finite():
                return number
    return cast(Decimal, _misfit(value, 'a number, or text as "9.90"', path))


def _convert_number(arguments: Any, value: Any, path: str) -> float:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError, ValueError):
            number = float(value)
            if math.isfinite(number):
                return number
    return cast(float, _misfit(value, "a number", path))


def _convert_plain(cls: type, name: str) -> Callable[[Any, Any, str], Any]:
    def converter(arguments: Any, value: Any, path: str) -> Any:
        return value if type(value) is cls else _misfit(value, name, path)

    return converter


def _convert_items(make: Callable[[Any], Any]) -> Callable[[Any, Any, str], Any]:
    def converter(arguments: Any, value: Any, path: str) -> Any:
        if not isinstance(value, list):
            _misfit(value, "a list", path)
        kinds = _kinds_of_items(make, arguments, value, path)
        items = [
            convert(kind, item, f"{path}[{place}]")
            for place, (kind, item) in enumerate(zip(kinds, value, strict=True))
        ]
        try:
            return make(items)
        except TypeError as exc:  # a set of lists
            raise InvalidInputError(f"{path}: {exc}") from exc

    return converter


def _kinds_of_items(make: Any, arguments: Any, value: list[Any], path: str) -> list[Any]:
    if make is not tuple or not arguments or arguments[-1] is Ellipsis:
        return [arguments[0] if arguments else Any] * len(value)
    if len(arguments) != len(value):
        _misfit(value, f"a list of {len(arguments)} items", path)
    return list(arguments)


def _convert_mapping(arguments: Any, value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _misfit(value, "an object", path)
    kind = arguments[1] if len(arguments) == 2 else Any
    return {key: convert(kind, item, f"{path}[{key!r}]") for key, item in value.items()}


_CONVERTERS: Final[Mapping[Any, Callable[[Any, Any, str], Any]]] = {
    str: _convert_plain(str, "text"),
    int: _convert_plain(int, "an integer"),
    bool: _convert_plain(bool, "true or false"),
    float: _convert_number,
    Decimal: _convert_decimal,
    datetime: _convert_text(datetime, "2026-01-31T08:30:00+01:00"),
    date: _convert_text(date, "2026-01-31"),
    time: _convert_text(time, "08:30:00"),
    UUID: _convert_text(UUID, "2f1e0a52-8a44-4d0e-9c55-0d6f6a3c1b7e"),
    list: _convert_items(list),
    tuple: _convert_items(tuple),
    set: _convert_items(set),
    frozenset: _convert_items(frozenset),
    dict: _convert_mapping,
    Sequence: _convert_items(list),
    MutableSequence: _convert_items(list),
    Collection: _convert_items(list),
    Iterable: _convert_items(list),
    Mapping: _convert_mapping,
    MutableMapping: _convert_mapping,
}


def _misfit(value: Any, wanted: str, path: str) -> NoReturn:
    try:
        text = json.dumps(_plain(value), ensure_ascii=False)
    except (TypeError, ValueError):  # what no JSON holds, or an int of more digits than Python writes
        text = shown(value)
    text = text if len(text) <= 60 else text[:60] + "…"
    raise InvalidInputError(f"{path} is to be {wanted}; this is {text}")


def _plain(value: Any) -> Any:
    """Numbers that were kept exact for a Decimal are floats everywhere else."""
    if isinstance(value, Decimal):
        return math.nan if value.is_nan() else float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


# Saying.

Schema = dict[str, Any]
"""A JSON schema."""


class UnsayableError(Exception):
    """An annotation of which no JSON value can be made; the text says what to write instead."""


def schema_of(kind: Any) -> Schema:
    """The JSON schema of what :func:`convert` takes for an annotation; ``{}`` where it says nothing.

    Raises:
        UnsayableError: JSON cannot carry such a value.
    """
    return _schema(kind, ())


def _schema(kind: Any, above: tuple[type, ...]) -> Schema:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(member, above) for member in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is typing.Annotated:
        notes = [note for note in arguments[1:] if isinstance(note, str)]
        return _schema(arguments[0], above) | ({"description": notes[0]} if notes else {})
    cls = origin or kind
    if cls in (None, type(None)):
        return {"type": "null"}
    if not isinstance(cls, type) or cls in (object, Any):
        return {}
    if cls in _PLAIN_SCHEMAS:
        return dict(_PLAIN_SCHEMAS[cls])
    if cls in _CONVERTERS:
        return _schema_of_container(cls, arguments, above)
    if is_dataclass(cls) and codec.recordable(cls):
        return {"type": "object"} if cls in above else _schema_of_dataclass(cls, above)
    if issubclass(cls, enum.Enum) and codec.recordable(cls):
        return {"enum": list(cls.__members__)}
    if typing.is_typeddict(cls):
        return {"type": "object"}
    raise UnsayableError(
        f"{type_name(cls)}, which JSON cannot carry: take text, a number, a list, a dict or a registered class, "
        f"and make the value in the tool"
    )


def _schema_of_container(cls: type, arguments: tuple[Any, ...], above: tuple[type, ...]) -> Schema:
    if cls in (dict, Mapping, MutableMapping):
        if len(arguments) == 2 and arguments[0] not in (str, Any):
            raise UnsayableError("a dict whose keys are not text: JSON has no other ones")
        items = _schema(arguments[1], above) if len(arguments) == 2 else {}
        return {"type": "object", "additionalProperties": items} if items else {"type": "object"}
    if cls is tuple and arguments and arguments[-1] is not Ellipsis:
        length = {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"type": "array", "prefixItems": [_schema(item, above) for item in arguments], **length}
    items = _schema(arguments[0], above) if arguments else {}
    unique = {"uniqueItems": True} if cls in (set, frozenset) else {}
    return {"type": "array", **({"items": items} if items else {}), **unique}


def _schema_of_dataclass(cls: Any, above: tuple[type, ...]) -> Schema:
    hints = typing.get_type_hints(cls, include_extras=True)
    given = [field for field in fields(cls) if field.init]
    return object_schema(
        {field.name: _schema(hints.get(field.name, Any), (*above, cls)) for field in given},
        [field.name for field in given if field.default is MISSING and field.default_factory is MISSING],
    )


def object_schema(properties: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    """The schema of an object that has these properties and no other ones."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


_PLAIN_SCHEMAS: Final[Mapping[type, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": "number"},
    Decimal: {"type": "string", "format": "decimal"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    UUID: {"type": "string", "format": "uuid"},
}
