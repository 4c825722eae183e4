"""Who goes on with an execution after an operator's act."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command

from loom_django import FlowContext, definitions, flow, loom
from loom_django.kernel.state import Status
from loom_django.services import operators

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def parked() -> Iterator[Any]:
    """An execution that waits for Go, under the inline dispatcher."""

    @flow("hand.over")
    def body(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        return "done"

    loom.reset()
    yield body.start()
    definitions.registry.forget("hand.over")
    loom.reset()


def resume(handle: Any) -> str:
    shell = operators.Operator(name="shell:test", user=None)
    return operators.resume_execution(loom, shell, handle.id, "Go", reason="because").runs


def test_without_any_loop_the_act_runs_the_flow_after_its_commit(parked: Any) -> None:
    """Somebody has to."""
    assert resume(parked) == "here"
    assert parked.status == Status.COMPLETED


def test_a_loop_that_was_seen_lately_goes_on_instead(parked: Any) -> None:
    """The rest of the flow does not run in the operator's request; an inline timer loop takes it up."""
    call_command("run_loom_timers", "--once", verbosity=0)
    assert resume(parked) == "worker"
    assert parked.status == Status.RUNNING
    assert loom.store.held(parked.id) is None
    loom.store.shift_clock(timedelta(seconds=2))
    call_command("run_loom_timers", "--once", verbosity=0)
    assert parked.result() == "done"


def test_a_loop_that_has_been_silent_is_not_counted_on(parked: Any) -> None:
    """Seen means within two leases."""
    call_command("run_loom_worker", "--once", verbosity=0)
    loom.dispatcher = None
    loom.store.shift_clock(timedelta(seconds=121))
    assert resume(parked) == "here"
