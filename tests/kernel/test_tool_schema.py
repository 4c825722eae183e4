"""A model is told what a tool takes, and what it gives becomes what the tool takes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict
from uuid import UUID

import pytest

from loom_django import StepContext, tool
from loom_django.errors import DefinitionError, InvalidInputError
from loom_django.kernel import codec
from loom_django.kernel.tool_schema import arguments_of

if TYPE_CHECKING:
    from fractions import Fraction

pytestmark = pytest.mark.once


class Speed(enum.Enum):
    SLOW = "s"
    FAST = "f"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    speed: Speed = Speed.SLOW
    parts: list[Line] = field(default_factory=list)


class Loose(TypedDict):
    a: int


@pytest.fixture(autouse=True)
def _types_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_by_class", dict(codec._by_class))
    monkeypatch.setattr(codec, "_by_name", dict(codec._by_name))
    codec.register_type(Speed, name="tests.tool_schema.Speed")
    codec.register_type(Line, name="tests.tool_schema.Line")


@tool
def order(
    ctx: StepContext,
    lines: list[Line],
    to: str,
    on: date | None = None,
    express: bool = False,
) -> int:
    """Order goods.

    What is not in stock is left out.

    Args:
        lines: what to order,
            one entry each
        to (str): the address

    Returns:
        The number of the order.
    """
    return 1


def test_a_tool_is_told_from_its_signature_and_docstring() -> None:
    """The context is not in it; what has a default need not be given."""
    line = {
        "type": "object",
        "properties": {
            "sku": {"type": "string"},
            "price": {"type": "string", "format": "decimal"},
            "speed": {"enum": ["SLOW", "FAST"]},
            "parts": {"type": "array", "items": {"type": "object"}},
        },
        "required": ["sku", "price"],
        "additionalProperties": False,
    }
    assert order.schema == {
        "name": "order",
        "description": "Order goods.\n\nWhat is not in stock is left out.",
        "parameters": {
            "type": "object",
            "properties": {
                "lines": {"type": "array", "items": line, "description": "what to order, one entry each"},
                "to": {"type": "string", "description": "the address"},
                "on": {
                    "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
                    "default": None,
                },
                "express": {"type": "boolean", "default": False},
            },
            "required": ["lines", "to"],
            "additionalProperties": False,
        },
    }
    assert order.named("reorder").schema["name"] == "reorder"


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Any, {}),
    (object, {}),
    (None, {"type": "null"}),
    (int, {"type": "integer"}),
    (float, {"type": "number"}),
    (datetime, {"type": "string", "format": "date-time"}),
    (UUID, {"type": "string", "format": "uuid"}),
    (Literal["a", 1], {"enum": ["a", 1]}),
    (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
    (list, {"type": "array"}),
    (Sequence[int], {"type": "array", "items": {"type": "integer"}}),
    (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
    (
        tuple[int, str],
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    (dict, {"type": "object"}),
    (Mapping[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
    (Loose, {"type": "object"}),
]


@pytest.mark.parametrize(("kind", "schema"), KINDS, ids=range(len(KINDS)))
def test_an_annotation_has_its_schema(kind: Any, schema: dict[str, Any]) -> None:
    """And nothing is said where the annotation says nothing."""

    def func(ctx: StepContext, x: Any) -> None: ...

    func.__annotations__["x"] = kind
    assert tool(func).schema["parameters"]["properties"] == {"x": schema}


def positional(ctx: StepContext, x: int, /) -> None: ...
def several(ctx: StepContext, *x: int) -> None: ...
def anything(ctx: StepContext, **x: int) -> None: ...
def raw(ctx: StepContext, x: list[bytes]) -> None: ...
def span(ctx: StepContext, x: timedelta | None) -> None: ...
def keys(ctx: StepContext, x: dict[int, str]) -> None: ...
def unseen(ctx: StepContext, x: Fraction) -> None: ...


UNSAYABLE = [
    (positional, "'x' is taken by position"),
    (several, "'x' is taken by position"),
    (anything, "'x' is any number of arguments"),
    (raw, "'x' is bytes, which JSON cannot carry"),
    (span, "timedelta, which JSON cannot carry"),
    (keys, "keys are not text"),
    (unseen, "'Fraction' is not defined. Import it outside of TYPE_CHECKING"),
]


@pytest.mark.parametrize(("func", "says"), UNSAYABLE)
def test_what_no_model_can_give_is_refused(func: Any, says: str) -> None:
    """With the parameter, and the way out."""
    with pytest.raises(DefinitionError, match=says):
        _ = tool(func).schema


def given(arguments: Any) -> dict[str, Any]:
    return arguments_of(order.name, order.func, order.signature, arguments)


def test_what_a_model_gives_becomes_what_the_tool_takes() -> None:
    """Decimals, dates and classes are made of text and objects; defaults are the function's own."""
    lines = [{"sku": "s", "price": 9.9, "speed": "FAST", "parts": [{"sku": "t", "price": "1.10"}]}]
    assert given({"lines": lines, "to": "me", "on": "2026-01-31"}) == {
        "lines": [Line("s", Decimal("9.9"), Speed.FAST, [Line("t", Decimal("1.10"))])],
        "to": "me",
        "on": date(2026, 1, 31),
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{}", "are to be an object"),
        ({"to": "me"}, "order needs lines"),
        ({"lines": [], "to": "me", "ctx": 1}, "has no parameter ctx"),
        ({"lines": [{"sku": "s"}], "to": "me"}, r"lines\[0\] makes no Line"),
        ({"lines": [], "to": 5}, "to is to be text"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(arguments: Any, says: str) -> None:
    """As the model is told it."""
    with pytest.raises(InvalidInputError, match=says):
        given(arguments)
