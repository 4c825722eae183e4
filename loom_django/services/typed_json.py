"""JSON that a person types becomes the value that a program expects, or a sentence that says what is wrong.

Integers of any size stay exact, and so do decimals where a Decimal is expected. What an annotation does not say
is left as JSON has it.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NoReturn, cast
from uuid import UUID

from loom_django.errors import InvalidInputError
from loom_django.kernel import codec


def read(text: str) -> Any:
    """The value of a JSON text: integers of any size exact, no key twice, nothing that JSON does not know.

    Raises:
        InvalidInputError: with what is wrong and where.
    """
    return _parse_json(text, float)


def read_as(kind: Any, text: str, path: str) -> Any:
    """The value of a JSON text as an annotation says it is; ``path`` names it in messages.

    Raises:
        InvalidInputError: with what is wrong and where.
    """
    return _convert(kind, _parse_json(text, Decimal), path)


def _parse_json(text: str, parse_float: Callable[[str], Any]) -> Any:
    if not text.strip():
        raise InvalidInputError("give the value as JSON; null if there is none")
    try:
        return json.loads(
            text, parse_float=parse_float, parse_constant=_no_constant, object_pairs_hook=_no_key_twice
        )
    except json.JSONDecodeError as exc:
        hint = "" if text.lstrip()[:1] in '{["' else ' Text goes in double quotes: "tx-7".'
        raise InvalidInputError(
            f"this is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}.{hint}"
        ) from exc
    except RecursionError as exc:
        raise InvalidInputError("this JSON is nested too deeply") from exc
    except InvalidInputError:
        raise
    except ValueError as exc:  # more digits than Python reads
        raise InvalidInputError(f"this JSON cannot be read: {exc}") from exc


def _no_constant(name: str) -> NoReturn:
    raise InvalidInputError(f"{name} is not JSON; give a number, or null")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidInputError(f"the key {twice!r} stands twice in one object")
    return found


def _convert(kind: Any, value: Any, path: str) -> Any:
    """The JSON value as what an annotation says it is; as it is where an annotation says nothing."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin is typing.Literal:
        return (
            value if value in arguments else _misfit(value, f"one of {', '.join(map(repr, arguments))}", path)
        )
    if origin is typing.Annotated:
        return _convert(arguments[0], value, path)
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
    return _plain(value)


def _convert_union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    problems = []
    for member in members:
        try:
            return _convert(member, value, path)
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
    given = {name: _convert(hints.get(name, Any), item, f"{path}.{name}") for name, item in value.items()}
    try:
        return cls(**given)
    except (TypeError, ValueError) as exc:
        raise InvalidInputError(f"{path} makes no {cls.__name__}: {exc}") from exc


def _convert_enum(cls: type[enum.Enum], value: Any, path: str) -> Any:
    if isinstance(value, str) and value in cls.__members__:
        return cls[value]
    try:
        return cls(_plain(value))
    except ValueError:
        return _misfit(value, f"one of {', '.join(cls.__members__)}", path)


def _convert_text(cls: Any, example: str) -> Callable[[Any, Any, str], Any]:
    read = getattr(cls, "fromisoformat", cls)

    def convert(arguments: Any, value: Any, path: str) -> Any:
        if not isinstance(value, str):
            _misfit(value, f'text as "{example}"', path)
        try:
            return read(value)
        except ValueError:
            return _misfit(value, f'text as "{example}"', path)

    return convert


def _convert_decimal(arguments: Any, value: Any, path: str) -> Decimal:
    if isinstance(value, str | int | Decimal) and not isinstance(value, bool):
        try:
            return Decimal(value)
        except InvalidOperation:
            pass
    return cast(Decimal, _misfit(value, 'a number, or text as "9.90"', path))


def _convert_number(arguments: Any, value: Any, path: str) -> float:
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return float(value)
    return cast(float, _misfit(value, "a number", path))


def _convert_plain(cls: type, name: str) -> Callable[[Any, Any, str], Any]:
    def convert(arguments: Any, value: Any, path: str) -> Any:
        return value if type(value) is cls else _misfit(value, name, path)

    return convert


def _convert_items(make: Callable[[Any], Any]) -> Callable[[Any, Any, str], Any]:
    def convert(arguments: Any, value: Any, path: str) -> Any:
        if not isinstance(value, list):
            _misfit(value, "a list", path)
        kinds = _kinds_of_items(make, arguments, value, path)
        items = [
            _convert(kind, item, f"{path}[{place}]")
            for place, (kind, item) in enumerate(zip(kinds, value, strict=True))
        ]
        try:
            return make(items)
        except TypeError as exc:  # a set of lists
            raise InvalidInputError(f"{path}: {exc}") from exc

    return convert


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
    return {key: _convert(kind, item, f"{path}[{key!r}]") for key, item in value.items()}


_CONVERTERS: Final[Mapping[type, Callable[[Any, Any, str], Any]]] = {
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
}


def _misfit(value: Any, wanted: str, path: str) -> NoReturn:
    shown = json.dumps(_plain(value), ensure_ascii=False)
    shown = shown if len(shown) <= 60 else shown[:60] + "…"
    raise InvalidInputError(f"{path} is to be {wanted}; this is {shown}")


def _plain(value: Any) -> Any:
    """Numbers that were kept exact for a Decimal are floats everywhere else."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
