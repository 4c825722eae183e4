"""A connection that somebody left inside a transaction spoils neither what is recorded nor its thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from loom_django import AsyncFlowContext, FlowContext, StepContext, flow, tool
from loom_django.errors import ExecutionFailedError, StepFailed
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService
from tests.engine.conftest import World
from tests.shop.models import Order

# Over the database alone: the reference store has no connection.
pytestmark = pytest.mark.parametrize(
    "world", [pytest.param("database", marks=pytest.mark.django_db(transaction=True))], indirect=True
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """A test that fails is not to spoil those behind it."""
    yield
    if connection.connection is not None and not connection.in_atomic_block:
        connection.rollback()
        connection.set_autocommit(True)


def without_autocommit() -> None:
    transaction.set_autocommit(False)


def begin_by_hand() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


def enter_and_not_leave() -> None:
    transaction.atomic().__enter__()


def enter_two() -> None:
    transaction.set_autocommit(False)
    transaction.atomic().__enter__()
    transaction.atomic().__enter__()


WAYS: list[Callable[[], None]] = [without_autocommit, begin_by_hand, enter_and_not_leave, enter_two]
ways = pytest.mark.parametrize("leave_open", WAYS, ids=lambda way: way.__name__)


@tool
def quick(ctx: StepContext) -> int:
    return Order.objects.count()


@flow("left.healthy", steps=[quick])
def healthy(ctx: FlowContext) -> int:
    return ctx.run(quick)


@ways
def test_a_tool_that_leaves_a_transaction_open_fails_by_name(
    world: World, leave_open: Callable[[], None]
) -> None:
    """What it wrote is rolled back, what the engine writes lands, and the thread is as it was."""

    @tool
    def careless(ctx: StepContext) -> str:
        leave_open()
        Order.objects.create(customer="nobody", amount="1.00")
        return "done"

    @flow("left.open", steps=[careless, quick])
    def left(ctx: FlowContext) -> Any:
        try:
            ctx.run(careless)
        except StepFailed as exc:
            return [exc.error_type, exc.message, ctx.run(quick)]

    handle = left.start()
    kind, message, rows = handle.result(5)
    assert kind == "loom_django.errors.ContextMisuseError"
    assert "tool careless left its connection inside a transaction" in message
    assert rows == 0
    assert not world.engine.store.in_transaction()
    assert connection.get_autocommit()


@ways
def test_in_an_effect_that_must_not_repeat_a_person_decides(
    world: World, leave_open: Callable[[], None]
) -> None:
    """Its rows are gone, but nobody knows what else it did."""

    @tool(idempotent=False)
    def careless(ctx: StepContext) -> None:
        leave_open()

    @flow("left.doubt", steps=[careless])
    def left(ctx: FlowContext) -> None:
        ctx.run(careless)

    handle = left.start()
    state = world.state(handle)
    assert state.status is Status.SUSPENDED
    assert [wait.on for wait in state.pending_waits] == ["EffectInDoubtResolved"]
    assert not world.engine.store.in_transaction()


@ways
def test_an_error_of_the_tool_itself_stands(world: World, leave_open: Callable[[], None]) -> None:
    """It is the better explanation."""

    @tool
    def careless(ctx: StepContext) -> None:
        leave_open()
        raise ValueError("no such card")

    @flow("left.error", steps=[careless])
    def left(ctx: FlowContext) -> None:
        ctx.run(careless)

    handle = left.start()
    with pytest.raises(ExecutionFailedError, match="no such card"):
        handle.result(5)
    assert not world.engine.store.in_transaction()


@ways
def test_a_body_that_leaves_a_transaction_open_fails(world: World, leave_open: Callable[[], None]) -> None:
    """Its end is recorded outside of what it left."""

    @flow("left.body", steps=[quick])
    def left(ctx: FlowContext) -> str:
        ctx.run(quick)
        leave_open()
        return "done"

    handle = left.start()
    with pytest.raises(ExecutionFailedError, match=r"the body of flow left\.body left its connection"):
        handle.result(5)
    assert not world.engine.store.in_transaction()


@ways
def test_a_body_with_a_transaction_open_runs_no_step(world: World, leave_open: Callable[[], None]) -> None:
    """However it was opened; nothing of the step was recorded in it."""

    @flow("left.before", steps=[quick])
    def left(ctx: FlowContext) -> Any:
        leave_open()
        return ctx.run(quick)

    handle = left.start()
    with pytest.raises(ExecutionFailedError, match="inside transaction"):
        handle.result(5)
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "EXECUTION_FAILED"]


def test_a_step_in_an_async_flow_is_watched_too(world: World) -> None:
    """Plain tools run in the same thread there."""

    @tool
    def careless(ctx: StepContext) -> None:
        transaction.set_autocommit(False)

    @flow("left.async", steps=[careless])
    async def left(ctx: AsyncFlowContext) -> None:
        await ctx.run(careless)

    with pytest.raises(ExecutionFailedError, match="tool careless left its connection"):
        left.start().result(5)


def test_a_tool_with_a_timeout_fails_by_name(world: World) -> None:
    """Its thread's connection goes with it, and its work too, so it did not succeed."""

    @tool(timeout=20)
    def careless(ctx: StepContext) -> str:
        transaction.set_autocommit(False)
        Order.objects.create(customer="nobody", amount="1.00")
        return "done"

    @flow("left.timed", steps=[careless])
    def left(ctx: FlowContext) -> str:
        return ctx.run(careless)

    with pytest.raises(ExecutionFailedError, match="tool careless left its connection"):
        left.start().result(5)


def test_the_next_body_of_a_workers_thread_runs(world: World) -> None:
    """It was refused again and again, and counted as poison."""

    @tool
    def careless(ctx: StepContext) -> None:
        transaction.set_autocommit(False)

    @flow("left.worker", steps=[careless])
    def left(ctx: FlowContext) -> None:
        ctx.run(careless)

    world.loom.dispatcher = WorkerDispatcher()
    bad, good = left.using(priority=1).start(), healthy.start()
    worker = WorkerService(world.engine, concurrency=1)
    try:
        for handle in (bad, good):
            worker.tick()
            with worker._condition:
                assert worker._condition.wait_for(lambda: not worker._held, 20)
            assert handle.status in (Status.FAILED, Status.COMPLETED)
    finally:
        assert worker.drain(20)
        world.loom.dispatcher = None
    assert bad.status is Status.FAILED
    assert good.result(5) == 0
