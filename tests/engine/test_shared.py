"""Async bodies of a worker in one event loop: they run beside each other, and what befalls one is not the others'."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from types import NoneType
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, connections, transaction

from loom_django import AsyncFlowContext, FlowContext, RetryPolicy, StepContext, flow, tool
from loom_django.engine import calls, shared
from loom_django.engine.drive import abandoned
from loom_django.engine.outside import note
from loom_django.engine.shared import STORE_THREADS, TOOL_THREADS
from loom_django.engine.steps import CARRY_LIMIT
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.runtime import Handle
from loom_django.services import worker as worker_module
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService, next_in
from loom_django.signals import execution_completed
from loom_django.testing import override_loom
from tests.engine.conftest import World
from tests.pipes import by_thread

if connection.vendor == "postgresql":
    from loom_django.stores import postgresql_append
    from loom_django.stores.postgresql import PostgresStore
    from tests.stores import rivals
else:
    PostgresStore = NoneType  # type: ignore[assignment,misc]

of_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL alone")

PATIENCE = 20.0
MANY = 64


class Site:
    """A worker whose turns a test makes, and the executions that it is given."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.loom.dispatcher = WorkerDispatcher()
        self.worker = WorkerService(world.engine, concurrency=1, tasks=MANY)

    def run(self, *started: Handle[Any]) -> list[str]:
        """Have the worker run these until each is parked or has ended; gives their statuses."""
        self.begin(*started)
        return self.ended(*started)

    def begin(self, *started: Handle[Any]) -> None:
        while self.worker.claimed < len(started):
            self.worker.tick()

    def ended(self, *started: Handle[Any]) -> list[str]:
        with self.worker._condition:
            assert self.worker._condition.wait_for(lambda: not self.worker._held, PATIENCE)
        return [str(self.world.state(handle).status) for handle in started]


@pytest.fixture(params=["asyncio", "uvloop", "thread"])
def site(world: World, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param == "thread":
        if not isinstance(world.engine.store, PostgresStore):
            pytest.skip("it lands by a thread anyhow")
        by_thread(world.engine.store)
    if request.param == "asyncio":
        monkeypatch.setattr(shared, "new_event_loop", asyncio.new_event_loop)
    else:
        pytest.importorskip("uvloop")
    monkeypatch.setattr(calls, "CANCEL_GRACE", 0.05)
    made = Site(world)
    yield made
    assert made.worker.drain(PATIENCE)
    eventually(lambda: not ours())
    assert abandoned.count == 0


def ours() -> list[str]:
    """The threads of the loop, and those beside it."""
    names = (
        "loom-bodies",
        "loom-writer",
        "loom-store",
        "loom-starts",
        "loom-plain",
        "loom-sync",
        "loom-tool",
    )
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def eventually(so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.005)


def test_a_tool_is_as_quick_as_it_is_however_busy_the_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome is carried to the next append, though the loop has turned to others before it saw the end."""

    @tool
    async def returns(ctx: StepContext) -> int:
        asyncio.get_running_loop().call_soon(time.sleep, 3 * CARRY_LIMIT)  # others, as it were
        return 1

    @flow("s.quick", steps=[returns])
    async def body(ctx: AsyncFlowContext) -> int:
        return await ctx.run(returns)

    store: Any = site.world.engine.store
    landed: list[int] = []
    by_thread(store)
    plain = store.append_shared
    monkeypatch.setattr(
        store,
        "append_shared",
        lambda commits: landed.extend(len(one.events) for one in commits) or plain(commits),
    )
    handle = body.start()
    assert site.run(handle) == [Status.COMPLETED]
    assert landed == [1, 2]


def test_a_body_that_calls_the_ctx_of_one_before_it_fails(site: Site) -> None:
    """It is not handed back, to be run again and again."""
    kept: list[AsyncFlowContext] = []

    @tool
    def plain(ctx: StepContext) -> int:
        return 1

    @flow("s.kept", steps=[plain])
    async def body(ctx: AsyncFlowContext) -> int:
        kept.append(ctx)
        return await kept[0].run(plain)

    first = body.start()
    assert site.run(first) == [Status.COMPLETED]
    second = body.start()
    assert site.run(first, second) == [Status.COMPLETED, Status.FAILED]
    error = site.world.state(second).error
    assert error is not None
    assert error["type"] == "loom_django.errors.ContextMisuseError"
    assert len(kept) == 2


@tool
async def one(ctx: StepContext) -> int:
    return 1


def test_a_body_is_given_no_connection_to_see_that_it_has_no_transaction(site: Site) -> None:
    """Where Django refuses every query there is none, and each task would have one of its own made."""
    made: list[Any] = []

    @flow("s.bare", steps=[one])
    async def body(ctx: AsyncFlowContext) -> int:
        value = await ctx.run(one)
        made.extend(connections.all(initialized_only=True))
        return value

    assert site.run(body.start()) == [Status.COMPLETED]
    assert made == []


@pytest.mark.parametrize(
    "world", [pytest.param("database", marks=pytest.mark.django_db(transaction=True))], indirect=True
)
def test_an_open_transaction_is_seen_where_queries_are_let_into_the_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DJANGO_ALLOW_ASYNC_UNSAFE lets a body open one; a call of the context in it is misuse as anywhere."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")

    @flow("s.unsafe", steps=[one])
    async def body(ctx: AsyncFlowContext) -> None:
        try:
            with transaction.atomic():
                await ctx.run(one)
        finally:
            connections.close_all()

    handle = body.start()
    assert site.run(handle) == [Status.FAILED]
    error = site.world.state(handle).error
    assert error is not None
    assert error["type"] == "loom_django.errors.OpenTransactionError"


def test_no_rule_of_a_branch_goes_on_while_a_siblings_is_away(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asks the store in another thread reads and writes the body's log there."""
    inside, released = threading.Event(), threading.Event()
    recorded: list[bool] = []

    @flow("s.away", steps=[one])
    async def body(ctx: AsyncFlowContext) -> Any:
        async def away(ctx: AsyncFlowContext) -> Any:
            return await ctx.receive("m")

        async def beside(ctx: AsyncFlowContext) -> int:
            def release() -> None:
                recorded.append(bool(ctx._body.journal.fold.frames))
                released.set()

            while not inside.is_set():
                await asyncio.sleep(0.001)
            asyncio.get_running_loop().call_soon(release)
            return await ctx.run(one)

        return await ctx.parallel({"away": away, "beside": beside})

    store: Any = site.world.engine.store
    plain = store.inbox

    def inbox(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert released.wait(PATIENCE)
        return plain(*args, **kwargs)

    monkeypatch.setattr(store, "inbox", inbox)
    handle = body.start()
    site.world.loom.send(handle.id, "m", 2)
    assert site.run(handle) == [Status.COMPLETED]
    assert handle.result() == {"away": 2, "beside": 1}
    assert recorded == [False]


def test_many_bodies_run_at_a_time_in_one_thread(site: Site) -> None:
    """As many as there may be, all inside their tools at once; threads and connections are far fewer."""
    inside: set[str] = set()
    threads: set[int] = set()
    most: list[int] = []
    used: list[int] = []

    @tool
    async def meet(ctx: StepContext) -> None:
        inside.add(ctx.execution_id)
        while len(inside) < MANY:
            await asyncio.sleep(0.005)
        most.append(len(ours()))

    @tool
    def plain(ctx: StepContext) -> int:
        return 1

    @flow("s.many", steps=[meet, plain])
    async def body(ctx: AsyncFlowContext) -> int:
        threads.add(threading.get_ident())
        await ctx.run(meet)
        return await ctx.run(plain)

    started = [body.start() for _ in range(MANY)]
    assert site.run(*started) == [Status.COMPLETED] * MANY
    used.append(connections_of_this_database(site.world))
    assert len(threads) == 1
    # The loop's, the one that watches it, and the writer.
    assert max(most) <= 3 + STORE_THREADS + TOOL_THREADS
    assert max(used) <= STORE_THREADS + TOOL_THREADS + 6
    for handle in started[:3]:
        site.world.check(handle.id)


def connections_of_this_database(world: World) -> int:
    if getattr(world.engine.store, "alias", None) is None or connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from pg_stat_activity where datname = current_database()")
        return int(cursor.fetchone()[0])


def test_branches_plain_tools_and_notes_go_beside_each_other(site: Site) -> None:
    """One log, whatever of it is being stored when a branch goes on."""

    @tool
    async def slow(ctx: StepContext, number: int) -> int:
        await asyncio.sleep(0.001 * (number % 3))
        return number

    @tool
    def plain(ctx: StepContext, number: int) -> int:
        return number

    @flow("s.branches", steps=[slow, plain])
    async def body(ctx: AsyncFlowContext) -> int:
        def branch(number: int) -> Callable[[AsyncFlowContext], Awaitable[int]]:
            async def run(ctx: AsyncFlowContext) -> int:
                total = 0
                for _ in range(3):
                    ctx.emit("note", number)
                    total += await ctx.run(slow, number)
                    total += await ctx.run(plain, number)
                return total

            return run

        done = await ctx.parallel({f"b{number}": branch(number) for number in range(8)})
        return sum(done.values())

    started = [body.start() for _ in range(3)]
    assert site.run(*started) == [Status.COMPLETED] * 3
    for handle in started:
        assert handle.result() == 2 * 3 * sum(range(8))
        assert site.world.kinds(handle.id).count("note") == 24
        site.world.check(handle.id)


def test_a_note_that_is_made_while_a_sibling_is_being_stored_is_not_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with the next append, and the loop does not stand still for it."""
    storing, noted = threading.Event(), threading.Event()
    in_time: list[bool] = []
    store = site.world.engine.store
    by_thread(store)
    append_shared = store.append_shared

    def append(commits: Sequence[Any]) -> Any:
        outcomes = append_shared(commits)
        if any(event.kind == "STEP_STARTED" for commit in commits for event in commit.events):
            storing.set()
            in_time.append(noted.wait(PATIENCE))
        return outcomes

    monkeypatch.setattr(store, "append_shared", append)

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("s.note", steps=[step])
    async def body(ctx: AsyncFlowContext) -> None:
        async def runs(ctx: AsyncFlowContext) -> int:
            return await ctx.run(step)

        async def notes(ctx: AsyncFlowContext) -> None:
            while not storing.is_set():
                await asyncio.sleep(0.001)
            ctx.emit("note", 1)
            noted.set()

        await ctx.parallel({"runs": runs, "notes": notes})

    handle = body.start()
    assert site.run(handle) == [Status.COMPLETED]
    assert in_time == [True]
    assert site.world.kinds(handle.id).count("note") == 1
    site.world.check(handle.id)


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_tool_that_times_out_is_left_behind(site: Site, idempotent: bool) -> None:
    """It swallows its cancellation; the flow goes on, or is put in doubt, and what comes late is noted."""
    release = threading.Event()

    @tool(timeout=0.05, idempotent=idempotent)
    async def stubborn(ctx: StepContext) -> str:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    @flow("s.late", steps=[stubborn])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(stubborn)

    handle = body.start()
    try:
        assert site.run(handle) == [Status.FAILED if idempotent else Status.SUSPENDED]
        assert abandoned.count == 1
    finally:
        release.set()
    eventually(lambda: abandoned.count == 0)
    if not idempotent:
        eventually(lambda: bool(site.world.state(handle).frames["stubborn"].late))


def test_a_plain_tool_that_times_out_gives_its_place_to_another(site: Site) -> None:
    """As many as there are threads hang; the one after them has its turn all the same."""
    release = threading.Event()

    @tool(timeout=0.05, idempotent=True)
    def hangs(ctx: StepContext) -> None:
        release.wait(PATIENCE)

    @tool
    def plain(ctx: StepContext) -> int:
        return 1

    @flow("s.hang", steps=[hangs, plain])
    async def body(ctx: AsyncFlowContext) -> int:
        try:
            await ctx.run(hangs)
        except Exception:
            return await ctx.run(plain)
        return 0

    started = [body.start() for _ in range(TOOL_THREADS + 2)]
    try:
        assert site.run(*started) == [Status.COMPLETED] * len(started)
        assert abandoned.count == len(started)
    finally:
        release.set()
    assert {handle.result() for handle in started} == {1}
    eventually(lambda: abandoned.count == 0)


class _Keeper:
    """Tells the bodies that their leases are lost, when the test says so."""

    def __init__(self) -> None:
        self.lost: dict[str, Callable[[], None]] = {}

    def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None:
        self.lost[execution_id] = on_lost

    def drop(self, execution_id: str, token: int) -> None: ...

    def keeps(self, execution_id: str, token: int) -> bool:
        return False


def test_a_lost_lease_cancels_one_body_s_tool_and_no_other_s(site: Site) -> None:
    """The neighbours in the loop go on."""
    keeper = site.world.engine.keeper = _Keeper()
    inside: set[str] = set()
    cancelled: list[str] = []
    release = threading.Event()

    @tool(idempotent=True)
    async def wire(ctx: StepContext) -> None:
        inside.add(ctx.execution_id)
        try:
            while not release.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            cancelled.append(ctx.execution_id)
            raise

    @flow("s.lost", steps=[wire])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(wire)

    started = [body.start() for _ in range(4)]
    site.begin(*started)
    eventually(lambda: len(inside) == 4)
    keeper.lost[started[0].id]()
    eventually(lambda: cancelled == [started[0].id])
    release.set()
    assert site.ended(*started) == [Status.RUNNING, *[Status.COMPLETED] * 3]


def test_a_refused_append_is_one_body_s_alone(site: Site) -> None:
    """Somebody else has fenced one of several; only its outcome is not recorded."""
    inside: set[str] = set()
    release = threading.Event()

    @tool(idempotent=True)
    async def wire(ctx: StepContext) -> None:
        inside.add(ctx.execution_id)
        while not release.is_set():
            await asyncio.sleep(0.005)

    @flow("s.fenced", steps=[wire])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(wire)

    started = [body.start() for _ in range(4)]
    site.begin(*started)
    eventually(lambda: len(inside) == 4)
    site.world.engine.store.acquire_fence(started[0].id)
    release.set()
    assert site.ended(*started) == [Status.RUNNING, *[Status.COMPLETED] * 3]
    assert site.world.kinds(started[0].id)[-1] == "STEP_STARTED"


def test_what_a_body_does_to_the_loop_is_not_its_neighbours_end(site: Site) -> None:
    """One raises, one stops the loop, one lets a task raise SystemExit, one leaves a task behind."""

    async def exits() -> None:
        raise SystemExit

    left: list[asyncio.Task[None]] = []

    @tool
    async def fine(ctx: StepContext) -> int:
        await asyncio.sleep(0.05)
        return 1

    @flow("s.does", steps=[fine])
    async def body(ctx: AsyncFlowContext, what: str) -> int:
        if what == "raise":
            raise ValueError(what)
        if what == "stop":
            asyncio.get_running_loop().stop()
        if what == "exit":
            task = asyncio.create_task(exits())
            await asyncio.wait({task})
            assert isinstance(task.exception(), SystemExit)
        if what == "leave":
            left.append(asyncio.create_task(asyncio.sleep(60)))
        return await ctx.run(fine)

    started = [body.start(what) for what in ("fine", "raise", "stop", "exit", "leave", "fine")]
    statuses = site.run(*started)
    assert statuses == [Status.COMPLETED, Status.FAILED, *[Status.COMPLETED] * 4]
    assert left[0].cancelled()


def test_a_body_that_blocks_the_loop_is_told_of(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its execution and the line where it is."""
    monkeypatch.setattr(shared, "BLOCKED", 0.1)
    release = threading.Event()

    @tool
    async def blocks(ctx: StepContext) -> None:
        loop: Any = site.worker._loop
        beaten_at = loop._beaten_at
        while loop._beaten_at == beaten_at:  # if the machine stood still until now, that is another time
            await asyncio.sleep(0)
        release.wait(PATIENCE)

    @flow("s.blocks", steps=[blocks])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(blocks)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "stood still" in record.getMessage()]

    with caplog.at_level(logging.WARNING, "loom_django.run"):
        handle = body.start()
        site.begin(handle)
        eventually(lambda: any(handle.id in one and "threading.py" in one for one in told()))
        release.set()
        assert site.ended(handle) == [Status.COMPLETED]


def test_a_worker_whose_loop_is_blocked_takes_no_async_work(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left to other workers; plain work goes on, and when the leases are over only the process can end it."""
    monkeypatch.setattr(shared, "BLOCKED", 0.1)
    monkeypatch.setattr(worker_module, "REST", 0)  # a look at plain ones that found nothing is not to count
    inside, release = threading.Event(), threading.Event()

    @flow("s.blocks")
    async def body(ctx: AsyncFlowContext) -> None:
        inside.set()
        release.wait(PATIENCE)

    @flow("s.fine")
    async def fine(ctx: AsyncFlowContext) -> int:
        return 1

    @flow("s.plain")
    def plain(ctx: FlowContext) -> int:
        return 2

    blocks = body.start()
    site.begin(blocks)
    assert inside.wait(PATIENCE)
    eventually(lambda: site.worker._loop is not None and site.worker._loop.blocked)
    others = fine.start(), plain.start()
    site.worker.tick()
    assert site.worker.claimed == 2
    eventually(lambda: site.world.state(others[1]).status == Status.COMPLETED)
    assert not site.worker.stuck
    with override_loom(EXECUTE_TIMEOUT=0.1):
        assert site.worker.stuck
    release.set()
    eventually(lambda: site.worker._loop is not None and not site.worker._loop.blocked)
    assert not site.worker.stuck
    site.worker.tick()
    assert site.ended(blocks, *others) == [Status.COMPLETED] * 3


def test_a_draining_worker_stops_each_body_at_its_next_call(site: Site) -> None:
    """The tools in hand end and are recorded; what hangs holds the drain as long as it may."""
    inside: set[str] = set()
    release = threading.Event()

    @tool(idempotent=True)
    async def first(ctx: StepContext) -> None:
        inside.add(ctx.execution_id)
        while not release.is_set():
            await asyncio.sleep(0.005)

    @tool
    async def second(ctx: StepContext) -> None:
        """Nothing."""

    @flow("s.drain", steps=[first, second])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(first)
        await ctx.run(second)

    started = [body.start() for _ in range(3)]
    site.begin(*started)
    eventually(lambda: len(inside) == 3)
    assert site.worker.drain(0.05) is False
    release.set()
    assert site.ended(*started) == [Status.RUNNING] * 3
    for handle in started:
        assert site.world.kinds(handle.id)[-1] == "STEP_COMPLETED"
        assert site.world.engine.store.held(handle.id) is None


def test_each_kind_of_flow_has_room_of_its_own(site: Site) -> None:
    """Plain bodies that fill their room keep no async one out, nor the other way round."""
    release = threading.Event()
    inside: list[str] = []

    @tool
    def stay(ctx: StepContext) -> None:
        inside.append("plain")
        release.wait(PATIENCE)

    @tool
    async def astay(ctx: StepContext) -> None:
        inside.append("async")
        while not release.is_set():
            await asyncio.sleep(0.005)

    @flow("s.plain", steps=[stay])
    def plain(ctx: FlowContext) -> None:
        ctx.run(stay)

    @flow("s.async", steps=[astay])
    async def awaited(ctx: AsyncFlowContext) -> None:
        await ctx.run(astay)

    site.worker.tasks = 2
    started: list[Handle[Any]] = [*(plain.start() for _ in range(3)), *(awaited.start() for _ in range(3))]
    try:
        site.worker.tick()
        eventually(lambda: len(inside) == 3)
        site.worker.tick()
        assert sorted(inside) == ["async", "async", "plain"]
        assert not site.worker.has_room
    finally:
        release.set()
    while site.worker.claimed < len(started):
        site.worker.tick()
    assert site.ended(*started) == [Status.COMPLETED] * 6


def test_a_worker_that_is_full_of_one_kind_wakes_for_the_other(site: Site) -> None:
    """What is to be ready is not left to the next poll."""
    release = threading.Event()

    @tool
    def stay(ctx: StepContext) -> None:
        release.wait(PATIENCE)

    @flow("s.full", steps=[stay])
    def plain(ctx: FlowContext) -> None:
        ctx.run(stay)

    @flow("s.later")
    async def later(ctx: AsyncFlowContext) -> int:
        return 1

    full = plain.start()
    site.begin(full)
    try:
        delayed = later.using(start_at=site.world.engine.store.now() + timedelta(seconds=30)).start()
        assert 0 < (next_in(site.world.engine.store, site.worker, timers=False) or 0) <= 30
        site.world.shift(timedelta(seconds=31))
        site.begin(full, delayed)
        eventually(lambda: delayed.status == Status.COMPLETED)
    finally:
        release.set()
    assert site.ended(full) == [Status.COMPLETED]


@pytest.mark.parametrize("limit", [{"worker_concurrency": 2}, {"concurrency": 2}])
def test_both_kinds_of_a_queue_with_a_limit_have_their_turn(site: Site, limit: dict[str, int]) -> None:
    """A long row of plain ones, of which one runs and holds its thread, starves no async one."""
    ran: list[str] = []
    ends = threading.Event()

    @flow("s.turn")
    def plain(ctx: FlowContext) -> None:
        ran.append("plain")
        assert ends.wait(PATIENCE)

    @flow("s.aturn")
    async def awaited(ctx: AsyncFlowContext) -> None:
        ran.append("async")

    with override_loom(QUEUES={"one": limit}):
        site.world.loom.dispatcher = WorkerDispatcher()  # new settings bring their own
        started: list[Handle[Any]] = [each.using(queue="one").start() for each in [plain] * 4 + [awaited] * 2]
        while ran.count("async") < 2:
            site.worker.tick()
        assert ran == ["plain", "async", "async"]
        ends.set()
        while site.worker.claimed < len(started):
            site.worker.tick()
        site.ended()
    assert [handle.status for handle in started] == [Status.COMPLETED] * 6


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("world", ["database"], indirect=True)
def test_async_tools_and_bodies_use_the_orm(site: Site) -> None:
    """Through a thread of the body's own, which ends with it; transactional steps work as ever."""

    @tool
    async def count(ctx: StepContext) -> int:
        return await User.objects.acount()

    @tool(transactional=True)
    def add(ctx: StepContext) -> None:
        User.objects.create(username=ctx.execution_id)

    @tool
    async def beside(ctx: StepContext) -> int:
        def counted() -> int:
            try:
                return User.objects.count()
            finally:
                connections.close_all()

        return await asyncio.to_thread(counted)

    @flow("s.orm", steps=[count, add, beside])
    async def body(ctx: AsyncFlowContext) -> bool:
        await ctx.run(add)
        mine = await User.objects.filter(username=ctx.execution_id).acount()
        return mine == 1 and await ctx.run(count) >= 1 and await ctx.run(beside) >= 1

    started = [body.start() for _ in range(5)]
    assert site.run(*started) == [Status.COMPLETED] * 5
    assert all(handle.result() for handle in started)
    assert not [name for name in ours() if name.startswith("loom-sync")]


def test_what_a_body_holds_in_context_variables_is_its_own(site: Site) -> None:
    """Bodies that interleave do not see each other's, nor the worker's own."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")

    @tool
    async def who(ctx: StepContext) -> str:
        await asyncio.sleep(0.002)
        return tenant.get()

    @tool
    def who_plain(ctx: StepContext) -> str:
        return tenant.get()

    @flow("s.context", steps=[who, who_plain])
    async def body(ctx: AsyncFlowContext, mine: str) -> bool:
        seen = [tenant.get()]
        tenant.set(mine)
        seen += [await ctx.run(who), await ctx.run(who_plain), tenant.get()]
        return seen == ["nobody", mine, mine, mine]

    started = [body.start(f"t{number}") for number in range(8)]
    token = tenant.set("the worker")
    try:
        assert site.run(*started) == [Status.COMPLETED] * 8
    finally:
        tenant.reset(token)
    assert all(handle.result() for handle in started)


def test_a_drain_does_not_wait_for_a_retry_that_is_waited_for_in_process(site: Site) -> None:
    """The body is handed back at once, with the count of its failures; the loop turns meanwhile."""
    failed = threading.Event()

    @tool(idempotent=True, retry=RetryPolicy(max_attempts=3, initial_interval=4.0))
    async def fails(ctx: StepContext) -> None:
        failed.set()
        raise ValueError("not now")

    @tool
    async def fine(ctx: StepContext) -> int:
        return 1

    @flow("s.retries", steps=[fails])
    async def retries(ctx: AsyncFlowContext) -> None:
        await ctx.run(fails)

    @flow("s.beside", steps=[fine])
    async def beside(ctx: AsyncFlowContext) -> int:
        return await ctx.run(fine)

    waits = retries.start()
    site.begin(waits)
    assert failed.wait(PATIENCE)
    other = beside.start()
    site.begin(waits, other)
    eventually(lambda: other.status == Status.COMPLETED)
    site.worker.draining.set()
    began = time.monotonic()
    assert site.ended(waits) == [Status.RUNNING]
    assert time.monotonic() - began < 3
    assert site.world.engine.store.held(waits.id) is None


def test_what_becomes_ready_together_is_landed_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends of many bodies go in few grouped calls, branches of one body in one commit, and no thread between."""
    store = site.world.engine.store
    calls_of: list[list[str]] = []
    by_thread(store)
    append_shared = store.append_shared

    def append(commits: Sequence[Any]) -> Any:
        calls_of.append([commit.execution_id for commit in commits])
        return append_shared(commits)

    monkeypatch.setattr(store, "append_shared", append)
    meet = asyncio.Barrier(MANY)

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("s.together", steps=[step])
    async def body(ctx: AsyncFlowContext) -> int:
        await meet.wait()
        done = await ctx.parallel({f"b{number}": step.bind() for number in range(8)})
        return sum(done.values())

    started = [body.start() for _ in range(MANY)]
    assert site.run(*started) == [Status.COMPLETED] * MANY
    assert {handle.result() for handle in started} == {8}
    assert sum(map(len, calls_of)) <= 4 * MANY  # the markers of all branches, their outcomes, the end
    assert len(calls_of) <= MANY // 2
    assert all(len(ids) == len(set(ids)) for ids in calls_of)  # an execution waits for its append
    for handle in started[:3]:
        site.world.check(handle.id)


def test_a_body_that_is_cancelled_while_its_append_is_under_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append is waited for and counts; then the flow is told that it may not cut itself off."""
    storing, cancelled = threading.Event(), threading.Event()
    store = site.world.engine.store
    by_thread(store)
    append_shared = store.append_shared

    def append(commits: Sequence[Any]) -> Any:
        if any(event.kind == "STEP_STARTED" for commit in commits for event in commit.events):
            storing.set()
            assert cancelled.wait(PATIENCE)
        return append_shared(commits)

    monkeypatch.setattr(store, "append_shared", append)

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("s.cut", steps=[step])
    async def body(ctx: AsyncFlowContext) -> None:
        own: Any = asyncio.current_task()

        async def cancel() -> None:
            while not storing.is_set():
                await asyncio.sleep(0.001)
            own.cancel()
            cancelled.set()

        beside = asyncio.create_task(cancel())
        try:
            await ctx.run(step)
        finally:
            await beside

    handle = body.start()
    assert site.run(handle) == [Status.FAILED]
    assert site.world.kinds(handle.id) == ["EXECUTION_STARTED", "STEP_STARTED", "EXECUTION_FAILED"]
    site.world.check(handle.id)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("world", ["database"], indirect=True)
def test_who_is_told_of_an_end_may_ask_the_database(site: Site) -> None:
    """Receivers of signals run in a thread, where queries are allowed."""
    told: list[int] = []

    def ended(**_: Any) -> None:
        told.append(User.objects.count())

    @flow("s.told")
    async def body(ctx: AsyncFlowContext) -> None:
        return None

    execution_completed.connect(ended)
    try:
        started = [body.start() for _ in range(3)]
        assert site.run(*started) == [Status.COMPLETED] * 3
    finally:
        execution_completed.disconnect(ended)
    assert told == [0, 0, 0]


def test_a_note_of_somebody_else_is_passed_in_the_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the sequence of a body's append, which goes behind it."""
    store = site.world.engine.store
    by_thread(store)
    append_shared = store.append_shared

    def append(commits: Sequence[Any]) -> Any:
        monkeypatch.setattr(store, "append_shared", append_shared)
        note(site.world.engine, commits[0].execution_id, Kind.EXECUTION_DENIED, {"act": "resume"})
        return append_shared(commits)

    monkeypatch.setattr(store, "append_shared", append)

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("s.passes", steps=[step])
    async def body(ctx: AsyncFlowContext) -> int:
        return await ctx.run(step)

    handle = body.start()
    assert site.run(handle) == [Status.COMPLETED]
    assert site.world.kinds(handle.id) == [
        "EXECUTION_STARTED", "EXECUTION_DENIED", "STEP_STARTED", "STEP_COMPLETED", "EXECUTION_COMPLETED",
    ]  # fmt: skip
    site.world.check(handle.id)


def test_an_append_that_fails_in_its_own_way_ends_no_other_body(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the grouped call raises, whatever it is, is each body's own; the loop and the writer go on."""
    store = site.world.engine.store
    by_thread(store)
    append_shared = store.append_shared

    def append(commits: Sequence[Any]) -> Any:
        monkeypatch.setattr(store, "append_shared", append_shared)
        raise RuntimeError("the driver has a fault")

    monkeypatch.setattr(store, "append_shared", append)

    @flow("s.breaks")
    async def body(ctx: AsyncFlowContext) -> int:
        return 1

    broken = body.start()
    assert site.run(broken) == [Status.PENDING]
    other = body.start()
    site.begin(broken, other)
    assert site.ended(other) == [Status.COMPLETED]


@of_postgresql
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("world", ["database"], indirect=True)
class TestGroupedCall:
    """What befalls the one call that lands what many bodies have composed."""

    def parks(self, site: Site, count: int) -> tuple[list[Handle[Any]], Callable[[], None]]:
        """Bodies that are to park together, as soon as they are let."""
        inside: set[str] = set()
        go = threading.Event()
        meet = asyncio.Barrier(count)

        @flow("s.parks")
        async def body(ctx: AsyncFlowContext) -> None:
            inside.add(ctx.execution_id)
            while not go.is_set():
                await asyncio.sleep(0.005)
            await meet.wait()
            await ctx.suspend("A")

        started = [body.start() for _ in range(count)]
        site.begin(*started)
        eventually(lambda: len(inside) == count)
        return started, go.set

    def lock(self, handle: Handle[Any]) -> str:
        return f"select from loom_fence where execution_id = '{handle.id}' for update"

    def check(self, site: Site, started: Sequence[Handle[Any]]) -> None:
        for handle in started:
            assert site.world.kinds(handle.id) == ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]
            site.world.check(handle.id)

    def test_a_blocked_neighbour_waits_by_itself(self, site: Site) -> None:
        """Whose row somebody holds waits for as long as that takes; the others are parked meanwhile, and run on."""
        started, let_go = self.parks(site, 6)
        with rivals.holding(self.lock(started[2])) as rival:
            let_go()
            others = [handle for handle in started if handle is not started[2]]
            eventually(lambda: all(handle.status == Status.SUSPENDED for handle in others))
            rivals.wait_until_blocked()
            assert started[2].status == Status.PENDING

            @flow("s.neighbour")
            async def neighbour(ctx: AsyncFlowContext) -> int:
                return 1

            late = neighbour.start()
            site.begin(*started, late)
            eventually(lambda: late.status == Status.COMPLETED)
            rival.commit()
        assert site.ended(*started) == [Status.SUSPENDED] * 6
        self.check(site, started)

    def test_a_connection_that_is_lost_amid_it(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody knows what came of it: all is sent again on another one, and each is there once."""
        monkeypatch.setattr(postgresql_append, "BRIEF", "30s")
        postgresql_append.text_of.cache_clear()
        started, let_go = self.parks(site, 6)
        try:
            with rivals.holding(self.lock(started[2])) as rival:
                let_go()
                (pid,) = rivals.wait_until_blocked()
                with rivals.connect(autocommit=True) as operator:
                    operator.execute("select pg_terminate_backend(%s)", [pid])
                assert rivals.wait_until_blocked() != [pid]
                rival.commit()
            assert site.ended(*started) == [Status.SUSPENDED] * 6
        finally:
            postgresql_append.text_of.cache_clear()
        self.check(site, started)
