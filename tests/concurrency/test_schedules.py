"""Many nodes and one schedule: clocks that disagree, deaths in the middle, a database that goes away."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from loom_django.models import Execution, ScheduleState
from loom_django.runtime import loom
from loom_django.services.schedules import execution_id_of
from tests.concurrency.test_database_faults import cut_all_connections
from tests.crash.kit import (
    KILLED,
    Child,
    Lab,
    check_history,
    eventually,
    finished,
    lines_with,
    only_postgresql,
)

START = datetime(2026, 6, 1, 3, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def every(seconds: int, *, of: int, begin: datetime = START - 30 * SECOND) -> list[str]:
    return [(begin + number * seconds * SECOND).isoformat() for number in range(of)]


def occurrences() -> list[datetime]:
    """The occurrences that were started, in order; asserts that each one has its id."""
    found = list(Execution.objects.order_by("scheduled_at").values_list("pk", "scheduled_at"))
    assert [pk for pk, _ in found] == [execution_id_of("s", at) for _, at in found]
    return [at for _, at in found]


def complaints(child: Child) -> list[str]:
    return [
        *lines_with(child.log, "WARNING "),
        *lines_with(child.log, "ERROR "),
        *lines_with(child.log, "Traceback"),
    ]


@pytest.mark.parametrize("isolation", [None, pytest.param(3, marks=only_postgresql, id="repeatable-read")])
def test_four_nodes_with_clocks_that_disagree(lab: Lab, isolation: int | None):
    """They look every 15 seconds, at the same moment, one of them 900 ms ahead: one execution per occurrence.

    The losers write no line beyond debug, and each of them goes on to win or lose the next one; also where a project
    has a stricter isolation, under which the database breaks the loser's transaction off.
    """
    database = {} if isolation is None else {"OPTIONS": {"isolation_level": isolation}}
    looks = every(15, of=14)
    nodes = [
        lab.spawn_acts(
            [
                ("declare_schedule", ["* * * * *"], {}),
                ("look_at_schedules", [looks], {"skew": skew, "folder": str(lab.folder), "nodes": 4}),
            ],
            database=database,
        )
        for skew in (0.0, 0.9, 0.0, -0.2)
    ]
    assert [node.wait() for node in nodes] == [0] * 4, [node.log for node in nodes]

    assert occurrences() == [START + number * MINUTE for number in range(3)]
    assert sum(node.value for node in nodes) == 3
    assert [complaints(node) for node in nodes] == [[]] * 4
    for execution_id in Execution.objects.values_list("pk", flat=True):
        check_history(execution_id)
    assert ScheduleState.objects.get().decided_until == START + 2 * MINUTE


def test_of_overlapping_runs_eight_nodes_start_one(lab: Lab):
    """All judge the overlap of one occurrence at the same moment; what was started is skipped by none."""
    looks = every(30, of=8)
    acts: list[Any] = [
        ("declare_schedule", ["* * * * *"], {"overlap": "skip"}),
        ("look_at_schedules", [looks], {"folder": str(lab.folder), "nodes": 8}),
    ]
    nodes = [lab.spawn_acts(acts) for _ in range(8)]
    assert [node.wait() for node in nodes] == [0] * 8, [node.log for node in nodes]

    # Nobody runs bodies here, so the first run never ends.
    assert occurrences() == [START]
    skipped = [line for node in nodes for line in lines_with(node.log, "skipped 1 (overlap)")]
    assert len(skipped) == 3
    assert ScheduleState.objects.get().skipped_at == START + 3 * MINUTE


def test_a_node_that_dies_in_the_middle_has_decided_nothing(lab: Lab):
    """Killed between the move of the mark and the start: the next node does both, once."""
    looks = every(31, of=2)
    acts: list[Any] = [("declare_schedule", ["* * * * *"], {}), ("look_at_schedules", [looks], {})]
    node = lab.spawn_acts(acts, points=[("append", "EXECUTION_STARTED", 1, "die")])
    assert node.wait() == KILLED
    assert ScheduleState.objects.get().decided_until < START
    assert occurrences() == []

    for _ in range(2):
        assert lab.spawn_acts(acts).wait() == 0
    assert occurrences() == [START]


@pytest.mark.parametrize(
    ("time_zone", "process"), [("Asia/Shanghai", "UTC"), ("America/Bogota", "Pacific/Apia")]
)
def test_occurrences_are_the_same_in_every_zone(lab: Lab, time_zone: str, process: str):
    """The zone of the project and that of the process are no schedule's."""
    env = {"LOOM_TEST_TIME_ZONE": time_zone, "TZ": process}
    acts: list[Any] = [("declare_schedule", ["* * * * *"], {}), ("look_at_schedules", [every(30, of=7)], {})]
    node = lab.spawn_acts(acts, env=env, fresh=True)
    assert node.wait() == 0, node.log
    assert occurrences() == [START + number * MINUTE for number in range(3)]


@pytest.mark.parametrize("command", ["run_loom_worker", "run_loom_timers"])
def test_the_commands_carry_schedules(lab: Lab, command: str):
    """Worker and timer loop start what is due; with --no-schedules they leave it to others."""
    declared: Any = ("declare_schedule", ["* * * * *"], {})
    begin, due = START - 30 * SECOND, START + 5 * SECOND
    lab.spawn_acts([declared, ("look_at_schedules", [[begin.isoformat()]], {})]).wait()
    shift = (due - datetime.now(UTC)).total_seconds()
    for options, expected in ((["--no-schedules"], []), ([], [START])):
        child = lab.spawn_acts([declared, ("command", [command, "--once", *options], {})], shift=shift)
        assert child.wait() == 0, child.log
        assert occurrences() == expected


@only_postgresql
def test_a_loop_whose_connections_are_cut_starts_the_next_occurrence(lab: Lab):
    """The network fails for a moment under a running service; it comes back by itself, and loses nothing."""
    declared: Any = ("declare_schedule", ["* * * * *"], {})
    now = datetime.now(UTC)
    # The next occurrence is three seconds ahead of the clock that these processes see.
    shift = (START - 3 * SECOND - now).total_seconds()
    lab.spawn_acts([declared, ("look_at_schedules", [[(START - 20 * SECOND).isoformat()]], {})]).wait()
    worker = lab.spawn_acts([declared, ("command", ["run_loom_worker"], {})], shift=shift)
    eventually(lambda: _looked(), "the worker has looked")
    assert eventually(cut_all_connections, "there was a connection to cut")

    eventually(lambda: Execution.objects.exists(), "the occurrence is started")
    (execution_id,) = Execution.objects.values_list("pk", flat=True)
    eventually(lambda: finished(execution_id), "and run")
    assert occurrences() == [START]
    assert not worker.over
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert loom.store.schedule_row("s") is not None


def _looked() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "select count(*) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and state = 'idle'"
        )
        return bool(cursor.fetchone()[0])
