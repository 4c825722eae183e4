"""Who still waits for children, told without its log: a thousand ends of one parent must not read it a thousand times.

A look that found children alive remembers one of them for each wait. While the log ends where it did and those are
alive, no wait is over, whoever else has ended. Which one is drawn at random: so of a thousand ends in whatever order
about seven meet the one that was remembered. Nothing but speed hangs on it: what is not known is looked up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom_django.kernel.events import Event
from loom_django.kernel.state import ON_CHILD

if TYPE_CHECKING:
    from loom_django.engine.core import Engine
    from loom_django.kernel.fold import Fold

# Parents that are remembered, the latest ones.
MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class _Seen:
    last: Event  # of the parent's log; another log of that id ends otherwise
    alive: tuple[str, ...]  # a child of each wait
    wake_at: frozenset[int]


class Watch:
    """What this process has seen of parents that are parked on their children alone."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def waits_on(self, engine: Engine, execution_id: str, *, at: int | None = None) -> bool:
        """Tell that nothing of the park is over; False says nothing. With ``at``: nor does a wait end then."""
        seen = self._seen.get(execution_id)
        if seen is None or at in seen.wake_at:
            return False
        store = engine.store
        # The log first: a park that comes after this look counts the wakes itself.
        same = store.read(execution_id, after=seen.last.sequence - 1, limit=2) == [seen.last]
        if same and set(store.ended(seen.alive).values()) == {None}:
            return True
        with self._lock:
            self._seen.pop(execution_id, None)
        return False

    def remember(self, engine: Engine, fold: Fold) -> None:
        """Note a park that was looked at and is not over, if it is on children and each of its waits is on all."""
        waits = fold.pending_waits()
        if not waits or any(wait.on != ON_CHILD or wait.mode == "any" for wait in waits):
            return
        alive = []
        for wait in waits:
            living = [child for child, end in engine.store.ended(wait.children).items() if end is None]
            if not living:
                return
            alive.append(living[min(int(engine.draw() * len(living)), len(living) - 1)])
        tail = engine.store.read(fold.execution_id, after=fold.last_sequence - 1, limit=1)
        if not tail:
            return
        wake_at = frozenset(wait.wake_at for wait in waits if wait.wake_at is not None)
        with self._lock:
            self._seen[fold.execution_id] = _Seen(tail[0], tuple(alive), wake_at)
            self._seen.move_to_end(fold.execution_id)
            while len(self._seen) > MOST:
                self._seen.popitem(last=False)
