"""Notices shorten waits: whoever made something ready tells the idle loops, which look by themselves as well.

A notice is sent by a thread of loom's own, on its own connection and after the commit, so that it never belongs
to a caller's transaction: PostgreSQL lets only one transaction with a notice commit at a time. One that is lost
costs a poll.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from loom_django import compat
from loom_django.conf import LoomSettings
from loom_django.stores.base import Store

log = logging.getLogger("loom_django.notices")

# At most one in so many seconds is sent, and acted on: those in between go together.
GAP: Final = 0.05

# A sender with nothing to send ends its thread, and its connection, after so many seconds. In a test run it is
# gone before the test database is dropped.
LINGER: Final = 5.0
LINGER_IN_TESTS: Final = 0.05

# How long a process that ends waits for its last notice, in seconds.
AT_EXIT: Final = 1.0

# How often a listener looks if it is to end, in seconds, and how long it rests after a failure.
SLICE: Final = 0.5
BACKOFF_FIRST: Final = 0.5
BACKOFF_MAX: Final = 5.0

# While notices cannot be sent or heard, one line in so many seconds.
REPORT_EVERY: Final = 30.0


# How often loops look by themselves, in seconds, where the setting leaves it open.
POLL_WITH_NOTICES: Final = 1.0
POLL_ALONE: Final = 0.25


def are_used(settings: LoomSettings, store: Store) -> bool:
    """True if notices are wanted, and the database has them."""
    return settings.NOTIFY and store.notifies


def poll_interval(settings: LoomSettings, store: Store) -> float:
    """How long an idle loop waits for the next look, if nothing tells it to look before."""
    if settings.POLL_INTERVAL is not None:
        return settings.POLL_INTERVAL
    return POLL_WITH_NOTICES if are_used(settings, store) else POLL_ALONE


class _Report:
    """A line now and then."""

    def __init__(self) -> None:
        self._at = float("-inf")

    def __call__(self, message: str, exc: Exception) -> None:
        if time.monotonic() - self._at >= REPORT_EVERY:
            self._at = time.monotonic()
            log.warning(message, exc)


class Notifier:
    """Sends notices from a thread that lives while there are some to send."""

    def __init__(self, store: Store, settings: Callable[[], LoomSettings]) -> None:
        self._store = store
        self._settings = settings
        self._report = _Report()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._asked = self._sent = 0
        self._sending = False

    def ring(self) -> None:
        """Have a notice sent soon; returns at once, and never fails."""
        store = self._store
        if not are_used(self._settings(), store) or store.in_testcase():
            return
        if self._pid != os.getpid():
            self._begin()  # a forked child has no such thread
        with self._condition:
            if not self._asked:
                atexit.register(self.flush)
            self._asked += 1
            if not self._sending:
                self._sending = True
                threading.Thread(target=self._send, name="loom-notices", daemon=True).start()
            self._condition.notify_all()

    def flush(self) -> None:
        """Wait for what is to be sent, when a process ends that has only just asked; not for long."""
        with self._condition:
            if self._pid == os.getpid():
                self._condition.wait_for(lambda: self._sent == self._asked, AT_EXIT)

    def _send(self) -> None:
        try:
            compat.leave_pools()
            while asked := self._wait_for_one():
                try:
                    self._store.notify()
                except Exception as exc:
                    self._report("a notice could not be sent; loops find out at their next poll: %s", exc)
                    self._store.close_connections()
                with self._condition:
                    self._sent = asked
                    self._condition.notify_all()
                time.sleep(GAP)
        except BaseException:
            with self._condition:
                self._sending = False  # the next notice begins another thread
            raise
        finally:
            self._store.close_connections()

    def _wait_for_one(self) -> int:
        """How many were asked for, once there is one that is not sent; 0, the thread's end, after a while."""
        with self._condition:
            linger = LINGER_IN_TESTS if compat.in_test_run() else LINGER
            if self._condition.wait_for(lambda: self._asked > self._sent, linger):
                return self._asked
            self._sending = False
            return 0


class Listener:
    """Calls back when there was a notice, from a thread of its own; gets over a database that is away."""

    def __init__(self, store: Store, on_notice: Callable[[], None]) -> None:
        self._store = store
        self._on_notice = on_notice
        self._stop = threading.Event()
        self._report = _Report()
        self._thread = threading.Thread(target=self._run, name="loom-listener", daemon=True)
        self.broken = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait for that; not for a server that does not answer."""
        self._stop.set()
        self._thread.join(2 * SLICE)

    def _run(self) -> None:
        try:
            pause = BACKOFF_FIRST
            while not self._stop.is_set():
                try:
                    with self._store.listen() as told:
                        self._on_notice()  # what was said while nobody listened
                        pause = BACKOFF_FIRST
                        self._hear(told)
                except Exception as exc:
                    self._report("notices cannot be heard; loops poll meanwhile: %s", exc)
                    self._stop.wait(pause)
                    pause = min(BACKOFF_MAX, pause * 2)
        except BaseException:
            self.broken = True
            log.exception("the thread that hears notices broke off")
            self._on_notice()

    def _hear(self, told: Callable[[float], bool]) -> None:
        while not self._stop.is_set():
            if told(SLICE):
                self._on_notice()
                self._stop.wait(GAP)
