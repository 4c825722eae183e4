"""Waits: parked as rows, answered once, by the right call."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from loom_django import FlowContext, StepContext, WaitTimedOut, definitions, flow, tool
from loom_django.errors import (
    ExecutionClosedError,
    ExecutionNotFoundError,
    InvalidInputError,
    LoomError,
    ResumeRefusedError,
    VerdictRefusedError,
)
from loom_django.kernel.state import Status
from loom_django.services.timers import PUT_OFF, TimerService
from tests.engine.conftest import World


@tool(idempotent=False, in_doubt_on=ConnectionError)
def wire(ctx: StepContext) -> str:
    raise ConnectionError


@tool(idempotent=False, in_doubt_on=ConnectionError)
def second_wire(ctx: StepContext) -> str:
    raise ConnectionError


def approval_flow(flow_id: str) -> Any:
    @flow(flow_id)
    def body(ctx: FlowContext) -> Any:
        try:
            return ctx.suspend("Approval", timeout=timedelta(days=2))
        except WaitTimedOut as exc:
            return f"timed out: {exc.on}"

    return body


def test_a_suspend_is_answered_once(world: World) -> None:
    """The payload comes back; a second answer is refused and writes nothing."""
    handle = approval_flow("w.once").start()
    world.loom.resume(handle.id, event_type="Approval", payload={"by": "anna"}, principal="anna")
    assert handle.result() == {"by": "anna"}
    before = world.kinds(handle.id)
    with pytest.raises(ResumeRefusedError) as refused:
        world.loom.resume(handle.id, event_type="Approval")
    assert refused.value.reason == "terminal"
    assert world.kinds(handle.id) == before


def test_a_timeout_is_the_same_durable_wake(world: World) -> None:
    """Nothing happens before the recorded time; then the wait is timed out, once."""
    handle = approval_flow("w.timeout").start()
    world.advance(timedelta(days=1, hours=23))
    assert handle.status == Status.SUSPENDED
    world.advance(timedelta(hours=2))
    assert handle.result() == "timed out: Approval"
    assert world.kinds(handle.id)[-3:] == ["TIMER_FIRED", "EXECUTION_RESUMED", "EXECUTION_COMPLETED"]
    assert world.engine.store.timers(handle.id) == []


def test_an_answer_retires_the_timer(world: World) -> None:
    """After the answer no timer row of the wait is left to fire."""

    @flow("w.retire")
    def body(ctx: FlowContext) -> None:
        ctx.suspend("A", timeout=60)
        ctx.suspend("B")

    handle = body.start()
    assert len(world.engine.store.timers(handle.id)) == 1
    world.loom.resume(handle.id, event_type="A")
    assert world.engine.store.timers(handle.id) == []
    world.advance(timedelta(days=1))
    assert world.kinds(handle.id).count("TIMER_FIRED") == 0


def test_a_sleep_ends_at_its_recorded_time_and_not_at_a_replay(world: World) -> None:
    """The wake time is recorded once; a body that runs again in between sleeps on."""

    @flow("w.sleep")
    def body(ctx: FlowContext) -> None:
        ctx.sleep(60)

    handle = body.start()
    world.advance(timedelta(seconds=30))
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]
    world.advance(timedelta(seconds=31))
    assert handle.status == Status.COMPLETED
    assert world.kinds(handle.id).count("TIMER_FIRED") == 1


def test_sleep_until_a_past_instant_does_not_park(world: World) -> None:
    """There is nothing to wait for; a naive datetime is refused."""

    @flow("w.past")
    def body(ctx: FlowContext) -> None:
        ctx.sleep_until(datetime(2020, 1, 1, tzinfo=UTC))

    @flow("w.naive")
    def naive(ctx: FlowContext) -> None:
        ctx.sleep_until(datetime(2020, 1, 1))

    assert body.start().status == Status.COMPLETED
    assert "aware" in world.state(naive.start()).error["message"]  # type: ignore[index]


def test_now_stands_still_between_facts_and_is_the_same_on_replay(world: World) -> None:
    """ctx.now(), uuid4() and random() give on a replay what they gave at first."""
    seen: list[tuple[Any, ...]] = []

    @flow("w.now")
    def body(ctx: FlowContext) -> None:
        first = (ctx.now(), ctx.uuid4(), ctx.random().random(), ctx.uuid4())
        seen.append(first)
        ctx.suspend("Go")
        assert ctx.now() > first[0]

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    assert handle.status == Status.COMPLETED
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[0][3]


def test_emits_and_decisions_are_not_repeated_by_a_replay(world: World) -> None:
    """A note of the body is in the log once; a decision is computed once."""
    calls: list[int] = []

    def read_flag() -> int:
        calls.append(1)
        return 41

    @flow("w.notes")
    def body(ctx: FlowContext) -> int:
        ctx.emit("stage", {"n": 1})
        value = ctx.decide("flag", read_flag)
        ctx.suspend("Go")
        return value + 1

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == 42
    assert calls == [1]
    assert world.kinds(handle.id).count("stage") == 1


def test_what_was_emitted_is_read_from_outside(world: World) -> None:
    """By kind, with its types, once each, and from where a reader has come to."""

    @flow("w.progress")
    def body(ctx: FlowContext) -> None:
        for done in (1, 2):
            ctx.emit("progress", {"done": Decimal(done), "at": (done,)})
            ctx.emit("other")
            ctx.suspend("Go")

    handle = body.start()
    first = world.loom.history(handle.id, kinds=["progress"])
    world.loom.resume(handle.id, event_type="Go")
    following = world.loom.history(handle.id, kinds=["progress"], after=first[-1].sequence)
    assert [event.value for event in (*first, *following)] == [
        {"done": Decimal(1), "at": (1,)},
        {"done": Decimal(2), "at": (2,)},
    ]
    assert world.loom.history(handle.id, kinds=["progress"], after=following[-1].sequence) == []
    assert {event.value for event in world.loom.history(handle.id, kinds=["other"])} == {None}
    assert world.loom.history(handle.id, limit=1)[0].value is None  # of the kernel's own


def test_messages_wait_until_they_are_wanted_in_order_and_once(world: World) -> None:
    """Early, doubled and late messages are all fine."""

    @flow("w.messages")
    def body(ctx: FlowContext) -> list[Any]:
        ctx.suspend("Go")
        return [ctx.receive("carrier") for _ in range(3)]

    handle = body.start()
    assert world.loom.send(handle.id, "carrier", 1, message_id="a") is True
    assert world.loom.send(handle.id, "carrier", 99, message_id="a") is False
    assert world.loom.send(handle.id, "other", 7) is True
    world.loom.send(handle.id, "carrier", 2)
    world.loom.resume(handle.id, event_type="Go")
    assert handle.status == Status.SUSPENDED
    world.loom.send(handle.id, "carrier", payload=3)
    assert handle.result() == [1, 2, 3]
    assert world.kinds(handle.id).count("MESSAGE_CONSUMED") == 3
    with pytest.raises(ExecutionClosedError):
        world.loom.send(handle.id, "carrier", 4)
    with pytest.raises(ExecutionNotFoundError):
        world.loom.send("nobody", "carrier", 4)


def test_receive_times_out(world: World) -> None:
    """A receive that nobody serves raises WaitTimedOut at its time."""

    @flow("w.receive")
    def body(ctx: FlowContext) -> str:
        try:
            ctx.receive("carrier", timeout=60)
        except WaitTimedOut as exc:
            return exc.on
        return "came"

    handle = body.start()
    world.advance(timedelta(seconds=61))
    assert handle.result() == "carrier"


def test_a_message_whose_sender_died_is_delivered_by_the_timer_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The re-drive row is written with the message: no wake depends on the sender's process."""

    @flow("w.redrive")
    def body(ctx: FlowContext) -> Any:
        return ctx.receive("carrier")

    handle = body.start()
    monkeypatch.setattr(world.engine, "woken", lambda execution_id: None)
    world.loom.send(handle.id, "carrier", "here")
    assert handle.status == Status.SUSPENDED
    world.advance(timedelta(seconds=1))
    assert handle.result() == "here"
    assert world.kinds(handle.id).count("MESSAGE_CONSUMED") == 1
    assert world.engine.store.timers(handle.id) == []


def test_a_message_between_look_and_park_is_not_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The park presents the count of wakes that the look saw; a moved one makes the body look again."""

    @flow("w.race")
    def body(ctx: FlowContext) -> Any:
        return ctx.receive("carrier")

    store = world.engine.store
    inbox = store.inbox
    sent: list[bool] = []

    def look_then_send(execution_id: str, name: str) -> Any:
        found = inbox(execution_id, name)
        if not sent:
            sent.append(True)
            store.send(execution_id, name=name, message_id="m", body='"late"')
        return found

    monkeypatch.setattr(store, "inbox", look_then_send)
    handle = body.start()
    assert handle.result() == "late"
    assert world.kinds(handle.id).count("EXECUTION_SUSPENDED") == 0


REFUSALS: list[Any] = [
    (lambda loom, id: loom.resume(id, event_type="Nope"), "no-such-wait"),
    (lambda loom, id: loom.resume(id, event_type="__loom_timer__"), "reserved-wait"),
    (lambda loom, id: loom.resume(id, event_type="CHILD_DONE"), "reserved-wait"),
    (lambda loom, id: loom.resume(id, event_type="Approval", correlation_key="x"), "no-such-wait"),
    (lambda loom, id: loom.resolve(id, "wire", "retry-fresh"), "no-such-wait"),
    (lambda loom, id: loom.retry_error(id), "no-such-wait"),
    (lambda loom, id: loom.retry_diverged(id), "no-such-wait"),
]


@pytest.mark.parametrize(("act", "reason"), REFUSALS)
def test_a_wrong_answer_is_refused_and_writes_nothing(world: World, act: Any, reason: str) -> None:
    """Every refusal has its reason, and the log is as it was."""
    handle = approval_flow("w.refused").start()
    before = world.kinds(handle.id)
    with pytest.raises(ResumeRefusedError) as refused:
        act(world.loom, handle.id)
    assert refused.value.reason == reason
    assert world.kinds(handle.id) == before


def doubt_flow(flow_id: str) -> Any:
    @flow(flow_id, steps=[wire, second_wire])
    def body(ctx: FlowContext) -> list[str]:
        return [ctx.run(wire), ctx.run(second_wire)]

    return body


BAD_VERDICTS: list[Any] = [
    lambda loom, id: loom.resolve(id, "wire", "retry_fresh"),
    lambda loom, id: loom.resolve(id, "wire", "completed-with-result"),
    lambda loom, id: loom.resolve(id, "wire", "retry-fresh", output=1),
    lambda loom, id: loom.resolve(id, "wire", "completed-with-result", output=1, error="x"),
    lambda loom, id: loom.resolve(id, "wire", "completed-with-result", output=object()),
    lambda loom, id: loom.resolve(id, "second_wire", "retry-fresh"),
    lambda loom, id: loom.resolve(id, "nowhere", "retry-fresh"),
    lambda loom, id: loom.resolve(id, "wire", "retry-fresh", park_sequence=1),
    lambda loom, id: loom.resume(id, event_type="EffectInDoubtResolved", payload={}),
    lambda loom, id: loom.resume(id, event_type="EffectInDoubtResolved", payload=None),
]


@pytest.mark.parametrize("act", BAD_VERDICTS)
def test_a_wrong_verdict_is_refused_and_writes_nothing(world: World, act: Any) -> None:
    """Unknown resolution, missing or extra output, another step, a stale park."""
    handle = doubt_flow("w.badverdict").start()
    before = world.kinds(handle.id)
    with pytest.raises(LoomError):
        act(world.loom, handle.id)
    assert world.kinds(handle.id) == before


def test_a_verdict_names_its_question(world: World) -> None:
    """An old form cannot settle the next question, nor the same step's next one; it hears who answered."""
    handle = doubt_flow("w.stale").start()
    first = world.state(handle).frames["wire"].in_doubt_sequence
    world.loom.resolve(handle.id, "wire", "retry-fresh", park_sequence=first, principal="anna")
    with pytest.raises(VerdictRefusedError) as refused:
        world.loom.resolve(handle.id, "wire", "completed-with-result", output="x", park_sequence=first)
    assert refused.value.reason == "stale-park"
    assert refused.value.answered_by == "anna"
    world.loom.resolve(handle.id, "wire", "completed-with-result", output="tx-1", principal="bert")
    with pytest.raises(VerdictRefusedError) as refused:
        world.loom.resolve(handle.id, "wire", "completed-with-result", output="tx-2")
    assert refused.value.answered_by == "bert"
    assert [wait.correlation_key for wait in handle.waits] == ["second_wire"]
    world.loom.resume(
        handle.id,
        event_type="EffectInDoubtResolved",
        payload={"step_id": "second_wire", "resolution": "completed-with-result", "output": None},
    )
    assert handle.result() == ["tx-1", None]


def test_a_failing_verdict_fails_the_step(world: World) -> None:
    """fail settles the step as failed, with the operator's text."""
    handle = doubt_flow("w.fail").start()
    world.loom.resolve(handle.id, "wire", "fail", error="the bank says no")
    state = world.state(handle)
    assert state.status == Status.FAILED
    assert state.error["message"] == "the bank says no"  # type: ignore[index]


def test_cancel_ends_a_parked_execution_and_a_second_one_is_answered(world: World) -> None:
    """Timers go with it; cancelling what ended otherwise is refused."""
    handle = approval_flow("w.cancel").start()
    world.loom.cancel(handle.id, reason="not needed", principal="anna")
    world.loom.cancel(handle.id)
    assert handle.status == Status.CANCELLED
    assert world.kinds(handle.id).count("EXECUTION_CANCELLED") == 1
    assert world.engine.store.timers(handle.id) == []
    done = approval_flow("w.done").start()
    world.loom.resume(done.id, event_type="Approval")
    with pytest.raises(ExecutionClosedError):
        world.loom.cancel(done.id)


def test_cancel_of_a_running_execution_silences_its_owner(world: World) -> None:
    """The owner's next append is refused; a started step that must not repeat is put in doubt."""
    seen: list[str] = []

    @tool(idempotent=False)
    def transfer(ctx: StepContext) -> str:
        world.loom.cancel(ctx.execution_id, reason="stop", principal="anna")
        return "tx"

    @flow("w.cancelrun", steps=[transfer])
    def body(ctx: FlowContext) -> None:
        try:
            ctx.run(transfer)
        finally:
            seen.append("left")
        seen.append("went on")

    handle = body.start()
    assert handle.status == Status.CANCELLED
    assert world.kinds(handle.id)[-3:] == ["EFFECT_INDOUBT", "EXECUTION_CANCELLED", "EFFECT_RETURNED_LATE"]
    assert [note["output"] for note in world.state(handle).frames["transfer"].late] == ["tx"]
    assert seen == ["left"]


def test_an_error_can_park_and_be_retried_after_the_fix(world: World) -> None:
    """on_error="park" waits at a gate; retry_error runs the body again."""
    broken = [True]

    @flow("w.onerror", on_error="park")
    def body(ctx: FlowContext) -> str:
        if broken[0]:
            raise KeyError("a bug")
        return "fixed"

    handle = body.start()
    assert [wait.on for wait in handle.waits] == ["__loom_error__"]
    with pytest.raises(ResumeRefusedError):
        world.loom.resume(handle.id, event_type="__loom_error__")
    world.loom.retry_error(handle.id, principal="anna")
    assert handle.status == Status.SUSPENDED
    broken[0] = False
    world.loom.retry_error(handle.id)
    assert handle.result() == "fixed"


def test_a_deadline_ends_the_execution(world: World) -> None:
    """The deadline is recorded at the start and holds for parks too."""

    @flow("w.deadline", deadline=timedelta(hours=1))
    def body(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    handle = body.start()
    world.advance(timedelta(hours=2))
    state = world.state(handle)
    assert state.status == Status.FAILED
    assert state.error["type"] == "DeadlineExceeded"  # type: ignore[index]


def test_a_swallowed_park_stops_at_the_next_call(world: World) -> None:
    """except BaseException cannot make a body go on past its park."""
    after: list[str] = []

    @flow("w.swallow", steps=[wire])
    def body(ctx: FlowContext) -> str:
        try:
            ctx.suspend("Go")
        except BaseException:
            after.append("swallowed")
        ctx.run(wire)
        return "went on"

    handle = body.start()
    assert handle.status == Status.SUSPENDED
    assert after == ["swallowed"]
    assert "STEP_STARTED" not in world.kinds(handle.id)


@pytest.mark.parametrize(
    "start",
    [
        lambda loom, body: loom.start("nothing.here"),
        lambda loom, body: loom.start("w.input", version=9),
        lambda loom, body: body.start(1, 2, 3),
        lambda loom, body: body.start(object()),
        lambda loom, body: body.start("x" * 2_000_000),
        lambda loom, body: body.using(execution_id="x" * 256),
        lambda loom, body: body.using(execution_id="a\nb"),
        lambda loom, body: body.using(execution_id="a~2"),
        lambda loom, body: body.using(run_after=1),
        lambda loom, body: body.using(subject=object()).start(1),
        lambda loom, body: body.using(attributes={"x": object()}).start(1),
        lambda loom, body: body.using(deadline=datetime(2020, 1, 1)).start(1),
    ],
)
def test_a_bad_start_is_refused_and_leaves_nothing(
    world: World, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown flow, wrong arguments, unencodable or too large input, an id that cannot be one."""
    body = approval_flow("w.nothing")

    @flow("w.input")
    def taking(ctx: FlowContext, value: Any, other: Any = None) -> None:
        ctx.suspend("Go")

    appended: list[Any] = []
    append = world.engine.store.append

    def counted(commit: Any) -> None:
        appended.append(commit)
        append(commit)

    monkeypatch.setattr(world.engine.store, "append", counted)
    with pytest.raises(LoomError):
        start(world.loom, taking)
    assert appended == []
    assert body.id == "w.nothing"


def test_the_same_id_and_input_is_the_same_execution(world: World) -> None:
    """Positional or by name, defaults or not, sets in any order: one input, one execution."""
    from loom_django.errors import ExecutionConflictError

    @flow("w.same")
    def body(ctx: FlowContext, value: Any, other: int = 5) -> None:
        ctx.suspend("Go")

    named = body.using(execution_id="same")
    first = named.start({"b": {3, 1, 2}, "a": float("nan")})
    again = named.start(value={"a": float("nan"), "b": {1, 2, 3}}, other=5)
    assert (first.created, again.created) == (True, False)
    assert world.kinds("same").count("EXECUTION_STARTED") == 1
    with pytest.raises(ExecutionConflictError):
        named.start({"a": 1})
    with pytest.raises(ExecutionConflictError):
        approval_flow("w.other").using(execution_id="same").start()


def test_unknown_ids_are_told(world: World) -> None:
    """Every reading and answering call says that there is no such execution."""
    loom = world.loom
    for call in (
        lambda: loom.state("none"),
        lambda: loom.history("none"),
        lambda: loom.handle("none"),
        lambda: loom.cancel("none"),
        lambda: loom.resume("none", event_type="x"),
        lambda: loom.resolve("none", "x", "retry-fresh"),
        lambda: loom.retry_error("none"),
        lambda: loom.retry_diverged("none"),
    ):
        with pytest.raises(ExecutionNotFoundError):
            call()
    with pytest.raises(InvalidInputError):
        loom.resolve("none", "x", "nonsense")  # type: ignore[arg-type]


def test_what_became_of_a_doubt_can_be_noted_after_the_end(world: World) -> None:
    """A step that was in doubt when its execution was cancelled leaves the queue by an outcome."""
    handle = doubt_flow("w.outcome").start()
    with pytest.raises(InvalidInputError):
        world.loom.record_outcome(handle.id, "paid", step_id="wire")
    world.loom.cancel(handle.id)
    with pytest.raises(VerdictRefusedError):
        world.loom.resolve(handle.id, "wire", "retry-fresh")
    assert [frame.step_id for frame in world.state(handle).in_doubt] == ["wire"]
    world.loom.record_outcome(handle.id, "paid", {"tx": 7}, step_id="wire", principal="anna")
    assert world.state(handle).in_doubt == ()
    with pytest.raises(VerdictRefusedError):
        world.loom.record_outcome(handle.id, "paid", step_id="wire")
    world.loom.record_outcome(handle.id, "a note")
    assert world.kinds(handle.id).count("OUTCOME_RECORDED") == 2
    assert world.state(handle).status == Status.CANCELLED


def test_a_wake_that_changed_code_refuses_is_put_off_and_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays owed, in nobody's way, without a line at each try; with the code that fits it fires."""

    def declare(*steps: Any) -> Any:
        definitions.registry.forget("w.putoff")

        @flow("w.putoff", steps=steps)
        def body(ctx: FlowContext) -> str:
            ctx.sleep(1)
            return "woken"

        return body

    handle = declare().start()
    declare(wire)
    service = TimerService(world.engine, lambda: world.loom.dispatcher)
    for tries in (1, 2, 3):
        world.shift(timedelta(seconds=PUT_OFF + 1))
        assert service.tick() is True
        assert service.tick() is False, "it is put off"
        assert [row.tries for row in world.engine.store.timers(handle.id)] == [tries]
    assert len([text for text in caplog.messages if "a wake is put off" in text]) == 1
    declare()
    world.shift(timedelta(seconds=PUT_OFF + 1))
    assert service.tick() is True
    assert handle.result() == "woken"
