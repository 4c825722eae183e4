"""Appends by somebody who does not run the body: answers, cancels, notes, wakes.

The log is read, judged and appended to at the sequence that was seen, under the token that was read. Whoever
was beaten to that sequence, or fenced out meanwhile, reads and judges again; so of two answers one wins, and
the other learns what the log says now.

An answer to a park that was ever fenced takes the fence, in the append itself: so an answer that is refused has
fenced nobody out, and nobody dies between the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from loom_django.engine import drive, snapshots
from loom_django.engine.core import Engine, random_token
from loom_django.engine.journal import LOST, Journal
from loom_django.errors import ExecutionNotFoundError, ResumeContendedError, StaleFenceError
from loom_django.kernel.events import Event
from loom_django.kernel.fold import Fold
from loom_django.stores.base import KEEP, Changed, Loaded, Look, Ownership, TimerRow

log = logging.getLogger("loom_django.outside")

# How often somebody else may be first.
ATTEMPTS: Final = 3

# How often notes of others may come between a look and its append; they answer nothing.
NOTES: Final = 5


@dataclass(frozen=True, slots=True)
class Landing:
    """What belongs to the recorded facts; see :class:`~loom_django.stores.base.Commit`."""

    ownership: Ownership = KEEP
    timers: tuple[TimerRow, ...] = ()
    timers_off: tuple[datetime, ...] | None = ()
    messages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Appended:
    """What came of an outside append: the journal as it is now, and the events that landed, if any.

    ``kept`` says that an answer was stored for a wait that is pending while the body runs.
    """

    journal: Journal
    events: tuple[Event, ...]
    kept: bool = False


Compose = Callable[[Journal], Landing | None]


def open_journal(engine: Engine, loaded: Loaded, *, fence: int | None = None) -> Journal:
    """A journal over a log that was read, presenting the token that was read with it."""
    fold = Fold(loaded.state)
    for event in loaded.events if loaded.state is None else loaded.events[1:]:
        fold.apply(event)
    token = loaded.fence if fence is None else fence
    journal = Journal(engine, fold, fence=token or None, writer=random_token())
    if loaded.state is not None:
        journal.snapshot = loaded.state.last_sequence
    return journal


def load_existing(engine: Engine, execution_id: str) -> Loaded:
    """Read a whole log with its token.

    Raises:
        ExecutionNotFoundError: there is none of that id.
    """
    loaded = engine.store.load(execution_id)
    if not loaded.events:
        raise ExecutionNotFoundError(execution_id)
    return loaded


def answer_park(
    engine: Engine, execution_id: str, compose: Compose, *, fence: int | None = None, fences: bool = False
) -> Appended:
    """Read, let ``compose`` judge the park and record its answer, and land that; again if somebody was first.

    ``compose`` raises to refuse, or returns None when there is nothing to append. An execution that was never
    fenced is answered at the sequence seen; one that was, or with ``fences``, under a token of its own that
    is taken if nothing has answered the park. ``fence`` is a token that the caller holds.

    Raises:
        ExecutionNotFoundError: there is no such execution.
        ResumeContendedError: somebody else was first every time, and the park is unanswered still; nothing was
            written.
        OpenTransactionError: in a caller's transaction that reads from one snapshot.
    """
    return _Answer(engine, execution_id, compose, fence, fences).land()


def answer_parks(engine: Engine, composed: Mapping[str, Compose], *, most: int) -> dict[str, Appended]:
    """As :func:`answer_park` with ``fences``, for several executions in a few statements, each with one try.

    Returned are those that are answered. The others are to be answered by themselves, where it is told what is in the
    way: a log of more than ``most`` events, a refusal, nothing to append, somebody else at work on it.

    Raises:
        Exception: what failed for all of them; nobody is known to be answered.
    """
    store = engine.store
    store.check_clock()
    answers: dict[str, tuple[Journal, Landing]] = {}
    looks = []
    for execution_id, events in store.read_short(list(composed), most=most).items():
        try:
            journal = open_journal(engine, Loaded(tuple(events), 0, 0))
            park_fence = journal.fold.park_fence
            landing = composed[execution_id](journal)
        except Exception as exc:
            log.debug("%s is answered by itself: %s", execution_id, exc)
            continue
        if landing is not None:
            answers[execution_id] = journal, landing
            looks.append(Look(execution_id, events[-1].sequence, fence=park_fence))
    landings: list[tuple[Journal, drive.Landing[tuple[Event, ...]]]] = []
    commits = []
    for execution_id, taken in store.acquire_fences_at(looks).items():
        journal, landing = answers[execution_id]
        journal.present(taken.fence)
        under_way = journal.landing(
            ownership=landing.ownership,
            timers=landing.timers,
            timers_off=landing.timers_off,
            messages=landing.messages,
            pass_notes=False,
        )
        append = next(under_way)
        if isinstance(append, drive.Append):
            landings.append((journal, under_way))
            commits.append(append.commit)
    outcomes = zip(landings, store.append_shared(commits), strict=True)
    landed = [one for one, refused in outcomes if refused is None]
    return {
        journal.execution_id: Appended(journal, drive.carried_out(under_way)) for journal, under_way in landed
    }


class _Answer:
    """One answer on its way into a log."""

    def __init__(
        self, engine: Engine, execution_id: str, compose: Compose, fence: int | None, fences: bool
    ) -> None:
        self.engine = engine
        self.execution_id = execution_id
        self.compose = compose
        self.given = fence
        self.fences = fences
        self.stale: dict[int, int] = {}  # by park: the token that stood when the one presented was stale
        self.beaten = 0
        self.notes = 0
        self.loaded: Loaded | None = None

    def land(self) -> Appended:
        self.engine.store.check_clock()
        while True:
            journal = self._look()
            park, park_fence = journal.fold.park_sequence, journal.fold.park_fence
            landing = self.compose(journal)
            if landing is None:
                return Appended(journal, ())
            try:
                events = journal.land(
                    ownership=landing.ownership,
                    timers=landing.timers,
                    timers_off=landing.timers_off,
                    messages=landing.messages,
                    pass_notes=False,
                    takes=self._token_to_take(park, park_fence),
                )
            except LOST as exc:
                self._refused(exc, park)
            else:
                return Appended(journal, events)

    def _look(self) -> Journal:
        """The log as it is now; what was read before is not read again, but for its last event: in a log that
        was deleted and begun anew meanwhile another one stands there."""
        if self.loaded is not None:
            *before, last = self.loaded.events
            tail = self.engine.store.load(self.execution_id, after=last.sequence - 1)
            same = tail.events[:1] == (last,)
            events = (*before, *tail.events)
            whole = replace(self.loaded, events=events, fence=tail.fence, wakes=tail.wakes)
            self.loaded = whole if same else None
        if self.loaded is None:
            self.loaded = snapshots.load(self.engine, self.execution_id)
            if not self.loaded.events:
                raise ExecutionNotFoundError(self.execution_id)
        return open_journal(self.engine, self.loaded, fence=self.given)

    def _token_to_take(self, park: int | None, park_fence: int) -> int | None:
        """None for an answer that takes none.

        The first one presented is that under which the park was written. If it has moved, somebody is about to
        answer, or died before it did: the log is read again, and if the park is unanswered still, the token
        that stands now is presented.
        """
        fenced = self.loaded is not None and self.loaded.fence > 0
        if park is None or not (self.fences or (self.given is None and fenced)):
            return None
        return self.stale.get(park, park_fence)

    def _refused(self, exc: Exception, park: int | None) -> None:
        if isinstance(exc, StaleFenceError):
            if self.given is not None:
                raise exc  # the caller's own token; it will not become the newest again
            if park is not None and exc.current is not None:
                self.stale[park] = exc.current
            self.beaten += 1
            if self.beaten >= ATTEMPTS:
                raise ResumeContendedError(self.execution_id, self.beaten) from exc
        else:
            self.notes += 1
            if self.notes > NOTES:
                raise ResumeContendedError(self.execution_id, self.notes) from exc


def append_fenced(engine: Engine, execution_id: str, compose: Compose) -> Appended:
    """Fence out whoever runs the body, then read, judge and land; again if somebody else did the same.

    Raises:
        ExecutionNotFoundError: there is no such execution.
        ResumeContendedError: somebody else was first every time; nothing was written.
    """
    last: Exception | None = None
    engine.store.check_clock()
    for _ in range(ATTEMPTS):
        taken = engine.store.acquire_fence(execution_id)
        journal = open_journal(engine, load_existing(engine, execution_id), fence=taken)
        landing = compose(journal)
        if landing is None:
            return Appended(journal, ())
        try:
            events = journal.land(ownership=landing.ownership, timers_off=landing.timers_off)
        except LOST as exc:
            last = exc
            continue
        return Appended(journal, events)
    raise ResumeContendedError(execution_id, ATTEMPTS) from last


def append_note(engine: Engine, execution_id: str, compose: Compose, *, unchanged: bool = False) -> Appended:
    """Append audit facts, which carry no token, wherever the log ends just then.

    With ``unchanged`` the token must be the one that was read with the log, too: for judgements of an
    execution that nobody runs, which must not land on another one of its id.

    Raises:
        ExecutionNotFoundError: there is no such execution.
        ResumeContendedError: somebody else was first every time; nothing was written.
    """
    last: Exception | None = None
    engine.store.check_clock()
    for _ in range(NOTES):
        loaded = load_existing(engine, execution_id)
        journal = open_journal(engine, replace(loaded, fence=0))
        landing = compose(journal)
        if landing is None:
            return Appended(journal, ())
        try:
            events = journal.land(pass_notes=False, unchanged=loaded.fence if unchanged else None)
        except (*LOST, Changed) as exc:
            last = exc
            continue
        return Appended(journal, events)
    raise ResumeContendedError(execution_id, NOTES) from last


def note(engine: Engine, execution_id: str, kind: str, fields: dict[str, Any]) -> Appended:
    """Append one audit fact, wherever the log ends just then."""

    def compose(journal: Journal) -> Landing:
        journal.record(kind, fields)
        return Landing()

    return append_note(engine, execution_id, compose)
