"""What a run costs: one append per boundary, one statement and one round trip each, and no ORM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.backends.utils import CursorWrapper
from django.db.models.sql.compiler import SQLCompiler

from loom_django.engine import steps
from loom_django.models import Execution
from loom_django.runtime import loom
from tests.concurrency.proxy import Proxy, RoundTrip
from tests.crash import flows
from tests.crash.kit import Lab, check_history, kinds, on_postgresql, only_postgresql

STEPS = 20
INLINE = {"DISPATCHER": "inline"}
# However busy the machine, no tool of these tests counts as slow.
QUICK: dict[str, Any] = {"carry": 3600.0, "loom": INLINE}


@pytest.fixture
def proxy(lab: Lab) -> Iterator[Proxy]:
    settings = connection.settings_dict
    with Proxy(settings["HOST"], int(settings["PORT"])) as running:
        yield running


def appends(statements: list[str]) -> int:
    """How many appends there are among statements: on SQLite each is a transaction of its own."""
    word = "insert into loom_event" if on_postgresql() else "begin immediate"
    return sum(1 for statement in statements if word in statement.lower())


def test_a_straight_run_of_n_quick_steps_makes_n_plus_1_appends(lab: Lab):
    """N boundaries, of which the first takes the start along, and the end."""
    statements = lab.run(
        "count_statements", "start", "idle", None, args=[STEPS], statement=("never", 0), **QUICK
    )
    assert appends(statements) == STEPS + 1, statements
    (execution,) = Execution.objects.all()
    assert kinds(execution.pk).count("STEP_COMPLETED") == STEPS
    check_history(execution.pk)


def test_a_replay_makes_no_append(lab: Lab):
    """A resume reads the log once; the steps that it holds cost nothing."""
    lab.run("start", "idle-then-wait", "x", args=[STEPS], **QUICK)
    statements = lab.run("count_statements", "resume", "x", "Go", statement=("never", 0), **QUICK)
    assert appends(statements) == 2, statements  # the answer, and the end
    reads = [statement for statement in statements if "order by e.sequence" in statement]
    assert len(reads) == 1, reads


@only_postgresql
def test_each_append_is_one_statement_one_round_trip_and_prepared(lab: Lab, proxy: Proxy):
    """Seen on the wire: between the first append and the last there is nothing but appends."""
    lab.run("start", "idle", None, args=[STEPS], database=proxy.address, **QUICK)
    which = [number for number, trip in enumerate(proxy.trips) if trip.appends]
    assert len(which) == STEPS + 1
    run = proxy.trips[which[0] : which[-1] + 1]
    sent = [trip for trip in run if trip.texts]
    assert [trip.text[:80] for trip in sent if not trip.appends] == []
    assert {len(trip.texts) for trip in sent} == {1}
    assert proxy.connections == 1
    # Prepared once each: the forms of a start with its boundary, of a boundary and of an end.
    assert len(run) - len(sent) <= len({trip.text for trip in sent}) <= 3
    assert sum(trip.parsed for trip in proxy.trips if trip.appends) == 0


@only_postgresql
def test_what_each_kind_of_step_costs(lab: Lab, proxy: Proxy):
    """A marker each, with the outcome before it; at once what must not run twice; a transaction's own."""
    lab.run("start", "played", None, database=proxy.address, **QUICK)
    landed = [trip for trip in proxy.trips if trip.appends]
    # Quick, with the start; charge; transfer and its outcome; book and its transaction; the park.
    assert len(landed) == 1 + 1 + 2 + 2 + 1
    assert sum(trip.commits for trip in proxy.trips) == 1
    assert [trip.text for trip in proxy.trips if _begins(trip)] == ["BEGIN"]


def _begins(trip: RoundTrip) -> bool:
    return trip.text.upper().startswith("BEGIN")


@pytest.mark.django_db(transaction=True)
def test_no_orm_query_in_the_hot_path(monkeypatch: pytest.MonkeyPatch):
    """A start, its run and its end send nothing through the ORM, nor through Django's cursors."""
    seen: list[Any] = []

    def record(name: str, original: Any) -> Any:
        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((name, str(args[0])[:200] if args else ""))
            return original(self, *args, **kwargs)

        return recorded

    connection.ensure_connection()
    monkeypatch.setattr(steps, "CARRY_LIMIT", 3600.0)
    monkeypatch.setattr(SQLCompiler, "execute_sql", record("ORM", SQLCompiler.execute_sql))
    monkeypatch.setattr(CursorWrapper, "execute", record("cursor", CursorWrapper.execute))
    handle = flows.idle_then_wait.start(STEPS)
    loom.resume(handle.id, event_type="Go")
    assert handle.refresh().status == "COMPLETED"
    assert seen == []
