"""Async bodies of a worker that dies, or is told to end: the rules are those of plain ones."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.kit import Lab, check_history, eventually, kinds, state

SOON = 30.0
WORKER = ("run_loom_worker", "--no-timers", "--no-schedules", "--no-recovery")


def in_doubt(execution_id: str) -> bool:
    return kinds(execution_id)[-2:] == ["EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]


@pytest.mark.parametrize("flow", ["async-idempotent", "async-not-idempotent"])
def test_a_worker_is_killed_inside_async_tools(lab: Lab, flow: str):
    """One process, one loop, three tools in it: each execution is another's, or a person's, by its own rules."""
    for number in range(3):
        lab.run("start", flow, f"x{number}", args=[600.0])
    worker = lab.spawn("command", *WORKER, "--concurrency", "1", "--async-concurrency", "3")
    for number in range(3):
        lab.await_effect(f"x{number}")
    worker.kill()
    lab.pass_time()
    again = lab.spawn("command", "run_loom_worker", "--no-timers", "--no-schedules", "--grace", "0.2")
    for number in range(3):
        execution_id = f"x{number}"
        if flow == "async-idempotent":
            lab.await_effect(execution_id, count=2)
        else:
            eventually(partial(in_doubt, execution_id), "it is put in doubt")
            assert len(lab.effects(execution_id)) == 1
        check_history(execution_id)
    again.kill()


@pytest.mark.parametrize("flow", ["async-idempotent", "async-not-idempotent"])
def test_an_async_tool_outlives_the_grace_time(lab: Lab, flow: str):
    """Told to end, a worker waits for what hangs as long as it may, hands it back and ends with 0."""
    lab.run("start", flow, "x", args=[600.0])
    worker = lab.spawn("command", *WORKER, "--grace", "0.2")
    lab.await_effect("x")
    worker.signal(signal.SIGTERM)
    assert worker.wait(SOON) == 0, worker.log
    assert loom.store.held("x") is None
    assert in_doubt("x") == (flow == "async-not-idempotent")
    check_history("x")


def test_a_drain_keeps_an_async_step_and_hands_back_the_rest(lab: Lab):
    """A plain step of an async flow, in a thread beside the loop, ends within the grace time and is recorded."""
    lab.run("start", "async-gate", "x")
    worker = lab.spawn("command", *WORKER)
    lab.await_effect("x")
    worker.signal(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log, "the signal is heard")
    lab.open_gate("x")
    assert worker.wait(SOON) == 0, worker.log
    assert kinds("x")[-1] == "STEP_COMPLETED"
    assert loom.store.held("x") is None
    lab.run("command", "run_loom_worker", "--once")
    assert state("x").status is Status.COMPLETED
    assert len(lab.effects("x", "gated")) == 1
    check_history("x")
