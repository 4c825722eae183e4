"""Which recorded steps a body run must have asked for by now; a body that has not is no longer the one that was run.

A body is run again from its top, and asks again for every step that its log holds an outcome of. Membership is all
that is compared: in which order it asks is its own affair. Each question is O(1), amortised over the frames.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from typing import Final

from loom_django.kernel.state import (
    ON_CHILD,
    ON_MESSAGE,
    ON_RETRY,
    ON_TIMER,
    ON_VERDICT,
    Decision,
    Frame,
    Wait,
)

EVERYTHING: Final = math.inf


class Watch:
    """The recorded outcomes that one body run has still to ask for.

    Args:
        frames: all of the log when the run begins, in the order in which they were first begun.
        migrated: the sequence of the newest EXECUTION_MIGRATED. What was last begun before it is asked for by
            code that is gone.
    """

    def __init__(self, frames: Iterable[Frame], migrated: int = 0) -> None:
        self._order: list[Frame] = []
        self._place = 0  # whatever stands before it in the order is owed no more
        self._owed: dict[str, Frame] = {}
        self._owed_in: dict[str, set[str]] = {}  # by parallel scope, those of scopes inside it included
        self._began: dict[str, int] = {}  # by outermost scope: when its first frame was begun
        for frame in frames:
            if frame.scope:
                self._began.setdefault(_outermost(frame.scope), frame.first_sequence)
                if frame.settled and frame.started_sequence > migrated:
                    for scope in _scopes(frame.scope):
                        self._owed_in.setdefault(scope, set()).add(frame.step_id)
            if frame.settled and frame.started_sequence > migrated:
                self._order.append(frame)
                self._owed[frame.step_id] = frame

    def asked(self, step_id: str) -> None:
        """The run has asked for a step, or need not."""
        frame = self._owed.pop(step_id, None)
        if frame is not None and frame.scope:
            for scope in _scopes(frame.scope):
                self._owed_in[scope].discard(step_id)

    def decided(self, decision: Decision) -> None:
        """A decision was served: nobody asks again for the steps that its decider ran."""
        for step_id in decision.inner_steps or ():
            self.asked(step_id)
        if decision.inner_since:  # the record names some of them only
            first = self._index(decision.inner_since)
            for frame in self._order[first : self._index(decision.sequence)]:
                self.asked(frame.step_id)

    def scope_failed(self, scope: str) -> None:
        """A parallel scope ended by a branch's failure: how far its siblings came is left to chance."""
        for step_id in tuple(self._owed_in.get(scope, ())):
            self.asked(step_id)

    def before(self, frame: Frame | None, path: str) -> float:
        """Up to which sequence what was begun must have been asked for when a step starts.

        Args:
            frame: the step's own, if the log holds one.
            path: of the branch that the step starts in; "" outside of parallel scopes.
        """
        own = EVERYTHING if frame is None else frame.first_sequence
        return min(own, self._began.get(_outermost(path), EVERYTHING)) if path else own

    def skipped(self, before: float = EVERYTHING) -> tuple[str, ...]:
        """The steps begun before that sequence that the run has not asked for, in the order of the log."""
        order, owed = self._order, self._owed
        while self._place < len(order) and order[self._place].step_id not in owed:
            self._place += 1
        if self._place == len(order) or order[self._place].first_sequence >= before:
            return ()
        return tuple(
            frame.step_id for frame in order if frame.step_id in owed and frame.first_sequence < before
        )

    def skipped_in(self, scope: str) -> tuple[str, ...]:
        """The steps of a parallel scope that the run has not asked for."""
        missing = self._owed_in.get(scope)
        if not missing:
            return ()
        return tuple(frame.step_id for frame in self._order if frame.step_id in missing)

    def _index(self, sequence: int) -> int:
        return bisect.bisect_left(self._order, sequence, key=lambda frame: frame.first_sequence)


def _outermost(path: str) -> str:
    return path.partition(".")[0]


def _scopes(path: str) -> Iterator[str]:
    """The scopes that a branch stands in, from without: "1" and "1.left.2" of "1.left.2.top"."""
    parts = path.split(".") if path else []
    return (".".join(parts[: place + 1]) for place in range(0, len(parts), 2))


def wait_in_words(wait: Wait) -> str:
    """What a body was about to wait for, for a message."""
    key = wait.correlation_key
    match wait.on:
        case _ if wait.on == ON_TIMER:
            return "a sleep"
        case _ if wait.on == ON_RETRY:
            return f"the next try of step {key!r}"
        case _ if wait.on == ON_VERDICT:
            return f"a verdict on step {key!r}"
        case _ if wait.on == ON_MESSAGE:
            return f"the message {key!r}"
        case _ if wait.on == ON_CHILD:
            return "the end of a child"
    return f"a wait for {wait.on!r}"
