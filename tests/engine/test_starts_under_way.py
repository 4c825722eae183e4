"""Starts of several children in a row: sent at once, landed together, and there before anything can tell of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from loom_django import AsyncFlowContext, FlowContext, StepContext, flow, tool
from loom_django.engine import children, outside, shared, steps, underway
from loom_django.engine.core import random_token
from loom_django.engine.run import Ended, run_execution
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import ExecutionFailedError
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.runtime import Handle
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService
from loom_django.stores.base import Commit
from tests.engine.conftest import World

# The memory store shares no commits: there each start has landed when it returns.
pytestmark = [
    pytest.mark.parametrize("world", ["database"], indirect=True),
    pytest.mark.django_db(transaction=True),
]

CHILDREN: Final = 8

# How the starts of so many go if the second append waits for the rest to be sent.
SIZES: Final = [1, 1, CHILDREN - 2]


class Gate:
    """Stands before the appends that carry starts of children: all but the first wait until it is open."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.reached = threading.Event()
        self.open = threading.Event()
        self.then: Callable[[Commit], None] = lambda commit: None
        self._append = store.append
        monkeypatch.setattr(store, "append", self.append)

    def append(self, commit: Commit) -> None:
        if commit.also:
            self.sizes.append(len(commit.also))
            if len(self.sizes) > 1:
                self.reached.set()
                assert self.open.wait(60)
                self.then(commit)
        self._append(commit)


@pytest.fixture
def gate(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """As in a worker: the appends of several threads share commits."""
    world.loom.dispatcher = WorkerDispatcher()
    with world.engine.store.grouping():
        yield Gate(world.engine.store, monkeypatch)


@pytest.fixture
def child() -> Any:
    @flow("u.child")
    def child(ctx: FlowContext, number: int) -> int:
        return number

    return child


def start_all(ctx: FlowContext, child: Any, gate: Gate, count: int = CHILDREN) -> list[Any]:
    """Start the children; the second one is under way when the others are sent."""
    started = [ctx.start_child(child, number) for number in range(2)]
    assert gate.reached.wait(60)
    return started + [ctx.start_child(child, number) for number in range(2, count)]


def run(world: World, execution_id: str) -> Ended:
    store, token = world.engine.store, random_token()
    assert store.claim(execution_id, owner="w", token=token, ttl=600)
    return run_execution(world.engine, execution_id, token=token, fence=store.fence(execution_id) or None)


def join() -> None:
    """Wait until no thread lands starts any more."""
    for thread in threading.enumerate():
        if thread.name.startswith("loom-starts"):
            thread.join(60)
            assert not thread.is_alive()


def run_to_the_end(world: World, execution_id: str) -> Any:
    run(world, execution_id)
    for number in range(CHILDREN):
        run(world, f"{execution_id}/u.child#{number + 1}")
    run(world, execution_id)
    world.check(execution_id)
    return world.loom.handle(execution_id).result()


def test_starts_in_a_row_land_together(world: World, gate: Gate, child: Any) -> None:
    """The first by itself; what follows while an append is under way goes in the next one."""

    @flow("u.parent")
    def parent(ctx: FlowContext) -> int:
        started = start_all(ctx, child, gate)
        gate.open.set()
        return sum(ctx.await_children(started))

    parent.using(execution_id="p").start()
    assert run_to_the_end(world, "p") == sum(range(CHILDREN))
    assert gate.sizes == SIZES
    assert Counter(world.kinds("p"))["CHILD_STARTED"] == CHILDREN
    join()


def test_only_so_many_go_in_one_append_and_wait_for_it(
    world: World, gate: Gate, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their number and by their size; a body that is too far ahead waits."""
    monkeypatch.setattr(underway, "MOST", 3)

    @flow("u.many")
    def parent(ctx: FlowContext) -> int:
        started = start_all(ctx, child, gate, 5)  # one is there, one under way, three wait
        threading.Timer(0.05, gate.open.set).start()
        started.append(ctx.start_child(child, 5))
        assert gate.open.is_set()
        monkeypatch.setattr(underway, "MOST_TEXT", 0)
        started += [ctx.start_child(child, number) for number in range(6, CHILDREN)]
        return sum(ctx.await_children(started))

    parent.using(execution_id="p").start()
    run_to_the_end(world, "p")
    assert sum(gate.sizes) == CHILDREN
    assert max(gate.sizes) <= 3


def looking(world: World) -> tuple[Any, Callable[[], None], list[int]]:
    """A tool that counts the children of "p" that are there, that count, and what it has found."""
    there: list[int] = []

    def count() -> None:
        found = [world.engine.store.status(f"p/u.child#{number + 1}") for number in range(CHILDREN)]
        there.append(CHILDREN - found.count(None))

    @tool
    def look(ctx: StepContext) -> None:
        count()

    return look, count, there


@pytest.mark.parametrize("what", ["a step", "a decider", "a branch", "the end", "a park", "a look"])
def test_whatever_could_tell_of_a_child_waits_for_it(world: World, gate: Gate, child: Any, what: str) -> None:
    """All of them are there when a tool or a decider runs, and when the body has parked or ended."""
    look, count, there = looking(world)

    @flow("u.tells", steps=[look], durability="deferred")
    def parent(ctx: FlowContext) -> Any:
        started = start_all(ctx, child, gate)
        threading.Timer(0.05, gate.open.set).start()  # what did not wait would look before
        if what == "a step":
            ctx.run(look)
        elif what == "a decider":
            ctx.decide("d", count)
        elif what == "a branch":
            ctx.parallel({"a": lambda ctx: ctx.run(look), "b": lambda ctx: None})
        elif what == "a park":
            ctx.sleep(60)
        elif what == "a look":
            ctx.await_children(started, mode="any")  # one that is not there has ended
        return what

    parent.using(execution_id="p").start()
    run(world, "p")
    count()
    assert there == [CHILDREN] * (2 if what in ("a step", "a decider", "a branch") else 1)
    assert gate.sizes == SIZES
    parked = what in ("a park", "a look")
    assert world.state("p").status is (Status.SUSPENDED if parked else Status.COMPLETED)


async def astart_all(ctx: AsyncFlowContext, child: Any, gate: Gate) -> list[Any]:
    started = [await ctx.start_child(child, number) for number in range(2)]
    assert gate.reached.wait(60)
    return started + [await ctx.start_child(child, number) for number in range(2, CHILDREN)]


def run_in_loop(world: World, *handles: Handle[Any]) -> None:
    """Run these, and what children are there by then, in a worker."""
    worker = WorkerService(world.engine, concurrency=2 * CHILDREN)
    while worker.claimed < len(handles):
        worker.tick()
    with worker._condition:
        assert worker._condition.wait_for(lambda: not worker._held, 60)
    assert worker.drain(60)


async def tell(
    ctx: AsyncFlowContext, what: str, look: Any, count: Callable[[], None], started: list[Any]
) -> None:
    async def looks(branch: AsyncFlowContext) -> None:
        await branch.run(look)

    async def rests(branch: AsyncFlowContext) -> None: ...

    if what == "a step":
        await ctx.run(look)
    elif what == "a decider":
        await ctx.decide("d", count)
    elif what == "a branch":
        await ctx.parallel({"a": looks, "b": rests})
    elif what == "a park":
        await ctx.sleep(60)
    elif what == "a look":
        await ctx.await_children(started, mode="any")  # one that is not there has ended


@pytest.mark.parametrize("shared", [False, True], ids=["a loop of its own", "the loop of a worker"])
@pytest.mark.parametrize("what", ["a step", "a decider", "a branch", "the end", "a park", "a look"])
def test_whatever_could_tell_of_a_child_of_an_async_body_waits_for_it(
    world: World, gate: Gate, child: Any, what: str, shared: bool
) -> None:
    """As of a plain one; and they land together as well."""
    look, count, there = looking(world)

    @flow("u.atells", steps=[look], durability="deferred")
    async def parent(ctx: AsyncFlowContext) -> Any:
        started = await astart_all(ctx, child, gate)
        threading.Timer(0.05, gate.open.set).start()  # what did not wait would look before
        await tell(ctx, what, look, count, started)
        return what

    handle = parent.using(execution_id="p").start()
    if shared:
        run_in_loop(world, handle)
    else:
        run(world, "p")
    count()
    assert there == [CHILDREN] * (2 if what in ("a step", "a decider", "a branch") else 1)
    assert gate.sizes == SIZES
    assert world.kinds("p").count("CHILD_STARTED") == CHILDREN
    if what not in ("a park", "a look"):
        assert handle.result() == what
    world.check("p")
    join()


@pytest.mark.parametrize("ends", [False, True], ids=["a step", "the end"])
def test_the_loop_goes_on_while_a_body_waits_for_its_starts(
    world: World, gate: Gate, child: Any, ends: bool
) -> None:
    """What waits is one body: its neighbours run to their ends meanwhile."""
    waits = threading.Event()

    @tool
    async def step(ctx: StepContext) -> int:
        return 1

    @flow("u.waits", steps=[step])
    async def parent(ctx: AsyncFlowContext) -> int:
        await astart_all(ctx, child, gate)
        waits.set()
        return 1 if ends else await ctx.run(step)

    @flow("u.neighbour", steps=[step])
    async def neighbour(ctx: AsyncFlowContext) -> int:
        while not waits.is_set():
            await asyncio.sleep(0)
        ones = [await ctx.run(step) for _ in range(3)]
        gate.open.set()
        return sum(ones)

    handles = parent.start(), neighbour.start()
    run_in_loop(world, *handles)
    assert [handle.result() for handle in handles] == [1, 3]
    join()


def test_many_bodies_of_a_loop_share_a_few_threads_for_their_starts(
    world: World, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many start children at a time, so many connections are in use; what waits for one goes together."""
    world.loom.dispatcher = WorkerDispatcher()
    store = world.engine.store
    many, count = 2 * CHILDREN, 4
    begun = threading.Barrier(shared.START_THREADS + 1)
    open_gate = threading.Event()
    inside: set[str] = set()
    sent = threading.Semaphore(0)
    append = store.append

    def gated(commit: Commit) -> None:
        name = threading.current_thread().name
        if name.startswith("loom-starts") and name not in inside:
            inside.add(name)
            begun.wait(60)
            assert open_gate.wait(60)
        append(commit)

    @flow("u.manyparents")
    async def parent(ctx: AsyncFlowContext) -> int:
        for number in range(count):
            await ctx.start_child(child, number)
        sent.release()
        return count

    monkeypatch.setattr(store, "append", gated)
    handles = [parent.start() for _ in range(many)]

    def let_go() -> None:
        begun.wait(60)
        if all(sent.acquire(timeout=60) for _ in range(many)):
            held.append(len(inside))
        open_gate.set()

    held: list[int] = []
    watch = threading.Thread(target=let_go)
    watch.start()
    run_in_loop(world, *handles)
    watch.join(60)
    assert held == [shared.START_THREADS]
    assert [handle.result() for handle in handles] == [count] * many
    join()


@pytest.mark.parametrize("ends", [False, True], ids=["a step", "the end"])
@pytest.mark.parametrize("why", ["a note", "an id that is taken", "another owner", "a crash"])
def test_starts_of_an_async_body_that_are_refused(
    world: World, gate: Gate, child: Any, why: str, ends: bool
) -> None:
    """What the body does next learns of it, as that of a plain one does."""
    ran: list[int] = []

    @tool
    async def step(ctx: StepContext) -> None:
        ran.append(1)

    @flow("u.refused", steps=[step])
    async def parent(ctx: AsyncFlowContext) -> None:
        await astart_all(ctx, child, gate)
        gate.open.set()
        if not ends:
            await ctx.run(step)

    def refuse(commit: Commit) -> None:
        gate.then = lambda commit: None
        if why == "a note":
            outside.note(world.engine, "p", Kind.EXECUTION_DENIED, {"act": "cancel", "principal": "x"})
        elif why == "another owner":
            world.engine.store.acquire_fence("p")
        elif why == "a crash":
            raise Unwind(Why.CRASHED)

    gate.then = refuse
    if why == "an id that is taken":
        child.using(execution_id=f"p/u.child#{CHILDREN}").start(7)
        assert world.engine.store.claim(f"p/u.child#{CHILDREN}", owner="w", token=1, ttl=600)
    handle = parent.using(execution_id="p").start()
    run_in_loop(world, handle)
    join()
    told = Counter(world.kinds("p"))
    lands = why in ("a note", "a crash")  # by the body itself: nothing says that it is not its own any more
    assert told["CHILD_STARTED"] == {"an id that is taken": 2, "another owner": 1}.get(why, CHILDREN)
    assert ran == [1] * (lands and not ends)
    status = {"an id that is taken": Status.FAILED, "another owner": Status.RUNNING}
    assert world.state("p").status is status.get(why, Status.COMPLETED)
    there = [world.engine.store.status(f"p/u.child#{number + 1}") is not None for number in range(CHILDREN)]
    assert there.count(True) == {"an id that is taken": 3, "another owner": 1}.get(why, CHILDREN)


@pytest.mark.parametrize("durable", [False, True], ids=["before", "after"])
def test_a_crash_while_starts_are_under_way(world: World, gate: Gate, child: Any, durable: bool) -> None:
    """Whatever of them has landed is taken from the log, the rest is started again under the same ids."""

    def die(commit: Commit) -> None:
        gate.then = lambda commit: None
        if durable:
            gate._append(commit)
        raise Unwind(Why.CRASHED)

    @flow("u.dies")
    def parent(ctx: FlowContext) -> int:
        started = start_all(ctx, child, gate)
        if not crashed:
            crashed.append(True)
            gate.open.set()
            raise Unwind(Why.CRASHED)
        return sum(ctx.await_children(started))

    crashed: list[bool] = []
    gate.then = die
    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.LOST
    join()
    store = world.engine.store
    assert store.release("p", store.held("p").token)  # type: ignore[union-attr]
    assert run_to_the_end(world, "p") == sum(range(CHILDREN))
    assert Counter(world.kinds("p"))["CHILD_STARTED"] == CHILDREN


def test_a_note_of_somebody_else_between_them(world: World, gate: Gate, child: Any) -> None:
    """What is under way is refused; it lands behind the note with what the body makes durable next."""

    def note(commit: Commit) -> None:
        gate.then = lambda commit: None
        outside.note(world.engine, "p", Kind.EXECUTION_DENIED, {"act": "cancel", "principal": "x"})

    @flow("u.noted")
    def parent(ctx: FlowContext) -> int:
        started = start_all(ctx, child, gate)
        gate.open.set()
        return sum(ctx.await_children(started))

    gate.then = note
    parent.using(execution_id="p").start()
    assert run_to_the_end(world, "p") == sum(range(CHILDREN))
    assert world.kinds("p")[1:4] == ["CHILD_STARTED", "EXECUTION_DENIED", "CHILD_STARTED"]
    assert gate.sizes == [1, 1, CHILDREN - 1, CHILDREN - 1]  # refused, and sent once more behind the note


@pytest.mark.parametrize("ends", [False, True], ids=["a step", "the end"])
def test_an_id_that_is_taken_among_them(world: World, gate: Gate, child: Any, ends: bool) -> None:
    """The body is told when it waits for them; nothing of that start, nor of what the body did after it, is written."""

    @tool
    def never(ctx: StepContext) -> None:
        raise AssertionError("a body that was refused goes on")

    @flow("u.taken", steps=[never])
    def parent(ctx: FlowContext) -> None:
        start_all(ctx, child, gate)
        gate.open.set()
        if not ends:
            ctx.run(never)

    child.using(execution_id=f"p/u.child#{CHILDREN}").start(7)
    handle = parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.FINISHED
    with pytest.raises(ExecutionFailedError) as failed:
        handle.result()
    assert failed.value.error_type == "loom_django.errors.ExecutionConflictError"
    assert set(world.kinds("p")) == {"EXECUTION_STARTED", "CHILD_STARTED", "EXECUTION_FAILED"}
    assert world.kinds("p").count("CHILD_STARTED") == 2
    assert world.engine.store.status(f"p/u.child#{CHILDREN - 1}") is None


def test_a_bell_that_breaks(world: World, gate: Gate, child: Any) -> None:
    """Whoever is to be told of what has landed finds out by itself, and the body waits for nobody."""

    def ring() -> None:
        raise RuntimeError("can't start new thread")

    @flow("u.rings")
    def parent(ctx: FlowContext) -> int:
        started = start_all(ctx, child, gate)
        gate.open.set()
        return sum(ctx.await_children(started))

    world.engine.ring = ring
    parent.using(execution_id="p").start()
    assert run_to_the_end(world, "p") == sum(range(CHILDREN))
    assert gate.sizes == SIZES


def test_a_transaction_among_them(
    world: World, gate: Gate, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other branches start children right before it: its append finds them in the log, and not ahead of it."""

    @tool(transactional=True)
    def keep(ctx: StepContext) -> str:
        return "kept"

    @flow("u.transaction", steps=[keep])
    def parent(ctx: FlowContext) -> str:
        return ctx.run(keep)

    def meanwhile(body: Any, *more: Any) -> Any:
        def settled() -> Any:
            assert body.journal.is_settled
            return transaction()

        for number in range(2):
            children._land_start(body, child, {"number": number}, f"p-{number}", f"child:{number}")
        assert gate.reached.wait(60)
        threading.Timer(0.05, gate.open.set).start()
        monkeypatch.setattr(world.engine.store, "transaction", settled)
        return in_transaction(body, *more)

    in_transaction, transaction = steps._in_transaction, world.engine.store.transaction
    monkeypatch.setattr(steps, "_in_transaction", meanwhile)
    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.FINISHED
    assert world.kinds("p")[2:] == ["CHILD_STARTED"] * 2 + ["STEP_COMPLETED", "EXECUTION_COMPLETED"]


def test_a_message_that_is_taken_between_them(
    world: World, gate: Gate, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes it and the mark that it is taken land together, whatever is under way."""

    @flow("u.takes")
    def parent(ctx: FlowContext) -> Any:
        started = start_all(ctx, child, gate)
        said = ctx.receive("m")
        started.append(ctx.start_child(child, CHILDREN))
        return [said, len(started)]

    taken: list[tuple[int, ...]] = []
    append = gate._append

    def note(commit: Commit) -> None:
        append(commit)
        if any(event.kind == Kind.MESSAGE_CONSUMED for event in commit.events):
            taken.append(commit.messages)

    monkeypatch.setattr(gate, "_append", note)
    gate.open.set()
    parent.using(execution_id="p").start()
    world.loom.send("p", "m", "hello")
    run(world, "p")
    assert world.loom.handle("p").result() == ["hello", CHILDREN + 1]
    assert [len(numbers) for numbers in taken] == [1]


def test_an_owner_that_was_fenced_out(world: World, gate: Gate, child: Any) -> None:
    """Nothing of what is under way lands, and the body ends as one that is another's."""

    def take(commit: Commit) -> None:
        gate.then = lambda commit: None
        world.engine.store.acquire_fence("p")

    @flow("u.lost")
    def parent(ctx: FlowContext) -> None:
        start_all(ctx, child, gate)
        gate.open.set()

    gate.then = take
    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.LOST
    assert world.kinds("p") == ["EXECUTION_STARTED", "CHILD_STARTED"]
    assert world.engine.store.status("p/u.child#2") is None


def test_a_refused_start_takes_no_sibling_s_outcome_along(world: World, gate: Gate, child: Any) -> None:
    """Beside branches each start is waited for: what a sibling's tool has done meanwhile is recorded."""
    begun, tried = threading.Event(), threading.Event()

    @tool(idempotent=False)
    def pay(ctx: StepContext) -> str:
        begun.set()
        assert tried.wait(60)
        return "paid"

    def starts(branch: FlowContext) -> None:
        assert begun.wait(60)
        gate.open.set()
        branch.start_child(child, 1)
        try:
            branch.start_child(child.using(execution_id="taken"), 2)
        finally:
            tried.set()

    @flow("u.siblings", steps=[pay])
    def parent(ctx: FlowContext) -> None:
        ctx.parallel({"starts": starts, "pays": pay.bind()})

    child.using(execution_id="taken").start(7)
    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.FINISHED
    kinds = Counter(world.kinds("p"))
    assert (kinds["CHILD_STARTED"], kinds["STEP_COMPLETED"], kinds["EXECUTION_FAILED"]) == (1, 1, 1)


def test_a_refused_start_leaves_a_message_that_came_after_it(world: World, gate: Gate, child: Any) -> None:
    """What was recorded since the first start of those that are taken back is gone, and the message there as before."""

    @tool
    def step(ctx: StepContext) -> None: ...

    @flow("u.message", steps=[step], on_error="park")
    def parent(ctx: FlowContext) -> None:
        ctx.start_child(child, 1)
        ctx.start_child(child.using(execution_id="taken"), 2)
        gate.open.set()
        ctx.receive("news")
        ctx.run(step)

    child.using(execution_id="taken").start(7)
    parent.using(execution_id="p").start()
    world.loom.send("p", "news", "heard")
    assert run(world, "p") is Ended.PARKED
    assert "MESSAGE_CONSUMED" not in world.kinds("p")
    assert len(world.engine.store.inbox("p", "news")) == 1


def test_one_child_s_id_for_two_of_them(world: World, gate: Gate, child: Any) -> None:
    """Refused before it is sent: an append could not tell whose id it is."""

    @flow("u.twins")
    def parent(ctx: FlowContext) -> None:
        start_all(ctx, child, gate)
        try:
            ctx.start_child(child.using(execution_id=f"p/u.child#{CHILDREN}"), 2)
        finally:
            gate.open.set()

    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.FINISHED
    assert world.state("p").status is Status.FAILED
    with pytest.raises(ExecutionFailedError, match="ExecutionConflictError"):
        world.loom.handle("p").result()


def test_children_whose_starts_are_sent_again_are_told_of(world: World, gate: Gate, child: Any) -> None:
    """By whoever lands them: here the body, behind somebody's note."""
    told: list[str] = []
    world.engine.started = told.append

    def note(commit: Commit) -> None:
        gate.then = lambda commit: None
        outside.note(world.engine, "p", Kind.EXECUTION_DENIED, {"act": "cancel", "principal": "x"})

    @flow("u.told")
    def parent(ctx: FlowContext) -> int:
        started = start_all(ctx, child, gate)
        gate.open.set()
        return sum(ctx.await_children(started))

    gate.then = note
    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.PARKED
    assert len(told) == len(set(told)) == CHILDREN


@pytest.mark.parametrize("is_async", [False, True])
def test_a_body_that_has_lost_its_lease_waits_for_what_it_has_sent(
    world: World, gate: Gate, child: Any, is_async: bool
) -> None:
    """Its run is not over while a thread of it writes."""

    def lose(ctx: Any) -> None:
        threading.Timer(0.05, gate.open.set).start()
        raise ctx._body.seal(Why.LOST)

    @flow("u.loses")
    def parent(ctx: FlowContext) -> None:
        start_all(ctx, child, gate)
        lose(ctx)

    @flow("u.aloses")
    async def async_parent(ctx: AsyncFlowContext) -> None:
        await astart_all(ctx, child, gate)
        lose(ctx)

    (async_parent if is_async else parent).using(execution_id="p").start()
    assert run(world, "p") is Ended.LOST
    assert gate.open.is_set()
    assert world.kinds("p").count("CHILD_STARTED") == CHILDREN


@pytest.mark.parametrize("is_async", [False, True])
def test_children_that_are_there_before_the_body_goes_on_are_told_of(
    world: World, gate: Gate, child: Any, is_async: bool
) -> None:
    """Nothing is left to wait for, and they are to run all the same."""
    told: list[str] = []
    world.engine.started = told.append

    def land() -> None:
        gate.open.set()
        join()

    @flow("u.there")
    def parent(ctx: FlowContext) -> None:
        start_all(ctx, child, gate)
        land()

    @flow("u.athere")
    async def async_parent(ctx: AsyncFlowContext) -> None:
        await astart_all(ctx, child, gate)
        land()

    (async_parent if is_async else parent).using(execution_id="p").start()
    told.clear()
    assert run(world, "p") is Ended.FINISHED
    assert sorted(told) == [f"p/u.child#{number + 1}" for number in range(CHILDREN)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_child_s_fact_never_lands_without_the_child(
    world: World, child: Any, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Where the append of a start fails, a sibling branch may land what is kept: then the child with it."""
    world.loom.dispatcher = WorkerDispatcher()
    begun, tried = threading.Event(), threading.Event()
    store = world.engine.store
    append = store.append

    def full(commit: Commit) -> None:
        if commit.also:
            monkeypatch.setattr(store, "append", append)
            raise RuntimeError("the disk is full")
        append(commit)

    @tool(idempotent=False)
    def pay(ctx: StepContext) -> str:
        begun.set()
        assert tried.wait(60)
        return "paid"

    def starts(branch: FlowContext) -> None:
        assert begun.wait(60)
        try:
            branch.start_child(child, 1)
        finally:
            tried.set()

    async def async_starts(branch: AsyncFlowContext) -> None:
        while not begun.is_set():
            await asyncio.sleep(0)
        try:
            await branch.start_child(child, 1)
        finally:
            tried.set()

    @flow("u.full", steps=[pay])
    def parent(ctx: FlowContext) -> None:
        ctx.parallel({"starts": starts, "pays": pay.bind()})

    @flow("u.afull", steps=[pay])
    async def async_parent(ctx: AsyncFlowContext) -> None:
        await ctx.parallel({"starts": async_starts, "pays": pay.bind()})

    (async_parent if is_async else parent).using(execution_id="p").start()
    monkeypatch.setattr(store, "append", full)
    assert run(world, "p") is Ended.LOST
    assert tried.is_set()
    started = [event.data["child"] for event in world.loom.history("p") if event.kind == "CHILD_STARTED"]
    assert [store.status(child_id) is not None for child_id in started] == [True] * len(started)


def test_without_a_thread_the_body_lands_them_itself(
    world: World, gate: Gate, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That none is to be had is no outcome for the flow."""

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    class NoThreads:
        Condition = threading.Condition
        Thread = NoThread

    monkeypatch.setattr(underway, "threading", NoThreads)

    @flow("u.nothread")
    def parent(ctx: FlowContext) -> int:
        gate.open.set()
        return len([ctx.start_child(child, number) for number in range(3)])

    parent.using(execution_id="p").start()
    assert run(world, "p") is Ended.FINISHED
    assert world.loom.handle("p").result() == 3
