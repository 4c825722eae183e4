"""Flows on django-tasks-db: its worker command in a process of its own, on the database that loom is on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.crash.kit import Lab, check_history, eventually, rows_of, standing
from tests.task_backends.site import TIMERS, Site, parked

WORKER = ("-m", "django", "db_worker", "--interval", "0.05", "--no-startup-delay")


@pytest.fixture
def site(lab: Lab) -> Iterator[Site]:
    made = Site(lab)
    yield made
    made.close()


def test_a_flow_runs_parks_and_goes_on_in_the_worker(site: Site):
    """From the start to the end, with an answer in between; nothing runs where it was started."""
    worker = site.run(*WORKER)
    site.lab.run("start", "played", "x")
    eventually(partial(parked, "x"), "it waits for Go")
    site.lab.run("resume", "x", "Go", "gone")
    site.await_end("x")
    check_history("x")
    assert rows_of("x") == 1
    assert {line["pid"] for line in site.lab.effects("x")} == {worker.pid}


def test_a_killed_worker_is_healed_by_recovery(site: Site):
    """Its own record of the task says RUNNING for good; the lease knows better."""
    worker = site.run(*WORKER)
    site.run(*TIMERS)
    site.lab.run("start", "gate", "x")
    site.lab.await_effect("x")
    site.kill(worker)
    site.run(*WORKER)
    site.lab.await_effect("x", count=2)
    site.lab.open_gate("x")
    site.await_end("x")
    check_history("x")
    assert len({line["key"] for line in site.lab.effects("x", "gated")}) == 1


def test_a_worker_that_is_told_twice_to_stop_hands_on(site: Site):
    """The second signal ends it inside a step; the next worker goes on at once, without any recovery."""
    worker = site.run(*WORKER)
    site.lab.run("start", "gate", "x")
    site.lab.await_effect("x")
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: "shutting down" in site.log.read_text(), "it has heard the first signal")
    worker.send_signal(signal.SIGTERM)
    worker.wait()
    assert standing("x") == "ready"
    site.run(*WORKER)
    site.lab.open_gate("x")
    site.await_end("x")
    check_history("x")
