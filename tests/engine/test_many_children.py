"""What a thousand children of one parent cost: its log stays as long as it must be, and no end reads it all."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from unittest.mock import patch

import pytest

from loom_django import FlowContext, WaitTimedOut, flow
from loom_django.engine.core import random_token
from loom_django.engine.run import run_execution
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.timers import TimerService
from tests.engine.conftest import World

# A thousand when this was written.
CHILDREN: Final = 100
HALF: Final = CHILDREN // 2
FEW: Final = 5

# Rows that are read, and calls to the store, for each end at most. To look at all of them at each end is 200 and more.
ROWS: Final = 60
CALLS: Final = 12


class Counted:
    """A store that counts its calls, and the rows that they return."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        honest = getattr(self._store, name)
        if not callable(honest):
            return honest

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = honest(*args, **kwargs)
            self.calls[name] += 1
            rows = getattr(result, "events", result)
            if isinstance(rows, list | tuple | dict | set):
                self.rows[name] += len(rows)
            return result

        return counted

    def clear(self) -> None:
        self.calls.clear()
        self.rows.clear()


@pytest.fixture
def counted(world: World, monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.undo()  # the projection is checked after every append elsewhere
    world.loom.dispatcher = WorkerDispatcher()
    world.engine.draw = random.Random(7).random
    store = Counted(world.engine.store)
    world.engine.store = store  # type: ignore[assignment]
    return store


@pytest.mark.parametrize("told", [True, False], ids=["at-once", "by-the-loop"])
def test_an_end_costs_as_much_among_many_as_among_few(world: World, counted: Counted, told: bool) -> None:
    """Whoever ends, in whatever order: a few rows are read, but for the few ends at which all is looked at.

    The parent is woken once, and its log holds a start and an outcome for each child and no event more.
    """

    @flow("m.child")
    def child(ctx: FlowContext, number: int) -> int:
        return number

    @flow("m.parent")
    def parent(ctx: FlowContext) -> int:
        return sum(ctx.await_children([ctx.start_child(child, number) for number in range(CHILDREN)]))

    engine = world.engine
    if not told:
        engine.woken = lambda execution_id: None
    timers = TimerService(engine, lambda: world.loom.dispatcher)
    parent.using(execution_id="p").start()
    run(world, "p")
    counted.clear()
    order = [f"p/m.child#{number + 1}" for number in range(CHILDREN)]
    random.Random(3).shuffle(order)
    for execution_id in order:
        run(world, execution_id)
        while timers.tick():
            pass
    ends = Counter(counted.rows), Counter(counted.calls)
    run(world, "p")

    assert world.loom.handle("p").result() == sum(range(CHILDREN))
    kinds = Counter(world.kinds("p"))
    assert kinds == {
        "EXECUTION_STARTED": 1,
        "CHILD_STARTED": CHILDREN,
        "EXECUTION_SUSPENDED": 1,
        "EXECUTION_RESUMED": 1,
        "DECISION_RECORDED": CHILDREN,
        "EXECUTION_COMPLETED": 1,
    }
    assert engine.store.timers("p") == []
    rows, calls = ends
    read = rows["load"] + rows["read"] + rows["ended"]
    assert read < ROWS * CHILDREN, rows
    assert (
        calls["head"] + calls["load"] + calls["read"] + calls["ended"] + calls["append"] < CALLS * CHILDREN
    ), calls


def test_ends_are_seen_to_be_in_vain_without_the_parents_log(world: World, counted: Counted) -> None:
    """While the parent starts its children, and while it is parked: its log is read for the last end alone.

    The re-drive rows that a batch of ends leaves are served with one look.
    """

    early = [f"p/m.number#{number + 1}" for number in range(HALF)]  # they end before the parent parks

    @flow("m.number")
    def child(ctx: FlowContext, number: int) -> int:
        return number

    @flow("m.fans")
    def parent(ctx: FlowContext) -> int:
        children = [ctx.start_child(child, number) for number in range(CHILDREN)]
        while early:
            run(world, early.pop())
        return sum(ctx.await_children(children))

    timers = TimerService(world.engine, lambda: world.loom.dispatcher)
    parent.using(execution_id="p").start()
    before = counted.calls["load"]
    run(world, "p")
    assert counted.calls["load"] - before == HALF + 1  # what each body reads of its own log

    counted.clear()
    for number in range(HALF, CHILDREN - 1):
        run(world, f"p/m.number#{number + 1}")
    assert counted.calls["load"] == CHILDREN - 1 - HALF
    # A look asks where the parent stands, and for one child that lives.
    assert counted.calls["head"] == CHILDREN - 1 - HALF
    assert counted.calls["ended"] == counted.rows["ended"] == CHILDREN - 1 - HALF

    counted.clear()
    while timers.tick():
        pass
    batches = counted.calls["claim_due"] - 1  # the last one brought nothing
    assert (counted.calls["retire"], counted.calls["retire_redrives"]) == (0, batches)
    assert counted.calls["head"] == 2 * batches
    assert counted.calls["load"] == 0

    run(world, f"p/m.number#{CHILDREN}")
    run(world, "p")
    assert world.loom.handle("p").result() == sum(range(CHILDREN))


def test_whoever_looks_looks_for_those_that_come_meanwhile(world: World, counted: Counted) -> None:
    """Their ends are no more looks than one, which begins after them; the last of them is seen by it."""

    @flow("m.each")
    def child(ctx: FlowContext, number: int) -> int:
        return number

    @flow("m.all")
    def parent(ctx: FlowContext) -> int:
        return sum(ctx.await_children([ctx.start_child(child, number) for number in range(FEW)]))

    parent.using(execution_id="p").start()
    run(world, "p")
    looked, go_on = threading.Event(), threading.Event()
    ended = world.engine.store.ended

    def slow(ids: Any) -> Any:
        seen = ended(ids)
        looked.set()
        assert go_on.wait(60)
        return seen

    world.engine.store.ended = slow  # type: ignore[method-assign]
    counted.clear()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(run, world, "p/m.each#1")
        assert looked.wait(60)
        for number in range(1, FEW):
            run(world, f"p/m.each#{number + 1}")
        assert counted.calls["head"] == 1
        go_on.set()
        first.result()
        thread.submit(world.engine.store.close_connections).result()
    assert counted.calls["head"] == 2
    assert world.state("p").status is Status.RUNNING
    run(world, "p")
    assert world.loom.handle("p").result() == sum(range(FEW))


def test_a_look_that_breaks_off_is_in_nobodys_way(world: World) -> None:
    """The next one is made, by whoever comes next; so it is in a forked process, which has not the thread that looks."""
    watch = world.engine.watch

    def broken() -> bool:
        raise ValueError("the database is away")

    def nested() -> bool:
        assert watch.told_together("p", lambda: False) is True  # left to the one that is under way
        assert watch.told_together("q", lambda: False) is False
        return False

    with pytest.raises(ValueError, match="away"):
        watch.told_together("p", broken)
    assert watch.told_together("p", nested) is False

    def forked() -> bool:
        with patch("os.getpid", return_value=0):
            return not watch.told_together("p", lambda: False)

    assert watch.told_together("p", forked) is True
    assert watch._looking == {}


def waits_on(world: World, execution_id: str) -> bool:
    """True if it is parked, and known to be so in vain for whoever looks."""
    head = world.engine.store.head(execution_id)
    assert head is not None
    return head.status is Status.SUSPENDED and world.engine.watch.in_vain(world.engine, execution_id, head)


def run(world: World, execution_id: str) -> None:
    store, token = world.engine.store, random_token()
    assert store.claim(execution_id, owner="w", token=token, ttl=600)
    run_execution(world.engine, execution_id, token=token, fence=store.fence(execution_id) or None)


def test_what_is_remembered_of_a_park_is_forgotten_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the child that is remembered, a new park, and a log begun anew: each is looked at whole."""
    monkeypatch.undo()
    world.loom.dispatcher = WorkerDispatcher()

    @flow("m.waits")
    def child(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    @flow("m.twice")
    def parent(ctx: FlowContext) -> Any:
        children = [ctx.start_child(child) for _ in range(4)]
        return [ctx.await_children(children[:2]), ctx.await_children(children[2:])]

    parent.using(execution_id="p").start()
    run(world, "p")
    names = [f"p/m.waits#{number + 1}" for number in range(4)]
    for name in names:
        run(world, name)
    for number, name in enumerate((names[2], names[1], names[0], names[3])):
        world.loom.resume(name, event_type="Go", payload=number)
        run(world, name)
        # The third end is the last that the first wait is on; the second wait has one child left then.
        if number == 2:
            assert not waits_on(world, "p")
            run(world, "p")
            assert world.state("p").parked
        elif number < 2:
            assert waits_on(world, "p")
    run(world, "p")
    assert world.loom.handle("p").result() == [[2, 1], [0, 3]]
    assert not waits_on(world, "p")


def test_only_so_many_parents_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest ones; the others are looked at whole, and woken all the same."""
    monkeypatch.setattr("loom_django.engine.watch.MOST", 2)
    world.loom.dispatcher = WorkerDispatcher()

    @flow("m.one")
    def child(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    @flow("m.pair")
    def parent(ctx: FlowContext) -> Any:
        return ctx.await_children([ctx.start_child(child) for _ in range(2)])

    for name in ("a", "b", "c"):
        parent.using(execution_id=name).start()
        run(world, name)
        for number in (1, 2):
            run(world, f"{name}/m.one#{number}")
        world.loom.resume(f"{name}/m.one#1", event_type="Go", payload=name)
        run(world, f"{name}/m.one#1")
    assert [waits_on(world, name) for name in "abc"] == [False, True, True]
    for name in ("a", "b", "c"):
        world.loom.resume(f"{name}/m.one#2", event_type="Go", payload=name)
        run(world, f"{name}/m.one#2")
        run(world, name)
        assert world.loom.handle(name).result() == [name, name]


def test_a_remembered_wait_has_its_timeout_and_what_comes_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-drive that falls on the very instant does not swallow it; and the next wait is not taken for that one."""
    monkeypatch.undo()
    world.loom.dispatcher = WorkerDispatcher()

    @flow("m.slow")
    def child(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    @flow("m.patient")
    def parent(ctx: FlowContext) -> Any:
        children = [ctx.start_child(child) for _ in range(2)]
        try:
            return ctx.await_children(children, timeout=timedelta(hours=1))
        except WaitTimedOut:
            return ctx.receive("m")

    parent.using(execution_id="p").start()
    for name in ("p", "p/m.slow#1", "p/m.slow#2"):
        run(world, name)
    world.loom.resume("p/m.slow#1", event_type="Go")
    run(world, "p/m.slow#1")
    store = world.engine.store
    assert waits_on(world, "p")
    [timeout] = [row for row in store.timers("p") if row.redrive is None]
    store.schedule(replace(timeout, redrive=0))
    world.advance(timedelta(hours=1))
    run(world, "p")
    world.loom.send("p", "m", "late")
    run(world, "p")
    assert world.loom.handle("p").result() == "late"
