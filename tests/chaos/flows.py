"""The flows of the fleet, and the outside world that they act on: a ledger file, on disk before a tool goes on."""

from __future__ import annotations

import json
import os
import time

from loom_django import FlowContext, StepContext, flow, tool
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
