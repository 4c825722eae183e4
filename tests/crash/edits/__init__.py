"""One module of flows as it was before a deploy and as it is after it: the rows of docs/explanation/edit_table.csv.

``before`` and ``after`` declare the same flows, one for each edit and guard; a process loads one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loom_django import FlowContext, StepContext, flow, tool
from loom_django.definitions import registry
from tests.crash.flows import effect

GUARDS: Mapping[str, Mapping[str, Any]] = {
    "off": {"divergence": "off"},
    "warn": {"divergence": "warn"},
    "fail": {"divergence": "fail"},
    "fingerprint": {"divergence": "fail", "code_fingerprint": "auto"},
}
# Of each edit there is a row of the table for each guard, and a cell for each state.
EDITS = (
    "nothing",
    "rename a local",
    "insert a step after",
    "insert a step before",
    "drop a step",
    "reorder two steps",
    "change a branch",
    "change a function that the body calls",
    "change a tool's idempotency",
    "bump the version",
)
STATES = ("running", "parked", "sleeping")


@tool(idempotent=True)
def reserve(ctx: StepContext) -> None:
    effect(ctx)


@tool(idempotent=True)
def pack(ctx: StepContext) -> None:
    effect(ctx)


@tool(idempotent=True)
def charge(ctx: StepContext) -> None:
    effect(ctx)


@tool(name="charge")
def undeclared_charge(ctx: StepContext) -> None:
    effect(ctx)


@tool(idempotent=True)
def notify(ctx: StepContext) -> None:
    effect(ctx)


STEPS = (reserve, pack, charge, notify)


def stop(ctx: FlowContext, state: str) -> None:
    """Where the deploy finds an execution that is not cut off in a step."""
    if state == "parked":
        ctx.suspend("go")
    elif state == "sleeping":
        ctx.sleep(3600)


def flow_id(edit: str, guard: str) -> str:
    return f"edit-{edit}-{guard}"


def execution_id(edit: str, guard: str, state: str) -> str:
    return f"{edit}/{guard}/{state}"


def executions() -> Iterator[tuple[str, str, str]]:
    return itertools.product(EDITS, GUARDS, STATES)


def identities() -> dict[str, list[str]]:
    """The structural hash and the fingerprint of each edit's flow, as this process has it."""
    found = {edit: registry.versions(flow_id(edit, "fingerprint")) for edit in EDITS}
    return {
        edit: [flow.flow_hash, flow.code_hash]
        for edit, versions in found.items()
        for flow in versions.values()
    }


def declare(edit: str, body: Callable[..., Any], **options: Any) -> None:
    """A flow under each guard."""
    for guard, guarded in GUARDS.items():
        flow(flow_id(edit, guard), **{"steps": STEPS, **guarded, **options})(body)
