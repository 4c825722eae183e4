"""What an execution and an answer ask of the database, counted: a regression is a number, not a slow day.

The work is that of ``benchmarks/``; what it takes in time is told there.
"""

from __future__ import annotations

import asyncio
import cProfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from django.db import connection

from benchmarks import columns, fences, wholes
from benchmarks.counts import Counts, count
from benchmarks.frame import Bench, Case, shape
from loom_django import AsyncFlowContext, FlowContext, Handle, StepContext, flow, tool
from loom_django.engine import steps as engine_steps
from loom_django.engine.core import NoKeeper, random_token
from loom_django.engine.run import run_execution
from loom_django.engine.threads import Threads
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService
from loom_django.stores import store_for
from loom_django.stores.memory import MemoryStore
from tests.pipes import watch_pipes

pytestmark = pytest.mark.django_db(transaction=True)

CASES = {case.name: case for case in (*columns.CASES, *fences.FOR_SHARE)}

# Events and durable commits are the engine's affair, the same over every store.
SHAPES = {
    "execution, unfenced": (4, 2),  # the start with the marker; the step's result with the end
    "execution, fenced": (4, 4),  # started by itself, and acquired
    "park/resume, unfenced": (6, 4),  # as above, with the park and its answer
    "park/resume, acquire_fence": (6, 5),
    "park/resume, fence_if_parked_at": (6, 4),  # the answer takes the token with it
    "resume alone, unfenced": (2, 2),  # the answer, the end
    "resume alone, acquire_fence": (2, 3),
    "resume alone, fence_if_parked_at": (2, 2),
    "execution, 5 steps": (12, 6),  # two events and a commit more for each step
    "execution, 20 steps": (42, 21),
    "execution, 100 steps": (202, 101),
    "execution, a transactional step": (4, 3),  # the marker goes ahead of the transaction
}
# Statements, round trips, and bytes sent at most: ids, tokens and times differ by a few digits.
POSTGRESQL = {
    "execution, unfenced": (2, 2, 2_800),
    "execution, fenced": (4, 4, 3_500),
    "park/resume, unfenced": (5, 5, 5_000),  # the answer reads token and log, in one
    "park/resume, acquire_fence": (6, 6, 5_050),
    "park/resume, fence_if_parked_at": (5, 5, 5_000),
    "resume alone, unfenced": (3, 3, 2_100),
    "resume alone, acquire_fence": (4, 4, 2_170),
    "resume alone, fence_if_parked_at": (3, 3, 2_100),
    "execution, 5 steps": (6, 6, 7_850),
    "execution, 20 steps": (21, 21, 26_500),
    "execution, 100 steps": (101, 101, 126_500),
    "execution, a transactional step": (5, 5, 3_400),
}
# Statements, transactions' begin and commit among them.
SQLITE = {
    "execution, unfenced": 9,
    "execution, fenced": 14,
    "park/resume, unfenced": 19,
    "park/resume, acquire_fence": 20,
    "park/resume, fence_if_parked_at": 20,
    "resume alone, unfenced": 10,
    "resume alone, acquire_fence": 11,
    "resume alone, fence_if_parked_at": 11,
    "execution, 5 steps": 25,
    "execution, 20 steps": 85,
    "execution, 100 steps": 405,
    "execution, a transactional step": 13,
}
# Bytes of those statements with their values, at most.
SQLITE_BYTES = {
    "execution, unfenced": 3_500,
    "execution, fenced": 4_700,
    "park/resume, unfenced": 6_950,
    "park/resume, acquire_fence": 7_150,
    "park/resume, fence_if_parked_at": 7_150,
    "resume alone, unfenced": 3_350,
    "resume alone, acquire_fence": 3_550,
    "resume alone, fence_if_parked_at": 3_550,
    "execution, 5 steps": 9_400,
    "execution, 20 steps": 31_500,
    "execution, 100 steps": 149_500,
    "execution, a transactional step": 4_350,
}


FEW = 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool is slow: on a busy machine one that takes long has its outcome written by itself."""
    monkeypatch.setattr(engine_steps, "CARRY_LIMIT", 3600.0)


def counted(case: Case, store: object) -> Counts:
    return shape(Bench(store, keeper=NoKeeper()), case)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_is_counted(name: str) -> None:
    """An execution of one step is four events in two commits; a token is one commit more."""
    counts = counted(CASES[name], MemoryStore())
    assert (counts.events, counts.commits) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_asked_of_the_database_is_counted(name: str) -> None:
    """Statements and round trips are these and no more; a conditional answer takes as many as one without a token."""
    counts = counted(CASES[name], store_for("default"))
    assert (counts.events, counts.commits) == SHAPES[name]
    if connection.vendor == "sqlite":
        assert counts.statements == SQLITE[name]
        assert counts.sent_bytes <= SQLITE_BYTES[name]
    else:
        statements, trips, most_bytes = POSTGRESQL[name]
        assert (counts.statements, counts.round_trips) == (statements, trips)
        assert most_bytes * 0.9 < counts.sent_bytes <= most_bytes


# Calls of functions, of Python and of C, at most: some ten percent more than there are.
CALLS: Final = 860
CALLS_A_STEP: Final = 340
CALLS_A_SERVED_STEP: Final = 74


def calls_of(work: Callable[..., object], *args: Any) -> int:
    """How many functions are called once whatever is kept has been made."""
    work(*args)
    profile = cProfile.Profile()
    profile.runcall(work, *args)
    return sum(entry.callcount for entry in profile.getstats())


def test_the_calls_of_an_execution_are_counted() -> None:
    """What the engine itself does for an execution, for each further step, and for each step that a log answers, is
    bounded; the store is in memory, so that it is no driver's."""
    bench = Bench(MemoryStore(), keeper=NoKeeper())

    def run(steps: int) -> None:
        bench.loom.start(wholes.steps, args=(fences.ORDER, steps))

    def replay(handle: Handle[Any]) -> None:
        bench.loom.resume(handle.id, event_type="Again", payload=True)

    one, many = calls_of(run, 1), calls_of(run, 21)
    assert one <= CALLS
    assert (many - one) / 20 <= CALLS_A_STEP
    short, long = (bench.loom.start(wholes.long, args=(fences.ORDER, steps)) for steps in (20, 120))
    assert (calls_of(replay, long) - calls_of(replay, short)) / 100 <= CALLS_A_SERVED_STEP


def test_what_a_worker_asks_of_the_store_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of one body, handed one execution after the other: a claim, a read of its log, and two commits each."""
    store: Any = store_for("default")
    bench = Bench(store, keeper=NoKeeper())
    ids = wholes.ready(bench, fences.one_step, FEW, fences.ORDER)
    calls: list[str] = []
    for name in ("append", "claim_ready", "read_short", "load", "status", "acquire_fence"):
        setattr(store, name, _noting(calls, name, getattr(store, name)))
    freed = threading.Semaphore(0)
    for rest in ("REST", "REST_AT_MOST"):
        monkeypatch.setattr(f"loom_django.services.worker.{rest}", 1e9)
    worker = WorkerService(bench.engine, concurrency=1, on_free=freed.release)
    for _ in ids:
        worker.tick()
        assert freed.acquire(timeout=60)
    assert worker.drain(60)
    # Async flows are looked for by themselves once, while a plain body runs and there is room for them alone.
    assert Counter(calls) == {"claim_ready": FEW + 1, "read_short": FEW, "append": 2 * FEW}


def _noting(calls: list[str], name: str, call: Any) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return call(*args, **kwargs)

    return noting


def test_a_fence_that_nobody_took_costs_nothing() -> None:
    """An execution that does not park leaves no fence row, and no statement of it asks for one to be written."""
    bench = Bench(store_for("default"), keeper=NoKeeper())
    key = fences.run_unfenced(bench, None)
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from loom_fence where execution_id = %s", [key])
        assert cursor.fetchone() == (0,)


# Statements of one child more: of its start in its parent's body, and of its run up to the look at its parent.
CHILD = {"postgresql": (1, 6), "sqlite": (7, 15)}


def test_a_child_costs_the_same_of_few_and_of_many() -> None:
    """Its start is one append and no look; its end looks at where its parent stands, and at one sibling."""
    few, many = of_children(FEW), of_children(3 * FEW)
    more = tuple((theirs - ours) / (2 * FEW) for ours, theirs in zip(few, many, strict=True))
    assert more == CHILD[connection.vendor]


def of_children(number: int) -> tuple[int, int]:
    """The statements of the body that starts so many, and of the bodies of all but the last of them."""
    store: Any = store_for("default")
    bench = Bench(store, keeper=NoKeeper())
    bench.loom.dispatcher = WorkerDispatcher()

    def run(execution_id: str) -> None:
        token = random_token()
        assert store.claim(execution_id, owner="w", token=token, ttl=60)
        run_execution(bench.engine, execution_id, token=token, fence=None)

    warm, parent = (bench.loom.start(wholes.fans_out, args=(count,)).id for count in (2, number))
    for execution_id in (warm, f"{warm}/{fences.one_step.id}#1"):
        run(execution_id)
    starts = count(store, lambda: run(parent))
    ends = count(store, lambda: [run(f"{parent}/{fences.one_step.id}#{place}") for place in range(1, number)])
    return starts.statements, ends.statements


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


all_async = asyncio.Barrier(MANY)


@tool
async def astep(ctx: StepContext) -> int:
    return 1


@flow("costs.async", steps=[astep])
async def awaits(ctx: AsyncFlowContext) -> int:
    await all_async.wait()
    return await ctx.run(astep)


def test_async_bodies_are_landed_by_one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 async bodies at a time: a step and an end of each are two appends, in few statements or grouped calls, and a body
    takes no thread to be entered, to append or to be left."""
    store: Any = store_for("default")
    bench = Bench(store, keeper=NoKeeper())
    bench.loom.dispatcher = WorkerDispatcher()
    ids = [bench.loom.start(awaits).id for _ in range(MANY)]
    sizes: list[int] = []
    handed: list[Any] = []
    append_shared, put = store.append_shared, Threads.put

    def counted(commits: Sequence[Any]) -> Any:
        sizes.append(len(commits))
        return append_shared(commits)

    def counted_put(threads: Threads, work: Any) -> None:
        handed.append(work)
        put(threads, work)

    monkeypatch.setattr(store, "append_shared", counted)
    watch_pipes(store, before=lambda commits: sizes.append(len(commits)))
    monkeypatch.setattr(Threads, "put", counted_put)
    freed = threading.Semaphore(0)
    worker = WorkerService(bench.engine, concurrency=MANY, on_free=freed.release)
    while worker.claimed < MANY:
        worker.tick()
    while worker.running:
        assert freed.acquire(timeout=60)
    assert worker.drain(60)
    assert {store.status(key) for key in ids} == {Status.COMPLETED}
    assert 2 * MANY <= sum(sizes) <= 3 * MANY  # outcomes go by themselves where a tool took its time
    assert len(sizes) <= MANY // 4
    # Each grouped call, and each time that some are let go; the clock, and the look for a pipe.
    assert len(handed) <= 2 * len(sizes) + 2


@pytest.mark.parametrize("name", ["worker, 1 step", "worker, async, 1 step"])
def test_the_bare_loop_writes_what_a_worker_does(name: str) -> None:
    """Over the database too, whoever it is there that lands the appends: a marker, and the outcome with the end."""
    (whole,) = (whole for whole in wholes.WHOLES if whole.name == name)
    shape = wholes.shape_of(Bench(store_for("default"), keeper=NoKeeper()), whole, 2)
    assert [len(append) for append in shape] == [1, 2]


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
