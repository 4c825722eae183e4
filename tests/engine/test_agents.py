"""The agent loop: every turn and every call a step, whatever the model asks for and wherever the process dies."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Context, Decimal, localcontext
from functools import partial
from typing import Any

import pytest

from loom_django import (
    AgentResult,
    AsyncFlowContext,
    FlowContext,
    ModelTurn,
    RetryPolicy,
    StepContext,
    StepFailed,
    Tool,
    ToolCall,
    flow,
    register_type,
    tool,
)
from loom_django.errors import (
    ExecutionFailedError,
    InvalidInputError,
    ResumeRefusedError,
)
from loom_django.kernel.state import FrameStatus, Status
from tests.engine.conftest import World

Model = Callable[[list[dict[str, Any]]], ModelTurn]

ASKED: list[list[dict[str, Any]]] = []
KEYS: dict[str, list[str]] = {}
SCRIPT: list[ModelTurn] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    for kept in (ASKED, KEYS, SCRIPT):
        kept.clear()


def said(ctx: StepContext) -> None:
    KEYS.setdefault(ctx.step_id, []).append(ctx.idempotency_key)


def scripted(ctx: StepContext, messages: list[dict[str, Any]]) -> ModelTurn:
    """The turn of the script that has as many answers behind it as the conversation has."""
    said(ctx)
    ASKED.append(messages)
    return SCRIPT[sum(message["role"] == "assistant" for message in messages)]


@tool(idempotent=True, retry=RetryPolicy(max_attempts=2, initial_interval=0.001))
def model(ctx: StepContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ModelTurn:
    ctx.meter("usd", Decimal("0.10"))
    return scripted(ctx, messages)


@tool
async def async_model(
    ctx: StepContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> ModelTurn:
    return scripted(ctx, messages)


@tool(idempotent=True)
def look(ctx: StepContext, what: str) -> str:
    said(ctx)
    return f"{what}!"


@tool(idempotent=False)
def pay(ctx: StepContext, euros: Decimal, note: str = "") -> Decimal:
    said(ctx)
    return euros


@tool(idempotent=False, in_doubt_on=TimeoutError)
def wire(ctx: StepContext, euros: int) -> str:
    said(ctx)
    raise TimeoutError("no answer")


@tool
def refuse(ctx: StepContext) -> None:
    said(ctx)
    raise ValueError("no stock")


TOOLS: list[Tool[..., Any]] = [look, pay, wire, refuse]
HELLO = [{"role": "user", "content": "hello"}]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"id-{name}", name, arguments)


def script(*turns: Sequence[ToolCall] | str) -> None:
    SCRIPT[:] = [ModelTurn(turn) if isinstance(turn, str) else ModelTurn("", turn) for turn in turns]


def agent(flow_id: str, **options: Any) -> Any:
    @flow(flow_id, steps=[model, *TOOLS], step_families=["agent"], durability=options.pop("durability", None))
    def body(ctx: FlowContext) -> AgentResult:
        return ctx.agent_loop("agent", model=model, tools=TOOLS, messages=HELLO, **options)

    return body


def tool_messages(result: AgentResult) -> list[dict[str, Any]]:
    return [message for message in result.messages if message["role"] == "tool"]


# The loop.


def test_turns_and_calls_are_steps(world: World) -> None:
    """Each has a frame of the loop's family and a key of its own; the model is told all that was said."""
    script([call("look", what="a"), call("look", what="b")], [call("pay", euros="1.50")], "done")
    handle = agent("g.plain").start()
    result = handle.result()
    assert (result.text, result.stop_reason, result.finished, result.turns) == ("done", "finished", True, 3)
    assert set(world.state(handle).frames) == {
        "agent#turn:1",
        "agent#turn:1:tool:1",
        "agent#turn:1:tool:2",
        "agent#turn:2",
        "agent#turn:2:tool:1",
        "agent#turn:3",
    }
    assert ASKED[2] == [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "id-look", "name": "look", "arguments": {"what": "a"}},
                {"id": "id-look", "name": "look", "arguments": {"what": "b"}},
            ],
        },
        {"role": "tool", "tool_call_id": "id-look", "name": "look", "is_error": False, "content": "a!"},
        {"role": "tool", "tool_call_id": "id-look", "name": "look", "is_error": False, "content": "b!"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "id-pay", "name": "pay", "arguments": {"euros": "1.50"}}],
        },
        {
            "role": "tool",
            "tool_call_id": "id-pay",
            "name": "pay",
            "is_error": False,
            "content": Decimal("1.50"),
        },
    ]
    assert result.messages == [*ASKED[2], {"role": "assistant", "content": "done", "tool_calls": []}]
    assert result.used == {"usd": Decimal("0.30")}
    world.check(handle.id)


def test_an_async_flow_has_the_same_loop(world: World) -> None:
    """Awaited, with an async model."""
    script([call("look", what="a"), call("refuse")], "done")

    @flow("g.async", steps=[async_model, look, refuse], step_families=["agent"])
    async def body(ctx: AsyncFlowContext) -> Any:
        result = await ctx.agent_loop("agent", model=async_model, tools=[look, refuse], messages=HELLO)
        return [result.text, [message["content"] for message in tool_messages(result)]]

    assert body.start().result() == ["done", ["a!", "no stock"]]


def test_what_goes_wrong_is_told_to_the_model(world: World) -> None:
    """A failure with its type; a call of no tool, or that does not fit, is not made."""
    script(
        [
            call("refuse"),
            call("buy"),
            call("pay", euros="many"),
            call("pay"),
            call("look", what="a", where="b"),
            ToolCall("id", "look", "{not json"),
        ],
        "done",
    )
    handle = agent("g.wrong").start()
    told = tool_messages(handle.result())
    assert [message["is_error"] for message in told] == [True] * 6
    assert [message["error_type"] for message in told] == [
        "builtins.ValueError",
        "UnknownTool",
        *["InvalidArguments"] * 4,
    ]
    assert [message["content"] for message in told] == [
        "no stock",
        "there is no tool 'buy'; the tools are look, pay, wire, refuse",
        'euros is to be a number, or text as "9.90"; this is "many"',
        "pay needs euros",
        "look has no parameter where; it takes what",
        "the arguments of look are to be an object; this is '{not json'",
    ]
    assert list(KEYS) == ["agent#turn:1", "agent#turn:1:tool:1", "agent#turn:2"]


@register_type(name="g.Money")
@dataclass
class Money:
    euros: int

    def __post_init__(self) -> None:
        if self.euros > 10:
            raise OverflowError("too much")


class Size(enum.Enum):
    SMALL = "s"

    @classmethod
    def _missing_(cls, value: Any) -> Size:
        return cls(value.lower())


register_type(Size, name="g.Size")

HOSTILE: list[Any] = [
    {"number": 10**400},
    {"number": float("nan")},
    {"number": float("-inf")},
    {"exact": "NaN"},
    {"exact": "sNaN"},
    {"exact": float("inf")},
    {"money": {"euros": 11}},
    {"size": 3},
    {"exact": b"bytes"},
    {"exact": {(1, 2): 3}},
    {"size": 10**5000},
    {"__class__": 1},
    {"ctx": None},
    {"\ud800\0": 1},
    {"x" * 500_000: 1},
]


@pytest.mark.parametrize("arguments", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_arguments_are_told_to_the_model(world: World, arguments: Any) -> None:
    """Whatever a model gives, the call is not made and the flow does not fail by it."""

    @tool(idempotent=False)
    def typed(
        ctx: StepContext,
        number: float = 0,
        exact: Decimal = Decimal(0),
        money: Money | None = None,
        size: Size = Size.SMALL,
    ) -> None:
        said(ctx)

    script([ToolCall("id", "typed", arguments), ToolCall("id", "typed", {})], "done")

    @flow("g.hostile", steps=[model, typed], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        return ctx.agent_loop("agent", model=model, tools=[typed], messages=HELLO).messages

    told = [message for message in body.start().result() if message["role"] == "tool"]
    assert [message.get("error_type") for message in told] == ["InvalidArguments", None]
    assert list(KEYS) == ["agent#turn:1", "agent#turn:1:tool:2", "agent#turn:2"]


@pytest.mark.parametrize("name", ["__class__", "", "\ud800", None, [], {}, "pay"], ids=range(7))
def test_hostile_names_are_told_to_the_model(world: World, name: Any) -> None:
    """A tool that the flow declares is none of the loop's unless the loop was given it."""
    script([ToolCall(name, name, {"euros": 1})], "done")

    @flow("g.names", steps=[model, look, pay], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        return tool_messages(ctx.agent_loop("agent", model=model, tools=[look], messages=HELLO))

    [told] = body.start().result()
    assert (told["error_type"], told["tool_call_id"]) == ("UnknownTool", name)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "calls",
    [
        [ToolCall("id" * 300_000, "nothing", {})],
        [ToolCall("id", "give", {"depth": 199})],
        [ToolCall("id", "nothing", {"deep": nested(195)})],
    ],
    ids=["large", "deep result", "deep call"],
)
def test_a_turn_that_cannot_be_asked_has_failed(world: World, calls: list[ToolCall]) -> None:
    """By no fault of the flow's own: it may catch it, and if it does not, what it has done is undone."""

    undoes = [True]

    @tool(idempotent=False)
    def give(ctx: StepContext, depth: int) -> Any:
        return nested(depth)

    @tool(idempotent=True)
    def undo(ctx: StepContext) -> None:
        said(ctx)

    @flow("g.unasked", steps=[model, give, undo], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        if undoes[0]:
            ctx.on_failure(undo)
        ctx.agent_loop("agent", model=model, tools=[give], messages=HELLO)

    SCRIPT[:] = [ModelTurn("", calls), ModelTurn("done")]
    with pytest.raises(ExecutionFailedError, match="agent#turn:2"):
        body.start().result()
    assert len(KEYS["undo"]) == 1
    undoes[0] = False
    handle = body.start()
    for failed in (handle, world.loom.rerun(handle.id)):
        with pytest.raises(ExecutionFailedError, match="agent#turn:2"):
            failed.result()


def test_a_refusal_stands_whatever_the_code_becomes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was decided once: a replay makes no call that the model was told was not made."""
    script([call("buy"), call("look", what="a")], "done")

    @tool(name="buy")
    def buy(ctx: StepContext) -> str:
        said(ctx)
        return "bought"

    offered: list[Tool[..., Any]] = [look]

    @flow("g.changed", steps=[model, look, buy], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        result = ctx.agent_loop("agent", model=model, tools=offered, messages=HELLO)
        ctx.suspend("Go")
        return [message["is_error"] for message in tool_messages(result)]

    handle = body.start()
    offered[:] = [buy]  # the tool that was not there is, and the one that was called is not
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == [True, False]
    assert "agent#turn:1:tool:1" not in KEYS


def test_the_last_turn_makes_no_calls(world: World) -> None:
    """The conversation says so, and can be gone on with."""
    script([call("look", what="a")], [call("pay", euros=1), call("look", what="b")])
    result = agent("g.turns", max_turns=2).start().result()
    assert (result.stop_reason, result.finished, result.turns) == ("max_turns", False, 2)
    assert [message.get("error_type") for message in tool_messages(result)] == [None, "MaxTurns", "MaxTurns"]
    assert "agent#turn:2:tool:1" not in KEYS


def test_the_last_turn_stays_the_last(world: World) -> None:
    """A release that lets the model have more turns makes no call that the flow was told was not made."""
    script([call("pay", euros=1)], "done")
    most = [1]

    @flow("g.last", steps=[model, pay], step_families=["agent"])
    def body(ctx: FlowContext) -> str:
        options: dict[str, Any] = {"tools": [pay], "messages": HELLO, "max_turns": most[0]}
        result = ctx.agent_loop("agent", model=model, **options)
        ctx.suspend("Go")
        return result.stop_reason

    handle = body.start()
    most[0] = 5
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() == "max_turns"
    assert list(KEYS) == ["agent#turn:1"]
    forked = world.loom.fork(handle.id, from_step="agent#turn:1")
    assert set(KEYS) == {"agent#turn:1", "agent#turn:1:tool:1", "agent#turn:2"}
    world.loom.resume(forked.id, event_type="Go")
    assert forked.result() == "finished"


def test_a_turn_whose_calls_were_begun_is_not_the_last(world: World) -> None:
    """A release with fewer turns does not tell the flow that a call was not made which was."""
    script([call("wire", euros=1)], "done")
    most = [5]

    @flow("g.fewer", steps=[model, wire], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        options: dict[str, Any] = {"tools": [wire], "messages": HELLO, "max_turns": most[0]}
        return [
            message["content"] for message in tool_messages(ctx.agent_loop("agent", model=model, **options))
        ]

    handle = body.start()
    most[0] = 1
    world.loom.resolve(handle.id, "agent#turn:1:tool:1", "completed-with-result", output="tx")
    assert handle.result() == ["tx"]


def test_a_model_that_fails_fails_the_loop(world: World) -> None:
    """After its retries, as any step; the flow may catch it."""

    @tool
    def silent(ctx: StepContext, messages: Any, tools: Any) -> ModelTurn:
        raise ConnectionError("away")

    @flow("g.silent", steps=[silent], step_families=["agent"])
    def body(ctx: FlowContext) -> str:
        try:
            ctx.agent_loop("agent", model=silent, tools=[], messages=HELLO)
        except StepFailed as exc:
            return exc.step_id
        return ""

    assert body.start().result() == "agent#turn:1"


def test_loops_in_branches_have_names_of_their_own(world: World) -> None:
    """By their scope; so have what they use and the scopes of their calls."""
    script([call("look", what="a")], "done")

    @flow("g.branches", steps=[model, look], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        def one(inner: FlowContext, side: str) -> str:
            return inner.agent_loop("agent", model=model, tools=[look], messages=HELLO).text + side

        return ctx.parallel({"l": lambda c: one(c, "left"), "r": lambda c: one(c, "right")})

    handle = body.start()
    assert handle.result() == {"l": "doneleft", "r": "doneright"}
    state = world.state(handle)
    assert set(state.frames) == {
        f"agent#1.{side}:turn:{place}" for side in "lr" for place in ("1", "1:tool:1", "2")
    }
    assert state.frames["agent#1.l:turn:1:tool:1"].scope == "1.l.1.1"
    assert state.spent == {
        ("agent#1.l", "usd"): Decimal("0.20"),
        ("agent#1.r", "usd"): Decimal("0.20"),
    }


def test_a_decider_has_frames_too(world: World) -> None:
    """So a call that must not be repeated is in doubt there as anywhere, and is settled."""
    script([call("wire", euros=1)], "done")

    @flow("g.decider", steps=[model, wire], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        return ctx.decide(
            "ask", lambda c: c.agent_loop("agent", model=model, tools=[wire], messages=HELLO).text
        )

    handle = body.start()
    assert [frame.step_id for frame in world.state(handle).in_doubt] == ["agent#turn:1:tool:1"]
    world.loom.resolve(handle.id, "agent#turn:1:tool:1", "completed-with-result", output="tx")
    assert handle.result() == "done"
    assert len(KEYS["agent#turn:1:tool:1"]) == 1


def test_a_tool_has_no_loop(world: World) -> None:
    """The calls of a loop inside a tool would have no frames: nothing could keep one from being made twice."""

    @tool
    def inside(ctx: StepContext) -> None:
        ctx.agent_loop("agent", model=model, tools=[pay], messages=HELLO)

    @flow("g.inside", steps=[inside, model, pay], step_families=["agent"])
    def body(ctx: FlowContext) -> None:
        ctx.run(inside)

    with pytest.raises(ExecutionFailedError, match=r"StepContext has no agent_loop\(\)"):
        body.start().result()
    assert KEYS == {}


# Misuse.

LOOPS: list[tuple[dict[str, Any], str]] = [
    ({"loop": "other"}, 'does not declare "other"'),
    ({"loop": "agent#1"}, 'must not contain "#"'),
    ({"tools": [look, pay.named("elsewhere")]}, "^$"),  # listed as pay: its own name in the loop
    ({"tools": None}, "tools=None must be a list"),
    ({"tools": look}, "must be a list of tools"),
    ({"tools": [look, look]}, "two tools of the loop are named 'look'"),
    ({"tools": [look.keyed(1)]}, "is keyed"),
    ({"tools": [lambda ctx: None]}, "decorate it with @tool"),
    ({"tools": [tool(name="unlisted")(lambda ctx: None)]}, 'does not declare "unlisted"'),
    ({"model": look}, "cannot be a model"),
    ({"messages": "hello"}, "must be a list of dicts"),
    ({"messages": ["hello"]}, r"messages\[0\]"),
    ({"messages": [{"content": object()}]}, r'messages\[0\]\["content"\]'),
    ({"max_turns": 0}, "max_turns=0"),
    ({"budget": {"usd": 0.5}}, r"write Decimal\('0.50'\)"),
    ({"budget": {"usd": 0}}, "above 0"),
    ({"budget": {"": 1}}, "metered resource"),
    ({"budget": 3}, "a dict of limits"),
]


@pytest.mark.parametrize(("options", "says"), LOOPS, ids=range(len(LOOPS)))
def test_misuse_is_refused_before_anything_is_written(
    world: World, options: dict[str, Any], says: str
) -> None:
    """The flow fails by it, and no model was asked."""
    script("done")

    @flow("g.misuse", steps=[model, *TOOLS], step_families=["agent"])
    def body(ctx: FlowContext) -> str:
        given = {"model": model, "tools": TOOLS, "messages": HELLO, **options}
        return ctx.agent_loop(given.pop("loop", "agent"), **given).text

    handle = body.start()
    if says == "^$":
        assert handle.result() == "done"
        return
    with pytest.raises(ExecutionFailedError, match=says):
        handle.result()
    assert world.kinds(handle.id) == ["EXECUTION_STARTED", "EXECUTION_FAILED"]


def test_a_second_loop_needs_another_name(world: World) -> None:
    """Its steps would be those of the first."""
    script("done")

    @flow("g.twice", steps=[model], step_families=["agent"])
    def body(ctx: FlowContext) -> None:
        for _ in range(2):
            ctx.agent_loop("agent", model=model, tools=[], messages=HELLO)

    with pytest.raises(ExecutionFailedError, match="was asked for twice"):
        body.start().result()


NO_TURNS: list[Any] = ["hello", *map(partial(ModelTurn, ""), [None, ToolCall("id", "look"), ["look"]])]


@pytest.mark.parametrize("turn", NO_TURNS)
def test_a_model_returns_a_turn(world: World, turn: Any) -> None:
    """Anything else is named."""

    @tool
    def chatty(ctx: StepContext, messages: Any, tools: Any) -> Any:
        return turn

    @flow("g.chatty", steps=[chatty], step_families=["agent"])
    def body(ctx: FlowContext) -> None:
        ctx.agent_loop("agent", model=chatty, tools=[], messages=HELLO)  # type: ignore[arg-type]

    with pytest.raises(ExecutionFailedError, match="returns a ModelTurn"):
        body.start().result()


# What is recorded.


def test_each_turn_records_what_is_new(world: World) -> None:
    """Fifty turns are fifty times one turn, not fifty times what came before."""
    turns = 50
    script(*[[call("look", what="x" * 1000)] for _ in range(turns - 1)], "done")
    handle = agent("g.bytes", max_turns=turns).start()
    assert handle.result().turns == turns
    sizes = [
        len(event.body)
        for event in world.loom.history(handle.id, kinds=["STEP_STARTED"])
        if ":tool:" not in event.data["step"]
    ]
    assert len(sizes) == turns
    assert max(sizes[1:]) - min(sizes[1:]) < 10
    assert sum(sizes) < turns * 3000
    assert len(json.dumps(ASKED[-1])) > (turns - 1) * 2000


def test_what_is_told_is_a_copy(world: World) -> None:
    """A model that changes what it gets changes nothing, for its next try neither."""
    got: list[tuple[str, int]] = []

    @tool(retry=RetryPolicy(max_attempts=2, initial_interval=0.001))
    def rude(ctx: StepContext, messages: list[Any], tools: list[Any]) -> ModelTurn:
        got.append((messages[0]["content"], len(tools)))
        messages[0]["content"] = "changed"
        tools.clear()
        if ctx.attempt == 1:
            raise ConnectionError
        return scripted(ctx, messages)

    @flow("g.rude", steps=[rude, look], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        return ctx.agent_loop("agent", model=rude, tools=[look], messages=HELLO).messages[0]

    script([call("look", what="a")], "done")
    assert body.start().result() == HELLO[0]
    assert got == [("hello", 1)] * 4


# Keys, crashes and doubts.


def test_keys_say_where_and_what(world: World) -> None:
    """The same call at the same place has the same key; another one has another, even at that place."""
    script([call("look", what="a"), call("look", what="a")], "done")
    agent("g.keys").using(execution_id="k").start()
    first, second = KEYS["agent#turn:1:tool:1"][0], KEYS["agent#turn:1:tool:2"][0]
    head, _, digest = first.rpartition(":")
    assert head == "k:agent#turn:1:tool:1"
    assert second == f"k:agent#turn:1:tool:2:{digest}"
    KEYS.clear()
    script([call("look", what="b")], "done")
    agent("g.keys").using(execution_id="l").start()
    assert KEYS["agent#turn:1:tool:1"][0].rpartition(":")[2] != digest


def test_a_model_that_changes_its_mind_gets_other_keys(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """A turn that was lost before it was durable may be another one: no call gets the key of the lost one."""
    script([call("look", what="a")], "done")
    crash_at("agent#turn:2", "before-effect")

    @tool(idempotent=True)
    def free(ctx: StepContext, messages: list[Any], tools: list[Any]) -> ModelTurn:
        return scripted(ctx, messages)

    @flow("g.mind", steps=[free, look], step_families=["agent"], durability="deferred")
    def body(ctx: FlowContext) -> str:
        return ctx.agent_loop("agent", model=free, tools=[look], messages=HELLO).text

    handle = body.start()
    script([call("look", what="b")], "done")
    world.shift(timedelta(hours=1))
    world.recover()
    assert handle.result() == "done"
    assert len(set(KEYS["agent#turn:1:tool:1"])) == 2
    assert len(KEYS["agent#turn:1"]) == 2
    assert len(set(KEYS["agent#turn:1"])) == 1


POINTS = ["before-start", "before-effect", "in-effect", "after-effect", "after-outcome"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "step", ["agent#turn:1", "agent#turn:1:tool:1", "agent#turn:1:tool:2", "agent#turn:2"]
)
def test_a_crash_anywhere(world: World, crash_at: Callable[[str, str], None], step: str, point: str) -> None:
    """No payment is made twice, no turn is lost, and every attempt has the key of the first."""
    script([call("look", what="a"), call("pay", euros=1)], "done")
    crash_at(step, point)
    handle = agent("g.crash").start()
    world.shift(timedelta(hours=1))
    world.recover()
    payment = "agent#turn:1:tool:2"
    doubts = [frame.step_id for frame in world.state(handle).in_doubt]
    if step == payment and point not in ("before-start", "after-outcome"):
        assert doubts == [payment]
    if doubts:  # the payment may have been under way beside the step that died
        world.loom.resolve(handle.id, payment, "completed-with-result", output=Decimal(1))
    assert handle.result(timeout=5).text == "done"
    assert len(KEYS.get(payment, [])) <= 1
    assert all(len(set(keys)) == 1 for keys in KEYS.values())
    world.check(handle.id)


def test_what_was_begun_goes_on_as_it_was_begun(world: World, crash_at: Callable[[str, str], None]) -> None:
    """With the arguments that the log holds, though the loop is not given the tool any more."""
    script([call("look", what="a")], "done")
    crash_at("agent#turn:1:tool:1", "in-effect")
    offered: list[Tool[..., Any]] = [look]

    @flow("g.begun", steps=[model, look], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        result = ctx.agent_loop("agent", model=model, tools=offered, messages=HELLO)
        return [message["content"] for message in tool_messages(result)]

    handle = body.start()
    offered.clear()
    world.shift(timedelta(hours=1))
    world.recover()
    assert handle.result(timeout=5) == ["a!"]


def test_a_release_may_give_up_a_tool_whose_calls_have_ended(world: World) -> None:
    """An outcome needs no tool; a call that is under way does, and a replay check says so."""

    def body(ctx: FlowContext) -> Any:
        tools = TOOLS if ctx.version == 1 else []
        result = ctx.agent_loop("agent", model=model, tools=tools, messages=HELLO)
        return ctx.suspend("Go"), [message["content"] for message in tool_messages(result)]

    given = flow("g.given-up", steps=[model, *TOOLS], step_families=["agent"])(body)
    given_up = flow("g.given-up", version=2, steps=[model], step_families=["agent"])(body)
    script([call("wire", euros=1)], "done")
    under_way = given.start()
    assert world.loom.replay_check(under_way.id, given_up).vanished == (("wire", 1),)
    script([call("look", what="a")], "done")
    ended = given.start()
    world.loom.resume_as(ended.id, given_up, event_type="Go", payload=1)
    assert ended.result() == (1, ["a!"])


def test_a_doubt_waits_while_its_siblings_run(world: World) -> None:
    """A fresh attempt has a fresh key behind the digest; the other call is not made again."""
    script([call("wire", euros=1), call("look", what="a")], "done")
    handle = agent("g.doubt").start()
    assert handle.status == Status.SUSPENDED
    state = world.state(handle)
    assert state.frames["agent#turn:1:tool:2"].status is FrameStatus.COMPLETED
    world.loom.resolve(handle.id, "agent#turn:1:tool:1", "retry-fresh")
    world.loom.resolve(handle.id, "agent#turn:1:tool:1", "fail", error="the bank says no")
    [told, _] = tool_messages(handle.result())
    assert (told["error_type"], told["content"]) == ("OperatorVerdict", "the bank says no")
    first, second = KEYS["agent#turn:1:tool:1"]
    assert second == f"{first}:r1"
    assert len(KEYS["agent#turn:1:tool:2"]) == 1


# Budgets.


def test_a_budget_that_is_used_up_parks(world: World) -> None:
    """Before the next step; a higher limit lets the loop go on, as often as it takes."""
    script([call("look", what="a")], [call("look", what="b")], "done")
    handle = agent("g.budget", budget={"usd": Decimal("0.10"), "tokens": 5}).start()
    [wait] = world.state(handle).pending_waits
    assert (wait.on, wait.correlation_key) == ("BudgetExhausted", "usd")
    assert wait.budget == {"loop": "agent", "resource": "usd", "used": "0.10", "limit": "0.10"}
    assert "agent#turn:1:tool:1" not in KEYS
    raised: dict[str, Any] = {"event_type": "BudgetExhausted", "correlation_key": "usd"}
    world.loom.resume(handle.id, **raised, payload={"limit": Decimal("0.20")})
    assert list(KEYS) == ["agent#turn:1", "agent#turn:1:tool:1", "agent#turn:2"]
    assert world.state(handle).pending_waits[0].budget["limit"] == "0.20"
    world.loom.resume(handle.id, **raised, payload={"limit": 1.5})
    assert handle.result().text == "done"
    assert handle.result().used == {"usd": Decimal("0.30")}
    world.check(handle.id)


def test_an_answered_budget_is_a_part_of_the_replay(world: World) -> None:
    """When all that the log holds was asked for, the body replays no longer."""
    script([call("look", what="a")], "done")

    @flow("g.replays", steps=[model, look], step_families=["agent"])
    def body(ctx: FlowContext) -> bool:
        budget = {"usd": Decimal("0.10")}
        ctx.agent_loop("agent", model=model, tools=[look], messages=HELLO, budget=budget)
        ctx.suspend("Go")
        return ctx.is_replaying

    handle = body.start()
    world.loom.resume(handle.id, event_type="BudgetExhausted", payload={"limit": 1})
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result() is False


@pytest.mark.parametrize(
    "payload",
    [None, {}, {"limit": "1"}, {"limit": True}, {"limit": Decimal("0.10")}, {"limit": float("nan")}],
)
def test_a_limit_that_helps_nobody_is_refused(world: World, payload: Any) -> None:
    """Nothing is written, and the question is open still."""
    script([call("look", what="a")], "done")
    handle = agent("g.refused", budget={"usd": Decimal("0.10")}).start()
    kinds = world.kinds(handle.id)
    with pytest.raises(InvalidInputError, match="limit"):
        world.loom.resume(handle.id, event_type="BudgetExhausted", payload=payload)
    assert world.kinds(handle.id) == kinds
    world.loom.resume(handle.id, event_type="BudgetExhausted", payload={"limit": 1})
    assert handle.result().text == "done"


def test_a_loop_without_money_can_be_cancelled(world: World) -> None:
    """It is over then, and no limit helps it any more."""
    script([call("look", what="a")], "done")
    handle = agent("g.cancelled", budget={"usd": Decimal("0.10")}).start()
    world.loom.cancel(handle.id)
    with pytest.raises(ResumeRefusedError):
        world.loom.resume(handle.id, event_type="BudgetExhausted", payload={"limit": 1})


def test_failed_attempts_are_used_too(world: World) -> None:
    """Of the model and of a tool; what other steps meter is not the loop's."""

    @tool(retry=RetryPolicy(max_attempts=3, initial_interval=0.001))
    def stumbles(ctx: StepContext) -> str:
        ctx.meter("usd", 1)
        if ctx.attempt < 3:
            raise ConnectionError
        return "up"

    @flow("g.failed", steps=[model, stumbles], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        ctx.run(stumbles)
        ctx.meter("usd", 100)
        return ctx.agent_loop("agent", model=model, tools=[stumbles], messages=HELLO).used

    script([call("stumbles")], "done")
    handle = body.start()
    assert handle.result() == {"usd": Decimal("3.20")}
    assert world.state(handle).spent == {("agent", "usd"): Decimal("3.20")}


@pytest.mark.parametrize("durability", ["boundary", "deferred"])
@pytest.mark.parametrize("step", ["agent#turn:1", "agent#turn:1:tool:1", "agent#turn:2"])
def test_what_was_used_survives_a_crash(
    world: World, crash_at: Callable[[str, str], None], durability: str, step: str
) -> None:
    """It may be too much afterwards, never too little."""
    script([call("look", what="a")], "done")
    crash_at(step, "after-outcome")
    handle = agent("g.survives", durability=durability).start()
    world.shift(timedelta(hours=1))
    world.recover()
    attempts = len(KEYS["agent#turn:1"]) + len(KEYS["agent#turn:2"])
    assert handle.result().used["usd"] >= attempts * Decimal("0.10")


def test_of_an_attempt_that_is_cut_off_nothing_is_counted(
    world: World, crash_at: Callable[[str, str], None]
) -> None:
    """What it metered was to be durable with the outcome that it never had."""
    script("done")
    crash_at("agent#turn:1", "after-effect")
    handle = agent("g.cut").start()
    world.shift(timedelta(hours=1))
    world.recover()
    assert handle.result().used == {"usd": Decimal("0.10")}
    assert len(KEYS["agent#turn:1"]) == 2


def test_branches_of_one_loop_share_a_budget(world: World) -> None:
    """Calls that begin when a limit is reached wait for one and the same answer."""

    @tool(idempotent=True)
    def costly(ctx: StepContext, what: str) -> str:
        said(ctx)
        ctx.meter("usd", 1)
        return what

    @flow("g.shared", steps=[model, costly], step_families=["agent"])
    def body(ctx: FlowContext) -> str:
        return ctx.agent_loop(
            "agent", model=model, tools=[costly], messages=HELLO, budget={"usd": Decimal("0.15")}
        ).text

    calls = [call("costly", what=str(number)) for number in range(40)]
    script(calls, "done")
    handle = body.start()
    waiting = world.state(handle).pending_waits
    assert [wait.correlation_key for wait in waiting] == ["usd"]
    made = len(KEYS) - 1
    assert 1 <= made < 40
    world.loom.resume(handle.id, event_type="BudgetExhausted", payload={"limit": 100})
    assert handle.result() == "done"
    assert len(KEYS) == 42
    assert all(len(keys) == 1 for keys in KEYS.values())


def test_an_answer_that_comes_while_the_body_runs_is_kept(world: World) -> None:
    """Another wait of the park was answered; the loop finds its limit when it comes to its own."""
    script([call("look", what="a")], "done")

    @tool
    def asks_for_more(ctx: StepContext) -> None:
        more = {"limit": Decimal("0.05")}
        with pytest.raises(InvalidInputError, match=r"above the 0\.10 that are used"):
            world.loom.resume(ctx.execution_id, event_type="BudgetExhausted", payload=more)
        world.loom.resume(ctx.execution_id, event_type="BudgetExhausted", payload={"limit": 1})

    @flow("g.kept", steps=[model, look, asks_for_more], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        def talks(inner: FlowContext) -> str:
            budget = {"usd": Decimal("0.10")}
            return inner.agent_loop("agent", model=model, tools=[look], messages=HELLO, budget=budget).text

        def pays(inner: FlowContext) -> None:
            inner.suspend("Go")
            inner.run(asks_for_more)

        return ctx.parallel({"talks": talks, "pays": pays})

    handle = body.start()
    assert {wait.on for wait in world.state(handle).pending_waits} == {"BudgetExhausted", "Go"}
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result(timeout=5) == {"talks": "done", "pays": None}
    assert "MESSAGE_CONSUMED" in world.kinds(handle.id)
    world.check(handle.id)


def test_calls_that_wait_for_one_answer_take_it_once(world: World) -> None:
    """Tasks of an async flow come to it at the same time."""
    script([call("look", what=str(number)) for number in range(5)], "done")

    @tool
    async def costly(ctx: StepContext, messages: list[Any], tools: list[Any]) -> ModelTurn:
        ctx.meter("usd", 1)
        return scripted(ctx, messages)

    @tool
    async def asks_for_more(ctx: StepContext) -> None:
        await world.loom.aresume(ctx.execution_id, event_type="BudgetExhausted", payload={"limit": 9})

    @flow("g.once", steps=[costly, look, asks_for_more], step_families=["agent"])
    async def body(ctx: AsyncFlowContext) -> Any:
        async def talks(inner: AsyncFlowContext) -> str:
            result = await inner.agent_loop(
                "agent", model=costly, tools=[look], messages=HELLO, budget={"usd": 1}
            )
            return result.text

        async def pays(inner: AsyncFlowContext) -> None:
            await inner.suspend("Go")
            await inner.run(asks_for_more)

        return await ctx.parallel({"talks": talks, "pays": pays})

    handle = body.start()
    world.loom.resume(handle.id, event_type="Go")
    assert handle.result(timeout=5) == {"talks": "done", "pays": None}
    assert world.kinds(handle.id).count("MESSAGE_CONSUMED") == 1


def test_loops_side_by_side_are_answered_one_by_one(world: World) -> None:
    """Each by its name: both wait for more of one resource."""
    script([call("look", what="a")], "done")

    @flow("g.both", steps=[model, look], step_families=["agent"])
    def body(ctx: FlowContext) -> Any:
        def one(inner: FlowContext, side: str) -> str:
            budget = {"usd": Decimal("0.10")}
            result = inner.agent_loop("agent", model=model, tools=[look], messages=HELLO, budget=budget)
            return result.text + side

        return ctx.parallel({"l": lambda c: one(c, "left"), "r": lambda c: one(c, "right")})

    handle = body.start()
    waits = {wait.correlation_key for wait in world.state(handle).pending_waits}
    assert waits == {"agent#1.l:usd", "agent#1.r:usd"}
    for limit, key in ((10**5000, "agent#1.r:usd"), (1, "agent#1.l:usd")):
        world.loom.resume(
            handle.id, event_type="BudgetExhausted", correlation_key=key, payload={"limit": limit}
        )
    assert handle.result() == {"l": "doneleft", "r": "doneright"}


def test_no_amount_makes_a_log_unreadable(world: World) -> None:
    """Sums are exact to 60 digits in whatever decimal context a process has, and rounded up beyond."""

    @tool
    def spend(ctx: StepContext, amount: Any) -> None:
        ctx.meter("usd", amount)

    @flow("g.sums", steps=[spend])
    def body(ctx: FlowContext, *amounts: Any) -> None:
        for amount in amounts:
            ctx.run(spend, amount)

    with localcontext(Context(prec=4)):
        exact = body.start(10**40, Decimal("0.1"))
        vast = body.start(10**5000, Decimal("9E999999999999999999"), Decimal("9E999999999999999999"))
        assert [exact.status, vast.status] == [Status.COMPLETED] * 2
        assert world.state(exact).meters["usd"] == Decimal("1" + "0" * 40 + ".1")
        assert world.state(vast).meters["usd"] == Decimal("Infinity")


def test_a_flow_cannot_wait_for_a_budget_itself(world: World) -> None:
    """The name is the loop's."""

    @flow("g.own")
    def body(ctx: FlowContext) -> None:
        ctx.suspend("BudgetExhausted")

    with pytest.raises(ExecutionFailedError, match="reserved"):
        body.start().result()
