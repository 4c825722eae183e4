"""Changed code is refused, with its ways out; what the caller vouches for is moved, durably."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from loom_django import EffectInDoubt, FlowContext, StepContext, definitions, flow, tool
from loom_django.engine import moves
from loom_django.engine.doubt import park_fields
from loom_django.engine.journal import Journal
from loom_django.errors import (
    FlowCodeMismatchError,
    FlowNotFoundError,
    InvalidInputError,
    ResumeRefusedError,
)
from loom_django.kernel import hashing
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import Frame, FrameStatus, Status, Wait
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.worker import WorkerService
from loom_django.stores.base import NOBODY, NewExecution
from tests.engine.conftest import World


@tool
def effect(ctx: StepContext) -> str:
    return "done"


def parked(flow_id: str, **declared: Any) -> Any:
    @flow(flow_id, **declared)
    def body(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        return f"by version {declared.get('version', 1)}"

    return body


def redeclare(flow_id: str, **declared: Any) -> Any:
    definitions.registry.forget(flow_id)
    return parked(flow_id, **declared)


def test_another_structure_is_refused_and_nothing_is_written(world: World) -> None:
    """The message names the execution, both hashes and three ways out."""
    handle = parked("code.a", steps=[effect]).start()
    changed = redeclare("code.a")
    before = world.kinds(handle.id)
    with pytest.raises(FlowCodeMismatchError) as refused:
        world.loom.resume(handle.id, event_type="Go")
    text = str(refused.value)
    assert refused.value.kind == "structure"
    for part in (handle.id, refused.value.recorded, changed.flow_hash, "Pin:", "Migrate:", "Drain:"):
        assert part in text
    assert world.kinds(handle.id) == before


@pytest.fixture
def drifted(world: World) -> Callable[[str, Callable[[FlowContext], Any]], Any]:
    """Start a flow of the given body, and declare it with one step less before the handle is returned."""

    def start(flow_id: str, body: Callable[[FlowContext], Any], *steps: Any) -> Any:
        handle = flow(flow_id, steps=[effect, *steps])(body).start()
        definitions.registry.forget(flow_id)
        flow(flow_id, steps=[*steps])(body)
        return handle

    return start


def refused_by_its_log(caplog: pytest.LogCaptureFixture, execution_id: str) -> bool:
    """What nobody called for is refused in the process's log, by name and with the ways out."""
    return any(
        execution_id in record.getMessage() + str(record.exc_info)
        and "Pin:" in record.getMessage() + str(record.exc_info)
        for record in caplog.records
    )


def test_a_verdict_is_refused_by_other_code(world: World, drifted: Any) -> None:
    """As an answer is."""

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> None:
        raise EffectInDoubt("the line went dead")

    handle = drifted("code.verdict", lambda ctx: ctx.run(wire), wire)
    with pytest.raises(FlowCodeMismatchError, match="step 'effect' is gone"):
        world.loom.resolve(handle.id, "wire", "retry-fresh")


def test_a_wake_is_refused_by_other_code_and_comes_again(
    world: World, drifted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The row stays; once the old version is back beside the new one, the wake is served by itself."""

    def sleeps(ctx: FlowContext) -> str:
        ctx.sleep(60)
        return "awake"

    handle = drifted("code.timer", sleeps)
    world.advance(timedelta(seconds=61))
    assert handle.status == Status.SUSPENDED
    assert refused_by_its_log(caplog, handle.id)
    definitions.registry.forget("code.timer")
    flow("code.timer", version=1, pinned=True, steps=[effect])(sleeps)
    flow("code.timer", version=2)(sleeps)
    world.advance(timedelta(seconds=600))
    assert handle.result() == "awake"


def test_a_message_and_a_childs_end_are_refused_by_other_code(
    world: World, drifted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What has come is kept, and the refusal is told."""

    @flow("code.child")
    def child(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    receiver = drifted("code.message", lambda ctx: ctx.receive("news"))
    world.loom.send(receiver.id, "news", 1)
    assert receiver.status == Status.SUSPENDED
    assert refused_by_its_log(caplog, receiver.id)
    caplog.clear()
    parent = drifted("code.parent", lambda ctx: ctx.await_child(ctx.start_child(child)))
    (child_id,) = world.state(parent).child_ids.values()
    world.loom.resume(child_id, event_type="Go")
    assert parent.status == Status.SUSPENDED
    assert refused_by_its_log(caplog, parent.id)


def test_recovery_is_refused_by_other_code(world: World, crash_at: Callable[[str, str], None]) -> None:
    """It counts as failed, and says why."""

    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", "before-effect")
    handle = flow("code.crashed", steps=[effect])(body).start()
    definitions.registry.forget("code.crashed")
    flow("code.crashed")(body)
    world.shift(timedelta(hours=2))
    summary = world.recover()
    assert (summary.recovered, summary.failed) == (0, 1)
    assert handle.status == Status.RUNNING


def test_a_mismatch_is_told_step_by_step(world: World) -> None:
    """What was declared is compared, begun or not; and how a renamed tool keeps its step."""

    @tool
    def charge(ctx: StepContext) -> None:
        """Never begun."""

    @tool
    def charge_card(ctx: StepContext) -> None:
        """The same, renamed."""

    handle = parked("code.told", steps=[charge, effect]).start()
    redeclare("code.told", steps=[charge_card, tool(idempotent=True)(effect.func)])
    with pytest.raises(FlowCodeMismatchError) as refused:
        world.loom.resume(handle.id, event_type="Go")
    renamed, changed = refused.value.differences
    assert renamed.startswith("step 'charge' is gone, 'charge_card' is new: @tool(name='charge') keeps it")
    assert changed == "step 'effect' had idempotent=None, and has idempotent=True now"


def start_with(world: World, flow_: Any, **recorded: Any) -> str:
    """Start an execution whose first event is what another release would have written."""
    handle = flow_.start()
    source, *_ = world.loom.history(handle.id)
    fields = {**source.data, **recorded}
    journal = Journal(world.engine, Fold(), fence=None, writer=1)
    journal.record("EXECUTION_STARTED", fields, execution_id=f"{handle.id}-old")
    waits = [Wait("Go#1", "Go")]
    journal.record("EXECUTION_SUSPENDED", park_fields("waiting", waits))
    journal.land(ownership=NOBODY, new=NewExecution(chain=f"{handle.id}-old"))
    return f"{handle.id}-old"


def test_recorded_hashes_of_the_old_form_are_compared_and_none_says_nothing(world: World) -> None:
    """A 32-bit value is compared with that of the registered code, not guessed."""
    body = parked("code.legacy", steps=[effect])
    legacy = hashing.legacy_hash(body.step_facts(), ())
    for number, recorded in enumerate([legacy, None, "fnv1a:00000000"]):
        execution_id = start_with(world, body, hash=recorded, graph=None)
        if number < 2:
            world.loom.resume(execution_id, event_type="Go")
            continue
        with pytest.raises(FlowCodeMismatchError) as refused:
            world.loom.resume(execution_id, event_type="Go")
        assert refused.value.registered == legacy


def test_a_changed_body_is_refused_unless_it_is_listed_as_compatible(world: World) -> None:
    """A fingerprint on both sides is compared; one side without says nothing."""
    handle = parked("code.b", code_fingerprint="one").start()
    redeclare("code.b", code_fingerprint="two")
    with pytest.raises(FlowCodeMismatchError) as refused:
        world.loom.resume(handle.id, event_type="Go")
    assert refused.value.kind == "code"
    redeclare("code.b", code_fingerprint="two", compatible_with=["one"])
    world.loom.resume(handle.id, event_type="Go")
    assert handle.status == Status.COMPLETED


def test_the_recorded_version_serves_what_it_started(world: World) -> None:
    """Two versions side by side: each execution resumes on its own; starts by id take the highest unpinned."""
    first = parked("code.c", version=1).start()
    parked("code.c", version=2)
    second = world.loom.start("code.c")
    for handle in (first, second):
        world.loom.resume(handle.id, event_type="Go")
    assert (first.result(), second.result()) == ("by version 1", "by version 2")


def test_a_pinned_version_starts_nothing_new(world: World) -> None:
    """It serves the executions it has."""
    from loom_django.errors import InvalidInputError

    parked("code.d", version=1)
    pinned = parked("code.d", version=2, pinned=True)
    with pytest.raises(InvalidInputError, match="pinned"):
        pinned.start()
    assert world.state(world.loom.start("code.d")).version == 1


def test_what_the_caller_vouches_for_is_moved_durably(world: World) -> None:
    """EXECUTION_MIGRATED re-points the recorded code, so that later resumes are judged by the new one."""

    @flow("code.e", steps=[effect])
    def old(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        return "old"

    handle = old.start()
    definitions.registry.forget("code.e")

    @flow("code.e", version=2)
    def new(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        ctx.suspend("Again")
        return "new"

    world.loom.resume(handle.id, event_type="Go", allow_flow_code_mismatch=True, principal="anna")
    assert world.kinds(handle.id)[-3:] == ["EXECUTION_MIGRATED", "EXECUTION_RESUMED", "EXECUTION_SUSPENDED"]
    state = world.state(handle)
    assert (state.flow_hash, state.version) == (new.flow_hash, 2)
    world.loom.resume(handle.id, event_type="Again")
    assert handle.result() == "new"


# Moves to other code.


def renamed(world: World, flow_id: str, **declared: Any) -> tuple[Any, Any]:
    """An execution parked behind a step of version 1, and version 2, which stands alone and has one more."""

    @tool
    def more(ctx: StepContext) -> str:
        return "more"

    @flow(flow_id, steps=[effect])
    def old(ctx: FlowContext, name: str = "n") -> str:
        ctx.run(effect)
        ctx.suspend("Go")
        return "old"

    handle = old.start()
    definitions.registry.forget(flow_id)

    @flow(flow_id, **{"version": 2, "steps": [effect, more], **declared})
    def new(ctx: FlowContext, name: str = "n") -> Any:
        ctx.run_step("effect")
        answer = ctx.suspend("Go")
        ctx.suspend("Again")
        return [answer, ctx.run(more)]

    return handle, new


def test_a_move_answers_in_one_append_and_is_judged_by_the_new_code(world: World) -> None:
    """MIGRATED and RESUMED; hash, version and fingerprint are the target's from then on."""
    handle, new = renamed(world, "move.a", code_fingerprint="two")
    report = world.loom.replay_check(handle.id, "move.a")
    assert (report.ok, report.frames, report.differences) == (True, 1, ("step 'more' is new",))
    before = len(world.kinds(handle.id))
    world.loom.resume_as(
        handle.id,
        "move.a",
        event_type="Go",
        payload=7,
        fence_if_parked_at=report.park_sequence,
        principal="anna",
        reason="release 2",
    )
    migrated, resumed, *_ = world.loom.history(handle.id, after=before)
    assert [migrated.kind, resumed.kind] == ["EXECUTION_MIGRATED", "EXECUTION_RESUMED"]
    assert migrated.writer == resumed.writer
    recorded = {
        name: migrated.data[name] for name in ("strategy", "from_version", "to_code", "principal", "reason")
    }
    assert list(recorded.values()) == ["replay-check", 1, "two", "anna", "release 2"]
    state = world.state(handle)
    assert (state.version, state.flow_hash, state.code_hash) == (2, new.flow_hash, "two")
    assert state.graph == {"steps": {"effect": "", "more": ""}}
    definitions.registry.forget("move.a")
    flow("move.a", version=2, steps=new.steps.values(), code_fingerprint="three")(new.func)
    with pytest.raises(FlowCodeMismatchError) as refused:
        world.loom.resume(handle.id, event_type="Again")
    assert (refused.value.kind, refused.value.recorded) == ("code", "two")
    definitions.registry.forget("move.a")
    flow("move.a", version=2, steps=new.steps.values(), code_fingerprint="two")(new.func)
    world.loom.resume(handle.id, event_type="Again")
    assert handle.result() == [7, "more"]


def test_a_replay_check_tells_what_the_target_does_not_declare(world: World) -> None:
    """A family once, with its count; what base or pattern admits passes; nothing is written when refused."""

    def loop(ctx: FlowContext, must: int) -> None:
        for n in range(3):
            ctx.run(effect.keyed(n))
        ctx.run(named)
        ctx.suspend("Go")

    named = effect.named("tool.search")
    handle = flow("move.b", steps=[effect, named])(loop).start(1)

    def without(ctx: FlowContext, other: int) -> None:
        """It declares less, and needs more."""

    def same(ctx: FlowContext, must: int) -> None:
        """It declares families."""

    flow("move.b", version=2, steps=[effect])(without)
    flow("move.b", version=3, steps=[effect], step_families=["/tool[.]/"])(same)
    flow("move.b", version=4, step_families=["effect", "tool.search"])(same)
    flow("move.b", version=5)(same)
    flow("move.b", version=6, steps=[effect, named])(without)
    reports = [world.loom.replay_check(handle.id, "move.b", version=n) for n in (2, 3, 4, 5, 6)]
    assert [report.ok for report in reports] == [False, True, True, False, False]
    assert (reports[0].vanished, reports[0].unbound) == ((("tool.search", 1),), ("other",))
    assert reports[3].vanished == (("effect", 3), ("tool.search", 1))
    before = world.kinds(handle.id)
    for event_type in ("Go", None):
        with pytest.raises(FlowCodeMismatchError, match="step 'effect' \\(3 recorded steps\\)") as refused:
            world.loom.resume_as(handle.id, "move.b", version=5, event_type=event_type)
        assert refused.value.kind == "replay-check"
    assert world.kinds(handle.id) == before
    world.loom.resume_as(handle.id, "move.b", version=5, event_type="Go", strategy="operator-ack")
    assert handle.status == Status.COMPLETED


def test_a_vanished_family_is_told_under_the_name_that_it_was_recorded_under(world: World) -> None:
    """A pattern's ids have no base in common."""

    @flow("move.c", step_families=["/x[.]/"])
    def many(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    @flow("move.c", version=2)
    def none(ctx: FlowContext) -> None:
        """It declares nothing."""

    handle = many.start()
    fold = Fold(world.state(handle))
    for name in ("x.one", "x.two"):
        fold.frames[name] = Frame(name, "x", FrameStatus.COMPLETED)
    assert moves.report(fold, none).vanished == (("/x[.]/", 2),)


def test_a_flow_of_another_id_can_be_the_target(world: World) -> None:
    """The row goes by the new id, so that nodes which know it take the execution."""
    handle = parked("move.from", steps=[effect]).start()
    target = parked("move.to", version=3, steps=[effect])
    world.loom.resume_as(handle.id, target, event_type="Go")
    assert world.state(handle).flow_id == "move.to"
    assert handle.result() == "by version 3"


def test_what_sleeps_is_moved_without_an_answer_and_wakes_in_time(world: World) -> None:
    """A wake that was refused and put off is due again at once; the wait is what it was."""

    def sleeps(ctx: FlowContext) -> str:
        ctx.sleep(60)
        return "awake"

    flow_id = "move.sleeps"
    handle = flow(flow_id, steps=[effect])(sleeps).start()
    definitions.registry.forget(flow_id)
    flow(flow_id, version=2)(sleeps)
    world.advance(timedelta(seconds=61))
    assert handle.status == Status.SUSPENDED
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume_as(handle.id, flow_id, event_type="__loom_timer__")
    assert refused.value.reason == "reserved-wait"
    world.loom.resume_as(handle.id, flow_id)
    assert world.kinds(handle.id)[-1] == "EXECUTION_MIGRATED"
    assert handle.status == Status.SUSPENDED
    world.advance(timedelta(seconds=1))
    assert handle.status == Status.COMPLETED


def test_what_came_for_the_old_code_is_delivered_after_the_move(world: World) -> None:
    """A message that nobody could take, and an effect in doubt whose verdict nobody could give."""

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> None:
        raise EffectInDoubt("the line went dead")

    def body(ctx: FlowContext) -> Any:
        news = ctx.receive("news")
        return [news, ctx.run(wire)]

    handle = flow("move.news", steps=[effect, wire])(body).start()
    definitions.registry.forget("move.news")
    flow("move.news", version=2, steps=[wire])(body)
    world.loom.send(handle.id, "news", "here")
    world.loom.resume_as(handle.id, "move.news")
    assert world.kinds(handle.id)[-1] == "EXECUTION_SUSPENDED"
    definitions.registry.forget("move.news")
    flow("move.news", version=3, steps=[wire, effect])(body)
    world.loom.resume_as(handle.id, "move.news")
    world.loom.resolve(handle.id, "wire", "completed-with-result", output="tx")
    assert handle.result() == ["here", "tx"]


def test_what_is_to_be_run_is_moved_while_nobody_holds_it(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """A crash before the deploy must not strand it; a holder is not robbed."""

    def body(ctx: FlowContext) -> str:
        return ctx.run(effect)

    crash_at("effect", "before-effect")
    handle = flow("move.ready", steps=[effect])(body).start()
    definitions.registry.forget("move.ready")
    flow("move.ready", version=2, steps=[effect], step_families=["more"])(body)
    with pytest.raises(ResumeRefusedError, match="holds it"):
        world.loom.resume_as(handle.id, "move.ready")
    world.shift(timedelta(hours=2))
    assert world.recover().failed == 1  # handed back, and put off
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume_as(handle.id, "move.ready", fence_if_parked_at=3)
    assert refused.value.reason == "not-suspended"
    world.loom.resume_as(handle.id, "move.ready")
    assert handle.status == Status.RUNNING
    world.shift(timedelta(hours=1))
    world.recover()
    assert handle.result() == "done"


def test_a_move_is_refused_where_the_park_is_another_one(world: World) -> None:
    """An answered park, an ended execution, an unknown target, an answer without a name: nothing is written."""
    handle, _ = renamed(world, "move.refused")
    park = world.loom.parked_at_sequence(handle.id)
    world.loom.resume_as(handle.id, "move.refused", event_type="Go", fence_if_parked_at=park)
    before = world.kinds(handle.id)
    stale: list[dict[str, Any]] = [{"event_type": "Go"}, {}]
    for given in stale:
        with pytest.raises(ResumeRefusedError) as refused:
            world.loom.resume_as(handle.id, "move.refused", fence_if_parked_at=park, **given)
        assert refused.value.reason == "not-suspended"
    with pytest.raises(FlowNotFoundError, match=r"\(known: version 2\)"):
        world.loom.resume_as(handle.id, "move.refused", version=9)
    with pytest.raises(InvalidInputError, match="operator-ack"):
        world.loom.resume_as(handle.id, "move.refused", strategy="hope")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="event_type"):
        world.loom.resume_as(handle.id, "move.refused", payload=1)
    assert world.kinds(handle.id) == before
    world.loom.cancel(handle.id)
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume_as(handle.id, "move.refused")
    assert refused.value.reason == "terminal"


def test_a_move_before_a_gate_leaves_the_gate_to_its_own_act(world: World) -> None:
    """The execution is moved as it stands, and set going by the act that is for it."""
    broken = [True]

    def body(ctx: FlowContext) -> str:
        if broken:
            raise LookupError("a bug")
        return "fixed"

    handle = flow("move.gate", steps=[effect], on_error="park")(body).start()
    definitions.registry.forget("move.gate")
    flow("move.gate", version=2, on_error="park")(body)
    broken.clear()
    with pytest.raises(FlowCodeMismatchError):
        world.loom.retry_error(handle.id)
    world.loom.resume_as(handle.id, "move.gate", reason="the bug is fixed")
    world.loom.retry_error(handle.id)
    assert handle.result() == "fixed"


def test_a_wait_that_is_open_while_the_body_is_to_run_is_not_answered_by_a_move(world: World) -> None:
    """A resume would be kept for it; a move has nowhere to keep its code."""

    @flow("move.open")
    def body(ctx: FlowContext) -> None:
        ctx.parallel({"a": lambda ctx: ctx.suspend("A"), "b": lambda ctx: [ctx.suspend("B")]})

    handle = body.start()
    world.loom.dispatcher = WorkerDispatcher()
    world.loom.resume(handle.id, event_type="A")
    before = world.kinds(handle.id)
    with pytest.raises(ResumeRefusedError, match="when it has parked") as refused:
        world.loom.resume_as(handle.id, body, event_type="B")
    assert refused.value.reason == "not-suspended"
    assert world.kinds(handle.id) == before


def test_a_wait_behind_a_gate_is_not_answered_by_a_move(world: World) -> None:
    """It is pending, and the park does not hold it: the gate is to be opened first."""

    def first(ctx: FlowContext) -> None:
        ctx.suspend("A")
        raise LookupError("a bug")

    @flow("move.behind", on_error="park")
    def body(ctx: FlowContext) -> None:
        ctx.parallel({"a": first, "b": lambda ctx: ctx.suspend("B")})

    handle = body.start()
    world.loom.resume(handle.id, event_type="A")
    assert world.state(handle).reason == "error"
    before = world.kinds(handle.id)
    with pytest.raises(ResumeRefusedError, match="stands before a gate"):
        world.loom.resume_as(handle.id, body, event_type="B")
    assert world.kinds(handle.id) == before


def test_of_a_move_and_an_answer_one_wins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that lands behind the move's look: the park is over, and nothing of the move is written."""
    handle, new = renamed(world, "move.race")
    report = moves.report
    park = world.loom.parked_at_sequence(handle.id)

    def beaten(fold: Fold, target: Any) -> Any:
        monkeypatch.setattr(moves, "report", report)
        world.loom.resume(handle.id, event_type="Go", allow_flow_code_mismatch=True)
        return report(fold, target)

    monkeypatch.setattr(moves, "report", beaten)
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume_as(handle.id, new, event_type="Go", fence_if_parked_at=park)
    assert refused.value.reason == "not-suspended"
    [moved] = world.loom.history(handle.id, kinds=["EXECUTION_MIGRATED"])
    assert moved.data["strategy"] == "operator-ack"


def test_what_is_taken_up_behind_the_look_is_not_moved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker claims it between the look at its holder and the append: it is looked at again, and is held."""
    world.loom.dispatcher = WorkerDispatcher()
    handle = parked("move.claimed", steps=[effect]).start()
    store = world.engine.store
    held = store.held

    def claimed_after(execution_id: str) -> Any:
        monkeypatch.setattr(store, "held", held)
        before = held(execution_id)
        [claim] = store.claim_ready(owner="w", token=7, ttl=60, limit=1, known=world.engine.known())
        assert claim.execution_id == execution_id
        return before

    monkeypatch.setattr(store, "held", claimed_after)
    with pytest.raises(ResumeRefusedError, match="w holds it"):
        world.loom.resume_as(handle.id, "move.claimed")
    assert world.kinds(handle.id) == ["EXECUTION_STARTED"]


def test_what_waits_to_be_begun_says_why_and_can_be_moved(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """After a deploy a worker takes it, leaves it alone and says so with the ways out; the move is one of them."""
    world.loom.dispatcher = WorkerDispatcher()
    handle = parked("code.pending", steps=[effect]).start()
    redeclare("code.pending", version=2)

    def work() -> None:
        worker = WorkerService(world.engine, concurrency=1)
        worker.tick()
        with worker._condition:
            assert worker._condition.wait_for(lambda: not worker._held, 20)
        assert worker.drain(20) is True

    work()
    assert handle.status == Status.PENDING
    assert refused_by_its_log(caplog, handle.id)
    world.loom.resume_as(handle.id, "code.pending")
    world.shift(timedelta(minutes=11))
    work()
    assert handle.status == Status.SUSPENDED
    assert world.state(handle).version == 2


def test_a_successor_is_held_to_the_code_that_is_registered_when_it_begins(world: World) -> None:
    """So continue_as_new is where a chain changes its code without anybody's act."""

    def body(ctx: FlowContext, rounds: int) -> Any:
        ctx.suspend("Go")
        return ctx.continue_as_new("code.chain", rounds - 1) if rounds else "over"

    handle = flow("code.chain", code_fingerprint="one")(body).start(1)
    definitions.registry.forget("code.chain")
    flow("code.chain", steps=[effect], code_fingerprint="two", compatible_with=["one"])(body)
    world.loom.resume_as(handle.id, "code.chain", event_type="Go")
    successor = world.state(f"{handle.id}~2")
    assert successor.code_hash == "two"
    assert successor.graph == {"steps": {"effect": ""}}


def test_a_move_to_the_same_code_says_that_what_it_skips_is_meant(world: World) -> None:
    """The hash is body-blind: what diverged is moved where it is, and may go on."""

    def old(ctx: FlowContext) -> str:
        ctx.run(effect)
        ctx.suspend("Go")
        return "old"

    def new(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        return "new"

    declared: dict[str, Any] = {"steps": [effect], "divergence": "fail"}
    handle = flow("move.diverged", **declared)(old).start()
    definitions.registry.forget("move.diverged")
    target = flow("move.diverged", **declared)(new)
    world.loom.resume(handle.id, event_type="Go")
    assert world.state(handle).reason == "diverged"
    world.loom.retry_diverged(handle.id)
    assert world.state(handle).reason == "diverged"
    world.loom.resume_as(handle.id, target, reason="skipped on purpose")
    world.loom.retry_diverged(handle.id)
    assert handle.result() == "new"
