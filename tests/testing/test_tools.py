"""One tool alone: what it gets and what it gives are what a flow would see."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loom_django import StepContext, tool
from loom_django.errors import (
    ContextMisuseError,
    InvalidInputError,
    PayloadTooLargeError,
    UnencodableValueError,
)
from loom_django.testing import arun_tool, override_loom, run_tool
from tests.shop.models import Ledger
from tests.testing.flows import booked, publish, repeatable


@tool
def describe(ctx: StepContext, *, word: str = "") -> dict[str, Any]:
    ctx.meter("words", 1)
    ctx.logger.info("described")
    return {"step": ctx.step_id, "key": ctx.idempotency_key, "attempt": ctx.attempt, "word": word}


@tool
def grow(ctx: StepContext, items: list[int]) -> list[int]:
    items.append(3)
    return items


@tool
def unstorable(ctx: StepContext) -> Any:
    return object()


@tool
def fails(ctx: StepContext) -> None:
    raise KeyError("no such order")


def test_a_tool_gets_a_context() -> None:
    """With the step's id and a key, as in its first attempt."""
    assert run_tool(describe, word="x") == {
        "step": "describe",
        "key": "run-tool:describe",
        "attempt": 1,
        "word": "x",
    }
    assert run_tool(describe.keyed("a"))["step"] == "describe#a"


def test_a_tool_gets_copies() -> None:
    """What it changes is its own, as in a flow."""
    items = [1, 2]
    assert run_tool(grow, items) == [1, 2, 3]
    assert items == [1, 2]


def test_what_a_tool_raises_is_raised() -> None:
    """No StepFailed around it."""
    with pytest.raises(KeyError, match="no such order"):
        run_tool(fails)


def test_what_cannot_be_recorded_is_refused() -> None:
    """Arguments, results and sizes fail here as they would in production."""
    with pytest.raises(UnencodableValueError, match="result of unstorable"):
        run_tool(unstorable)
    with pytest.raises(UnencodableValueError, match="describe: kwargs"):
        run_tool(describe, word=object())  # type: ignore[arg-type]  # that is what is tested
    with override_loom(MAX_PAYLOAD_BYTES=20), pytest.raises(PayloadTooLargeError):
        run_tool(repeatable, "x" * 30)


def test_arguments_that_do_not_fit_are_refused() -> None:
    """By the tool's signature, without the context."""
    with pytest.raises(InvalidInputError, match="word"):
        run_tool(describe, wrong=1)  # type: ignore[call-arg]  # that is what is tested


@pytest.mark.django_db
def test_a_transactional_tool_runs_in_a_transaction() -> None:
    """What it has written goes with its exception."""
    assert run_tool(booked, "x") == "x"

    @tool(transactional=True)
    def writes_and_fails(ctx: StepContext) -> None:
        Ledger.objects.create(key="k", step="s")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_tool(writes_and_fails)
    assert Ledger.objects.count() == 1


def test_an_async_tool() -> None:
    """In a plain test it gets a loop of its own, in an async test it is awaited."""
    assert run_tool(publish, "hello") == 5

    async def test() -> None:
        assert await arun_tool(publish, "hello") == 5
        with pytest.raises(ContextMisuseError, match="await arun_tool"):
            run_tool(publish, "hello")
        with pytest.raises(ContextMisuseError, match="no async tool"):
            await arun_tool(repeatable)

    asyncio.run(test())
