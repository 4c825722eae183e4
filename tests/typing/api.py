"""What a type checker must accept and refuse. Never run: `make types` reads it, and an error that a line says is
expected (``type: ignore[code]``) but does not come is an error itself."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, assert_type

from loom_django import (
    AgentResult,
    AsyncFlowContext,
    Flow,
    FlowContext,
    Handle,
    ModelTurn,
    RetryPolicy,
    Schedule,
    StepContext,
    Tool,
    flow,
    loom,
    schedule,
    tool,
)


@tool(idempotent=True, retry=RetryPolicy(max_attempts=5), timeout=30)
def charge(ctx: StepContext, order_id: int, amount: Decimal) -> dict[str, Any]:
    return {"key": ctx.idempotency_key}


@tool
async def fetch(ctx: StepContext, url: str) -> bytes:
    return b""


@tool(transactional=True)
def mark(ctx: StepContext, order_id: int, *, by: str) -> None:
    return None


unwrapped: Tool[..., bytes] = fetch
still_wrapped: Tool[..., int] = fetch  # type: ignore[assignment]


@flow("typed.order", version=1, steps=[charge, mark])
def order(ctx: FlowContext, order_id: int, amount: Decimal = Decimal(1)) -> str:
    assert_type(ctx.run(charge, order_id, amount), dict[str, Any])
    assert_type(ctx.run(charge.keyed("a"), order_id, amount), dict[str, Any])
    assert_type(ctx.run(charge.named("rest"), order_id, amount), dict[str, Any])
    assert_type(ctx.decide("flag", lambda: True), bool)
    ctx.run(mark, order_id, by="anna")
    ctx.run(charge, order_id)  # type: ignore[call-arg]
    ctx.run(charge, order_id, "9.90")  # type: ignore[arg-type]
    ctx.run(mark, order_id, "anna")  # type: ignore[call-arg]
    charge(ctx, order_id, amount)  # type: ignore[operator]
    ctx.sleep(timedelta(days=1))
    return "done"


@flow("typed.endless")
def endless(ctx: FlowContext, order_id: int) -> str:
    if order_id > 7:
        ctx.continue_as_new("typed.order", order_id)
    if order_id > 6:
        ctx.continue_as_new(order, "seven")  # type: ignore[call-overload]
    ctx.continue_as_new(order, order_id, amount=Decimal(2))  # needs no return behind it


@flow("typed.endless.async")
async def endless_async(ctx: AsyncFlowContext, url: str) -> int:
    await ctx.continue_as_new(crawl, url)


@flow("typed.async", steps=[fetch])
async def crawl(ctx: AsyncFlowContext, url: str) -> int:
    assert_type(await ctx.run(fetch, url), bytes)
    await ctx.sleep(5)
    return 1


@tool
def think(ctx: StepContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ModelTurn:
    return ModelTurn("hello")


@flow("typed.agent", steps=[think, charge], step_families=["agent"])
def agent(ctx: FlowContext) -> str:
    budget = {"usd": Decimal("0.50")}
    result = ctx.agent_loop("agent", model=think, tools=[charge, mark], messages=[{"a": 1}], budget=budget)
    assert_type(result, AgentResult)
    ctx.agent_loop("other", model=charge, tools=[], messages=[])  # type: ignore[arg-type]
    ctx.agent_loop("third", model=think, tools=[], messages=[], budget={"usd": 0.5})  # type: ignore[dict-item]
    assert_type(charge.schema, dict[str, Any])
    return result.text


@flow("typed.agent.async", steps=[think], step_families=["agent"])
async def async_agent(ctx: AsyncFlowContext) -> bool:
    result = await ctx.agent_loop("agent", model=think, tools=[], messages=[])
    return result.finished


def starts() -> None:
    assert_type(order.start(1), Handle[str])
    assert_type(order.using(execution_id="o1").start(1, Decimal(2)).result(), str)
    assert_type(crawl.start("x"), Handle[int])
    assert_type(order.handle("o1"), Handle[str])
    order.start("1")  # type: ignore[arg-type]
    order.start()  # type: ignore[call-arg]
    order(1)  # type: ignore[operator]
    loom.resolve("o1", "charge", "retry_fresh")  # type: ignore[arg-type]
    loom.resolve("o1", "charge", "completed-with-result", output=None)


def schedules() -> None:
    nightly = schedule("nightly", flow=order, cron="30 3 * * *", args=(1,), catch_up="latest")
    assert_type(nightly, Schedule)
    assert_type(nightly.occurrences(datetime.min, datetime.max), list[datetime])
    assert_type(loom.pause_schedule("nightly", reason="r"), bool)
    assert_type(loom.trigger_schedule("nightly", reason="r"), Handle[Any])
    schedule("nightly", flow=order, cron="30 3 * * *", overlap="wait")  # type: ignore[arg-type]
    schedule("nightly", flow=order)  # type: ignore[call-arg]
    loom.pause_schedule("nightly")  # type: ignore[call-arg]


result_of_order: Flow[..., str] = order
not_its_result: Flow[..., int] = order  # type: ignore[assignment]
