"""Flows on Celery: a real worker, a real Redis, and what each of them may do to a message."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.crash.kit import Lab, check_history, eventually, rows_of, standing
from tests.redis import Server, needs_redis
from tests.task_backends.site import TIMERS, Site, parked

pytestmark = [needs_redis, pytest.mark.xdist_group("celery")]

WORKER = (
    "-m", "celery", "-A", "django_tasks_fennel.app", "worker", "--loglevel", "INFO", "--concurrency", "2",
    "--without-gossip", "--without-mingle",
)  # fmt: skip


@pytest.fixture(scope="module")
def broker() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def site(make_lab: Callable[..., Lab], broker: Server) -> Iterator[Site]:
    broker.command("FLUSHALL")
    settings = "tests.task_backends.celery_settings"
    made = Site(make_lab(DJANGO_SETTINGS_MODULE=settings, LOOM_TEST_REDIS_URL=broker.url))
    yield made
    made.close()


def test_a_flow_runs_parks_and_goes_on_in_celery(site: Site):
    """From the start to the end, with an answer in between; nothing runs where it was started."""
    worker = site.run(*WORKER)
    site.lab.run("start", "played", "x")
    eventually(partial(parked, "x"), "it waits for Go")
    site.lab.run("resume", "x", "Go", "gone")
    site.await_end("x")
    check_history("x")
    assert rows_of("x") == 1
    assert {os.getpgid(line["pid"]) for line in site.lab.effects("x")} == {worker.pid}


@pytest.mark.parametrize("whole", [True, False], ids=["the-worker", "its-child"])
def test_a_killed_worker_is_healed_by_recovery(site: Site, whole: bool):
    """Killed inside a step: the lease runs out, recovery enqueues it, and the step runs under the same key."""
    worker = site.run(*WORKER)
    site.run(*TIMERS)
    site.lab.run("start", "gate", "x")
    site.lab.await_effect("x")
    if whole:
        site.kill(worker)
        site.run(*WORKER)
    else:
        os.kill(site.lab.effects("x")[0]["pid"], signal.SIGKILL)
    site.lab.await_effect("x", count=2)
    site.lab.open_gate("x")
    site.await_end("x")
    check_history("x")
    gated = site.lab.effects("x", "gated")
    assert [line["attempt"] for line in gated][:2] == [1, 2]
    assert len({line["key"] for line in gated}) == 1


def test_messages_that_the_broker_lost_are_sent_again(site: Site, broker: Server):
    """Starts and answers whose messages are gone are found by their rows."""
    ids = [f"lost-{number}" for number in range(5)]
    site.lab.run("start", "answered", *ids)
    assert broker.command("DBSIZE") != b":0\r\n"
    broker.command("FLUSHALL")
    site.run(*WORKER)
    site.run(*TIMERS)
    for id in ids:
        eventually(partial(parked, id), f"{id} waits for Go")
        site.lab.run("resume", id, "Go")
    site.await_end(*ids)
    for id in ids:
        check_history(id)
        assert len(site.lab.effects(id, "transfer")) == 1


def test_twenty_copies_of_a_message_run_the_body_once(site: Site):
    """Redis delivers anew what was not acknowledged in time, and Celery runs it."""
    site.lab.run("start", "gate-once", "x")
    site.lab.run("enqueue", "x", 20)
    site.run(*WORKER)
    eventually(lambda: site.log.read_text().count("'not-ready'") >= 20, "20 of 21 found nothing to do")
    site.lab.open_gate("x")
    site.await_end("x")
    check_history("x")
    assert len(site.lab.effects("x", "gated_once")) == 1


def test_a_broker_that_is_away_loses_nothing(site: Site, broker: Server):
    """The caller is not disturbed; when the broker is back, recovery enqueues what it has not heard of."""
    broker.stop()
    child = site.lab.spawn("start", "one-idempotent", "x", args=[0])
    assert child.wait() == 0
    assert "could not be enqueued" in child.log
    assert standing("x") == "ready"
    broker.start()
    site.run(*WORKER)
    site.run(*TIMERS)
    site.await_end("x")
    assert len(site.lab.effects("x")) == 1
