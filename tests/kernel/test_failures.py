"""Whatever a tool raises, its failure is told in bounded text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loom_django.errors import StepFailed
from loom_django.kernel.codec import dumps, loads
from loom_django.kernel.failures import bounded, describe_error

pytestmark = pytest.mark.once

LIMIT = 2000


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class BrokenText(ValueError):
    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __str__(self) -> str:
        raise self.raised


class Declared(LookupError, OSError):
    pass


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def cycle() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    raised(one, two)
    raised(two, one)
    return one


def local() -> BaseException:
    class Local(Exception):
        pass

    return raised(Local("here"))


def long_chain() -> BaseException:
    error: BaseException = ValueError("first")
    for number in range(3000):
        error = raised(ValueError(number), error)
    return error


def endless() -> BaseException:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    try:
        deeper(0)
    except RecursionError as caught:
        return caught
    raise AssertionError


def noted() -> BaseException:
    error = ValueError("x")
    error.__notes__ = [BrokenText(ValueError())]  # type: ignore[list-item]
    return raised(error)


class BrokenCause(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise KeyError


def name(text: str) -> str:
    return f"{__name__}.{text}"


# Exceptions that have ended workers or hung tasks elsewhere.
@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (raised(ValueError("no")), "builtins.ValueError", "no"),
        (raised(TwoArguments("a", "b")), name("TwoArguments"), "a and b"),
        (raised(BrokenText(ZeroDivisionError())), name("BrokenText"), "ZeroDivisionError"),
        (raised(BrokenText(SystemExit())), name("BrokenText"), "SystemExit"),
        (raised(BrokenText(RecursionError())), name("BrokenText"), "RecursionError"),
        (cycle(), "builtins.ValueError", "one"),
        (raised(ValueError("x" * 5_000_000)), "builtins.ValueError", "5000000 bytes in all"),
        (
            raised(ExceptionGroup("many", [ValueError(n) for n in range(100)])),
            "builtins.ExceptionGroup",
            "many",
        ),
        (raised(BaseExceptionGroup("stop", [SystemExit(3)])), "builtins.BaseExceptionGroup", "stop"),
        (raised(SystemExit(3)), "builtins.SystemExit", "3"),
        (raised(KeyboardInterrupt()), "builtins.KeyboardInterrupt", ""),
        (raised(GeneratorExit()), "builtins.GeneratorExit", ""),
        (raised(asyncio.CancelledError("late")), "asyncio.exceptions.CancelledError", "late"),
        (local(), name("local.<locals>.Local"), "here"),
        (ValueError("never raised"), "builtins.ValueError", "never raised"),
        (raised(ValueError("a\0b")), "builtins.ValueError", "a\0b"),
        (raised(ValueError("\ud800")), "builtins.ValueError", "\ud800"),
        (long_chain(), "builtins.ValueError", "2999"),
        (endless(), "builtins.RecursionError", "recursion"),
        (noted(), "builtins.ValueError", "x"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_exception_can_be_told(error: BaseException, expected: str, message: str):
    """A failure is described with class and bounded text, and the description can be recorded."""
    told = describe_error(error, LIMIT)
    assert told["type"] == expected
    assert message in told["message"]
    assert size(told["message"]) <= LIMIT
    assert size(told["traceback"]) <= LIMIT
    assert loads(dumps(told)) == told


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def test_bases_let_a_failure_be_matched_by_any_of_them():
    """What the flow catches after a replay is what `except` would have caught at first."""
    told = describe_error(raised(Declared("x")), LIMIT)
    assert told["bases"] == [
        "builtins.LookupError",
        "builtins.OSError",
        "builtins.Exception",
        "builtins.BaseException",
    ]
    failed = StepFailed("s", told["type"], told["message"], told["bases"])
    assert all(map(failed.matches, Declared.__mro__[:-1]))
    assert not failed.matches(ValueError)


def test_a_traceback_names_the_place():
    """The operator sees where it happened, with the causes."""
    text = describe_error(raised(ValueError("outer"), raised(KeyError("inner"))), LIMIT)["traceback"]
    assert text.index("KeyError: 'inner'") < text.index("direct cause") < text.index("ValueError: outer")
    assert "test_failures.py" in text


def test_a_message_of_a_str_subclass_is_told_as_plain_text():
    """The codec takes plain text only, so that is what a message is."""

    class Odd(str):
        __slots__ = ()

        def __str__(self) -> str:
            return self

    class Failure(Exception):
        def __str__(self) -> Any:
            return Odd("text")

    assert type(describe_error(raised(Failure()), LIMIT)["message"]) is str


def test_a_traceback_that_cannot_be_written_is_told():
    """What is odd about an exception never hides that it happened."""
    told = describe_error(raised(BrokenCause("x")), LIMIT)
    assert (told["message"], told["traceback"]) == (
        "x",
        "[no traceback: writing it raised builtins.KeyError]",
    )


def test_both_ends_of_a_long_text_are_kept():
    """The beginning says what it is about, the end says what it came to."""
    text = bounded("begin " + "x" * 1000 + " end", 200)
    assert text.startswith("begin ")
    assert text.endswith(" end")
    assert "1010 bytes in all" in text


@example("x" * 100, 100)  # exactly what is allowed
@example("ü" * 200, 299)  # a cut within a character
@example("ab\ud800", 4)  # what is no character of UTF-8 counts too
@given(st.text(st.characters(exclude_categories=()), max_size=200), st.integers(0, 300))
def test_no_text_is_longer_than_its_limit(text, limit):
    """A text that fits stays as it is, any other is cut between characters."""
    found = bounded(text, limit)
    assert size(found) <= limit
    if size(text) <= limit:
        assert found == text
