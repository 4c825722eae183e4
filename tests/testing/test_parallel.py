"""The harness with parallel branches and children: replayed at each park, and found out when they differ."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import TestCase

from loom_django import FlowContext, StepContext, flow, loom, tool
from loom_django.testing import NonDeterminismError, harness

CHANCE = iter(range(1000))


@tool(idempotent=True)
def pack(ctx: StepContext, sku: str) -> str:
    return f"packed {sku}"


@flow("testing.parallel", steps=[pack])
def parallel_flow(ctx: FlowContext, skus: list[str]) -> dict[str, Any]:
    def approved(branch: FlowContext) -> Any:
        branch.run(pack, "first")
        return branch.suspend("Approval")

    branches: dict[str, Any] = {sku: pack.bind(sku) for sku in skus}
    return ctx.parallel({**branches, "asks": approved})


@flow("testing.parallel.chance", steps=[pack])
def by_chance(ctx: FlowContext) -> Any:
    def unsteady(branch: FlowContext) -> Any:
        branch.run(pack, str(next(CHANCE)))
        return branch.suspend("Approval")

    return ctx.parallel({"a": unsteady, "b": pack.bind("b")})


class ParallelTests(TestCase):
    def setUp(self) -> None:
        self.h = self.enterContext(harness())

    def test_branches_replay(self) -> None:
        """One after the other in a TestCase, parked together, served from the log at each replay."""
        self.h.stub(pack, calls=lambda ctx, sku: sku.upper())
        handle = parallel_flow.using(execution_id="p").start(["a", "b"])
        self.h.run()
        loom.resume("p", event_type="Approval", payload="yes")
        self.h.run()
        assert handle.result() == {"a": "A", "b": "B", "asks": "yes"}
        assert len(self.h.calls(pack)) == 3

    def test_a_branch_that_asks_for_something_else(self) -> None:
        """It is found at its first park, and told with its step."""
        by_chance.using(execution_id="c").start()
        with pytest.raises(NonDeterminismError) as found:
            self.h.run()
        assert found.value.step_id == "pack#1.a"


@flow("testing.child", steps=[pack])
def child_flow(ctx: FlowContext, sku: str) -> str:
    return ctx.run(pack, sku)


@flow("testing.parent")
def parent_flow(ctx: FlowContext) -> Any:
    children = [ctx.start_child(child_flow, sku) for sku in "ab"]
    return [*ctx.await_children(children), ctx.suspend("Approval")]


class ChildrenTests(TestCase):
    def test_children_run_and_replay(self) -> None:
        """run() goes on until parent and children are parked or over; the parent replays with what it has seen."""
        h = self.enterContext(harness())
        handle = parent_flow.using(execution_id="p").start()
        h.run()
        loom.resume("p", event_type="Approval", payload="yes")
        h.run()
        assert handle.result() == ["packed a", "packed b", "yes"]


@tool
def fail_packing(ctx: StepContext) -> None:
    raise ValueError("no box")


@tool
def unpack(ctx: StepContext, sku: str) -> None: ...


@flow("testing.saga", steps=[pack, fail_packing, unpack])
def saga_flow(ctx: FlowContext) -> None:
    def choose(inner: FlowContext) -> str:
        return inner.run(pack, "a")

    ctx.decide("which", choose)
    ctx.on_failure(unpack, "a")
    ctx.suspend("Approval")
    ctx.run(fail_packing)


class SagaTests(TestCase):
    def test_deciders_and_compensations_replay(self) -> None:
        """Their steps are asked for by the log, or by the failure, and by nobody else."""
        h = self.enterContext(harness())
        handle = saga_flow.using(execution_id="s").start()
        h.run()
        loom.resume("s", event_type="Approval")
        h.run()
        assert handle.status == "FAILED"
        assert [call.step_id for call in h.calls(unpack)] == ["unpack"]
