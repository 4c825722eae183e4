"""Fence rows of parks that other hands wrote: made in batches, once, whatever kills the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from loom_django.models import Fence, Marker
from loom_django.runtime import loom
from loom_django.services import backfill
from loom_django.stores import store_for
from loom_django.stores.base import Acquired, Stale
from loom_django.testing import EventStoreConformance
from tests.stores import rivals

pytestmark = pytest.mark.django_db(transaction=True)

on_postgresql = pytest.mark.skipif("connection.vendor != 'postgresql'", reason="an index, and locks of rows")

# A run that is killed as it prints: behind the named batch, whose position is kept by then; or between the
# rows of a batch and its position.
KILLED = """
import os, signal, sys
import django; django.setup()
from django.core.management import call_command
from loom_django.runtime import loom

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Out:
    lines = 0
    def write(self, text):
        self.lines += 1
        if self.lines == 2:
            die()

if sys.argv[1] == "between":
    ensure = loom.store.ensure_park_fences
    def ensure_and_die(*, after, limit):
        batch = ensure(after=after, limit=limit)
        if after:
            die()
        return batch
    loom.store.ensure_park_fences = ensure_and_die
call_command("loom_backfill_park_fences", "--batch-size=2", stdout=Out())
"""


class Parks(EventStoreConformance):
    """The kit's helpers, without its cases."""

    __test__ = False

    def make_store(self) -> Any:
        return store_for("default")


@pytest.fixture
def parks() -> Iterator[Parks]:
    loom.reset()
    kit = Parks()
    kit.setup_method()
    yield kit
    loom.reset()


def lost(parks: Parks, count: int) -> list[str]:
    """The ids of so many parks whose fence rows are gone."""
    ids = [parks.parked().id for _ in range(count)]
    Fence.objects.all()._raw_delete("default")
    return ids


def fenced() -> list[str]:
    return sorted(Fence.objects.values_list("execution_id", flat=True))


def run(*args: str) -> str:
    out = StringIO()
    call_command("loom_backfill_park_fences", *args, stdout=out)
    return out.getvalue()


def run_json(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--format", "json", *args))
    return found


def indexes() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("select indexname from pg_indexes where indexname = 'loom_event_parks'")
        return [row[0] for row in cursor.fetchall()]


def test_each_unanswered_park_gets_its_row(parks: Parks) -> None:
    """By the log; what runs, has ended or was answered gets none; progress and the end are told."""
    parks.running()
    answered = parks.parked()
    parks.store.append(answered.answer())
    ids = lost(parks, 3)
    out = run("--batch-size", "2")
    assert fenced() == ids
    assert out.splitlines()[:2] == [
        f"1 parked, 1 rows made, up to {ids[0]}",
        f"3 parked, 3 rows made, up to {ids[2]}",
    ]
    assert "3 parked, 3 rows made; done at 20" in out


def test_what_the_projection_says_does_not_count(parks: Parks) -> None:
    """An imported row may say anything."""
    [parked] = lost(parks, 1)
    with connection.cursor() as cursor:
        cursor.execute("delete from loom_execution")
    run()
    assert fenced() == [parked]


def test_a_second_run_says_that_it_was_done_and_when(parks: Parks) -> None:
    """Nothing is walked over, unless --again says so."""
    lost(parks, 1)
    done = run_json()
    late = lost(parks, 1)
    at = Marker.objects.values_list("done_at", flat=True).get()
    assert at is not None
    assert run() == f"this was done at {at.isoformat()}; --again does it anew\n"
    again = run_json()
    assert again == {**done, "begun_after": done["position"], "parked": 0, "made": 0, "done_before": True}
    assert fenced() == []
    anew = run_json("--again")
    assert (anew["made"], anew["begun_after"], anew["done_before"]) == (2, "", False)
    assert late[0] in fenced()


def test_nothing_to_do_is_done(parks: Parks) -> None:
    """A database without logs is marked as well."""
    assert "0 parked, 0 rows made; done at" in run()
    assert Marker.objects.get(pk=backfill.PARK_FENCES).done_at is not None


def test_misuse_is_told(parks: Parks) -> None:
    """A batch of none is refused, and nothing is marked."""
    with pytest.raises(CommandError, match="is not an int above 0"):
        run("--batch-size", "0")
    assert not Marker.objects.exists()


@pytest.mark.parametrize(
    ("where", "kept", "rows"),
    [
        ("behind", 4, 4),  # after the second batch and its position
        ("between", 2, 4),  # after the second batch's rows, before its position
    ],
)
def test_a_killed_run_goes_on_where_it_was(
    parks: Parks, child_env: Callable[..., dict[str, str]], where: str, kept: int, rows: int
) -> None:
    """SIGKILL in the middle: what was done stays, the position is known, the next run does the rest."""
    ids = lost(parks, 5)
    killed = subprocess.run([sys.executable, "-c", KILLED, where], env=child_env(), timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert fenced() == ids[:rows]
    marker = Marker.objects.get()
    assert (marker.position, marker.done_at) == (ids[kept - 1], None)
    if connection.vendor == "postgresql":
        assert indexes()
    done = run_json()
    assert (done["begun_after"], done["parked"], done["made"]) == (ids[kept - 1], 5 - kept, 5 - rows)
    assert fenced() == ids
    if connection.vendor == "postgresql":
        assert not indexes()


@on_postgresql
def test_a_broken_index_is_taken_off(parks: Parks) -> None:
    """A build that failed leaves an INVALID index, which no query uses and each append pays for."""
    lost(parks, 2)
    with rivals.connect(autocommit=True) as rival, pytest.raises(Exception, match="could not create unique"):
        rival.execute("create unique index concurrently loom_event_parks on loom_event ((1))")
    assert indexes()
    assert run_json()["made"] == 2
    assert not indexes()


@on_postgresql
def test_a_failed_run_takes_its_index_off(parks: Parks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the walk, the index goes; the position stays."""

    def fail(**_: Any) -> None:
        assert indexes()
        raise RuntimeError("the disk")

    monkeypatch.setattr(loom.store, "ensure_park_fences", fail)
    with pytest.raises(RuntimeError, match="the disk"):
        run()
    assert not indexes()


@on_postgresql
def test_an_index_that_a_killed_run_is_still_building_is_waited_for(
    parks: Parks, child_env: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server builds on without its client, and appends go on meanwhile."""
    lost(parks, 2)
    with rivals.holding("update loom_event set writer = writer") as rival:
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, "behind"], env=child_env(), stderr=subprocess.DEVNULL
        )
        rivals.wait_until_blocked()
        child.kill()
        child.wait(60)
        parks.parked()  # nobody waits for the index
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            rival.rollback()

        monkeypatch.setattr(loom.store, "sleep", pause)
        assert run_json()["made"] == 2
    assert pauses
    assert not indexes()


LOGS = """
    insert into loom_event (execution_id, sequence, kind, payload, writer, is_kernel)
    select 'many-' || lpad(e::text, 6, '0'), s,
        case when s = 1 then 'EXECUTION_STARTED' when s = 6 and e % 10 = 0 then 'EXECUTION_SUSPENDED'
        else 'STEP_STARTED' end, '{}', 0, true
    from generate_series(1, 5000) e, generate_series(1, 6) s
"""


@on_postgresql
def test_the_walk_reads_the_index_and_not_the_log(parks: Parks) -> None:
    """Of 30 000 events 500 are parks, and each step from one to the next is a probe of their index."""
    store = store_for("default")
    sql = store.statements["parked_after"].sql % {"after": "''", "limit": "100"}  # type: ignore[attr-defined]
    with connection.cursor() as cursor:
        cursor.execute(LOGS)
        cursor.execute("analyze loom_event")
        with store.walking_parks():
            cursor.execute(f"explain (analyze, buffers, timing off, format json) {sql}")
            [[[plan]]] = cursor.fetchall()
    text = json.dumps(plan)
    assert text.count('"Index Name": "loom_event_parks"') == 2
    assert "Seq Scan" not in text
    assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 100 * 12


def _answer_and_acquire(parks: Parks, log: Any) -> Acquired | Stale:
    """An answer that is not committed yet when somebody acquires the fence; what becomes of the latter."""
    with transaction.atomic():
        parks.store.append(log.answer())
        has_row = Fence.objects.filter(pk=log.id).exists()  # asked first: the acquire makes one
        acquiring = rivals.InThread(
            lambda: store_for("default").acquire_fence_if(log.id, fence=0, park_seq=2)
        )
        if has_row:
            rivals.wait_until_blocked()
        else:
            acquiring.join()
    return acquiring.join()


@on_postgresql
def test_the_race_is_closed(parks: Parks) -> None:
    """Without the row both the answer and the acquire succeed, and the body is fenced out; with it one does."""
    log, other = parks.parked(), parks.parked()
    Fence.objects.all()._raw_delete("default")
    assert _answer_and_acquire(parks, log) == Acquired(1, 2)  # what the backfill is for
    run()
    assert _answer_and_acquire(parks, other) == Stale(0)
