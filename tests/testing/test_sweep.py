"""A sweep finds planted faults, each by its own check, and says nothing where all is well."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core import mail
from django.db import transaction

from loom_django import loom
from loom_django.errors import ContextMisuseError, InvalidInputError, OpenTransactionError
from loom_django.kernel.state import ExecutionState, Frame, FrameStatus
from loom_django.models import Execution
from loom_django.testing import Harness, NonDeterminismError, crash_sweep
from loom_django.testing.crashes import _doubled, _Expected, _Made, _rightly_in_doubt, _Run
from loom_django.testing.harnessing import Call, Passage
from tests.shop.models import Ledger
from tests.testing import flows
from tests.testing.flows import (
    BankRefusal,
    attempts,
    booked,
    breaks,
    charge,
    fetch,
    goes_round,
    once,
    one_step,
    pages,
    repeatable,
    starts,
    undeclared,
)

pytestmark = pytest.mark.django_db


def one(name: str) -> Any:
    def scenario(h: Harness) -> None:
        one_step.using(execution_id="e1").start(name)
        h.run()

    return scenario


def problems(report: Any) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(point.step_id, point.point): point.problems for point in report.failures}


@pytest.mark.parametrize("name", ["repeatable", "once", "booked"])
def test_a_declared_tool_is_clean(name: str) -> None:
    """Each declaration keeps what it promises at every point."""
    report = crash_sweep(one(name))
    assert report.ok, report
    assert [point.point for point in report.points] == [
        "before-start",
        "before-effect",
        "in-effect",
        "after-effect",
        "after-outcome",
    ]


def test_a_chain_is_swept_from_end_to_end() -> None:
    """The steps of each member are points of their own; a crash in one leaves the others as they are."""

    def scenario(h: Harness) -> None:
        goes_round.using(execution_id="e1").start(1)
        h.run()
        assert loom.handle("e1").result() == 3

    report = crash_sweep(scenario)
    assert report.ok, report
    assert {point.execution_id for point in report.points} == {"e1", "e1~2", "e1~3"}


def test_a_tool_that_was_not_declared_is_found() -> None:
    """A transfer that somebody forgot to declare idempotent=False runs twice, and the report tells where."""
    report = crash_sweep(one("undeclared"))
    found = problems(report)
    assert set(found) == {
        ("undeclared", "in-effect"),
        ("undeclared", "after-effect"),
        ("undeclared", "after-outcome"),
    }
    [problem] = found["undeclared", "in-effect"]
    assert "called 2 times with the key e1:undeclared" in problem
    assert "idempotent=False" in problem
    assert "FAIL kit-one-step: undeclared in-effect: e1 COMPLETED with 'done'" in str(report)
    assert "ran 2 times: undeclared of e1" in str(report)
    assert "log of e1: EXECUTION_STARTED STEP_STARTED STEP_STARTED" in str(report)


def test_a_tool_that_is_declared_wrongly_is_found_by_the_scenario() -> None:
    """idempotent=True is believed; a provider that ignores the key shows it, if the scenario looks."""

    def scenario(h: Harness) -> None:
        payments: list[str] = []
        h.stub(repeatable, calls=lambda ctx, word: payments.append(word) or "paid")
        one_step.start("repeatable")
        h.run()
        assert payments == ["done"], "paid twice"

    found = problems(crash_sweep(scenario))
    assert set(found) == {("repeatable", point) for point in ("in-effect", "after-effect", "after-outcome")}
    assert "paid twice" in found["repeatable", "in-effect"][0]


def test_a_provider_that_keeps_the_key_is_clean() -> None:
    """The same scenario with a provider that does what an idempotency key is for."""

    def scenario(h: Harness) -> None:
        payments: dict[str, str] = {}
        h.stub(repeatable, calls=lambda ctx, word: payments.setdefault(ctx.idempotency_key, word))
        one_step.start("repeatable")
        h.run()
        assert len(payments) == 1

    report = crash_sweep(scenario)
    assert report.ok, report


def test_an_end_that_differs_is_found() -> None:
    """A tool that tells which attempt it is gives another result after a crash."""

    def scenario(h: Harness) -> None:
        attempts.using(execution_id="e1").start()
        h.run()

    found = problems(crash_sweep(scenario))
    assert (
        "e1 is COMPLETED with 2; without a crash it is COMPLETED with 1"
        in (found["tells_attempt", "in-effect"])
    )


def test_an_end_that_is_never_the_same_is_not_compared() -> None:
    """What differs without a crash too, such as a random id, says nothing about the crash."""

    def scenario(h: Harness) -> None:
        starts.using(execution_id=f"e{next(numbers)}").start()
        h.run()

    numbers = iter(range(1000))
    report = crash_sweep(scenario, points=["before-start"])
    assert report.ok, report


def test_keys_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt with a key of its own would be a second charge."""
    asked: Counter[str] = Counter()

    def fresh_each_time(frame: Frame, execution_id: str) -> str:
        asked[frame.step_id] += 1
        return f"{execution_id}:{frame.step_id}:{asked[frame.step_id]}"

    monkeypatch.setattr(Frame, "idempotency_key", fresh_each_time)
    found = problems(crash_sweep(one("repeatable"), points=["in-effect"]))
    assert "had different keys in its attempts" in found["repeatable", "in-effect"][0]


def test_a_transaction_that_took_effect_twice_is_found() -> None:
    """Judged by the outcomes that were recorded, whatever the calls were."""
    call = Call("booked", "e1:booked", (), {}, "e1", 1)
    outcome = Passage(0, "e1", "kit-one-step", "booked", "after-outcome", 1, booked)
    made = _Made(call, 0, None, transactional=True)
    once_only = _Run(passages=[outcome], calls=[made])
    twice = _Run(passages=[outcome, outcome], calls=[made, made])
    expected = _Expected(once_only, once_only)
    assert list(_doubled(once_only, expected)) == []
    assert list(_doubled(twice, expected)) == ["booked is transactional and took effect 2 times"]


def test_a_second_call_without_a_verdict_is_found() -> None:
    """The engine never makes one; if it did, the sweep would say so."""
    call = Call("once", "e1:once", (), {}, "e1", 1)
    made = _Made(call, 0, False, transactional=False)
    expected = _Expected(_Run(calls=[made]), _Run(calls=[made]))
    [problem] = _doubled(_Run(calls=[made, made]), expected)
    assert problem.startswith("once was called 2 times with the key e1:once and without a verdict")


def test_a_retry_is_no_double() -> None:
    """Calls that the crash-free run makes under one key are expected of the others too."""

    def scenario(h: Harness) -> None:
        answers = iter([OSError("down"), {"id": "ch_1"}])

        def unsteady(ctx: Any, *args: Any) -> Any:
            answer = next(answers, {"id": "ch_1"})
            if isinstance(answer, OSError):
                raise answer
            return answer

        h.stub(charge, calls=unsteady)
        flows.order.using(execution_id="o1").start(1, Decimal(1), "DE02")
        h.run()

    report = crash_sweep(scenario)
    assert report.ok, report
    assert {point.number for point in report.points} == {1, 2}
    assert "charge before-start (time 2)" in str(report)


def test_a_retry_that_a_policy_allows_is_no_double() -> None:
    """A refusal that proves that nothing happened is tried again under the same key, also after a crash."""

    def scenario(h: Harness) -> None:
        answers = iter([BankRefusal("busy")])

        def bank(ctx: Any) -> str:
            for refusal in answers:
                raise refusal
            return "tx-1"

        h.stub(flows.careful, calls=bank)
        flows.asks_again.using(execution_id="c1").start()
        h.run()

    report = crash_sweep(scenario)
    assert report.ok, report
    assert any(times == 2 for point in report.points for times in point.twice.values())


@pytest.mark.parametrize(
    ("point", "right"), [("before-start", False), ("in-effect", True), ("after-outcome", False)]
)
def test_where_a_doubt_is_right(point: Any, right: bool) -> None:
    """The engine has none elsewhere; if it had, the sweep would say so."""
    frame = Frame("once", "once", FrameStatus.IN_DOUBT, idempotent=False)
    run = _Run(states=[ExecutionState(execution_id="e1", frames={"once": frame})])
    assert _rightly_in_doubt(run, Passage(0, "e1", "kit-one-step", "once", point, 1, once)) is right


def test_a_body_that_does_not_replay_is_found_behind_a_doubt() -> None:
    """A doubt excuses what the scenario could not go on with, not what the replay check finds."""

    def scenario(h: Harness) -> None:
        one_step.using(execution_id="e1").start("once")
        h.run()
        if h.in_doubt():
            raise NonDeterminismError("e1", "kit-one-step", "once", "this", "that")

    found = problems(crash_sweep(scenario, points=["in-effect"]))
    assert "NonDeterminismError" in found["once", "in-effect"][0]


def test_an_in_doubt_park_is_right_only_where_nobody_can_know() -> None:
    """Before the mark and after the recorded outcome the transfer goes on by itself."""
    report = crash_sweep(one("once"))
    parked = {point.point for point in report.points if "EffectInDoubtResolved" in point.ended["e1"]}
    assert parked == {"before-effect", "in-effect", "after-effect"}


def test_what_follows_a_doubt_cannot_be_asked_of_the_scenario() -> None:
    """A scenario that answers a wait which is not there yet is stopped by the doubt, not by a fault."""

    def scenario(h: Harness) -> None:
        handle = one_step.using(execution_id="e1").start("once")
        h.run()
        assert handle.status == "COMPLETED"

    report = crash_sweep(scenario)
    assert report.ok, report


def test_a_scenario_that_raises_after_a_crash_is_found() -> None:
    """Without a doubt in the way its exception is a problem."""

    def scenario(h: Harness) -> None:
        one_step.start("repeatable")
        h.run()
        if len(h.calls(repeatable)) > 1:
            raise RuntimeError("twice")

    found = problems(crash_sweep(scenario, points=["in-effect"]))
    assert found["repeatable", "in-effect"] == ("the scenario raised RuntimeError: twice",)


def test_a_scenario_that_fails_without_a_crash_fails_the_test() -> None:
    """There is nothing to compare with."""

    def scenario(h: Harness) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        crash_sweep(scenario)


def test_a_scenario_that_does_otherwise_each_time_is_found() -> None:
    """A point that is not reached again proves nothing."""
    names = iter(["repeatable", "repeatable", *["once"] * 10])

    def scenario(h: Harness) -> None:
        one_step.start(next(names))
        h.run()

    found = problems(crash_sweep(scenario, points=["before-start"]))
    assert "did not come to the point" in found["repeatable", "before-start"][0]


@pytest.mark.parametrize("points", [None, ["in-effect"]])
def test_a_scenario_without_steps_proves_nothing(points: Any) -> None:
    """A forgotten h.run() must not look like success."""

    def scenario(h: Harness) -> None:
        one_step.start("repeatable")

    with pytest.raises(AssertionError, match=r"h\.run"):
        crash_sweep(scenario, points=points)


def test_an_execution_that_does_not_begin_is_found() -> None:
    """A start that a crash swallowed is missing from the run."""

    def scenario(h: Harness) -> None:
        one_step.start("repeatable")
        h.run()
        if len(h.calls(repeatable)) == 1:
            one_step.using(execution_id="second").start("booked")
            h.run()

    found = problems(crash_sweep(scenario, points=["in-effect"]))
    assert "execution second of flow kit-one-step was not run" in found["repeatable", "in-effect"]


def test_only_the_points_that_are_named() -> None:
    """A sweep may be narrowed; a misspelt point is refused."""
    report = crash_sweep(one("repeatable"), points=["after-effect"])
    assert [point.point for point in report.points] == ["after-effect"]
    with pytest.raises(InvalidInputError, match="after-effect"):
        crash_sweep(one("repeatable"), points=["after-affect"])


def test_waits_messages_and_async_flows() -> None:
    """A crash while the clock is moved is recovered on the way."""

    def scenario(h: Harness) -> None:
        h.stub(fetch, "hello")
        pages.using(execution_id="a1").start("https://example.com")
        flows.sleeps.using(execution_id="s1").start("x", [1, 2])
        h.run()
        h.advance(timedelta(hours=4))

    report = crash_sweep(scenario, points=["before-effect", "after-effect"])
    assert report.ok, report
    assert {point.step_id for point in report.points} == {"fetch", "publish", "repeatable", "repeatable#2"}


def test_a_flow_that_parks_on_its_error() -> None:
    """The same park is the same end."""

    def scenario(h: Harness) -> None:
        breaks.using(execution_id="b1").start()
        h.run()

    report = crash_sweep(scenario)
    assert report.ok, report


# The clean state.


def test_in_a_testcase_each_run_is_rolled_back() -> None:
    """Rows that the test has made stay, and those of the runs go."""
    Ledger.objects.create(key="mine", step="mine")
    seen: list[int] = []

    def scenario(h: Harness) -> None:
        seen.append(Ledger.objects.count())
        one_step.using(execution_id="e1").start("booked")
        h.run()

    report = crash_sweep(scenario)
    assert report.ok, report
    assert set(seen) == {1}
    assert list(Ledger.objects.values_list("key", flat=True)) == ["mine"]
    assert Execution.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_elsewhere_the_tables_are_truncated() -> None:
    """Before each run and after the last one."""
    Ledger.objects.create(key="mine", step="mine")
    seen: list[int] = []

    def scenario(h: Harness) -> None:
        seen.append(Ledger.objects.count())
        one_step.using(execution_id="e1").start("booked")
        h.run()

    report = crash_sweep(scenario, points=["in-effect", "after-outcome"])
    assert report.ok, report
    assert set(seen) == {0}
    assert (Ledger.objects.count(), Execution.objects.count()) == (0, 0)


@pytest.mark.django_db(transaction=True)
def test_no_table_is_truncated_outside_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell on a production database the call is refused, and the rows stay."""
    Ledger.objects.create(key="mine", step="mine")
    monkeypatch.delattr(mail, "outbox")
    with pytest.raises(ContextMisuseError, match="truncates"):
        crash_sweep(one("booked"))
    assert Ledger.objects.count() == 1


def test_a_sweep_inside_atomic_is_refused() -> None:
    """Its runs could not commit."""
    with transaction.atomic(), pytest.raises(OpenTransactionError, match="crash_sweep"):
        crash_sweep(one("booked"))


def test_a_sweep_inside_a_harness(loom_harness: Harness) -> None:
    """The test's own harness, with its stubs and its clock, is there again afterwards."""
    loom_harness.stub(undeclared, "mine")
    loom_harness.advance(timedelta(days=1))
    before = loom_harness.now
    assert crash_sweep(one("once")).ok
    handle = one_step.start("undeclared")
    loom_harness.run()
    assert handle.result() == "mine"
    assert loom_harness.now == before
    assert loom_harness.calls(once) == []
    assert loom.history(handle.id)
