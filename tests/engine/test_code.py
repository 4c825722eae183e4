"""Changed code is refused, with its ways out; what the caller vouches for is moved, durably."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from loom_django import EffectInDoubt, FlowContext, StepContext, definitions, flow, tool
from loom_django.engine.doubt import park_fields
from loom_django.engine.journal import Journal
from loom_django.errors import FlowCodeMismatchError
from loom_django.kernel import hashing
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import Status, Wait
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
