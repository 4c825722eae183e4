"""Recovery: what a dead process left behind is taken up; what must not run twice is put to a person."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test.utils import CaptureQueriesContext

from loom_django import FlowContext, StepContext, flow, signals, tool
from loom_django.engine.journal import Journal
from loom_django.engine.outside import open_journal
from loom_django.engine.run import Ended, run_execution
from loom_django.errors import InvalidInputError, LoomError
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.recovery import _Pass, hand_back, recover_abandoned, recover_one
from loom_django.services.worker import WorkerService
from loom_django.stores.base import NOBODY, Lease
from loom_django.stores.memory import MemoryStore
from tests.engine.conftest import World

PAST_THE_LEASE = timedelta(seconds=61)
POINTS = ["before-start", "before-effect", "in-effect", "after-effect", "after-outcome"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("idempotent", [True, False, None])
def test_a_crash_at_each_point_of_a_step(
    world: World, crash_at: Callable[[str, str], None], point: str, idempotent: bool | None
) -> None:
    """What runs again has the same key; what must not run twice does not."""
    seen: list[str] = []

    @tool(idempotent=idempotent)
    def effect(ctx: StepContext) -> str:
        seen.append(ctx.idempotency_key)
        return "done"

    @flow("r.crash", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", point)
    body.using(execution_id="c1").start()
    assert world.recover().candidates == 0  # the lease has not ended: nobody may judge
    world.shift(PAST_THE_LEASE)
    assert world.recover().recovered == 1
    handle = world.loom.handle("c1")
    if idempotent is False and point in ("before-effect", "in-effect", "after-effect"):
        assert [wait.correlation_key for wait in handle.waits] == ["effect"]
        assert len(seen) <= 1
        world.loom.resolve("c1", "effect", "completed-with-result", output="done")
    assert handle.result() == "done"
    assert set(seen) <= {"c1:effect"}
    world.check("c1")


def test_a_retry_fresh_verdict_has_a_new_key_that_survives_a_crash(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """`:r1` comes from the verdict, and is `:r1` again after a crash in that attempt."""
    seen: list[str] = []

    @tool(idempotent=False)
    def effect(ctx: StepContext) -> str:
        seen.append(ctx.idempotency_key)
        return "done"

    @flow("r.fresh", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", "after-effect")
    body.using(execution_id="c1").start()
    world.shift(PAST_THE_LEASE)
    world.recover()
    crash_at("effect", "after-effect")
    world.loom.resolve("c1", "effect", "retry-fresh")
    world.shift(PAST_THE_LEASE)
    world.recover()
    assert seen == ["c1:effect", "c1:effect:r1"]
    world.loom.resolve("c1", "effect", "retry-fresh")
    assert seen == ["c1:effect", "c1:effect:r1", "c1:effect:r2"]
    assert world.loom.handle("c1").result() == "done"


def test_attempts_count_crashes(world: World, crash_at: Callable[[str, str], None]) -> None:
    """After three crashes the fourth attempt reads 4."""
    seen: list[int] = []

    @tool
    def effect(ctx: StepContext) -> int:
        seen.append(ctx.attempt)
        return ctx.attempt

    @flow("r.attempts", steps=[effect])
    def body(ctx: FlowContext) -> int:
        return ctx.run(effect)

    crash_at("effect", "after-effect")
    body.using(execution_id="c1").start()
    for _ in range(2):
        world.shift(PAST_THE_LEASE)
        crash_at("effect", "after-effect")
        world.recover()
    world.shift(PAST_THE_LEASE)
    world.recover()
    assert seen == [1, 2, 3, 4]


def test_a_zombie_can_append_nothing(world: World) -> None:
    """A run whose execution was taken over meets the fence, whatever it wanted to write."""
    inside = threading.Event()
    go_on = threading.Event()
    calls: list[int] = []

    @tool
    def effect(ctx: StepContext) -> str:
        calls.append(ctx.attempt)
        if ctx.attempt == 1:
            inside.set()
            assert go_on.wait(20)
        return f"by attempt {ctx.attempt}"

    @flow("r.zombie", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    def first_owner() -> None:
        body.using(execution_id="z1").start()
        world.engine.store.close_connections()

    zombie = threading.Thread(target=first_owner)
    zombie.start()
    assert inside.wait(20)
    lease = world.engine.store.held("z1")
    assert lease is not None
    world.shift(PAST_THE_LEASE)
    assert world.recover().recovered == 1
    before = world.kinds("z1")
    assert world.engine.store.renew([("z1", lease.token)], ttl=60) == set()
    assert world.engine.store.release("z1", lease.token) is False
    go_on.set()
    zombie.join(20)
    assert world.kinds("z1") == before
    assert world.loom.handle("z1").result() == "by attempt 2"


def test_recovery_without_leases_needs_a_judgement(world: World) -> None:
    """There is no default: either answer would be wrong for somebody."""
    with pytest.raises(InvalidInputError, match="is_abandoned"):
        recover_abandoned(world.loom)


def test_the_callers_own_judgement_preempts_a_live_holder(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """Without leases the predicate alone decides, and the predecessor is fenced out."""

    @tool
    def effect(ctx: StepContext) -> str:
        return "done"

    @flow("r.judged", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", "in-effect")
    body.using(execution_id="j1").start()
    assert recover_abandoned(world.loom, is_abandoned=lambda lease: False).recovered == 0
    assert recover_abandoned(world.loom, is_abandoned=lambda lease: lease.execution_id == "j1").recovered == 1
    assert world.loom.handle("j1").result() == "done"
    assert world.engine.store.fence("j1") > 0


def test_a_judgement_that_raises_stops_nothing_but_itself(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """What could not be judged is left as it is, and named; the rest is recovered."""

    @tool
    def effect(ctx: StepContext) -> str:
        return "done"

    @flow("r.unjudged", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    def gone(lease: Lease) -> bool:
        return {"u2": True}[lease.execution_id]

    for execution_id in ("u1", "u2"):
        crash_at("effect", "in-effect")
        body.using(execution_id=execution_id).start()
    summary = recover_abandoned(world.loom, is_abandoned=gone)
    assert (summary.scanned, summary.candidates, summary.recovered) == (2, 1, 1)
    assert [execution_id for execution_id, _ in summary.failures] == ["u1"]
    assert world.engine.store.held("u1") is not None


def test_one_bad_log_stops_nothing_but_itself(world: World, crash_at: Callable[[str, str], None]) -> None:
    """Of twenty abandoned executions one cannot be folded and one is of an unknown flow: 18 go on."""
    from loom_django import definitions

    @tool
    def effect(ctx: StepContext) -> None:
        """Nothing."""

    @flow("r.many", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    @flow("r.unknown", steps=[effect])
    def unknown(ctx: FlowContext) -> None:
        ctx.run(effect)

    for number in range(20):
        crash_at("effect", "before-effect")
        started = unknown if number == 6 else body
        started.using(execution_id=f"m{number:02}").start()
    definitions.registry.forget("r.unknown")
    load = world.engine.store.load

    def corrupt(execution_id: str, **options: Any) -> Any:
        if execution_id == "m02":
            raise ValueError("a payload that is no JSON")
        return load(execution_id, **options)

    world.engine.store.load = corrupt  # type: ignore[method-assign]
    world.shift(PAST_THE_LEASE)
    summary = world.recover()
    world.engine.store.load = load  # type: ignore[method-assign]
    assert (summary.candidates, summary.recovered, summary.failed) == (20, 18, 2)
    assert {name for name, _ in summary.failures} == {"m02", "m06"}
    assert world.recover().candidates == 0  # the bad ones do not come back at once


def test_a_poisonous_execution_parks_for_an_operator(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """A step that kills its process every time is given up after max_recoveries takeovers without progress."""

    @tool
    def effect(ctx: StepContext) -> None:
        """Nothing."""

    @flow("r.poison", steps=[effect], max_recoveries=2)
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    crash_at("effect", "in-effect")
    body.using(execution_id="p1").start()
    for _ in range(2):
        world.shift(PAST_THE_LEASE)
        crash_at("effect", "in-effect")
        world.recover()
    world.shift(PAST_THE_LEASE)
    assert world.recover().recovered == 1
    assert [wait.on for wait in world.loom.handle("p1").waits] == ["__loom_poisoned__"]


def test_a_takeover_is_told_with_the_owner_that_was_given_up(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """Once for each takeover, before the body goes on; also of one that is parked, none of a hand-back."""
    told: list[Any] = []

    @tool(idempotent=False)
    def effect(ctx: StepContext) -> str:
        told.append("body")
        return "done"

    @flow("r.told", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    def receiver(execution_id: str, previous_owner: str, sequence: int, **_: Any) -> None:
        told.append((execution_id, previous_owner, sequence))

    signals.execution_recovered.connect(receiver)
    try:
        crash_at("effect", "before-start")
        body.using(execution_id="t1").start()
        assert hand_back(world.loom, ["t1"]).recovered == 1
        assert told == ["body"]
        told.clear()

        owners = []
        for execution_id, point in (("t2", "before-start"), ("t3", "in-effect")):
            crash_at("effect", point)
            body.using(execution_id=execution_id).start()
            (lease,) = world.engine.store.leases(limit=10)
            owners.append(lease.owner)
            world.shift(PAST_THE_LEASE)
            assert world.recover().recovered == 1
    finally:
        signals.execution_recovered.disconnect(receiver)
    # Of the second the marker and the park of its doubt stand in the log.
    parked_at = world.engine.store.read("t3")[-1].sequence
    assert told == [("t2", owners[0], 1), "body", ("t3", owners[1], parked_at)]


def test_a_ready_execution_that_nobody_took_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inline, a process that died between its commit and its claim leaves a ready row; recovery runs it."""

    @flow("r.ready")
    def body(ctx: FlowContext) -> str:
        return "ran"

    inline = world.loom.dispatcher
    world.loom.dispatcher = WorkerDispatcher()
    handle = body.start()
    world.loom.dispatcher = inline
    assert handle.status == Status.PENDING
    assert world.recover().recovered == 0
    world.shift(timedelta(seconds=31))
    assert world.recover().recovered == 1
    assert handle.result() == "ran"


def test_recover_one_takes_over_by_an_operators_judgement(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """The lease has not ended, but a person knows better."""

    @tool
    def effect(ctx: StepContext) -> str:
        return "done"

    @flow("r.one", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", "in-effect")
    body.using(execution_id="o1").start()
    assert recover_one(world.loom, "o1").recovered == 1
    assert world.loom.handle("o1").result() == "done"


def test_a_worker_claims_and_runs_what_is_ready(world: World) -> None:
    """A start under the worker dispatcher leaves a row; a worker runs it to its end."""
    keys: list[str] = []

    @tool
    def effect(ctx: StepContext) -> None:
        keys.append(ctx.execution_id)

    @flow("r.worker", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    world.loom.dispatcher = WorkerDispatcher()
    for number in range(5):
        body.using(execution_id=f"w{number}").start()
    assert keys == []
    worker = WorkerService(world.engine, concurrency=2)
    while worker.tick() or worker.running or len(keys) < 5:
        with worker._condition:
            worker._condition.wait_for(lambda: len(worker._held) < 2, 10)
    assert worker.drain(10)
    assert sorted(keys) == [f"w{number}" for number in range(5)]
    assert {world.loom.handle(f"w{number}").status for number in range(5)} == {Status.COMPLETED}


def test_a_draining_worker_hands_the_rest_of_a_flow_back(world: World) -> None:
    """The step in flight ends and is recorded; the next one is another worker's."""
    inside, go_on = threading.Event(), threading.Event()

    @tool
    def first(ctx: StepContext) -> None:
        inside.set()
        assert go_on.wait(20)

    @tool
    def second(ctx: StepContext) -> None:
        """Nothing."""

    @flow("r.drain", steps=[first, second])
    def body(ctx: FlowContext) -> None:
        ctx.run(first)
        ctx.run(second)

    world.loom.dispatcher = WorkerDispatcher()
    handle = body.start()
    worker = WorkerService(world.engine, concurrency=1)
    worker.tick()
    assert inside.wait(20), "the first step was not begun"
    worker.draining.set()
    go_on.set()
    assert worker.drain(20)
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "STEP_STARTED", "STEP_COMPLETED"]
    assert world.engine.store.held(handle.id) is None
    other = WorkerService(world.engine, concurrency=1)
    other.tick()
    with other._condition:
        assert other._condition.wait_for(lambda: not other._held, 20)
    assert other.drain(20) is True
    assert handle.status == Status.COMPLETED


def test_changed_code_is_refused_with_its_exits(world: World, crash_at: Callable[[str, str], None]) -> None:
    """Resume and recovery alike: the execution, both hashes, the three exits; nothing is written."""
    from loom_django import definitions
    from loom_django.errors import FlowCodeMismatchError

    @tool
    def effect(ctx: StepContext) -> None:
        """Nothing."""

    @flow("r.changed", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    handle = body.start()
    definitions.registry.forget("r.changed")

    @flow("r.changed")
    def changed(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    before = world.kinds(handle.id)
    with pytest.raises(FlowCodeMismatchError) as refused:
        world.loom.resume(handle.id, event_type="Go")
    assert isinstance(refused.value, LoomError)
    assert handle.id in str(refused.value)
    assert world.kinds(handle.id) == before


@pytest.mark.parametrize("idempotent", [None, False])
def test_a_step_that_outlives_the_grace_time_is_handed_back(world: World, idempotent: bool | None) -> None:
    """Nobody waits for the lease, and a drain counts as no recovery; what must not run twice is in doubt."""
    inside, go_on = threading.Event(), threading.Event()

    @tool(idempotent=idempotent)
    def long(ctx: StepContext) -> None:
        inside.set()
        assert go_on.wait(20)

    @flow("r.grace", steps=[long], max_recoveries=1)
    def body(ctx: FlowContext) -> None:
        ctx.run(long)

    world.loom.dispatcher = WorkerDispatcher()
    handle = body.start()
    for _ in range(3):
        inside.clear()
        go_on.clear()
        worker = WorkerService(world.engine, concurrency=1)
        worker.tick()
        assert inside.wait(20)
        assert worker.drain(0.01) is False
        assert hand_back(world.loom, worker.held).recovered == 1
        go_on.set()
        assert worker.drain(20)
        if idempotent is False:
            break
    assert world.engine.store.held(handle.id) is None
    assert world.kinds(handle.id).count("STEP_COMPLETED") == 0
    expected = Status.SUSPENDED if idempotent is False else Status.RUNNING
    assert handle.status == expected
    assert [wait.on for wait in handle.waits] == (["EffectInDoubtResolved"] if idempotent is False else [])


def between(world: World, call: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have something happen once, just before the store answers a call: a rival's append, say.

    The list is empty until it has happened.
    """
    store = world.engine.store
    original = getattr(store, call)
    done: list[bool] = []

    def wrapped(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return original(*args, **options)

    monkeypatch.setattr(store, call, wrapped)
    return done


@pytest.mark.parametrize("ends", ["parks in doubt", "completes"])
@pytest.mark.parametrize("call", ["load", "acquire_fence_if"])
def test_what_the_owner_wrote_before_the_fence_stands(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, ends: str
) -> None:
    """Between a takeover and its fence the owner may still park or end: then there is nothing to run."""
    inside, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    @tool(idempotent=False, in_doubt_on=ConnectionError)
    def effect(ctx: StepContext) -> None:
        calls.append(ctx.idempotency_key)
        inside.set()
        assert go_on.wait(20)
        if ends == "parks in doubt":
            raise ConnectionError

    @flow("r.window", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    def first_owner() -> None:
        body.using(execution_id="w1").start()
        world.engine.store.close_connections()

    owner = threading.Thread(target=first_owner)
    owner.start()
    assert inside.wait(20)

    def let_the_owner_finish() -> None:
        go_on.set()
        owner.join(20)

    world.shift(PAST_THE_LEASE)
    between(world, call, let_the_owner_finish, monkeypatch)
    world.recover()
    assert calls == ["w1:effect"]
    kinds = world.kinds("w1")
    if ends == "completes":
        assert kinds[-1] == "EXECUTION_COMPLETED"
    else:
        assert kinds[-2:] == ["EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]


@pytest.mark.parametrize("call", ["load", "acquire_fence_if"])
def test_whoever_runs_it_when_the_fence_is_due_is_not_fenced_out(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The owner was late: it parks after the takeover, is answered, and another one begins an effect."""

    @tool(idempotent=False)
    def effect(ctx: StepContext) -> None: ...

    @flow("r.late", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.suspend("Go")
        ctx.run(effect)

    store = world.engine.store

    def claimed(token: int) -> int:
        (claim,) = store.claim_ready(owner="w", token=token, ttl=60, limit=1, known=world.engine.known())
        return claim.fence

    def late() -> None:
        assert run_execution(world.engine, "w1", token=1, fence=fence) is Ended.PARKED
        world.loom.resume("w1", event_type="Go")
        other = claimed(token=2)
        journal = open_journal(world.engine, store.load("w1"), fence=other)
        journal.record(Kind.STEP_STARTED, {"step": "effect", "tool": "effect", "idempotent": False})
        journal.land()
        begun.append(journal)

    begun: list[Journal] = []
    world.loom.dispatcher = WorkerDispatcher()
    body.using(execution_id="w1").start()
    fence = claimed(token=1)
    world.shift(PAST_THE_LEASE)
    between(world, call, late, monkeypatch)
    assert world.recover().recovered == 0
    (journal,) = begun
    assert store.fence("w1") == journal.fence
    journal.record(Kind.STEP_COMPLETED, {"step": "effect", "output": None})
    journal.land()
    held = store.held("w1")
    assert held is not None
    assert held.token == 2


def test_giving_up_an_execution_fences_its_body_out_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written of what became of it, the old body can park or record nothing any more."""
    inside, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    @tool(idempotent=False, in_doubt_on=ConnectionError)
    def effect(ctx: StepContext) -> None:
        calls.append(ctx.attempt)
        inside.set()
        assert go_on.wait(20)
        raise ConnectionError

    @flow("r.handback", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    world.loom.dispatcher = WorkerDispatcher()
    handle = body.start()
    worker = WorkerService(world.engine, concurrency=1)
    worker.tick()
    assert inside.wait(20)
    assert worker.drain(0.01) is False

    def body_goes_on() -> None:
        go_on.set()
        assert worker.drain(20)

    happened = between(world, "append", body_goes_on, monkeypatch)
    assert hand_back(world.loom, [handle.id]).recovered == 1
    assert happened
    assert calls == [1]
    assert [wait.on for wait in handle.waits] == ["EffectInDoubtResolved"]


def test_a_version_that_is_newer_than_all_here_is_left_to_others(world: World) -> None:
    """A node of the old release runs nothing of the new one, and leaves it ready for a node that can."""
    from loom_django import definitions

    @flow("r.newer", version=2)
    def newer(ctx: FlowContext) -> str:
        return "new"

    world.loom.dispatcher = WorkerDispatcher()
    handle = newer.start()
    definitions.registry.forget("r.newer")

    @flow("r.newer", version=1)
    def older(ctx: FlowContext) -> str:
        return "old"

    world.loom.dispatcher = None
    world.shift(timedelta(seconds=31))
    assert world.recover().scanned == 0
    worker = WorkerService(world.engine, concurrency=1)
    assert worker.tick() is False
    assert world.engine.store.claim(handle.id, owner="dead", token=7, ttl=0.0)
    world.shift(timedelta(seconds=1))
    summary = world.recover()
    assert (summary.recovered, summary.failed) == (0, 1)
    assert world.kinds(handle.id) == ["EXECUTION_STARTED"]
    definitions.registry.forget("r.newer")

    @flow("r.newer", version=2)
    def again(ctx: FlowContext) -> str:
        return "new"

    assert world.engine.store.claim(handle.id, owner="x", token=8, ttl=60.0), "it is ready at once"


def test_a_renewal_does_not_save_a_holder_that_was_judged(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """The lease is known by its token: that its end moved meanwhile makes it no other lease."""

    @tool
    def effect(ctx: StepContext) -> str:
        return "done"

    @flow("r.renewed", steps=[effect])
    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", "in-effect")
    body.using(execution_id="n1").start()

    def judge(lease: Any) -> bool:
        world.shift(timedelta(seconds=1))
        assert world.engine.store.renew([(lease.execution_id, lease.token)], ttl=60) == {"n1"}
        return True

    assert recover_abandoned(world.loom, is_abandoned=judge).recovered == 1
    assert world.loom.handle("n1").result() == "done"


# Several at once, for others to run.


class Died(BaseException):
    """The process ended here."""


def abandoned(world: World, count: int) -> list[str]:
    """Executions that a worker had claimed before it died."""

    @tool(idempotent=False)
    def effect(ctx: StepContext) -> None: ...

    @flow("r.together", steps=[effect])
    def body(ctx: FlowContext) -> None:
        ctx.run(effect)

    world.loom.dispatcher = WorkerDispatcher()
    ids = [body.using(execution_id=f"t{number:02}").start().id for number in range(count)]
    known = world.engine.known()
    claims = world.engine.store.claim_ready(owner="dead", token=1, ttl=60, limit=count, known=known)
    assert sorted(claim.execution_id for claim in claims) == ids
    world.shift(PAST_THE_LEASE)
    return ids


def claimed(world: World) -> list[str]:
    store, known = world.engine.store, world.engine.known()
    return sorted(
        one.execution_id for one in store.claim_ready(owner="w", token=2, ttl=60, limit=99, known=known)
    )


def begin_effect(world: World, execution_id: str, fence: int) -> None:
    journal = open_journal(world.engine, world.engine.store.load(execution_id), fence=fence)
    journal.record(Kind.STEP_STARTED, {"step": "effect", "tool": "effect", "idempotent": False})
    journal.land()


def test_what_is_out_of_the_ordinary_goes_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch one is in doubt, one poisoned, one of a flow that is gone, one long: each as it would be alone."""
    monkeypatch.setattr("loom_django.services.recovery.SHORT", 2)
    ids = abandoned(world, 6)
    doubtful, poisoned, gone, long = ids[:4]
    begin_effect(world, doubtful, fence=1)
    for _ in range(20):
        world.engine.store.count_recovery(poisoned, sequence=1)
    journal = open_journal(world.engine, world.engine.store.load(long), fence=1)
    for _ in range(3):
        journal.record(Kind.EXECUTION_DENIED, {"act": "cancel", "principal": "p", "reason": None})
    journal.land()
    check = _Pass._check_code

    def checked(run: Any, journal: Journal) -> None:
        if journal.execution_id == gone:
            raise InvalidInputError("no such flow")
        check(run, journal)

    monkeypatch.setattr(_Pass, "_check_code", checked)
    told: list[str] = []
    told_of = lambda sender, execution_id, previous_owner, **more: told.append(execution_id)  # noqa: E731
    signals.execution_recovered.connect(told_of)
    try:
        summary = world.recover()
    finally:
        signals.execution_recovered.disconnect(told_of)
    assert (summary.candidates, summary.recovered) == (6, 5)
    assert [execution_id for execution_id, _ in summary.failures] == [gone]
    assert sorted(told) == sorted(set(ids) - {gone})
    waits = {key: [wait.on for wait in world.state(key).pending_waits] for key in (doubtful, poisoned)}
    assert waits == {doubtful: ["EffectInDoubtResolved"], poisoned: ["__loom_poisoned__"]}
    assert claimed(world) == [long, *ids[4:]]
    assert world.engine.store.fence(ids[5]) == 3  # the first claim, the takeover, the second claim


@pytest.mark.parametrize("call", ["take_over_all", "read_short", "acquire_fences_at", "release_all"])
def test_what_fails_for_a_batch_is_done_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nobody waits for another lease because a statement for many was refused."""
    ids = abandoned(world, 3)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not now")

    monkeypatch.setattr(world.engine.store, call, refuse)
    summary = world.recover()
    assert (summary.candidates, summary.recovered, summary.failed) == (3, 3, 0)
    monkeypatch.undo()
    assert claimed(world) == ids


def test_a_dispatcher_that_fails_for_one_of_a_batch_is_asked_for_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are ready; the one that nobody was told of is named."""
    ids = abandoned(world, 3)
    told: list[str] = []

    def dispatch(execution_id: str, *more: Any) -> None:
        if execution_id == ids[0]:
            raise RuntimeError("the broker is away")
        told.append(execution_id)

    monkeypatch.setattr(world.loom.dispatcher, "dispatch", dispatch)
    summary = world.recover()
    assert [execution_id for execution_id, _ in summary.failures] == ids[:1]
    assert told == ids[1:]
    monkeypatch.undo()
    assert claimed(world) == ids


@pytest.mark.parametrize("call", ["read_short", "acquire_fences_at"])
def test_a_holder_that_comes_back_is_not_fenced_out_by_a_batch(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It ends one of them between the takeover and the fences: that one is over, the other is handed on."""
    late, other = abandoned(world, 2)

    def end() -> None:
        journal = open_journal(world.engine, world.engine.store.load(late), fence=1)
        journal.record(Kind.EXECUTION_COMPLETED, {"output": None})
        journal.land(ownership=NOBODY, timers_off=None)

    assert not between(world, call, end, monkeypatch)
    summary = world.recover()
    assert (summary.candidates, summary.recovered, summary.failed) == (2, 1, 0)
    assert world.engine.store.fence(late) == 1
    assert claimed(world) == [other]


def test_what_begins_an_effect_behind_the_look_is_put_in_doubt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is not taken on an old look: the log is read again, and its effect is a person's to judge."""
    late, other = abandoned(world, 2)
    between(world, "acquire_fences_at", lambda: begin_effect(world, late, fence=1), monkeypatch)
    assert world.recover().recovered == 2
    assert [wait.on for wait in world.state(late).pending_waits] == ["EffectInDoubtResolved"]
    assert claimed(world) == [other]


def test_two_passes_at_once_hand_each_on_once(world: World) -> None:
    """Whatever each of them takes, the other leaves alone."""
    ids = abandoned(world, 20)
    begin, found = threading.Barrier(2), []

    def recover() -> None:
        begin.wait(20)
        found.append(world.recover())
        world.engine.store.close_connections()

    threads = [threading.Thread(target=recover) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    found.append(world.recover())  # what one had locked, and the other had to leave
    assert [one.failed for one in found] == [0, 0, 0]
    assert sum(one.recovered for one in found) == 20
    assert {world.engine.store.fence(key) for key in ids} == {2}
    assert claimed(world) == ids


@pytest.mark.parametrize("call", ["read_short", "acquire_fences_at", "release_all"])
def test_a_pass_that_dies_leaves_them_to_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """At whatever call of the batch: under its lease nobody else takes them, after that all are handed on."""
    ids = abandoned(world, 5)

    def die() -> None:
        raise Died

    between(world, call, die, monkeypatch)
    with pytest.raises(Died):
        world.recover()
    assert world.recover().candidates == 0
    world.shift(PAST_THE_LEASE)
    assert world.recover().recovered == 5
    assert claimed(world) == ids


@pytest.mark.parametrize(
    "call", ["take_over_all", "read_short", "acquire_fences_at", "append", "release_all"]
)
def test_a_pass_that_stood_still_for_too_long_does_nothing_more(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another pass has taken all from it, and workers have run them: it fences nobody out, and parks nothing twice."""
    ids = abandoned(world, 6)
    doubtful, poisoned = ids[:2]
    begin_effect(world, doubtful, fence=1)
    for _ in range(20):
        world.engine.store.count_recovery(poisoned, sequence=1)
    seen: list[Any] = []

    def everything() -> list[Any]:
        store: Any = world.engine.store
        return [
            (world.loom.history(key), store.fence(key), store.held(key), store.status(key)) for key in ids
        ]

    def others_go_on() -> None:
        world.shift(PAST_THE_LEASE)
        world.recover()
        store, known = world.engine.store, world.engine.known()
        for one in store.claim_ready(owner="w", token=9, ttl=60, limit=2, known=known):
            begin_effect(world, one.execution_id, fence=one.fence)
        seen.extend(everything())

    assert not between(world, call, others_go_on, monkeypatch)
    world.recover()
    assert seen
    assert everything() == seen
    waits = {key: [wait.on for wait in world.state(key).pending_waits] for key in (doubtful, poisoned)}
    assert waits == {doubtful: ["EffectInDoubtResolved"], poisoned: ["__loom_poisoned__"]}


def test_a_pass_asks_the_database_as_often_for_forty_as_for_ten(world: World) -> None:
    """A statement more for each would bound what is handed on by the way to the server and back."""
    store: Any = world.engine.store
    if isinstance(store, MemoryStore):
        pytest.skip("it has no statements")
    abandoned(world, 50)
    counts = []
    for limit in (10, 40):
        with CaptureQueriesContext(store.connection) as asked:
            assert world.recover(limit=limit).recovered == limit
        sent = [query["sql"][:40] for query in asked.captured_queries]
        if store.connection.vendor == "sqlite":  # a file is no way off: each log is read by itself
            sent = [sql for sql in sent if not sql.startswith("select sequence")]
        counts.append(sent)
    assert len(counts[0]) == len(counts[1]) <= 12, counts
