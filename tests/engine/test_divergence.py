"""Bodies that are edited under running executions: what is seen, what becomes of it, and what must not be misjudged."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from loom_django import (
    AsyncFlowContext,
    EffectInDoubt,
    FlowContext,
    ModelTurn,
    StepContext,
    ToolCall,
    flow,
    signals,
    tool,
)
from loom_django.engine import body as engine_body
from loom_django.errors import DefinitionError, ResumeRefusedError, StepFailed
from loom_django.kernel.state import Status
from loom_django.models import Execution
from loom_django.stores.memory import MemoryStore
from loom_django.testing import override_loom
from tests.engine.conftest import World

RAN: list[str] = []
Crash = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def fresh() -> None:
    RAN.clear()


@tool
def act(ctx: StepContext) -> str:
    RAN.append(ctx.step_id.partition("#")[0])
    return ctx.step_id


@tool
def refuse(ctx: StepContext) -> None:
    RAN.append("refuse")
    raise ValueError("no")


A, B, C, D = (act.named(name) for name in "abcd")


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """What ``flow_diverged`` has told."""
    heard: list[dict[str, Any]] = []

    def hear(sender: Any, **about: Any) -> None:
        heard.append({name: about[name] for name in ("execution_id", "expected", "seen")})

    signals.flow_diverged.connect(hear)
    yield heard
    signals.flow_diverged.disconnect(hear)


class Edited:
    """A flow whose body a test replaces, as a deploy does, and its execution "x"."""

    def __init__(self, world: World, body: Callable[..., Any], **declared: Any) -> None:
        options = {"divergence": "fail", **declared}
        self.world = world
        self.flow = flow("d.edited", steps=[A, B, C, D, refuse], **options)(body)
        self.handle = self.flow.using(execution_id="x").start()

    def deploy(self, body: Callable[..., Any]) -> None:
        self.flow.func = body

    def go_on(self, event: str = "go") -> Status:
        self.world.loom.resume("x", event_type=event)
        return self.handle.status

    def recover(self) -> Status:
        self.world.shift(timedelta(hours=1))
        self.world.recover()
        return self.handle.status

    @property
    def parked_on(self) -> list[str]:
        return [wait.on for wait in self.handle.waits]

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.world.loom.history("x")[-1].data["error"])


GATE = ["__loom_diverged__"]


def first(ctx: FlowContext) -> None:
    """The body that was deployed first."""
    ctx.run(A)
    ctx.run(B)
    ctx.suspend("go")
    ctx.run(C)


# Edits that skip step "b", and what they were about to do.


def skips_before_a_step(ctx: FlowContext) -> None:
    ctx.run(A)
    ctx.run(D)


def skips_before_a_park(ctx: FlowContext) -> None:
    ctx.run(A)
    ctx.suspend("other")


def skips_before_a_sleep(ctx: FlowContext) -> None:
    ctx.run(A)
    ctx.sleep(60)


def skips_before_a_message(ctx: FlowContext) -> None:
    ctx.run(A)
    ctx.receive("news")


def skips_before_the_end(ctx: FlowContext) -> None:
    ctx.run(A)


def skips_before_a_scope(ctx: FlowContext) -> None:
    ctx.run(A)
    ctx.parallel({"one": D.bind()})


def skips_before_a_compensation(ctx: FlowContext) -> None:
    ctx.on_failure(D)
    ctx.run(A)
    raise KeyError("a mistake")


SKIPPING = {
    skips_before_a_step: "step 'd'",
    skips_before_a_park: "a wait for 'other'",
    skips_before_a_sleep: "a sleep",
    skips_before_a_message: "the message 'news'",
    skips_before_the_end: "the end of the flow",
    skips_before_a_scope: "step 'd#1.one'",
    skips_before_a_compensation: "step 'd'",
}


@pytest.mark.parametrize("edited", SKIPPING, ids=lambda edited: str(edited.__name__))
def test_fail_parks_before_anything_is_done(
    world: World, edited: Any, told: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """At the gate, with the step that was skipped, what came instead, the line, and the ways out."""
    execution = Edited(world, first)
    execution.deploy(edited)
    assert execution.go_on() is Status.SUSPENDED
    assert RAN == ["a", "b"]
    assert execution.parked_on == GATE
    error = execution.error
    source, start = inspect.getsourcelines(edited)
    file, _, line = error["source_line"].partition(":")
    assert (error["expected"], error["seen"], file) == (["b"], SKIPPING[edited], "test_divergence.py")
    assert start <= int(line) < start + len(source) or edited is skips_before_a_compensation
    assert told == [{"execution_id": "x", "expected": ("b",), "seen": SKIPPING[edited]}]
    (record,) = [record for record in caplog.records if record.name == "loom_django.run"]
    assert record.levelno == logging.ERROR
    for word in ("'b'", SKIPPING[edited], error["source_line"], "Fix", "pin", "compatible_with", "resume_as"):
        assert word in record.getMessage()
    world.check("x")


def test_retry_diverged_goes_on_once_the_code_is_right(world: World) -> None:
    """A status-only answer at that gate; finished steps are not repeated, and the wait keeps its answer."""
    execution = Edited(world, first)
    execution.deploy(skips_before_a_step)
    execution.go_on()
    world.loom.retry_diverged("x")
    assert execution.parked_on == GATE  # the code is what it was
    execution.deploy(first)
    world.loom.retry_diverged("x", principal="anna", reason="rolled back")
    assert execution.handle.status is Status.COMPLETED
    assert RAN == ["a", "b", "c"]
    answers = [event.data for event in world.loom.history("x") if event.kind == "EXECUTION_RESUMED"]
    assert [(data["wait"], data.get("payload")) for data in answers[1:]] == [
        ("diverged#1", None),
        ("diverged#2", None),
    ]
    assert (answers[-1]["principal"], answers[-1]["reason"]) == ("anna", "rolled back")


def test_only_its_own_call_answers_the_gate(world: World) -> None:
    """And that call answers nothing else."""
    execution = Edited(world, first)
    with pytest.raises(ResumeRefusedError) as none:
        world.loom.retry_diverged("x")
    execution.deploy(skips_before_a_step)
    execution.go_on()
    length = len(world.loom.history("x"))
    with pytest.raises(ResumeRefusedError) as reserved:
        world.loom.resume("x", event_type="__loom_diverged__")
    with pytest.raises(ResumeRefusedError) as other:
        world.loom.retry_error("x")
    assert (none.value.reason, reserved.value.reason, other.value.reason) == (
        "no-such-wait",
        "reserved-wait",
        "no-such-wait",
    )
    assert len(world.loom.history("x")) == length


def test_the_awaited_twin(world: World) -> None:
    """``aretry_diverged`` is ``retry_diverged``, awaited."""
    if not isinstance(world.engine.store, MemoryStore):
        pytest.skip("the twins are one function for all stores")
    execution = Edited(world, first)
    execution.deploy(skips_before_a_step)
    execution.go_on()
    execution.deploy(first)
    asyncio.run(world.loom.aretry_diverged("x"))
    assert execution.handle.status is Status.COMPLETED


def test_warn_says_it_once_in_a_run_and_goes_on(
    world: World, told: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """The default; the next run says it again."""

    def edited(ctx: FlowContext) -> None:
        ctx.run(D)
        ctx.run(C)
        ctx.suspend("more")

    execution = Edited(world, first, divergence=None)
    execution.deploy(edited)
    assert execution.go_on() is Status.SUSPENDED
    assert (RAN, execution.parked_on) == (["a", "b", "d", "c"], ["more"])
    assert told == [{"execution_id": "x", "expected": ("a", "b"), "seen": "step 'd'"}]
    assert execution.go_on("more") is Status.COMPLETED
    assert [about["seen"] for about in told] == ["step 'd'", "the end of the flow"]
    messages = [record for record in caplog.records if record.name == "loom_django.run"]
    assert [record.levelname for record in messages] == ["WARNING", "WARNING"]


def test_off_is_silent(world: World, told: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """By the flow, whatever the setting says."""
    with override_loom(DIVERGENCE="fail"):
        execution = Edited(world, first, divergence="off")
        execution.deploy(skips_before_a_step)
        assert execution.go_on() is Status.COMPLETED
    assert (RAN, told, caplog.records) == (["a", "b", "d"], [], [])


def test_the_setting_is_for_flows_that_say_nothing(world: World) -> None:
    """``DIVERGENCE`` is the default of ``divergence=``."""
    with override_loom(DIVERGENCE="fail"):
        execution = Edited(world, first, divergence=None)
        execution.deploy(skips_before_a_step)
        execution.go_on()
    assert execution.parked_on == GATE


def test_a_word_that_is_no_reaction_is_refused() -> None:
    """Where it is declared."""
    with pytest.raises(DefinitionError, match="divergence='ignore'"):
        flow("d.bad", divergence="ignore")(first)  # type: ignore[arg-type]


def test_an_async_flow_is_watched_alike(world: World) -> None:
    """The line is the flow's own there too."""

    async def before(ctx: AsyncFlowContext) -> None:
        await ctx.run(A)
        await ctx.suspend("go")

    async def edited(ctx: AsyncFlowContext) -> None:
        await ctx.parallel({"one": D.bind()})

    async def parks(ctx: AsyncFlowContext) -> None:
        await ctx.suspend("other")

    execution = Edited(world, before)
    execution.deploy(edited)
    execution.go_on()
    assert execution.error["source_line"].startswith("test_divergence.py:")
    assert (RAN, execution.parked_on, execution.error["seen"]) == (["a"], GATE, "step 'd#1.one'")
    execution.deploy(parks)
    world.loom.retry_diverged("x")
    assert (execution.parked_on, execution.error["seen"]) == (GATE, "a wait for 'other'")
    assert execution.error["source_line"].startswith("test_divergence.py:")


def test_a_flow_that_swallows_everything_meets_it_again(world: World) -> None:
    """Nothing is dispatched after it."""

    def swallowing(ctx: FlowContext) -> None:
        try:
            ctx.run(D)
        except BaseException:
            RAN.append("swallowed")
        ctx.run(C)

    execution = Edited(world, first)
    execution.deploy(swallowing)
    execution.go_on()
    assert (RAN, execution.parked_on) == (["a", "b", "swallowed"], GATE)


def test_a_failure_is_an_outcome(world: World) -> None:
    """A recorded failure that is not asked for any more is missed as well; an except clause sees no divergence."""

    def before(ctx: FlowContext) -> None:
        with pytest.raises(StepFailed):
            ctx.run(refuse)
        ctx.suspend("go")

    def edited(ctx: FlowContext) -> None:
        try:
            ctx.run(D)
        except Exception:
            ctx.run(C)

    execution = Edited(world, before)
    execution.deploy(edited)
    execution.go_on()
    assert (RAN, execution.error["expected"]) == (["refuse"], ["refuse"])


def test_an_order_of_recorded_steps_may_change(world: World) -> None:
    """Only who is asked for counts, not when."""

    def edited(ctx: FlowContext) -> None:
        ctx.run(B)
        ctx.run(A)
        ctx.suspend("go")
        ctx.run(C)

    execution = Edited(world, first)
    execution.deploy(edited)
    assert execution.go_on() is Status.COMPLETED
    assert RAN == ["a", "b", "c"]


def test_what_is_begun_again_is_judged_by_what_came_before_it(world: World, crash_at: Crash) -> None:
    """A step that a crash has cut off runs again only behind those that came before it."""

    def before(ctx: FlowContext) -> None:
        ctx.run(A)
        ctx.run(B)

    crash_at("b", "in-effect")
    execution = Edited(world, before)
    execution.deploy(lambda ctx: ctx.run(B))
    assert (execution.recover(), RAN, execution.parked_on) == (Status.SUSPENDED, ["a"], GATE)
    assert execution.error["expected"] == ["a"]
    execution.deploy(before)
    world.loom.retry_diverged("x")
    assert RAN == ["a", "b"]


# What is no divergence.


def test_branches_race_and_nobody_is_missed(world: World) -> None:
    """A branch goes on though its sibling has not come to what it did before."""
    gone_on = threading.Event()

    def left(ctx: FlowContext) -> None:
        ctx.suspend("go")
        ctx.run(C)
        gone_on.set()

    def late(ctx: FlowContext) -> None:
        gone_on.wait(5)
        ctx.run(B)

    def body_with(right: Callable[[FlowContext], Any]) -> Callable[[FlowContext], Any]:
        return lambda ctx: (ctx.run(A), ctx.parallel({"left": left, "right": right}))

    execution = Edited(world, body_with(lambda ctx: ctx.run(B)))
    execution.deploy(body_with(late))
    assert execution.go_on() is Status.COMPLETED
    assert RAN == ["a", "b", "c"]


def test_a_scope_is_compared_when_it_closes(world: World) -> None:
    """A branch that was dropped is missed at the scope's end, before what comes after it."""

    def before(ctx: FlowContext) -> None:
        ctx.parallel({"left": A.bind(), "right": B.bind()})
        ctx.suspend("go")

    def edited(ctx: FlowContext) -> None:
        def outer(ctx: FlowContext) -> None:
            ctx.parallel({"left": A.bind()})
            ctx.run(C)

        outer(ctx)

    execution = Edited(world, before)
    execution.deploy(edited)
    execution.go_on()
    assert sorted(RAN) == ["a", "b"]
    assert (execution.error["expected"], execution.error["seen"]) == (
        ["b#1.right"],
        "the end of ctx.parallel",
    )


def test_an_inner_scope_is_compared_when_it_closes(world: World) -> None:
    """Inside an open scope only that stops a branch before its next step."""

    def branch(ctx: FlowContext) -> None:
        ctx.parallel({"one": A.bind(), "two": B.bind()})
        ctx.suspend("go")

    def edited_branch(ctx: FlowContext) -> None:
        ctx.parallel({"one": A.bind()})
        ctx.run(C)

    execution = Edited(world, lambda ctx: ctx.parallel({"left": branch}))
    execution.deploy(lambda ctx: ctx.parallel({"left": edited_branch}))
    execution.go_on()
    assert (sorted(RAN), execution.parked_on, execution.error["expected"]) == (
        ["a", "b"],
        GATE,
        ["b#1.left.1.two"],
    )


def test_branches_that_a_failure_stopped_are_not_missed(world: World) -> None:
    """On a replay the failure may come before its siblings have asked for what they did."""

    def fails(ctx: FlowContext) -> None:
        ctx.suspend("fail")
        ctx.run(refuse)

    def body_with(sibling: Callable[[FlowContext], Any]) -> Callable[[FlowContext], None]:
        def body(ctx: FlowContext) -> None:
            with pytest.raises(StepFailed):
                ctx.parallel({"right": sibling, "left": fails})
            ctx.suspend("go")
            ctx.run(C)

        return body

    execution = Edited(world, body_with(lambda ctx: (ctx.run(A), ctx.run(B))))
    execution.go_on("fail")
    execution.deploy(body_with(lambda ctx: None))  # as if it had been stopped at its first call
    assert execution.go_on() is Status.COMPLETED
    assert sorted(RAN) == ["a", "b", "c", "refuse"]


@pytest.mark.parametrize("alone", [False, True])
def test_a_mended_branch_has_its_scope_go_on(world: World, alone: bool) -> None:
    """A mistake in a branch is mended while the execution waits for that; its siblings go on where they were."""

    def body(mended: bool) -> Callable[..., Any]:
        def mistaken(ctx: FlowContext) -> None:
            ctx.run(A)
            if not mended:
                raise KeyError("a mistake")

        def sibling(ctx: FlowContext) -> str:
            ctx.run(B)
            ctx.suspend("go")
            return str(ctx.run(C))

        def around(ctx: FlowContext) -> Any:
            ctx.parallel({"mistaken": mistaken} if alone else {"mistaken": mistaken, "sibling": sibling})

        return around

    edited = Edited(world, body(mended=False), on_error="park")
    assert edited.parked_on == ["__loom_error__"]
    edited.deploy(body(mended=True))
    world.loom.retry_error("x")
    if not alone:
        assert edited.parked_on == ["go"]
        edited.go_on()
    assert edited.handle.status is Status.COMPLETED
    assert sorted(RAN) == (["a"] if alone else ["a", "b", "c"])


@pytest.mark.parametrize("renamed", [False, True])
def test_what_came_of_a_branchs_failure_is_missed_before_the_branch_goes_on(
    world: World, renamed: bool
) -> None:
    """A step that has undone something, or the failed step itself where the branch has another name."""

    def body(edited: bool) -> Callable[..., Any]:
        def failing(ctx: FlowContext) -> None:
            ctx.run(A)
            ctx.run(D if edited and not renamed else refuse)

        def around(ctx: FlowContext) -> None:
            try:
                ctx.parallel({"other" if edited and renamed else "one": failing})
            except StepFailed:
                ctx.run(B)
            ctx.suspend("go")

        return around

    edited = Edited(world, body(edited=False))
    before = list(RAN)
    edited.deploy(body(edited=True))
    edited.go_on()
    assert edited.parked_on == GATE
    assert edited.error["seen"] == "the end of branch 'one', which has failed before"
    assert before == RAN
    edited.deploy(body(edited=False))
    world.loom.retry_diverged("x")
    assert edited.handle.status is Status.COMPLETED


def test_a_served_decision_answers_for_its_steps(world: World) -> None:
    """Of deciders inside deciders too, also where the inner one was served when the outer one ran again."""

    def inner(ctx: FlowContext) -> str:
        return str(ctx.run(A))

    def outer(ctx: FlowContext) -> str:
        value: str = ctx.decide("inner", inner)
        ctx.suspend("half")
        return value + str(ctx.run(B))

    def body(ctx: FlowContext) -> None:
        ctx.decide("outer", outer)
        ctx.suspend("go")
        ctx.run(C)

    execution = Edited(world, body)
    assert execution.go_on("half") is Status.SUSPENDED
    decided = [event.data for event in world.loom.history("x") if event.kind == "DECISION_RECORDED"]
    assert [(data["decision"], data["inner_steps"]) for data in decided] == [
        ("inner", ["a"]),
        ("outer", ["a", "b"]),
    ]
    assert execution.go_on() is Status.COMPLETED
    assert RAN == ["a", "b", "c"]


def test_a_decision_of_more_steps_than_its_record_names(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the limit it answers for what was begun while its decider ran; before and behind it nothing changes."""
    monkeypatch.setattr(engine_body, "MAX_INNER_STEPS", 2)

    def decider(ctx: FlowContext) -> list[str]:
        return [ctx.run(B), ctx.run(C), ctx.run(D)]

    def body(ctx: FlowContext) -> None:
        ctx.run(A)
        ctx.decide("many", decider)
        ctx.suspend("go")

    execution = Edited(world, body)
    (decided,) = [event.data for event in world.loom.history("x") if event.kind == "DECISION_RECORDED"]
    started = [event for event in world.loom.history("x") if event.kind == "STEP_STARTED"]
    assert (decided["inner_steps"], decided["inner_since"]) == (["b", "c"], started[1].sequence)

    def edited(ctx: FlowContext) -> None:
        ctx.decide("many", decider)

    execution.deploy(edited)
    execution.go_on()
    assert execution.error["expected"] == ["a"]
    execution.deploy(body)
    world.loom.retry_diverged("x")
    assert execution.handle.status is Status.COMPLETED


def test_compensations_that_a_crash_cut_off_go_on(world: World, crash_at: Crash) -> None:
    """What was compensated is asked for again by the failure that comes again."""

    def body(ctx: FlowContext) -> None:
        ctx.on_failure(A)
        ctx.on_failure(B)
        ctx.run(C)
        ctx.run(refuse)

    crash_at("a", "in-effect")
    execution = Edited(world, body)
    assert execution.recover() is Status.FAILED
    assert RAN == ["c", "refuse", "b", "a"]


def test_a_body_that_does_not_fail_any_more_has_skipped_its_compensations(
    world: World, crash_at: Crash
) -> None:
    """To have registered one is not to have run it."""
    broken = [True]

    def body(ctx: FlowContext) -> None:
        ctx.on_failure(A)
        ctx.on_failure(B)
        ctx.run(C)
        if broken:
            raise KeyError("a mistake")

    crash_at("a", "in-effect")
    execution = Edited(world, body)
    broken.clear()
    assert (execution.recover(), RAN) == (Status.SUSPENDED, ["c", "b"])
    assert (execution.error["expected"], execution.error["seen"]) == (["b"], "the end of the flow")


def test_what_was_done_before_a_migration_is_exempt(world: World) -> None:
    """The new code never was to ask for it; what the new code has done is watched."""

    def edited(ctx: FlowContext) -> None:
        ctx.suspend("go")
        ctx.run(C)
        ctx.suspend("more")

    execution = Edited(world, first, code_fingerprint="one")
    execution.flow.code_hash = "two"
    execution.deploy(edited)
    world.loom.resume("x", event_type="go", allow_flow_code_mismatch=True)
    assert (RAN, execution.parked_on) == (["a", "b", "c"], ["more"])
    execution.deploy(lambda ctx: (ctx.suspend("go"), ctx.suspend("more")))
    execution.go_on("more")
    assert execution.error["expected"] == ["c"]


def test_a_move_is_a_way_out_of_the_gate(world: World) -> None:
    """Moved without an answer it still stands there; then its own call has it run under the new code."""
    execution = Edited(world, first)
    execution.deploy(skips_before_a_step)
    execution.go_on()
    world.loom.resume_as("x", execution.flow, strategy="operator-ack")
    assert (execution.parked_on, RAN) == (GATE, ["a", "b"])
    world.loom.retry_diverged("x")
    assert (execution.handle.status, RAN) == (Status.COMPLETED, ["a", "b", "d"])


def test_an_agent_loop_is_watched_as_all_steps_are(world: World, crash_at: Crash) -> None:
    """A crash in one of its calls is no divergence; a body without the loop is one."""

    @tool
    def model(ctx: StepContext, messages: list[Any], tools: list[Any]) -> ModelTurn:
        calls = (ToolCall("1", "a", {}), ToolCall("2", "b", {}))
        return ModelTurn("hm", calls) if len(messages) == 1 else ModelTurn("done", ())

    def body(ctx: FlowContext) -> None:
        ctx.agent_loop("agent", model=model, tools=[A, B], messages=[{"role": "user", "content": "go"}])
        ctx.suspend("go")

    made = flow("d.agent", steps=[model, A, B, C], step_families=["agent"], divergence="fail")(body)
    crash_at("agent#turn:1:tool:2", "in-effect")
    handle = made.using(execution_id="x").start()
    world.shift(timedelta(hours=1))
    world.recover()
    assert [wait.on for wait in handle.waits] == ["go"]
    made.func = lambda ctx: ctx.run(C)
    world.loom.resume("x", event_type="go")
    assert sorted(world.loom.history("x")[-1].data["error"]["expected"]) == [
        "agent#turn:1",
        "agent#turn:1:tool:1",
        "agent#turn:1:tool:2",
        "agent#turn:2",
    ]
    assert "c" not in RAN


# Around it.


def test_recovery_counts_it_as_failed_and_then_leaves_it_alone(world: World, crash_at: Crash) -> None:
    """The pass that ran it names it; the next ones, and timers, have nothing to do with it."""
    crash_at("b", "in-effect")
    execution = Edited(world, first)
    execution.deploy(lambda ctx: ctx.sleep(60))
    world.shift(timedelta(hours=1))
    summary = world.recover()
    assert (summary.candidates, summary.recovered, summary.failed) == (1, 0, 1)
    ((id, why),) = summary.failures
    assert id == "x"
    assert "'a'" in why
    assert "a sleep" in why
    length = len(world.loom.history("x"))
    world.advance(timedelta(days=2))
    assert world.recover().scanned == 0
    assert len(world.loom.history("x")) == length


def test_a_timer_of_a_sibling_leaves_the_gate_alone(world: World) -> None:
    """What the flow waits for itself stands behind the gate, and is waited for again."""

    def naps(seconds: float) -> Callable[[FlowContext], None]:
        return lambda ctx: ctx.sleep(seconds)

    def before(ctx: FlowContext) -> None:
        ctx.run(A)
        ctx.parallel({"short": naps(10), "long": naps(1000)})
        ctx.run(B)

    def edited(ctx: FlowContext) -> None:
        ctx.parallel({"short": naps(10), "long": naps(1000)})
        ctx.run(B)

    execution = Edited(world, before)
    execution.deploy(edited)
    world.advance(timedelta(seconds=11))
    assert execution.parked_on == GATE
    world.advance(timedelta(seconds=2000))
    assert execution.parked_on == GATE
    execution.deploy(before)
    world.loom.retry_diverged("x")
    world.advance(timedelta(seconds=1))
    assert (execution.handle.status, RAN) == (Status.COMPLETED, ["a", "b"])


def test_an_effect_in_doubt_can_be_settled_at_the_gate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doubt stands in the gate's park beside it; its verdict has nobody run the body."""

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> None:
        raise EffectInDoubt("no answer")

    def body(ctx: FlowContext) -> None:
        ctx.run(A)
        ctx.parallel({"pay": wire.bind(), "wait": lambda ctx: ctx.suspend("go")})

    made = flow("d.doubt", steps=[A, wire], divergence="fail")(body)
    handle = made.using(execution_id="y").start()
    made.func = lambda ctx: ctx.parallel({"pay": wire.bind(), "wait": lambda ctx: ctx.suspend("go")})
    world.loom.resume("y", event_type="go")
    assert [wait.on for wait in handle.waits] == ["__loom_diverged__", "EffectInDoubtResolved"]
    error = world.loom.history("y")[-1].data["error"]
    with monkeypatch.context() as patch:
        patch.setattr(world.loom.dispatcher, "dispatch", lambda *given: pytest.fail("it was handed on"))
        world.loom.resolve("y", "wire#1.pay", "completed-with-result", output=None)
    assert [wait.on for wait in handle.waits] == GATE
    assert world.loom.history("y")[-1].data["error"] == error
    made.func = body
    world.loom.retry_diverged("y")
    assert handle.status is Status.COMPLETED


def test_the_queryset_of_diverged_executions(world: World) -> None:
    """Those that are parked at the gate, and no others."""
    if isinstance(world.engine.store, MemoryStore):
        pytest.skip("rows are a database's")
    execution = Edited(world, first)
    assert not Execution.objects.diverged().exists()
    execution.deploy(skips_before_a_step)
    execution.go_on()
    assert [row.pk for row in Execution.objects.diverged()] == ["x"]


def test_draws_and_helpers_shift_no_id(world: World) -> None:
    """An edit that draws more, or calls more of the flow's own functions, asks for the same children and steps."""

    @flow("d.child")
    def child(ctx: FlowContext) -> int:
        return 1

    def helper(ctx: FlowContext) -> None:
        ctx.random().random()
        ctx.uuid4()

    def before(ctx: FlowContext) -> None:
        ctx.run(A)
        ctx.sleep(3600)
        ctx.start_child(child)
        ctx.suspend("go")

    def edited(ctx: FlowContext) -> None:
        helper(ctx)
        before(ctx)

    execution = Edited(world, before)
    world.advance(timedelta(hours=2))
    other = execution.flow.using(execution_id="y").start()
    execution.deploy(edited)
    world.advance(timedelta(hours=2))
    (one,), (two,) = (
        [event.data["child"] for event in world.loom.history(id) if event.kind == "CHILD_STARTED"]
        for id in ("x", "y")
    )
    assert two == one.replace("x", "y", 1)
    assert (execution.parked_on, [wait.on for wait in other.waits]) == (["go"], ["go"])
