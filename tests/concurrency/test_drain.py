"""A worker that is told to end: nothing new, the step in hand is kept, the rest is handed back."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.kit import Child, Lab, check_history, eventually, kinds, standing, state

# Far more than a drain takes, far less than a step in these tests would.
SOON = 30.0
WORKER = ("run_loom_worker", "--no-recovery", "--no-timers")


def stop(worker: Child, number: int = signal.SIGTERM) -> None:
    worker.signal(number)
    eventually(lambda: "draining" in worker.log, "the signal is heard")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_keeps_the_step_and_hands_back_the_rest(lab: Lab, number: int):
    """Told to end inside a step: no new claim, the step is recorded, exit 0, and the rest is ready at once."""
    lab.run("start", "gate", "x")
    worker = lab.spawn("command", *WORKER)
    lab.await_effect("x")
    stop(worker, number)
    lab.run("start", "gate", "y")
    lab.open_gate("x")
    lab.open_gate("y")
    assert worker.wait(SOON) == 0, worker.log
    assert standing("x") == standing("y") == "ready"
    assert kinds("x")[-1] == "STEP_COMPLETED"
    assert kinds("y") == ["EXECUTION_STARTED"]
    lab.run("command", "run_loom_worker", "--once")
    assert len(lab.effects("x", "gated")) == 1
    assert {state(id).status for id in "xy"} == {Status.COMPLETED}
    check_history("x")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(lab: Lab, number: int):
    """Whoever asks twice does not wait for the step; its lease, or recovery, hands the execution on."""
    lab.run("start", "gate", "x")
    worker = lab.spawn("command", *WORKER)
    lab.await_effect("x")
    stop(worker, number)
    worker.signal(number)
    assert worker.wait(SOON) == 128 + number, worker.log
    assert standing("x") == "held"
    lab.open_gate("x")
    lab.pass_time()
    lab.run("heal")
    assert state("x").status is Status.COMPLETED
    assert len(lab.effects("x", "gated")) == 2
    check_history("x")


@pytest.mark.parametrize("flow", ["gate", "gate-once"])
def test_a_step_that_outlives_the_grace_time(lab: Lab, flow: str):
    """The process ends with 0; somebody else goes on at once, or a person is asked."""
    lab.run("start", flow, "x")
    worker = lab.spawn("command", *WORKER, "--grace", "0.2")
    lab.await_effect("x")
    stop(worker)
    assert worker.wait(SOON) == 0, worker.log
    assert loom.store.held("x") is None, "nobody has to wait for the lease of a process that has ended"
    lab.open_gate("x")
    if flow == "gate-once":
        assert kinds("x")[-2:] == ["EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]
        lab.run("resolve", "x", "gated_once", "completed-with-result", output="settled")
    lab.run("command", "run_loom_worker", "--once")
    assert state("x").status is Status.COMPLETED
    assert len(lab.effects("x", step="gated")) == (2 if flow == "gate" else 0)
    assert len(lab.effects("x", step="gated_once")) == (1 if flow == "gate-once" else 0)
    check_history("x")


def test_a_worker_outside_the_main_thread(lab: Lab):
    """Signals are the main thread's; a worker elsewhere does without them."""
    lab.run("start", "one-idempotent", "x", args=[0])
    lab.run("in_thread", "command", "run_loom_worker", "--once")
    assert state("x").status is Status.COMPLETED


def test_a_process_whose_leases_are_not_renewed_ends(lab: Lab):
    """A dead inner thread ends the process with a code that says so, instead of working on without it."""
    short = {"LEASE_TTL": 0.5, "LEASE_RENEW_INTERVAL": 0.1, "POLL_INTERVAL": 0.05}
    lab.run("start", "gate", "x", loom=short)
    acts: list[Any] = [("break_lease_keeper", (), {}), ("command", WORKER, {})]
    worker = lab.spawn_acts(acts, loom=short)
    lab.await_effect("x")
    eventually(lambda: "draining" in worker.log, "it notices")
    lab.open_gate("x")
    assert worker.wait(SOON) == 1, worker.log
    lab.pass_time()
    lab.run("heal")
    assert state("x").status is Status.COMPLETED
    check_history("x")
