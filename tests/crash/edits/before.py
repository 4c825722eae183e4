"""The flows as they were when the executions began."""

from __future__ import annotations

from typing import Any

from loom_django import FlowContext
from tests.crash.edits import charge, declare, pack, reserve, stop


def chosen() -> Any:
    return pack


def body(ctx: FlowContext, state: str) -> int:
    total = 1
    ctx.run(reserve)
    ctx.run(pack)
    stop(ctx, state)
    ctx.run(charge)
    return total


def through_a_function(ctx: FlowContext, state: str) -> None:
    ctx.run(reserve)
    ctx.run(chosen())
    stop(ctx, state)
    ctx.run(charge)


for edit in (
    "nothing",
    "rename a local",
    "insert a step after",
    "insert a step before",
    "drop a step",
    "reorder two steps",
    "change a branch",
    "change a tool's idempotency",
    "bump the version",
):
    declare(edit, body)
declare("change a function that the body calls", through_a_function)
