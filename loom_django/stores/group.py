"""Appends that are made at the same time land together: one statement and one commit for many executions.

There is no timer and no smallest batch. Whoever appends while nobody else does goes at once, in its own thread; what
comes meanwhile queues, and goes together as soon as that is answered. One of those who wait takes it for all of them,
so there is no thread that could die, nothing to drain, and no hand-over where only one body runs.

A thread waits for its append and has never two in the queue, so none overtakes another of its execution.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import islice

from loom_django.stores.base import Commit

Land = Callable[[Sequence[Commit]], list[Exception | None]]


class _Seat:
    """What a thread appends at once; it is called when the outcomes are there, or when it is to go ahead."""

    __slots__ = ("_called", "commits", "landed", "left", "outcomes")

    def __init__(self, commits: Sequence[Commit]) -> None:
        self.commits = commits
        self.landed = False
        self.left = False  # its thread has gone, and nobody asks what came of it
        self.outcomes: list[Exception | None] = []
        self._called = threading.Lock()
        self._called.acquire()

    def wait(self) -> None:
        self._called.acquire()

    def call(self) -> None:
        self._called.release()


class AppendGroup:
    """Lands what several threads append; ``land`` is called by one of them at a time."""

    def __init__(self, land: Land) -> None:
        self._land = land
        self._lock = threading.Lock()
        self._queue: list[_Seat] = []
        self._ahead: _Seat | None = None  # whose thread lands what has queued
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """False in a forked child, which has none of the threads that may be in here."""
        return self._pid == os.getpid()

    def land(self, commit: Commit) -> Exception | None:
        """Land a commit, with whatever else has queued by then; None if it landed, else why not."""
        return self.land_all([commit])[0]

    def land_all(self, commits: Sequence[Commit]) -> list[Exception | None]:
        """Land several commits in one batch, as :meth:`land` does; an outcome for each."""
        seat = _Seat(commits)
        try:
            with self._lock:
                self._queue.append(seat)
                first = self._ahead is None
                if first:
                    self._ahead = seat
            if not first:
                seat.wait()
            if not seat.landed:
                self._land_queued(seat)
        except BaseException:  # a signal, in the main thread: nobody may be left waiting for this one
            with self._lock:
                seat.left = True
                if seat in self._queue:
                    self._queue.remove(seat)
            self._leave(seat)
            raise
        return seat.outcomes

    def _land_queued(self, seat: _Seat) -> None:
        batch: list[_Seat] = []
        try:
            with self._lock:
                batch, self._queue = self._queue, batch
            outcomes = iter(self._land([commit for one in batch for commit in one.commits]))
            for one in batch:
                one.outcomes = list(islice(outcomes, len(one.commits)))
                one.landed = True
        except BaseException:
            with self._lock:
                # Nobody knows what came of them: the others are sent again, as after a lost connection.
                for one in batch:
                    one.landed = False
                self._queue[:0] = [one for one in batch if not one.left]
            raise
        self._leave(seat)  # so that the next batch is on its way before those of this one go on
        for one in batch:
            if one is not seat:
                one.call()

    def _leave(self, seat: _Seat) -> None:
        """Let the next one go ahead, if this one was to."""
        with self._lock:
            if self._ahead is seat:
                self._ahead = self._queue[0] if self._queue else None
                if self._ahead is not None:
                    self._ahead.call()
