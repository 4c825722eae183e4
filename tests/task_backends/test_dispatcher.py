"""What the dispatcher "tasks" tells a task backend, and what its task does, over the backend's API alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction
from django.utils.module_loading import import_string

from loom_django import FlowContext, StepContext, compat, definitions, flow, loom, tool
from loom_django.definitions import Flow
from loom_django.errors import OpenTransactionError
from loom_django.kernel.state import Status
from loom_django.services import dispatch, operators
from loom_django.services.recovery import RecoveryService, recover_abandoned
from loom_django.tasks import run_task
from tests.task_backends.recording import SENT, AwayBackend

pytestmark = pytest.mark.django_db(transaction=True)

GRACE = timedelta(seconds=31)
PAST_THE_LEASE = timedelta(seconds=61)
HERE = "tests.task_backends.recording"


@pytest.fixture(autouse=True)
def enqueued(settings: Any, use_tasks: Callable[..., None]) -> Iterator[list[str]]:
    """The ids of the executions that the backend was told of, in order."""
    use_tasks(default=f"{HERE}.RecordingBackend", away=f"{HERE}.AwayBackend")
    settings.LOOM = {"DISPATCHER": "tasks"}
    SENT.clear()
    known = set(definitions.registry.highest())
    shifted = loom.store.clock_offset()
    yield SENT
    loom.store.shift_clock(timedelta(seconds=shifted - loom.store.clock_offset()))
    for flow_id in set(definitions.registry.highest()) - known:
        definitions.registry.forget(flow_id)


@pytest.fixture
def gate() -> Flow[..., Any]:
    """A flow that waits for Go, and for a message."""

    @flow("tasks.gate")
    def body(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        return str(ctx.receive("word", timeout=timedelta(minutes=5)))

    return body


def work(execution_id: str) -> str:
    """What a backend's worker does with a message."""
    return str(run_task().call(execution_id=execution_id))


def pass_time(by: timedelta) -> None:
    loom.store.shift_clock(by)


def recover(**options: Any) -> Any:
    return recover_abandoned(loom, leases=loom.store, **options)


def ready(execution_id: str) -> bool:
    return loom.store.held(execution_id) is None and loom.store.status(execution_id) in (
        Status.PENDING,
        Status.RUNNING,
    )


# What is enqueued.


def test_each_way_of_becoming_ready_enqueues_one_task(gate: Any, enqueued: list[str]):
    """A start, an answer and a message; the task runs the body to its next park."""
    handle = gate.start()
    assert enqueued == [handle.id]
    assert handle.status == Status.PENDING
    assert work(handle.id) == "parked"
    loom.resume(handle.id, event_type="Go")
    assert enqueued == [handle.id] * 2
    assert work(handle.id) == "parked"
    loom.send(handle.id, "word", "hello")
    assert enqueued == [handle.id] * 3
    assert work(handle.id) == "finished"
    assert handle.result() == "hello"


def test_a_verdict_enqueues(enqueued: list[str]):
    """The rest of a flow whose effect was in doubt goes the same way."""

    @tool(idempotent=False, in_doubt_on=TimeoutError)
    def pay(ctx: StepContext) -> str:
        raise TimeoutError

    @flow("tasks.verdict", steps=[pay])
    def body(ctx: FlowContext) -> str:
        return ctx.run(pay)

    handle = body.start()
    assert work(handle.id) == "parked"
    loom.resolve(handle.id, "pay", "completed-with-result", output="paid")
    assert enqueued == [handle.id] * 2
    assert work(handle.id) == "finished"


def test_a_wake_of_the_timer_loop_enqueues(enqueued: list[str]):
    """The loop answers the park and leaves the body to the task."""

    @flow("tasks.sleeper")
    def body(ctx: FlowContext) -> None:
        ctx.sleep(600)

    handle = body.start()
    work(handle.id)
    pass_time(timedelta(seconds=601))
    call_command("run_loom_timers", "--once", verbosity=0)
    assert enqueued == [handle.id] * 2
    assert ready(handle.id)


def test_an_act_of_the_admin_enqueues(gate: Any, enqueued: list[str]):
    """An operator's answer is one like any other."""
    handle = gate.start()
    work(handle.id)
    shell = operators.Operator(name="shell:test", user=None)
    done = operators.resume_execution(loom, shell, handle.id, "Go", reason="because")
    assert done.runs == "worker"
    assert enqueued == [handle.id] * 2


def test_a_rolled_back_start_enqueues_nothing(gate: Any, enqueued: list[str]):
    """The backend hears of what was committed, and only then."""
    with transaction.atomic():
        gate.start()
        transaction.set_rollback(True)
    assert enqueued == []
    with transaction.atomic():
        handle = gate.start()
        assert enqueued == []
    assert enqueued == [handle.id]


def test_a_body_that_starts_others_has_them_enqueued(gate: Any, enqueued: list[str]):
    """From within a tool too."""

    @tool
    def start_other(ctx: StepContext) -> None:
        gate.using(execution_id="other").start()

    @flow("tasks.starter", steps=[start_other])
    def body(ctx: FlowContext) -> None:
        ctx.run(start_other)

    handle = body.start()
    assert work(handle.id) == "finished"
    assert enqueued == [handle.id, "other"]


# A backend that fails.


def test_a_backend_that_is_away_breaks_no_caller_and_loses_nothing(
    gate: Any, settings: Any, enqueued: list[str], caplog: pytest.LogCaptureFixture
):
    """The start stands, the log says so, and recovery enqueues it when the backend is back."""
    settings.LOOM = {"DISPATCHER": "tasks", "TASKS_BACKEND": "away"}
    with caplog.at_level(logging.WARNING, "loom_django.dispatch"):
        handle = gate.start()
    assert "could not be enqueued" in caplog.text
    assert ready(handle.id)
    settings.LOOM = {"DISPATCHER": "tasks"}
    assert recover().enqueued == 0  # it is not overdue yet
    pass_time(GRACE)
    assert recover().enqueued == 1
    assert enqueued == [handle.id]


def test_recovery_stops_at_the_first_refusal_of_a_backend(gate: Any, settings: Any):
    """Fifty timeouts in a row would hold up the loop; the next pass tries again."""
    settings.LOOM = {"DISPATCHER": "tasks", "TASKS_BACKEND": "away"}
    for _ in range(3):
        gate.start()
    pass_time(GRACE)
    AwayBackend.tried = 0
    assert recover().enqueued == 0
    assert recover().enqueued == 0
    assert AwayBackend.tried == 2


def test_a_settings_error_breaks_no_caller_either(gate: Any, settings: Any):
    """The checks tell of it; a start goes on all the same."""
    settings.LOOM = {"DISPATCHER": "tasks", "TASKS_BACKEND": "nowhere"}
    assert ready(gate.start().id)


# Lost messages.


def test_a_lost_message_is_sent_again_ever_less_often(gate: Any, enqueued: list[str]):
    """At READY_GRACE, then after twice as long each time, an hour at most."""
    handle = gate.start()
    enqueued.clear()
    waited = []
    for second in range(0, 20_000, 30):
        recover()
        if enqueued:
            waited.append(second)
            enqueued.clear()
        pass_time(timedelta(seconds=30))
    pauses = [later - earlier for earlier, later in pairwise(waited)]
    assert waited[0] == 30
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600]
    assert work(handle.id) == "parked"
    recover()
    assert enqueued == []


def test_a_long_queue_is_not_filled_with_copies(
    gate: Any, enqueued: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Only so many are enqueued again before some of them were taken up; then the next ones are."""
    monkeypatch.setattr(dispatch, "REMINDED_MAX", 3)
    ids = [gate.using(execution_id=f"q{number}").start().id for number in range(8)]
    enqueued.clear()
    pass_time(GRACE)
    assert [recover(limit=2).enqueued for _ in range(4)] == [2, 1, 0, 0]
    assert enqueued == ids[:3]
    for execution_id in enqueued:
        work(execution_id)
    assert [recover(limit=2).enqueued for _ in range(3)] == [2, 1, 0]
    assert enqueued == ids[:6]


def test_what_becomes_ready_anew_is_reminded_of_anew(gate: Any, enqueued: list[str]):
    """The pause of an earlier message says nothing about a later one."""
    handle = gate.start()
    pass_time(GRACE)
    assert recover().enqueued == 1
    work(handle.id)
    loom.resume(handle.id, event_type="Go")
    pass_time(GRACE)
    assert recover().enqueued == 1


def test_recovery_hands_on_to_the_backend(enqueued: list[str], monkeypatch: pytest.MonkeyPatch):
    """An execution whose process died is ready again, and told of at once."""

    @tool
    def effect(ctx: StepContext) -> str:
        return "done"

    @flow("tasks.abandoned", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    handle = body.start()
    assert dispatch.claim_one(loom.engine, handle.id) is not None  # and then the process died
    assert work(handle.id) == "not-ready"
    pass_time(PAST_THE_LEASE)
    summary = recover()
    assert (summary.recovered, summary.enqueued) == (1, 0)
    assert enqueued == [handle.id] * 2
    assert work(handle.id) == "finished"


def test_the_timer_loop_carries_recovery(gate: Any, enqueued: list[str]):
    """Who runs tasks runs one command beside them."""
    handle = gate.start()
    pass_time(GRACE)
    call_command("run_loom_timers", "--once", verbosity=0)
    assert enqueued == [handle.id] * 2


def test_the_recovery_command_says_what_it_enqueued(gate: Any, capsys: pytest.CaptureFixture[str]):
    """For whoever has lost a broker and does not want to wait."""
    gate.start()
    pass_time(GRACE)
    call_command("loom_recover", verbosity=0)
    assert "enqueued 1" in capsys.readouterr().out


def test_a_full_pass_of_reminders_is_no_reason_to_hurry(gate: Any):
    """A service that recovered something runs again at once; messages alone do not make it."""
    gate.start()
    pass_time(GRACE)
    service = RecoveryService(loom, limit=1)
    assert service.tick() is False
    assert service.next_at > 0


# The task.


def test_twenty_copies_of_a_message_run_a_body_once(enqueued: list[str]):
    """Whoever comes late or second finds nothing to claim."""
    ran: list[int] = []

    @tool
    def effect(ctx: StepContext) -> None:
        ran.append(ctx.attempt)

    @flow("tasks.once", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    handle = body.start()
    assert [work(handle.id) for _ in range(20)] == ["finished"] + ["not-ready"] * 19
    assert ran == [1]
    assert work("nobody") == "not-ready"


def test_the_task_takes_the_fence(enqueued: list[str]):
    """As a worker's claim does: whoever held it before can append nothing more."""

    @flow("tasks.fence")
    def body(ctx: FlowContext) -> None:
        """Nothing."""

    handle = body.start()
    work(handle.id)
    assert loom.store.fence(handle.id) == 1


def test_an_execution_of_a_newer_release_is_left_to_it(
    gate: Any, enqueued: list[str], caplog: pytest.LogCaptureFixture
):
    """During a deploy a message may reach a process that does not have the flow: it stays ready, and due."""
    handle = gate.start()
    definitions.registry.forget("tasks.gate")
    with caplog.at_level(logging.INFO, "loom_django.run"):
        assert work(handle.id) == "refused"
    assert [record.levelname for record in caplog.records if "left alone" in record.message] == ["INFO"]
    assert ready(handle.id)
    assert dispatch.claim_one(loom.engine, handle.id) is not None  # at once, not in ten minutes


def test_a_task_inside_a_transaction_is_refused_before_it_claims(gate: Any):
    """A body's steps could not be made durable there, and the claim would be the transaction's."""
    handle = gate.start()
    with pytest.raises(OpenTransactionError), transaction.atomic():
        work(handle.id)
    assert ready(handle.id)


def test_the_task_is_where_messages_say(gate: Any, settings: Any):
    """A backend's workers import it by its path; a message outlives a change of the dispatcher."""
    handle = gate.start()
    settings.LOOM = {"DISPATCHER": "worker"}
    task = import_string("loom_django.tasks.run")
    assert task.module_path == "loom_django.tasks.run"
    assert task.call(execution_id=handle.id) == "parked"


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_process_that_is_told_to_end_hands_on_through_the_backend(
    end: type[BaseException], enqueued: list[str]
):
    """The execution is ready again and enqueued before the process ends."""

    @tool
    def effect(ctx: StepContext) -> str:
        if ctx.attempt == 1 and len(enqueued) == 1:
            raise end
        return "done"

    @flow("tasks.ended", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    handle = body.start()
    with pytest.raises(end):
        work(handle.id)
    assert enqueued == [handle.id] * 2
    assert ready(handle.id)
    assert work(handle.id) == "finished"


def test_the_engines_own_error_breaks_no_task_process(
    gate: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It is logged; the lease runs out, and recovery goes on."""
    handle = gate.start()
    monkeypatch.setattr(loom.store, "load", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.ERROR, "loom_django.dispatch"):
        assert work(handle.id) == "broken-off"
    assert "ZeroDivisionError" in caplog.text
    assert loom.store.held(handle.id) is not None


# Django's backends for development.


@pytest.fixture
def immediate(use_tasks: Callable[..., None]) -> None:
    use_tasks(default=f"{compat.django_tasks().__name__}.backends.immediate.ImmediateBackend")


def test_the_immediate_backend_runs_bodies_one_after_the_other(immediate: None):
    """Like the inline dispatcher: what a body starts runs after it, not inside it."""
    order: list[str] = []

    @flow("tasks.inner")
    def inner(ctx: FlowContext) -> None:
        order.append("inner")

    @tool
    def start_inner(ctx: StepContext) -> None:
        inner.start()

    @flow("tasks.outer", steps=[start_inner])
    def outer(ctx: FlowContext) -> None:
        ctx.run(start_inner)
        order.append("outer")

    handle = outer.start()
    assert handle.status == Status.COMPLETED
    assert order == ["outer", "inner"]


def test_the_immediate_backend_works_in_a_transaction(immediate: None, gate: Any):
    """The body runs after the commit."""
    with transaction.atomic():
        handle = gate.start()
        assert handle.status == Status.PENDING
    assert handle.status == Status.SUSPENDED


@pytest.mark.django_db
def test_the_immediate_backend_works_in_a_testcase(immediate: None, gate: Any):
    """On its one connection, at once."""
    assert gate.start().status == Status.SUSPENDED
