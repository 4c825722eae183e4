"""The limit of a log's length: told in time, refused for what is new alone, and never for what has been begun."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from loom_django import EffectInDoubt, FlowContext, RetryPolicy, StepContext, StepFailed, flow, tool
from loom_django.engine.body import MOST_REFUSED
from loom_django.errors import ExecutionFailedError, HistoryLimitError
from loom_django.kernel.state import Status
from loom_django.testing import override_loom
from tests.engine.conftest import World

CALLS: list[str] = []
FAULTS: list[BaseException] = []


@tool
def work(ctx: StepContext, number: int) -> int:
    CALLS.append(f"work-{number}")
    return number


@tool
def undo(ctx: StepContext, number: int) -> None:
    CALLS.append(f"undo-{number}")


@tool(idempotent=False)
def risky(ctx: StepContext) -> str:
    CALLS.append("risky")
    if FAULTS:
        raise FAULTS.pop()
    return "paid"


@tool(retry=RetryPolicy(max_attempts=5, initial_interval=3600, jitter=False))
def flaky(ctx: StepContext) -> str:
    if FAULTS:
        raise FAULTS.pop()
    return "there"


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    CALLS.clear()
    FAULTS.clear()
    with override_loom(HISTORY_WARN_EVENTS=6, HISTORY_MAX_EVENTS=12):
        yield


def endless(flow_id: str, **options: Any) -> Any:
    @flow(flow_id, steps=[work, undo], **options)
    def body(ctx: FlowContext) -> None:
        for number in range(1000):
            ctx.run(work.keyed(number), number)

    return body


def test_a_flow_is_stopped_at_the_limit(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the way out; a line of the log has said so before, once in the run."""
    with caplog.at_level(logging.WARNING, "loom_django.run"):
        handle = endless("l.endless").using(execution_id="x").start()
    with pytest.raises(ExecutionFailedError, match="continue_as_new") as failed:
        handle.result(timeout=0)
    assert failed.value.error_type == "loom_django.errors.HistoryLimitError"
    assert len(CALLS) == 6
    told = [record for record in caplog.records if "should continue_as_new" in record.getMessage()]
    assert len(told) == 1
    assert told[0].args == (7, 12)
    assert told[0].execution_id == "x"  # type: ignore[attr-defined]


def test_a_run_that_begins_beyond_the_warning_tells_it_too(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in each run that adds something, so that it is still told after a deploy."""

    @flow("l.parks", steps=[work])
    def body(ctx: FlowContext) -> None:
        for number in range(3):
            ctx.run(work.keyed(number), number)
        ctx.suspend("Go")
        ctx.suspend("Go")

    handle = body.start()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "loom_django.run"):
        world.loom.resume(handle.id, event_type="Go")
    assert sum("should continue_as_new" in record.getMessage() for record in caplog.records) == 1


def test_compensations_run_beyond_the_limit(world: World) -> None:
    """What was done is undone, however long the log is; all of it, and once."""

    @flow("l.undone", steps=[work, undo])
    def body(ctx: FlowContext) -> None:
        for number in range(1000):
            ctx.on_failure(undo.keyed(number), number)
            ctx.run(work.keyed(number), number)

    handle = body.using(execution_id="x").start()
    assert handle.status is Status.FAILED
    done = [int(call.removeprefix("work-")) for call in CALLS if call.startswith("work")]
    assert CALLS[len(done) :] == [f"undo-{number}" for number in [*done, len(done)][::-1]]
    world.check("x")


def test_a_limit_that_is_raised_meanwhile_does_not_take_the_failure_back(world: World, crash_at: Any) -> None:
    """A crash between two compensations: the next run goes on undoing, and does not go on with the flow."""

    @flow("l.raised", steps=[work, undo])
    def body(ctx: FlowContext) -> None:
        for number in range(20):
            ctx.on_failure(undo.keyed(number), number)
            ctx.run(work.keyed(number), number)

    crash_at("undo#3", "before-start")
    body.using(execution_id="x").start()
    assert world.state("x").status is Status.RUNNING
    before = list(CALLS)
    world.shift(timedelta(hours=1))
    with override_loom(HISTORY_MAX_EVENTS=50_000):
        world.recover()
    assert world.state("x").status is Status.FAILED
    assert not any(call.startswith("work") for call in CALLS[len(before) :])
    assert {f"undo-{number}" for number in range(6)} <= set(CALLS)


def test_a_flow_may_continue_as_new_at_the_last_moment(world: World) -> None:
    """The error is an outcome: caught, it leaves the flow its two ways out."""

    @flow("l.catches", steps=[work])
    def body(ctx: FlowContext, start: int) -> int:
        number = start
        try:
            while number < 9:
                ctx.run(work.keyed(number), number)
                number += 1
        except HistoryLimitError:
            ctx.continue_as_new(body, number)
        return number

    assert body.using(execution_id="x").start(0).result(timeout=0) == 9
    assert [f"work-{number}" for number in range(9)] == CALLS


def test_a_loop_that_catches_it_ends(world: World) -> None:
    """Whoever goes on asking is stopped as by misuse, and not for ever."""
    asked: list[int] = []

    @flow("l.stubborn", steps=[work])
    def body(ctx: FlowContext) -> None:
        number = 0
        while True:
            number += 1
            asked.append(number)
            with suppress(Exception):
                ctx.run(work.keyed(number), number)

    handle = body.start()
    assert handle.status is Status.FAILED
    assert len(asked) <= 6 + MOST_REFUSED + 3


def test_a_flow_that_parks_on_errors_goes_on_under_a_higher_limit(world: World) -> None:
    """The gate is an operator's to open, as often as it takes."""
    handle = endless("l.gate", on_error="park").using(execution_id="x").start()
    assert handle.waits[0].on == "__loom_error__"
    world.loom.retry_error("x")
    assert handle.waits[0].on == "__loom_error__"
    done = len(CALLS)
    with override_loom(HISTORY_MAX_EVENTS=40):
        world.loom.retry_error("x")
    assert handle.status is Status.SUSPENDED
    assert len(CALLS) > done
    world.loom.cancel("x")
    assert handle.status is Status.CANCELLED


@override_loom(HISTORY_WARN_EVENTS=2, HISTORY_MAX_EVENTS=4)
def test_what_has_been_begun_goes_on(world: World) -> None:
    """A doubt, its verdict, and what the flow makes of it land in a full log; so does a retry that is due."""

    @flow("l.doubt", steps=[risky])
    def doubtful(ctx: FlowContext) -> str:
        return ctx.run(risky)

    FAULTS.append(EffectInDoubt("no answer"))
    handle = doubtful.using(execution_id="x").start()
    assert len(world.kinds("x")) >= 4
    world.loom.resolve("x", "risky", "retry-fresh")
    assert handle.result(timeout=0) == "paid"
    assert CALLS == ["risky", "risky"]

    @flow("l.retry", steps=[flaky])
    def retried(ctx: FlowContext) -> str:
        return ctx.run(flaky)

    FAULTS.extend([OSError("no"), OSError("no")])
    handle = retried.using(execution_id="y").start()
    for _ in range(2):
        world.advance(timedelta(days=1))
    assert handle.result(timeout=0) == "there"
    assert len(world.kinds("y")) > 4


@pytest.mark.parametrize(
    "ask",
    [
        lambda ctx: ctx.run(work, 1),
        lambda ctx: ctx.suspend("Go"),
        lambda ctx: ctx.receive("n"),
        lambda ctx: ctx.sleep(60),
        lambda ctx: ctx.emit("done"),
        lambda ctx: ctx.meter("tokens", 1),
        lambda ctx: ctx.decide("d", lambda: 1),
        lambda ctx: ctx.start_child("l.endless"),
        lambda ctx: ctx.parallel({"a": work.bind(1), "b": work.bind(2)}),
    ],
)
def test_all_that_is_new_is_refused(world: World, ask: Any) -> None:
    """Whatever a flow can ask for; nothing of it is in the log."""
    endless("l.endless")

    @flow("l.asks", steps=[work])
    def body(ctx: FlowContext) -> str:
        for number in range(6):
            ctx.run(work.keyed(number), number)
        with pytest.raises(HistoryLimitError):
            ask(ctx)
        return "told"

    handle = body.using(execution_id="x").start()
    assert handle.result(timeout=0) == "told"
    kinds = world.kinds("x")[13:]
    assert kinds[:1] == ["DECISION_RECORDED"]
    assert set(kinds) <= {"DECISION_RECORDED", "EXECUTION_COMPLETED"}


def test_a_rerun_is_judged_by_the_limit_of_its_time(world: World) -> None:
    """That its source's log was full is no fact of the copy's."""

    @flow("l.rerun", steps=[work])
    def body(ctx: FlowContext) -> int:
        return sum(ctx.run(work.keyed(number), number) for number in range(9))

    body.using(execution_id="x").start()
    with override_loom(HISTORY_MAX_EVENTS=100):
        assert world.loom.rerun("x").result(timeout=0) == 36


def test_an_ordinary_failure_is_an_outcome_of_a_step(world: World) -> None:
    """A step whose failure comes at the limit fails as ever."""

    @flow("l.failing", steps=[work, risky])
    def body(ctx: FlowContext) -> str:
        for number in range(5):
            ctx.run(work.keyed(number), number)
        FAULTS.append(ValueError("no"))
        try:
            return ctx.run(risky)
        except StepFailed as failed:
            return failed.message

    assert body.start().result(timeout=0) == "no"


# What a long loop costs. Twenty thousand steps with a park after each hundred, and a hand-over after each thousand,
# are as these are.
STEPS = 400
PARK_EACH = 10
CONTINUE_EACH = 40


@override_loom(HISTORY_WARN_EVENTS=10_000, HISTORY_MAX_EVENTS=50_000)
def test_a_loop_that_continues_costs_as_much_in_the_end_as_in_the_beginning(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events read, and calls of the store, for a tenth of its steps; the last is as cheap as the first."""

    @flow("l.loop", steps=[work])
    def body(ctx: FlowContext, start: int) -> int:
        for number in range(start, start + CONTINUE_EACH):
            ctx.run(work.keyed(number), number)
            if (number + 1) % PARK_EACH == 0:
                ctx.suspend("Go")
        if number + 1 == STEPS:
            return STEPS
        ctx.continue_as_new(body, number + 1)

    store, costs = world.engine.store, {"events": 0, "calls": 0}
    for name in ("read", "load", "append", "newest", "status", "wakes", "fence", "acquire_fence_if"):
        monkeypatch.setattr(store, name, counted(getattr(store, name), costs))
    handle = body.using(execution_id="x").start(0)
    spent = [dict(costs)]
    for tenth in range(1, 11):
        while len(CALLS) < tenth * STEPS // 10 or (tenth == 10 and handle.status is Status.SUSPENDED):
            world.loom.resume("x", event_type="Go")
        spent.append(dict(costs))
    assert handle.result(timeout=0) == STEPS
    for what in costs:
        tenths = [after[what] - before[what] for before, after in itertools.pairwise(spent)]
        assert tenths[-1] <= 2 * tenths[0], (what, tenths)


def counted(call: Any, costs: dict[str, int]) -> Any:
    """A call of the store that adds what it takes to the costs."""

    def count(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        costs["calls"] += 1
        if call.__name__ in ("read", "load"):
            costs["events"] += len(result if isinstance(result, list) else result.events)
        return result

    return count
