"""Starts of children on their way into the log while their parent's body goes on.

A body that starts one child after the other does not wait for each commit. What it starts is sent at once, and what it
starts while that is under way goes in one append as soon as that is answered. Before anything that could tell of a
child, an effect, a look or any other append, the body waits for all of them; so no child is known that is not durable.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from loom_django.stores.base import Commit

if TYPE_CHECKING:
    from loom_django.engine.core import Engine

# So many starts go in one append at most, and so many wait for it; then the body waits.
MOST: Final = 100

# And so many characters of payloads, but for one start of more.
MOST_TEXT: Final = 1 << 20


class UnderWay:
    """What one body has sent; a thread lands it, one append at a time, until there is nothing more.

    ``beside`` has something done in a thread that others have use for too; without it this makes one of its own.
    """

    def __init__(self, engine: Engine, beside: Callable[[Callable[[], None]], None] | None) -> None:
        self._engine = engine
        self._beside = beside
        self._condition = threading.Condition()
        self._waiting: deque[Commit] = deque()
        self._landed: list[Commit] = []
        self._refused: list[Commit] = []
        self._is_busy = False

    @property
    def goes_on(self) -> bool:
        """True while something is under way, and nothing was refused."""
        return self._is_busy and not self._refused

    @property
    def is_over(self) -> bool:
        """True if all that was sent has landed, or was given back."""
        with self._condition:
            return not (self._is_busy or self._refused or self._waiting)

    @property
    def is_told(self) -> bool:
        """True if all of it is over, and what has landed was asked for."""
        with self._condition:
            return self.is_over and not self._landed

    def send(self, commit: Commit) -> None:
        """Have a commit landed behind those that were sent before."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._waiting) < MOST or not self._is_busy)
            self._waiting.append(commit)
            if not self._is_busy and not self._refused:
                with suppress(RuntimeError):  # no thread is to be had: the body lands it itself
                    (self._beside or self._in_a_thread)(self._serve)
                    self._is_busy = True

    def landed(self) -> list[Commit]:
        """What has landed since this was asked."""
        with self._condition:
            landed, self._landed = self._landed, []
        return landed

    def settle(self) -> list[Commit]:
        """Wait until nothing is under way; what has not landed, in order: the first of it was refused."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_busy)
            left = [*self._refused, *self._waiting]
            self._refused.clear()
            self._waiting.clear()
        return left

    def _in_a_thread(self, work: Callable[[], None]) -> None:
        def work_and_close() -> None:
            try:
                work()
            finally:
                self._engine.store.close_connections()

        threading.Thread(target=work_and_close, name="loom-starts", daemon=True).start()

    def _serve(self) -> None:
        while batch := self._take():
            self._land(batch)

    def _take(self) -> list[Commit]:
        with self._condition:
            batch = [] if self._refused else list(islice(self._waiting, _how_many(self._waiting)))
            for _ in batch:
                self._waiting.popleft()
            self._is_busy = bool(batch)
            self._condition.notify_all()
        return batch

    def _land(self, batch: list[Commit]) -> None:
        try:
            self._engine.store.append(together(batch))
        except BaseException:
            with self._condition:
                self._refused = batch  # the body appends it again, and is told why
            return
        with self._condition:
            self._landed += batch
        with suppress(Exception):  # it only makes it quicker, and the body waits for this thread
            self._engine.ring()


def _how_many(commits: Sequence[Commit]) -> int:
    """How many from the first on go in one append."""
    text = 0
    for count, commit in enumerate(islice(commits, MOST)):
        text += sum(len(event.body) for one in (commit, *commit.also) for event in one.events)
        if count and text > MOST_TEXT:
            return count
    return min(len(commits), MOST)


def together(commits: Sequence[Commit]) -> Commit:
    """Commits of one execution that follow each other, as one."""
    return replace(
        commits[-1],
        events=tuple(chain.from_iterable(commit.events for commit in commits)),
        also=tuple(chain.from_iterable(commit.also for commit in commits)),
    )
