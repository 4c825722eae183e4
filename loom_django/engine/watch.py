"""Who still waits for children, told without its log: a thousand ends of one parent must not read it a thousand times.

Ends that land together are looked at together, too: one thread does it for those that come meanwhile.

A park on children is remembered with those that may live. While the log ends where it did and each wait has one that
lives, no wait is over, whoever else has ended. They are asked from the last one on, and one that has ended is asked
no more: so all the looks of a park ask little more than once for each child. Nothing but speed hangs on it: what is
not known is looked up.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom_django.kernel.state import ON_CHILD, Status

if TYPE_CHECKING:
    from loom_django.engine.core import Engine
    from loom_django.kernel.fold import Fold
    from loom_django.stores.base import Head

# Parents that are remembered, the latest ones; and how many children with them.
MOST: Final = 1000
MOST_CHILDREN: Final = 100_000

# Of so many children it is asked at once whether they live, at most.
ASKED: Final = 256


@dataclass(frozen=True, slots=True)
class _Seen:
    end: tuple[int, int]  # of the parent's log, by sequence and writer; another log of that id ends otherwise
    waits: tuple[list[str], ...]  # for each wait the children that are not known to have ended
    wake_at: frozenset[int]
    children: int


class Watch:
    """What this process has seen of parents that are parked on their children alone."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._children = 0
        # Who is looked at just now, by process, since a forked child has not the thread that looks; and whether
        # somebody has asked for a look since that one began.
        self._looking: dict[tuple[int, str], bool] = {}
        self._lock = threading.Lock()

    def told_together(self, execution_id: str, look: Callable[[], bool]) -> bool:
        """Tell what a look says, or True if another thread will look for this one: later than now, and as often as
        it says True while others come.
        """
        key = (os.getpid(), execution_id)
        with self._lock:
            if key in self._looking:
                self._looking[key] = True
                return True
            self._looking[key] = False
        while True:
            told = False
            try:
                told = look()
            finally:
                with self._lock:
                    again = told and self._looking[key]
                    if again:
                        self._looking[key] = False
                    else:
                        del self._looking[key]
            if not again:
                return told

    def in_vain(
        self, engine: Engine, execution_id: str, head: Head | None, *, at: Collection[int] = ()
    ) -> bool:
        """Tell that a look at its park would find nothing to do, nor a wait that ends ``at``; False says nothing.

        ``head`` is where it stands. An execution that is not parked will count the wakes at its next park, and look
        itself if one moved.
        """
        if head is not None and head.status is Status.CONTINUED:
            newest = engine.store.newest(execution_id)
            execution_id = newest.id if newest is not None else execution_id
            head = engine.store.head(execution_id)
        if head is None or head.status is Status.CONTINUED:
            return False
        return head.status is not Status.SUSPENDED or self._none_over(engine, execution_id, head, at)

    def _none_over(self, engine: Engine, execution_id: str, head: Head, at: Collection[int]) -> bool:
        # The log was asked first: a park that comes after this look counts the wakes itself.
        seen = self._seen.get(execution_id)
        if seen is None or not seen.wake_at.isdisjoint(at):
            return False
        if seen.end == (head.sequence, head.writer) and all(self._lives(engine, wait) for wait in seen.waits):
            return True
        with self._lock:
            if self._seen.get(execution_id) is seen:
                self._forget(execution_id)
        return False

    def _lives(self, engine: Engine, children: list[str]) -> bool:
        """Tell if one of them lives; those that have ended go from the list's end."""
        size = 1
        while asked := children[-size:]:
            ends = engine.store.ended(asked)
            living = {child for child, end in ends.items() if end is None}
            with self._lock:
                while children and children[-1] in asked and children[-1] not in living:
                    children.pop()
            if living:
                return True
            size = min(size * 4, ASKED)
        return False

    def remember(self, fold: Fold, writer: int) -> None:
        """Note a park whose last event is that writer's, if it is on children and each of its waits is on all."""
        waits = fold.pending_waits()
        if not waits or any(wait.on != ON_CHILD or wait.mode == "any" for wait in waits):
            return
        seen = _Seen(
            (fold.last_sequence, writer),
            tuple(list(wait.children) for wait in waits),
            frozenset(wait.wake_at for wait in waits if wait.wake_at is not None),
            sum(len(wait.children) for wait in waits),
        )
        with self._lock:
            self._forget(fold.execution_id)
            self._seen[fold.execution_id] = seen
            self._children += seen.children
            while len(self._seen) > MOST or self._children > MOST_CHILDREN:
                self._forget(next(iter(self._seen)))

    def remember_read(self, engine: Engine, fold: Fold) -> None:
        """Note a park that was read, and looked at in vain."""
        if any(wait.on == ON_CHILD for wait in fold.pending_waits()):
            head = engine.store.head(fold.execution_id)
            if head is not None and head.sequence == fold.last_sequence:
                self.remember(fold, head.writer)

    def _forget(self, execution_id: str) -> None:
        seen = self._seen.pop(execution_id, None)
        if seen is not None:
            self._children -= seen.children
