"""Flows drawn at random: the state in hand is that of the log at each park, and a snapshot of it is as good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom_django import FlowContext, StepContext, StepFailed, WaitTimedOut, flow, tool
from loom_django.kernel import events, snapshot
from loom_django.kernel.fold import fold
from loom_django.kernel.snapshot import read
from loom_django.kernel.state import ON_MESSAGE, TERMINAL_STATUSES, Status
from loom_django.stores.base import Snapshot
from loom_django.stores.memory import MemoryStore
from loom_django.testing import override_loom
from tests.engine.conftest import World, world_over
from tests.kernel.test_codec import values
from tests.kernel.test_snapshot import typed

pytestmark = pytest.mark.once

AMOUNTS = st.integers(0, 2**80) | st.decimals(0, allow_nan=False, allow_infinity=False)


@tool
def echo(ctx: StepContext, value: Any) -> Any:
    return value


@tool
def metered(ctx: StepContext, amount: Any) -> Any:
    ctx.meter("usd", amount)
    return amount


@tool
def refuse(ctx: StepContext, text: str) -> None:
    raise ValueError(text)


@flow("random.child", steps=[echo, refuse])
def child(ctx: FlowContext, value: Any, fails: bool) -> Any:
    if fails:
        ctx.run(refuse, "no")
    return ctx.run(echo, value)


def _refuse(ctx: FlowContext, at: str, text: str) -> str:
    try:
        ctx.run(refuse, text)
    except StepFailed as failed:
        return failed.message
    raise AssertionError


def _in_time(ctx: FlowContext, at: str) -> Any:
    try:
        return ctx.suspend("Go", correlation_key=at, timeout=timedelta(days=1))
    except WaitTimedOut:
        return "late"


def _children(ctx: FlowContext, at: str, value: Any, mode: Any) -> Any:
    started = [ctx.start_child(child, value, fails) for fails in (False, mode == "settled")]
    outcome: Any = ctx.await_children(started, mode=mode)
    return outcome if mode == "all" else [one.ok for one in ([outcome] if mode == "any" else outcome)]


# What a flow may do, by name; each is given the context, where it stands, and its own arguments.
ACTS: dict[str, Callable[..., Any]] = {
    "echo": lambda ctx, at, value: ctx.run(echo, value),
    "metered": lambda ctx, at, amount: ctx.run(metered, amount),
    "refuse": _refuse,
    "emit": lambda ctx, at, value: ctx.emit("random.noted", value),
    "meter": lambda ctx, at, amount: ctx.meter("eur", amount),
    "suspend": lambda ctx, at: ctx.suspend("Go", correlation_key=at),
    "receive": lambda ctx, at: ctx.receive("m"),
    "sleep": lambda ctx, at: ctx.sleep(timedelta(hours=1)),
    "in time": _in_time,
    "children": _children,
    "decide": lambda ctx, at, value: ctx.decide(at, lambda inner: [inner.run(echo, value), value]),
    "undo": lambda ctx, at, value: ctx.on_failure(echo, value),
    "parallel": lambda ctx, at, left, right: ctx.parallel(
        {
            "left": lambda ctx: play(ctx, left, f"{at}.left"),
            "right": lambda ctx: play(ctx, right, f"{at}.right"),
        }
    ),
}


def play(ctx: FlowContext, program: list[Any], at: str = "at") -> list[Any]:
    return [ACTS[name](ctx, f"{at}.{place}", *args) for place, (name, *args) in enumerate(program)]


def acts(inner: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    told = [
        st.tuples(st.sampled_from(["echo", "emit", "decide", "undo"]), values),
        st.tuples(st.sampled_from(["metered", "meter"]), AMOUNTS),
        st.tuples(st.just("refuse"), st.text(st.characters(), max_size=5)),
        st.tuples(st.sampled_from(["suspend", "receive", "sleep", "in time"])),
        st.tuples(st.just("children"), values, st.sampled_from(["all", "settled", "any"])),
    ]
    if inner is not None:
        told.append(st.tuples(st.just("parallel"), inner, inner))
    return st.one_of(told).map(list)


PROGRAMS = st.lists(acts(st.lists(acts(), max_size=3)), max_size=6)


class Watched(MemoryStore):
    """Compares each snapshot with the log that it is of."""

    compared = 0

    def save_snapshot(self, snapshot: Snapshot, *, passed: int) -> None:
        super().save_snapshot(snapshot, passed=passed)
        logged = fold(self.read(snapshot.execution_id, limit=snapshot.sequence))
        assert typed(read(snapshot.body)) == typed(logged)
        self.compared += 1


def answered(world: World, execution_id: str, value: Any) -> int:
    """Answer what it waits for until it has ended; return how often that was."""
    for times in range(100):
        state = world.state(execution_id)
        if state.status in TERMINAL_STATUSES:
            return times
        wait = state.pending_waits[0]
        if wait.wake_at is not None:
            world.advance(timedelta(days=2))
        elif wait.on == ON_MESSAGE:
            world.loom.send(execution_id, "m", value)
        else:
            key = wait.correlation_key
            world.loom.resume(execution_id, event_type="Go", correlation_key=key, payload=value)
    raise AssertionError(f"it does not end: {state}")


@contextmanager
def parsed(fast: bool) -> Iterator[None]:
    """With orjson, or without it."""
    if fast:
        yield
        return
    with mock.patch.object(events, "orjson", None), mock.patch.object(snapshot, "orjson", None):
        yield


def outcome_of(program: list[Any], answer: Any, fails: bool, every: int | None) -> Any:
    """What a flow of this program ends with, whose log has a snapshot each so many events."""
    store = Watched()
    with world_over(store) as world, override_loom(SNAPSHOT_EVENTS=every):

        @flow("random.body", steps=[echo, metered, refuse])
        def body(ctx: FlowContext) -> Any:
            seen = play(ctx, program)
            if fails:
                ctx.run(refuse, "the end")
            return seen

        world.loom.start(body, execution_id="x")
        parks = answered(world, "x", answer)
        state = world.state("x")
        assert state.status is (Status.FAILED if fails else Status.COMPLETED)
        assert bool(store.compared) >= bool(parks and every)
        return [str(state.result), state.meters, state.spent, sorted(state.frames)]


@given(PROGRAMS, values, st.booleans(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_flow_ends_the_same_with_snapshots_and_without(
    program: list[Any], answer: Any, fails: bool, fast: bool
) -> None:
    """At each park the state in hand, its snapshot and the log are one, type by type, whatever the values in it."""
    with parsed(fast):
        assert outcome_of(program, answer, fails, 1) == outcome_of(program, answer, fails, None)
