"""Zones of the project and of the process: the same instants everywhere."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from loom_django.kernel import codec
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.kit import Lab, check_history, state

# East and west of Greenwich, and the far end of the day.
ZONES = [("Asia/Shanghai", "UTC"), ("America/Bogota", "Pacific/Apia")]


@pytest.mark.parametrize(("time_zone", "process"), ZONES)
def test_instants_are_the_same_in_every_zone(lab: Lab, time_zone: str, process: str):
    """A sleep until a given instant, a sleep for a while and a lease are told by the database alike."""
    env = {"LOOM_TEST_TIME_ZONE": time_zone, "TZ": process}
    when = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    short = {"DISPATCHER": "inline", "LEASE_TTL": 3}
    lab.run("start_until", "x", when.isoformat(), env=env, loom=short, fresh=True)
    (row,) = loom.store.timers("x")
    assert row.wake_at == when
    for shift in (3500, 3601, 3604):
        # Not due before the instant, due after it; then the two seconds that follow.
        lab.run("command", "run_loom_timers", "--once", env=env, loom=short, fresh=True, shift=shift)
    assert state("x").status is Status.COMPLETED
    slept, later, _ = codec.decode(state("x").result)
    assert when <= slept < when + timedelta(minutes=1)
    assert timedelta(seconds=2) <= later - slept < timedelta(minutes=1)
    assert slept.utcoffset() == timedelta()
    check_history("x")
