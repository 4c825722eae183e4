"""What ``--once`` promises: when it ends, nothing is left that was ready or due."""

from __future__ import annotations

import pytest

from loom_django.models import Execution
from loom_django.services.loop import Loop
from tests.crash.kit import Lab

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


def test_once_leaves_nothing_that_is_ready(lab: Lab):
    """Far more executions than room for bodies: all have run when the worker ends."""
    lab.run("start", "idle", *(f"x-{number}" for number in range(MANY)), args=[0])
    lab.run("command", "run_loom_worker", "--once", "--concurrency", "2", "--no-timers", "--no-recovery")
    assert set(Execution.objects.values_list("status", flat=True)) == {"COMPLETED"}
