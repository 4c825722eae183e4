"""An agent loop under the testing kit: its model is stubbed like any tool, and crashes are staged in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loom_django import FlowContext, ModelTurn, StepContext, ToolCall, definitions, flow, loom, tool
from loom_django.testing import Harness, NonDeterminismError, crash_sweep

pytestmark = pytest.mark.django_db


@tool(idempotent=True)
def ask_model(ctx: StepContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ModelTurn:
    raise AssertionError("ask_model is to be stubbed in tests")


@tool(idempotent=False)
def give_voucher(ctx: StepContext, order_id: int, euros: int) -> str:
    return f"v-{order_id}-{euros}"


@tool(idempotent=True)
def find_order(ctx: StepContext, number: str) -> int:
    return int(number)


QUESTIONS: list[str] = []
LIMITS: dict[str, int] = {}


@flow("kit-agent", steps=[ask_model, find_order, give_voucher], step_families=["agent"])
def support(ctx: FlowContext, question: str) -> str:
    result = ctx.agent_loop(
        "agent",
        model=ask_model,
        tools=[find_order, give_voucher],
        messages=[{"role": "user", "content": QUESTIONS[0] if QUESTIONS else question}],
        budget=LIMITS,
    )
    return result.text


def answers(ctx: StepContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ModelTurn:
    """Finds the order, gives a voucher and a wrong call for it, and is done."""
    ctx.meter("usd", 1)
    told = [message["content"] for message in messages if message["role"] == "tool"]
    match len(told):
        case 0:
            return ModelTurn(tool_calls=[ToolCall("a", "find_order", {"number": "17"})])
        case 1:
            voucher = ToolCall("b", "give_voucher", {"order_id": told[0], "euros": 5})
            return ModelTurn(tool_calls=[voucher, ToolCall("c", "give_voucher", {"order_id": "17"})])
        case _:
            return ModelTurn(f"Here is {told[1]}.")


def scenario(h: Harness) -> None:
    h.stub(ask_model, calls=answers)
    support.using(execution_id="a1").start("Where is my order?")
    h.run()


def test_a_stubbed_model_speaks(loom_harness: Harness) -> None:
    """It gets what the model gets; the calls of a tool are found by the tool."""
    scenario(loom_harness)
    assert support.handle("a1").result() == "Here is v-17-5."
    asked = loom_harness.calls(ask_model)
    assert [len(call.args[0]) for call in asked] == [1, 3, 6]
    assert [schema["name"] for schema in asked[0].args[1]] == ["find_order", "give_voucher"]
    [voucher] = loom_harness.calls(give_voucher)
    assert voucher.kwargs == {"order_id": 17, "euros": 5}
    assert voucher.step_id == "agent#turn:2:tool:1"


def test_a_crash_in_a_call_of_the_loop(loom_harness: Harness) -> None:
    """A point is found by the tool, though its id does not name it; the doubt has the key of the call."""
    loom_harness.crash(give_voucher, "in-effect")
    scenario(loom_harness)
    loom_harness.run()
    [doubt] = loom_harness.in_doubt()
    assert doubt.idempotency_key == loom_harness.calls(give_voucher)[0].idempotency_key


def test_no_crash_doubles_a_voucher() -> None:
    """At none of the points of any of the loop's steps."""
    report = crash_sweep(scenario)
    assert report.ok, report
    assert len(report.points) == 5 * 5


def test_no_crash_loses_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor an answer to it; each park replays, whatever was used since the steps before it."""
    monkeypatch.setitem(LIMITS, "usd", 1)

    def raised(h: Harness) -> None:
        scenario(h)
        for limit in (2, 9):
            loom.resume("a1", event_type="BudgetExhausted", payload={"limit": limit})
            h.run()

    report = crash_sweep(raised, points=["before-start", "after-effect", "after-outcome"])
    assert report.ok, report
    assert len(report.points) == 3 * 5


def test_another_conversation_is_found(loom_harness: Harness) -> None:
    """A body that gives the loop other messages on its replay is told so."""
    try:
        support.using(execution_id="a2").start("Where?")
        loom_harness.stub(
            ask_model, calls=lambda ctx, messages, tools: QUESTIONS.append("Who?") or ModelTurn("?")
        )
        with pytest.raises(NonDeterminismError, match="agent#turn:1"):
            loom_harness.run()
    finally:
        QUESTIONS.clear()


def test_the_how_to_page_runs(loom_harness: Harness) -> None:
    """Its flow, by its own provider; and its test."""
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "agents.md"
    program, _, test = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(program, str(page), "exec"), names)  # noqa: S102  the page itself
    exec(compile(test, str(page), "exec"), names)  # noqa: S102
    try:
        handle = names["support"].using(execution_id="s0").start("Where is it?")
        loom_harness.run()
        assert handle.result() == "Sorry! Here is voucher 17-5.00."
        names["test_a_late_order_gets_a_voucher"](loom_harness)
    finally:
        definitions.registry.forget("support")
