"""Keeping leases alive: one thread per process, with its own connection, whatever the bodies are doing.

Renewal does not depend on the health of the step that it vouches for. It ends after ``EXECUTE_TIMEOUT``, so
that a body that hangs is handed to another process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from loom_django import compat
from loom_django.conf import LoomSettings
from loom_django.stores.base import Store

log = logging.getLogger("loom_django.leases")

# A keeper with nothing to keep ends its thread after so many seconds, and its connection with it.
IDLE = 5.0

# While renewals keep failing, one line in so many seconds.
REPORT_EVERY = 30.0


@dataclass(slots=True)
class _Held:
    since: float
    on_lost: Callable[[], None]


class LeaseKeeper:
    """Renews this process's leases in one statement per interval."""

    def __init__(self, store: Store, settings: Callable[[], LoomSettings]) -> None:
        self._store = store
        self._settings = settings
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # What is done for each body takes the lock by itself: a condition takes it in Python.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        # By execution and token: one process may claim an execution again while the old body still hangs.
        self._held: dict[tuple[str, int], _Held] = {}
        self._thread: threading.Thread | None = None
        self._keeping = False
        self._idle = False  # the thread waits for something to keep
        self._reported_at = float("-inf")
        self.broken = False  # a thread has broken off at some time, even if another one took over

    def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None:
        """Renew this lease from now on; ``on_lost`` is called, from another thread, when it is lost."""
        if self._store.in_testcase():
            return  # another connection could not see the lease
        if self._pid != os.getpid():
            self._begin()  # a forked child has neither the thread nor its leases
        with self._lock:
            self._held[execution_id, token] = _Held(time.monotonic(), on_lost)
            if not self._keeping:
                self._keeping = True
                self._thread = threading.Thread(target=self._keep, name="loom-leases", daemon=True)
                self._thread.start()
            if self._idle:  # one that waits for the next renewal has nothing to look at before
                self._condition.notify()

    def drop(self, execution_id: str, token: int) -> None:
        """Renew it no longer."""
        with self._lock:
            self._held.pop((execution_id, token), None)

    def keeps(self, execution_id: str, token: int) -> bool:
        """True if the lease is being renewed here, be the renewal ever so late."""
        if self._pid != os.getpid():
            return False
        with self._condition:
            return self._keeping and (execution_id, token) in self._held

    def held(self) -> int:
        """How many leases are being renewed."""
        with self._condition:
            return len(self._held)

    def _keep(self) -> None:
        try:
            compat.leave_pools()  # bodies may hold all that a pool has, for as long as they run
            while self._wait_for_leases():
                self._wait_for_renewal()
                self.tick()
        except BaseException:
            with self._condition:
                self.broken = (
                    True  # a worker ends; in a web process the next body's lease begins another thread
                )
                self._keeping = False
            log.exception("the thread that renews leases broke off")
        finally:
            self._store.close_connections()

    def _wait_for_leases(self) -> bool:
        """True as soon as there is something to keep; False, the thread's end, after a while without."""
        if not self.held():
            self._store.close_connections()  # an idle process keeps no connection for this
        with self._condition:
            self._idle = True
            found = self._condition.wait_for(lambda: self._held, IDLE)
            self._idle, self._keeping = False, bool(found)
            return bool(found)

    def _wait_for_renewal(self) -> None:
        """Let an interval pass; a lease that is taken meanwhile is fresh and changes nothing."""
        with self._condition:
            self._condition.wait_for(lambda: False, self._settings().LEASE_RENEW_INTERVAL)

    def tick(self) -> None:
        """Renew everything that is held once; tell those that were lost, or held too long."""
        limit = self._settings().EXECUTE_TIMEOUT
        with self._condition:
            now = time.monotonic()
            overdue = [(lease, held) for lease, held in self._held.items() if now - held.since > limit]
            for lease, _ in overdue:
                del self._held[lease]
            current = dict(self._held)
        for lease, held in overdue:
            log.warning("a body has run for longer than EXECUTE_TIMEOUT", extra={"execution_id": lease[0]})
            held.on_lost()
        if current:
            self._renew(current)

    def _renew(self, current: dict[tuple[str, int], _Held]) -> None:
        # The store's answer names executions, so two leases of one, of which at most one is good, go apart.
        latest = dict(current.keys())
        earlier = {lease: held for lease, held in current.items() if latest[lease[0]] != lease[1]}
        try:
            kept = self._store.renew(list(latest.items()), ttl=self._settings().LEASE_TTL)
            self._store.measure()
        except Exception as exc:
            if time.monotonic() - self._reported_at >= REPORT_EVERY:
                self._reported_at = time.monotonic()
                log.warning("leases could not be renewed: %s", exc)
            return
        for lease in latest.items():
            if lease[0] not in kept:
                self._lost(lease, current[lease])
        if earlier:
            self._renew(earlier)

    def _lost(self, lease: tuple[str, int], held: _Held) -> None:
        with self._condition:
            if self._held.get(lease) is not held:
                return  # it parked or ended meanwhile
            del self._held[lease]
        log.info("a lease was lost", extra={"execution_id": lease[0]})
        held.on_lost()
