"""A loop that runs for months keeps nothing of its turns: neither of idle ones nor of those that served something."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from datetime import timedelta
from typing import Any, Final

import pytest
from django.db import connection

from loom_django import AsyncFlowContext, FlowContext, StepContext, flow, tool
from loom_django.definitions import Flow
from loom_django.engine.body import Body
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.loop import Loop, Service
from loom_django.services.recovery import RecoveryService
from loom_django.services.schedules import ScheduleService
from loom_django.services.timers import TimerService
from loom_django.services.worker import WorkerService
from tests.engine.conftest import World

# Turns that are measured; fifty thousand would tell no more than that a turn keeps nothing.
TURNS: Final = 200

# Bytes that a turn may leave, on the average: less than the smallest object. Measured is what Python allocates.
KEPT: Final = 32


def loop_over(world: World) -> tuple[Loop, WorkerService]:
    """All services of a worker, as its command has them; none of them waits for its time."""
    engine = world.engine
    world.loom.dispatcher = WorkerDispatcher()
    worker = WorkerService(engine, concurrency=1)
    services: list[Service] = [
        worker,
        TimerService(engine, lambda: world.loom.dispatcher),
        ScheduleService(engine, lambda: world.loom.dispatcher, declared=list),
        RecoveryService(world.loom, clock=lambda: float("inf")),
    ]
    loop = Loop(
        services, interval=lambda: 0.0, after_turn=engine.store.close_old_connections, draw=lambda: 0.5
    )
    return loop, worker


def kept_by(loop: Loop, turns: int) -> int:
    """Bytes that are allocated after so many turns and were not before them."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(turns):
        loop.turn()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


@pytest.mark.parametrize(
    "world", [pytest.param("database", marks=pytest.mark.django_db(transaction=True))], indirect=True
)
@pytest.mark.parametrize("debug", [False, True], ids=["", "DEBUG"])
def test_idle_turns_leave_nothing(
    world: World, settings, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    """Nor does Django's list of queries grow under DEBUG, which nobody empties outside of requests."""
    monkeypatch.undo()
    settings.DEBUG = debug
    loop, worker = loop_over(world)
    tracemalloc.start()
    try:
        kept_by(loop, 50)  # caches fill
        kept = kept_by(loop, TURNS)
    finally:
        tracemalloc.stop()
        worker.drain(10)
    assert kept < KEPT * TURNS
    assert len(connection.queries_log) == 0


@pytest.mark.parametrize(
    "world", [pytest.param("database", marks=pytest.mark.django_db(transaction=True))], indirect=True
)
def test_executions_that_were_served_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With results of a hundred kilobytes and a sleep each: what a second half leaves is not one of them."""
    monkeypatch.undo()

    @flow("mem.big")
    def big(ctx: FlowContext) -> str:
        ctx.sleep(timedelta(microseconds=1))
        return "x" * 100_000

    loop, worker = loop_over(world)

    def serve(count: int, name: str) -> int:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        handles = [big.using(execution_id=f"{name}-{number}").start() for number in range(count)]
        while any(handle.status != "COMPLETED" for handle in handles):
            loop.turn()
        while worker.running:
            loop.turn()
        del handles
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        serve(20, "first")
        kept = serve(20, "second")
    finally:
        tracemalloc.stop()
        worker.drain(10)
    assert kept < 100_000


@tool
def plain(ctx: StepContext) -> int:
    return 1


@tool
async def awaited(ctx: StepContext) -> int:
    return 1


@flow("mem.plain", steps=[plain])
def plain_body(ctx: FlowContext) -> None:
    ctx.run(plain)
    ctx.parallel({"a": plain.bind(), "b": lambda ctx: ctx.run(plain)})
    ctx.suspend("Go")


@flow("mem.awaited", steps=[plain, awaited])
async def awaited_body(ctx: AsyncFlowContext) -> None:
    async def branch(ctx: AsyncFlowContext) -> int:
        return await ctx.run(awaited)

    await ctx.run(plain)
    await ctx.parallel({"a": awaited.bind(), "b": branch})
    await ctx.suspend("Go")


@pytest.mark.parametrize(
    "world", [pytest.param("database", marks=pytest.mark.django_db(transaction=True))], indirect=True
)
@pytest.mark.parametrize("body", [plain_body, awaited_body])
def test_a_run_that_parks_or_ends_leaves_nothing_to_the_collection_of_garbage(
    world: World, monkeypatch: pytest.MonkeyPatch, body: Flow[[], None]
) -> None:
    """Its log may be of megabytes, and a worker collects seldom."""
    ran: list[weakref.ref[Body]] = []
    plainly = Body.__init__

    def noted(self: Body, *args: Any, **kwargs: Any) -> None:
        ran.append(weakref.ref(self))
        plainly(self, *args, **kwargs)

    monkeypatch.setattr(Body, "__init__", noted)
    loop, worker = loop_over(world)
    handle = body.start()
    gc.collect()
    gc.disable()
    try:
        while handle.status != "SUSPENDED" or worker.running:
            loop.turn()
        world.loom.resume(handle.id, event_type="Go")
        while handle.status != "COMPLETED" or worker.running:
            loop.turn()
        assert worker.drain(10)
        assert len(ran) >= 4
        assert [ref for ref in ran if ref() is not None] == []
    finally:
        gc.enable()
