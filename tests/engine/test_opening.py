"""A start whose body runs at once, in the caller's thread, lands with the first facts of that body."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from loom_django import AsyncFlowContext, FlowContext, StepContext, flow, tool
from loom_django.engine import run as engine_run
from loom_django.errors import ExecutionConflictError, StoreUnavailableError
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.signals import execution_started
from loom_django.stores.base import Commit, WakesMoved
from tests.engine.conftest import World

HOUR = timedelta(hours=1)


@tool
def double(ctx: StepContext, number: int) -> int:
    return number * 2


@tool
async def adouble(ctx: StepContext, number: int) -> int:
    return number * 2


@tool(transactional=True)
def keep(ctx: StepContext, number: int) -> int:
    return number


@flow("t.opening.child")
def child(ctx: FlowContext) -> str:
    return "grown"


@pytest.fixture
def appends(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Commit]:
    """What is appended, in order."""
    landed: list[Commit] = []
    append = world.engine.store.append

    def noted(commit: Commit) -> None:
        append(commit)
        landed.append(commit)

    monkeypatch.setattr(world.engine.store, "append", noted)
    return landed


def kinds(commit: Commit) -> list[str]:
    return [event.kind for event in commit.events]


def _steps(ctx: FlowContext) -> Any:
    return ctx.run(double, 1)


def _ends(ctx: FlowContext) -> Any:
    return ctx.now()


def _fails(ctx: FlowContext) -> Any:
    raise ValueError("of its own")


def _parks(ctx: FlowContext) -> Any:
    return ctx.suspend("Go", timeout=HOUR)


def _receives(ctx: FlowContext) -> Any:
    return ctx.receive("news")


def _sleeps(ctx: FlowContext) -> Any:
    ctx.sleep(HOUR)


def _has_a_child(ctx: FlowContext) -> Any:
    return ctx.await_child(ctx.start_child(child))


def _branches(ctx: FlowContext) -> Any:
    return ctx.parallel({"x": double.bind(1), "y": double.bind(2)})


def _waits_in_branches(ctx: FlowContext) -> Any:
    return ctx.parallel({"x": lambda branch: branch.suspend("Go"), "y": lambda branch: branch.sleep(HOUR)})


def _keeps(ctx: FlowContext) -> Any:
    return ctx.run(keep, 1)


async def _awaits(ctx: AsyncFlowContext) -> Any:
    return await ctx.run(adouble, 1)


async def _awaits_branches(ctx: AsyncFlowContext) -> Any:
    return await ctx.parallel({"x": adouble.bind(1), "y": double.bind(2)})


async def _awaits_an_answer(ctx: AsyncFlowContext) -> Any:
    return await ctx.suspend("Go")


BODIES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a step": (_steps, ["EXECUTION_STARTED", "STEP_STARTED"]),
    "an end": (_ends, ["EXECUTION_STARTED", "EXECUTION_COMPLETED"]),
    "a failure": (_fails, ["EXECUTION_STARTED", "EXECUTION_FAILED"]),
    "a suspend": (_parks, ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]),
    "a receive": (_receives, ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]),
    "a sleep": (_sleeps, ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]),
    "a child": (_has_a_child, ["EXECUTION_STARTED", "CHILD_STARTED"]),
    "branches": (_branches, ["EXECUTION_STARTED", "STEP_STARTED"]),
    "branches that wait": (_waits_in_branches, ["EXECUTION_STARTED"]),
    "a transactional step": (_keeps, ["EXECUTION_STARTED", "STEP_STARTED"]),
    "an async step": (_awaits, ["EXECUTION_STARTED", "STEP_STARTED"]),
    "async branches": (_awaits_branches, ["EXECUTION_STARTED", "STEP_STARTED", "STEP_STARTED"]),
    "an async suspend": (_awaits_an_answer, ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]),
}


@pytest.mark.parametrize("first", BODIES)
@pytest.mark.parametrize("deadline", [None, 2 * HOUR], ids=["", "with a deadline"])
def test_a_start_lands_with_whatever_its_body_does_first(
    world: World, appends: list[Commit], first: str, deadline: timedelta | None
) -> None:
    """One append, and the execution is in the hands that it would be in after two. By itself lands one with a deadline, which
    may pass before the body does anything, and one before branches that have functions of their own."""
    func, expected = BODIES[first]
    body = flow(f"t.opening.{first.replace(' ', '-')}", steps=[double, adouble, keep], deadline=deadline)(
        func
    )
    handle = body.start()
    assert kinds(appends[0]) == (expected if deadline is None else ["EXECUTION_STARTED"])
    assert appends[0].new is not None
    rows = [row for row in world.engine.store.timers(handle.id) if row.deadline]
    assert bool(rows) == (deadline is not None and handle.status not in (Status.COMPLETED, Status.FAILED))
    if first in ("a suspend", "an async suspend", "branches that wait"):
        world.loom.resume(handle.id, event_type="Go")
    if first == "a receive":
        world.loom.send(handle.id, "news", 1)
    world.advance(HOUR)
    assert handle.status == (Status.FAILED if first == "a failure" else Status.COMPLETED)
    assert world.engine.store.held(handle.id) is None
    assert world.engine.store.timers(handle.id) == []
    world.check(handle.id)


def test_a_start_with_an_id_lands_before_its_body_is_entered(world: World, appends: list[Commit]) -> None:
    """Somebody else may have that id: no line of the body runs for a start that is refused, or was made before."""
    entered: list[str] = []

    @flow("t.opening.id", steps=[double])
    def body(ctx: FlowContext, number: int) -> int:
        entered.append(ctx.execution_id)
        return ctx.run(double, number)

    named = body.using(execution_id="mine")
    assert named.start(2).result() == 4
    assert kinds(appends[0]) == ["EXECUTION_STARTED"]
    assert not named.start(2).created
    with pytest.raises(ExecutionConflictError):
        named.start(3)
    assert entered == ["mine"]


def test_a_start_that_others_run_lands_by_itself(world: World, appends: list[Commit]) -> None:
    """Its commit is all that tells them; so does one in a transaction, whose body runs after the commit."""
    body = flow("t.opening.worker", steps=[double])(_steps)
    with world.engine.store.transaction():
        inside = body.start()
        assert kinds(appends[0]) == ["EXECUTION_STARTED"]
    assert inside.status == Status.COMPLETED
    world.loom.dispatcher = WorkerDispatcher()
    appends.clear()
    assert body.start().status == Status.PENDING
    assert [kinds(commit) for commit in appends] == [["EXECUTION_STARTED"]]


def test_a_start_in_a_running_body_lands_by_itself(world: World, appends: list[Commit]) -> None:
    """Its body runs when the one that runs has parked or ended: a crash in between is not to lose it."""
    other = flow("t.opening.other", steps=[double])(_steps)

    @tool
    def begins(ctx: StepContext) -> str:
        return other.start().id

    body = flow("t.opening.begins", steps=[begins])(lambda ctx: ctx.run(begins))
    begun = body.start().result()
    assert next(kinds(commit) for commit in appends if commit.execution_id == begun) == ["EXECUTION_STARTED"]
    assert world.loom.handle(begun).result() == 2


def test_a_successor_follows_a_start_that_has_not_landed(world: World, appends: list[Commit]) -> None:
    """A body that continues as new at once: its start, its end and the next start are one append."""

    @flow("t.opening.again")
    def body(ctx: FlowContext, left: int) -> int:
        return 0 if left == 0 else ctx.continue_as_new("t.opening.again", left - 1)

    assert body.start(1).result() == 0
    assert kinds(appends[0]) == ["EXECUTION_STARTED", "EXECUTION_CONTINUED"]
    assert [kinds(commit) for commit in appends[0].also] == [["EXECUTION_STARTED"]]


def test_a_child_whose_id_is_taken_fails_a_body_that_has_not_landed(
    world: World, appends: list[Commit]
) -> None:
    """The append of both starts is refused for the child's sake; its own start lands with its failure."""
    child.using(execution_id="taken").start()

    @flow("t.opening.taken")
    def body(ctx: FlowContext) -> None:
        ctx.start_child(child.using(execution_id="taken"))

    appends.clear()
    assert body.start().status == Status.FAILED
    assert [kinds(commit) for commit in appends] == [["EXECUTION_STARTED", "EXECUTION_FAILED"]]


def test_a_lease_is_kept_from_the_start_s_landing_on(world: World) -> None:
    """What is renewed must be there; a body that takes its time before its first step would lose its lease otherwise."""
    held: list[tuple[str, int]] = []

    class Keeper:
        def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None:
            held.append((execution_id, len(world.loom.history(execution_id))))

        def drop(self, execution_id: str, token: int) -> None:
            pass

    world.engine.keeper = Keeper()  # type: ignore[assignment]
    before: list[int] = []

    @flow("t.opening.lease", steps=[double])
    def body(ctx: FlowContext) -> int:
        before.append(len(held))
        ctx.run(double, 1)
        return len(held)

    handle = body.start()
    assert before == [0]
    assert held == [(handle.id, 2)]
    assert handle.result() == 1


@pytest.mark.parametrize("landed", [False, True])
def test_a_database_that_is_away_is_told_to_whoever_starts(
    world: World, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """No effect has run, and nobody waits twice; what had landed all the same is under a lease, and is recovered."""
    ran: list[int] = []
    tried: list[str] = []
    store = world.engine.store
    append = store.append

    def away(commit: Commit) -> None:
        tried.append(commit.execution_id)
        if landed:
            append(commit)
        raise StoreUnavailableError(attempts=1)

    @tool
    def effect(ctx: StepContext) -> None:
        ran.append(1)

    @flow("t.opening.away", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    with monkeypatch.context() as patched:
        patched.setattr(store, "append", away)
        with pytest.raises(StoreUnavailableError):
            body.start()
    assert (len(tried), ran) == (1, [])
    assert bool(store.read(tried[0])) == landed
    if landed:
        assert store.held(tried[0]) is not None
        world.shift(HOUR)
        world.recover()
        assert (store.status(tried[0]), ran) == (Status.COMPLETED, [1])


def test_a_start_stands_though_its_body_was_never_entered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the engine's own before the body's first fact: the execution is there, for others to run."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("of the engine's own")

    body = flow("t.opening.broken", steps=[double])(_steps)
    with monkeypatch.context() as patched:
        patched.setattr(engine_run, "_call_of", broken)
        patched.setattr(engine_run, "_ended", broken)
        handle = body.start()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED"]
    assert world.engine.store.held(handle.id) is None
    world.shift(timedelta(minutes=10))
    world.recover()
    assert handle.result() == 2


def test_what_a_body_recorded_without_landing_it_is_not_the_start_s(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker whose append was refused is not left behind: the step has not begun, and nobody is to doubt it."""
    store = world.engine.store
    append = store.append

    @tool(idempotent=False)
    def effect(ctx: StepContext) -> str:
        return "done"

    body = flow("t.opening.refused", steps=[effect])(lambda ctx: ctx.run(effect))

    def refuses(commit: Commit) -> None:
        if any(event.kind == Kind.STEP_STARTED for event in commit.events):
            raise ValueError("no row for this")
        append(commit)

    with monkeypatch.context() as patched:
        patched.setattr(store, "append", refuses)
        handle = body.start()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED"]
    world.shift(timedelta(minutes=10))
    world.recover()
    assert handle.result() == "done"


def test_an_interrupt_before_the_first_step_leaves_the_start(world: World) -> None:
    """Ctrl-C in the body's first line: what was started is there, and ready."""

    seen: list[str] = []

    @flow("t.opening.interrupted", steps=[double])
    def body(ctx: FlowContext) -> int:
        if not seen:
            seen.append(ctx.execution_id)
            raise KeyboardInterrupt
        return ctx.run(double, 2)

    with pytest.raises(KeyboardInterrupt):
        body.start()
    assert world.kinds(seen[0]) == ["EXECUTION_STARTED"]
    world.shift(timedelta(minutes=10))
    world.recover()
    assert world.loom.handle(seen[0]).result() == 4


def test_who_is_told_of_a_start_is_told_before_its_body_is_entered(
    world: World, appends: list[Commit]
) -> None:
    """A receiver that cancels what has started keeps its effects from running."""
    ran: list[int] = []

    @tool
    def effect(ctx: StepContext) -> None:
        ran.append(1)

    def cancel(sender: Any, execution_id: str, **_: Any) -> None:
        world.loom.cancel(execution_id, reason="not allowed")

    body = flow("t.opening.told", steps=[effect])(lambda ctx: ctx.run(effect))
    execution_started.connect(cancel)
    try:
        handle = body.start()
    finally:
        execution_started.disconnect(cancel)
    assert kinds(appends[0]) == ["EXECUTION_STARTED"]
    assert (handle.status, ran) == (Status.CANCELLED, [])


@pytest.mark.parametrize("error", [StoreUnavailableError(attempts=1), ValueError("disk full")])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_hidden_by_a_start_that_does_not_land(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[BaseException]
) -> None:
    """Whoever ends the process is heard; that the start was not recorded stands in the log of the process."""

    def fails(commit: Commit) -> None:
        raise error

    @flow("t.opening.ended")
    def body(ctx: FlowContext) -> None:
        raise raised

    monkeypatch.setattr(world.engine.store, "append", fails)
    with pytest.raises(raised):
        body.start()


def test_an_interrupt_in_the_first_append_leaves_no_marker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has not begun: nobody is to ask an operator what became of it."""
    store = world.engine.store
    append = store.append
    ran: list[str] = []

    @tool(idempotent=False)
    def effect(ctx: StepContext) -> str:
        ran.append(ctx.execution_id)
        return "done"

    body = flow("t.opening.in-append", steps=[effect])(lambda ctx: ctx.run(effect))
    started: list[str] = []

    def interrupted(commit: Commit) -> None:
        monkeypatch.setattr(store, "append", append)
        started.append(commit.execution_id)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        body.start()
    assert world.kinds(started[0]) == ["EXECUTION_STARTED"]
    world.shift(timedelta(minutes=10))
    world.recover()
    assert world.loom.handle(started[0]).result() == "done"
    assert ran == started


@pytest.mark.parametrize("error", [StoreUnavailableError(attempts=1), RuntimeError("of the store's")])
@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_lands_behind_first_facts_that_did_not(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, is_async: bool
) -> None:
    """Branches try no append of their own: their markers would stand in a log that nobody works on."""
    store = world.engine.store
    append = store.append
    tried: list[Commit] = []

    @tool(idempotent=False)
    def effect(ctx: StepContext, number: int) -> int:
        return number

    @tool(idempotent=False)
    async def aeffect(ctx: StepContext, number: int) -> int:
        return number

    def plain(ctx: FlowContext) -> Any:
        return ctx.parallel({name: effect.bind(place) for place, name in enumerate("xyz")})

    async def awaited(ctx: AsyncFlowContext) -> Any:
        return await ctx.parallel({name: aeffect.bind(place) for place, name in enumerate("xyz")})

    body = flow("t.opening.branches-fail", steps=[effect, aeffect])(awaited if is_async else plain)

    def fails_once(commit: Commit) -> None:
        tried.append(commit)
        if len(tried) == 1:
            raise error
        append(commit)

    monkeypatch.setattr(store, "append", fails_once)
    if isinstance(error, StoreUnavailableError):
        with pytest.raises(StoreUnavailableError):
            body.start()
        assert len(tried) == 1
        assert store.read(tried[0].execution_id) == []
        return
    handle = body.start()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED"]
    world.shift(timedelta(minutes=10))
    world.recover()
    assert handle.result() == {"x": 0, "y": 1, "z": 2}


def test_a_start_is_not_waited_for_as_long_as_a_lease(world: World, appends: list[Commit]) -> None:
    """Nobody holds anything yet: a request whose database is away waits for the store's own patience."""
    flow("t.opening.patience", steps=[double])(_steps).start()
    assert [commit.patience > 0 for commit in appends] == [False, True]


def test_a_lease_that_cannot_be_renewed_does_not_stop_a_step_that_is_marked(world: World) -> None:
    """The marker has landed, and the effect runs behind it; its lease lasts as long as it lasts."""

    class Keeper:
        def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None:
            raise RuntimeError("can't start new thread")

        def drop(self, execution_id: str, token: int) -> None:
            pass

    world.engine.keeper = Keeper()  # type: ignore[assignment]
    assert flow("t.opening.no-thread", steps=[double])(_steps).start().result() == 2


def test_a_first_park_that_is_refused_looks_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake that came since the body has looked is no failure: it parks with what it sees then."""
    store = world.engine.store
    append = store.append

    def refused_once(commit: Commit) -> None:
        monkeypatch.setattr(store, "append", append)
        raise WakesMoved(commit.execution_id, commit.first_sequence)

    monkeypatch.setattr(store, "append", refused_once)
    handle = flow("t.opening.looks-again")(_receives).start()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]
    world.loom.send(handle.id, "news", 1)
    assert handle.result() == 1
