"""Recovery beside whoever is at work: it takes what is abandoned, all of it, and nothing else."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta

import pytest
from django.db import connection

from loom_django.errors import InvalidInputError
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from loom_django.services.recovery import recover_abandoned
from loom_django.stores.base import Lease
from tests.crash.kit import (
    KILLED,
    Lab,
    check_history,
    eventually,
    finished,
    history,
    kinds,
    only_postgresql,
    standing,
    state,
)

SHORT: dict[str, float] = {"LEASE_TTL": 0.5, "LEASE_RENEW_INTERVAL": 0.1, "POLL_INTERVAL": 0.05}
# How many are started in a tight loop; two hundred in the fault that this is about.
STARTS = 60
# Seconds for which recovery, workers and cancels fight over the same executions; two minutes in the fault.
FIGHT = 4.0


def test_recovery_leaves_alone_what_this_process_has_just_begun(lab: Lab):
    """Started in a tight loop beside a worker with recovery: each body is entered once, each effect once."""
    lab.run("work_while_starting", "one-idempotent", STARTS, "x", loom=SHORT)
    ids = [f"x-{number}" for number in range(STARTS)]
    assert Counter(line["execution"] for line in lab.effects()) == Counter(ids)
    assert {tuple(kinds(id)) for id in ids} == {
        ("EXECUTION_STARTED", "STEP_STARTED", "STEP_COMPLETED", "EXECUTION_COMPLETED")
    }


def test_a_step_longer_than_five_leases_is_never_a_candidate(lab: Lab):
    """A lease is renewed whatever the step does, so age alone takes nothing away from a live run."""
    lab.run("start", "gate", "x", loom=SHORT)
    worker = lab.spawn("command", "run_loom_worker", "--once", "--no-recovery", loom=SHORT)
    lab.await_effect("x")
    until = loom.store.now() + timedelta(seconds=5 * SHORT["LEASE_TTL"])
    passes = 0
    while loom.store.now() < until:
        assert recover_abandoned(loom, leases=loom.store).candidates == 0, worker.log
        passes += 1
        time.sleep(0.02)
    assert passes > 10
    lab.open_gate("x")
    assert worker.wait() == 0, worker.log
    assert state("x").status is Status.COMPLETED
    assert len(lab.effects("x", "gated")) == 1


def test_a_lease_that_is_renewed_at_the_last_moment_is_not_taken(lab: Lab):
    """Between the look and the takeover a holder may have come back: its lease is asked for by token and time."""
    lab.run("start", "gate", "x", loom=SHORT)
    worker = lab.spawn(
        "command", "run_loom_worker", "--no-recovery", loom={**SHORT, "LEASE_RENEW_INTERVAL": 600}
    )
    lab.await_effect("x")
    lab.await_expiry()

    def come_back(lease: Lease) -> bool:
        return bool(loom.store.renew([(lease.execution_id, lease.token)], ttl=600))

    summary = recover_abandoned(loom, leases=loom.store, is_abandoned=come_back)
    assert (summary.candidates, summary.recovered, summary.failed) == (1, 0, 0)
    lab.open_gate("x")
    eventually(lambda: finished("x"), "the holder finishes")
    worker.kill()
    assert len(lab.effects("x", "gated")) == 1
    check_history("x")


def test_a_process_does_not_recover_what_it_is_at_work_on(lab: Lab):
    """Its renewal may be late, and its lease over: that another process may act on, it knows better itself."""
    late = {**SHORT, "LEASE_RENEW_INTERVAL": 600}
    lab.run("start", "gate", "x", loom=late)
    worker = lab.spawn("command", "run_loom_worker", loom=late)
    lab.await_effect("x")
    lab.await_expiry()
    lab.run("start", "one-idempotent", "y", args=[0], loom=late)
    eventually(lambda: finished("y"), "the worker's loop has turned since")
    _let_pass_a_recovery(late)
    lab.open_gate("x")
    eventually(lambda: finished("x"), "it goes on")
    worker.kill()
    assert len(lab.effects("x", "gated")) == 1
    check_history("x")


def _let_pass_a_recovery(settings: dict[str, float]) -> None:
    """A worker looks for what is abandoned four times in the length of a lease."""
    time.sleep(settings["LEASE_TTL"])


@pytest.mark.django_db
def test_recovery_without_leases_asks_for_a_judgement():
    """Without leases nothing tells a dead process from a busy one."""
    with pytest.raises(InvalidInputError, match="is_abandoned"):
        recover_abandoned(loom)


def test_bad_logs_stop_nobody_but_themselves(lab: Lab):
    """Of twenty abandoned, one has a log that cannot be folded and one an unknown flow: eighteen go on."""
    ids = [f"x-{number:02}" for number in range(20)]
    lab.run("start", "gate", *ids)
    worker = lab.spawn("command", "run_loom_worker", "--no-recovery", "--concurrency", "20")
    for id in ids:
        lab.await_effect(id)
    worker.kill()
    for id in ids:
        lab.open_gate(id)
    corrupt, unknown = ids[2], ids[6]
    with connection.cursor() as cursor:
        cursor.execute(
            "update loom_event set payload = '[]' where execution_id = %s and sequence = 1", [corrupt]
        )
        cursor.execute(
            "update loom_event set payload = %s where execution_id = %s and sequence = 1",
            [history(unknown)[0].body.replace('"gate"', '"gone"'), unknown],
        )
    lab.pass_time()
    child = lab.spawn("command", "loom_recover", "--format", "json")
    assert child.wait() == 1
    summary = json.loads(next(line for line in child.log.splitlines() if line.startswith('{"scanned"')))
    assert (summary["candidates"], summary["recovered"], summary["failed"]) == (20, 18, 2)
    assert {id for id, _ in summary["failures"]} == {corrupt, unknown}
    lab.run("command", "run_loom_worker", "--once", "--no-recovery")
    assert all(finished(id) for id in ids if id not in (corrupt, unknown))


def test_a_sleep_that_is_replayed_still_waits(lab: Lab):
    """Killed and replayed before its time, a sleep keeps its first wake, which fires once, and not before."""
    lab.run("start", "slept", "x")
    lab.run("command", "run_loom_worker", "--once")
    (wait,) = state("x").pending_waits
    for at in (10.0, 30.0):
        lab.shift = at
        lab.run("command", "run_loom_timers", "--once")
        lab.run("command", "run_loom_worker", "--once")
        assert standing("x") == "parked"
        assert state("x").pending_waits[0].wake_at == wait.wake_at
    assert lab.effects("x") == []
    lab.shift = 61.0
    argv = ("run_loom_worker", "--once", "--max-executions", "1")
    assert lab.spawn("command", *argv, points=[("before-start", "transfer", 1, "die")]).wait() == KILLED
    lab.run("heal")
    assert len(lab.effects("x", "transfer")) == 1
    assert kinds("x").count("TIMER_FIRED") == 1
    fired = next(event for event in check_history("x") if event.kind == Kind.TIMER_FIRED)
    assert fired.data["wake_at"] == wait.wake_at <= fired.data["at"]


@only_postgresql
def test_recoveries_workers_and_cancels_make_no_deadlock(lab: Lab):
    """Whoever takes rows of the same executions takes them in one order."""
    before = deadlocks()
    tiny = {"LEASE_TTL": 0.05, "LEASE_RENEW_INTERVAL": 600, "POLL_INTERVAL": 0.02, "MAX_RECOVERIES": 10_000}
    stop = str(lab.folder / "stop")
    crew = [lab.spawn("recover_until", stop, loom=tiny) for _ in range(2)]
    crew += [lab.spawn("command", "run_loom_worker", "--concurrency", "4", loom=tiny) for _ in range(2)]
    crew += [lab.spawn("cancel_until", stop)]
    until = time.monotonic() + FIGHT
    number = 0
    while time.monotonic() < until:
        lab.run("start", "played", *(f"x-{number}-{one}" for one in range(10)))
        number += 1
    (lab.folder / "stop").touch()
    for child in crew[:2] + crew[4:]:
        assert child.wait() == 0, child.log
    for worker in crew[2:4]:
        worker.kill()
    eventually(lambda: not others(), "their backends have ended, and told their statistics", instead=others)
    assert deadlocks() == before
    lab.pass_time()
    lab.run("heal")
    for turn in range(number):
        for one in range(10):
            check_history(f"x-{turn}-{one}")


def deadlocks() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select deadlocks from pg_stat_database where datname = current_database()")
        return int(cursor.fetchone()[0])


def others() -> list[tuple[object, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            select pid, state, wait_event_type, wait_event, query_start, pg_blocking_pids(pid), query
            from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
            """
        )
        return list(cursor.fetchall())
