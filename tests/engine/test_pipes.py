"""Async bodies whose event loop lands their facts by itself: whatever the pipe for that does, each body goes on by what is
in its log, and nothing is done twice."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.db import OperationalError, connection

from loom_django import AsyncFlowContext, StepContext, flow, tool
from loom_django.engine import shared
from loom_django.engine.shared import BodyLoop
from loom_django.engine.threads import Threads
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService
from loom_django.stores.base import Commit, Told
from loom_django.stores.memory import MemoryStore
from loom_django.testing.conformance import Log
from tests.engine.conftest import World
from tests.pipes import watch_pipes

if connection.vendor == "postgresql":
    from tests.stores.rivals import connect

PATIENCE = 30.0
BETWEEN = 7  # sendings between two cuts

in_memory = pytest.mark.parametrize("world", ["memory"], indirect=True)


class Pipe:
    """Lands in the reference store. Of each sending ``acts`` says what becomes of it; what is behind them lands."""

    room = 2
    most = 256

    def __init__(self, store: Any, loop: Any, acts: Iterator[str]) -> None:
        self._store, self._loop, self._acts = store, loop, acts
        self.closed = False
        self.begun = 0
        self.sent: list[int] = []
        self.under_way: list[Callable[[], None]] = []
        self.holds = False
        self.looks = False

    def begin(self) -> None:
        self.begun += 1

    @property
    def has_room(self) -> bool:
        return not self.closed and len(self.under_way) < self.room

    def send(self, commits: Sequence[Commit], tell: Told) -> bool:
        act = next(self._acts, "lands")
        if act == "cannot take it":
            return False
        self.sent.append(len(commits))
        landed = [False] * len(commits)
        if "lands" in act:
            landed = [outcome is None for outcome in self._store.append_many(commits)]
        if "unknown" in act:
            landed = [False] * len(commits)
        if "is lost" in act:
            self.closed = True
        self.under_way.append(lambda: tell(landed))
        if not self.holds:
            self._loop.call_soon(self.answer)
        return True

    def answer(self) -> None:
        self.under_way.pop(0)()

    def look(self) -> None:
        if self.looks and self.under_way:
            self.answer()

    def close(self) -> None:
        self.closed = True


ACTS = (
    "lands",
    "lands, but that is unknown",
    "unknown",
    "lands, is lost, and that is unknown",
    "is lost: unknown",
    "cannot take it",
)


def pipe_into(store: Any, acts: Sequence[str] = ()) -> list[Pipe]:
    """Have the store open such pipes; gives those that were opened."""
    opened: list[Pipe] = []
    left = iter(acts)

    def pipe(loop: Any) -> Pipe:
        opened.append(Pipe(store, loop, left))
        return opened[-1]

    store.pipe = pipe
    return opened


def run(world: World, *started: Any, tasks: int = 64) -> list[str]:
    """Have a worker run these until each is parked or has ended."""
    worker = WorkerService(world.engine, concurrency=1, tasks=tasks)
    while worker.claimed < len(started):
        worker.tick()
    with worker._condition:
        assert worker._condition.wait_for(lambda: not worker._held, PATIENCE)
    assert worker.drain(PATIENCE)
    return [str(world.state(handle).status) for handle in started]


def until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.001)


@in_memory
def test_whatever_becomes_of_what_is_sent(world: World) -> None:
    """Two steps that must not repeat, and each way in which three sendings can go: each is done once, and recorded once."""
    store: Any = world.engine.store
    world.loom.dispatcher = WorkerDispatcher()
    done: list[str] = []

    @tool(idempotent=False)
    async def pays(ctx: StepContext) -> str:
        done.append(ctx.idempotency_key)
        return ctx.step_id

    @flow("p.pays", steps=[pays])
    async def body(ctx: AsyncFlowContext) -> list[str]:
        return [await ctx.run(pays), await ctx.run(pays)]

    for acts in itertools.product(ACTS, repeat=3):
        opened = pipe_into(store, acts)
        done.clear()
        handles = [body.start(), body.start()]
        assert run(world, *handles) == [Status.COMPLETED] * 2, acts
        assert opened, acts
        assert len(done) == len(set(done)) == 4, acts
        for handle in handles:
            assert handle.result() == ["pays", "pays#2"], acts
            assert world.kinds(handle.id).count("STEP_STARTED") == 2, acts
            world.check(handle.id)


@pytest.fixture
def loop_with_pipe() -> Iterator[tuple[BodyLoop, Pipe]]:
    """A loop of bodies that has its pipe already, over a store in memory."""
    store: Any = MemoryStore()
    opened = pipe_into(store)
    loop = BodyLoop(store)
    until(lambda: bool(opened) and loop._writer._pipe is opened[0])
    yield loop, opened[0]
    loop.end()
    until(lambda: opened[0].closed)


def land_in_one_turn(loop: BodyLoop, many: int) -> list[Log]:
    """Starts of so many executions, all composed in one turn of the loop."""
    logs = [Log(str(number), "f") for number in range(many)]
    starts = [log.start() for log in logs]
    loop.loop.call_soon_threadsafe(lambda: [loop._writer.land(start) for start in starts])
    return logs


def test_what_is_composed_in_one_turn_goes_in_pieces(loop_with_pipe: tuple[BodyLoop, Pipe]) -> None:
    """The first pieces are sent before all is composed; what finds no room goes together when an answer comes."""
    loop, pipe = loop_with_pipe
    pipe.holds = True
    many = 3 * shared.PIECE + 2
    logs = land_in_one_turn(loop, many)
    until(lambda: len(loop._writer._waiting) == many - 2 * shared.PIECE)
    assert pipe.sent == [shared.PIECE, shared.PIECE]
    pipe.holds = False
    for _ in range(2):
        loop.loop.call_soon_threadsafe(pipe.answer)
    until(lambda: {pipe._store.status(log.id) for log in logs} == {Status.PENDING})
    assert pipe.sent == [shared.PIECE, shared.PIECE, many - 2 * shared.PIECE]


def test_answers_are_looked_for_where_there_is_no_room(loop_with_pipe: tuple[BodyLoop, Pipe]) -> None:
    """In the middle of a turn, so that the next piece goes at once; and no piece is larger than what may go at once."""
    loop, pipe = loop_with_pipe
    pipe.holds = pipe.looks = True
    pipe.most = shared.PIECE - 1
    many = 4 * shared.PIECE
    land_in_one_turn(loop, many)
    until(lambda: len(pipe.sent) >= 4)
    assert max(pipe.sent) == shared.PIECE - 1
    pipe.holds = False
    for _ in range(2):
        loop.loop.call_soon_threadsafe(lambda: pipe.under_way and pipe.answer())
    until(lambda: sum(pipe.sent) == many)
    assert max(pipe.sent) == shared.PIECE - 1


@in_memory
def test_a_worker_that_gets_no_thread_to_look_for_a_pipe_runs_bodies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has claimed is not held for nothing: bodies append as soon as a thread is to be had."""
    world.loom.dispatcher = WorkerDispatcher()
    put = Threads.put
    refused: list[Any] = []

    def refuse_once(threads: Threads, work: Any) -> None:
        if not refused:
            refused.append(work)
            raise RuntimeError("can't start new thread")
        put(threads, work)

    monkeypatch.setattr(Threads, "put", refuse_once)

    @flow("p.threadless")
    async def body(ctx: AsyncFlowContext) -> int:
        return 1

    assert run(world, body.start()) == [Status.COMPLETED]
    assert len(refused) == 1


@in_memory
def test_a_pipe_that_is_opened_too_late_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has ended meanwhile, and its loop may turn no more."""
    world.loom.dispatcher = WorkerDispatcher()
    monkeypatch.setattr("loom_django.engine.threads._END", 0.0)
    monkeypatch.setattr(shared, "OPEN_AGAIN", 0.0)
    store: Any = world.engine.store
    may_open, asked = threading.Event(), threading.Event()
    opened: list[Pipe] = []
    loops: list[Any] = []

    def pipe(loop: Any) -> Pipe:
        loops.append(loop)
        if opened:
            asked.set()
            assert may_open.wait(PATIENCE)
        opened.append(Pipe(store, loop, iter(["is lost: unknown"])))
        return opened[-1]

    store.pipe = pipe

    @flow("p.late")
    async def body(ctx: AsyncFlowContext) -> int:
        return 1

    assert run(world, body.start()) == [Status.COMPLETED]
    assert asked.wait(PATIENCE)
    until(loops[0].is_closed)
    may_open.set()
    until(lambda: len(opened) == 2 and opened[1].closed)
    assert not opened[1].begun


@in_memory
@pytest.mark.parametrize("why", ["no connection", "nothing is watched", "there is none"])
def test_where_no_pipe_can_be_had(world: World, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread does it; a pipe is looked for again only where there may be one later, and not at once."""
    store: Any = world.engine.store
    world.loom.dispatcher = WorkerDispatcher()
    asked: list[Any] = []
    monkeypatch.setattr(shared, "OPEN_AGAIN", 0.0 if why == "there is none" else 60.0)

    def pipe(loop: Any) -> Any:
        asked.append(loop)
        if why == "no connection":
            raise OperationalError("too many clients")
        if why == "there is none":
            return None
        made = Pipe(store, loop, iter(()))
        monkeypatch.setattr(made, "begin", refuses)
        opened.append(made)
        return made

    def refuses() -> None:
        raise NotImplementedError("this loop watches no socket")

    opened: list[Pipe] = []
    store.pipe = pipe

    @flow("p.thread")
    async def body(ctx: AsyncFlowContext) -> int:
        return 1

    assert run(world, *[body.start() for _ in range(20)], tasks=2) == [Status.COMPLETED] * 20
    assert len(asked) == 1
    assert len(opened) == (why == "nothing is watched")
    assert all(made.closed and not made.sent for made in opened)


@in_memory
def test_a_pipe_is_opened_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the database has answered the thread again, and some time has passed since the last try."""
    store: Any = world.engine.store
    world.loom.dispatcher = WorkerDispatcher()
    monkeypatch.setattr(shared, "OPEN_AGAIN", 0.0)
    opened = pipe_into(store, ["is lost: unknown", "lands", "is lost: unknown"])

    @flow("p.anew")
    async def body(ctx: AsyncFlowContext) -> int:
        return 1

    assert run(world, *[body.start() for _ in range(20)], tasks=1) == [Status.COMPLETED] * 20
    assert len(opened) == 3
    until(lambda: all(made.closed for made in opened))  # the last one by the end of the worker
    assert sum(map(sum, (made.sent for made in opened))) >= 18


@pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL alone")
@pytest.mark.parametrize("world", ["database"], indirect=True)
@pytest.mark.django_db(transaction=True)
def test_a_pipe_is_cut_again_and_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend is terminated in the middle of the work; each step that must not repeat is done once all the same."""
    store: Any = world.engine.store
    world.loom.dispatcher = WorkerDispatcher()
    monkeypatch.setattr(shared, "OPEN_AGAIN", 0.0)
    opened: list[Any] = []
    done: list[str] = []
    sent = threading.Semaphore(0)
    over = threading.Event()
    plain = store.pipe

    def pipe(loop: Any) -> Any:
        opened.append(plain(loop))
        return opened[-1]

    store.pipe = pipe
    watch_pipes(store, before=lambda _: sent.release())

    @tool(idempotent=False)
    async def pays(ctx: StepContext) -> str:
        done.append(ctx.idempotency_key)
        return ctx.step_id

    @flow("p.cut", steps=[pays])
    async def body(ctx: AsyncFlowContext) -> int:
        for _ in range(5):
            await ctx.run(pays)
        return 5

    def cut() -> None:
        with connect(autocommit=True) as operator:
            while not over.is_set():
                for _ in range(BETWEEN):
                    sent.acquire()
                pids = [made._server.backend_pid for made in tuple(opened) if not made.closed]
                for pid in pids:
                    operator.execute("select pg_terminate_backend(%s)", [pid])

    handles = [body.start() for _ in range(60)]
    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        assert run(world, *handles, tasks=16) == [Status.COMPLETED] * 60
    finally:
        over.set()
        for _ in range(BETWEEN):
            sent.release()
        cutter.join()
    assert len(opened) > 3
    assert len(done) == len(set(done)) == 300
    for handle in handles:
        assert world.kinds(handle.id).count("STEP_COMPLETED") == 5
