"""The flows of the fleet, and the outside world that they act on: a ledger file, on disk before a tool goes on."""

from __future__ import annotations

import asyncio
import json
import os
import time

from loom_django import AsyncFlowContext, FlowContext, StepContext, flow, tool
from tests.chaos.ledger import LEDGER
from tests.shop.models import Order


def write(line: dict[str, object]) -> None:
    ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(ledger, (json.dumps(line) + "\n").encode())
    finally:
        os.close(ledger)


def act(ctx: StepContext, kind: str) -> None:
    write({"kind": kind, "execution": ctx.execution_id, "step": ctx.step_id, "key": ctx.idempotency_key})


@tool(idempotent=True)
def call(ctx: StepContext, pause: float) -> str:
    act(ctx, "call")
    time.sleep(pause)
    return ctx.idempotency_key


@tool(idempotent=False)
def transfer(ctx: StepContext, pause: float) -> str:
    act(ctx, "transfer")
    time.sleep(pause)
    return ctx.idempotency_key


@tool(transactional=True)
def book(ctx: StepContext, pause: float) -> str:
    Order.objects.create(customer=ctx.execution_id, amount=1, note=ctx.step_id)
    time.sleep(pause)
    return ctx.idempotency_key


# What each of the ten steps is.
PLAN = (call, book, transfer, call, book, call, transfer, book, call, call)


@flow("ten-steps", steps=[call, transfer, book])
def ten_steps(ctx: FlowContext, pauses: list[float]) -> int:
    for number, (step, pause) in enumerate(zip(PLAN, pauses, strict=True)):
        ctx.run(step.keyed(number), pause)
        if number == 4:
            ctx.sleep(0.5)
    return len(PLAN)


@tool(idempotent=True, name="call")
async def acall(ctx: StepContext, pause: float) -> str:
    act(ctx, "call")
    await asyncio.sleep(pause)
    return ctx.idempotency_key


@tool(idempotent=False, name="transfer")
async def atransfer(ctx: StepContext, pause: float) -> str:
    act(ctx, "transfer")
    await asyncio.sleep(pause)
    return ctx.idempotency_key


ASYNC = {call: acall, transfer: atransfer, book: book}


@flow("async-ten-steps", steps=[acall, atransfer, book])
async def async_ten_steps(ctx: AsyncFlowContext, pauses: list[float]) -> int:
    for number, (step, pause) in enumerate(zip(PLAN, pauses, strict=True)):
        await ctx.run(ASYNC[step].keyed(number), pause)
        if number == 4:
            await ctx.sleep(0.5)
    return len(PLAN)


@flow("small", steps=[call, book])
def small(ctx: FlowContext, pause: float) -> str:
    ctx.run(call, pause)
    return ctx.run(book, pause)


@flow("mixed", steps=[call, transfer, book])
def mixed(ctx: FlowContext, pauses: list[float]) -> list[str]:
    """Branches, children and a message; as many steps of each kind as MIXED says."""

    def hears(branch: FlowContext) -> str:
        branch.run(book, pauses[0])
        heard = branch.receive("news")
        branch.run(call, pauses[1])
        return str(heard)

    children = [ctx.start_child(small, pause) for pause in pauses[:2]]
    said = ctx.parallel(
        {"hears": hears, "calls": call.bind(pauses[2]), "transfers": transfer.bind(pauses[3])}
    )
    return [said["hears"], *ctx.await_children(children)]


@flow("async-mixed", steps=[acall, atransfer, book])
async def async_mixed(ctx: AsyncFlowContext, pauses: list[float]) -> list[str]:
    """The same in tasks; its children are plain."""

    async def hears(branch: AsyncFlowContext) -> str:
        await branch.run(book, pauses[0])
        heard = await branch.receive("news")
        await branch.run(acall, pauses[1])
        return str(heard)

    children = [await ctx.start_child(small, pause) for pause in pauses[:2]]
    said = await ctx.parallel(
        {"hears": hears, "calls": acall.bind(pauses[2]), "transfers": atransfer.bind(pauses[3])}
    )
    return [said["hears"], *await ctx.await_children(children)]


# The steps of one such execution by themselves, and with those of its two children.
MIXED = {"call": 2, "transfer": 1, "book": 1}
MIXED_AND_CHILDREN = {"call": 4, "transfer": 1, "book": 3}


@tool(idempotent=True)
def serve(ctx: StepContext) -> None:
    """Says when it began and ended, so that the ledger tells how many ran at a time in one process."""
    line = {"kind": "serve", "execution": ctx.execution_id, "pid": os.getpid()}
    write({**line, "at": time.monotonic(), "by": 1})
    time.sleep(0.002)
    write({**line, "at": time.monotonic(), "by": -1})


@flow("sleeper", steps=[serve])
def sleeper(ctx: FlowContext, seconds: float) -> None:
    ctx.sleep(seconds)
    ctx.run(serve)


@flow("abandoned", steps=[serve])
def abandoned(ctx: FlowContext) -> None:
    ctx.run(serve)
