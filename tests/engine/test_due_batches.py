"""Many due timers: taken in passes, and answered together as far as nothing is out of the ordinary."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from loom_django import FlowContext, flow
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.timers import PASS, TimerService
from loom_django.stores.base import TimerRow
from tests.engine.conftest import World


def asleep(world: World, count: int) -> list[str]:
    """Executions whose sleep is over, a millisecond apart, for others to run on."""

    @flow("d.sleeps")
    def body(ctx: FlowContext, number: int) -> str:
        ctx.sleep_until(ctx.now() + timedelta(seconds=60, milliseconds=number))
        return "woken"

    ids = [body.using(execution_id=f"d{number:02}").start(number).id for number in range(count)]
    world.loom.dispatcher = WorkerDispatcher()
    world.shift(timedelta(seconds=120))
    return ids


def timers(world: World, **options: Any) -> TimerService:
    return TimerService(world.engine, lambda: world.loom.dispatcher, **options)


def test_a_pass_goes_on_behind_what_it_has_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there are many due rows each look begins where the last one ended; then it begins at the head again, where
    what was owed late is found."""
    ids = asleep(world, 5)
    store, told = world.engine.store, []
    claim = store.claim_due

    def noted(*, since: Any, **options: Any) -> Any:
        dues = claim(since=since, **options)
        told.append((since, [due.row.execution_id for due in dues], dues[-1].at if dues else None))
        if len(told) == 1:
            store.schedule(TimerRow("late", dues[0].at - timedelta(seconds=1)))
        return dues

    monkeypatch.setattr(store, "claim_due", noted)
    service = timers(world, limit=2, clock=lambda: 1.0)
    while service.tick():
        pass
    assert [taken for _, taken, _ in told] == [ids[:2], ids[2:4], ids[4:], ["late"], []]
    assert [since for since, _, _ in told] == [None, told[0][2], told[1][2], None, None]


def test_a_pass_ends_with_its_time(world: World) -> None:
    """However much is due: what was owed late is looked for again after a second."""
    ids = asleep(world, 5)
    now = [1.0]
    service = timers(world, limit=1, clock=lambda: now[0])
    assert service.tick()
    world.engine.store.schedule(TimerRow("late", world.engine.store.now() - timedelta(days=1)))
    assert service.tick()
    assert len(world.engine.store.timers("late")) == 1
    now[0] += PASS
    assert service.tick()
    assert world.engine.store.timers("late") == []
    assert [len(world.engine.store.timers(key)) for key in ids] == [0, 0, 1, 1, 1]
