"""Work that is done in one piece: a backlog drained by a worker, due timers, recoveries, long logs replayed.

Beside each run goes the bare loop, in as many threads: it writes the appends of each piece of the work with one INSERT
and one commit for each append. A piece is an execution; of a replay it is a recorded step, and the bare loop reads as
many events and parses them.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Final

from benchmarks import backends
from benchmarks.fences import ORDER, answer_if_parked, book, one_step, parks
from benchmarks.frame import Bench, Crew, Timed, paired, paired_cpu
from loom_django import AsyncFlowContext, FlowContext, StepContext, flow, tool
from loom_django.engine.core import random_token
from loom_django.engine.start import start
from loom_django.kernel.events import pack
from loom_django.services.dispatch import InlineDispatcher, WorkerDispatcher
from loom_django.services.garbage import rare_collections
from loom_django.services.recovery import recover_abandoned
from loom_django.services.timers import TimerService
from loom_django.services.worker import WorkerService

Appends = list[list[tuple[str, str]]]

# Threads that answer parks, as those of a web server.
ANSWERERS: Final = 8

# So long after it every lease has ended, and every timer is due.
LATER: Final = timedelta(hours=1)


@flow("benchmarks.steps", steps=[book])
def steps(ctx: FlowContext, order: str, count: int) -> int:
    for _ in range(count):
        ctx.run(book, order, 1999)
    return count


@tool
async def abook(ctx: StepContext, order: str, amount: int) -> dict[str, Any]:
    """As ``book``, awaited."""
    return {"order": order, "amount": amount, "reference": ctx.idempotency_key, "state": "booked"}


@flow("benchmarks.async_steps", steps=[abook])
async def async_steps(ctx: AsyncFlowContext, order: str, count: int) -> int:
    for _ in range(count):
        await ctx.run(abook, order, 1999)
    return count


@flow("benchmarks.async_parks", steps=[abook])
async def async_parks(ctx: AsyncFlowContext, order: str) -> str:
    booked = await ctx.run(abook, order, 1999)
    answer = await ctx.suspend("Approval")
    return f"{booked['state']} {answer['by']}"


@flow("benchmarks.long", steps=[book], durability="deferred")
def long(ctx: FlowContext, order: str, count: int) -> int:
    for _ in range(count):
        ctx.run(book, order, 1999)
    while ctx.suspend("Again"):
        pass
    return count


@tool(transactional=True)
def keep(ctx: StepContext, order: str) -> str:
    return order


@flow("benchmarks.transactional", steps=[keep])
def transactional(ctx: FlowContext, order: str) -> str:
    return ctx.run(keep, order)


@flow("benchmarks.sleeps")
def sleeps(ctx: FlowContext) -> None:
    ctx.sleep(1)


@flow("benchmarks.fans_out")
def fans_out(ctx: FlowContext, count: int) -> int:
    children = [ctx.start_child(one_step, ORDER) for _ in range(count)]
    return len(ctx.await_children(children))


@flow("benchmarks.fans_out_async")
async def fans_out_async(ctx: AsyncFlowContext, count: int) -> int:
    children = [await ctx.start_child(async_steps, ORDER, 1) for _ in range(count)]
    return len(await ctx.await_children(children))


@dataclass(frozen=True)
class Whole:
    """``prepare`` makes ready so many pieces of work, outside the clock; ``work`` does them, so many at a time."""

    name: str
    prepare: Callable[[Bench, int], Any]
    work: Callable[[Bench, Any, int], None]
    pieces: int
    levels: tuple[int, ...] = (64,)
    reads: bool = False
    most_runs: int | None = None  # of what takes long; the figures say how many they are of
    many: int | None = None  # pieces at 64, where few would be over before all are at work
    backends: tuple[str, ...] = backends.BACKENDS


def ready(bench: Bench, flow_: Any, count: int, *args: Any) -> list[str]:
    """So many executions that a worker may claim."""
    bench.loom.dispatcher = WorkerDispatcher()
    return [bench.loom.start(flow_, args=args).id for _ in range(count)]


def drain(bench: Bench, ids: Sequence[str], level: int) -> None:
    """Run a worker until all of these have ended."""
    freed = threading.Event()
    worker = WorkerService(bench.engine, concurrency=level, on_free=freed.set)
    while True:
        more = worker.tick()
        if not more and not worker.running and worker.claimed >= len(ids) and not worker.tick():
            break
        if not more:
            freed.wait(0.02)
            freed.clear()
    worker.drain(60)


def park_and_resume(bench: Bench, ids: Sequence[str], level: int) -> None:
    """Run a worker until all have parked, answer each with a conditional fence, and run a worker until all have ended."""
    drain(bench, ids, level)
    left = iter(ids)  # which threads may share

    def answer() -> None:
        try:
            for key in left:
                answer_if_parked(bench, key)
        finally:
            bench.store.close_connections()

    with ThreadPoolExecutor(ANSWERERS) as pool:
        for answering in [pool.submit(answer) for _ in range(min(level, ANSWERERS))]:
            answering.result()
    drain(bench, ids, level)


def due(bench: Bench, count: int) -> list[str]:
    bench.loom.dispatcher = InlineDispatcher(bench.engine)
    return [bench.loom.start(sleeps).id for _ in range(count)]


@contextmanager
def much_later(store: Any) -> Iterator[None]:
    store.shift_clock(LATER)
    try:
        yield
    finally:
        store.shift_clock(-LATER)


def wake(bench: Bench, ids: Sequence[str], level: int) -> None:
    """Have what is due woken and run."""
    bench.loom.dispatcher = WorkerDispatcher()
    timers = TimerService(bench.engine, lambda: bench.loom.dispatcher, limit=100)
    with much_later(bench.store):
        while timers.tick():
            pass
        drain(bench, ids, level)


def abandoned(bench: Bench, count: int) -> list[str]:
    """Executions whose process died right after their start."""
    ids = []
    for _ in range(count):
        owner = bench.engine.held(random_token())
        started = start(bench.engine, one_step, one_step.bind_input((ORDER,), {}), one_step.options, owner)
        ids.append(started.execution_id)
    return ids


def hand_on(bench: Bench, ids: Sequence[str], level: int) -> None:
    """Have what is abandoned made ready again; nobody runs it."""
    bench.loom.dispatcher = WorkerDispatcher()
    with much_later(bench.store):
        while recover_abandoned(bench.loom, leases=bench.store, limit=100).recovered:
            pass


def recover(bench: Bench, ids: Sequence[str], level: int) -> None:
    hand_on(bench, ids, level)
    with much_later(bench.store):
        drain(bench, ids, level)


def recorded(bench: Bench, count: int) -> str:
    bench.loom.dispatcher = InlineDispatcher(bench.engine)
    return str(bench.loom.start(long, args=(ORDER, count)).id)


def replay(bench: Bench, execution_id: str, _: int) -> None:
    """Answer its park: its body runs again from the top, and parks again."""
    bench.loom.resume(execution_id, event_type="Again", payload=True)


def fans(bench: Bench, count: int) -> list[str]:
    return ready(bench, fans_out, 1, count)


def fans_async(bench: Bench, count: int) -> list[str]:
    return ready(bench, fans_out_async, 1, count)


def run_fan(bench: Bench, parents: Sequence[str], level: int) -> None:
    """Run a parent, its children, and the parent again when they have ended."""
    timers = TimerService(bench.engine, lambda: bench.loom.dispatcher)
    worker = WorkerService(bench.engine, concurrency=level)
    while str(bench.store.status(parents[0])) != "COMPLETED":
        if not (worker.tick() or timers.tick()):
            time.sleep(0.005)
    worker.drain(60)


def start_all(bench: Bench, count: int, level: int) -> None:
    ready(bench, one_step, count, ORDER)


WHOLES: Final = (
    Whole(
        "worker, 1 step", lambda bench, n: ready(bench, one_step, n, ORDER), drain, 320, (1, 8, 64), many=3000
    ),
    Whole("worker, 5 steps", lambda bench, n: ready(bench, steps, n, ORDER, 5), drain, 1000),
    Whole("worker, 20 steps", lambda bench, n: ready(bench, steps, n, ORDER, 20), drain, 300),
    Whole("worker, 100 steps", lambda bench, n: ready(bench, steps, n, ORDER, 100), drain, 16),
    Whole(
        "worker, async, 1 step",
        lambda bench, n: ready(bench, async_steps, n, ORDER, 1),
        drain,
        320,
        (1, 8, 64),
        many=3000,
    ),
    Whole("worker, async, 5 steps", lambda bench, n: ready(bench, async_steps, n, ORDER, 5), drain, 1000),
    Whole("worker, async, 20 steps", lambda bench, n: ready(bench, async_steps, n, ORDER, 20), drain, 300),
    Whole(
        "worker, a transactional step",
        lambda bench, n: ready(bench, transactional, n, ORDER),
        drain,
        160,
        many=1000,
    ),
    Whole(
        "worker, park/resume, fence_if_parked_at",
        lambda bench, n: ready(bench, parks, n, ORDER),
        park_and_resume,
        1000,
    ),
    Whole(
        "worker, async, park/resume, fence_if_parked_at",
        lambda bench, n: ready(bench, async_parks, n, ORDER),
        park_and_resume,
        1000,
    ),
    Whole("start only", lambda bench, n: n, start_all, 320, (1,)),
    Whole("timers drained", due, wake, 320, many=1000),
    Whole("recovery", abandoned, recover, 1000),
    Whole("recovered, handed on", abandoned, hand_on, 1000, (1,)),
    Whole("recovery of 10 000", abandoned, recover, 10_000, most_runs=1, backends=("postgresql",)),
    Whole("replay of 1 000 steps", recorded, replay, 1_000, (1,), reads=True),
    Whole("replay of 10 000 steps", recorded, replay, 10_000, (1,), reads=True),
    Whole("children of one parent", fans, run_fan, 1_000, most_runs=3),
    Whole("children of one parent, async", fans_async, run_fan, 1_000, most_runs=3),
)


@contextmanager
def recording(store: Any) -> Iterator[dict[str, Appends]]:
    """What is appended to each execution meanwhile, in whatever thread."""
    appends: dict[str, Appends] = defaultdict(list)
    plain = store.append

    def append(commit: Any) -> None:
        plain(commit)
        for one in (commit, *commit.also):
            appends[one.execution_id].append([(str(event.kind), event.body) for event in one.events])

    def append_shared(commits: Sequence[Any]) -> list[Exception | None]:
        return [_refusal(append, commit) for commit in commits]

    store.append, store.append_shared = append, append_shared
    store.pipe = lambda loop: None  # so that all of them come here
    try:
        yield appends
    finally:
        del store.append, store.append_shared, store.pipe


def _refusal(append: Callable[[Any], None], commit: Any) -> Exception | None:
    try:
        append(commit)
    except Exception as refused:
        return refused
    return None


def shape_of(bench: Bench, whole: Whole, level: int) -> Appends:
    """The appends of one piece of the work; of those that differ, the most.

    What writes no event, as a lease that is handed on, stands beside the least that can be written.
    """
    prepared = whole.prepare(bench, 2)
    with recording(bench.store) as appends:
        whole.work(bench, prepared, level)
    return max(appends.values(), key=len, default=[[("NOTE", "{}")]])


def measure(
    backend: str, bare: backends.Bare, wholes: Sequence[Whole], *, levels: Sequence[int], runs: int
) -> list[dict[str, Any]]:
    """Each whole and its bare loop in turn, ``runs`` times over."""
    return [
        _measured(backend, bare, whole, level, runs)
        for whole in wholes
        for level in whole.levels
        if level in levels and backend in whole.backends
    ]


def _measured(backend: str, bare: backends.Bare, whole: Whole, level: int, runs: int) -> dict[str, Any]:
    backends.say(backend, level, whole.name)
    bench = Bench(backends.make_store(backend))
    pieces = whole.many if level == 64 and whole.many is not None else whole.pieces
    beside = _reading(bare, whole) if whole.reads else _writing(bench, bare, whole, level, pieces)
    runs = min(runs, whole.most_runs or runs)
    with rare_collections():  # as the worker's command
        pairs = [(_run(bench, whole, level, pieces), beside()) for _ in range(runs)]
    ours, theirs = zip(*pairs, strict=True)
    return {
        "backend": backend,
        "concurrency": level,
        "case": whole.name,
        "pieces": pieces,
        "per_second": median(run.rate for run in ours),
        "seconds": median(pieces / run.rate for run in ours),
        "cpu_us": median(run.cpu_us for run in ours),
        "times_bare": paired(ours, theirs),
        "times_bare_cpu": paired_cpu(ours, theirs),
        "runs": runs,
    }


def _reading(bare: backends.Bare, whole: Whole) -> Callable[[], Timed]:
    """The bare loop of a replay: two events for each recorded step."""
    event = ("STEP", pack({"at": 1, "step": "book", "output": {"order": ORDER, "state": "booked"}}))
    key = bare.write([[event]] * (2 * whole.pieces))
    return lambda: timed(whole.pieces, lambda: bare.read(key))


def _writing(bench: Bench, bare: backends.Bare, whole: Whole, level: int, pieces: int) -> Callable[[], Timed]:
    appends = shape_of(bench, whole, level)
    # On SQLite 64 writers with connections of their own starve each other, so the bare loop gets 8.
    threads = min(level, 8) if backends.is_sqlite(bare.backend) else level
    return lambda: _crowd(bare.backend, threads, pieces, lambda _: bare.write(appends))


def _run(bench: Bench, whole: Whole, level: int, pieces: int) -> Timed:
    prepared = whole.prepare(bench, pieces)
    return timed(pieces, lambda: whole.work(bench, prepared, level))


def _crowd(backend: str, level: int, pieces: int, work: Callable[[Any], object]) -> Timed:
    crew = Crew(backend, level)
    try:
        return crew.run(range(pieces), work)
    finally:
        crew.close()


def timed(pieces: int, work: Callable[[], object]) -> Timed:
    began, spent = time.perf_counter(), time.process_time()
    work()
    elapsed, spent = time.perf_counter() - began, time.process_time() - spent
    return Timed(pieces / elapsed, elapsed * 1000, spent / pieces * 1e6)
