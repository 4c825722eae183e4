"""New executions over a copied beginning: what is copied is served, the rest is done under the new id."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from loom_django import FlowContext, StepContext, flow, tool
from loom_django.errors import ExecutionConflictError, InvalidInputError
from loom_django.kernel.state import Status
from tests.engine.conftest import World

KEYS: list[str] = []
BROKEN: list[bool] = [True]


@pytest.fixture(autouse=True)
def fresh() -> None:
    KEYS.clear()
    BROKEN[:] = [True]


@tool
def first(ctx: StepContext) -> int:
    KEYS.append(ctx.idempotency_key)
    return len(KEYS)


@tool
def second(ctx: StepContext, got: int) -> int:
    KEYS.append(ctx.idempotency_key)
    if BROKEN[0]:
        raise ValueError("not yet")
    return got * 10


def two_steps(flow_id: str) -> Any:
    @flow(flow_id, steps=[first, second])
    def body(ctx: FlowContext, name: str) -> Any:
        got = ctx.run(first)
        ctx.sleep(60)
        return [name, got, ctx.run(second, got)]

    return body


def failed(world: World, flow_id: str, **options: Any) -> str:
    handle = two_steps(flow_id).using(execution_id="x", **options).start("anna")
    world.advance(timedelta(seconds=61))
    assert handle.status == Status.FAILED
    return str(handle.id)


def test_a_rerun_goes_on_from_the_failed_step(world: World) -> None:
    """What was done is served, with its waits; the failed step runs under the new execution's key."""
    source = failed(world, "f.rerun")
    before = world.loom.history(source)
    BROKEN[0] = False
    handle = world.loom.rerun(source, new_execution_id="y", principal="anna")
    assert handle.created
    assert handle.result() == ["anna", 1, 10]
    assert KEYS == ["x:first", "x:second", "y:second"]
    assert world.loom.history(source) == before
    assert world.state("y").options["forked_from"] == {
        "execution": "x",
        "step": "second",
        "principal": "anna",
    }
    world.check("y")
    assert not world.loom.rerun(source, new_execution_id="y").created


def test_a_fork_from_an_earlier_step(world: World) -> None:
    """Everything before it is kept, it and what follows is done anew; a fork may be forked."""
    BROKEN[0] = False
    handle = two_steps("f.fork").using(execution_id="x", attributes={"country": "DE"}).start("anna")
    world.advance(timedelta(seconds=61))
    assert handle.result() == ["anna", 1, 10]
    other = world.loom.fork("x", from_step="second")
    assert other.result() == ["anna", 1, 10]
    assert world.state(other.id).options["attributes"] == {"country": "DE"}
    again = world.loom.fork(other.id, from_step="first", new_execution_id="z")
    assert again.status == Status.SUSPENDED
    world.advance(timedelta(seconds=61))
    assert again.result() == ["anna", 4, 40]


@pytest.mark.parametrize("named", [False, True])
def test_the_copy_of_a_moved_execution_runs_the_version_that_is_asked_for(world: World, named: bool) -> None:
    """The copied move does not point it back to its own target; without flow= that is what runs."""

    def declare(version: int) -> Any:
        def body(ctx: FlowContext) -> int:
            got = ctx.run(first)
            ctx.suspend("Go")
            ctx.run(second, got)
            return ctx.version

        steps: list[Any] = [first, second, first.named(f"only in {version}")]
        return flow("f.moved", version=version, steps=steps, divergence="fail")(body)

    BROKEN[0] = False
    source = declare(1).start()
    world.loom.resume_as(source.id, declare(2), event_type="Go")
    third = declare(3)
    copy = world.loom.fork(source.id, from_step="second", flow=third if named else None)
    state = world.state(copy.id)
    assert copy.status == Status.COMPLETED
    assert (
        (state.version, state.flow_hash) == (3, third.flow_hash)
        if named
        else (2, world.state(source.id).flow_hash)
    )
    world.check(copy.id)


def test_a_deadline_begins_anew(world: World) -> None:
    """As long from the fork on as it was from the start."""
    source = failed(world, "f.deadline", deadline=3600)
    world.shift(timedelta(days=1))
    handle = world.loom.rerun(source)
    assert handle.status == Status.FAILED
    given = world.state(handle.id).options["deadline"]
    assert given - world.engine.now() <= 3_600_000_000
    assert world.engine.now() < given


def test_refusals(world: World) -> None:
    """Each says why, and nothing is written."""
    source = failed(world, "f.refused")
    with pytest.raises(InvalidInputError, match="never begun step 'third'; it has begun first, second"):
        world.loom.fork(source, from_step="third")
    two_steps("f.other").using(execution_id="taken").start("b")
    with pytest.raises(ExecutionConflictError):
        world.loom.rerun(source, new_execution_id="taken")
    with pytest.raises(InvalidInputError, match="has not failed"):
        world.loom.rerun("taken")
    with pytest.raises(InvalidInputError, match="is one of flow"):
        world.loom.fork(source, from_step="second", flow="f.other")


def test_children_of_the_source(world: World) -> None:
    """Those whose end the source has seen are served; one that it still waited for refuses the fork."""

    @flow("f.child")
    def child(ctx: FlowContext, wait: bool) -> str:
        return str(ctx.suspend("Go")) if wait else "quick"

    @flow("f.parent", steps=[first, second])
    def body(ctx: FlowContext) -> Any:
        quick = ctx.await_child(ctx.start_child(child, False))
        ctx.run(first)
        slow = ctx.start_child(child, True)
        ctx.run(second, 1)
        return [quick, ctx.await_child(slow)]

    BROKEN[0] = False
    body.using(execution_id="x").start()
    with pytest.raises(InvalidInputError, match="children of 'x'"):
        world.loom.fork("x", from_step="second")
    handle = world.loom.fork("x", from_step="first", new_execution_id="y")
    assert world.kinds("y").count("CHILD_STARTED") == 2
    world.loom.resume("y/f.child#2", event_type="Go", payload="slow")
    assert handle.result() == ["quick", "slow"]
    assert world.state("x/f.child#2").status is Status.SUSPENDED
