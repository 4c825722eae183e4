"""The clock stands until a test moves it, and what falls due on the way happens in order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.test import override_settings

from loom_django import FlowContext, flow, loom
from loom_django.definitions import registry
from loom_django.errors import InvalidInputError
from loom_django.kernel.state import Status
from loom_django.testing import Harness, override_loom
from tests.testing.flows import naps, once, one_step, parcels, repeatable, sleeps, with_deadline

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def test_the_clock_stands(loom_harness: Harness) -> None:
    """Facts recorded without a move of the clock carry one time."""
    began = loom_harness.now
    one_step.using(execution_id="e1").start("repeatable")
    loom_harness.run()
    state = loom.state("e1")
    assert loom_harness.now == began
    assert state.started_at == state.finished_at


def test_timers_fire_in_the_order_of_their_times(loom_harness: Harness) -> None:
    """Between two timers the woken bodies are run, so their next sleeps fall in their place."""
    sleeps.start("every third", [3, 3])
    sleeps.start("every second", [2, 2, 2])
    began = loom_harness.now
    loom_harness.advance(6 * HOUR)
    calls = [call.args[0] for call in loom_harness.calls(repeatable)]
    assert calls[:3] == ["every second", "every third", "every second"]
    assert sorted(calls[3:]) == ["every second", "every third"]  # both at the sixth hour
    assert loom_harness.now == began + 6 * HOUR


def test_each_body_wakes_at_its_own_time(loom_harness: Harness) -> None:
    """A long way in one step is the same as many short ones, to the microsecond."""
    handle = sleeps.start("x", [1, 5, 30])
    began = loom_harness.now
    loom_harness.advance(36 * HOUR)
    assert handle.result() == [(began + hours * HOUR).isoformat() for hours in (1, 6, 36)]


def test_timers_a_moment_apart(loom_harness: Harness) -> None:
    """However quick the clock of the database is, each fires by itself at its own time."""
    first = sleeps.start("first", [1])
    began = loom_harness.now
    loom_harness.advance(timedelta(microseconds=1))
    second = sleeps.start("second", [1])
    loom_harness.advance(2 * HOUR)
    assert first.result() == [(began + HOUR).isoformat()]
    assert second.result() == [(began + HOUR + timedelta(microseconds=1)).isoformat()]


@override_loom(LEASE_TTL=7200)
def test_a_timer_that_fell_due_during_a_recovery(loom_harness: Harness) -> None:
    """It fires late, at the time it is then: the clock never goes back."""
    handle = sleeps.start("x", [1])
    one_step.start("once")
    loom_harness.crash(once, "before-start")
    loom_harness.run()
    loom_harness.run()
    later = loom_harness.now
    loom_harness.advance(timedelta())
    assert handle.result() == [later.isoformat()]


def test_a_moment_too_early(loom_harness: Harness) -> None:
    """Nothing happens before its time."""
    handle = sleeps.start("x", [1])
    loom_harness.advance(HOUR - timedelta(microseconds=1))
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(timedelta(microseconds=1))
    assert handle.status == Status.COMPLETED


def test_run_fires_no_timer(loom_harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the test takes, a sleep ends by advance() alone."""
    handle = naps.start()
    loom_harness.run()
    while loom.store.now() < loom_harness.now + timedelta(milliseconds=5):
        pass
    loom_harness.run()
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(timedelta(milliseconds=1))
    assert handle.status == Status.COMPLETED


def test_advance_runs_first_what_is_ready(loom_harness: Harness) -> None:
    """A start counts from the time at which it was made."""
    handle = sleeps.start("x", [1])
    began = loom_harness.now
    loom_harness.advance(HOUR)
    assert handle.result() == [(began + HOUR).isoformat()]


def test_advance_runs_delayed_starts_at_their_times(loom_harness: Harness) -> None:
    """In order with the timers, whatever fires before and after."""
    began = loom_harness.now
    sleeper = sleeps.start("x", [2])
    late = sleeps.using(start_at=began + HOUR).start("y", [2])
    later = sleeps.using(start_at=began + 9 * HOUR).start("z", [1])
    loom_harness.advance(4 * HOUR)
    assert sleeper.result() == [(began + 2 * HOUR).isoformat()]
    assert late.result() == [(began + 3 * HOUR).isoformat()]
    assert later.status is Status.PENDING
    loom_harness.advance(6 * HOUR)
    assert later.result() == [(began + 10 * HOUR).isoformat()]


def test_advance_to_a_point_in_time(loom_harness: Harness) -> None:
    """Any zone will do, and the clock tells UTC."""
    target = (loom_harness.now + 10 * HOUR).astimezone(ZoneInfo("Asia/Kolkata"))
    loom_harness.advance(target)
    assert loom_harness.now == target
    assert loom_harness.now.utcoffset() == timedelta()


@pytest.mark.parametrize(
    "to",
    [
        timedelta(seconds=-1),
        datetime(2000, 1, 1, tzinfo=UTC),
        datetime(2100, 1, 1),  # naive
    ],
)
def test_the_clock_goes_forward_by_aware_times(loom_harness: Harness, to: Any) -> None:
    """Backwards and naive are refused, and the clock stays."""
    began = loom_harness.now
    with pytest.raises(InvalidInputError):
        loom_harness.advance(to)
    assert loom_harness.now == began


@override_settings(TIME_ZONE="Europe/Berlin")
def test_the_night_in_which_the_clocks_change(loom_harness: Harness) -> None:
    """Durations are real time: 24 hours over the end of summer time are 24 hours."""
    berlin = ZoneInfo("Europe/Berlin")
    evening = datetime(2099, 10, 24, 20, tzinfo=berlin)
    loom_harness.advance(evening)
    handle = sleeps.start("x", [24])
    loom_harness.advance(datetime(2099, 10, 25, 18, 59, tzinfo=berlin))
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(datetime(2099, 10, 25, 19, tzinfo=berlin))
    assert handle.result() == [(evening.astimezone(UTC) + 24 * HOUR).isoformat()]


def test_a_deadline_ends_an_execution(loom_harness: Harness) -> None:
    """At its time, and not before."""
    handle = with_deadline.start()
    loom_harness.advance(3 * HOUR - timedelta(microseconds=1))
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(timedelta(microseconds=1))
    assert loom_harness.events(handle.id)[-1] == "EXECUTION_FAILED"


def test_a_receive_times_out(loom_harness: Harness) -> None:
    """The time limit counts from each receive."""
    handle = parcels.using(execution_id="p1").start()
    loom_harness.advance(timedelta(days=13))
    loom.send("p1", "carrier", {"status": "sent"})
    loom_harness.advance(timedelta(days=13))
    assert handle.status == Status.SUSPENDED
    loom_harness.advance(timedelta(days=1))
    assert handle.result() == ["sent", "lost"]


def test_a_timer_that_nobody_here_serves_stops_no_other(loom_harness: Harness) -> None:
    """A row of a flow that is not registered is passed over."""

    @flow("kit-gone")
    def gone(ctx: FlowContext) -> None:
        ctx.sleep(HOUR)

    gone.start()
    handle = sleeps.start("x", [2])
    loom_harness.run()
    registry.forget("kit-gone")
    loom_harness.advance(3 * HOUR)
    assert handle.status == Status.COMPLETED
