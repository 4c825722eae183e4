"""Steps: named, marked before their effect, recorded once, served afterwards."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from loom_django import (
    AsyncFlowContext,
    EffectInDoubt,
    FlowContext,
    RetryPolicy,
    StepContext,
    StepFailed,
    flow,
    tool,
)
from loom_django.errors import ContextMisuseError, DirectCallError, DuplicateStepError
from loom_django.kernel.state import FrameStatus, Status
from tests.engine.conftest import World


@tool
def double(ctx: StepContext, number: int) -> int:
    return number * 2


@tool
def key(ctx: StepContext) -> str:
    return ctx.idempotency_key


def test_a_steps_result_is_recorded_once_and_served_on_replay(world: World) -> None:
    """A body that runs again does not call a tool whose step the log holds."""
    calls: list[int] = []

    @tool
    def count(ctx: StepContext) -> int:
        calls.append(1)
        return len(calls)

    @flow("t.once", steps=[count])
    def body(ctx: FlowContext) -> int:
        first = ctx.run(count)
        ctx.suspend("Go")
        return first

    handle = body.start()
    assert handle.status == Status.SUSPENDED
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == 1
    assert calls == [1]
    world.check(handle.id)


def test_every_effect_has_a_durable_marker_before_it(world: World) -> None:
    """When a tool runs, its STEP_STARTED and the previous outcome are in the log already."""
    seen: list[list[str]] = []

    @tool
    def look(ctx: StepContext) -> None:
        seen.append(world.kinds(ctx.execution_id))

    @flow("t.marker", steps=[look])
    def body(ctx: FlowContext) -> None:
        ctx.run(look)
        ctx.run(look)

    body.start()
    assert seen == [
        ["EXECUTION_STARTED", "STEP_STARTED"],
        ["EXECUTION_STARTED", "STEP_STARTED", "STEP_COMPLETED", "STEP_STARTED"],
    ]


def test_a_straight_run_of_n_steps_makes_n_plus_1_appends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N boundaries and the end; a replay up to a park makes none but the park's own."""
    appends: list[int] = []
    store = world.engine.store
    append = store.append

    def counted(commit: Any) -> None:
        appends.append(len(commit.events))
        append(commit)

    monkeypatch.setattr(store, "append", counted)

    @flow("t.appends", steps=[double])
    def body(ctx: FlowContext) -> int:
        total = sum(ctx.run(double, number) for number in range(7))
        ctx.suspend("Go")
        return total

    handle = body.start()
    assert len(appends) == 7 + 1  # seven boundaries, of which the first takes the start along, and the park
    appends.clear()
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == 42
    assert len(appends) == 1 + 1  # the answer and the end: the replay in between appended nothing


def test_values_are_what_a_replay_would_give(world: World) -> None:
    """The live run sees the value after the codec, and a tool sees copies of its arguments."""
    marks: list[str] = []

    @tool
    def spoil(ctx: StepContext, items: list[str]) -> dict[str, Any]:
        items.append("changed by the tool")
        marks.extend(items)
        return {"pair": (1, 2), "amount": Decimal("1.10"), "items": items}

    @flow("t.values", steps=[spoil])
    def body(ctx: FlowContext) -> list[Any]:
        mine = ["a"]
        result = ctx.run(spoil, mine)
        result["items"].append("changed by the flow")
        ctx.suspend("Go")
        return [mine, result]

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    mine, result = handle.result()
    assert mine == ["a"]
    assert result["pair"] == (1, 2)
    assert str(result["amount"]) == "1.10"


def test_unkeyed_steps_are_numbered_and_keyed_ones_named(world: World) -> None:
    """A repeated plain call mints #2, #3 in order; a keyed call has its own name and key."""

    @flow("t.ids", steps=[key])
    def body(ctx: FlowContext) -> list[str]:
        return [ctx.run(key), ctx.run(key), ctx.run(key.keyed("sku")), ctx.run(key)]

    handle = body.using(execution_id="e:1").start()
    assert handle.result() == ["e%3A1:key", "e%3A1:key#2", "e%3A1:key#sku", "e%3A1:key#3"]


def test_one_tool_under_two_names(world: World) -> None:
    """named() binds one tool to two declared steps, and a bare call of it is refused."""

    @flow("t.named", steps=[key.named("first"), key.named("second")])
    def body(ctx: FlowContext) -> list[str]:
        return [ctx.run(key.named("first")), ctx.run(key.named("second"))]

    @flow("t.unnamed", steps=[key.named("first"), key.named("second")])
    def bare(ctx: FlowContext) -> str:
        return ctx.run(key)

    assert [item.rpartition(":")[2] for item in body.start().result()] == ["first", "second"]
    assert world.state(bare.start()).error["type"].endswith("UndeclaredStepError")  # type: ignore[index]


def test_a_step_asked_for_twice_is_refused_with_both_lines(world: World) -> None:
    """An id may be asked for once in a run; the refusal names both places and ends the body."""
    caught: list[Exception] = []

    @flow("t.twice", steps=[key])
    def body(ctx: FlowContext) -> None:
        ctx.run(key)
        ctx.run(key.keyed("2"))
        try:
            ctx.run(key)
        except DuplicateStepError as exc:
            caught.append(exc)
        ctx.run(key.keyed("after misuse nothing is dispatched"))

    handle = body.start()
    assert handle.status == Status.FAILED
    assert "key#2" in str(caught[0])
    assert "test_steps.py:" in str(caught[0])
    assert "key#after" not in str(world.state(handle).frames)


def test_the_lines_that_a_refusal_names_are_the_flows(world: World) -> None:
    """To the number, whichever way a step was asked for."""
    caught: list[DuplicateStepError] = []

    @flow("t.lines", steps=[key])
    def body(ctx: FlowContext) -> None:
        ctx.run(key.keyed("a"))
        try:
            ctx.run_step("key#a")
        except DuplicateStepError as exc:
            caught.append(exc)

    body.start()
    first = body.func.__code__.co_firstlineno + 2
    assert caught[0].first_line == f"test_steps.py:{first} by key.keyed('a')"
    assert caught[0].second_line == f"test_steps.py:{first + 2} by its id"


def test_calling_a_tool_or_a_flow_directly_says_what_to_do(world: World) -> None:
    """A tool called like a function would run unrecorded, so it is not callable."""

    @flow("t.direct", steps=[double])
    def body(ctx: FlowContext) -> int:
        return double(ctx, 2)  # type: ignore[operator]

    with pytest.raises(DirectCallError, match=r"ctx\.run\(double"):
        double(1, 2)  # type: ignore[operator]
    handle = body.start()
    assert handle.status == Status.FAILED
    assert "STEP_STARTED" not in world.kinds(handle.id)


@pytest.mark.parametrize(
    "ask",
    [
        lambda ctx: ctx.run(double, 1),  # a tool that steps= does not list
        lambda ctx: ctx.run(lambda: 1),  # a plain function
        lambda ctx: ctx.run_step("nowhere"),
        lambda ctx: ctx.run(key, "too", "many"),
        lambda ctx: ctx.run(key.keyed("k"), object()),
        lambda ctx: ctx.suspend("EffectInDoubtResolved"),
        lambda ctx: ctx.suspend(""),
        lambda ctx: ctx.suspend("Go", timeout=-1),
        lambda ctx: ctx.sleep(float("nan")),
        lambda ctx: ctx.sleep(True),
        lambda ctx: ctx.receive(""),
        lambda ctx: ctx.emit("STEP_COMPLETED"),
        lambda ctx: ctx.emit("mine", object()),
        lambda ctx: ctx.meter("usd", -1),
        lambda ctx: ctx.meter("usd", "much"),
        lambda ctx: ctx.decide("d", object),
    ],
)
def test_misuse_in_a_body_is_refused_and_nothing_of_it_is_written(world: World, ask: Any) -> None:
    """Each wrong call is a LoomError at the call, seals the context, and leaves no fact behind."""

    @flow("t.misuse", steps=[key])
    def body(ctx: FlowContext) -> str:
        try:
            ask(ctx)
        except Exception:
            ctx.run(key)  # a compensation must not be dispatched after misuse
        return "went on"

    handle = body.start()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "EXECUTION_FAILED"]
    assert world.state(handle).error["type"].startswith("loom_django.errors.")  # type: ignore[index]


def test_a_known_failure_can_be_caught_live_and_on_replay(world: World) -> None:
    """StepFailed carries type, bases and text; a replay raises the same."""

    class CardError(ValueError):
        pass

    @tool
    def charge(ctx: StepContext) -> None:
        raise CardError("declined \x00 \ud800")

    @flow("t.caught", steps=[charge])
    def body(ctx: FlowContext) -> list[Any]:
        try:
            ctx.run(charge)
        except StepFailed as exc:
            seen = [
                exc.step_id,
                exc.message,
                exc.matches(CardError),
                exc.matches(ValueError),
                exc.matches(KeyError),
            ]
        ctx.suspend("Go")
        return seen

    handle = body.start()
    live = world.state(handle).frames["charge"]
    assert live.status == FrameStatus.FAILED
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == ["charge", "declined \x00 \ud800", True, True, False]


def test_retries_keep_the_key_and_count_their_failures(world: World) -> None:
    """Each failed attempt that is retried is in the log; the key is the same for all of them."""
    keys: list[str] = []

    @tool(retry=RetryPolicy(max_attempts=3, initial_interval=0.001))
    def flaky(ctx: StepContext) -> int:
        keys.append(ctx.idempotency_key)
        if len(keys) < 3:
            raise ConnectionError(f"no {ctx.attempt}")
        return ctx.attempt

    @flow("t.retry", steps=[flaky])
    def body(ctx: FlowContext) -> int:
        return ctx.run(flaky)

    handle = body.using(execution_id="r1").start()
    assert handle.result() == 3
    assert keys == ["r1:flaky"] * 3
    assert world.kinds("r1").count("STEP_RETRYING") == 2


def test_retry_with_a_fresh_key_mints_it_from_the_log(world: World) -> None:
    """fresh_key moves the suffix by a durable fact, never by counting attempts."""
    keys: list[str] = []

    @tool(retry=RetryPolicy(max_attempts=2, initial_interval=0.001, fresh_key=True))
    def flaky(ctx: StepContext) -> None:
        keys.append(ctx.idempotency_key)
        if len(keys) == 1:
            raise ConnectionError

    @flow("t.fresh", steps=[flaky])
    def body(ctx: FlowContext) -> None:
        ctx.run(flaky)

    body.using(execution_id="r1").start()
    assert keys == ["r1:flaky", "r1:flaky:r1"]


def test_a_long_retry_delay_parks_and_non_retryable_errors_do_not_retry(world: World) -> None:
    """A delay above IN_PROCESS_RETRY_LIMIT holds no thread."""
    calls: list[int] = []

    @tool(retry=RetryPolicy(max_attempts=5, initial_interval=3600, jitter=False, non_retryable=(KeyError,)))
    def flaky(ctx: StepContext) -> None:
        calls.append(ctx.attempt)
        raise ConnectionError if len(calls) == 1 else KeyError("final")

    @flow("t.parkretry", steps=[flaky])
    def body(ctx: FlowContext) -> str:
        try:
            ctx.run(flaky)
        except StepFailed as exc:
            return exc.error_type
        return "no failure"

    from datetime import timedelta

    handle = body.start()
    assert handle.status == Status.SUSPENDED
    world.advance(timedelta(seconds=3500))
    assert calls == [1]
    world.advance(timedelta(seconds=200))
    assert handle.result() == "builtins.KeyError"
    assert calls == [1, 2]


def test_an_unstorable_result_fails_the_step_and_is_not_retried(world: World) -> None:
    """The effect has happened: a result that cannot be kept is a failure that names the path."""
    calls: list[int] = []

    @tool(retry=RetryPolicy(max_attempts=5, initial_interval=0.001))
    def wrong(ctx: StepContext) -> Any:
        calls.append(1)
        return {"rows": [object()]}

    @flow("t.unstorable", steps=[wrong])
    def body(ctx: FlowContext) -> str:
        try:
            ctx.run(wrong)
        except StepFailed as exc:
            return exc.message
        return ""

    assert '["rows"][0]' in body.start().result()
    assert calls == [1]


@pytest.mark.parametrize(
    "raised",
    [EffectInDoubt("the line broke"), ConnectionError("listed"), SystemExit(3), GeneratorExit()],
)
def test_a_non_idempotent_effect_of_unknown_fate_parks(world: World, raised: BaseException) -> None:
    """What is listed, what the tool says, and what is no Exception: nobody knows, so a person decides."""
    import threading

    @tool(idempotent=False, in_doubt_on=ConnectionError)
    def wire(ctx: StepContext) -> None:
        raise raised

    @flow("t.doubt", steps=[wire])
    def body(ctx: FlowContext) -> None:
        ctx.run(wire)

    # In a worker's thread, where SystemExit is a tool's own doing.
    started: list[Any] = []

    def start() -> None:
        started.append(body.start())
        world.engine.store.close_connections()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    handle = started[0]
    assert world.kinds(handle.id)[-2:] == ["EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]
    assert [wait.on for wait in handle.waits] == ["EffectInDoubtResolved"]


def test_an_unlisted_exception_of_a_non_idempotent_tool_is_a_known_failure(world: World) -> None:
    """Any other Exception fails the step; it is not retried and not in doubt."""

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> None:
        raise KeyError("refused")

    @flow("t.known", steps=[wire])
    def body(ctx: FlowContext) -> str:
        try:
            ctx.run(wire)
        except StepFailed as exc:
            return exc.error_type
        return ""

    assert body.start().result() == "builtins.KeyError"


def test_an_unstorable_result_of_a_non_idempotent_tool_is_in_doubt(world: World) -> None:
    """The money has moved; the operator supplies what the tool could not."""

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> Any:
        return object()

    @flow("t.doubtresult", steps=[wire])
    def body(ctx: FlowContext) -> Any:
        return ctx.run(wire)

    handle = body.start()
    assert world.state(handle).frames["wire"].status == FrameStatus.IN_DOUBT
    world.loom.resolve(handle.id, "wire", "completed-with-result", output={"tx": 7})
    assert handle.result() == {"tx": 7}


def test_metered_facts_of_a_failed_attempt_are_kept(world: World) -> None:
    """A use is recorded with the attempt's outcome, whatever that is."""

    @tool(retry=RetryPolicy(max_attempts=2, initial_interval=0.001))
    def ask(ctx: StepContext) -> None:
        ctx.meter("usd", Decimal("0.10"))
        if ctx.attempt == 1:
            raise ConnectionError

    @flow("t.meter", steps=[ask])
    def body(ctx: FlowContext) -> None:
        ctx.run(ask)
        ctx.meter("calls", 1)
        ctx.suspend("Go")

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    assert world.state(handle).meters == {"usd": Decimal("0.20"), "calls": Decimal(1)}


def test_an_async_flow_obeys_the_same_rules(world: World) -> None:
    """async def bodies and tools: awaited names, the same log."""
    import asyncio

    @tool(timeout=5)
    async def fetch(ctx: StepContext, number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    @flow("t.async", steps=[fetch, double])
    async def body(ctx: AsyncFlowContext) -> int:
        first = await ctx.run(fetch, 1)
        second = await ctx.run(double, first)
        answer = await ctx.suspend("Go")
        return second + int(answer)

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go", payload=10)
    assert handle.result() == 14
    assert world.kinds(handle.id) == [
        "EXECUTION_STARTED",
        "STEP_STARTED",
        "STEP_COMPLETED",
        "STEP_STARTED",
        "STEP_COMPLETED",
        "EXECUTION_SUSPENDED",
        "EXECUTION_RESUMED",
        "EXECUTION_COMPLETED",
    ]


def test_a_forgotten_await_is_found_out(world: World) -> None:
    """A call that nobody awaited did nothing; the next call, or the end, says so."""

    @flow("t.await", steps=[double])
    async def body(ctx: AsyncFlowContext) -> None:
        ctx.run(double, 1)
        await ctx.run(double, 2)

    handle = body.start()
    assert "was not awaited" in world.state(handle).error["message"]  # type: ignore[index]
    assert "STEP_STARTED" not in world.kinds(handle.id)


def test_a_timeout_fails_an_idempotent_step_and_puts_the_other_kind_in_doubt(world: World) -> None:
    """The attempt is given up; what must not run twice is a person's to settle, its late result noted."""
    import threading

    release = threading.Event()

    @tool(timeout=0.05)
    def slow(ctx: StepContext) -> None:
        release.wait(10)

    @tool(idempotent=False, timeout=0.05)
    def wire(ctx: StepContext) -> str:
        release.wait(10)
        return "tx-late"

    @flow("t.timeout", steps=[slow, wire])
    def body(ctx: FlowContext) -> str:
        with pytest.raises(StepFailed) as failed:
            ctx.run(slow)
        assert failed.value.matches(TimeoutError)
        return ctx.run(wire)

    handle = body.start()
    assert [wait.correlation_key for wait in handle.waits] == ["wire"]
    release.set()
    for thread in threading.enumerate():
        if thread.name == "loom-tool":
            thread.join(10)
    frame = world.state(handle).frames["wire"]
    assert [note["output"] for note in frame.late] == ["tx-late"]
    world.loom.resolve(handle.id, "wire", "completed-with-result", output="tx-late")
    assert handle.result() == "tx-late"


def test_a_doubt_inside_an_exception_group_is_a_doubt(world: World) -> None:
    """However it is wrapped, and whatever the tool says of it."""

    @tool(idempotent=False, in_doubt_on=ConnectionError)
    def grouped(ctx: StepContext) -> None:
        raise ExceptionGroup(
            "several", [KeyError("known"), ExceptionGroup("inner", [ConnectionError("lost")])]
        )

    @tool(idempotent=False)
    def says(ctx: StepContext) -> None:
        raise EffectInDoubt({"not": "text"})  # type: ignore[arg-type]

    @flow("t.group", steps=[grouped, says])
    def body(ctx: FlowContext) -> None:
        ctx.run(grouped)
        ctx.run(says)

    handle = body.start()
    assert [wait.correlation_key for wait in handle.waits] == ["grouped"]
    world.loom.resolve(handle.id, "grouped", "completed-with-result", output=None)
    assert [wait.correlation_key for wait in handle.waits] == ["says"]


def test_a_value_that_this_code_cannot_read_leaves_the_execution_alone(world: World) -> None:
    """A deploy that forgets to register a class fails nothing; the release that has it goes on."""
    from dataclasses import dataclass
    from datetime import timedelta

    from loom_django.kernel import codec

    @dataclass
    class Money:
        cents: int

    name = f"t.unread.Money.{type(world.engine.store).__name__}"
    codec.register_type(Money, name=name)

    @tool
    def price(ctx: StepContext) -> Money:
        return Money(5)

    @flow("t.unread", steps=[price])
    def body(ctx: FlowContext) -> int:
        try:
            found = ctx.run(price)
        except Exception:
            return -1
        ctx.suspend("Go")
        return found.cents

    handle = body.start()
    entry = codec._by_name.pop(name)
    world.loom.resume(handle.id, event_type="Go")
    assert handle.status == Status.RUNNING
    codec._by_name[name] = entry
    world.shift(timedelta(seconds=700))
    world.recover()
    assert handle.result() == 5


def test_a_database_that_is_away_is_no_outcome(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow cannot catch it and compensate: the body is left, and recovery goes on."""
    from datetime import timedelta

    compensated: list[bool] = []

    @flow("t.away")
    def body(ctx: FlowContext) -> Any:
        try:
            return ctx.receive("m")
        except Exception:
            compensated.append(True)
            raise

    inbox = world.engine.store.inbox
    calls: list[int] = []

    def away(execution_id: str, name: str) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("the database is away")
        return inbox(execution_id, name)

    monkeypatch.setattr(world.engine.store, "inbox", away)
    handle = body.start()
    assert handle.status in (Status.PENDING, Status.RUNNING)
    assert compensated == []
    world.shift(timedelta(seconds=61))
    world.recover()
    assert handle.status == Status.SUSPENDED


def test_deferred_facts_wait_and_what_must_be_durable_does_not(world: World) -> None:
    """durability="deferred" keeps quick outcomes; a taken message is durable before the next effect."""
    seen: list[list[str]] = []

    @tool
    def look(ctx: StepContext) -> None:
        seen.append(world.kinds(ctx.execution_id))

    @flow("t.deferred", steps=[look], durability="deferred")
    def body(ctx: FlowContext) -> Any:
        ctx.run(look)
        ctx.run(look)
        message = ctx.receive("m")
        ctx.run(look)
        return message

    handle = body.using(execution_id="d1").start()
    assert seen[1] == ["EXECUTION_STARTED", "STEP_STARTED"]  # the second boundary was deferred
    world.loom.send(handle.id, "m", 1)
    assert handle.result() == 1
    assert "MESSAGE_CONSUMED" in seen[-1]


def test_a_ctx_that_is_kept_does_nothing_when_its_flow_has_ended(world: World) -> None:
    """Nothing runs and nothing is written behind the end, whoever calls: a body after it fails by the call."""
    kept: list[FlowContext] = []

    @flow("t.kept", steps=[key])
    def body(ctx: FlowContext) -> Any:
        kept.append(ctx)
        return kept[0].run(key.keyed(f"{len(kept)}"))

    first = body.start()
    kinds = world.kinds(first.id)
    for late in (lambda: kept[0].run(key), lambda: kept[0].emit("Late"), lambda: kept[0].suspend("Late")):
        with pytest.raises(ContextMisuseError, match="a flow or a branch that had ended"):
            late()
    error = world.state(body.start()).error
    assert error is not None
    assert error["type"] == "loom_django.errors.ContextMisuseError"
    assert world.kinds(first.id) == kinds
    assert kinds[-1] == "EXECUTION_COMPLETED"


@pytest.mark.parametrize("by", ["tool", "decider"])
def test_what_a_replay_does_not_run_again_cannot_ask_for_steps(world: World, by: str) -> None:
    """A tool, or a decider without an argument, that calls the flow's ctx is refused; it may ask for the time."""
    kept: list[FlowContext] = []

    def ask() -> str:
        assert kept[-1].now() is not None
        return kept[-1].run(key)

    @tool
    def asks(ctx: StepContext) -> str:
        return ask()

    @flow("t.inner", steps=[key, asks], divergence="fail")
    def body(ctx: FlowContext) -> None:
        kept.append(ctx)
        if by == "tool":
            ctx.run(asks)
        ctx.decide("asked", ask)

    error = world.state(body.start()).error
    assert error is not None
    assert error["type"] == "loom_django.errors.ContextMisuseError"
    assert "in a tool, or in a decider that takes no argument" in str(error["message"])
