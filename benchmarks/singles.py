"""What is told as a number by itself: bytes of an execution that is parked or runs, growth of a long log, a poll, a page.

None of them has a bare loop beside it. Bytes and pages are counted; times are of one run, and told beside each other.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from django.test.utils import CaptureQueriesContext

from benchmarks import backends, fences, wholes
from benchmarks.frame import Bench, Crew
from loom_django import FlowContext, StepContext, flow, tool
from loom_django.services.dispatch import InlineDispatcher, WorkerDispatcher
from loom_django.services.timers import TimerService
from loom_django.services.worker import WorkerService

BODIES: Final = 64
TIMERS: Final = 200_000
DUE: Final = 100_000


@dataclass(frozen=True)
class Single:
    """``measure`` is given a bench and how many; what it returns is told by name. ``backends``: not in the others."""

    name: str
    measure: Callable[[Bench, int], dict[str, float]]
    size: int
    backends: tuple[str, ...] = backends.BACKENDS


def resident() -> int:
    """Bytes of memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def stored(connection: Any) -> int:
    """Bytes of all tables and indexes of the engine; of SQLite, of the file that has been checkpointed."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("pragma wal_checkpoint(truncate)")
            cursor.fetchall()
            return os.path.getsize(connection.settings_dict["NAME"])
        cursor.execute(
            "select sum(pg_total_relation_size(oid)) from pg_class where relkind = 'r' and relname like 'loom\\_%'"
        )
        return int(cursor.fetchone()[0])


def parked(bench: Bench, count: int) -> dict[str, float]:
    """Executions that wait: what they take in the database, and what a worker and a timer loop that pass by take."""
    before = stored(bench.store.connection)
    bench.loom.dispatcher = InlineDispatcher(bench.engine)
    crew = Crew("memory", min(8, count))  # connections are opened by their first use
    crew.run(range(count), lambda _: fences.park(bench))
    crew.close()
    bytes_stored = stored(bench.store.connection) - before
    bench.loom.dispatcher = WorkerDispatcher()
    worker = WorkerService(bench.engine, concurrency=BODIES)
    timers = TimerService(bench.engine, lambda: bench.loom.dispatcher)
    at_first = resident()
    for _ in range(20):
        worker.tick()
        timers.tick()
    held = resident() - at_first
    worker.drain(60)
    return {"parked": count, "bytes_stored_each": bytes_stored / count, "worker_bytes_each": held / count}


entered = threading.Semaphore(0)
leave = threading.Event()


@tool
def stay(ctx: StepContext) -> None:
    entered.release()
    leave.wait(60)


@flow("benchmarks.stays", steps=[stay])
def stays(ctx: FlowContext) -> None:
    ctx.run(stay)


def running(bench: Bench, count: int) -> dict[str, float]:
    """Bodies that are in a tool, at the same time, of one worker: its threads and connections among them."""
    leave.clear()
    ids = wholes.ready(bench, stays, count)
    before = resident()
    worker = WorkerService(bench.engine, concurrency=count)
    while worker.claimed < count:
        worker.tick()
    for _ in ids:
        if not entered.acquire(timeout=60):
            raise RuntimeError("a body did not begin")
    held = resident() - before
    leave.set()
    worker.drain(60)
    return {"running": count, "worker_bytes_each": held / count}


@contextmanager
def timing(store: Any, name: str) -> Iterator[list[tuple[float, float]]]:
    """When each call of this name began and ended."""
    spans: list[tuple[float, float]] = []
    call = getattr(store, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spans.append((began, time.perf_counter()))

    setattr(store, name, timed)
    try:
        yield spans
    finally:
        delattr(store, name)


def growth(bench: Bench, count: int) -> dict[str, float]:
    """One execution of so many steps: its last appends, and its last steps, beside its first."""
    bench.loom.dispatcher = InlineDispatcher(bench.engine)
    with timing(bench.store, "append") as spans:
        bench.loom.start(wholes.steps, args=(fences.ORDER, count))
    part = max(1, min(200, count // 10))
    appends = [end - began for began, end in spans]
    whole = [after[1] - before[1] for before, after in pairwise(spans)]
    first, last = median(appends[5 : 5 + part]), median(appends[-part:])
    step, last_step = median(whole[5 : 5 + part]), median(whole[-part:])
    return {
        "appends": len(spans),
        "append_ms": first * 1000,
        "last_append_times": last / first,
        "step_ms": step * 1000,
        "last_step_times": last_step / step,
    }


@contextmanager
def timers(bench: Bench, count: int, *, ahead: int) -> Iterator[Any]:
    """So many timers a millisecond apart, the first one so many seconds from now, and the executions that sleep; with
    a cursor."""
    connection = bench.store.connection
    bench.loom.dispatcher = InlineDispatcher(bench.engine)
    asleep = bench.loom.start(wholes.sleeps).id
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            rows = f"(with recursive s(n) as (select 1 union all select n + 1 from s limit {count}) select n from s)"
            at, no = (
                f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{ahead} seconds', (n * 0.001) || ' seconds')",
                "0",
            )
        else:
            rows = f"generate_series(1, {count}) as n"
            at, no = f"now() + interval '{ahead} seconds' + n * interval '1 millisecond'", "false"
        cursor.execute("select * from loom_execution limit 0")
        alike = ", ".join(name for name, *_ in cursor.description if name not in ("id", "chain"))
        cursor.execute(
            f"insert into loom_execution (id, chain, {alike}) select 'benchmark-' || n, 'benchmark-' || n, {alike} "
            f"from loom_execution cross join {rows} where id = %s",
            [asleep],
        )
        cursor.execute(
            "insert into loom_timer (execution_id, wake_at, deadline, tries) "
            f"select 'benchmark-' || n, {at}, {no}, 0 from {rows}"
        )
        bench.loom.cancel(asleep)
        try:
            settle(cursor)
            yield cursor
        finally:
            for table, key in (("loom_timer", "execution_id"), ("loom_execution", "id")):
                cursor.execute(f"delete from {table} where {key} like 'benchmark-%'")
            settle(cursor)


def settle(cursor: Any) -> None:
    """Have the planner know what is there, and the index hold nothing else."""
    if cursor.db.vendor == "sqlite":
        cursor.execute("analyze")
    else:
        for table in ("loom_timer", "loom_execution"):
            cursor.execute(f"vacuum analyze {table}")


def claimed(bench: Bench, count: int) -> dict[str, float]:
    """So many due timers claimed in large batches, and in small ones; nothing is woken."""
    told = {"timers": float(count)}
    for batch in (1_000, 100):
        with timers(bench, count, ahead=-3600):
            run = wholes.timed(count, partial(_claim_all, bench, count, batch))
        told[f"ms_in_batches_of_{batch}"] = run.p50
        told[f"per_second_in_batches_of_{batch}"] = run.rate
        told[f"cpu_us_each_in_batches_of_{batch}"] = run.cpu_us
    return told


def _claim_all(bench: Bench, count: int, limit: int) -> None:
    taken, since, known = 0, None, bench.engine.known()
    while dues := bench.store.claim_due(limit=limit, hold=600, known=known, redrive=True, since=since):
        taken, since = taken + len(dues), dues[-1].at
    if taken != count:
        raise RuntimeError(f"of {count} timers {taken} were claimed")


def poll(bench: Bench, count: int) -> dict[str, float]:
    """A look for due timers among many of which none is due; of PostgreSQL the pages that it touches."""
    with timers(bench, count, ahead=86_400) as cursor:
        return _polled(bench, bench.store.connection, cursor, count)


def _polled(bench: Bench, connection: Any, cursor: Any, count: int) -> dict[str, float]:
    spans = []
    for _ in range(25):
        began = time.perf_counter()
        due = bench.store.next_due()
        spans.append(time.perf_counter() - began)
    if due is None:
        raise RuntimeError("no timer was found")
    told = {"timers": float(count), "poll_ms": median(spans) * 1000}
    if connection.vendor == "postgresql":
        with CaptureQueriesContext(connection) as sent:
            bench.store.next_due()
        cursor.execute(f"explain (analyze, buffers, format json) {sent.captured_queries[-1]['sql']}")
        (plan,) = cursor.fetchone()[0]
        told["poll_pages"] = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    return told


def list_page(bench: Bench, count: int) -> dict[str, float]:
    """The first page of the console's list of executions, as somebody who may see all of it gets it."""
    from django.contrib import admin
    from django.contrib.auth import get_user_model
    from django.db import connections
    from django.test import RequestFactory

    from loom_django.models import Execution

    alias = bench.store.alias
    missing = count - Execution.objects.using(alias).count()
    if missing > 0:
        wholes.ready(bench, fences.one_step, missing, fences.ORDER)
    user = get_user_model()(username="benchmark", is_staff=True, is_superuser=True)
    page: Any = admin.site._registry[Execution]
    request = RequestFactory().get("/")
    request.user = user

    def look() -> None:
        page.changelist_view(request).render()

    with backends.reading(alias):
        look()
        with CaptureQueriesContext(connections[alias]) as sent:
            look()
        spans = [wholes.timed(1, look).cpu_us for _ in range(5)]
    return {"executions": count, "statements": len(sent), "cpu_ms": median(spans) / 1000}


SINGLES: Final = (
    Single("parked executions", parked, 10_000, ("postgresql",)),
    Single("running bodies", running, BODIES),
    Single("growth of one execution", growth, 10_000),
    Single("a poll of timers, none due", poll, TIMERS, ("sqlite", "postgresql")),
    Single("due timers claimed", claimed, DUE, ("sqlite", "postgresql")),
    Single("list page of the console", list_page, 10_000, ("postgresql",)),
)


def measure(backend: str, singles: Sequence[Single]) -> list[dict[str, Any]]:
    bench = Bench(backends.make_store(backend))
    told = []
    for one in singles:
        if backend in one.backends:
            backends.say(backend, one.name)
            told.append({"backend": backend, "case": one.name, **one.measure(bench, one.size)})
    return told
