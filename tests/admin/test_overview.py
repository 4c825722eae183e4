"""The overview says what is wrong, what waits and who is at work; it counts no table."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from loom_django.admin import overview
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, in_doubt, make_user, url
from tests.admin.test_lists import LOGGED_IN, statements

pytestmark = pytest.mark.django_db(transaction=True)


def a_loop_was_seen() -> None:
    loom.engine.store.beat("node-7", "worker")


def stored(moment: datetime) -> Any:
    return connection.ops.adapt_datetimefield_value(moment)


def put(table: str, **columns: Any) -> None:
    """Write columns behind the store's back; a number of seconds is so long ago."""
    now = loom.engine.store.now()
    given = {
        name: stored(now - timedelta(seconds=value)) if isinstance(value, int) else value
        for name, value in columns.items()
    }
    with connection.cursor() as cursor:
        names = ", ".join(f"{name} = %s" for name in given)
        cursor.execute(f"update {table} set {names}", list(given.values()))


LEFT = {"status": "RUNNING", "waits": "[]", "waiting_on": ""}


def page(client) -> str:
    response = client.get(url("overview"))
    assert response.status_code == 200
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode()))


def test_all_is_well(console):
    """A loop is alive, nothing is late: no banner."""
    a_loop_was_seen()
    assert overview.banners() == []
    text = page(console)
    assert "Nothing is wrong that can be seen from here." in text
    assert "node-7 worker" in text
    assert "silent" not in text


def test_a_process_that_is_not_seen_any_more_is_not_counted_on(console):
    """It is told for a day, and marked, beside those that are at work."""
    loom.engine.store.beat("old", "worker")
    put("loom_node", seen_at=600)
    a_loop_was_seen()
    text = page(console)
    assert "10 min ago silent" in text
    assert text.count("silent") == 1


def test_without_a_loop_what_sleeps_is_not_woken(console):
    """Never seen, or not for long: both are told, with the way out."""
    assert "No worker and no timer loop was ever seen" in page(console)
    a_loop_was_seen()
    put("loom_node", seen_at=600)
    text = page(console)
    assert "No worker and no timer loop has been seen for 10 min" in text
    assert "Start manage.py run_loom_worker, or run_loom_timers." in text


@pytest.mark.parametrize(
    ("table", "columns", "told"),
    [
        ("loom_timer", {"wake_at": 60}, "1 timer is overdue by more than READY_GRACE."),
        ("loom_timer", {"wake_at": 10}, None),
        ("loom_timer", {"wake_at": 60, "not_before": -60}, None),
        ("loom_timer", {"wake_at": 60, "held_until": -5}, None),
        ("loom_timer", {"wake_at": 60, "held_until": 45}, "1 timer is overdue by more than READY_GRACE."),
        (
            "loom_execution",
            {**LEFT, "ready_at": 60},
            "1 execution has been ready for longer than READY_GRACE.",
        ),
        ("loom_execution", {**LEFT, "ready_at": 10}, None),
        (
            "loom_execution",
            {**LEFT, "lease_owner": "gone", "lease_token": "7", "lease_until": 1},
            "1 lease has ended under its holder.",
        ),
    ],
)
def test_what_nobody_looks_after_is_told(console, table, columns, told):
    """Overdue timers, ended leases, what is ready for too long; a little late, put off, or in hand, is no banner."""
    a_loop_was_seen()
    flows.nap.using(execution_id="nap").start()
    put(table, **columns)
    assert [str(banner.text) for banner in overview.banners()] == ([told] if told else [])


def test_what_waits_for_a_person_is_counted(console):
    """Doubts, gates and failures, each with the list that shows them."""
    in_doubt("doubt")
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="bug").start()
    flows.broken.using(execution_id="broken").start("x")
    flows.nap.using(execution_id="nap").start()
    found = {str(tally.label): tally.count for tally in overview.tallies()}
    assert found == {
        "effects in doubt": 1,
        "stopped by an error or by their code": 1,
        "failed within a day": 1,
        "ready": 0,
        "held under a lease": 0,
        "parked": 3,
        "schedules that are paused": 0,
    }


def test_a_pending_migration_is_all_that_is_told(console):
    """The other looks may ask for columns that are not there yet."""
    newest = "0007_gates"
    MigrationRecorder.Migration.objects.filter(app="loom", name=newest).delete()
    try:
        seen = overview.look()
    finally:
        MigrationRecorder(connection).record_applied("loom", newest)
    assert [str(banner.text) for banner in seen.banners] == [f"Migrations of loom are pending: {newest}."]
    assert not seen.tallies


def test_links_lead_to_what_this_person_may_see(db):
    """A person without permission for timers and leases is told of them, without a link."""
    flows.nap.using(execution_id="nap").start()
    put("loom_timer", wake_at=60)
    a_loop_was_seen()
    guest = client_of(make_user("guest", "view_execution")).get(url("overview")).content.decode()
    keeper = (
        client_of(make_user("keeper", "view_execution", "view_timer")).get(url("overview")).content.decode()
    )
    address = f'href="{url("timer_changelist", due="overdue")}"'
    assert (address in guest, address in keeper) == (False, True)


def test_nobody_looks_without_permission(db):
    """The overview is the executions'."""
    assert client_of(make_user("stranger", "view_timer")).get(url("overview")).status_code == 403


def test_the_overview_counts_no_table_and_costs_the_same_for_many(console):
    """Bounded looks by an index, whatever lies there."""
    in_doubt("doubt-1")
    first = statements(console, url("overview"))
    for number in range(5):
        in_doubt(f"doubt-{number + 2}")
    again = statements(console, url("overview"))
    assert len(first) == len(again)
    own = [sql for sql in again if '"loom_' in sql]
    assert all("COUNT(" not in sql.upper() and " LIMIT " in sql for sql in own)
    assert len(again) > LOGGED_IN


def test_the_home_of_the_app_says_what_is_wrong(console):
    """An operator who opens the app sees it without looking for it."""
    home = console.get("/admin/loom/").content.decode()
    assert "No worker and no timer loop was ever seen" in home
    assert url("overview") in home
