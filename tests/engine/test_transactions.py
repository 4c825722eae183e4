"""Django's transactions: starts and answers join the caller's, bodies never run inside one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from django.db import connection, transaction

from loom_django import FlowContext, StepContext, StepFailed, flow, signals, tool
from loom_django.engine.outside import load_existing, note, open_journal
from loom_django.errors import OpenTransactionError
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.models import Execution
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.recovery import recover_abandoned
from tests.engine.conftest import World
from tests.shop.models import Order
from tests.stores.rivals import InThread, wait_until_blocked

ONE_WRITER = os.environ.get("LOOM_TEST_DATABASE") != "postgresql"
DENIED = {"act": "resume", "principal": "bert", "reason": "no"}

database = pytest.mark.parametrize(
    "world", [pytest.param("database", marks=pytest.mark.django_db(transaction=True))], indirect=True
)


@tool(transactional=True)
def mark_paid(ctx: StepContext, order_id: int) -> str:
    Order.objects.filter(pk=order_id).update(paid=True)
    return ctx.idempotency_key


def paying_flow(flow_id: str) -> Any:
    @flow(flow_id, steps=[mark_paid])
    def body(ctx: FlowContext, order_id: int) -> str:
        return ctx.run(mark_paid, order_id)

    return body


def new_order() -> Order:
    return Order.objects.create(customer="anna", amount=1)


@database
def test_a_rolled_back_start_leaves_nothing_and_runs_nothing(world: World) -> None:
    """The execution exists if and only if the order does."""
    body = paying_flow("x.rollback")
    with suppress(ZeroDivisionError), transaction.atomic():
        order = new_order()
        body.using(execution_id="gone").start(order.pk)
        raise ZeroDivisionError
    assert not Order.objects.exists()
    assert not Execution.objects.exists()
    assert world.engine.store.status("gone") is None


@database
def test_a_committed_start_runs_after_the_commit(world: World) -> None:
    """Inside the block it is ready and not run; after it, it is done."""
    body = paying_flow("x.commit")
    with transaction.atomic():
        order = new_order()
        handle = body.start(order.pk)
        assert handle.status == Status.PENDING
    assert handle.status == Status.COMPLETED
    order.refresh_from_db()
    assert order.paid


@database
def test_a_conflicting_start_does_not_break_the_callers_transaction(world: World) -> None:
    """An id that is taken is found out without an error in the transaction."""
    body = paying_flow("x.taken")
    order = new_order()
    body.using(execution_id="taken").start(order.pk)
    with transaction.atomic():
        again = body.using(execution_id="taken").start(order.pk)
        Order.objects.create(customer="still usable", amount=2)
    assert again.created is False
    assert Order.objects.filter(customer="still usable").exists()


@database
def test_an_answer_joins_the_callers_transaction(world: World) -> None:
    """A resume that is rolled back was never given; one that is committed goes on afterwards."""

    @flow("x.answer")
    def body(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    handle = body.start()
    with suppress(ZeroDivisionError), transaction.atomic():
        world.loom.resume(handle.id, event_type="Go", payload=1)
        raise ZeroDivisionError
    assert handle.status == Status.SUSPENDED
    with transaction.atomic():
        world.loom.resume(handle.id, event_type="Go", payload=2)
        assert handle.status == Status.RUNNING
    assert handle.result() == 2


@database
def test_a_message_joins_the_callers_transaction(world: World) -> None:
    """A message that is rolled back was never sent."""

    @flow("x.message")
    def body(ctx: FlowContext) -> Any:
        return ctx.receive("m")

    handle = body.start()
    with suppress(ZeroDivisionError), transaction.atomic():
        world.loom.send(handle.id, "m", 1)
        raise ZeroDivisionError
    with transaction.atomic():
        world.loom.send(handle.id, "m", 2)
    assert handle.result() == 2


@database
def test_a_cancel_joins_the_callers_transaction(world: World) -> None:
    """Rolled back, the execution goes on waiting."""

    @flow("x.cancel")
    def body(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    handle = body.start()
    with suppress(ZeroDivisionError), transaction.atomic():
        world.loom.cancel(handle.id)
        raise ZeroDivisionError
    assert handle.status == Status.SUSPENDED


@database
def test_a_body_never_runs_inside_a_callers_transaction(world: World) -> None:
    """A recovery pass that would run a body inline is refused there, and writes nothing."""
    body = paying_flow("x.inside")
    world.loom.dispatcher = WorkerDispatcher()
    handle = body.start(new_order().pk)
    world.loom.dispatcher = None
    from datetime import timedelta

    world.shift(timedelta(seconds=31))
    with transaction.atomic(), pytest.raises(OpenTransactionError):
        recover_abandoned(world.loom, leases=world.engine.store)
    assert world.kinds(handle.id) == ["EXECUTION_STARTED"]
    assert world.engine.store.held(handle.id) is None


@database
def test_a_ctx_call_inside_atomic_is_misuse(world: World) -> None:
    """A rollback would undo what the log says was done."""

    @flow("x.ctx", steps=[mark_paid])
    def body(ctx: FlowContext) -> None:
        with transaction.atomic():
            ctx.run(mark_paid, 1)

    state = world.state(body.start())
    assert state.error is not None
    assert state.error["type"] == "loom_django.errors.OpenTransactionError"
    assert not state.frames


@database
def test_a_step_that_the_log_holds_is_not_asked_for_inside_atomic_either(world: World) -> None:
    """Each call of the context looks, the first outside of the block as well as the next inside."""
    edited = False

    @flow("x.served", steps=[mark_paid])
    def body(ctx: FlowContext) -> None:
        ctx.run(mark_paid, 1)
        with transaction.atomic() if edited else nullcontext():
            ctx.run(mark_paid, 2)
        ctx.suspend("Go")

    handle = body.start()
    edited = True
    world.loom.resume(handle.id, event_type="Go")
    state = world.state(handle)
    assert state.error is not None
    assert state.error["type"] == "loom_django.errors.OpenTransactionError"


@database
def test_waiting_for_a_result_inside_the_starting_transaction_is_refused(world: World) -> None:
    """It would wait for an execution that starts only at commit."""
    body = paying_flow("x.wait")
    with transaction.atomic():
        handle = body.start(new_order().pk)
        with pytest.raises(OpenTransactionError, match="at commit"):
            handle.result()


@database
def test_without_autocommit_every_writing_call_is_refused(world: World) -> None:
    """No block, no commit to hang on to: nothing is written."""
    body = paying_flow("x.manual")

    @flow("x.parked")
    def parked(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    handle = parked.start()
    connection.set_autocommit(False)
    try:
        for call in (
            lambda: body.using(execution_id="m1").start(1),
            lambda: world.loom.resume(handle.id, event_type="Go"),
            lambda: world.loom.resolve(handle.id, "s", "retry-fresh"),
            lambda: world.loom.cancel(handle.id),
            lambda: world.loom.send(handle.id, "m", 1),
            lambda: world.loom.retry_error(handle.id),
            lambda: world.loom.retry_diverged(handle.id),
        ):
            with pytest.raises(OpenTransactionError):
                call()
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    assert handle.status == Status.SUSPENDED
    assert world.engine.store.status("m1") is None


@database
def test_a_transactional_steps_rows_and_result_commit_together(world: World) -> None:
    """A failing tool leaves no rows; a completed one leaves both."""
    order = new_order()

    @tool(transactional=True)
    def fail_late(ctx: StepContext, order_id: int) -> None:
        Order.objects.filter(pk=order_id).update(paid=True)
        raise ValueError("after the write")

    @tool(transactional=True)
    def unstorable(ctx: StepContext, order_id: int) -> Any:
        Order.objects.filter(pk=order_id).update(paid=True)
        return object()

    @tool(transactional=True)
    def marked(ctx: StepContext, order_id: int) -> str:
        Order.objects.filter(pk=order_id).update(paid=True)
        transaction.set_rollback(True)
        return "said to be done"

    @flow("x.transactional", steps=[fail_late, unstorable, marked, mark_paid])
    def body(ctx: FlowContext, order_id: int) -> list[str]:
        failed = []
        for step in (fail_late, unstorable, marked):
            try:
                ctx.run(step, order_id)
            except StepFailed as exc:
                failed.append(exc.step_id)
        assert not Order.objects.get(pk=order_id).paid
        ctx.run(mark_paid, order_id)
        return failed

    handle = body.start(order.pk)
    assert handle.result() == ["fail_late", "unstorable", "marked"]
    order.refresh_from_db()
    assert order.paid


@database
def test_a_transactional_step_that_is_fenced_out_leaves_no_rows(world: World) -> None:
    """Whoever has lost the execution can commit neither the result nor the rows."""
    order = new_order()

    @tool(transactional=True)
    def overtaken(ctx: StepContext, order_id: int) -> None:
        Order.objects.filter(pk=order_id).update(paid=True)
        Order.objects.create(customer="never", amount=3)
        world.engine.store.acquire_fence(ctx.execution_id)

    @flow("x.overtaken", steps=[overtaken])
    def body(ctx: FlowContext, order_id: int) -> None:
        ctx.run(overtaken, order_id)

    handle = body.start(order.pk)
    order.refresh_from_db()
    assert not order.paid
    assert not Order.objects.filter(customer="never").exists()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "STEP_STARTED"]


def meanwhile(write: Callable[[], object]) -> InThread:
    """Write from another connection, and commit when this one waits for that."""
    written, mine = threading.Event(), connection.connection.info.backend_pid

    def rival() -> None:
        with transaction.atomic():
            write()
            own = connection.connection.info.backend_pid
            written.set()
            assert mine in wait_until_blocked(by=own)

    thread = InThread(rival)
    assert written.wait(20)
    return thread


@pytest.mark.skipif(ONE_WRITER, reason="the database has one writer at a time")
@database
def test_a_note_that_comes_while_the_outcome_is_on_its_way_costs_a_run(world: World) -> None:
    """The transaction is broken by it: the tool's work is undone and done again, behind the note."""
    rivals: list[InThread] = []

    @tool(transactional=True)
    def write(ctx: StepContext) -> int:
        Order.objects.create(customer=f"run {len(rivals)}", amount=1)
        if not rivals:
            rivals.append(
                meanwhile(lambda: note(world.engine, ctx.execution_id, Kind.EXECUTION_DENIED, DENIED))
            )
            return 0
        return Order.objects.count()

    @flow("x.noted", steps=[write])
    def body(ctx: FlowContext) -> int:
        return ctx.run(write)

    handle = body.start()
    rivals[0].join()
    assert handle.result() == 1
    assert [order.customer for order in Order.objects.all()] == ["run 1"]
    assert world.kinds(handle.id) == [
        "EXECUTION_STARTED", "STEP_STARTED", "EXECUTION_DENIED", "STEP_STARTED", "STEP_COMPLETED", "EXECUTION_COMPLETED"
    ]  # fmt: skip
    world.check(handle.id)


@pytest.mark.skipif(ONE_WRITER, reason="the database has one writer at a time")
@database
def test_an_owner_that_comes_while_the_outcome_is_on_its_way_has_it(world: World) -> None:
    """Nothing of the step is left, and the body stops."""
    rivals: list[InThread] = []

    def take_over(execution_id: str) -> None:
        token = world.engine.store.acquire_fence(execution_id)
        journal = open_journal(world.engine, load_existing(world.engine, execution_id), fence=token)
        journal.record(Kind.STEP_STARTED, {"step": "write", "tool": "write"})
        journal.land()

    @tool(transactional=True)
    def write(ctx: StepContext) -> None:
        Order.objects.create(customer="never", amount=1)
        rivals.append(meanwhile(lambda: take_over(ctx.execution_id)))

    @flow("x.taken", steps=[write])
    def body(ctx: FlowContext) -> None:
        ctx.run(write)

    handle = body.start()
    rivals[0].join()
    assert len(rivals) == 1
    assert not Order.objects.exists()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "STEP_STARTED", "STEP_STARTED"]


@pytest.mark.skipif(ONE_WRITER, reason="a trigger of PostgreSQL's")
@database
def test_an_outcome_that_something_else_keeps_from_landing_is_not_tried_for_ever(world: World) -> None:
    """A project's own trigger fails as a rival would, and nobody's event is there: the body stops, with nothing kept."""
    ran: list[int] = []

    @tool(transactional=True)
    def write(ctx: StepContext) -> None:
        Order.objects.create(customer="never", amount=1)
        ran.append(1)
        if len(ran) > 3:
            raise ValueError("again and again")

    @flow("x.trigger", steps=[write])
    def body(ctx: FlowContext) -> None:
        ctx.run(write)

    with connection.cursor() as cursor:
        cursor.execute(
            "create function refuse() returns trigger language plpgsql as "
            "$$ begin raise exception using errcode = 'unique_violation'; end $$;"
            "create trigger refuse before insert on loom_event for each row "
            "when (new.kind = 'STEP_COMPLETED') execute function refuse()"
        )
    try:
        handle = body.start()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop function refuse cascade")
    assert ran == [1]
    assert not Order.objects.exists()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "STEP_STARTED"]


@database
def test_a_nested_start_joins_the_transactional_step(world: World) -> None:
    """A start inside a transactional tool exists if and only if the step does."""
    inner = paying_flow("x.inner")
    order = new_order()

    @tool(transactional=True)
    def begin(ctx: StepContext, order_id: int, fail: bool) -> str:
        handle = inner.using(execution_id=f"{ctx.execution_id}-inner").start(order_id)
        if fail:
            raise ValueError
        return handle.id

    @flow("x.outer", steps=[begin])
    def body(ctx: FlowContext, order_id: int, fail: bool) -> str:
        try:
            return ctx.run(begin, order_id, fail)
        except StepFailed:
            return "failed"

    assert body.using(execution_id="bad").start(order.pk, True).result() == "failed"
    assert world.engine.store.status("bad-inner") is None
    body.using(execution_id="good").start(order.pk, False)
    assert world.engine.store.status("good-inner") == Status.COMPLETED


@database
def test_signals_are_sent_after_the_commit_and_robustly(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolled-back start sends none; a receiver that fails stops nothing."""
    heard: list[tuple[str, Any]] = []

    def hear(sender: Any, **about: Any) -> None:
        heard.append((sender.id, about))
        raise ValueError("a receiver's own trouble")

    @flow("x.signals")
    def body(ctx: FlowContext, value: int) -> int:
        return value

    signals.execution_started.connect(hear)
    signals.execution_completed.connect(hear)
    try:
        with suppress(ZeroDivisionError), transaction.atomic():
            body.start(1)
            raise ZeroDivisionError
        assert heard == []
        with caplog.at_level(logging.CRITICAL, "loom_django.signals"):
            handle = body.start(2)
    finally:
        signals.execution_started.disconnect(hear)
        signals.execution_completed.disconnect(hear)
    assert [(sender, about["sequence"]) for sender, about in heard] == [("x.signals", 1), ("x.signals", 2)]
    assert heard[1][1]["result"] == 2
    assert heard[1][1]["execution_id"] == handle.id


@pytest.mark.django_db
def test_in_a_testcase_transaction_everything_runs_at_once() -> None:
    """TestCase's own blocks do not count as a caller's transaction; an inner one dispatches at its commit."""
    from django.test import TestCase

    order = new_order()
    body = paying_flow("x.testcase")
    assert connection.in_atomic_block
    assert body.start(order.pk).status == Status.COMPLETED
    with TestCase.captureOnCommitCallbacks(execute=True), transaction.atomic():
        handle = body.start(order.pk)
        assert handle.status == Status.PENDING
    assert handle.status == Status.COMPLETED
    from loom_django import definitions

    definitions.registry.forget("x.testcase")


@pytest.mark.django_db
def test_waiting_in_a_testcase_for_what_nobody_else_can_end_is_told_at_once() -> None:
    """No other process sees the test's transaction: without a timeout the wait would be for ever."""
    from loom_django import definitions
    from loom_django.errors import ResultTimeoutError

    @flow("x.forever")
    def body(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    with pytest.raises(ResultTimeoutError):
        body.start().result()
    definitions.registry.forget("x.forever")
