"""What a test can do with a harness: run, stub, look, and know that nothing else runs."""

from __future__ import annotations

import threading
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

from loom_django import loom
from loom_django.errors import (
    ContextMisuseError,
    ExecutionFailedError,
    ExecutionNotFoundError,
    InvalidInputError,
    OpenTransactionError,
)
from loom_django.kernel.state import Status
from loom_django.testing import Harness, harness, override_loom
from tests.testing.flows import (
    TOOLS,
    BankTimeout,
    asks,
    audit,
    audits,
    booked,
    charge,
    fetch,
    flaky,
    keyed_steps,
    once,
    one_step,
    order,
    pages,
    parcels,
    patient,
    publish,
    refund,
    repeatable,
    slow,
    slow_report,
    slow_transfer,
    starts,
    undeclared,
    unsure,
    wire_transfer,
)

pytestmark = pytest.mark.django_db


# Running.


def test_nothing_runs_by_itself(loom_harness: Harness) -> None:
    """What is started under a harness stands ready until run() is called."""
    handle = one_step.start("repeatable")
    assert handle.status == Status.PENDING
    loom_harness.run()
    assert handle.result() == "done"


def test_all_that_is_ready_is_run(loom_harness: Harness) -> None:
    """One call drives every execution, those too that a tool starts on the way."""
    for number in range(3):
        starts.using(execution_id=f"e{number}").start()
    loom_harness.run()
    assert [loom.state(f"e{number}/next").status for number in range(3)] == [Status.COMPLETED] * 3
    assert len(loom_harness.calls(repeatable)) == 3


def test_a_start_before_the_harness_is_run_if_it_is_ready() -> None:
    """What counts is the row in the database, not who wrote it."""
    with override_loom(DISPATCHER="worker"):
        handle = one_step.start("repeatable")
    with harness() as h:
        h.run()
    assert handle.result() == "done"


def test_after_the_harness_all_is_as_before() -> None:
    """The configured dispatcher, inline here, runs the next start at once, and no stub is left."""
    with harness() as h:
        h.stub(repeatable, "stubbed")
        h.advance(timedelta(days=1000))
    before = loom.store.now()
    assert one_step.start("repeatable").result() == "done"
    assert loom.store.now() - before < timedelta(minutes=1)


def test_a_harness_that_is_not_entered_says_so() -> None:
    """The message tells how to enter it."""
    with pytest.raises(ContextMisuseError, match="enterContext"):
        harness().run()


def test_a_harness_is_entered_once(loom_harness: Harness) -> None:
    """Entering it again would leave it twice."""
    with pytest.raises(ContextMisuseError, match="in use already"):
        loom_harness.__enter__()


def test_a_harness_inside_a_harness(loom_harness: Harness) -> None:
    """The inner one is in force until it is left, then the outer one is again."""
    loom_harness.stub(repeatable, "outer")
    with harness() as inner:
        inner.stub(repeatable, "inner")
        first = one_step.start("repeatable")
        inner.run()
    second = one_step.start("repeatable")
    assert second.status == Status.PENDING
    loom_harness.run()
    assert (first.result(), second.result()) == ("inner", "outer")


def test_settings_may_change_under_a_harness(loom_harness: Harness) -> None:
    """An override does not bring the usual dispatcher back, nor does its end."""
    loom_harness.stub(repeatable, "stubbed")
    loom_harness.advance(timedelta(days=3))
    with override_loom(LEASE_TTL=5, LEASE_RENEW_INTERVAL=1):
        assert loom.engine.settings().LEASE_TTL == 5
        assert abs(loom.store.now() - loom_harness.now) < timedelta(minutes=1)
        first = one_step.start("repeatable")
    second = one_step.start("repeatable")
    assert first.status == second.status == Status.PENDING
    loom_harness.run()
    assert (first.result(), second.result()) == ("stubbed", "stubbed")


def test_run_inside_atomic_is_refused(loom_harness: Harness) -> None:
    """What was started in the block is not committed: nobody may run it yet."""
    one_step.start("repeatable")
    with transaction.atomic(), pytest.raises(OpenTransactionError):
        loom_harness.run()
    loom_harness.run()
    assert len(loom_harness.calls(repeatable)) == 1


def test_run_inside_a_tool_is_refused(loom_harness: Harness) -> None:
    """A tool that drives the harness would wait for itself."""
    loom_harness.stub(repeatable, calls=lambda ctx, word: loom_harness.run())
    handle = one_step.start("repeatable")
    loom_harness.run()
    with pytest.raises(ExecutionFailedError, match="running already"):
        handle.result()


def test_flows_that_answer_each_other_for_ever_are_stopped(
    loom_harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that would never end fails and says why."""
    monkeypatch.setattr("loom_django.testing.harnessing.TURNS", 5)
    loom_harness.stub(repeatable, calls=lambda ctx, word: one_step.start("repeatable").id)
    one_step.start("repeatable")
    with pytest.raises(AssertionError, match="answer each other"):
        loom_harness.run()


def test_a_broken_database_is_not_silent(loom_harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the store is raised at the test, where a worker would log it and go on."""
    one_step.start("repeatable")

    def fails(commit: Any) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(loom.store, "append", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        loom_harness.run()


# Stubs and calls.


def test_a_stub_answers_for_a_tool(loom_harness: Harness) -> None:
    """A result, None included, stands in for the effect; the newest stub counts."""
    loom_harness.stub(repeatable, "first")
    loom_harness.stub(repeatable, None)
    handle = one_step.start("repeatable")
    loom_harness.run()
    assert handle.result() == "None"


@pytest.mark.parametrize("raised", [BankTimeout, BankTimeout("no answer")], ids=["class", "instance"])
def test_a_stub_raises(loom_harness: Harness, raised: Any) -> None:
    """An exception of in_doubt_on puts the step in doubt, as the tool's own would."""
    loom_harness.stub(charge, {"id": "ch_1"})
    loom_harness.stub(wire_transfer, raises=raised)
    order.using(execution_id="o1").start(1, Decimal(1), "DE02")
    loom_harness.run()
    loom.resume("o1", event_type="Approval", payload={"by": "anna"})
    loom_harness.run()
    [doubt] = loom_harness.in_doubt()
    assert (doubt.execution_id, doubt.step_id) == ("o1", "wire_transfer")
    assert doubt.idempotency_key == loom_harness.calls(wire_transfer)[0].idempotency_key == "o1:wire_transfer"
    assert "BankTimeout" in doubt.cause


def test_a_stub_is_a_function(loom_harness: Harness) -> None:
    """It gets the context and the arguments, and its result goes through the codec."""
    loom_harness.stub(
        charge, calls=lambda ctx, order_id, amount: {"id": ctx.idempotency_key, "of": (amount,)}
    )
    loom_harness.stub(refund, calls=lambda ctx, charge_id: None)
    order.using(execution_id="o1").start(7, Decimal("9.90"), iban="DE02")
    loom_harness.advance(timedelta(days=2))
    assert loom_harness.calls(refund)[0].args == ("o1:charge",)


@pytest.mark.parametrize(
    "given",
    [
        {},  # nothing
        {"result": 1, "raises": ValueError()},  # two
        {"raises": ValueError(), "calls": print},
    ],
)
def test_a_stub_is_one_thing(loom_harness: Harness, given: dict[str, Any]) -> None:
    """A stub that says two things, or nothing, is refused."""
    with pytest.raises(InvalidInputError, match="one of"):
        loom_harness.stub(charge, **given)


def test_a_stub_and_the_calls_of_one_keyed_step(loom_harness: Harness) -> None:
    """tool.keyed(key) means that step alone, the plain tool all of them."""
    loom_harness.stub(repeatable, "other")
    loom_harness.stub(repeatable.keyed("b"), "special")
    handle = keyed_steps.start(["a", "b", "c"])
    loom_harness.run()
    assert handle.result() == ["other", "special", "other"]
    assert [call.step_id for call in loom_harness.calls(repeatable)] == [
        "repeatable#a",
        "repeatable#b",
        "repeatable#c",
    ]
    assert [call.args for call in loom_harness.calls(repeatable.keyed("c"))] == [("c",)]


def test_calls_are_kept_as_they_were_made(loom_harness: Harness) -> None:
    """A stub that changes what it was given does not change the record."""
    loom_harness.stub(audit, calls=lambda ctx, orders, by: orders.clear())
    audits.using(execution_id="e1").start([1, 2])
    loom_harness.run()
    [call] = loom_harness.calls(audit)
    assert (call.execution_id, call.step_id, call.attempt) == ("e1", "audit", 1)
    assert (call.args, call.kwargs) == (([1, 2],), {"by": "anna"})


def test_tools_that_are_not_stubbed_run(loom_harness: Harness) -> None:
    """Their calls are recorded too."""
    handle = one_step.start("undeclared")
    loom_harness.run()
    assert handle.result() == "done"
    assert loom_harness.calls(undeclared)[0].args == ("done",)
    assert loom_harness.calls(once) == []


def test_short_retries_take_no_time(loom_harness: Harness) -> None:
    """A delay that a worker waits for in process passes at once, on the harness's clock."""
    answers = iter([OSError("down"), OSError("down"), {"id": "ch_3"}])

    def unsteady(ctx: Any, order_id: int, amount: Decimal) -> Any:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    loom_harness.stub(charge, calls=unsteady)
    order.using(execution_id="o1").start(1, Decimal(1), "DE02")
    began = loom_harness.now
    loom_harness.run()
    assert loom_harness.events("o1").count("STEP_RETRYING") == 2
    assert loom_harness.events("o1").count("EXECUTION_SUSPENDED") == 1  # on the approval alone
    assert loom_harness.now - began == timedelta(seconds=3)
    assert {call.idempotency_key for call in loom_harness.calls(charge)} == {"o1:charge"}


def test_long_retries_park(loom_harness: Harness) -> None:
    """A longer delay is a timer, and with jitter it is the longest that the policy allows."""
    loom_harness.stub(flaky, raises=OSError("down"))
    handle = patient.start()
    loom_harness.run()
    assert handle.status == Status.SUSPENDED
    loom_harness.stub(flaky, 3)
    loom_harness.advance(timedelta(seconds=59))
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(timedelta(seconds=1))
    assert handle.result() == 3


@pytest.mark.parametrize(
    ("tool", "end"),
    [
        (slow_transfer, "EXECUTION_SUSPENDED"),  # nobody knows: a person decides
        (slow_report, "EXECUTION_COMPLETED"),  # a known failure, for the flow to catch
    ],
)
def test_a_call_outlasts_its_timeout_on_the_clock(loom_harness: Harness, tool: Any, end: str) -> None:
    """A stub that moves the clock by the timeout has timed out, without anybody waiting."""
    loom_harness.stub(tool, calls=lambda ctx: loom_harness.advance(timedelta(seconds=30)))
    slow.using(execution_id="e1").start(tool.name)
    loom_harness.run()
    assert loom_harness.events("e1")[-1] == end
    if end == "EXECUTION_COMPLETED":
        assert loom.handle("e1").result() == "builtins.TimeoutError"


def test_a_call_within_its_timeout(loom_harness: Harness) -> None:
    """A moved clock alone is no timeout."""
    loom_harness.stub(slow_report, calls=lambda ctx: loom_harness.advance(timedelta(seconds=29)) or "ready")
    handle = slow.start("slow_report")
    loom_harness.run()
    assert handle.result() == "ready"


# Doubts and events.


def test_a_verdict_goes_on_with_a_fresh_key(loom_harness: Harness) -> None:
    """retry-fresh runs the step again under another key; nothing is in doubt then."""
    asks.using(execution_id="e1").start()
    loom_harness.run()
    assert [doubt.cause for doubt in loom_harness.in_doubt()] == ["the line was cut"]
    loom_harness.stub(unsure, None)
    loom.resolve("e1", "unsure", "retry-fresh", reason="seen at the bank")
    loom_harness.run()
    assert [call.idempotency_key for call in loom_harness.calls(unsure)] == ["e1:unsure", "e1:unsure:r1"]
    assert loom_harness.in_doubt() == []
    assert loom.handle("e1").result() == "went well"


def test_events_of_an_unknown_execution(loom_harness: Harness) -> None:
    """A misspelt id is an error, not an empty log."""
    with pytest.raises(ExecutionNotFoundError):
        loom_harness.events("nobody")


# Messages.


def test_messages_early_doubled_and_late(loom_harness: Harness) -> None:
    """They are kept until they are wanted, in order, once each."""
    handle = parcels.using(execution_id="p1").start()
    assert loom.send("p1", "carrier", {"status": "packed"}, message_id="m1")
    loom_harness.run()
    assert not loom.send("p1", "carrier", {"status": "packed"}, message_id="m1")
    loom.send("p1", "carrier", {"status": "sent"}, message_id="m2")
    loom.send("p1", "carrier", {"status": "delivered"}, message_id="m3")
    loom_harness.run()
    assert handle.result() == ["packed", "sent", "delivered"]


def test_a_message_sent_in_the_views_own_transaction(loom_harness: Harness) -> None:
    """TestCase never tells of that block's commit; the row in the inbox is what counts."""
    handle = parcels.using(execution_id="p1").start()
    loom_harness.run()
    with transaction.atomic():
        loom.send("p1", "carrier", {"status": "delivered"})
    assert handle.status == Status.SUSPENDED
    loom_harness.run()
    assert handle.result() == ["delivered"]


def test_an_answer_in_the_views_own_transaction(loom_harness: Harness) -> None:
    """A resume inside atomic() leaves the execution ready, and run() takes it up."""
    loom_harness.stub(charge, {"id": "ch_1"})
    loom_harness.stub(wire_transfer, "tx-1")
    handle = order.using(execution_id="o1").start(1, Decimal(1), "DE02")
    loom_harness.run()
    with transaction.atomic():
        loom.resume("o1", event_type="Approval", payload={"by": "anna"})
    loom_harness.run()
    assert handle.result() == "paid"


# Async flows.


async def _text(ctx: Any, url: str) -> str:
    return "hello"


@pytest.mark.parametrize(
    "stub",
    [{"result": "hello"}, {"calls": lambda ctx, url: "hello"}, {"calls": _text}],
    ids=["result", "function", "coroutine function"],
)
def test_an_async_flow(loom_harness: Harness, stub: dict[str, Any]) -> None:
    """Its tools are stubbed by plain values, plain functions and coroutine functions alike."""
    loom_harness.stub(fetch, **stub)
    handle = pages.start("https://example.com")
    loom_harness.run()
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(timedelta(hours=1))
    assert handle.result() == 5
    assert [call.args for call in loom_harness.calls(publish)] == [("hello",)]


def test_an_async_tool_outlasts_its_timeout_on_the_clock(loom_harness: Harness) -> None:
    """The clock is one for both kinds of flow."""
    loom_harness.stub(fetch, calls=lambda ctx, url: loom_harness.advance(timedelta(minutes=1)))
    handle = pages.start("https://example.com")
    loom_harness.run()
    with pytest.raises(ExecutionFailedError, match="did not end within"):
        handle.result()


# Test classes.


class SetUpOnceTests(TestCase):
    """Rows that were made for the whole class are there for each test."""

    @classmethod
    def setUpTestData(cls) -> None:
        with harness():
            one_step.using(execution_id="shared").start("repeatable")

    def setUp(self) -> None:
        self.h = self.enterContext(harness())

    def test_it_runs_in_one_test(self) -> None:
        """A start in setUpTestData is run by the test's harness."""
        self.h.run()
        assert loom.handle("shared").result() == "done"

    def test_it_runs_in_the_other_test(self) -> None:
        """What the other test did was rolled back."""
        assert loom.handle("shared").status == Status.PENDING
        self.h.run()
        assert loom.handle("shared").result() == "done"


class AsyncTests(TestCase):
    """An async test drives the harness in the thread of Django's connection."""

    def setUp(self) -> None:
        self.h = self.enterContext(harness())

    async def test_a_flow_of_each_kind(self) -> None:
        """The awaited twins start and read; the harness runs in between."""
        plain = await one_step.astart("repeatable")
        self.h.stub(fetch, "hello")
        coroutine = await pages.astart("https://example.com")
        await sync_to_async(self.h.run)()
        await sync_to_async(self.h.advance)(timedelta(hours=1))
        assert await plain.aresult() == "done"
        assert await coroutine.aresult() == 5


class CommittedRowsTests(TransactionTestCase):
    """Everything stays in the caller's thread and connection also where rows are committed."""

    def test_a_tool_with_a_timeout_runs_in_the_tests_thread(self) -> None:
        """No other thread is used, so no other connection stays open."""
        threads: list[tuple[int, int]] = []

        def where(ctx: Any) -> str:
            threads.append((threading.get_ident(), id(connection.connection)))
            return "here"

        with harness() as h:
            h.stub(slow_report, calls=where)
            handle = slow.start("slow_report")
            h.run()
            assert handle.result() == "here"
        assert threads == [(threading.get_ident(), id(connection.connection))]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("loom-tool")]

    def test_a_start_in_atomic(self) -> None:
        """It is ready after the commit, as in a TestCase."""
        with harness() as h:
            with transaction.atomic():
                handle = one_step.start("booked")
            h.run()
            assert handle.result() == "done"


@pytest.mark.django_db(transaction=True)
def test_the_fixture_takes_transactional_db_too(loom_harness: Harness) -> None:
    """The test's own choice of database access is kept."""
    assert not connection.in_atomic_block
    handle = one_step.start("booked")
    loom_harness.run()
    assert handle.result() == "done"


def test_every_kind_of_tool_by_name(loom_harness: Harness) -> None:
    """The four declarations run alike without a crash."""
    handles = [one_step.start(name) for name in TOOLS]
    loom_harness.run()
    assert [handle.result() for handle in handles] == ["done"] * 4
    assert len(loom_harness.calls(booked)) == 1
