"""The flows as they are deployed while the executions live."""

from __future__ import annotations

from typing import Any

from loom_django import FlowContext
from tests.crash.edits import STEPS, charge, declare, notify, pack, reserve, stop, undeclared_charge


def chosen() -> Any:
    return notify


def body(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(reserve)
    ctx.run(pack)
    stop(ctx, state)
    ctx.run(charge)
    return total


def renamed(ctx: FlowContext, state: str) -> int:
    amount = 1
    ctx.run(reserve)
    ctx.run(pack)
    stop(ctx, state)
    ctx.run(charge)
    return amount


def inserted_after(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(reserve)
    ctx.run(pack)
    stop(ctx, state)
    ctx.run(charge)
    ctx.run(notify)
    return total


def inserted_before(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(reserve)
    ctx.run(notify)
    ctx.run(pack)
    stop(ctx, state)
    ctx.run(charge)
    return total


def dropped(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(reserve)
    stop(ctx, state)
    ctx.run(charge)
    return total


def reordered(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(pack)
    ctx.run(reserve)
    stop(ctx, state)
    ctx.run(charge)
    return total


def branched(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(reserve)
    ctx.run(pack if total > 1 else notify)
    stop(ctx, state)
    ctx.run(charge)
    return total


def through_a_function(ctx: FlowContext, state: str) -> None:
    ctx.run(reserve)
    ctx.run(chosen())
    stop(ctx, state)
    ctx.run(charge)


declare("nothing", body)
declare("rename a local", renamed)
declare("insert a step after", inserted_after)
declare("insert a step before", inserted_before)
declare("drop a step", dropped)
declare("reorder two steps", reordered)
declare("change a branch", branched)
declare(
    "change a tool's idempotency",
    body,
    steps=[undeclared_charge if step is charge else step for step in STEPS],
)
declare("bump the version", body, version=2)
declare("change a function that the body calls", through_a_function)
