"""The only loop: services are ticked until none has more to do, then it waits.

A service that fails is backed off by itself, its errors are rate-limited, and the others go on. Nothing here
sleeps in a way that a signal could not end.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

log = logging.getLogger("loom_django.loop")

BACKOFF_FIRST: Final = 0.5
BACKOFF_MAX: Final = 5.0

# While a service keeps failing, one line in so many seconds.
REPORT_EVERY: Final = 30.0

# A wait for a known instant ends a little after it, so that it is not looked at too early and again.
ROUND_UP: Final = 0.002

# The ready file is written at most so often, in seconds.
REPORT_PROGRESS_EVERY: Final = 0.2


class Service(Protocol):
    name: str

    def tick(self) -> bool:
        """Do one bounded piece; True if there may be more at once."""


def soonest(*waits: float | None) -> float | None:
    """The shortest of some waits, of which None is one that is not known."""
    return min((wait for wait in waits if wait is not None), default=None)


class Beat:
    """Says now and then that a loop is alive, so that others may leave work to it."""

    name = "beat"

    def __init__(
        self,
        say: Callable[[], None],
        interval: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say = say
        self.interval = interval
        self.clock = clock
        self.next_at = float("-inf")

    def tick(self) -> bool:
        """Say so if it is time; never a reason for another turn."""
        if self.clock() >= self.next_at:
            self.say()
            self.next_at = self.clock() + self.interval()
        return False


class Supervised:
    """A service with its back-off."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self.service = service
        self.clock = clock
        self.failures = 0
        self.not_before = 0.0
        self.reported_at = float("-inf")

    def tick(self, draw: Callable[[], float]) -> bool:
        if self.clock() < self.not_before:
            return False
        try:
            more = self.service.tick()
        except Exception as exc:
            self._failed(exc, draw())
            return False
        if self.failures:
            log.info("service %s works again", self.service.name, extra={"service": self.service.name})
        self.failures = 0
        return more

    def _failed(self, exc: Exception, draw: float) -> None:
        delay = min(BACKOFF_MAX, BACKOFF_FIRST * 2 ** min(self.failures, 10))
        self.failures += 1
        self.not_before = self.clock() + delay * (0.75 + draw / 2)
        if self.clock() - self.reported_at >= REPORT_EVERY:
            self.reported_at = self.clock()
            log.error(
                "service %s failed; trying again: %s",
                self.service.name,
                exc,
                exc_info=exc,
                extra={"service": self.service.name},
            )


class Loop:
    """Ticks services in the calling thread until it is stopped."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        interval: Callable[[], float],
        after_turn: Callable[[], None],
        draw: Callable[[], float],
        next_in: Callable[[], float | None] = lambda: None,
        ready_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.services = [Supervised(service, clock) for service in services]
        self.next_in = next_in  # seconds until there will be something to do; None if nothing is known
        self.interval = interval
        self.after_turn = after_turn
        self.draw = draw
        self.ready_file = ready_file
        self.stop = threading.Event()
        self.wake = threading.Event()
        self._reported_at = float("-inf")
        self._complained_at = float("-inf")

    def turn(self) -> bool:
        """Tick every service once; True if any has more to do."""
        more = [service.tick(self.draw) for service in self.services if not self.stop.is_set()]
        self.after_turn()
        return any(more)

    def run(self) -> bool:
        """Turn until stopped; True, for a stop is no failure."""
        while not self.stop.is_set():
            more = self.turn()
            self._report_progress()
            if more:
                continue
            self.wake.wait(self._pause())
            self.wake.clear()
        return True

    def _pause(self) -> float:
        """How long to wait: until the next poll, or less if something is known to be due before."""
        # Full intervals from many processes would march in step.
        pause = self.interval() * (0.75 + self.draw() / 2)
        if self.failing or self.wake.is_set():
            return pause  # whoever cannot work need not ask for work
        try:
            ahead = self.next_in()
        except Exception as exc:
            log.debug("what comes next is not known: %s", exc)
            return pause
        return pause if ahead is None else min(pause, max(ahead, 0.0) + ROUND_UP)

    @property
    def failing(self) -> bool:
        """True while a service fails."""
        return any(service.failures for service in self.services)

    def run_once(self, *, busy: Callable[[], bool] = lambda: False) -> bool:
        """Turn until there is nothing more to do; False if a service failed."""
        while not self.stop.is_set():
            was_busy = busy()  # what ended during the turn may have made room for more, or more to do
            more = self.turn()
            if self.failing:
                return False
            if not more and not was_busy and not busy():
                return True
            if not more:
                self.wake.wait(0.05)
                self.wake.clear()
        return True

    def request_stop(self) -> None:
        """End after the turn in hand."""
        self.stop.set()
        self.wake.set()

    def _report_progress(self) -> None:
        if self.ready_file is None or time.monotonic() - self._reported_at < REPORT_PROGRESS_EVERY:
            return
        self._reported_at = time.monotonic()
        state = {"at": time.time(), "pid": os.getpid(), "healthy": not self.failing}
        partial = self.ready_file.with_suffix(self.ready_file.suffix + ".new")
        try:
            partial.write_text(json.dumps(state))
            partial.replace(self.ready_file)
        except OSError as exc:
            # Whoever watches the file sees that it is old; a full disk must not end what the loop serves.
            if time.monotonic() - self._complained_at >= REPORT_EVERY:
                self._complained_at = time.monotonic()
                log.error("the ready file could not be written: %s", exc)


def stop_on_signals(request_stop: Callable[[], None]) -> Callable[[], None]:
    """Have SIGTERM and SIGINT stop a loop; a second one ends the process at once. Returns the undoing.

    Signals reach the main thread only; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    # A handler runs between two steps of the main thread, which may hold the very lock that an event is set under: it
    # only says so, which needs none, and another thread sets the events.
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def serve() -> None:
        while asked.get():
            request_stop()

    threading.Thread(target=serve, name="loom-stop", daemon=True).start()
    seen = False

    def handle(number: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)
        seen = True
        asked.put(True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        asked.put(False)

    return undo
