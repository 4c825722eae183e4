"""The flows that the console's tests look at and act on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from loom_django import (
    EffectInDoubt,
    FlowContext,
    ModelTurn,
    StepContext,
    ToolCall,
    flow,
    register_type,
    tool,
)

# What the bank does: raise it, or return it.
bank: list[Any] = []


@register_type(name="tests.admin.Receipt")
@dataclass(frozen=True)
class Receipt:
    number: str
    amount: Decimal


def _answer() -> Any:
    answer = bank.pop(0) if bank else EffectInDoubt("the line went dead")
    if isinstance(answer, BaseException):
        raise answer
    return answer


@tool(idempotent=False, in_doubt_on=(ConnectionError,))
def transfer(ctx: StepContext, account: str, amount: Any) -> Any:
    return _answer()


@tool(idempotent=False, in_doubt_on=(ConnectionError,))
def second_transfer(ctx: StepContext) -> Any:
    return _answer()


@tool(idempotent=False, in_doubt_on=(ConnectionError,))
def receipt(ctx: StepContext) -> Receipt:
    return _answer()


def _even(value: Any) -> int:
    if not isinstance(value, int) or value % 2:
        raise ValueError("an even number, please")
    return value


@tool(idempotent=False, in_doubt_on=(ConnectionError,), parse_output=_even)
def even(ctx: StepContext) -> int:
    return _answer()


@flow("clan", steps=[transfer])
def clan(ctx: FlowContext, names: list[str]) -> int:
    if not names:
        raise ValueError("nobody of that name")
    children = [ctx.start_child(clan, []), *(ctx.start_child("ask") for _ in names)]
    return len(ctx.await_children(children, mode="settled"))


@flow("goes-on")
def goes_on(ctx: FlowContext, number: int) -> None:
    if number < 4:
        ctx.continue_as_new(goes_on, number + 1)
    ctx.suspend("Go")


@flow("pay", steps=[transfer, second_transfer])
def pay(ctx: FlowContext, account: str = "DE02", amount: Any = 1, twice: bool = False) -> Any:
    first = ctx.run(transfer, account, amount)
    return [first, ctx.run(second_transfer)] if twice else first


@flow("receipts", steps=[receipt, even])
def receipts(ctx: FlowContext, which: str) -> Any:
    return ctx.run(receipt) if which == "receipt" else ctx.run(even)


@tool
def label(ctx: StepContext, text: str) -> str:
    return text


@flow("ask", steps=[label])
def ask(ctx: FlowContext, text: str = "", rounds: int = 1) -> list[Any]:
    ctx.run(label, text)
    return [ctx.suspend("Approval", correlation_key=text or None) for _ in range(rounds)]


@flow("nap")
def nap(ctx: FlowContext, hours: float = 1) -> str:
    ctx.sleep(timedelta(hours=hours))
    return "awake"


@flow("listen")
def listen(ctx: FlowContext) -> Any:
    return ctx.receive("carrier")


# Errors that the body raises, one a run.
bugs: list[BaseException] = []


@flow("buggy", on_error="park")
def buggy(ctx: FlowContext) -> str:
    if bugs:
        raise bugs.pop(0)
    return "fine"


# Not empty: "shifting" has been edited, and asks for its first step no more.
edits: list[str] = []


@flow("shifting", steps=[label], divergence="fail")
def shifting(ctx: FlowContext) -> str:
    if not edits:
        ctx.run(label, "first")
    ctx.suspend("Go")
    return "fine"


@flow("broken")
def broken(ctx: FlowContext, text: str) -> None:
    raise RuntimeError(text)


def _approval(ctx: FlowContext) -> Any:
    return ctx.suspend("Approval", timeout=timedelta(hours=3))


def _customs(ctx: FlowContext) -> Any:
    return ctx.suspend("Customs")


@flow("split", steps=[transfer])
def split(ctx: FlowContext) -> dict[str, Any]:
    return ctx.parallel({"ask": _approval, "clear": _customs, "pay": transfer.bind("DE02", 1)})


@tool
def think(ctx: StepContext, messages: list[Any], tools: list[Any]) -> ModelTurn:
    ctx.meter("usd", Decimal("0.61"))
    return ModelTurn(
        "done" if len(messages) > 1 else "", [ToolCall("1", "even", {})] if len(messages) == 1 else []
    )


@flow("agent", steps=[think, even], step_families=["loop"])
def agent(ctx: FlowContext) -> str:
    limit = {"usd": Decimal("0.50")}
    return ctx.agent_loop("loop", model=think, tools=[even], messages=[{"role": "user"}], budget=limit).text
