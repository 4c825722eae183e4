"""Old logs are played against today's bodies: from files that stay with the tests, and where they live."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from loom_django import FlowContext, StepContext, definitions, flow, loom, tool
from loom_django.errors import ExecutionNotFoundError, FlowCodeMismatchError, InvalidInputError
from loom_django.testing import Harness, NonDeterminismError, assert_replays, replay_live
from tests.testing.flows import order

HISTORY = Path(__file__).parents[1] / "histories" / "order-v1.jsonl"


@pytest.fixture(autouse=True)
def own_flows() -> Iterator[None]:
    """Flows of a test do not outlive it."""
    known = set(definitions.registry.highest())
    yield
    for flow_id in set(definitions.registry.highest()) - known:
        definitions.registry.forget(flow_id)


def saved(execution_id: str, path: Path) -> Path:
    """Write a log as a person would."""
    out = io.StringIO()
    call_command("loom_history", execution_id, "--format", "jsonl", stdout=out)
    path.write_text(out.getvalue())
    return path


@tool(idempotent=True)
def touch(ctx: StepContext, word: str) -> str:
    raise AssertionError("a replay calls no tool")


def redeclare(flow_id: str, body: Any, **declared: Any) -> Any:
    definitions.registry.forget(flow_id)
    return flow(flow_id, steps=[touch], **declared)(body)


def asks_for(*words: str) -> Any:
    def body(ctx: FlowContext) -> None:
        for word in words:
            ctx.run(touch.keyed(word), word)
        ctx.suspend("Go")

    return body


def test_an_old_history_still_replays() -> None:
    """Flow and version stand in the file; neither a database nor a fixture is needed."""
    assert_replays(HISTORY)
    assert_replays(str(HISTORY), flow=order)


def test_a_file_that_is_no_whole_log_is_refused(tmp_path: Path) -> None:
    """A test that plays nothing would never fail."""
    whole = HISTORY.read_text().splitlines()
    for name, lines in {
        "tail": whole[1:],
        "empty": [],
        "json": ["{}"],
        "text": ["a log"],
        "open": whole[:2],
    }.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines))
        with pytest.raises(InvalidInputError, match=name):
            assert_replays(path)
    with pytest.raises(FileNotFoundError):
        assert_replays("nowhere.jsonl")


@pytest.mark.django_db
def test_a_changed_body_fails_and_the_old_one_passes(loom_harness: Harness, tmp_path: Path) -> None:
    """By its file and by its id; what could be moved is played against the target."""
    loom_harness.stub(touch, "touched")
    handle = redeclare("replays.a", asks_for("a", "b")).start()
    loom_harness.run()
    path = saved(handle.id, tmp_path / "a.jsonl")
    for log in (path, handle.id):
        assert_replays(log)
    flow("replays.a", version=2, steps=[touch])(asks_for("a"))
    wider = flow("replays.a", version=3, steps=[touch], step_families=["x"])(asks_for("a", "c"))
    assert_replays(path)  # version 1 is there still
    for target, differs in ((wider, "step touch#b"), ("replays.a", "step touch#b")):
        with pytest.raises(NonDeterminismError, match=differs):
            assert_replays(path, flow=target)
    redeclare("replays.a", asks_for("a"))
    with pytest.raises(NonDeterminismError, match="touch#b"):
        assert_replays(handle.id)
    definitions.registry.forget("replays.a")
    with pytest.raises(FlowCodeMismatchError):
        assert_replays(path)
    with pytest.raises(ExecutionNotFoundError):
        assert_replays("nobody")


@pytest.mark.django_db
def test_children_messages_and_branches_replay_from_a_file(loom_harness: Harness, tmp_path: Path) -> None:
    """All that a body meets is in its log."""
    loom_harness.stub(touch, "touched")

    @flow("replays.child")
    def child(ctx: FlowContext, n: int) -> int:
        return n

    @flow("replays.all", steps=[touch])
    def body(ctx: FlowContext) -> Any:
        children = [ctx.start_child(child, n) for n in range(2)]
        done = ctx.await_children(children)
        ctx.parallel({"a": touch.bind("a"), "b": lambda ctx: ctx.receive("news")})
        ctx.decide("d", lambda: 3)
        ctx.sleep(timedelta(hours=1))
        return [done, ctx.random().random(), ctx.now()]

    handle = body.start()
    loom_harness.run()
    loom.send(handle.id, "news", 1)
    loom_harness.run()
    parked = saved(handle.id, tmp_path / "parked.jsonl")
    loom_harness.advance(timedelta(hours=2))
    assert handle.result()[0] == [0, 1]
    for path in (parked, saved(handle.id, tmp_path / "ended.jsonl")):
        assert_replays(path)


@pytest.mark.django_db
def test_live_executions_are_played_and_what_differs_is_named(loom_harness: Harness) -> None:
    """As many as were asked for; what has ended is not looked at, what never stopped is not counted."""
    loom_harness.stub(touch, "touched")
    body = redeclare("replays.live", asks_for("a"))
    handles = [body.using(execution_id=f"live-{n}").start() for n in range(3)]
    loom_harness.run()
    loom.cancel(handles[2].id)
    body.using(execution_id="live-new").start()
    assert (replay_live("replays.live"), replay_live("replays.live", 1)) == (2, 1)
    redeclare("replays.live", asks_for("a", "b"))
    with pytest.raises(AssertionError) as failed:
        replay_live("replays.live")
    assert "2 of 2 do not replay: live-0, live-1" in str(failed.value)
    assert "step touch#b" in str(failed.value)


@pytest.mark.django_db
def test_what_was_done_before_a_move_is_not_asked_of_the_new_code(loom_harness: Harness) -> None:
    """The harness plays each execution at each park; from the move on it compares."""
    loom_harness.stub(touch, "touched")
    handle = redeclare("replays.moved", asks_for("a", "b")).start()
    loom_harness.run()

    def rest(ctx: FlowContext) -> None:
        ctx.suspend("Go")
        ctx.run(touch.keyed("c"), "c")
        ctx.suspend("Again")

    moved = redeclare("replays.moved", rest, version=2)
    loom.resume_as(handle.id, moved, event_type="Go")
    loom_harness.run()
    assert_replays(handle.id)

    def other(ctx: FlowContext) -> None:
        ctx.suspend("Go")
        ctx.suspend("Again")

    redeclare("replays.moved", other, version=2)
    with pytest.raises(NonDeterminismError, match="touch#c"):
        assert_replays(handle.id)
