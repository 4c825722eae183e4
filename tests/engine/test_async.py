"""Async flows and tools: one task asks, nothing hangs, and a call that will not end is left behind."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import connection, connections
from django.test import TestCase
from django.utils import timezone, translation

from loom_django import AsyncFlowContext, FlowContext, StepContext, StepFailed, definitions, flow, tool
from loom_django.engine import calls
from loom_django.engine.calls import abandoned
from loom_django.kernel.state import FrameStatus, Status
from loom_django.runtime import Handle
from tests.engine.conftest import World


@tool
async def one(ctx: StepContext) -> int:
    return 1


@tool
def plain(ctx: StepContext) -> int:
    return 2


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CANCEL_GRACE", 0.05)


@pytest.fixture
def none_left() -> Iterator[None]:
    """Every call that was left behind has come to its end, and is counted no longer."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("loom-"):
            thread.join(10)
    assert abandoned.count == 0


def failure(world: World, handle: Handle[Any]) -> str:
    error = world.state(handle).error
    assert error is not None
    return f"{error['type']}: {error['message']}"


def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread that may not hang."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(call())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert box, "it hangs, or it raised"
    return box[0]


# One task asks.


async def _gather(ctx: AsyncFlowContext) -> None:
    async def branch(name: str) -> int:
        return await ctx.run(one.keyed(name))

    await asyncio.gather(branch("a"), branch("b"))


async def _gather_of_calls(ctx: AsyncFlowContext) -> None:
    await asyncio.gather(ctx.run(one), ctx.run(plain))


async def _created_task(ctx: AsyncFlowContext) -> None:
    async def branch() -> int:
        return await ctx.run(one)

    await asyncio.create_task(branch())


async def _task_group(ctx: AsyncFlowContext) -> None:
    async def branch() -> int:
        return await ctx.run(one)

    async with asyncio.TaskGroup() as group:
        group.create_task(branch())


async def _a_value_in_a_task(ctx: AsyncFlowContext) -> None:
    async def branch() -> None:
        ctx.uuid4()

    await asyncio.create_task(branch())


async def _in_a_thread(ctx: AsyncFlowContext) -> None:
    def call() -> Awaitable[int]:
        return ctx.run(one)

    await asyncio.to_thread(call)


@pytest.mark.parametrize(
    "ask",
    [
        _gather,
        _gather_of_calls,
        _created_task,
        _task_group,
        _a_value_in_a_task,
        _in_a_thread,
    ],
)
def test_only_the_bodys_task_may_ask(
    world: World, ask: Callable[[AsyncFlowContext], Awaitable[None]]
) -> None:
    """The order of calls from several tasks would be left to chance: refused, whatever the flow makes of it."""

    @flow("t.tasks", steps=[one, plain])
    async def body(ctx: AsyncFlowContext) -> object:
        try:
            await ask(ctx)
        except Exception:
            return await ctx.run(one.keyed("after misuse nothing is dispatched"))
        return "done"

    handle = body.start()
    assert handle.status == Status.FAILED
    said = failure(world, handle)
    assert "ContextMisuseError" in said
    assert "inside one tool" in said
    assert "STEP_STARTED" not in world.kinds(handle.id)


def test_a_task_that_is_left_behind_does_nothing_more(world: World) -> None:
    """The result stands, the process does not hang, and no step runs after the flow has returned."""

    @flow("t.left", steps=[plain])
    async def body(ctx: AsyncFlowContext) -> str:
        entered = asyncio.Event()

        async def background() -> None:
            try:
                entered.set()
                await asyncio.sleep(60)
            finally:
                await ctx.run(plain)

        async def at_once() -> None:
            await ctx.run(plain)

        tasks.append(asyncio.create_task(background()))
        await entered.wait()
        tasks.append(asyncio.create_task(at_once()))
        return "done"

    tasks: list[asyncio.Task[None]] = []
    handle = in_thread(body.start)
    assert handle.result() == "done"
    assert "STEP_STARTED" not in world.kinds(handle.id)
    for task in tasks:
        assert type(task.exception()).__name__ == "Unwind"


def test_a_call_is_awaited_once(world: World) -> None:
    """The second await of one call would give nothing; it is refused instead."""

    @flow("t.twice", steps=[one])
    async def body(ctx: AsyncFlowContext) -> list[int]:
        call = ctx.run(one)
        return [await call, await call]

    handle = body.start()
    assert "awaited twice" in failure(world, handle)


# Cut off by the flow itself.


class _Cut:
    """A tool whose flow's timeout runs out as soon as it has begun."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def begun(self) -> str:
        self.loop.call_soon_threadsafe(self.timeout.reschedule, 0)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return "tx"

    async def __aenter__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.timeout = asyncio.timeout(None)
        await self.timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self.timeout.__aexit__(*error)


def test_an_effect_that_the_flow_cuts_off_is_in_doubt(world: World) -> None:
    """Money may have moved: the flow does not get to compensate before a person has said so."""
    cut = _Cut()

    @tool(idempotent=False)
    async def wire(ctx: StepContext) -> str:
        return await cut.begun()

    @flow("t.cut", steps=[wire, plain])
    async def body(ctx: AsyncFlowContext) -> str:
        try:
            async with cut:
                return await ctx.run(wire)
        except TimeoutError:
            await ctx.run(plain)
        return "compensated"

    handle = body.start()
    assert cut.ended == ["cancelled"]
    assert world.kinds(handle.id)[1:] == ["STEP_STARTED", "EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]
    world.loom.resolve(handle.id, "wire", "completed-with-result", output="tx-7")
    assert handle.result() == "tx-7"


def test_another_step_that_the_flow_cuts_off_is_misuse(world: World) -> None:
    """When a cut falls is chance, and replays differently: the flow fails with the way out."""
    cut = _Cut()

    @tool
    async def fetch(ctx: StepContext) -> str:
        return await cut.begun()

    @flow("t.cutmisuse", steps=[fetch, plain])
    async def body(ctx: AsyncFlowContext) -> str:
        try:
            async with cut:
                return await ctx.run(fetch)
        except BaseException:
            await ctx.run(plain)
        return "went on"

    handle = body.start()
    assert handle.status == Status.FAILED
    assert cut.ended == ["cancelled"]
    assert "timeout=" in failure(world, handle)
    assert world.kinds(handle.id)[1:] == ["STEP_STARTED", "EXECUTION_FAILED"]


def test_an_outcome_that_is_known_when_the_cut_comes_is_kept(world: World) -> None:
    """A plain tool runs to its end whatever the flow's timers say; then the flow is told of its misuse."""
    tasks: list[asyncio.Task[Any]] = []

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> str:
        tasks[0].cancel()
        return "tx-9"

    @flow("t.cutlate", steps=[wire, plain])
    async def body(ctx: AsyncFlowContext) -> str:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            return await ctx.run(wire)
        except BaseException:
            await ctx.run(plain)
            return "went on"

    handle = body.start()
    frames = world.state(handle).frames
    assert frames["wire"].status == FrameStatus.COMPLETED
    assert list(frames) == ["wire"]
    assert "timeout=" in failure(world, handle)


def test_a_cut_before_the_effect_begins_nothing(world: World) -> None:
    """While the marker is made durable, a cut ends the flow before the tool is called."""
    called: list[str] = []

    @tool(idempotent=False)
    async def wire(ctx: StepContext) -> None:
        called.append("wire")

    @tool(transactional=True)
    def book(ctx: StepContext) -> None:
        called.append("book")

    @flow("t.cutearly", steps=[wire, book])
    async def body(ctx: AsyncFlowContext, step: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await ctx.run_step(step)

    for step in ("wire", "book"):
        handle = body.start(step)
        assert "timeout=" in failure(world, handle)
    assert called == []


# Errors that loops do not take.


def test_stop_iteration_of_a_tool_is_a_failure_like_others(world: World) -> None:
    """No future takes one; the step fails, and nothing waits for ever."""

    @tool(transactional=True)
    def first(ctx: StepContext) -> str:
        return next(iter(()))

    @tool
    def second(ctx: StepContext) -> str:
        return next(iter(()))

    @tool
    async def third(ctx: StepContext) -> str:
        raise StopAsyncIteration

    @flow("t.stopiteration", steps=[first, second, third])
    async def body(ctx: AsyncFlowContext) -> list[str]:
        seen = []
        for step in (first, second, third):
            with pytest.raises(StepFailed) as failed:
                await ctx.run(step)
            seen.append(failed.value.step_id)
        return seen

    assert in_thread(body.start).result() == ["first", "second", "third"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_ctrl_c_in_a_tool_ends_the_body_and_nothing_hangs(
    world: World, is_async: bool, idempotent: bool
) -> None:
    """The tool is cancelled, its effect in doubt or handed back; what a finally asks for is not run."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    ended: list[str] = []

    @tool(idempotent=idempotent)
    async def wire(ctx: StepContext) -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    @flow("t.ctrlc", steps=[wire, plain])
    def sync_body(ctx: FlowContext) -> None:
        try:
            ctx.run(wire)
        finally:
            ctx.run(plain)

    @flow("t.ctrlca", steps=[wire, plain])
    async def async_body(ctx: AsyncFlowContext) -> None:
        try:
            await ctx.run(wire)
        finally:
            await ctx.run(plain)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            (async_body if is_async else sync_body).using(execution_id="c").start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["cancelled"]
    status = world.state("c").frames["wire"].status
    assert status == (FrameStatus.RUNNING if idempotent else FrameStatus.IN_DOUBT)
    assert "plain" not in world.state("c").frames


def test_ctrl_c_in_an_async_body_runs_no_step_of_its_finally(world: World) -> None:
    """Between steps there is no effect to account for; the body is left at once."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")

    @flow("t.ctrlcbody", steps=[plain])
    async def body(ctx: AsyncFlowContext) -> None:
        try:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await ctx.run(plain)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            body.using(execution_id="c").start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert world.kinds("c") == ["EXECUTION_STARTED"]


def test_a_crash_in_a_tools_thread_ends_the_run(world: World, crash_at: Callable[[str, str], None]) -> None:
    """The thread that waits is told, whatever ended the call."""

    @tool(timeout=30)
    def slow(ctx: StepContext) -> None: ...

    @tool(timeout=30)
    async def aslow(ctx: StepContext) -> None: ...

    @flow("t.crash", steps=[slow])
    def body(ctx: FlowContext) -> None:
        ctx.run(slow)

    @flow("t.acrash", steps=[aslow])
    async def abody(ctx: AsyncFlowContext) -> None:
        await ctx.run(aslow)

    for started, step in ((body, "slow"), (abody, "aslow")):
        crash_at(step, "in-effect")
        handle = in_thread(started.start)  # type: ignore[attr-defined]
        assert world.kinds(handle.id) == ["EXECUTION_STARTED", "STEP_STARTED"]


# Calls that do not end.


async def _ignores_cancelling(release: threading.Event) -> str:
    while not release.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return "late"


async def _holds_its_loop(release: threading.Event) -> str:
    release.wait(20)
    return "late"


async def _holds_the_orms_thread(release: threading.Event) -> str:
    await sync_to_async(release.wait)(20)
    return "late"


@pytest.mark.usefixtures("none_left", "short_grace")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stuck", [_ignores_cancelling, _holds_its_loop, _holds_the_orms_thread])
def test_a_stubborn_async_tool_is_left_behind(
    world: World, is_async: bool, stuck: Callable[[threading.Event], Awaitable[str]]
) -> None:
    """It is cancelled, waited for a little and counted; the flow goes on, and what it returns late is noted."""
    release = threading.Event()  # the timeouts leave a busy machine the time to begin the tools

    @tool(timeout=0.5)
    async def slow(ctx: StepContext) -> str:
        return await stuck(release)

    @tool
    async def other(ctx: StepContext) -> int:
        return await sync_to_async(lambda: 3)()

    @tool(idempotent=False, timeout=0.5)
    async def wire(ctx: StepContext) -> str:
        return await stuck(release)

    @flow("t.stubborn", steps=[slow, other, wire])
    def sync_body(ctx: FlowContext) -> str:
        with pytest.raises(StepFailed):
            ctx.run(slow)
        assert ctx.run(other) == 3
        return ctx.run(wire)

    @flow("t.astubborn", steps=[slow, other, wire])
    async def async_body(ctx: AsyncFlowContext) -> str:
        with pytest.raises(StepFailed):
            await ctx.run(slow)
        assert await ctx.run(other) == 3
        return await ctx.run(wire)

    try:
        handle = in_thread((async_body if is_async else sync_body).start)
        assert world.state(handle).frames["wire"].status == FrameStatus.IN_DOUBT
        assert abandoned.count >= 2
    finally:
        release.set()
    for thread in threading.enumerate():
        if thread.name == "loom-tool":
            thread.join(10)
    if stuck is not _holds_the_orms_thread:  # sync_to_async takes a cancellation once its work is done
        assert [note["output"] for note in world.state(handle).frames["wire"].late] == ["late"]


@pytest.mark.usefixtures("none_left", "short_grace")
def test_a_stubborn_task_does_not_hold_the_end_of_the_flow(world: World) -> None:
    """What the body leaves running is cancelled, and left behind if it ignores that."""
    release = threading.Event()

    @flow("t.stubborntask")
    async def body(ctx: AsyncFlowContext) -> str:
        task = asyncio.create_task(_ignores_cancelling(release))
        await asyncio.sleep(0)
        del task
        return "done"

    try:
        assert in_thread(body.start).result() == "done"
        assert abandoned.count == 1
    finally:
        release.set()


class _Keeper:
    """Tells a body that its lease is lost, when the test says so."""

    def __init__(self) -> None:
        self.on_lost: list[Callable[[], None]] = []

    def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None:
        self.on_lost.append(on_lost)

    def drop(self, execution_id: str, token: int) -> None: ...

    def keeps(self, execution_id: str, token: int) -> bool:
        return False


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_a_cancel_ends_the_async_tool_that_runs(world: World, is_async: bool, idempotent: bool) -> None:
    """Its owner learns of it from the lease and cancels the call, instead of waiting for its end."""
    keeper = world.engine.keeper = _Keeper()
    started = threading.Event()
    ended: list[str] = []

    @tool(idempotent=idempotent)
    async def wire(ctx: StepContext) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    @flow("t.cancel", steps=[wire])
    def sync_body(ctx: FlowContext) -> None:
        ctx.run(wire)

    @flow("t.acancel", steps=[wire])
    async def async_body(ctx: AsyncFlowContext) -> None:
        await ctx.run(wire)

    def cancel() -> str:
        started.wait(10)
        world.loom.cancel("x")
        keeper.on_lost[0]()
        return "cancelled"

    other = threading.Thread(target=lambda: in_thread(cancel))
    other.start()
    in_thread((async_body if is_async else sync_body).using(execution_id="x").start)
    other.join(10)
    assert ended == ["cancelled"]
    status = world.state("x").frames["wire"].status
    assert world.state("x").status == Status.CANCELLED
    assert status == (FrameStatus.RUNNING if idempotent else FrameStatus.IN_DOUBT)


def test_a_tool_is_cancelled_at_once_if_the_lease_went_before_it_began(world: World) -> None:
    """No gap between the marker and the call."""
    keeper = world.engine.keeper = _Keeper()
    reached: list[str] = []

    @tool
    async def wire(ctx: StepContext) -> None:
        await asyncio.sleep(60)

    @flow("t.gap", steps=[wire])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(wire)

    def point(at: str, execution_id: str, step_id: str) -> None:
        if at == "in-effect":
            reached.append(at)
            keeper.on_lost[0]()

    world.engine.crash_point = point
    handle = in_thread(body.start)
    assert reached == ["in-effect"]
    assert world.kinds(handle.id)[-1] == "STEP_STARTED"


# What tools see of the world around them.


def test_tools_see_the_bodys_context_variables(world: World) -> None:
    """Both kinds of tools, in async flows and in sync ones, with a timeout and without."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")

    @tool
    def sync_tool(ctx: StepContext) -> str:
        return tenant.get()

    @tool(timeout=30)
    def timed_tool(ctx: StepContext) -> str:
        return tenant.get()

    @tool
    async def async_tool(ctx: StepContext) -> str:
        return tenant.get()

    tools = [sync_tool, timed_tool, async_tool]

    @flow("t.context", steps=tools)
    def body(ctx: FlowContext) -> list[str]:
        token = tenant.set("acme")
        try:
            return [ctx.run(each) for each in tools]
        finally:
            tenant.reset(token)

    @flow("t.acontext", steps=tools)
    async def abody(ctx: AsyncFlowContext) -> list[str]:
        tenant.set("acme")
        return [await ctx.run(each) for each in tools]

    assert body.start().result() == ["acme"] * 3
    assert abody.start().result() == ["acme"] * 3
    assert tenant.get() == "nobody"


@pytest.mark.parametrize("is_async", [False, True])
def test_tools_see_the_language_and_the_zone_of_the_body(world: World, is_async: bool) -> None:
    """In whatever thread they run; Django keeps both by thread."""

    def seen() -> str:
        return f"{translation.get_language()} {timezone.get_current_timezone_name()}"

    @tool
    def plain_tool(ctx: StepContext) -> str:
        return seen()

    @tool(timeout=30)
    def timed_tool(ctx: StepContext) -> str:
        return seen()

    @tool
    async def async_tool(ctx: StepContext) -> str:
        return seen()

    tools = [plain_tool, timed_tool, async_tool]

    @flow("t.local", steps=tools)
    def body(ctx: FlowContext) -> list[str]:
        with translation.override("de"), timezone.override("Asia/Tokyo"):
            side = ctx.parallel({each.name: each.bind() for each in tools})
            return [*side.values(), *(ctx.run(each) for each in tools)]

    @flow("t.alocal", steps=tools)
    async def abody(ctx: AsyncFlowContext) -> list[str]:
        with translation.override("de"), timezone.override("Asia/Tokyo"):
            side = await ctx.parallel({each.name: each.bind() for each in tools})
            return [*side.values(), *[await ctx.run(each) for each in tools]]

    before = seen()
    chosen: Any = abody if is_async else body
    assert in_thread(chosen.start).result() == ["de Asia/Tokyo"] * 6
    assert seen() == before


in_database = pytest.mark.parametrize(
    "world",
    [pytest.param("database", marks=pytest.mark.django_db(transaction=True))],
    indirect=True,
)


@tool
async def count(ctx: StepContext) -> int:
    return await User.objects.acount()


@tool(timeout=30)
async def nested(ctx: StepContext) -> int:
    async def again() -> int:
        return await User.objects.acount()

    return await sync_to_async(lambda: async_to_sync(again)())()


async def _in_sync_view(start: Callable[[], Any], astart: Callable[[], Awaitable[Any]]) -> Any:
    async with ThreadSensitiveContext():
        try:
            return await sync_to_async(start)()
        finally:
            await sync_to_async(connections.close_all)()


async def _in_async_view(start: Callable[[], Any], astart: Callable[[], Awaitable[Any]]) -> Any:
    async with ThreadSensitiveContext():
        try:
            return await astart()
        finally:
            await sync_to_async(connections.close_all)()


async def _awaited(start: Callable[[], Any], astart: Callable[[], Awaitable[Any]]) -> Any:
    return await astart()


@in_database
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "around",
    [
        lambda start, astart: start(),
        lambda start, astart: asyncio.run(_in_sync_view(start, astart)),
        lambda start, astart: asyncio.run(_in_async_view(start, astart)),
        lambda start, astart: asyncio.run(_awaited(start, astart)),
        lambda start, astart: async_to_sync(_awaited)(start, astart),
        lambda start, astart: async_to_sync(_in_sync_view)(start, astart),
    ],
    ids=["plain", "sync view", "async view", "asyncio.run", "async_to_sync", "async_to_sync in a request"],
)
def test_async_tools_use_the_orm_wherever_the_flow_was_started(
    world: World, is_async: bool, around: Callable[..., Any]
) -> None:
    """The thread that Django's async ORM works in is loom's own, not the one that waits for the body."""

    @flow("t.orm", steps=[count, nested])
    def sync_body(ctx: FlowContext) -> int:
        return ctx.run(count) + ctx.run(nested)

    @flow("t.aorm", steps=[count, nested])
    async def async_body(ctx: AsyncFlowContext) -> int:
        mine = await User.objects.acount()
        return mine + await ctx.run(count) + await ctx.run(nested)

    User.objects.create(username="a")
    started: Any = async_body if is_async else sync_body

    def play() -> Any:
        try:
            return around(started.start, started.astart)
        finally:
            # asgiref's one thread outlives the test, with the connection that astart() made there.
            asyncio.run(sync_to_async(connections.close_all)())

    assert in_thread(play).result() == (3 if is_async else 2)


@in_database
@pytest.mark.parametrize("is_async", [False, True])
def test_connections_of_async_tools_end_with_the_body(world: World, is_async: bool) -> None:
    """A connection that is lost spoils one body at most; and between two tools it is checked."""
    seen: list[tuple[threading.Thread, Any]] = []

    @tool
    async def look(ctx: StepContext) -> int:
        def work() -> int:
            if seen and connection.vendor == "postgresql":
                assert connection.connection is not None
                connection.connection.close()
            count = User.objects.count()
            seen.append((threading.current_thread(), connections["default"]))
            return count

        return await sync_to_async(work)()

    @flow("t.conn", steps=[look])
    def sync_body(ctx: FlowContext) -> int:
        return ctx.run(look) + ctx.run(look)

    @flow("t.aconn", steps=[look])
    async def async_body(ctx: AsyncFlowContext) -> int:
        return await ctx.run(look) + await ctx.run(look)

    assert (async_body if is_async else sync_body).start().result() == 0
    (first, _), (second, _) = seen
    assert first is second
    assert not first.is_alive()
    assert [used.connection for _, used in seen] == [None, None]


class AsyncToolsInTestCase(TestCase):
    """In a TestCase everything stays on the thread and the connection that hold the test's transaction."""

    def tearDown(self) -> None:
        for name in ("t.case", "t.acase"):
            definitions.registry.forget(name)

    def _flows(self) -> list[Any]:
        @flow("t.case", steps=[count, nested])
        def sync_body(ctx: FlowContext) -> int:
            return ctx.run(count) + ctx.run(nested)

        @flow("t.acase", steps=[count, nested])
        async def async_body(ctx: AsyncFlowContext) -> int:
            mine = await User.objects.acount()
            return mine + await ctx.run(count) + await ctx.run(nested)

        return [sync_body, async_body]

    def test_the_orm_sees_the_tests_rows(self) -> None:
        """Rows that were never committed are there for async tools too."""
        User.objects.create(username="a")
        assert [body.start().result() for body in self._flows()] == [2, 3]

    async def test_an_async_test_sees_them_too(self) -> None:
        """Django runs such a test beside the thread that holds its transaction."""
        await User.objects.acreate(username="a")
        handles = [await body.astart() for body in self._flows()]
        assert [await handle.aresult() for handle in handles] == [2, 3]
