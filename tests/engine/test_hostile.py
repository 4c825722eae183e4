"""Bad input at a public call is a LoomError that says what to write instead, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from loom_django import FlowContext, RetryPolicy, StepContext, flow, tool
from loom_django.definitions import registry
from loom_django.errors import (
    DefinitionError,
    ExecutionNotFoundError,
    FlowNotFoundError,
    InvalidIdError,
    InvalidInputError,
    LoomError,
    ResumeRefusedError,
    VerdictRefusedError,
)
from loom_django.runtime import Loom
from tests.engine.conftest import World


@tool
def nothing(ctx: StepContext) -> None:
    """Does nothing."""


def declared(**options: Any) -> Any:
    @flow("hostile", steps=[nothing], **options)
    def hostile(ctx: FlowContext, x: object = None) -> str:
        return str(ctx.suspend("Go"))

    return hostile


def subject(pk: object, label: str = "shop.order") -> Any:
    return SimpleNamespace(_meta=SimpleNamespace(label_lower=label), pk=pk)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def circle() -> dict[str, Any]:
    one: dict[str, Any] = {}
    one["a"] = one
    return one


def odd(*values: Any) -> tuple[Any, ...]:
    return values


BAD_IDS: list[Any] = ["a\x00b", "\ud800", "", 5, None, [], b"x", "x" * 256, "a\nb"]

CALLS_BY_ID: dict[str, Callable[[Loom, Any], Any]] = {
    "handle": lambda loom, key: loom.handle(key),
    "state": lambda loom, key: loom.state(key),
    "history": lambda loom, key: loom.history(key),
    "parked_at_sequence": lambda loom, key: loom.parked_at_sequence(key),
    "send": lambda loom, key: loom.send(key, "name"),
    "cancel": lambda loom, key: loom.cancel(key),
    "resume": lambda loom, key: loom.resume(key, event_type="Go"),
    "resolve": lambda loom, key: loom.resolve(key, "nothing", "retry-fresh"),
    "retry_error": lambda loom, key: loom.retry_error(key),
    "retry_diverged": lambda loom, key: loom.retry_diverged(key),
    "record_outcome": lambda loom, key: loom.record_outcome(key, "paid"),
    "flow.handle": lambda loom, key: registry.current("hostile").handle(key),
}


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as exc:
        return exc
    return None


def test_what_cannot_be_an_id_is_refused_as_one(world: World) -> None:
    """The same error from every call and over every store; an id that nobody has is another matter."""
    declared()
    for name, call in CALLS_BY_ID.items():
        for bad in BAD_IDS:
            error = error_of(partial(call, world.loom, bad))
            assert type(error) is InvalidIdError, (name, bad, error)
            assert "must be text of 1 to 255 printable characters" in str(error)
        error = error_of(partial(call, world.loom, "nobody"))
        assert type(error) is ExecutionNotFoundError, (name, error)


CALLS: dict[str, Callable[[Loom], Any]] = {
    **{
        f"resume(event_type={bad!a})": lambda loom, bad=bad: loom.resume("x", event_type=bad)  # type: ignore[misc]
        for bad in odd(5, None, [], "\ud800", "a\x00", "")
    },
    **{
        f"resume(correlation_key={bad!a})": lambda loom, bad=bad: loom.resume(  # type: ignore[misc]
            "x", event_type="Go", correlation_key=bad
        )
        for bad in odd(5, [], "\ud800")
    },
    **{
        f"resume(fence={bad!a})": lambda loom, bad=bad: loom.resume("x", event_type="Go", fence=bad)  # type: ignore[misc]
        for bad in odd("x", 2**70, True, 1.5, -1)
    },
    **{
        f"resume(principal={name})": lambda loom, bad=bad: loom.resume("x", event_type="Go", principal=bad)  # type: ignore[misc]
        for name, bad in {
            "text": "\ud800\x00",
            "object": object(),
            "number": 5,
            "long": "x" * 256,
            "user": SimpleNamespace(get_username=lambda: "a\x00"),
        }.items()
    },
    **{
        f"resolve({bad!a})": lambda loom, bad=bad: loom.resolve("x", bad, "fail")  # type: ignore[misc]
        for bad in odd(5, None, [], "\ud800")
    },
    **{
        f"resolve(resolution={bad!a})": lambda loom, bad=bad: loom.resolve("x", "nothing", bad)  # type: ignore[misc]
        for bad in odd(5, None, [], "\ud800")
    },
    "resolve(park_sequence)": lambda loom: loom.resolve("x", "nothing", "fail", park_sequence="1"),  # type: ignore[arg-type]
    **{
        f"{call}(reason={type(bad).__name__})": lambda loom, act=act, bad=bad: act(loom, bad)  # type: ignore[misc]
        for call, act in {
            "cancel": lambda loom, bad: loom.cancel("x", reason=bad),
            "resolve": lambda loom, bad: loom.resolve("x", "nothing", "fail", reason=bad),
            "retry_error": lambda loom, bad: loom.retry_error("x", reason=bad),
            "retry_diverged": lambda loom, bad: loom.retry_diverged("x", reason=bad),
        }.items()
        for bad in (object(), None, "x" * 2001, b"x")
    },
    "cancel(reason=NUL)": lambda loom: loom.cancel("x", reason="a\x00"),
    "record_outcome(outcome)": lambda loom: loom.record_outcome("x", ""),
    "record_outcome(step_id)": lambda loom: loom.record_outcome("x", "paid", step_id=5),  # type: ignore[arg-type]
    "send(name)": lambda loom: loom.send("x", "\ud800"),
    "send(name=None)": lambda loom: loom.send("x", None),  # type: ignore[arg-type]
    "send(message_id)": lambda loom: loom.send("x", "m", message_id=""),
    "history(limit)": lambda loom: loom.history("x", limit=-1),
    "history(limit=text)": lambda loom: loom.history("x", limit="1"),  # type: ignore[arg-type]
    "history(after)": lambda loom: loom.history("x", after="x"),  # type: ignore[arg-type]
    "history(after=huge)": lambda loom: loom.history("x", after=2**70),
    "history(kinds)": lambda loom: loom.history("x", kinds=5),  # type: ignore[arg-type]
    "history(kinds=text)": lambda loom: loom.history("x", kinds="EXECUTION_STARTED"),
    "history(kinds=numbers)": lambda loom: loom.history("x", kinds=[5]),  # type: ignore[list-item]
    "start([])": lambda loom: loom.start([]),  # type: ignore[arg-type]
    "start(None)": lambda loom: loom.start(None),  # type: ignore[arg-type]
    "start(args)": lambda loom: loom.start("hostile", args=5),  # type: ignore[arg-type]
    "start(args=text)": lambda loom: loom.start("hostile", args="x"),
    "start(kwargs)": lambda loom: loom.start("hostile", kwargs=5),  # type: ignore[arg-type]
    "start(kwargs=numbers)": lambda loom: loom.start("hostile", kwargs={5: 1}),  # type: ignore[dict-item]
    **{
        f"start(version={bad!r})": lambda loom, bad=bad: loom.start("hostile", version=bad)  # type: ignore[misc]
        for bad in odd(True, "1", 0, 1.5)
    },
    "start(option)": lambda loom: loom.start("hostile", queue="x"),
    **{
        f"using({name})": lambda loom, options=options: loom.start("hostile", **options)  # type: ignore[misc]
        for name, options in {
            "priority text": {"priority": "high"},
            "priority huge": {"priority": 2**40},
            "priority bool": {"priority": True},
            "priority None": {"priority": None},
            "deadline text": {"deadline": "tomorrow"},
            "deadline naive": {"deadline": datetime(2030, 1, 1)},
            "deadline late": {"deadline": datetime(9999, 6, 1, tzinfo=UTC)},
            "deadline beyond": {"deadline": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
            "deadline before": {"deadline": datetime.min.replace(tzinfo=timezone(timedelta(hours=12)))},
            "deadline long": {"deadline": timedelta(days=900_000)},
            "attributes list": {"attributes": [1]},
            "attributes text": {"attributes": "x"},
            "attributes empty list": {"attributes": []},
            "attributes circle": {"attributes": circle()},
            "attributes deep": {"attributes": {"a": nested(900)}},
            "attributes deeper": {"attributes": {"a": nested(101)}},
            "attributes too deep for Python": {"attributes": {"a": nested(20_000)}},
            "attributes high": {"attributes": {"a": ["\ud800"]}},
            "attributes low": {"attributes": {"a": "\udc00"}},
            "attributes NUL": {"attributes": {"a": {"b": "\x00"}}},
            "attributes key": {"attributes": {"a": {"\udc00": 1}}},
            "attributes object": {"attributes": {"a": object()}},
            "attributes NaN": {"attributes": {"a": float("nan")}},
            "attributes huge": {"attributes": {"a": [2**63]}},
            "attributes minus huge": {"attributes": {"a": -(2**63) - 1}},
            "subject NUL": {"subject": subject("a\x00")},
            "subject surrogate": {"subject": subject("\ud800")},
            "subject long": {"subject": subject("x" * 256)},
            "subject of a long model": {"subject": subject(1, "a." + "x" * 99)},
            "subject unsaved": {"subject": subject(None)},
            "subject text": {"subject": "order 5"},
            "execution_id": {"execution_id": "a\x00"},
        }.items()
    },
}


def test_bad_input_is_refused_and_nothing_is_written(world: World) -> None:
    """No call lets a raw error of Python or of the database out."""
    hostile = declared()
    hostile.using(execution_id="x").start()
    before = world.kinds("x")
    for name, call in CALLS.items():
        error = error_of(partial(call, world.loom))
        assert isinstance(error, LoomError), (name, error)
        assert not isinstance(error, ResumeRefusedError | VerdictRefusedError | FlowNotFoundError), name
        str(error).encode()  # and its own text can be printed
        assert world.kinds("x") == before, name


def test_a_known_flow_is_needed_and_an_unknown_one_is_named(world: World) -> None:
    """An id that could be a flow's is looked up."""
    with pytest.raises(FlowNotFoundError, match="nope"):
        world.loom.start("nope")


ATTRIBUTES: list[dict[str, Any]] = [
    {"name": "😀"},
    {"path": "C:\\ud8x"},
    {"path": "\\u0000", "\\udc00": 1},
    {"deep": nested(90)},
    {"a": None, "b": [True, 1.5, {"c": "ü"}]},
    {"least": -(2**63), "most": 2**63 - 1},
    {"$int": "ff"},
    {"price": {"$": 5}, "pair": {"$tuple": [1]}},
]


def test_every_value_that_a_database_takes_may_be_an_attribute(world: World) -> None:
    """What only looks like a surrogate's escape is plain text, and what looks like a recorded value a plain dict."""

    @flow("hostile")
    def hostile(ctx: FlowContext) -> dict[str, Any]:
        return ctx.attributes

    for attributes in ATTRIBUTES:
        handle = hostile.using(attributes=attributes).start()
        assert world.state(handle).options["attributes"] == attributes
        assert repr(handle.result()) == repr(attributes)


def test_what_is_at_a_bound_is_taken(world: World) -> None:
    """The bounds are the last values that work, in the columns too."""
    hostile = declared()
    for priority in (2**31 - 1, -(2**31)):
        hostile.using(priority=priority).start()
    hostile.using(deadline=datetime(9998, 12, 31, tzinfo=UTC)).start()
    hostile.using(subject=subject("x" * 255, "a." + "x" * 98)).start()
    handle = hostile.start()
    world.loom.cancel(handle.id, reason="x" * 2000, principal="x" * 255)
    assert world.loom.history(handle.id, after=2**62, limit=0) == []


def test_a_user_with_a_long_name_may_answer(world: World) -> None:
    """Django's own users may have any name; its head is recorded."""
    handle = declared().start()
    user = SimpleNamespace(get_username=lambda: "x" * 300)
    world.loom.cancel(handle.id, principal=user)
    assert world.loom.history(handle.id)[-1].data["principal"] == "x" * 255


# Declarations.


@pytest.mark.once
@pytest.mark.parametrize("retry_on", [BaseException, Exception, (ValueError, BaseException)])
def test_a_tool_that_must_not_repeat_names_what_it_retries(retry_on: Any) -> None:
    """A base of Exception names everything."""
    with pytest.raises(DefinitionError, match="names no exceptions"):
        tool(idempotent=False, retry=RetryPolicy(retry_on=retry_on))(nothing.func)


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"step_families": ["/item[/"]}, "no regular expression"),
        ({"step_families": ["/(?P<x>a)(?P<x>b)/"]}, "no regular expression"),
        ({"step_families": [5]}, "the text of a base"),
        ({"code_fingerprint": "x" * 256}, "255"),
        ({"code_fingerprint": "a\x00"}, "printable"),
        ({"code_fingerprint": 5}, "printable"),
        ({"version": 2**31}, "2147483647"),
        ({"version": 10**5000}, "2147483647"),
        ({"version": True}, "2147483647"),
    ],
)
def test_a_flow_that_could_not_be_recorded_is_refused_at_its_declaration(
    options: dict[str, Any], problem: str
) -> None:
    """Not at its first start."""
    with pytest.raises(DefinitionError, match=problem):
        declared(**options)


@pytest.mark.once
def test_one_family_may_stand_alone() -> None:
    """A text is one family, not one per letter."""
    try:
        assert declared(step_families="item").step_families == ("item",)
    finally:
        registry.forget("hostile")


def test_a_bound_argument_that_does_not_fit_names_the_flow(world: World) -> None:
    """The signature is in the message."""
    with pytest.raises(InvalidInputError, match="hostile"):
        declared().start(1, 2, 3)
