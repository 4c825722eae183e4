"""What ``--once`` promises: when it ends, nothing is left that was ready or due."""

from __future__ import annotations

import pytest

from loom_django.models import Execution
from loom_django.runtime import loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.loop import Loop
from loom_django.services.worker import WorkerService
from tests.crash import flows
from tests.crash.kit import Lab, eventually

MANY = 60


class OneSeat:
    """A service with room for one body, whose body ends just after the service has looked."""

    name = "one seat"

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.running = True

    def tick(self) -> bool:
        if self.running:
            self.running = False
        elif self.waiting:
            self.waiting -= 1
            self.running = True
        return False


@pytest.mark.once
def test_a_seat_that_becomes_free_during_the_turn_is_used():
    """A service without room says that it has nothing to do; that is no reason to end when room comes."""
    service = OneSeat(waiting=3)
    loop = Loop([service], interval=lambda: 0.01, after_turn=lambda: None, draw=lambda: 0.5)
    assert loop.run_once(busy=lambda: service.running)
    assert service.waiting == 0


@pytest.mark.django_db(transaction=True)
def test_bodies_that_were_over_at_once_are_not_overlooked():
    """A body that ended while its claim was still being made may have left more to do as well."""
    loom.dispatcher, before = WorkerDispatcher(), loom.dispatcher
    try:
        flows.idle.start(0)
        worker = WorkerService(loom.engine, concurrency=1)
        assert not worker.stirred()
        worker.tick()
        eventually(lambda: not worker.running, "the body is over")
        assert worker.stirred()
        assert not worker.stirred()
        assert worker.drain(10)
    finally:
        loom.dispatcher = before


def test_once_leaves_nothing_that_is_ready(lab: Lab):
    """Far more executions than room for bodies: all have run when the worker ends."""
    lab.run("start", "idle", *(f"x-{number}" for number in range(MANY)), args=[0])
    lab.run("command", "run_loom_worker", "--once", "--concurrency", "2", "--no-timers", "--no-recovery")
    assert set(Execution.objects.values_list("status", flat=True)) == {"COMPLETED"}
