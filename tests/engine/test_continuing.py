"""Continuing as new: one commit, one chain, and whoever is outside sees one execution."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from loom_django import (
    AsyncFlowContext,
    ChildFailed,
    FlowContext,
    StepContext,
    flow,
    tool,
)
from loom_django.definitions import registry
from loom_django.errors import (
    ExecutionCancelledError,
    ExecutionClosedError,
    ExecutionFailedError,
    InvalidInputError,
    ResumeRefusedError,
)
from loom_django.kernel.keys import MAX_LENGTH, successor_id
from loom_django.kernel.state import Status
from loom_django.services.redrive import look_now
from loom_django.stores.base import READY, Commit, TimerRow
from tests.engine.conftest import World

UNDONE: list[str] = []


@tool
def note(ctx: StepContext, number: int) -> str:
    return ctx.idempotency_key


@tool
def undo(ctx: StepContext) -> None:
    UNDONE.append(ctx.execution_id)


@pytest.fixture(autouse=True)
def fresh_notes() -> None:
    UNDONE.clear()


def members(world: World, execution_id: str) -> list[str]:
    return [member.id for member in world.engine.store.chain_members(execution_id)]


def waiting_in_turn(flow_id: str) -> Any:
    """A flow whose members each wait once, the last of three for its end."""

    @flow(flow_id)
    def body(ctx: FlowContext, number: int = 1) -> Any:
        answer = ctx.suspend("Go")
        if number == 3:
            return answer
        ctx.continue_as_new(body, number + 1)

    return body


# The hand-over.


def test_a_flow_goes_on_in_a_successor(world: World) -> None:
    """The log ends with EXECUTION_CONTINUED, the next one begins with the arguments, under keys of its own."""

    @flow("n.count", steps=[note])
    def count(ctx: FlowContext, number: int) -> str:
        key = ctx.run(note, number)
        if number == 3:
            return key
        ctx.continue_as_new(count, number=number + 1)

    handle = count.using(execution_id="x").start(1)
    assert handle.result(timeout=0) == "x~3:note"
    assert members(world, "x") == ["x", "x~2", "x~3"]
    assert world.kinds("x") == [
        "EXECUTION_STARTED", "STEP_STARTED", "STEP_COMPLETED", "EXECUTION_CONTINUED",
    ]  # fmt: skip
    assert world.state("x").successor == "x~2"
    assert world.state("x~3").chain == "x"
    for member in members(world, "x"):
        world.check(member)


def test_an_async_flow_goes_on_in_a_successor(world: World) -> None:
    """Awaited, and as little as in a plain flow does anything run behind it."""

    @flow("n.async")
    async def count(ctx: AsyncFlowContext, number: int) -> int:
        if number == 3:
            return number
        try:
            await ctx.continue_as_new(count, number + 1)
        except Exception:
            return -1

    assert count.start(1).result(timeout=0) == 3


def test_a_chain_goes_on_with_another_flow_by_its_id(world: World) -> None:
    """The successor is the flow's current version, with the code that is registered now."""

    @flow("n.old")
    def old(ctx: FlowContext) -> None:
        ctx.continue_as_new("n.new", 7)

    @flow("n.new", version=3, steps=[note], code_fingerprint="v3")
    def new(ctx: FlowContext, number: int) -> int:
        return number

    assert old.using(execution_id="x").start().result(timeout=0) == 7
    found = world.state("x~2")
    assert (found.flow_id, found.version, found.flow_hash) == ("n.new", 3, new.flow_hash)
    assert found.code_hash == "v3"


def test_what_a_start_decides_goes_along(world: World) -> None:
    """Queue, priority, attributes, deadline and occurrence are the chain's, in the log and in the row."""
    body = waiting_in_turn("n.options")
    given = body.using(execution_id="x", priority=4, attributes={"a": None, "b": [1]}, deadline=3600)
    given.start()
    world.loom.resume("x", event_type="Go")
    first, second = world.engine.store.decided("x"), world.engine.store.decided("x~2")
    assert first is not None
    assert first == second
    options = world.state("x~2").options
    assert options == {**world.state("x").options, "chain": "x", "link": 2}
    assert [row.deadline for row in world.engine.store.timers("x~2")] == [True]
    assert world.engine.store.timers("x") == []


def test_a_deadline_is_the_whole_chains(world: World) -> None:
    """However often it continues; a flow's own deadline begins once."""

    @flow("n.deadline", deadline=100)
    def body(ctx: FlowContext, number: int) -> None:
        ctx.sleep(60)
        ctx.continue_as_new(body, number + 1)

    handle = body.using(execution_id="x").start(1)
    world.advance(timedelta(seconds=61))
    assert handle.status is Status.SUSPENDED
    world.advance(timedelta(seconds=40))
    with pytest.raises(ExecutionFailedError, match="deadline"):
        handle.result(timeout=0)
    assert members(world, "x") == ["x", "x~2"]


def test_a_clock_that_goes_back_makes_no_successor_older(world: World) -> None:
    """The newest of a chain is the one that was started last, whatever the time was then."""
    handle = waiting_in_turn("n.clock").using(execution_id="x").start()
    for _ in range(2):
        world.shift(timedelta(hours=-1))
        world.loom.resume("x", event_type="Go")
        assert handle.status is Status.SUSPENDED
    assert members(world, "x") == ["x", "x~2", "x~3"]
    starts = [world.state(member).started_at for member in members(world, "x")]
    assert starts == sorted(set(starts))


def test_ids_of_a_chain_fit_their_column(world: World) -> None:
    """A first id of the full length has successors of it too, each with an id of its own."""
    long = "i" * MAX_LENGTH
    found = [successor_id(long, link) for link in (2, 3, 10)]
    assert {len(one) for one in found} == {MAX_LENGTH}
    assert [one.rpartition("~")[2] for one in found] == ["2", "3", "10"]

    @flow("n.long")
    def body(ctx: FlowContext, number: int) -> int:
        if number < 3:
            ctx.continue_as_new(body, number + 1)
        return number

    assert body.using(execution_id=long).start(1).result(timeout=0) == 3
    assert members(world, long) == [long, *found[:2]]


def test_an_id_that_an_earlier_chain_has_left_is_passed_over(world: World) -> None:
    """A removal that was cut off cannot stop the hand-over of a new execution of that id."""
    body = waiting_in_turn("n.left")
    for _ in range(2):
        body.using(execution_id="x").start()
        for _ in range(3):
            world.loom.resume("x", event_type="Go", payload="end")
        assert body.handle("x").result(timeout=0) == "end"
        assert world.engine.store.delete_execution("x")
    assert members(world, "x~4") == ["x~2", "x~3", "x~4", "x~5"]


def test_what_an_earlier_chain_has_left_is_not_acted_on_through_it(world: World) -> None:
    """A member that has ended for good leads to nobody; the execution that has the first id now is another one."""
    body = waiting_in_turn("n.earlier")
    body.using(execution_id="y").start(2)
    for _ in range(2):
        world.loom.resume("y", event_type="Go", payload="end")
    assert world.engine.store.delete_execution("y")
    body.using(execution_id="y").start()
    with pytest.raises(ExecutionClosedError):
        world.loom.cancel("y~2")
    with pytest.raises(ResumeRefusedError):
        world.loom.resume("y~2", event_type="Go")
    assert world.loom.handle("y").status is Status.SUSPENDED


def test_what_was_registered_for_a_failure_is_let_go(world: World) -> None:
    """Compensations are one log's: neither the hand-over nor the successor's failure runs them."""

    @flow("n.saga", steps=[undo])
    def body(ctx: FlowContext, number: int) -> None:
        if number == 2:
            raise ValueError("no")
        ctx.on_failure(undo)
        ctx.continue_as_new(body, number + 1)

    handle = body.start(1)
    assert handle.status is Status.FAILED
    assert UNDONE == []


def test_a_body_that_swallows_it_has_ended_all_the_same(world: World) -> None:
    """What a flow does behind the hand-over finds the body over."""

    @flow("n.swallow", steps=[note])
    def body(ctx: FlowContext, number: int) -> int:
        if number == 2:
            return number
        try:
            ctx.continue_as_new(body, number + 1)
        except BaseException:
            ctx.run(note, 1)
        return -1

    assert body.using(execution_id="x").start(1).result(timeout=0) == 2
    assert world.kinds("x") == ["EXECUTION_STARTED", "EXECUTION_CONTINUED"]


def test_a_body_that_skips_what_its_log_holds_does_not_hand_over(world: World) -> None:
    """With divergence="fail" it parks before the hand-over; the code that was run before hands over."""

    def first(ctx: FlowContext, number: int) -> int:
        if number == 2:
            return number
        ctx.run(note, number)
        ctx.suspend("Go")
        ctx.continue_as_new(body, 2)

    def skips(ctx: FlowContext, number: int) -> int:
        ctx.continue_as_new(body, 2)

    body = flow("n.diverges", steps=[note], divergence="fail")(first)
    handle = body.using(execution_id="x").start(1)
    body.func = skips
    world.loom.resume("x", event_type="Go")
    assert [wait.on for wait in handle.waits] == ["__loom_diverged__"]
    assert "continue_as_new" in world.loom.history("x")[-1].data["error"]["message"]
    body.func = first
    world.loom.retry_diverged("x")
    assert handle.result(timeout=0) == 2


# Refusals: misuse, before anything is written.


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (lambda ctx, me, pinned: ctx.continue_as_new(me, 1, 2, 3), "too many positional arguments"),
        (lambda ctx, me, pinned: ctx.continue_as_new(me, object()), "number"),
        (lambda ctx, me, pinned: ctx.continue_as_new("n.nothing"), "n.nothing"),
        (lambda ctx, me, pinned: ctx.continue_as_new(pinned, 1), "pinned"),
        (lambda ctx, me, pinned: ctx.continue_as_new(me.using(priority=3), 1), "no options"),
        (lambda ctx, me, pinned: ctx.parallel({"a": lambda ctx: ctx.continue_as_new(me, 1)}), "branch"),
        (lambda ctx, me, pinned: ctx.decide("d", lambda ctx: ctx.continue_as_new(me, 1)), "decider"),
    ],
)
def test_what_cannot_go_on_is_refused(world: World, how: Any, problem: str) -> None:
    """The execution fails, and says why; there is no successor."""

    @flow("n.pinned", pinned=True)
    def pinned(ctx: FlowContext, number: int) -> None:
        """Starts nothing new."""

    @flow("n.refused")
    def body(ctx: FlowContext, number: int) -> None:
        how(ctx, body, pinned)

    handle = body.using(execution_id="x").start(1)
    with pytest.raises(ExecutionFailedError, match=problem):
        handle.result(timeout=0)
    assert members(world, "x") == ["x"]
    assert world.kinds("x") == ["EXECUTION_STARTED", "EXECUTION_FAILED"]


# Messages and answers.


def drain(world: World, flow_id: str, count: int, each: int) -> Any:
    @flow(flow_id)
    def body(ctx: FlowContext, seen: list[int]) -> Any:
        for _ in range(each):
            if len(seen) == count:
                return seen
            seen.append(ctx.receive("n"))
        ctx.continue_as_new(body, seen)

    return body


def test_messages_are_the_chains(world: World) -> None:
    """Sent to the first id or to the newest, read or not yet when it hands over: each once, in order."""
    handle = drain(world, "n.drain", 7, 2).using(execution_id="x").start([])
    for number in range(7):
        to = "x" if number % 2 else members(world, "x")[-1]
        assert world.loom.send(to, "n", number, message_id=f"m{number}")
        assert number == 6 or not world.loom.send("x", "n", "again", message_id=f"m{number}")
    assert handle.result(timeout=0) == list(range(7))
    assert len(members(world, "x")) == 4
    with pytest.raises(ExecutionClosedError, match="COMPLETED"):
        world.loom.send("x", "n", 8)


def test_a_message_that_meets_the_hand_over_wakes_the_successor(world: World) -> None:
    """Its re-drive row may be for a member that ends at that moment: whoever serves it finds the newest."""
    handle = drain(world, "n.meets", 2, 1).using(execution_id="x").start([])
    store = world.engine.store
    receiver = "x"
    world.loom.send("x", "n", 0)
    assert members(world, "x") == ["x", "x~2"]
    # As a sender that had looked before the hand-over, and died right after its commit.
    store.send("x", name="n", message_id="late", body="1", receiver=receiver)
    assert handle.status is Status.SUSPENDED
    world.advance(timedelta(seconds=1))
    assert handle.result(timeout=0) == [0, 1]


def test_a_park_of_a_successor_looks_at_the_chains_wakes(world: World) -> None:
    """A message between the look of a successor and its park refuses the park."""
    body = drain(world, "n.wakes", 2, 1)
    store, append = world.engine.store, world.engine.store.append
    sent: list[bool] = []

    def append_late(commit: Any) -> None:
        if commit.wakes is not None and commit.execution_id == "x~2" and not sent:
            sent.append(store.send("x", name="n", message_id="late", body="1", receiver="x"))
        append(commit)

    store.append = append_late  # type: ignore[method-assign]
    try:
        handle = body.using(execution_id="x").start([])
        world.loom.send("x", "n", 0)
    finally:
        store.append = append  # type: ignore[method-assign]
    assert sent == [True]
    assert handle.result(timeout=0) == [0, 1]


def test_a_plain_answer_is_for_the_newest(world: World) -> None:
    """By any member's id; one that names a park, and one for a wait that is over, is for that log alone."""
    handle = waiting_in_turn("n.answers").using(execution_id="x").start()
    park = world.loom.parked_at_sequence("x")
    world.loom.resume("x", event_type="Go")
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume("x", event_type="Go", fence_if_parked_at=park)
    assert refused.value.reason in ("terminal", "not-suspended")
    assert handle.waits[0].on == "Go"
    world.loom.resume("x~2", event_type="Go")
    world.loom.resume("x~2", event_type="Go", payload="end")
    assert handle.result(timeout=0) == "end"


def test_an_answer_that_was_kept_is_the_members_it_was_kept_for(world: World) -> None:
    """Waits of two members have one name: an answer that the first left untaken is not the second's."""

    @flow("n.kept", steps=[note])
    def body(ctx: FlowContext, number: int) -> Any:
        def first(ctx: FlowContext) -> str:
            ctx.suspend("A")
            raise ValueError("over")

        def second(ctx: FlowContext) -> Any:
            return ctx.suspend("B")

        try:
            return ctx.parallel({"first": first, "second": second})
        except ValueError:
            ctx.continue_as_new(body, number + 1)

    body.using(execution_id="x").start(1)
    dispatcher = world.loom.dispatcher
    world.engine.store.on_commit(lambda: None)

    class Later:
        """The body runs, but not yet."""

        def ticket(self) -> Any:
            from loom_django.services.dispatch import Ticket

            return Ticket(READY)

        def dispatch(self, execution_id: str, ticket: Any, journal: Any) -> None:
            """Nobody."""

    world.loom.dispatcher = Later()
    world.loom.resume("x", event_type="A", payload=1)
    world.loom.resume("x", event_type="B", payload=2)  # kept: the body runs
    world.loom.dispatcher = dispatcher
    dispatcher.dispatch("x", Later().ticket(), None)
    assert members(world, "x") == ["x", "x~2"]
    look_now(world.engine, lambda: dispatcher, "x")
    assert {wait.on for wait in world.state("x~2").pending_waits} == {"A", "B"}


# Ends: cancel, children, parents.


def test_a_cancel_ends_the_newest(world: World) -> None:
    """By any member's id, once or again."""
    handle = waiting_in_turn("n.cancel").using(execution_id="x").start()
    world.loom.resume("x", event_type="Go")
    world.loom.cancel("x", reason="enough")
    world.loom.cancel("x", reason="again")
    assert handle.status is Status.CANCELLED
    with pytest.raises(ExecutionCancelledError, match="enough"):
        handle.result(timeout=0)
    assert world.kinds("x")[-1] == "EXECUTION_CONTINUED"
    assert world.kinds("x~2")[-1] == "EXECUTION_CANCELLED"


def test_a_cancel_follows_a_hand_over_that_is_first(world: World) -> None:
    """Continued between the look and the append: the one that it goes on as is cancelled."""
    body = waiting_in_turn("n.race")
    handle = body.using(execution_id="x").start()
    store, append = world.engine.store, world.engine.store.append

    def append_late(commit: Commit) -> None:
        store.append = append  # type: ignore[method-assign]
        world.loom.resume("x", event_type="Go")
        append(commit)

    store.append = append_late  # type: ignore[method-assign]
    world.loom.cancel("x")
    assert handle.status is Status.CANCELLED
    assert members(world, "x") == ["x", "x~2"]


def test_a_parent_waits_for_the_end_of_its_childs_chain(world: World) -> None:
    """EXECUTION_CONTINUED is no end of a child; the result is that of its newest member."""
    child = waiting_in_turn("n.child")

    @flow("n.parent")
    def parent(ctx: FlowContext) -> Any:
        return ctx.await_child(ctx.start_child(child.using(execution_id="c")))

    handle = parent.using(execution_id="p").start()
    for _ in range(2):
        world.loom.resume("c", event_type="Go")
        world.advance(timedelta(seconds=1))
        assert handle.status is Status.SUSPENDED
    world.loom.resume("c", event_type="Go", payload="done")
    assert handle.result(timeout=0) == "done"
    assert members(world, "c") == ["c", "c~2", "c~3"]


def test_a_parent_sees_a_childs_chain_fail(world: World) -> None:
    """ChildFailed names the child by the id that it was started under."""

    @flow("n.failing")
    def child(ctx: FlowContext, number: int) -> None:
        if number == 2:
            raise ValueError("no")
        ctx.continue_as_new(child, number + 1)

    @flow("n.seeing")
    def parent(ctx: FlowContext) -> Any:
        try:
            ctx.await_child(ctx.start_child(child.using(execution_id="c"), 1))
        except ChildFailed as failed:
            return [failed.child_id, failed.status, failed.message]

    assert parent.start().result(timeout=0) == ["c", "FAILED", "no"]


def test_a_successor_has_children_of_its_own(world: World) -> None:
    """Their parent is the chain, so that their end wakes whichever member waits for it."""
    child = waiting_in_turn("n.grandchild")

    @flow("n.family")
    def parent(ctx: FlowContext, number: int) -> Any:
        if number == 1:
            ctx.continue_as_new(parent, 2)
        return ctx.await_child(ctx.start_child(child.using(execution_id="c"), 3))

    handle = parent.using(execution_id="p").start(1)
    assert world.state("c").options["parent"] == "p"
    world.loom.resume("c", event_type="Go", payload="done")
    assert handle.result(timeout=0) == "done"


@pytest.mark.parametrize("dies", [False, True])
def test_children_end_with_the_chain(world: World, dies: bool) -> None:
    """Not with the member that started them; with ``dies`` a timer loop does it, as after a crash."""
    closed, left = waiting_in_turn("n.closed"), waiting_in_turn("n.left-alone")
    done = waiting_in_turn("n.done")

    @flow("n.closing")
    def parent(ctx: FlowContext, number: int) -> Any:
        if number == 1:
            ctx.start_child(closed.using(execution_id="c"))
            ctx.start_child(left.using(execution_id="l", on_parent_close="abandon"))
            ctx.start_child(done.using(execution_id="d"), 3)
        ctx.suspend("Next")
        if number < 3:
            ctx.continue_as_new(parent, number + 1)

    parent.using(execution_id="p").start(1)
    world.loom.resume("c", event_type="Go")  # the child continues too
    world.loom.resume("d", event_type="Go")
    for _ in range(2):
        world.loom.resume("p", event_type="Next")
        world.loom.send("c", "n")  # has it looked at, and asked if its parent has ended
        world.advance(timedelta(seconds=1))
        assert world.loom.handle("c").status is Status.SUSPENDED
    assert world.state("p~3").options["children"] == ["c"]
    if dies:
        world.engine.woken = lambda execution_id: None
    world.loom.resume("p", event_type="Next")
    world.advance(timedelta(seconds=1))
    assert world.loom.handle("c").status is Status.CANCELLED
    assert members(world, "c") == ["c", "c~2"]
    assert world.loom.handle("l").status is Status.SUSPENDED
    assert world.loom.handle("d").status is Status.COMPLETED


def test_a_wake_finds_a_chain_whose_first_flow_is_gone(world: World) -> None:
    """A child's end is told to the chain's first id; whoever has the code of the newest member looks at it."""
    child = waiting_in_turn("n.last-child")

    @flow("n.latter")
    def latter(ctx: FlowContext) -> Any:
        return ctx.await_child(ctx.start_child(child.using(execution_id="c"), 3))

    @flow("n.former")
    def former(ctx: FlowContext) -> None:
        ctx.continue_as_new(latter)

    former.using(execution_id="p").start()
    registry.forget("n.former")  # a release without it: no log of it is alive
    world.engine.woken = lambda execution_id: None  # the process dies behind the child's end
    world.loom.resume("c", event_type="Go", payload="done")
    world.advance(timedelta(seconds=1))
    assert world.loom.handle("p").status is Status.COMPLETED


def test_a_successor_cannot_wait_for_its_predecessors_children(world: World) -> None:
    """It ends them and that is all; their ids are taken."""
    child = waiting_in_turn("n.taken")

    @flow("n.takes")
    def parent(ctx: FlowContext, number: int) -> None:
        ctx.start_child(child.using(execution_id="c"))
        ctx.continue_as_new(parent, number + 1)

    handle = parent.start(1)
    with pytest.raises(ExecutionFailedError, match="parent"):
        handle.result(timeout=0)


# Forks, and starts again.


def test_a_member_is_forked_by_itself(world: World) -> None:
    """The copy is an execution of its own: no chain, no children of the source's."""
    child = waiting_in_turn("n.forked-child")

    @flow("n.forked", steps=[note])
    def body(ctx: FlowContext, number: int) -> Any:
        if number == 1:
            ctx.start_child(child.using(execution_id="c"))
            ctx.continue_as_new(body, 2)
        ctx.run(note, number)
        return ctx.execution_id

    body.using(execution_id="x", attributes={"a": None}).start(1)
    copy = world.loom.fork("x~2", from_step="note", new_execution_id="y")
    assert copy.result(timeout=0) == "y"
    options = world.state("y").options
    assert not {"chain", "link", "children"} & options.keys()
    assert options["attributes"] == {"a": None}
    decided = world.engine.store.decided("y")
    assert decided is not None
    assert decided.chain == "y"


def test_a_start_of_the_first_id_finds_the_chain(world: World) -> None:
    """A second start is answered with the execution that is there, however far it has come."""
    body = waiting_in_turn("n.again")
    body.using(execution_id="x").start()
    world.loom.resume("x", event_type="Go")
    again = body.using(execution_id="x").start()
    assert again.created is False
    assert again.status is Status.SUSPENDED
    assert members(world, "x") == ["x", "x~2"]
    with pytest.raises(InvalidInputError, match="has not failed"):
        world.loom.rerun("x")


def test_a_deadline_row_of_a_former_member_ends_nobody(world: World) -> None:
    """A timer loop that had taken it before the hand-over finds that log over."""
    body = waiting_in_turn("n.row")
    handle = body.using(execution_id="x").start()
    world.loom.resume("x", event_type="Go")
    store = world.engine.store
    store.schedule(TimerRow("x", store.now(), deadline=True))
    world.advance(timedelta(seconds=1))
    assert handle.status is Status.SUSPENDED
    assert store.timers("x") == []
