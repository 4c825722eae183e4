"""Children: started with their parent's fact, waited for as rows, ended with it or left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from loom_django import (
    AsyncFlowContext,
    Child,
    ChildFailed,
    FlowContext,
    StepContext,
    WaitTimedOut,
    flow,
    tool,
)
from loom_django.errors import ExecutionFailedError
from loom_django.kernel.state import Status
from tests.engine.conftest import World

CALLS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    CALLS.clear()


@tool
def work(ctx: StepContext, number: int) -> int:
    CALLS[ctx.execution_id] += 1
    if number < 0:
        raise ValueError(f"not {number}")
    return number * 2


def child_flow(flow_id: str) -> Any:
    @flow(flow_id, steps=[work])
    def body(ctx: FlowContext, number: int) -> int:
        return ctx.run(work, number)

    return body


def waiting_flow(flow_id: str) -> Any:
    @flow(flow_id)
    def body(ctx: FlowContext, name: str) -> Any:
        return ctx.suspend("Go", correlation_key=name)

    return body


def test_a_parent_gets_its_childs_result(world: World) -> None:
    """The child runs once the parent is parked; its result is a fact of the parent's log."""
    child = child_flow("c.child")

    @flow("c.parent")
    def body(ctx: FlowContext) -> Any:
        started = ctx.start_child(child, 21)
        result = ctx.await_child(started)
        ctx.suspend("Go")
        return [started.id, result]

    handle = body.using(execution_id="p").start()
    assert handle.status == Status.SUSPENDED
    assert world.state("p/c.child#1").status is Status.COMPLETED
    world.loom.resume("p", event_type="Go")
    assert handle.result() == ["p/c.child#1", 42]
    assert CALLS == {"p/c.child#1": 1}
    assert world.kinds("p").count("CHILD_STARTED") == 1
    world.check("p")


def test_children_of_an_async_flow(world: World) -> None:
    """The same, awaited, in branches too."""
    child = child_flow("c.a.child")

    @flow("c.a.parent")
    async def body(ctx: AsyncFlowContext) -> Any:
        async def branch(inner: AsyncFlowContext) -> Any:
            return await inner.await_child(await inner.start_child(child, 1))

        started = [await ctx.start_child(child, number) for number in (2, 3)]
        both = await ctx.parallel({"b": branch})
        return [both, await ctx.await_children(started)]

    handle = body.using(execution_id="p").start()
    assert handle.result() == [{"b": 2}, [4, 6]]
    assert set(CALLS) == {"p/c.a.child#1", "p/c.a.child#2", "p/c.a.child#1.b.1"}


def test_all_settled_any(world: World) -> None:
    """Results in order; each outcome; the first that ended."""
    child = child_flow("c.modes.child")

    @flow("c.modes")
    def body(ctx: FlowContext, mode: str) -> Any:
        children = [ctx.start_child(child, number) for number in (1, -1, 2)]
        try:
            found: Any = ctx.await_children(children, mode=mode)  # type: ignore[call-overload]
        except ChildFailed as exc:
            return [exc.child_id, exc.status, exc.error_type]
        if mode == "any":
            return [found.child, found.ok]
        return [[outcome.ok, outcome.value, outcome.child] for outcome in found]

    def run(mode: str) -> Any:
        return body.using(execution_id=mode).start(mode).result()

    assert run("settled") == [
        [True, 2, "settled/c.modes.child#1"],
        [False, None, "settled/c.modes.child#2"],
        [True, 4, "settled/c.modes.child#3"],
    ]
    assert run("all") == ["all/c.modes.child#2", "FAILED", "builtins.ValueError"]
    assert run("any") == ["any/c.modes.child#1", True]


def test_any_is_the_same_child_on_every_replay(world: World) -> None:
    """Which one was first is recorded."""
    child = waiting_flow("c.any.child")

    @flow("c.any")
    def body(ctx: FlowContext) -> Any:
        children = [ctx.start_child(child, name) for name in "ab"]
        first = ctx.await_children(children, mode="any")
        ctx.suspend("Proceed")
        return first.child

    handle = body.using(execution_id="p").start()
    world.loom.resume("p/c.any.child#2", event_type="Go")
    assert [wait.on for wait in world.state("p").pending_waits] == ["Proceed"]
    world.loom.resume("p/c.any.child#1", event_type="Go")
    world.loom.resume("p", event_type="Proceed")
    assert handle.result() == "p/c.any.child#2"


def test_a_timeout_of_the_wait(world: World) -> None:
    """The parent goes on; the children live, and may be waited for again."""
    child = waiting_flow("c.late.child")

    @flow("c.late")
    def body(ctx: FlowContext) -> Any:
        started = ctx.start_child(child, "x")
        try:
            ctx.await_children([started], timeout=60)
        except WaitTimedOut:
            return ["late", ctx.await_child(started)]
        return None

    handle = body.using(execution_id="p").start()
    world.advance(timedelta(seconds=61))
    assert handle.status == Status.SUSPENDED
    world.loom.resume("p/c.late.child#1", event_type="Go", payload=5)
    assert handle.result() == ["late", 5]


@pytest.mark.parametrize("how", ["cancel", "complete", "fail"])
def test_children_end_with_their_parent(world: World, how: str) -> None:
    """Whatever its end; those that were abandoned by name live on, and what they started ends or lives likewise."""
    child = waiting_flow(f"c.close.child.{how}")

    @flow(f"c.close.middle.{how}")
    def middle(ctx: FlowContext) -> Any:
        return ctx.await_child(ctx.start_child(child, "deep"))

    @flow(f"c.close.{how}")
    def body(ctx: FlowContext) -> Any:
        ctx.start_child(middle)
        ctx.start_child(child.using(on_parent_close="abandon"), "left")
        ctx.suspend("Stop")
        if how == "fail":
            raise RuntimeError("over")

    body.using(execution_id="p").start()
    if how == "cancel":
        world.loom.cancel("p", reason="enough")
    else:
        world.loom.resume("p", event_type="Stop")
    assert world.state(f"p/c.close.middle.{how}#1").status is Status.CANCELLED
    statuses = {
        execution_id: world.state(execution_id).status
        for execution_id in (
            f"p/c.close.middle.{how}#1/c.close.child.{how}#1",
            f"p/c.close.child.{how}#1",
        )
    }
    assert list(statuses.values()) == [Status.CANCELLED, Status.SUSPENDED]


def test_a_cancelled_child_is_a_typed_failure(world: World) -> None:
    """Its parent learns of it by its own wake, with status and reason."""
    child = waiting_flow("c.cancelled.child")

    @flow("c.cancelled")
    def body(ctx: FlowContext) -> Any:
        try:
            ctx.await_child(ctx.start_child(child, "x"))
        except ChildFailed as exc:
            return [exc.child_id, exc.status, exc.message]
        return None

    handle = body.using(execution_id="p").start()
    world.loom.cancel("p/c.cancelled.child#1", reason="no more")
    assert handle.result() == ["p/c.cancelled.child#1", "CANCELLED", "no more"]


def test_a_deleted_child_is_a_typed_failure(world: World) -> None:
    """Nothing is left of it to say how it ended."""
    child = child_flow("c.deleted.child")

    @flow("c.deleted")
    def body(ctx: FlowContext) -> Any:
        started = ctx.start_child(child, 1)
        ctx.suspend("Go")
        try:
            return ctx.await_child(started)
        except ChildFailed as exc:
            return exc.status

    handle = body.using(execution_id="p").start()
    assert world.engine.store.delete_execution("p/c.deleted.child#1")
    world.loom.resume("p", event_type="Go")
    assert handle.result() == "MISSING"


def test_a_wake_that_nobody_delivered(world: World) -> None:
    """The child's end leaves a due row in its own commit: the timer loop wakes the parent."""
    child = waiting_flow("c.lost.child")

    @flow("c.lost")
    def body(ctx: FlowContext) -> Any:
        return ctx.await_child(ctx.start_child(child, "x"))

    handle = body.using(execution_id="p").start()
    told, world.engine.woken = world.engine.woken, lambda execution_id: None
    world.loom.resume("p/c.lost.child#1", event_type="Go", payload="back")
    assert handle.status == Status.SUSPENDED
    world.engine.woken = told
    world.advance(timedelta(seconds=1))
    assert handle.result() == "back"
    assert world.kinds("p").count("EXECUTION_RESUMED") == 1
    assert world.engine.store.timers("p") == []


def test_a_child_that_ends_between_look_and_park(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The park is refused, and the body looks again."""
    child = waiting_flow("c.race.child")

    @flow("c.race")
    def body(ctx: FlowContext) -> Any:
        started = ctx.start_child(child, "x")
        ctx.suspend("Begin")
        [outcome] = ctx.await_children([started], mode="settled")
        return str(outcome.error)

    handle = body.using(execution_id="p").start()
    store = world.engine.store
    ended = store.ended

    def meanwhile(ids: Any) -> Any:
        seen = ended(ids)
        monkeypatch.setattr(store, "ended", ended)
        world.loom.cancel("p/c.race.child#1", reason="now")
        return seen

    monkeypatch.setattr(store, "ended", meanwhile)
    world.loom.resume("p", event_type="Begin")
    assert "now" in handle.result()
    assert world.kinds("p").count("EXECUTION_SUSPENDED") == 1


@pytest.mark.parametrize("crash", ["before", "after"])
def test_a_crash_around_the_start_of_a_child(
    world: World, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """Both facts land, or none: after it there is one child, and it runs once."""
    from loom_django.engine.unwind import Unwind, Why

    child = child_flow(f"c.crash.child.{crash}")

    @flow(f"c.crash.{crash}")
    def body(ctx: FlowContext) -> Any:
        return ctx.await_child(ctx.start_child(child, 4))

    store = world.engine.store
    append = store.append

    def dies(commit: Any) -> None:
        if not commit.also:
            append(commit)
            return
        monkeypatch.setattr(store, "append", append)
        if crash == "after":
            append(commit)
        raise Unwind(Why.CRASHED)

    monkeypatch.setattr(store, "append", dies)
    handle = body.using(execution_id="p").start()
    world.shift(timedelta(hours=1))
    for _ in range(3):
        world.recover()
        world.advance(timedelta(hours=1))
    assert handle.result() == 8
    assert world.kinds("p").count("CHILD_STARTED") == 1
    assert {f"p/c.crash.child.{crash}#1": 1} == CALLS


def test_many_children(world: World) -> None:
    """Fifty of one parent, half of which fail, in one wait."""
    child = child_flow("c.many.child")

    @flow("c.many")
    def body(ctx: FlowContext) -> Any:
        children = [ctx.start_child(child, number if number % 2 else -1) for number in range(50)]
        outcomes = ctx.await_children(children, mode="settled")
        return [sum(outcome.value for outcome in outcomes if outcome.ok), sum(not o.ok for o in outcomes)]

    assert body.start().result() == [sum(2 * number for number in range(50) if number % 2), 25]
    assert set(CALLS.values()) == {1}


def test_wrong_use(world: World) -> None:
    """Each is refused by its own words."""
    child = child_flow("c.wrong.child")

    def refused(make: Callable[[FlowContext], Any], number: int) -> str:
        @flow(f"c.wrong.{number}")
        def body(ctx: FlowContext) -> Any:
            make(ctx)

        handle = body.start()
        with pytest.raises(ExecutionFailedError) as failed:
            handle.result()
        return f"{failed.value.error_type}: {failed.value}"

    assert "FlowNotFoundError" in refused(lambda ctx: ctx.start_child("c.nobody"), 1)
    assert "InvalidInputError" in refused(lambda ctx: ctx.start_child(child), 2)
    assert "ContextMisuseError" in refused(lambda ctx: ctx.await_child(Child("other", "x")), 3)
    assert "for ever" in refused(lambda ctx: ctx.await_children([], mode="any"), 4)
    assert "mode=" in refused(lambda ctx: ctx.await_children([], mode="some"), 5)  # type: ignore[call-overload]
    assert "what ctx.start_child returned" in refused(lambda ctx: ctx.await_children("abc"), 6)  # type: ignore[arg-type]


def test_an_execution_of_somebody_else_is_no_child(world: World) -> None:
    """Its end would not wake this parent: it is refused at once, and the other one lives on."""
    child = waiting_flow("c.adopted.child")

    @flow("c.adopted")
    def body(ctx: FlowContext) -> Any:
        return ctx.await_child(ctx.start_child(child.using(execution_id="mine"), "x"))

    child.using(execution_id="mine").start("x")
    handle = body.using(execution_id="p").start()
    with pytest.raises(ExecutionFailedError, match="mine"):
        handle.result()
    assert world.kinds("p") == ["EXECUTION_STARTED", "EXECUTION_FAILED"]
    assert world.state("mine").status is Status.SUSPENDED


def test_a_parents_own_id_is_no_childs(world: World) -> None:
    """It is refused, and nothing of it is written; what the body had done before is kept."""
    child = child_flow("c.own.child")

    @tool
    def quick(ctx: StepContext) -> None:
        """Its outcome lands with what comes next."""

    @flow("c.own", steps=[quick])
    def body(ctx: FlowContext) -> Any:
        ctx.run(quick)
        ctx.start_child(child.using(execution_id=ctx.execution_id), 1)

    handle = body.using(execution_id="p").start()
    with pytest.raises(ExecutionFailedError) as failed:
        handle.result()
    assert failed.value.error_type == "loom_django.errors.ExecutionConflictError"
    assert world.kinds("p") == ["EXECUTION_STARTED", "STEP_STARTED", "STEP_COMPLETED", "EXECUTION_FAILED"]
