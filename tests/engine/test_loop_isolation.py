"""What a body or a tool may do to the event loop that it shares, and what must not come of it for the others."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from django.db import connection, transaction
from django.dispatch import Signal
from django.utils import timezone, translation

from loom_django import AsyncFlowContext, StepContext, flow, signals, tool
from loom_django.engine import calls, shared
from loom_django.engine.drive import abandoned
from loom_django.engine.threads import Threads
from loom_django.kernel.state import Status
from tests.engine.test_shared import PATIENCE, Site, _Keeper, eventually, site

__all__ = ["site"]


@pytest.mark.parametrize("turns", range(5))
def test_a_task_that_ends_just_after_its_tool_holds_nobody_up(site: Site, turns: int) -> None:
    """However many turns of the loop it takes after the tool has returned."""

    @tool
    async def leaves(ctx: StepContext) -> int:
        async def soon() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        left.append(asyncio.create_task(soon()))
        return 1

    left: list[asyncio.Task[None]] = []

    @flow("a.leaves", steps=[leaves])
    async def body(ctx: AsyncFlowContext) -> int:
        return await ctx.run(leaves)

    handle = body.start()
    assert site.run(handle) == [Status.COMPLETED]


def test_a_lost_lease_leaves_a_tool_the_time_to_clean_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled once: its finally may await within the grace time."""
    monkeypatch.setattr(calls, "CANCEL_GRACE", 5.0)
    keeper = site.world.engine.keeper = _Keeper()
    inside, cleaned = threading.Event(), threading.Event()

    @tool(idempotent=True)
    async def wire(ctx: StepContext) -> None:
        inside.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.set()

    @flow("a.cleans", steps=[wire])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(wire)

    handle = body.start()
    site.begin(handle)
    assert inside.wait(PATIENCE)
    keeper.lost[handle.id]()
    assert site.ended(handle) == [Status.RUNNING]
    assert cleaned.is_set()


def test_a_branch_that_waits_inside_a_task_group_waits(site: Site) -> None:
    """The group wraps what leaves it; the branch is left as without one."""

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("a.groups", steps=[step])
    async def body(ctx: AsyncFlowContext) -> Any:
        async def grouped(ctx: AsyncFlowContext) -> Any:
            async with asyncio.TaskGroup():
                return await ctx.receive("go")

        async def beside(ctx: AsyncFlowContext) -> int:
            return await ctx.run(step)

        return (await ctx.parallel({"grouped": grouped, "beside": beside}))["grouped"]

    handle = body.start()
    assert site.run(handle) == [Status.SUSPENDED]
    site.world.loom.send(handle.id, "go", 7)
    while site.worker.claimed < 2:
        site.worker.tick()
    assert site.ended(handle) == [Status.COMPLETED]
    assert handle.result() == 7


def test_branches_that_use_threads_at_a_time_leave_none_behind(site: Site) -> None:
    """A tool that ends while its sibling's sync_to_async is under way has nothing to do with it."""
    from asgiref.sync import sync_to_async

    seen: list[int] = []

    @tool
    async def slow(ctx: StepContext) -> None:
        await sync_to_async(time.sleep)(0.2)

    @tool
    async def quick(ctx: StepContext) -> None:
        await asyncio.sleep(0.02)

    @flow("a.threads", steps=[slow, quick])
    async def body(ctx: AsyncFlowContext) -> None:
        async def others(ctx: AsyncFlowContext) -> None:
            for _ in range(3):
                await ctx.run(quick)
                seen.append(abandoned.count)

        await ctx.parallel({"slow": slow.bind(), "others": others})

    handle = body.start()
    assert site.run(handle) == [Status.COMPLETED]
    assert seen == [0, 0, 0]


def test_a_plain_tool_whose_lease_went_while_it_waited_for_a_thread_does_not_begin(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another owner may have begun it by then."""
    keeper = site.world.engine.keeper = _Keeper()
    monkeypatch.setattr(shared, "TOOL_THREADS", 1)
    release = threading.Event()
    began: list[str] = []

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> None:
        began.append(ctx.execution_id)
        release.wait(PATIENCE)

    @flow("a.slot", steps=[wire])
    async def body(ctx: AsyncFlowContext) -> None:
        await ctx.run(wire)

    first, second = body.start(), body.start()
    site.begin(first, second)
    try:
        eventually(lambda: len(began) == 1)
        late = second if began == [first.id] else first
        eventually(lambda: site.world.kinds(late.id)[-1] == "STEP_STARTED")
        keeper.lost[late.id]()
    finally:
        release.set()
    site.ended(first, second)
    assert late.id not in began


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("world", ["database"], indirect=True)
def test_a_transaction_left_in_a_thread_is_not_the_next_one_s(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What asyncio.to_thread left open is rolled back."""
    monkeypatch.setattr(shared, "TOOL_THREADS", 1)

    def leave() -> None:
        transaction.atomic().__enter__()

    def look() -> bool:
        return connection.in_atomic_block

    @tool
    async def leaves(ctx: StepContext) -> None:
        await asyncio.to_thread(leave)

    @tool
    async def looks(ctx: StepContext) -> bool:
        return await asyncio.to_thread(look)

    @flow("a.leaves-open", steps=[leaves])
    async def one(ctx: AsyncFlowContext) -> None:
        await ctx.run(leaves)

    @flow("a.looks", steps=[looks])
    async def other(ctx: AsyncFlowContext) -> bool:
        return await ctx.run(looks)

    site.run(one.start())
    handle = other.start()
    while site.worker.claimed < 2:
        site.worker.tick()
    assert site.ended(handle) == [Status.COMPLETED]
    assert handle.result() is False


def test_language_and_zone_are_a_body_s_own(site: Site) -> None:
    """As Django keeps them: bodies that interleave, their tools of both kinds, and a plain signal's receivers."""

    @tool
    async def lang(ctx: StepContext) -> str:
        await asyncio.sleep(0.002)
        return f"{translation.get_language()} {timezone.get_current_timezone_name()}"

    @tool
    def lang_plain(ctx: StepContext) -> str:
        return f"{translation.get_language()} {timezone.get_current_timezone_name()}"

    @flow("a.language", steps=[lang, lang_plain])
    async def body(ctx: AsyncFlowContext, mine: str, zone: str) -> list[str]:
        before = await ctx.run(lang)
        with translation.override(mine), timezone.override(zone):
            seen = [await ctx.run(lang), await ctx.run(lang_plain)]
        translation.activate(mine)
        return [before, *seen, await ctx.run(lang_plain)]

    before = f"{translation.get_language()} {timezone.get_current_timezone_name()}"
    given = [("de", "Europe/Berlin"), ("fr", "Europe/Paris"), ("ja", "Asia/Tokyo")] * 4
    started = [body.start(*one) for one in given]
    site.run(*started)
    for (mine, zone), handle in zip(given, started, strict=True):
        one = f"{mine} {zone}"
        assert handle.result() == [before, one, one, f"{mine} {before.split()[1]}"]


def test_a_body_that_cancels_every_task_of_the_loop_harms_itself_at_most(site: Site) -> None:
    """``asyncio.all_tasks()`` are not its own alone."""
    inside: set[str] = set()
    release = threading.Event()

    @tool(idempotent=True)
    async def stay(ctx: StepContext) -> int:
        inside.add(ctx.execution_id)
        while not release.is_set():
            await asyncio.sleep(0.005)
        return 1

    @flow("a.stay", steps=[stay])
    async def neighbour(ctx: AsyncFlowContext) -> int:
        return await ctx.run(stay)

    @flow("a.all", steps=[stay])
    async def hostile(ctx: AsyncFlowContext) -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)

    others = [neighbour.start() for _ in range(3)]
    site.begin(*others)
    eventually(lambda: len(inside) == 3)
    bad = hostile.start()
    while site.worker.claimed < 4:
        site.worker.tick()
    eventually(lambda: site.world.state(bad).status == Status.FAILED)
    release.set()
    assert site.ended(bad, *others) == [Status.FAILED, *[Status.COMPLETED] * 3]


@pytest.mark.parametrize("how", ["block", "raise", "async"])
def test_receivers_of_signals_stop_no_loop(site: Site, how: str) -> None:
    """They wait, or raise, or are async; they are called beside the loop."""
    threads: set[str] = set()

    def receiver(sender: Any, **more: Any) -> None:
        threads.add(threading.current_thread().name)
        if how == "raise":
            raise ValueError(how)
        time.sleep(0.01)

    async def areceiver(sender: Any, **more: Any) -> None:
        threads.add(threading.current_thread().name)
        await asyncio.sleep(0.01)

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("a.signals", steps=[step])
    async def body(ctx: AsyncFlowContext) -> int:
        ctx.emit("note", 1)
        return sum((await ctx.parallel({f"b{n}": step.bind() for n in range(3)})).values()) + await ctx.run(
            step
        )

    sent = [signal for signal in vars(signals).values() if isinstance(signal, Signal)]
    chosen = areceiver if how == "async" else receiver
    for signal in sent:
        signal.connect(chosen)
    try:
        started = [body.start() for _ in range(4)]
        assert site.run(*started) == [Status.COMPLETED] * 4
    finally:
        for signal in sent:
            signal.disconnect(chosen)
    assert threads
    assert "loom-bodies" not in threads


@pytest.mark.parametrize("what", ["plain tools", "calls of the store"])
def test_threads_that_are_all_held_are_told_of(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """By tools that hang, or by what the engine calls in the threads for the store."""
    for name in ("TOOL_THREADS", "STORE_THREADS"):
        monkeypatch.setattr(shared, name, 1)
    monkeypatch.setattr(shared, "FULL", 0.1)
    release = threading.Event()

    def hang() -> None:
        release.wait(PATIENCE)

    @tool
    def hangs(ctx: StepContext) -> None:
        hang()

    @flow("a.held", steps=[hangs])
    async def body(ctx: AsyncFlowContext) -> None:
        if what == "plain tools":
            await ctx.run(hangs)

    def told() -> list[str]:
        return [text for text in caplog.messages if f"{what} of async bodies wait" in text]

    started = [body.start(), body.start()]
    with caplog.at_level(logging.WARNING, "loom_django.run"):
        site.begin(*started)
        if what == "calls of the store":
            place = site.worker._loop
            assert place is not None
            for _ in started:
                place.store.put(hang)
        try:
            eventually(lambda: bool(told()))
        finally:
            release.set()
        assert site.ended(*started) == [Status.COMPLETED] * 2
    assert len(told()) == 1


def test_a_thread_that_could_not_begin_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would ever be done again where there is one of them."""
    begin, done = threading.Thread.start, threading.Event()

    def none(self: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", begin)
        raise RuntimeError("can't start new thread")

    threads = Threads("loom-test", 1)
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.put(lambda: None)
    threads.put(done.set)
    assert done.wait(PATIENCE)
    threads.end()


def test_work_that_raises_leaves_what_is_behind_it_to_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the next one's turn comes."""
    threads = Threads("loom-test", 1)
    begin, done = threading.Event(), threading.Event()

    def fails() -> None:
        begin.wait(PATIENCE)
        raise ValueError("of a test")

    threads.put(fails)
    threads.put(done.set)
    begin.set()
    assert done.wait(PATIENCE)
    threads.end()
    assert "of a test" in caplog.text
