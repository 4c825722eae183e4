"""Deciders that run steps, and steps that undo what a failed flow has done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from loom_django import AsyncFlowContext, EffectInDoubt, FlowContext, RetryPolicy, StepContext, flow, tool
from loom_django.errors import ExecutionFailedError, InvalidInputError
from loom_django.kernel.state import Status
from tests.engine.conftest import World

RAN: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    RAN.clear()


@tool
def book(ctx: StepContext, what: str) -> str:
    RAN.append(ctx.step_id)
    return what


@tool(idempotent=True)
def undo(ctx: StepContext, what: str) -> None:
    RAN.append(f"{ctx.step_id} {what}")


@tool
def refuse(ctx: StepContext) -> None:
    RAN.append(ctx.step_id)
    raise ValueError("no")


@tool(idempotent=False)
def doubtful_undo(ctx: StepContext) -> None:
    RAN.append(ctx.step_id)
    raise EffectInDoubt("no answer")


def trip(flow_id: str, on_error: Any = "fail") -> Any:
    @flow(flow_id, steps=[book, undo, refuse], on_error=on_error)
    def body(ctx: FlowContext) -> None:
        for what in ("flight", "hotel"):
            ctx.on_failure(undo, what)
            ctx.run(book.keyed(what), what)
        ctx.run(refuse)

    return body


def test_compensations_run_in_reverse_order(world: World) -> None:
    """Each is a step; then the execution fails with what the flow raised."""
    handle = trip("s.reverse").start()
    with pytest.raises(ExecutionFailedError) as failed:
        handle.result()
    assert failed.value.error_type == "builtins.ValueError"
    assert RAN == ["book#flight", "book#hotel", "refuse", "undo#2 hotel", "undo flight"]
    assert world.kinds(handle.id)[-1] == "EXECUTION_FAILED"


def test_compensations_of_an_async_flow(world: World) -> None:
    """The same."""

    @flow("s.async", steps=[book, undo, refuse])
    async def body(ctx: AsyncFlowContext) -> None:
        ctx.on_failure(undo, "it")
        await ctx.run(refuse)

    handle = body.start()
    assert handle.status == Status.FAILED
    assert RAN == ["refuse", "undo it"]


def test_a_flow_that_catches_is_not_compensated(world: World) -> None:
    """Only a failure of the flow itself is one."""

    @flow("s.caught", steps=[undo, refuse])
    def body(ctx: FlowContext) -> str:
        ctx.on_failure(undo, "it")
        try:
            ctx.run(refuse)
        except Exception:
            return "fine"
        return ""

    assert body.start().result() == "fine"
    assert RAN == ["refuse"]


def test_a_flow_that_waits_for_a_fix_is_not_compensated(world: World) -> None:
    """It may go on yet."""
    handle = trip("s.parked", on_error="park").start()
    assert handle.status == Status.SUSPENDED
    assert RAN == ["book#flight", "book#hotel", "refuse"]


@pytest.mark.parametrize("point", ["before-effect", "after-effect", "after-outcome"])
def test_a_crash_among_compensations(world: World, crash_at: Callable[[str, str], None], point: str) -> None:
    """The body fails again from its log, and goes on with what is left."""
    crash_at("undo#2", point)
    handle = trip(f"s.crash.{point}").start()
    world.shift(timedelta(hours=1))
    world.recover()
    assert handle.status == Status.FAILED
    assert RAN[:3] == ["book#flight", "book#hotel", "refuse"]
    assert RAN[-1] == "undo flight"
    assert 1 <= RAN.count("undo#2 hotel") <= 2


def test_a_compensation_in_doubt(world: World) -> None:
    """It parks for a person like any step; after the verdict the others run."""

    @flow("s.doubt", steps=[undo, doubtful_undo, refuse])
    def body(ctx: FlowContext) -> None:
        ctx.on_failure(undo, "first")
        ctx.on_failure(doubtful_undo)
        ctx.run(refuse)

    handle = body.start()
    assert handle.status == Status.SUSPENDED
    world.loom.resolve(handle.id, "doubtful_undo", "completed-with-result", output=None)
    assert handle.status == Status.FAILED
    assert RAN == ["refuse", "doubtful_undo", "undo first"]


def test_a_compensation_that_fails(world: World) -> None:
    """The others run all the same."""

    @tool(retry=RetryPolicy(max_attempts=2, initial_interval=0.001))
    def bad_undo(ctx: StepContext) -> None:
        RAN.append(f"bad {ctx.attempt}")
        raise RuntimeError("cannot")

    @flow("s.bad", steps=[undo, bad_undo, refuse])
    def body(ctx: FlowContext) -> None:
        ctx.on_failure(undo, "first")
        ctx.on_failure(bad_undo)
        ctx.run(refuse)

    assert body.start().status == Status.FAILED
    assert RAN == ["refuse", "bad 1", "bad 2", "undo first"]


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("order", ["fails first", "fails last"])
def test_what_a_failed_branches_sibling_has_done_is_undone_after_a_park_too(
    world: World, order: str, inner: bool
) -> None:
    """On the replay the failure is served at once, and stops nobody short of what it had registered."""
    registered = threading.Event()

    @tool
    def fail(ctx: StepContext) -> None:
        registered.wait(10)
        raise ValueError("no")

    def charged(ctx: FlowContext) -> None:
        ctx.run(book, "it")
        ctx.on_failure(undo, "it")
        ctx.on_failure(doubtful_undo)
        registered.set()
        ctx.suspend("never")

    def around(ctx: FlowContext) -> None:
        ctx.parallel({"charged": charged})
        RAN.append("the inner scope was over")

    @flow("s.sibling", steps=[book, undo, doubtful_undo, fail], divergence="fail")
    def body(ctx: FlowContext) -> None:
        branches: dict[str, Any] = {"fails": fail.bind(), "sibling": around if inner else charged}
        ctx.parallel({name: branches[name] for name in sorted(branches, reverse=order == "fails last")})

    handle = body.start()
    (doubt,) = world.state(handle).in_doubt
    world.loom.resolve(handle.id, doubt.step_id, "completed-with-result", output=None)
    assert handle.status == Status.FAILED
    assert [ran.partition("#")[0] for ran in RAN] == ["book", "doubtful_undo", "undo"]


def test_a_decider_that_runs_steps(world: World) -> None:
    """Decision and steps are one record; the decider is not run again."""
    decided: list[str] = []

    @flow("s.decider", steps=[book])
    def body(ctx: FlowContext) -> Any:
        def choose(inner: FlowContext) -> str:
            decided.append("x")
            return max(inner.run(book.keyed("a"), "a"), inner.run(book.keyed("b"), "b"))

        chosen = ctx.decide("which", choose)
        ctx.suspend("Go")
        return chosen

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == "b"
    assert decided == ["x"]
    assert RAN == ["book#a", "book#b"]
    assert world.state(handle).decisions["which"].inner_steps == ("book#a", "book#b")


def test_a_decider_that_waits(world: World) -> None:
    """It is run again from its top, and what it has done is served."""

    @flow("s.waits", steps=[book])
    def body(ctx: FlowContext) -> Any:
        def choose(inner: FlowContext) -> str:
            inner.run(book, "a")
            return str(inner.suspend("Choice"))

        return ctx.decide("which", choose)

    handle = body.start()
    world.loom.resume(handle.id, event_type="Choice", payload="c")
    assert handle.result() == "c"
    assert RAN == ["book"]


def test_an_async_decider_with_steps(world: World) -> None:
    """The same, awaited; and in a branch."""

    @flow("s.async.decider", steps=[book])
    async def body(ctx: AsyncFlowContext) -> Any:
        async def choose(inner: AsyncFlowContext) -> str:
            return await inner.run(book.keyed("a"), "a")

        async def branch(inner: AsyncFlowContext) -> Any:
            return await inner.decide("inside", choose)

        return await ctx.parallel({"x": branch})

    handle = body.start()
    assert handle.result() == {"x": "a"}
    assert world.state(handle).decisions["inside"].inner_steps == ("book#a",)


def test_a_decider_in_a_branch_of_a_plain_flow(world: World) -> None:
    """It runs in the branch's own thread."""

    @flow("s.branch.decider", steps=[book])
    def body(ctx: FlowContext) -> Any:
        def branch(name: str) -> Callable[[FlowContext], Any]:
            return lambda inner: inner.decide(name, lambda c: c.run(book, name))

        return ctx.parallel({"x": branch("x"), "y": branch("y")})

    handle = body.start()
    assert handle.result() == {"x": "x", "y": "y"}
    assert world.state(handle).decisions["x"].inner_steps == ("book#1.x",)


@pytest.mark.parametrize("by", ["a step", "the body"])
def test_what_was_undone_is_not_rerun(world: World, by: str) -> None:
    """A rerun would serve what was undone as done; a fork says what is to be done anew."""
    broken = [True]

    @tool
    def ship(ctx: StepContext) -> str:
        if broken[0]:
            raise ValueError("no")
        return "shipped"

    @flow("s.rerun", steps=[book, undo, ship])
    def body(ctx: FlowContext) -> str:
        ctx.on_failure(undo, "flight")
        ctx.run(book, "flight")
        if broken[0] and by == "the body":
            raise KeyError("a mistake")
        return ctx.run(ship)

    handle = body.start()
    assert RAN == ["book", "undo flight"]
    broken[0] = False
    with pytest.raises(InvalidInputError, match=r"undone by its compensations, 'undo' first"):
        world.loom.rerun(handle.id, new_execution_id="again")
    assert world.loom.history(handle.id)[-1].kind == "EXECUTION_FAILED"
    assert world.loom.fork(handle.id, from_step="book").result() == "shipped"
    assert RAN == ["book", "undo flight", "book"]
