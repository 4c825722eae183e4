"""What an execution and an answer ask of the database, counted: a regression is a number, not a slow day.

The work is that of ``benchmarks/``; what it takes in time is told there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import connection

from benchmarks import fences, wholes
from benchmarks.counts import Counts
from benchmarks.frame import Bench, Case, shape
from loom_django import FlowContext, StepContext, flow, tool
from loom_django.engine.core import NoKeeper
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService
from loom_django.stores import store_for
from loom_django.stores.memory import MemoryStore

pytestmark = pytest.mark.django_db(transaction=True)

CASES = {case.name: case for case in (*fences.CASES, *fences.FOR_SHARE)}

# Events and durable commits are the engine's affair, the same over every store.
SHAPES = {
    "execution, unfenced": (4, 3),  # start and marker; the step's result; the end
    "execution, fenced": (4, 4),  # and the acquire
    "park/resume, unfenced": (6, 5),  # as above, with the park and its answer
    "park/resume, acquire_fence": (6, 6),
    "park/resume, fence_if_parked_at": (6, 6),
    "resume alone, unfenced": (2, 2),  # the answer, the end
    "resume alone, acquire_fence": (2, 3),
    "resume alone, fence_if_parked_at": (2, 3),
}
# Statements, round trips, and bytes sent at most: ids, tokens and times differ by a few digits.
POSTGRESQL = {
    "execution, unfenced": (3, 3, 3_400),
    "execution, fenced": (4, 4, 3_500),
    "park/resume, unfenced": (7, 7, 5_600),  # the answer reads token and log: two
    "park/resume, acquire_fence": (8, 8, 5_700),
    "park/resume, fence_if_parked_at": (11, 8, 7_500),  # the acquire is four statements on one trip
    "resume alone, unfenced": (4, 4, 2_200),
    "resume alone, acquire_fence": (5, 5, 2_250),
    "resume alone, fence_if_parked_at": (8, 5, 4_050),
}
# Statements, transactions' begin and commit among them.
SQLITE = {
    "execution, unfenced": 16,
    "execution, fenced": 17,
    "park/resume, unfenced": 29,
    "park/resume, acquire_fence": 30,
    "park/resume, fence_if_parked_at": 34,
    "resume alone, unfenced": 13,
    "resume alone, acquire_fence": 14,
    "resume alone, fence_if_parked_at": 18,
}


def counted(case: Case, store: object) -> Counts:
    return shape(Bench(store, keeper=NoKeeper()), case)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_is_counted(name: str) -> None:
    """An execution of one step is four events in three commits; a token is one commit more."""
    counts = counted(CASES[name], MemoryStore())
    assert (counts.events, counts.commits) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_asked_of_the_database_is_counted(name: str) -> None:
    """Statements and round trips are these and no more; a conditional answer takes no more trips than a plain one
    that acquires."""
    counts = counted(CASES[name], store_for("default"))
    assert (counts.events, counts.commits) == SHAPES[name]
    if connection.vendor == "sqlite":
        assert counts.statements == SQLITE[name]
    else:
        statements, trips, most_bytes = POSTGRESQL[name]
        assert (counts.statements, counts.round_trips) == (statements, trips)
        assert most_bytes * 0.9 < counts.sent_bytes <= most_bytes


def test_a_fence_that_nobody_took_costs_nothing() -> None:
    """An execution that does not park leaves no fence row, and no statement of it asks for one to be written."""
    bench = Bench(store_for("default"), keeper=NoKeeper())
    key = fences.run_unfenced(bench, None)
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from loom_fence where execution_id = %s", [key])
        assert cursor.fetchone() == (0,)


MANY = 64
together = threading.Barrier(MANY)


@tool
def meet(ctx: StepContext) -> None:
    together.wait(timeout=60)


@flow("costs.meets", steps=[meet])
def meets(ctx: FlowContext) -> None:
    together.wait(timeout=60)
    ctx.run(meet)


def test_bodies_that_run_at_the_same_time_share_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of 64 bodies that all append at once: far fewer commits than appends, and no group is left."""
    store: Any = store_for("default")
    bench = Bench(store, keeper=NoKeeper())
    bench.loom.dispatcher = WorkerDispatcher()
    ids = [bench.loom.start(meets).id for _ in range(MANY)]
    sizes: list[int] = []
    land = store._land_group

    def counted(commits: Sequence[Any]) -> Any:
        sizes.append(len(commits))
        return land(commits)

    monkeypatch.setattr(store, "_land_group", counted)
    freed = threading.Semaphore(0)
    worker = WorkerService(bench.engine, concurrency=MANY, on_free=freed.release)
    while worker.claimed < MANY:
        worker.tick()
    for _ in range(MANY):
        assert freed.acquire(timeout=60)
    assert worker.drain(60)
    assert {store.status(key) for key in ids} == {Status.COMPLETED}
    assert (
        sum(sizes) >= 2 * MANY
    )  # the markers and the ends; outcomes go by themselves where a tool took its time
    assert len(sizes) <= MANY // 4
    assert store._group is None


@pytest.mark.parametrize("whole", wholes.WHOLES, ids=lambda whole: whole.name)
def test_each_benchmark_does_what_it_is_named_for(whole: wholes.Whole) -> None:
    """Two pieces of it, in memory: what was to end has ended, so no figure is of something that failed."""
    bench = Bench(MemoryStore(), keeper=NoKeeper())
    with wholes.recording(bench.store) as appends:
        prepared = whole.prepare(bench, 2)
        whole.work(bench, prepared, 2)
    statuses = {bench.store.status(key) for key in appends}
    unrun = ("start only", "recovered, handed on")
    expected = {Status.PENDING} if whole.name in unrun else {Status.COMPLETED}
    assert statuses == ({Status.SUSPENDED} if whole.reads else expected)
