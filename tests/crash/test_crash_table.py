"""The table of docs/explanation/promises.md, cell by cell: a process is killed, and what is there afterwards."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from loom_django.engine.steps import CARRY_LIMIT
from loom_django.models import Execution
from tests.crash.acts import TASK_WORKER
from tests.crash.kit import KILLED, Lab, kinds, rows_of

Rows = list[dict[str, str]]
TABLE = Path(__file__).parents[2] / "docs" / "explanation" / "crash_table.csv"
POINTS = ("before-start", "before-effect", "in-effect", "after-effect", "after-outcome")
KINDS = ("idempotent", "not-idempotent", "undeclared", "transactional")
# A tool that takes this long has its outcome made durable at once, so that "after-outcome" is a point of its own.
SLOW = CARRY_LIMIT + 0.005
RUNS_ONE = {
    "worker": ("run_loom_worker", "--once", "--no-recovery", "--max-executions", "1"),
    "tasks": (*TASK_WORKER, "--max-tasks", "1"),
}
RUNS_ALL = {"worker": ("run_loom_worker", "--once"), "tasks": TASK_WORKER}
SHORT_LEASE = {"LEASE_TTL": 0.5, "LEASE_RENEW_INTERVAL": 0.1, "POLL_INTERVAL": 0.05}


def published() -> Rows:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def execution_id(point: str, kind: str) -> str:
    return f"{kind}-killed-{point}"


def crash_every_cell(lab: Lab, loom: dict[str, Any], prefix: str) -> None:
    """One execution for each cell, each in a process of its own that dies at its point."""
    for point in POINTS:
        for kind in KINDS:
            id = execution_id(point, kind)
            points = [(point, "pay", 1, "die")]
            if loom["DISPATCHER"] == "inline":
                child = lab.spawn("start", f"{prefix}-{kind}", id, args=[SLOW], loom=loom, points=points)
            else:
                lab.run("start", f"{prefix}-{kind}", id, args=[SLOW], loom=loom)
                argv = RUNS_ONE[loom["DISPATCHER"]]
                child = lab.spawn("command", *argv, loom=loom, points=points)
            assert child.wait() == KILLED, child.log


def recover(lab: Lab, loom: dict[str, Any], *, fresh: bool) -> None:
    """What a site runs after a crash, each in a process of its own."""
    lab.run("command", "loom_recover", "--limit", "100", loom=loom, fresh=fresh)
    if loom["DISPATCHER"] in RUNS_ALL:
        lab.run("command", *RUNS_ALL[loom["DISPATCHER"]], loom=loom, fresh=fresh)


def seen(lab: Lab, points: Sequence[str] = POINTS, called: Callable[[str, str], str] = execution_id) -> Rows:
    """The table as it came out."""
    rows = []
    for point in points:
        for kind in KINDS:
            id = called(point, kind)
            effects = lab.effects(id)
            rows.append(
                {
                    "point": point,
                    "kind": kind,
                    "effect_runs": str(len(effects)),
                    "log_after_recovery": " ".join(kinds(id)),
                    "keys_seen": " ".join(sorted({line["key"] for line in effects}))
                    .replace(id, "{execution_id}")
                    .replace(":pay", ":{step_id}"),
                    "rows_left": str(rows_of(id)) if kind == "transactional" else "",
                }
            )
    return rows


@pytest.mark.parametrize("dispatcher", ["inline", "worker", "tasks"])
@pytest.mark.parametrize("prefix", ["one", "async"])
def test_the_published_table_is_what_happens(lab: Lab, dispatcher: str, prefix: str):
    """Each cell of the table in the docs: effects, log, keys and rows after a kill at that point and recovery."""
    loom = {**SHORT_LEASE, "DISPATCHER": dispatcher}
    crash_every_cell(lab, loom, prefix)
    lab.await_expiry(leases=len(POINTS) * len(KINDS))
    recover(lab, loom, fresh=prefix == "one")
    assert seen(lab) == published()


@pytest.mark.parametrize("prefix", ["one", "async"])
def test_a_start_that_lands_with_its_first_marker_is_there_from_that_on(lab: Lab, prefix: str):
    """Inline and without an id of its own: a process killed before the marker leaves nothing, and has done nothing; what one
    that is killed later leaves is the published table."""
    loom = {**SHORT_LEASE, "DISPATCHER": "inline"}
    ids: dict[tuple[str, str], str] = {}
    for point in POINTS:
        for kind in KINDS:
            points = [(point, "pay", 1, "die")]
            child = lab.spawn("start", f"{prefix}-{kind}", None, args=[SLOW], loom=loom, points=points)
            assert child.wait() == KILLED, child.log
            new = Execution.objects.exclude(pk__in=ids.values()).values_list("pk", flat=True)
            assert len(new) == (0 if point == "before-start" else 1)
            for id in new:
                ids[point, kind] = id
    lab.await_expiry(leases=len(ids))
    recover(lab, loom, fresh=prefix == "one")
    found = seen(lab, POINTS[1:], lambda point, kind: ids[point, kind])
    assert found == [row for row in published() if row["point"] != "before-start"]
    assert Execution.objects.count() == len(ids)
