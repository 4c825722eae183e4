"""A lease vouches for a process, whatever the step in hand does to it; until it hangs for too long."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.kit import Lab, check_history, eventually, finished, only_postgresql, state

# The fault that this is about is ten seconds under a lease of two.
LEASE = {"LEASE_TTL": 1.0, "LEASE_RENEW_INTERVAL": 0.2, "POLL_INTERVAL": 0.05}
LONG = 3.0
WORKER = ("run_loom_worker", "--no-timers", "--no-schedules")
SOON = 30.0


@pytest.mark.parametrize("flow", ["burns", "blocks"])
def test_a_step_that_takes_all_of_its_process_is_not_taken_over(lab: Lab, flow: str):
    """Pure Python without a pause, and an event loop that stands still: the lease is renewed beside them."""
    lab.run("start", flow, "x", args=[LONG])
    worker = lab.spawn("command", *WORKER, "--no-recovery", loom=LEASE)
    lab.await_effect("x")
    held = loom.store.held("x")
    assert held is not None
    rival = lab.spawn("command", *WORKER, loom=LEASE)
    eventually(lambda: finished("x"), "it ends")
    assert len(lab.effects("x")) == 1
    assert lab.effects("x")[0]["pid"] == worker.pid
    for child in (worker, rival):
        assert "a lease was lost" not in child.log
        child.signal(signal.SIGTERM)
        assert child.wait(SOON) == 0, child.log
    assert loom.store.fence("x") == 1, "nobody has fenced its holder out"
    check_history("x")


def test_a_body_that_hangs_is_begun_again_elsewhere(lab: Lab):
    """Its renewal ends with EXECUTE_TIMEOUT; what it brings later is refused."""
    settings = {**LEASE, "EXECUTE_TIMEOUT": 1.0}
    lab.run("start", "gate", "x", loom=settings)
    hung = lab.spawn("command", *WORKER, "--no-recovery", "--max-executions", "1", loom=settings)
    lab.await_effect("x")
    other = lab.spawn("command", *WORKER, loom=LEASE)
    lab.await_effect("x", count=2)
    assert "longer than EXECUTE_TIMEOUT" in hung.log
    assert [line["pid"] for line in lab.effects("x")] == [hung.pid, other.pid]
    lab.open_gate("x")
    eventually(lambda: finished("x"), "it ends")
    assert hung.wait(SOON) == 0, hung.log
    assert state("x").status is Status.COMPLETED
    assert [line["pid"] for line in lab.effects("x", "charge")] == [other.pid]
    check_history("x")


def test_a_process_whose_bodies_die_ends(lab: Lab):
    """With a code and a line that say so; what it had claimed is another's at once."""
    lab.run("start", "one-idempotent", "x", args=[0])
    acts: list[Any] = [("break_bodies", (), {}), ("command", (*WORKER, "--grace", "0.2"), {})]
    worker = lab.spawn_acts(acts)
    assert worker.wait(SOON) == 1, worker.log
    assert "a thread that runs bodies broke off; this process ends" in worker.log
    assert loom.store.held("x") is None
    lab.run("command", "run_loom_worker", "--once")
    assert state("x").status is Status.COMPLETED


@only_postgresql
def test_a_process_that_cannot_hear_ends(lab: Lab):
    """It would serve on, more slowly, and nobody would know why."""
    acts: list[Any] = [("break_listener", (), {}), ("command", WORKER, {})]
    worker = lab.spawn_acts(acts)
    assert worker.wait(SOON) == 1, worker.log
    assert "notices are not heard any more; this process ends" in worker.log


# How many sleep; ten thousand in the promise. A thread or a slot for each would be hundreds of megabytes.
SLEEPERS = 1_000
MOST_GROWTH = 4 * 1024 * 1024


def test_what_sleeps_costs_rows_only(lab: Lab):
    """Neither memory nor a thread of the worker that parked it, and no place among those that it runs."""
    measured = lab.run("sleep_many", SLEEPERS, "x")
    half, whole = measured["resident"]
    assert whole - half < MOST_GROWTH, measured
    assert measured["threads"] == []
    assert loom.store.upcoming().timer is not None
