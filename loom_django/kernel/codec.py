"""Values come back from the log equal and of the same type, in every process and after any time.

The stored form, which outlives releases: plain ASCII JSON that any reader takes, with neither NUL nor lone
surrogates in a string or key. None, bool, finite floats, integers of 64 bits (signed), ordinary text, lists,
and dicts with ordinary text as keys stand for themselves, in the order written. Everything else is an object
with exactly one key that begins with "$", its tag:

    {"$int": "-1f"}                      an integer beyond 64 bits, in hexadecimal
    {"$float": "nan"}                    also inf, -inf and -0.0
    {"$str": "…"}                        text with NUL or surrogates: base64 of its UTF-8 (surrogates passed)
    {"$bytes": "…"}                      base64
    {"$tuple": […]}
    {"$set": […]}  {"$frozenset": […]}   members in the order of their encoded text
    {"$map": [[key, value], …]}          a dict with other keys, or one that looks like a tag itself
    {"$datetime": "…"}                   ISO 8601, without a zone or in UTC
    {"$datetime": ["…", fold]}           ISO 8601 without a zone
    {"$datetime": ["…", fold, key]}      the same in the time zone of that key
    {"$datetime": ["…", fold, offset]}   the same at a fixed offset, a $timedelta; its name, if any, follows
    {"$time": …}                         like $datetime
    {"$date": "…"}                       ISO 8601
    {"$timedelta": [days, seconds, microseconds]}
    {"$decimal": "…"}  {"$uuid": "…"}
    {"$enum": [name, member]}            a registered Enum: the member's name, of a Flag its value
    {"$data": [name, {field: value}]}    a registered dataclass

Reading builds what this page names and what was registered, nothing else; an unknown tag is an error.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, TypeVar, overload
from uuid import UUID
from zoneinfo import ZoneInfo

from loom_django.errors import (
    MAX_SHOWN,
    DefinitionError,
    PayloadTooLargeError,
    UnencodableValueError,
    UnreadableValueError,
    class_name,
    shown,
)
from loom_django.kernel.advice import instead_of, type_name

Tree = Any
"""What JSON can hold: dict with str keys, list, str, int, float, bool, None."""

MAX_DEPTH = 200
_INT64 = 2**63
_LEAVES = frozenset({str, int, float, bool, type(None)})
_UNSAFE_TEXT = re.compile("[\0\ud800-\udfff]").search
_UNSET = object()
_JSON = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"))
_SORTED_JSON = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"), sort_keys=True
)

T = TypeVar("T")


# The public functions.


def encode(value: Any, *, path: str = "value") -> Tree:
    """Turn a value into its stored form, or refuse it with the path to what cannot be recorded.

    The form shares no list or dict with the value.
    """
    try:
        return _encode(value, 0)
    except _Refused as refused:
        raise _located(value, path, refused) from None
    except RecursionError:
        raise _too_deep(value, path) from None


def dumps(value: Any, *, path: str = "value", limit: int | None = None) -> str:
    """Turn a value into the text of its stored form, at most `limit` bytes long."""
    return text_of(encode(value, path=path), path=path, limit=limit)


def text_of(tree: Tree, *, path: str = "value", limit: int | None = None) -> str:
    """The text of a stored form, at most `limit` bytes long; what reads it gets that form again."""
    try:
        text = _JSON.encode(tree)
    except RecursionError:
        raise _too_deep(tree, path) from None
    if limit is not None and len(text) > limit:
        raise PayloadTooLargeError(len(text), limit, path)
    return text


def decode(tree: Tree) -> Any:
    """Build the value of a stored form; it shares no list or dict with it."""
    kind = type(tree)
    if kind is list:
        return tree.copy() if _LEAVES.issuperset(map(type, tree)) else list(map(decode, tree))
    if kind is dict:
        if _LEAVES.issuperset(map(type, tree.values())):
            return _revive(tree.copy()) if len(tree) == 1 else tree.copy()
        return _revive(dict(zip(tree, map(decode, tree.values()), strict=True)))
    return tree


def loads(text: str) -> Any:
    """Build the value of a stored form's text."""
    try:
        # The parser hands in objects from the inside outwards: lists and scalars never leave its C code, and
        # what a tag holds is a value already.
        return _READER.decode(text)
    except json.JSONDecodeError as error:
        raise UnreadableValueError(f"a recorded value is not JSON: {error}") from error


def canonical(value: Any, *, path: str = "value") -> str:
    """Text for comparing values: equal ones give equal text, whatever the order of their keys and members."""
    return _SORTED_JSON.encode(json.loads(dumps(value, path=path), object_hook=_ordered))


# Registered types.


@dataclass(frozen=True)
class RegisteredType:
    """A class whose instances may be recorded, and whether its stored name was chosen by hand."""

    name: str
    cls: type
    explicit: bool


_by_class: dict[type, RegisteredType] = {}
_by_name: dict[str, RegisteredType] = {}


@overload
def register_type(cls: type[T], /, *, name: str | None = None) -> type[T]: ...
@overload
def register_type(cls: None = None, /, *, name: str | None = None) -> Callable[[type[T]], type[T]]: ...
def register_type(
    cls: type[T] | None = None, /, *, name: str | None = None
) -> type[T] | Callable[[type[T]], type[T]]:
    """Let instances of a dataclass or members of an Enum be recorded, as a call or as a decorator.

    The name is stored with every value, so it must outlive the class's place: without `name=` it is
    module.QualName, and moving the class makes old values unreadable.
    """
    if cls is None:
        return lambda decorated: register_type(decorated, name=name)
    _check_kind(cls)
    if name is None and cls in _by_class:
        return cls
    entry = RegisteredType(class_name(cls) if name is None else name, cls, name is not None)
    _check_free(entry)
    _by_class[cls] = _by_name[entry.name] = entry
    return cls


def registered_types() -> tuple[RegisteredType, ...]:
    """Everything registered so far, in order of registration."""
    return tuple(_by_class.values())


def recordable(cls: type) -> bool:
    """Tell if instances of exactly this class can be recorded, as far as the class alone tells."""
    return cls in _PLAIN or cls in _WRITERS or cls in _by_class


def _check_kind(cls: type) -> None:
    if not isinstance(cls, type):
        raise DefinitionError(problem=f"register_type takes a class, not {cls!r}.")
    if issubclass(cls, Enum):
        return
    if not is_dataclass(cls):
        raise DefinitionError(
            problem=f"{type_name(cls)} is neither a dataclass nor an Enum. "
            "Put @dataclass below @register_type."
        )
    if issubclass(cls, _BUILT_IN):
        raise DefinitionError(
            problem=f"{type_name(cls)} derives from a plain type whose own content would not be recorded. "
            "Make that content a field."
        )
    _check_constructor(cls)


def _check_constructor(cls: Any) -> None:
    """A value is rebuilt by calling the class with its fields, so nothing else may be asked for."""
    handed_in = {field.name: _UNSET for field in fields(cls) if field.init}
    try:
        inspect.signature(cls).bind(**handed_in)
    except TypeError as error:
        raise DefinitionError(
            problem=f"{type_name(cls)} cannot be rebuilt from its fields: {error}. "
            "Give arguments that are no fields a default, or make them fields."
        ) from error


def _check_free(entry: RegisteredType) -> None:
    if not 1 <= len(entry.name) <= 255 or not entry.name.isprintable():
        raise DefinitionError(problem=f"type name {entry.name!r} must be 1 to 255 printable characters.")
    holder = _by_name.get(entry.name)
    if holder is not None and holder.cls is not entry.cls:
        raise DefinitionError(
            problem=f"type name {entry.name!r} of {type_name(entry.cls)} is taken by "
            f"{type_name(holder.cls)}. Pass another name=."
        )
    earlier = _by_class.get(entry.cls)
    if earlier is not None and earlier.name != entry.name:
        raise DefinitionError(
            problem=f"{type_name(entry.cls)} is registered as {earlier.name!r} already; values under that "
            "name would become unreadable. Keep the first name."
        )


# Writing.


class _Refused(Exception):
    """Something in the value cannot be recorded; where it stands is looked up only then."""

    def __init__(self, instead: str) -> None:
        self.instead = instead


def _encode(value: Any, depth: int) -> Tree:
    # Exact types, the commonest first: nearly every value ends here.
    kind = type(value)
    if kind is str:
        return value if value.isascii() and "\0" not in value else _write_str(value)
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"$int": format(value, "x")}
    if value is None or kind is bool:
        return value
    if kind is dict:
        return _write_dict(value, _deeper(depth))
    if kind is list:
        depth = _deeper(depth)
        return [_encode(item, depth) for item in value]
    if kind is float:
        return (
            value if math.isfinite(value) and (value or math.copysign(1, value) > 0) else _tagged_float(value)
        )
    writer = _WRITERS.get(kind)
    return _write_registered(value, depth) if writer is None else writer(value, depth)


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise _Refused(f"It is nested deeper than {MAX_DEPTH} levels: pass flat data.")
    return depth + 1


def _write_str(value: str) -> Tree:
    if _UNSAFE_TEXT(value) is None:
        return value
    return {"$str": b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii")}


def _tagged_float(value: float) -> Tree:
    return {"$float": repr(value)}


def _write_dict(value: dict[Any, Any], depth: int) -> Tree:
    tree = {}
    for key, item in value.items():
        if type(key) is not str or not ((key.isascii() and "\0" not in key) or _UNSAFE_TEXT(key) is None):
            return _write_map(value, depth)
        tree[key] = _encode(item, depth)
    return _write_map(value, depth) if len(tree) == 1 and key[:1] == "$" else tree


def _write_map(value: dict[Any, Any], depth: int) -> Tree:
    return {"$map": [[_encode(key, depth), _encode(item, depth)] for key, item in value.items()]}


def _write_tuple(value: tuple[Any, ...], depth: int) -> Tree:
    depth = _deeper(depth)
    return {"$tuple": [_encode(item, depth) for item in value]}


def _write_set(value: set[Any] | frozenset[Any], depth: int) -> Tree:
    depth = _deeper(depth)
    members = [_encode(item, depth) for item in value]
    return {f"${type(value).__name__}": sorted(members, key=_JSON.encode)}


def _write_zoned(value: datetime | time, depth: int) -> Tree:
    tag = "$datetime" if type(value) is datetime else "$time"
    if not value.fold and (value.tzinfo is None or value.tzinfo is UTC):
        return {tag: value.isoformat()}
    return {tag: [value.replace(tzinfo=None).isoformat(), value.fold, *_zone_parts(value.tzinfo)]}


def _zone_parts(zone: tzinfo | None) -> list[Tree]:
    if zone is None:
        return []
    if type(zone) is ZoneInfo and zone.key is not None:
        return [zone.key]
    if type(zone) is not timezone:
        raise _Refused("Its zone has no key: use datetime.timezone or zoneinfo.ZoneInfo(key).")
    offset, name = zone.utcoffset(None), zone.tzname(None)
    written = _write_timedelta(offset, 0)
    return [written] if name == timezone(offset).tzname(None) else [written, _write_str(name)]


def _write_timedelta(value: timedelta, depth: int) -> Tree:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _write_decimal(value: Decimal, depth: int) -> Tree:
    # A decimal context can ask for a small "e", which must not make equal values differ.
    return {"$decimal": str(value).replace("e", "E")}


def _write_registered(value: Any, depth: int) -> Tree:
    entry = _by_class.get(type(value))
    if entry is None:
        raise _Refused(instead_of(type(value)))
    if isinstance(value, Enum):
        # A member keeps its name when its value changes; a combination of flags has no name of its own.
        return {
            "$enum": [entry.name, _encode(value._value_ if isinstance(value, Flag) else value._name_, depth)]
        }
    depth = _deeper(depth)
    return {"$data": [entry.name, {name: _encode(item, depth) for name, item in _field_values(value)}]}


def _field_values(value: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(value):
        yield field.name, getattr(value, field.name, _UNSET)


_PLAIN: frozenset[type] = frozenset({str, int, bool, type(None), dict, list, float})
_WRITERS: dict[type, Callable[[Any, int], Tree]] = {
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    datetime: _write_zoned,
    time: _write_zoned,
    Decimal: _write_decimal,
    date: lambda value, depth: {"$date": value.isoformat()},
    timedelta: _write_timedelta,
    UUID: lambda value, depth: {"$uuid": str(value)},
    bytes: lambda value, depth: {"$bytes": b64encode(value).decode("ascii")},
}
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_UNORDERED = frozenset({"$set", "$frozenset", "$map"})
_BUILT_IN: tuple[type, ...] = (*_PLAIN, *_WRITERS)


# Refusing: the path is worked out only for a value that was refused, so the others do not pay for it.


def _located(value: Any, path: str, refused: _Refused) -> UnencodableValueError:
    return _find(value, path, ()) or _unencodable(value, path, refused.instead)


def _find(value: Any, path: str, above: tuple[int, ...]) -> UnencodableValueError | None:
    if id(value) in above:
        return _unencodable(value, path, "It contains itself: pass data without cycles.")
    if len(above) < MAX_DEPTH and _is_container(value):
        for place, item in _parts(value, path):
            found = _find(item, place, (*above, id(value)))
            if found is not None:
                return found
        return None
    try:
        _encode(value, len(above))
    except _Refused as refused:
        return _unencodable(value, path, refused.instead)
    return None


def _unencodable(value: Any, path: str, instead: str) -> UnencodableValueError:
    if value is _UNSET:
        return UnencodableValueError(path, "field without a value", "Set it, or give it a default.")
    return UnencodableValueError(path, type_name(type(value)), instead)


def _too_deep(value: Any, path: str) -> UnencodableValueError:
    return _unencodable(value, path, "It is nested too deeply for the calls that are open already.")


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind in _CONTAINERS or (kind in _by_class and not isinstance(value, Enum))


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, each with its path."""
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            yield f"{path}.keys()", key
            yield f"{path}[{_shown(key)}]", item
    elif kind is list or kind is tuple:
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif kind is set or kind is frozenset:
        yield from ((f"{path}{{…}}", item) for item in value)
    else:
        yield from ((f"{path}.{name}", item) for name, item in _field_values(value))


def _shown(key: Any) -> str:
    return shown(key) if type(key) is not str or len(key) > MAX_SHOWN else json.dumps(key)


# Reading.


def _revive(tree: dict[str, Any]) -> Any:
    """Build the value of an object whose parts are values already."""
    if len(tree) != 1:
        return tree
    [(tag, content)] = tree.items()
    if tag[:1] != "$":
        return tree
    reader = _READERS.get(tag)
    if reader is None:
        raise UnreadableValueError(
            f'a recorded value has the unknown tag "{tag}": a newer release wrote it, upgrade this one.', tag
        )
    try:
        return reader(content)
    except UnreadableValueError:
        raise
    except Exception as error:
        raise UnreadableValueError(
            f'a recorded value of tag "{tag}" cannot be read: {error!r}', tag
        ) from error


_READER = json.JSONDecoder(object_hook=_revive)


def _read_datetime(content: Any) -> datetime:
    return (
        datetime.fromisoformat(content)
        if type(content) is str
        else _in_zone(datetime.fromisoformat, *content)
    )


def _read_time(content: Any) -> time:
    return time.fromisoformat(content) if type(content) is str else _in_zone(time.fromisoformat, *content)


M = TypeVar("M", datetime, time)


def _in_zone(
    parse: Callable[[str], M], text: str, fold: int, zone: str | timedelta | None = None, *name: str
) -> M:
    moment = parse(text).replace(fold=fold)
    if zone is None:
        return moment
    return moment.replace(tzinfo=ZoneInfo(zone) if isinstance(zone, str) else timezone(zone, *name))


def _registered(name: str, tag: str) -> Any:
    entry = _by_name.get(name)
    if entry is None:
        raise UnreadableValueError(
            f'a recorded value is of type "{name}", which is not registered here: import the module that '
            f'registers it, or register its class with name="{name}".',
            tag,
        )
    return entry.cls


def _read_enum(content: Any) -> Any:
    name, member = content
    cls = _registered(name, "$enum")
    if issubclass(cls, Flag):
        return cls(member)
    if member not in cls.__members__:
        raise UnreadableValueError(
            f'"{name}" has no member {member} any more: keep it for old values.', "$enum"
        )
    return cls.__members__[member]


def _read_dataclass(content: Any) -> Any:
    name, values = content
    cls = _registered(name, "$data")
    known = {field.name: field for field in fields(cls)}
    _check_fields(name, known, values)
    built = cls(**{key: item for key, item in values.items() if known[key].init})
    # What was recorded wins over what __post_init__ makes of it; a frozen class has no other way to set it.
    for key, item in values.items():
        object.__setattr__(built, key, item)
    return built


def _check_fields(name: str, known: dict[str, Field[Any]], values: dict[str, Any]) -> None:
    for key in values.keys() - known.keys():
        raise UnreadableValueError(
            f'"{name}" has no field {key} any more: keep it, with a default, for old values.', "$data"
        )
    for key, field in known.items():
        if key not in values and field.init and field.default is field.default_factory is MISSING:
            raise UnreadableValueError(
                f'"{name}" has a new field {key} that old values lack: give it a default.', "$data"
            )


_READERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": float,
    "$str": lambda content: b64decode(content, validate=True).decode("utf-8", "surrogatepass"),
    "$bytes": lambda content: b64decode(content, validate=True),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$map": dict,
    "$datetime": _read_datetime,
    "$time": _read_time,
    "$date": date.fromisoformat,
    "$timedelta": lambda content: timedelta(*content),
    "$decimal": Decimal,
    "$uuid": UUID,
    "$enum": _read_enum,
    "$data": _read_dataclass,
}


# Comparing.


def _ordered(tree: dict[str, Tree]) -> Tree:
    """Bring what has no order of its own into one: members of sets and entries of maps."""
    if len(tree) == 1:
        [(tag, content)] = tree.items()
        if tag in _UNORDERED:
            return {tag: sorted(content, key=_SORTED_JSON.encode)}
    return tree
