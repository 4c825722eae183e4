"""A worker that was stopped past its lease and wakes: its successor has finished, and it can write nothing."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from django.db import connection

from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from loom_django.stores.base import Lease
from tests.crash.kit import (
    Child,
    Lab,
    check_history,
    eventually,
    finished,
    kinds,
    lines_with,
    on_postgresql,
    standing,
    state,
)

SHORT = {"LEASE_TTL": 0.5, "LEASE_RENEW_INTERVAL": 0.1, "POLL_INTERVAL": 0.05}
# The zombie's first act after it wakes is its append, since its next renewal is far away.
NO_RENEWAL = {**SHORT, "LEASE_RENEW_INTERVAL": 600}
# It claims once and looks for nothing more, so that no other thread of it is in the middle of a statement.
ALONE = ("run_loom_worker", "--no-recovery", "--no-timers", "--max-executions", "1")
SUCCESSOR = ("run_loom_worker", "--once")


def stop_inside_a_step(lab: Lab, settings: dict[str, Any], flow: str = "gate") -> tuple[Child, Lease]:
    """A worker that stands still inside the first step of "x", with its lease over; and that lease."""
    lab.run("start", flow, "x", loom=settings)
    worker = lab.spawn("command", *ALONE, loom=settings)
    lab.await_effect("x")
    held = loom.store.held("x")
    assert held is not None
    stop(worker)
    lab.await_expiry()
    return worker, held


def stop(worker: Child) -> None:
    """Stop a process, outside its own writes: one stopped inside keeps SQLite's only lock."""
    while True:
        worker.signal(signal.SIGSTOP)
        worker.wait_until_stopped()
        if may_write():
            return
        worker.signal(signal.SIGCONT)


def may_write() -> bool:
    if on_postgresql():
        return True
    with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as own:
        try:
            own.execute("begin immediate")
        except sqlite3.OperationalError:
            return False
    return True


def take_over(lab: Lab) -> None:
    lab.run("command", "loom_recover", loom=SHORT)
    lab.run("command", *SUCCESSOR, loom=SHORT)


def wake(worker: Child) -> None:
    worker.signal(signal.SIGCONT)


def end(worker: Child) -> None:
    """It ends by itself when its one body is over, and its end is no failure."""
    assert worker.wait() == 0, worker.log


def test_an_append_of_a_zombie_is_refused(lab: Lab):
    """Its step has ended, its outcome is refused, and the log holds the history of its successor alone."""
    worker, _ = stop_inside_a_step(lab, NO_RENEWAL)
    lab.open_gate("x")
    take_over(lab)
    before = check_history("x")
    assert state("x").status is Status.COMPLETED
    wake(worker)
    eventually(lambda: "StaleFenceError" in worker.log, "the zombie was refused")
    end(worker)
    assert len(lines_with(worker.log, "StaleFenceError")) == 1, worker.log
    assert check_history("x") == before
    assert [line["step"] for line in lab.effects("x")] == ["gated", "gated", "charge"]


def test_a_zombie_is_refused_before_its_successor_has_written_anything(lab: Lab):
    """Its place in the log is still free: it is the fence alone, moved by the recovery, that refuses it."""
    worker, _ = stop_inside_a_step(lab, NO_RENEWAL)
    lab.run("command", "loom_recover", loom=SHORT)
    before = check_history("x")
    assert kinds("x") == ["EXECUTION_STARTED", "STEP_STARTED"]
    lab.open_gate("x")
    wake(worker)
    eventually(lambda: "StaleFenceError" in worker.log, "the zombie was refused")
    end(worker)
    assert check_history("x") == before
    assert standing("x") == "ready"
    lab.run("command", *SUCCESSOR)
    assert state("x").status is Status.COMPLETED


def test_a_step_that_must_not_run_twice_is_in_doubt_and_its_zombie_is_refused(lab: Lab):
    """The successor does not run it again; the zombie's result comes too late, and is noted for the operator."""
    worker, _ = stop_inside_a_step(lab, NO_RENEWAL, "gate-once")
    take_over(lab)
    assert kinds("x")[-2:] == [Kind.EFFECT_INDOUBT, Kind.EXECUTION_SUSPENDED]
    lab.open_gate("x")
    wake(worker)
    eventually(lambda: "StaleFenceError" in worker.log, "the zombie was refused")
    end(worker)
    assert kinds("x")[-3:] == [Kind.EFFECT_INDOUBT, Kind.EXECUTION_SUSPENDED, Kind.EFFECT_RETURNED_LATE]
    assert state("x").status is Status.SUSPENDED
    assert len(lab.effects("x")) == 1
    lab.run("resolve", "x", "gated_once", "completed-with-result", output="settled")
    lab.run("command", *SUCCESSOR)
    assert state("x").status is Status.COMPLETED
    check_history("x")


def test_a_renewal_and_a_release_of_a_zombie_are_refused(lab: Lab):
    """While its successor is at work, what a zombie says of the lease changes nothing; it stops its body."""
    worker, held = stop_inside_a_step(lab, SHORT)
    lab.run("command", "loom_recover", loom=SHORT)
    successor = lab.spawn("command", *ALONE, loom=SHORT)
    lab.await_effect("x", count=2)
    theirs = loom.store.held("x")
    assert theirs is not None
    assert theirs.token != held.token
    assert loom.store.renew([("x", held.token)], ttl=600) == set()
    assert not loom.store.release("x", held.token)
    wake(worker)
    eventually(lambda: "a lease was lost" in worker.log, "the zombie's renewal was refused")
    still = loom.store.held("x")
    assert still is not None
    assert still.token == theirs.token
    lab.open_gate("x")
    eventually(lambda: finished("x"), "the successor finishes")
    end(worker)
    end(successor)
    check_history("x")
    # The zombie's body was stopped before its next step.
    assert [line["pid"] for line in lab.effects("x", "charge")] == [successor.pid]


def test_a_zombie_that_is_told_to_end_hands_nothing_back(lab: Lab):
    """A drain gives an execution back that is one's own; one that is another's stays there."""
    worker, _ = stop_inside_a_step(lab, NO_RENEWAL)
    lab.run("command", "loom_recover", loom=SHORT)
    successor = lab.spawn("command", *ALONE, loom=SHORT)
    lab.await_effect("x", count=2)
    worker.signal(signal.SIGTERM)  # pending until it wakes
    wake(worker)
    eventually(lambda: loom.store.held("x"), "the successor holds it")
    theirs = loom.store.held("x")
    lab.open_gate("x")
    assert worker.wait() == 0, worker.log
    eventually(lambda: finished("x"), "the successor finishes")
    end(successor)
    assert theirs is not None
    assert theirs.owner.split(":")[1] == str(successor.pid)
    check_history("x")
    assert [line["pid"] for line in lab.effects("x", "charge")] == [successor.pid]


@pytest.mark.parametrize("end_event", ["EXECUTION_COMPLETED", "EXECUTION_SUSPENDED"])
def test_a_process_frozen_before_its_last_append(lab: Lab, end_event: str):
    """Frozen between the end of the body and the append that says so: one end, the other's."""
    flow = "two-quick" if end_event == "EXECUTION_COMPLETED" else "slept"
    lab.run("start", flow, "x", loom=NO_RENEWAL)
    worker = lab.spawn("command", *ALONE, loom=NO_RENEWAL, points=[("append", end_event, 1, "freeze")])
    worker.wait_until_stopped()
    lab.await_expiry()
    take_over(lab)
    before = check_history("x")
    assert kinds("x")[-1] == end_event
    wake(worker)
    eventually(lambda: "StaleFenceError" in worker.log, "the zombie was refused")
    end(worker)
    assert check_history("x") == before
    assert kinds("x").count(end_event) == 1
    assert standing("x") == ("finished" if end_event == "EXECUTION_COMPLETED" else "parked")
