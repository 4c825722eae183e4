"""Parallel branches: side by side, named by their scope, parked together, failing as one."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from loom_django import (
    AsyncFlowContext,
    EffectInDoubt,
    FlowContext,
    Outcome,
    StepContext,
    StepFailed,
    WaitTimedOut,
    flow,
    tool,
)
from loom_django.engine.parallel import _Branch, _Scope
from loom_django.errors import (
    ContextMisuseError,
    DuplicateBranchError,
    ExecutionFailedError,
    InvalidInputError,
    ResumeRefusedError,
)
from loom_django.kernel.state import ON_VERDICT, Status
from tests.engine.conftest import World

CALLS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    CALLS.clear()


@tool
def ship(ctx: StepContext, sku: str) -> str:
    CALLS[ctx.step_id] += 1
    return f"{sku} as {ctx.step_id}"


@tool
def refuse(ctx: StepContext) -> None:
    CALLS[ctx.step_id] += 1
    raise ValueError("no")


@tool(transactional=True)
def book(ctx: StepContext, sku: str) -> str:
    CALLS[ctx.step_id] += 1
    return sku


@tool(idempotent=False)
def wire(ctx: StepContext, account: str) -> str:
    CALLS[ctx.step_id] += 1
    raise EffectInDoubt(f"no answer from {account}")


@tool
async def aship(ctx: StepContext, sku: str) -> str:
    CALLS[ctx.step_id] += 1
    await asyncio.sleep(0)
    return f"{sku} as {ctx.step_id}"


def test_branches_have_names_of_their_own(world: World) -> None:
    """Values come by name; a plain call's id is its scope's path, whatever the order; frames tell their scope."""

    @flow("p.names", steps=[ship])
    def body(ctx: FlowContext) -> Any:
        def twice(branch: FlowContext) -> list[str]:
            return [branch.run(ship, "a"), branch.run(ship, "b"), branch.run(ship.keyed("k"), "c")]

        first = ctx.parallel({"x": ship.bind("x"), "y": twice})
        second = ctx.parallel({"x": ship.bind("x")})
        return [first, second, ctx.run(ship, "z")]

    handle = body.start()
    assert handle.result() == [
        {"x": "x as ship#1.x", "y": ["a as ship#1.y", "b as ship#1.y.2", "c as ship#k"]},
        {"x": "x as ship#2.x"},
        "z as ship",
    ]
    frames = world.state(handle).frames
    assert {frame.step_id: frame.scope for frame in frames.values()} == {
        "ship#1.x": "1.x", "ship#1.y": "1.y", "ship#1.y.2": "1.y", "ship#k": "1.y", "ship#2.x": "2.x", "ship": "",
    }  # fmt: skip
    world.check(handle.id)


def test_an_async_flow_runs_its_branches_as_tasks(world: World) -> None:
    """The same names and rules, awaited; plain tools do not stop the loop."""

    @flow("p.async", steps=[aship, ship])
    async def body(ctx: AsyncFlowContext) -> Any:
        async def both(branch: AsyncFlowContext) -> list[str]:
            return [await branch.run(aship, "a"), await branch.run(ship, "b")]

        return await ctx.parallel({"x": aship.bind("x"), "y": both, "z": ship.bind("z")})

    handle = body.start()
    assert handle.result() == {
        "x": "x as aship#1.x",
        "y": ["a as aship#1.y", "b as ship#1.y"],
        "z": "z as ship#1.z",
    }


def test_branches_really_run_side_by_side(world: World) -> None:
    """Each of three tools waits for the two others."""
    meet = threading.Barrier(3, timeout=20)

    @tool
    def wait_for_others(ctx: StepContext) -> int:
        return meet.wait() * 0

    @tool
    async def await_others(ctx: StepContext) -> int:
        return await asyncio.to_thread(meet.wait) * 0

    @flow("p.beside", steps=[wait_for_others])
    def body(ctx: FlowContext) -> Any:
        return ctx.parallel({name: wait_for_others.bind() for name in "abc"})

    @flow("p.beside.async", steps=[wait_for_others, await_others])
    async def abody(ctx: AsyncFlowContext) -> Any:
        return await ctx.parallel(
            {"a": await_others.bind(), "b": await_others.bind(), "c": wait_for_others.bind()}
        )

    assert body.start().result() == {"a": 0, "b": 0, "c": 0}
    assert abody.start().result() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("is_async", [False, True])
def test_bound_steps_that_the_log_holds_are_answered_where_the_scope_is(
    world: World, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """No thread or task is made for them, whether they succeeded or failed; the others of the scope run."""

    @flow("p.plain", steps=[ship, refuse])
    def plain(ctx: FlowContext) -> list[Any]:
        told = ctx.parallel(
            {"a": ship.bind("a"), "b": refuse.bind(), "c": ship.keyed("c").bind("c")}, settle=True
        )
        ctx.suspend("Go")
        return [told["a"].value, str(told["b"].error), told["c"].value]

    @flow("p.awaited", steps=[ship, refuse])
    async def awaited(ctx: AsyncFlowContext) -> list[Any]:
        told = await ctx.parallel(
            {"a": ship.bind("a"), "b": refuse.bind(), "c": ship.keyed("c").bind("c")}, settle=True
        )
        await ctx.suspend("Go")
        return [told["a"].value, str(told["b"].error), told["c"].value]

    handle = (awaited if is_async else plain).start()
    with monkeypatch.context() as patch:
        patch.delattr(_Branch, "enter")
        world.loom.resume(handle.id, event_type="Go")
    a, b, c = handle.result()
    assert (a, c) == ("a as ship#1.a", "c as ship#c")
    assert "no" in b
    assert set(CALLS.values()) == {1}


def test_more_branches_than_threads(world: World) -> None:
    """All run, a bounded number at a time."""
    now, most, lock = [0], [0], threading.Lock()

    @tool
    def count(ctx: StepContext, number: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        with lock:
            now[0] -= 1
        return number

    @flow("p.many", steps=[count])
    def body(ctx: FlowContext) -> int:
        return sum(ctx.parallel({str(number): count.bind(number) for number in range(60)}).values())

    assert body.start().result() == sum(range(60))
    assert most[0] <= 16


def approvals(flow_id: str) -> Any:
    @flow(flow_id, steps=[ship])
    def body(ctx: FlowContext) -> Any:
        def approved(name: str) -> Callable[[FlowContext], Any]:
            def branch(inner: FlowContext) -> Any:
                before = inner.run(ship, name)
                return [before, inner.suspend("Approval", correlation_key=name, timeout=timedelta(days=1))]

            return branch

        return ctx.parallel({"a": approved("a"), "b": approved("b"), "c": ship.bind("c")})

    return body


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_one_park_for_all_that_wait(world: World, order: str) -> None:
    """Written when no branch runs; answered in any order; steps do not run again."""
    handle = approvals(f"p.wait.{order}").start()
    assert world.kinds(handle.id).count("EXECUTION_SUSPENDED") == 1
    assert [wait.correlation_key for wait in world.state(handle).pending_waits] == ["a", "b"]
    for name in order:
        world.loom.resume(handle.id, event_type="Approval", correlation_key=name, payload=f"{name}!")
    assert handle.result() == {
        "a": ["a as ship#1.a", "a!"],
        "b": ["b as ship#1.b", "b!"],
        "c": "c as ship#1.c",
    }
    assert set(CALLS.values()) == {1}
    world.check(handle.id)


def test_two_answers_before_any_worker_runs(world: World) -> None:
    """The second one is kept, taken at its wait, and shown as a message; a third is refused."""
    from loom_django.services.dispatch import WorkerDispatcher
    from loom_django.services.worker import WorkerService

    world.loom.dispatcher = WorkerDispatcher()
    handle = approvals("p.kept").start()
    work(world, WorkerService)
    world.loom.resume(handle.id, event_type="Approval", correlation_key="a", payload=1)
    world.loom.resume(handle.id, event_type="Approval", correlation_key="b", payload=2)
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume(handle.id, event_type="Approval", correlation_key="b", payload=3)
    assert refused.value.reason == "not-suspended"
    work(world, WorkerService)
    assert handle.result()["a"][1] == 1
    assert handle.result()["b"][1] == 2
    assert world.kinds(handle.id).count("EXECUTION_SUSPENDED") == 1
    assert world.kinds(handle.id).count("MESSAGE_CONSUMED") == 1


def work(world: World, service: Any) -> None:
    worker = service(world.engine, concurrency=1)
    while worker.tick() or worker.running:
        pass
    worker.drain(5)


def test_a_timeout_of_one_branch_leaves_the_other(world: World) -> None:
    """Branches that sleep until one instant share a wake; a late one keeps its own."""

    @flow("p.timeouts")
    def body(ctx: FlowContext) -> Any:
        def patient(branch: FlowContext) -> str:
            try:
                return str(branch.suspend("Go", timeout=60))
            except WaitTimedOut:
                return "late"

        def sleeper(branch: FlowContext) -> str:
            branch.sleep(120)
            return "slept"

        return ctx.parallel({"p": patient, "s": sleeper})

    handle = body.start()
    world.advance(timedelta(seconds=61))
    assert handle.status == Status.SUSPENDED
    assert [wait.id for wait in world.state(handle).pending_waits] == ["sleep[1.s]#1"]
    world.advance(timedelta(seconds=61))
    assert handle.result() == {"p": "late", "s": "slept"}


@pytest.mark.parametrize("nested", [False, True])
def test_a_failure_stops_the_siblings_and_keeps_what_they_did(
    world: World, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """The failed branch's error is the scope's; on a replay it is the same one, and nothing new is begun.

    Nor in a scope inside of a sibling, and no code of the sibling sees that scope's end.
    """
    begun, known, replays, over = (threading.Event() for _ in range(4))
    has_failed = _Scope.has_failed

    def tell(scope: _Scope, branch: Any) -> None:
        has_failed(scope, branch)
        known.set()

    monkeypatch.setattr(_Scope, "has_failed", tell)

    @tool
    def slow(ctx: StepContext) -> str:
        CALLS[ctx.step_id] += 1
        begun.set()
        assert known.wait(20)
        return "done"

    @tool
    def fail_late(ctx: StepContext) -> None:
        CALLS[ctx.step_id] += 1
        assert begun.wait(20)
        raise ValueError("no")

    @flow("p.fails", steps=[slow, fail_late, ship])
    def body(ctx: FlowContext) -> Any:
        def long(branch: FlowContext) -> Any:
            branch.run(slow)
            return branch.run(ship, "never")

        def around(branch: FlowContext) -> Any:
            try:
                branch.parallel({"in": long}) if nested else long(branch)
                CALLS["behind the scope"] += 1
            finally:
                over.set()

        def bad(branch: FlowContext) -> None:
            assert not replays.is_set() or over.wait(20)  # on a replay the sibling goes first
            branch.run(fail_late)

        try:
            ctx.parallel({"long": around, "bad": bad})
        except StepFailed as exc:
            caught = exc.step_id
        ctx.suspend("Go")
        return caught

    handle = body.start()
    assert handle.status == Status.SUSPENDED
    frames = world.state(handle).frames
    stopped = "slow#1.long.1.in" if nested else "slow#1.long"
    assert frames[stopped].output == "done"
    assert set(frames) == {stopped, "fail_late#1.bad"}
    replays.set()
    over.clear()
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == "fail_late#1.bad"
    assert dict(CALLS) == {stopped: 1, "fail_late#1.bad": 1}
    assert set(world.state(handle).frames) == set(frames)


def test_settle_gathers_how_each_ended(world: World) -> None:
    """No branch stops another."""

    @flow("p.settle", steps=[ship, refuse])
    def body(ctx: FlowContext) -> Any:
        ended = ctx.parallel({"good": ship.bind("x"), "bad": refuse.bind()}, settle=True)
        assert isinstance(ended["good"], Outcome)
        return [ended["good"].ok, ended["good"].value, ended["bad"].ok, str(ended["bad"].error)]

    handle = body.start()
    assert handle.result()[:3] == [True, "x as ship#1.good", False]
    assert "refuse#1.bad" in handle.result()[3]


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_effects_in_doubt(world: World, first: str) -> None:
    """Both are asked about in one park; a verdict for one leaves the question for the other."""

    @flow(f"p.doubt.{first}", steps=[wire])
    def body(ctx: FlowContext) -> Any:
        return ctx.parallel({"a": wire.bind("a"), "b": wire.bind("b")})

    handle = body.start()
    assert [wait.on for wait in world.state(handle).pending_waits] == [ON_VERDICT] * 2
    second = "b" if first == "a" else "a"
    seen = world.state(handle).frames[f"wire#1.{second}"].in_doubt_sequence
    world.loom.resolve(handle.id, f"wire#1.{first}", "completed-with-result", output=first)
    assert [wait.correlation_key for wait in world.state(handle).pending_waits] == [f"wire#1.{second}"]
    world.loom.resolve(
        handle.id, f"wire#1.{second}", "completed-with-result", output=second, park_sequence=seen
    )
    assert handle.result() == {"a": "a", "b": "b"}
    assert set(CALLS.values()) == {1}


def test_a_doubt_waits_for_a_running_sibling(world: World) -> None:
    """The sibling's step runs to its end and is recorded before the park is written."""

    @flow("p.doubt.sibling", steps=[wire, ship])
    def body(ctx: FlowContext) -> Any:
        return ctx.parallel({"a": wire.bind("a"), "b": ship.bind("b")})

    handle = body.start()
    kinds = world.kinds(handle.id)
    assert kinds[-1] == "EXECUTION_SUSPENDED"
    assert "STEP_COMPLETED" in kinds
    assert [frame.step_id for frame in world.state(handle).in_doubt] == ["wire#1.a"]


def test_scopes_in_scopes(world: World) -> None:
    """Paths nest, inner scopes park with the outer ones, and the answers find their place."""

    @flow("p.nested", steps=[ship])
    def body(ctx: FlowContext) -> Any:
        def outer(branch: FlowContext) -> Any:
            def waits(inner: FlowContext) -> Any:
                return inner.suspend("Go", correlation_key="in")

            return branch.parallel({"w": waits, "s": ship.bind("s")})

        def other(branch: FlowContext) -> Any:
            return branch.suspend("Go", correlation_key="out")

        return ctx.parallel({"o": outer, "p": other})

    handle = body.start()
    assert [wait.correlation_key for wait in world.state(handle).pending_waits] == ["in", "out"]
    world.loom.resume(handle.id, event_type="Go", correlation_key="out", payload=1)
    world.loom.resume(handle.id, event_type="Go", correlation_key="in", payload=2)
    assert handle.result() == {"o": {"w": 2, "s": "s as ship#1.o.1.s"}, "p": 1}


def test_messages_to_branches(world: World) -> None:
    """A message that comes between a branch's look and the park is not missed; each is taken once."""

    @flow("p.messages")
    def body(ctx: FlowContext) -> Any:
        def of(name: str) -> Callable[[FlowContext], Any]:
            return lambda branch: [branch.receive(name), branch.receive(name)]

        return ctx.parallel({"a": of("a"), "b": of("b")})

    handle = body.start()
    for number, name in enumerate(["a", "b", "b", "a"]):
        world.loom.send(handle.id, name, number)
    assert handle.result() == {"a": [0, 3], "b": [1, 2]}


def test_a_message_sent_while_a_sibling_runs(world: World) -> None:
    """It was sent behind the look of the branch that waits: the park is refused, and the branch looks again."""
    sent: list[str] = []

    @tool
    def send_it(ctx: StepContext) -> None:
        world.loom.send(ctx.execution_id, "news", "hello")
        sent.append("x")

    @flow("p.look", steps=[send_it])
    def body(ctx: FlowContext) -> Any:
        return ctx.parallel({"a": lambda branch: branch.receive("news"), "b": send_it.bind()})

    handle = body.start()
    assert handle.result() == {"a": "hello", "b": None}
    assert len(sent) == 1


def test_transactional_steps_in_branches(world: World) -> None:
    """One at a time, each with its own record; what siblings have done is not rolled back with one of them."""

    @tool(transactional=True)
    def roll_back(ctx: StepContext) -> None:
        raise ValueError("no")

    @flow("p.transactions", steps=[book, roll_back, ship])
    def body(ctx: FlowContext) -> Any:
        branches: dict[str, Any] = {name: book.bind(name) for name in "abc"}
        branches |= {"s": ship.bind("s"), "r": roll_back.bind()}
        ended = ctx.parallel(branches, settle=True)
        return {name: outcome.ok for name, outcome in ended.items()}

    assert body.start().result() == {"a": True, "b": True, "c": True, "s": True, "r": False}
    assert set(CALLS.values()) == {1}


@pytest.mark.parametrize("point", ["before-effect", "in-effect", "after-effect", "after-outcome"])
def test_a_crash_in_a_branch(world: World, crash_at: Callable[[str, str], None], point: str) -> None:
    """After it each step has one outcome, under the same ids, whichever branch was first."""

    @flow(f"p.crash.{point}", steps=[ship])
    def body(ctx: FlowContext) -> Any:
        return ctx.parallel({name: ship.bind(name) for name in "abc"})

    crash_at("ship#1.b", point)
    handle = body.start()
    world.shift(timedelta(hours=1))
    world.recover()
    assert handle.result() == {name: f"{name} as ship#1.{name}" for name in "abc"}
    kinds = Counter(
        event.data["step"] for event in world.loom.history(handle.id) if event.kind == "STEP_COMPLETED"
    )
    assert kinds == {"ship#1.a": 1, "ship#1.b": 1, "ship#1.c": 1}


def test_wrong_use(world: World) -> None:
    """Each is refused by its own words, and nothing is dispatched after it."""

    def refused(make: Callable[[FlowContext], Any], flow_id: str) -> str:
        @flow(flow_id, steps=[ship])
        def body(ctx: FlowContext) -> Any:
            make(ctx)

        handle = body.start()
        with pytest.raises(ExecutionFailedError) as failed:
            handle.result()
        assert not CALLS
        return f"{failed.value.error_type}: {failed.value}"

    skus = ["a", "b"]
    late = refused(
        lambda ctx: ctx.parallel({sku: lambda c: c.run(ship, sku) for sku in skus}),  # noqa: B023
        "p.wrong.late",
    )
    assert DuplicateBranchError.__name__ in late
    outer = refused(lambda ctx: ctx.parallel({"a": lambda c: ctx.run(ship, "a")}), "p.wrong.outer")
    assert ContextMisuseError.__name__ in outer
    called = refused(lambda ctx: ctx.parallel({"a": 3}), "p.wrong.type")  # type: ignore[dict-item]
    assert InvalidInputError.__name__ in called
    name = refused(lambda ctx: ctx.parallel({"": ship.bind("x")}), "p.wrong.name")
    assert "name of a branch" in name


def test_no_branches(world: World) -> None:
    """An empty scope is over at once."""

    @flow("p.none")
    def body(ctx: FlowContext) -> Any:
        return ctx.parallel({})

    assert body.start().result() == {}


def test_time_and_chance_of_branches(world: World) -> None:
    """Draws are per scope: they do not depend on which branch came first, and differ between branches."""

    @flow("p.draws")
    def body(ctx: FlowContext) -> Any:
        def draw(name: str) -> Callable[[FlowContext], Any]:
            return lambda branch: [str(branch.uuid4()), branch.random().random(), name]

        drawn = ctx.parallel({"a": draw("a"), "b": draw("b")})
        ctx.suspend("Go")
        again = [drawn["a"], drawn["b"]]
        return again

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    first, second = handle.result()
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_facts_of_branches_are_there_once(world: World) -> None:
    """Emitted and metered facts of branches are not repeated by a replay."""

    @flow("p.facts")
    def body(ctx: FlowContext) -> None:
        def tell(branch: FlowContext) -> None:
            branch.emit("told", "x")
            branch.meter("usd", 2)
            branch.suspend("Go")

        ctx.parallel({"a": tell})

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    assert world.kinds(handle.id).count("told") == 1
    assert world.kinds(handle.id).count("RESOURCE_METERED") == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("by", ["flow", "sibling"])
def test_the_ctx_of_a_branch_that_has_ended_is_not_to_be_used(world: World, by: str, is_async: bool) -> None:
    """Misuse, told to the flow: the execution is not handed back for ever, and no branch is taken for done."""
    kept: list[Any] = []

    @flow("p.late", steps=[ship])
    def plain(ctx: FlowContext) -> None:
        def first(branch: FlowContext) -> None:
            kept.append(branch)

        def second(branch: FlowContext) -> None:
            kept.pop().run(ship, "late")

        ctx.parallel({"first": first})
        if by == "flow":
            kept.pop().run(ship, "late")
        ctx.parallel({"second": second})

    @flow("p.alate", steps=[ship])
    async def awaited(ctx: AsyncFlowContext) -> None:
        async def first(branch: AsyncFlowContext) -> None:
            kept.append(branch)

        async def second(branch: AsyncFlowContext) -> None:
            await kept.pop().run(ship, "late")

        await ctx.parallel({"first": first})
        if by == "flow":
            await kept.pop().run(ship, "late")
        await ctx.parallel({"second": second})

    handle = (awaited if is_async else plain).start()
    with pytest.raises(ExecutionFailedError, match="a branch that had ended"):
        handle.result()
    assert not CALLS
