"""Many due timers: taken in passes, and answered together as far as nothing is out of the ordinary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.test.utils import CaptureQueriesContext

from loom_django import FlowContext, flow
from loom_django.engine import answers
from loom_django.engine.outside import note
from loom_django.errors import FlowCodeMismatchError
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.timers import HOLD, PASS, PUT_OFF, TimerService
from loom_django.stores.base import READY, Commit, TimerRow
from loom_django.stores.memory import MemoryStore
from tests.engine.conftest import World

FIRED = ["TIMER_FIRED", "EXECUTION_RESUMED"]
LOOKS = ("select sequence", 'SELECT "loom_execution"')  # with which the fixture looks at what has landed
CALLS = ["read_short", "acquire_fences_at", "append_shared"]


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
    ids = asleep(world, 4)
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
    assert [taken for _, taken, _ in told] == [ids[:2], ids[2:], [], ["late"], []]
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


class Died(BaseException):
    """The process ended here."""


def before(world: World, call: str, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act once, before the next call of that name."""
    honest, acts = getattr(world.engine.store, call), [act]

    def called(*args: Any, **kwargs: Any) -> Any:
        if acts:
            acts.pop()()
        return honest(*args, **kwargs)

    monkeypatch.setattr(world.engine.store, call, called)


def fired(world: World, ids: list[str]) -> list[str]:
    """Those whose wake is their newest fact: once, under one token, to be run by others, and owed no more."""
    store = world.engine.store
    found = [key for key in ids if world.kinds(key)[-2:] == FIRED]
    for key in found:
        assert world.kinds(key).count("TIMER_FIRED") == 1
        assert store.status(key) == Status.RUNNING
        assert store.timers(key) == []
    claims = store.claim_ready(owner="w", token=2, ttl=60, limit=99, known=world.engine.known())
    assert sorted(claim.execution_id for claim in claims) == found
    return found


def test_due_timers_are_fired_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of all logs, one acquire and one append; none is looked at by itself."""
    ids = asleep(world, 5)
    calls: list[str] = []
    for call in (*CALLS, "load"):
        before(world, call, lambda call=call: calls.append(call), monkeypatch)  # type: ignore[misc]
    service = timers(world)
    assert service.tick()
    assert calls == CALLS
    assert service.fired == 5
    assert [world.engine.store.fence(key) for key in ids] == [1] * 5
    assert fired(world, ids) == ids


def test_what_is_out_of_the_ordinary_is_served_by_itself(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a batch one has ended, one's wait is over, one's code is gone, one has a long log, one has two rows due, one a
    deadline: each as it would be alone."""
    store, check = world.engine.store, answers.check_code
    ids = asleep(world, 8)
    over, gone, long, twice, late = ids[:5]
    for key in (over, twice, late):
        row = TimerRow(key, store.timers(key)[0].wake_at + timedelta(microseconds=1), deadline=key == late)
        store.schedule(row)
    store.retire(over, store.timers(over)[0].wake_at)
    store.schedule(TimerRow("lost", store.now() - timedelta(days=1)))

    def checked(engine: Any, fold: Any) -> None:
        if fold.execution_id == gone:
            raise FlowCodeMismatchError(gone, "d.sleeps", "it was changed", "now")
        check(engine, fold)

    monkeypatch.setattr(answers, "check_code", checked)
    monkeypatch.setattr("loom_django.services.timers.SHORT", 2)
    note(world.engine, long, Kind.EXECUTION_DENIED, {"act": "cancel", "principal": "p", "reason": None})
    together: list[str] = []
    append = store.append_shared

    def appended(commits: Sequence[Commit]) -> list[Exception | None]:
        together.extend(commit.execution_id for commit in commits)
        return append(commits)

    monkeypatch.setattr(store, "append_shared", appended)
    service = timers(world)
    assert service.tick()
    assert [row.tries for row in store.timers(gone)] == [1]
    assert len([text for text in caplog.messages if "a wake is put off" in text]) == 1
    assert store.timers(over) == store.timers("lost") == []
    assert world.kinds(over)[-1] == "EXECUTION_SUSPENDED"
    assert world.kinds(late)[-3:] == [*FIRED, "EXECUTION_FAILED"]
    assert fired(world, ids) == [long, twice, *ids[5:]]
    assert sorted(together) == ids[5:]
    monkeypatch.setattr(answers, "check_code", check)
    world.shift(timedelta(seconds=PUT_OFF + 1))
    assert service.tick()
    assert fired(world, [gone]) == [gone]


@pytest.mark.parametrize("call", CALLS)
def test_what_fails_for_a_batch_is_done_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nobody sleeps on because a statement for many was refused."""
    ids = asleep(world, 3)

    def refuse() -> None:
        raise RuntimeError("not now")

    before(world, call, refuse, monkeypatch)
    assert timers(world).tick()
    assert fired(world, ids) == ids


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rival", ["cancels", "wakes"])
def test_a_rival_for_one_of_a_batch_is_met_as_ever(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, rival: str
) -> None:
    """Whoever comes in between wins, or is the one that is woken by it; its neighbours are woken all the same."""
    ids = asleep(world, 3)
    (row,) = world.engine.store.timers(ids[1])

    def act() -> None:
        if rival == "cancels":
            world.loom.cancel(ids[1])
        else:
            answers.fire_timer(world.engine, ids[1], row.wake_at, READY)

    before(world, call, act, monkeypatch)
    service = timers(world)
    assert service.tick()
    assert service.fired == 2
    if rival == "cancels":
        assert world.kinds(ids[1])[-1] == "EXECUTION_CANCELLED"
        assert fired(world, ids) == [ids[0], ids[2]]
    else:
        assert fired(world, ids) == ids


@pytest.mark.parametrize("call", CALLS)
def test_a_loop_that_dies_leaves_its_batch_due(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """At whatever call: nobody takes them while they are held, and after that all are woken."""
    ids = asleep(world, 3)

    def die() -> None:
        raise Died

    before(world, call, die, monkeypatch)
    with pytest.raises(Died):
        timers(world).tick()
    assert not timers(world).tick()
    world.shift(timedelta(seconds=HOLD + 1))
    assert timers(world).tick()
    assert fired(world, ids) == ids


def test_two_loops_wake_each_once(world: World) -> None:
    """Whatever each of them takes, the other leaves alone."""
    ids = asleep(world, 20)
    begin = threading.Barrier(2)

    def serve() -> None:
        service = timers(world, limit=4)
        begin.wait(20)
        while service.tick():
            pass
        world.engine.store.close_connections()

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    while timers(world).tick():  # what one had locked, and the other had to leave
        pass
    assert fired(world, ids) == ids


def test_a_dispatcher_that_fails_for_one_of_a_batch_is_asked_for_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are ready, whoever was told."""
    ids = asleep(world, 3)
    told: list[str] = []

    def dispatch(execution_id: str, *more: Any) -> None:
        if execution_id == ids[0]:
            raise RuntimeError("the broker is away")
        told.append(execution_id)

    monkeypatch.setattr(world.loom.dispatcher, "dispatch", dispatch)
    assert timers(world).tick()
    assert told == ids[1:]
    assert fired(world, ids) == ids


def test_a_batch_asks_the_database_as_often_for_forty_as_for_ten(world: World) -> None:
    """On PostgreSQL a due timer is no statement of its own; on SQLite it is what its append writes."""
    store: Any = world.engine.store
    if isinstance(store, MemoryStore):
        pytest.skip("it has no statements")
    asleep(world, 52)
    with store.grouping():  # as the loop has it: appends go over a connection of their own
        assert timers(world, limit=2).tick()  # what is asked once
        counts = []
        for limit in (10, 40):
            with (
                CaptureQueriesContext(store.connection) as asked,
                CaptureQueriesContext(store._writer.connection) as written,
            ):
                assert timers(world, limit=limit).tick()
            assert len(written) > 0
            sent = [query["sql"] for query in (*asked.captured_queries, *written.captured_queries)]
            counts.append(sum(not sql.startswith(LOOKS) for sql in sent))
    each = (counts[1] - counts[0]) / 30
    assert each <= (2.5 if store.connection.vendor == "sqlite" else 0), counts
    assert counts[0] - 10 * each <= 14
