"""What a model is told of a tool, and what its answer becomes: one JSON object of arguments by name.

The schema is made of the function's signature without its context, its annotations and its docstring. What a
parameter's annotation does not say is left untyped; what JSON cannot carry is refused.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

from loom_django.errors import DefinitionError, InvalidInputError, shown
from loom_django.kernel import json_types
from loom_django.kernel.json_types import Schema, UnsayableError

_PLAIN: Final = (str, int, float, bool, type(None))

# "Args:" and the like: what follows is about parts of the function, not about the whole.
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.M)
_PARAMETER = re.compile(r"^(\w+)(?: \([^)]*\))?:\s*(.*)$")


def tool_schema(name: str, func: Callable[..., Any], signature: inspect.Signature) -> Schema:
    """``{"name", "description", "parameters"}`` of a function; ``parameters`` is a JSON schema of an object.

    Raises:
        DefinitionError: a parameter that no model can give.
    """
    summary, notes = _told(func)
    hints = _hints(name, func, signature)
    properties: dict[str, Schema] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            _refuse(name, parameter.name, "taken by position: a model gives arguments by name")
        if parameter.kind is parameter.VAR_KEYWORD:
            _refuse(name, parameter.name, "any number of arguments: name them, or take one dict")
        properties[parameter.name] = _property(name, parameter, hints, notes)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {
        "name": name,
        "description": summary,
        "parameters": json_types.object_schema(properties, required),
    }


def arguments_of(
    name: str, func: Callable[..., Any], signature: inspect.Signature, given: object
) -> dict[str, Any]:
    """A model's JSON object as the arguments that the function expects.

    Raises:
        InvalidInputError: it does not fit the schema; the text says where.
    """
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"the arguments of {name} are to be an object; this is {shown(given)}")
    known = signature.parameters
    hints = _hints(name, func, signature)
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        takes = ", ".join(known) or "nothing"
        raise InvalidInputError(f"{name} has no parameter {', '.join(unknown)}; it takes {takes}")
    missing = [key for key, value in known.items() if value.default is value.empty and key not in given]
    if missing:
        raise InvalidInputError(f"{name} needs {', '.join(missing)}")
    return {key: json_types.convert(hints.get(key, Any), value, key) for key, value in given.items()}


def _property(
    name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], notes: Mapping[str, str]
) -> Schema:
    try:
        schema = json_types.schema_of(hints.get(parameter.name, Any))
    except UnsayableError as exc:
        _refuse(name, parameter.name, str(exc))
    if parameter.name in notes:
        schema.setdefault("description", notes[parameter.name])
    if type(parameter.default) in _PLAIN:
        schema["default"] = parameter.default
    return schema


def _refuse(name: str, parameter: str, what: str) -> typing.NoReturn:
    raise DefinitionError(
        tool=name, problem=f"cannot be told to a model: its parameter {parameter!r} is {what}"
    )


def _hints(name: str, func: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The annotations of the parameters, without the context's: that one often exists for type checkers only."""

    def parameters() -> None:
        """Stands for the function."""

    parameters.__annotations__ = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.annotation is not parameter.empty
    }
    names = getattr(inspect.unwrap(func), "__globals__", {})
    try:
        return typing.get_type_hints(parameters, globalns=names, include_extras=True)
    except NameError as exc:
        raise DefinitionError(
            tool=name,
            problem=f"cannot be told to a model: {exc}. Import it outside of TYPE_CHECKING, at module level",
        ) from exc


def _told(func: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What the docstring says of the function, and under "Args:" of each parameter."""
    text = inspect.getdoc(func) or ""
    heads = list(_SECTION.finditer(text))
    summary = text[: heads[0].start()] if heads else text
    notes: dict[str, str] = {}
    for place, head in enumerate(heads):
        if head[1] in ("Args", "Arguments", "Parameters"):
            end = heads[place + 1].start() if place + 1 < len(heads) else len(text)
            notes = _notes(text[head.end() : end])
    return summary.strip(), notes


def _notes(section: str) -> dict[str, str]:
    notes: dict[str, str] = {}
    indents = [len(line) - len(line.lstrip()) for line in section.splitlines() if line.strip()]
    name = ""
    for line in section.splitlines():
        found = _PARAMETER.match(line.strip())
        if found and len(line) - len(line.lstrip()) == min(indents):
            name = found[1]
            notes[name] = found[2]
        elif name and line.strip():
            notes[name] = f"{notes[name]} {line.strip()}".strip()
    return notes
