"""The connection to PostgreSQL is cut around every append of a flow: one history, nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import pytest
from django.db import connection, transaction

from loom_django.kernel.state import Status
from tests.concurrency.proxy import Cut, Proxy, RoundTrip
from tests.crash.kit import Lab, check_history, eventually, kinds, only_postgresql, rows_of, standing, state

pytestmark = only_postgresql

HOWS = ["before", "after", "within", "blind"]
INLINE = {"DISPATCHER": "inline"}
# Start, three markers, a result at once, a marker, a transaction's, a park, an answer, a marker, the end.
LEAST_APPENDS = 9


@pytest.fixture
def proxy(lab: Lab) -> Iterator[Proxy]:
    settings = connection.settings_dict
    with Proxy(settings["HOST"], int(settings["PORT"])) as running:
        yield running


def lands(trip: RoundTrip) -> bool:
    """A statement whose answer says that something is durable."""
    return trip.appends or trip.commits


def play(lab: Lab, proxy: Proxy, id: str) -> None:
    """A flow with steps of each kind, a park, an answer and an end, in one process behind the proxy.

    None of its calls may fail: what they would report exists.
    """
    acts: list[Any] = [("start", ("played", id), {}), ("resume", (id, "Go", "gone"), {})]
    # However slow this machine is, outcomes are carried the same way, so that two runs take the same trips.
    child = lab.spawn_acts(acts, carry=3600.0, loom=INLINE, database=proxy.address)
    assert child.wait() == 0, child.log


def trips_of(lab: Lab, proxy: Proxy, at: Callable[[RoundTrip], bool]) -> int:
    """How many round trips of that sort the flow takes when nothing is cut."""
    proxy.trips.clear()
    play(lab, proxy, "uncut")
    return sum(1 for trip in proxy.trips if at(trip))


def check_ended(lab: Lab, id: str) -> None:
    """One history, each outcome once, no second effect of what must not run twice, rows exactly once."""
    check_history(id)
    assert state(id).status is Status.COMPLETED
    assert standing(id) == "finished"
    assert len(lab.effects(id, "transfer")) == 1
    assert rows_of(id) == 1
    assert state(id).result == state("uncut").result


@pytest.mark.parametrize("how", HOWS)
def test_a_cut_at_every_append(lab: Lab, proxy: Proxy, how: Any):
    """Before the server has it, after it has committed, within its answer, or while it is at work: no loss."""
    count = trips_of(lab, proxy, lands)
    assert count >= LEAST_APPENDS, [trip.text[:60] for trip in proxy.trips]
    for number in range(1, count + 1):
        id = f"cut-{number}"
        proxy.cut = Cut(number, how, lands)
        play(lab, proxy, id)
        assert proxy.cut.done
        check_ended(lab, id)
        again = sum(1 for one, other in zip_longest(kinds(id), kinds("uncut")) if one != other)
        # A transactional step whose commit did not take place has run again, in the log too.
        assert not again or kinds(id).count("STEP_STARTED") == kinds("uncut").count("STEP_STARTED") + 1


@pytest.mark.parametrize("how", ["after"])
def test_a_cut_at_every_round_trip(lab: Lab, proxy: Proxy, how: Any):
    """The same at whatever is sent, reads and set-up included."""
    count = trips_of(lab, proxy, lambda trip: True)
    ids = [f"cut-{number}" for number in range(1, count + 1)]
    for number, id in enumerate(ids, start=1):
        proxy.cut = Cut(number, how)
        play(lab, proxy, id)
        assert proxy.cut.done
    lab.run("heal")
    for id in ids:
        check_ended(lab, id)


@pytest.mark.parametrize("how", ["after"])
def test_a_cut_at_every_round_trip_of_a_worker(lab: Lab, proxy: Proxy, how: Any):
    """A worker that claims, runs and parks: what a lost answer hides is taken up when the lease is over."""
    argv = ("run_loom_worker", "--once", "--max-executions", "1", "--no-timers", "--no-recovery")
    lab.run("start", "played", "uncut")
    lab.run("command", *argv, database=proxy.address)
    count = len(proxy.trips)
    ids = [f"cut-{number}" for number in range(1, count + 1)]
    lab.run("start", "played", *ids)
    for number in range(1, count + 1):
        proxy.cut = Cut(number, how)
        # It tells of a failed service by its exit code, and of nothing else.
        assert lab.spawn("command", *argv, database=proxy.address).wait() in (0, 1)
    for id in ids:
        standing(id)
    lab.run("heal")
    for id in ids:
        check_ended(lab, id)


def test_an_append_that_is_sent_again_while_the_first_is_at_work(lab: Lab, proxy: Proxy):
    """The old backend may still commit: the second one waits for it, and finds that its own writer was first."""
    lab.run("start", "played", "x")
    lab.run("command", "run_loom_worker", "--once")
    proxy.cut = Cut(1, "blind", lands)
    with transaction.atomic():
        connection.cursor().execute("select 1 from loom_execution where id = 'x' for update")
        child = lab.spawn("resume", "x", "Go", "gone", database=proxy.address)
        eventually(lambda: waiting_for_locks() == 2, "the same append is under way twice")
    assert child.wait() == 0, child.log
    assert proxy.cut.done
    assert kinds("x").count("EXECUTION_RESUMED") == 1
    lab.run("command", "run_loom_worker", "--once")
    check_history("x")
    assert state("x").status is Status.COMPLETED


def waiting_for_locks() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select pg_stat_clear_snapshot()")  # else a transaction sees what it saw first
        cursor.execute(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        return int(cursor.fetchone()[0])
