"""Hosts whose clocks are wrong, and one whose clock is set while its worker runs: the database's clock decides."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loom_django.kernel.events import Kind
from loom_django.models import Execution
from loom_django.runtime import loom
from loom_django.services.schedules import execution_id_of
from tests.crash.kit import Lab, check_history, eventually, finished, history, only_postgresql

SHORT = {"LEASE_TTL": 1.0, "LEASE_RENEW_INTERVAL": 0.2, "POLL_INTERVAL": 0.05}
WORKER: Any = ("command", ["run_loom_worker"], {})
NAPS, NAP = 3, 0.5
# Seconds; how far a stamp of such a host may be from the database's time on a busy machine.
CLOSE = 5.0

pytestmark = only_postgresql


@pytest.mark.parametrize("skew", [300.0, -300.0])
def test_a_worker_whose_clock_is_wrong(lab: Lab, skew: float):
    """Five minutes ahead or behind: it takes no lease that lives, and its own sleeps end when they should."""
    lab.run("start", "gate", "x", loom=SHORT)
    holder = lab.spawn("command", "run_loom_worker", "--no-recovery", "--no-timers", loom=SHORT)
    lab.await_effect("x")
    lease = loom.store.held("x")
    assert lease is not None

    began = loom.store.now()
    wrong: Any = ("set_clock", [skew], {})
    lab.spawn_acts([wrong, ("start", ["naps", "y"], {"args": [NAPS, NAP]}), WORKER], loom=SHORT)
    eventually(lambda: finished("y"), "it has slept enough")
    took = (loom.store.now() - began).total_seconds()

    held = loom.store.held("x")
    assert held is not None
    assert held.token == lease.token, "the holder was at work all the time"
    lab.open_gate("x")
    eventually(lambda: finished("x"), "and ends")
    assert len(lab.effects("x", "gated")) == 1
    assert not holder.over
    assert took >= NAPS * NAP
    for event in check_history("y"):
        recorded = event.recorded_at
        assert recorded is not None
        at = datetime.fromtimestamp(event.data["at"] / 1e6, UTC)
        assert abs((recorded - at).total_seconds()) < CLOSE, (event.kind, at, recorded)
    fired = [event for event in history("y") if event.kind == Kind.TIMER_FIRED]
    assert len(fired) == NAPS
    assert all(event.data["at"] >= event.data["wake_at"] for event in fired)


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_under_a_running_worker(lab: Lab, step: float):
    """By an hour, back or forward: it goes on polling, timers and schedules fire at the database's time."""
    moment = lab.folder / "moment"
    due = datetime(2026, 6, 1, 3, tzinfo=UTC)
    declared: Any = ("declare_schedule", ["* * * * *"], {})
    seen = (due - timedelta(seconds=20)).isoformat()
    assert lab.spawn_acts([declared, ("look_at_schedules", [[seen]], {})]).wait() == 0
    # The occurrence is a few seconds ahead of the clock that these processes see.
    lab.shift = (due - datetime.now(UTC)).total_seconds() - 4
    lab.run("start", "naps", "before", args=[1, 10], loom=SHORT)  # until after the occurrence
    worker = lab.spawn_acts([declared, ("set_clock", [step, str(moment)], {}), WORKER], loom=SHORT)
    eventually(lambda: loom.store.status("before") == "SUSPENDED", "the worker works")
    moment.touch()

    eventually(lambda: Execution.objects.filter(scheduled_at=due).exists(), "the occurrence is started")
    lab.run("start", "naps", "after", args=[1, 0.1], loom=SHORT)
    for id in ("before", "after", execution_id_of("s", due)):
        eventually(lambda: finished(id), f"{id} ends", instead=lambda: worker.log)  # noqa: B023
        check_history(id)
    started = history(execution_id_of("s", due))[0].recorded_at
    assert started is not None
    late = (started - due).total_seconds()
    assert 0 <= late < CLOSE
    assert Execution.objects.filter(scheduled_at__isnull=False).count() == 1
    assert not worker.over
