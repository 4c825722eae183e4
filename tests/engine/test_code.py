"""Changed code is refused, with its ways out; what the caller vouches for is moved, durably."""

from __future__ import annotations

from typing import Any

import pytest

from loom_django import FlowContext, StepContext, definitions, flow, tool
from loom_django.errors import FlowCodeMismatchError
from loom_django.kernel.state import Status
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
