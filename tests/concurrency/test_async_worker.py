"""Async bodies of a worker that dies, or is told to end: the rules are those of plain ones."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.concurrency.test_database_faults import cut_all_connections
from tests.concurrency.test_zombie import NO_RENEWAL, SHORT, stop, take_over, wake
from tests.crash.kit import (
    Lab,
    check_history,
    eventually,
    finished,
    kinds,
    lines_with,
    only_postgresql,
    state,
)

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


@pytest.mark.parametrize("flow", ["async-tool-gate", "async-tool-gate-once"])
def test_a_worker_that_was_stopped_past_its_leases_writes_nothing(lab: Lab, flow: str):
    """Three bodies in one loop, each inside an async tool: their successors have gone on before it wakes."""
    names = ["x0", "x1", "x2"]
    lab.run("start", flow, *names, loom=NO_RENEWAL)
    worker = lab.spawn("command", *WORKER, "--max-executions", "3", loom=NO_RENEWAL)
    for name in names:
        lab.await_effect(name)
    stop(worker)
    lab.await_expiry(leases=3)
    again = flow == "async-tool-gate"
    if again:
        for name in names:
            lab.open_gate(name)
    take_over(lab)
    if again:
        eventually(lambda: _served(lab) and all(map(finished, names)), "the timers are served too")
    before = {name: check_history(name) for name in names}
    for name in names:
        lab.open_gate(name)
    wake(worker)
    assert worker.wait() == 0, worker.log
    assert len(lines_with(worker.log, "StaleFenceError")) >= 3, worker.log
    for name in names:
        after = check_history(name)
        assert after[: len(before[name])] == before[name]
        late = [event.kind for event in after[len(before[name]) :]]
        assert late == ([] if again else [Kind.EFFECT_RETURNED_LATE])
        inside = [line for line in lab.effects(name) if line["step"].startswith("agated")]
        assert len(inside) == (2 if again else 1)


def _served(lab: Lab) -> bool:
    lab.run("command", "run_loom_worker", "--once", loom=SHORT)
    return True


@only_postgresql
@pytest.mark.parametrize("flow", ["async-tool-gate", "async-gate"])
def test_all_connections_are_cut_while_many_async_bodies_run(lab: Lab, flow: str):
    """Those that wait, those that a tool holds and those over which appends are on their way; nothing is lost."""
    names = [f"x{number}" for number in range(30)]
    lab.run("start", flow, *names, loom=SHORT)
    worker = lab.spawn("command", "run_loom_worker", loom=SHORT)
    inside = 30 if flow == "async-tool-gate" else 16  # as many as there are threads for plain tools
    eventually(lambda: len(lab.effects()) >= inside, "they are at work")
    for name in names:
        cut_all_connections()
        lab.open_gate(name)
    eventually(lambda: all(map(finished, names)), "all end", instead=lambda: worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait(SOON) == 0, worker.log
    for name in names:
        assert state(name).status is Status.COMPLETED
        check_history(name)
