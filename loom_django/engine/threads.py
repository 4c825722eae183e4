"""Threads that many bodies share: a bounded number of them, made when needed, each with its own connections."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from django.db import Error, connections

from loom_django.compat import renew_connections

log = logging.getLogger("loom_django.run")

# How long threads that have nothing more to do may take to end, in seconds, before they are left to themselves.
_END: Final = 1.0


class Threads:
    """Does work in at most so many threads; what comes when all are busy waits for one.

    A thread keeps its connections from one piece of work to the next, without those that have broken, and closes
    them at its end.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._made = 0
        self._pending = 0  # pieces of work that wait, or are under way
        self.taken_at = time.monotonic()  # when one of the threads last began something, or was idle

    @property
    def waiting(self) -> int:
        """How many pieces of work wait for a thread."""
        with self._lock:
            return self._pending - len(self._threads)

    def put(self, work: Callable[[], None]) -> None:
        """Have work done; what it raises is logged."""
        with self._lock:
            if not self._pending:
                self.taken_at = time.monotonic()
            self._pending += 1
            self._begin_if_short()
        self._work.put(work)

    def left_behind(self, by: int) -> None:
        """So many more of the threads are held by work that nobody waits for: others take their place."""
        with self._lock:
            self._most += by
            self._begin_if_short()
            if len(self._threads) > self._most:
                self._work.put(None)

    def end(self) -> None:
        """End each thread when it has nothing more to do."""
        with self._lock:
            threads = tuple(self._threads)
        for _ in threads:
            self._work.put(None)
        end = time.monotonic() + _END
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _begin_if_short(self) -> None:
        if len(self._threads) < min(self._pending, self._most):
            self._made += 1
            name = f"{self._name}-{self._made}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.discard(thread)
                if not self._threads:
                    self._pending -= 1
                    raise

    def _serve(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                with suppress(Error):
                    renew_connections()
                self.taken_at = time.monotonic()
                try:
                    work()
                except BaseException:
                    log.exception("work for async bodies broke off")
                finally:
                    with self._lock:
                        self._pending -= 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
            connections.close_all()
