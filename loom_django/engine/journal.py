"""The pen: the only place where a running body or an answer adds to a log.

``record`` folds a fact now and keeps it; ``land`` makes everything kept durable in one append. So the state in
hand is always the log plus what is kept, and nothing outside may act on a kept fact before it has landed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any, Final

from loom_django.engine.core import Engine, from_micros
from loom_django.engine.drive import Append, Io, Landing, carried_out
from loom_django.engine.underway import UnderWay
from loom_django.errors import StaleFenceError, StoreUnavailableError
from loom_django.kernel.events import TERMINAL, Event, Kind, may_be_passed_by_owner
from loom_django.kernel.fold import Fold
from loom_django.kernel.projection import project
from loom_django.kernel.state import Wait
from loom_django.stores.base import (
    KEEP,
    READY,
    AppendRefused,
    Commit,
    NewExecution,
    Ownership,
    SequenceOccupied,
    TimerRow,
)

log = logging.getLogger("loom_django.run")

# How often an owner appends behind notes that others put where its next event should stand.
PASSES: Final = 5


@dataclass(frozen=True, slots=True)
class Opening:
    """A start that lands with the first facts of its body, which this process runs at once.

    ``failed`` is why they did not: nothing lands behind that.
    """

    ownership: Ownership
    new: NewExecution
    failed: Exception | None = None

    def check(self) -> None:
        """Raise what they failed of."""
        if self.failed is not None:
            raise self.failed


class Journal:
    """A log that this process is writing, with the facts that have not landed yet."""

    def __init__(self, engine: Engine, fold: Fold, *, fence: int | None, writer: int) -> None:
        self.engine = engine
        self.fold = fold
        self.fence = fence
        self.writer = writer
        self.patience = 0.0  # an owner's appends are worth a wait as long as its lease
        self.kept: list[Event] = []
        self.landed: Event | None = None  # the newest that this journal has made durable
        self.opening: Opening | None = None  # while the start itself is kept
        self._opened: Callable[[], None] | None = None
        self.snapshot = 0  # the sequence of the newest snapshot that is known of this log
        # What belongs to a kept fact and must land with it: messages taken, timer rows that have served.
        self._messages: list[int] = []
        self._timers_off: list[datetime] = []
        # Starts of children that are under way, and those that land with their kept facts.
        self._under_way: UnderWay | None = None
        self._also: list[Commit] = []

    @property
    def execution_id(self) -> str:
        return self.fold.execution_id

    def stamp(self) -> int:
        """The time for a fact that is recorded now; never earlier than the log's newest."""
        return max(self.engine.now(), self.fold.at)

    def record(self, kind: str, fields: Mapping[str, Any], *, execution_id: str | None = None) -> Event:
        """Fold a fact and keep it for the next append. ``at`` is added unless it is given."""
        stamped = fields if "at" in fields else {"at": self.stamp(), **fields}
        sequence = self.fold.last_sequence + 1
        event = Event.of(execution_id or self.execution_id, sequence, kind, stamped, self.fence, self.writer)
        self.fold.apply(event)
        self.kept.append(event)
        return event

    def present(self, fence: int) -> None:
        """Have everything kept, and all that follows, carry another token."""
        self.fence = fence
        self.kept = [replace(event, fence=fence) for event in self.kept]

    def ride(self, *, message: int, wait: Wait | None) -> None:
        """Have a message marked as taken, and its wait's timer row go, with the next append."""
        self._messages.append(message)
        if wait is not None and wait.wake_at is not None:
            self._timers_off.append(from_micros(wait.wake_at))

    def ride_start(self, start: Commit) -> None:
        """Have a child's start land with its kept CHILD_STARTED, whoever lands that."""
        self._also.append(start)

    def once_open(self, call: Callable[[], None]) -> None:
        """Call when the start has landed: at once, if it has."""
        if self.opening is None:
            call()
        else:
            self._opened = call

    def open_alone(self) -> None:
        """Land a start that no fact of its body has taken along, without what was recorded behind it.

        Somebody else runs the body from its top, then. An append whose answer was lost may have landed it, and the facts
        behind it: then nothing is written, and whoever takes up what is held goes on behind them.

        Raises:
            StoreUnavailableError: the database stayed away; nothing is known to be written.
        """
        self._opened = None
        if (opening := self.opening) is not None:
            if isinstance(opening.failed, StoreUnavailableError):
                raise opening.failed  # it has been waited for
            start, self.fold = self.kept[0], Fold()
            self.fold.apply(start)
            self.kept, self._messages, self._timers_off, self._also = [start], [], [], []
            self.opening = replace(opening, ownership=READY, failed=None)
            self.land()

    def _is_open(self) -> None:
        """The start is there: it has just landed, or long since."""
        opened, self.opening, self._opened = self._opened, None, None
        if opened is not None:
            try:
                opened()
            except Exception:
                # A thread that could not be started: the body goes on for as long as its lease lasts.
                log.exception("a lease is not renewed", extra={"execution_id": self.execution_id})

    def _has_failed(self, error: Exception) -> None:
        """An append did not land; a refused one may be followed by another, for its park or its child is looked at anew."""
        if self.opening is not None and not isinstance(error, AppendRefused):
            self.opening = replace(self.opening, failed=error)

    def land(self, **what: Any) -> tuple[Event, ...]:
        """:meth:`landing`, in this thread."""
        return carried_out(self.landing(**what))

    def landing(
        self,
        *,
        ownership: Ownership = KEEP,
        new: NewExecution | None = None,
        wakes: int | None = None,
        timers: tuple[TimerRow, ...] = (),
        timers_off: tuple[datetime, ...] | None = (),
        messages: tuple[int, ...] = (),
        also: tuple[Commit, ...] = (),
        pass_notes: bool = True,
        unchanged: int | None = None,
        takes: int | None = None,
        closes: bool = False,
    ) -> Landing[tuple[Event, ...]]:
        """Make the kept facts durable, in one append with what belongs to them.

        Facts that are recorded while it is under way are kept for the next one. With ``pass_notes`` an owner whose
        next sequence holds a note of somebody else (an audit fact or an application event) folds the note and
        appends behind it. ``unchanged`` is a token that must stand still, for facts that carry none; ``takes`` one that
        is moved, if it stands, by this append and for all that follow. ``closes`` is for the last append of a transaction
        that is rolled back where this does not land.

        Raises:
            StaleFenceError: another owner has the execution.
            SequenceOccupied: another writer was first with more than a note. WakesMoved: look again.
            Overtaken: with ``closes``, another writer was first; the transaction is broken.
            Changed: with ``unchanged``, token or log are not what they were.
            StoreUnavailableError: the database stayed away.
        """
        if self.is_waited_for:
            yield Io(self.settle)
        if not self.kept:
            return ()
        if takes is not None:
            self.present(takes + 1)
        patience = self.patience
        if (opening := self.opening) is not None:
            opening.check()
            # Nobody else knows of the execution: no rival, no note of others, and no lease that is worth a wait.
            new, pass_notes, patience = opening.new, False, 0.0
            ownership = opening.ownership if ownership is KEEP else ownership
        wake = self._woken()
        for attempt in range(PASSES + 1):
            taken, served, started = tuple(self._messages), tuple(self._timers_off), tuple(self._also)
            commit = Commit(
                execution_id=self.execution_id,
                events=tuple(self.kept),
                projection=project(self.fold),
                fence=self.fence,
                ownership=ownership,
                new=new,
                wakes=wakes,
                wakes_of=self.fold.chain,
                timers=timers,
                timers_off=None if timers_off is None else (*timers_off, *served),
                messages=(*messages, *taken),
                wake=wake,
                also=(*started, *also),
                patience=patience,
                takes=takes,
                closes=closes,
            )
            store = self.engine.store
            try:
                if unchanged is None:
                    yield Append(store, commit)
                else:
                    yield Io(partial(store.append_if_unchanged, commit, fence=unchanged))
                break
            except SequenceOccupied:
                if not pass_notes or attempt == PASSES:
                    raise
                if not (yield Io(partial(self._pass_notes, commit.first_sequence))):
                    raise
            except Exception as exc:
                self._has_failed(exc)
                raise
        landed = commit.events
        self.landed = landed[-1]
        del self.kept[: len(landed)], self._messages[: len(taken)]
        del self._timers_off[: len(served)], self._also[: len(started)]
        self._is_open()
        if wake or started or self.engine.tells(landed):
            yield Io(partial(self._tell, landed, wake, started))
        return landed

    def may_go_on(self) -> bool:
        """True if the start of a child that is kept now follows another's, and may be under way with others."""
        if self._messages or self._timers_off or self._also:
            return False
        if self._under_way is not None and not self._under_way.is_over:
            return self._under_way.goes_on
        return self.landed is not None and self.landed.kind == Kind.CHILD_STARTED

    def send(self, start: Commit, beside: Callable[[Callable[[], None]], None] | None) -> None:
        """Have the kept facts, which end with a child's start, landed together with it while the body goes on.

        ``beside`` lends a thread for that; without it there is one of its own.
        """
        if self._under_way is None:
            self._under_way = UnderWay(self.engine, beside)
        commit = Commit(
            execution_id=self.execution_id,
            events=tuple(self.kept),
            projection=project(self.fold),
            fence=self.fence,
            wakes_of=self.fold.chain,
            also=(start,),
            patience=self.patience,
        )
        self.kept.clear()
        self._under_way.send(commit)
        self._tell_landed()

    @property
    def is_settled(self) -> bool:
        """True if nothing is under way, and each start of a child that was recorded has landed."""
        return not self._also and (self._under_way is None or self._under_way.is_over)

    @property
    def is_waited_for(self) -> bool:
        """True if :meth:`settle` has something to do, which may take long: an event loop has it done in a thread."""
        return self._under_way is not None and not self._under_way.is_told

    def settle(self) -> None:
        """Wait for what is under way. What was refused is kept again, with what is to land with it."""
        if self._under_way is not None:
            left = self._under_way.settle()
            self._tell_landed()
            self._also[:0] = [start for commit in left for start in commit.also]
            self.kept[:0] = [event for commit in left for event in commit.events]

    def take_back_starts(self) -> None:
        """Forget the starts of children that have not landed, and what was recorded since the first of them."""
        self._also.clear()
        keep = list(takewhile(lambda event: event.kind != Kind.CHILD_STARTED, self.kept))
        if len(keep) < len(self.kept):
            taken = {event.data["number"] for event in keep if event.kind == Kind.MESSAGE_CONSUMED}
            self._messages = [number for number in self._messages if number in taken]
            self._timers_off.clear()  # a row too many is looked at in vain
        self.rebase(keep)

    def _tell_landed(self) -> None:
        """Announce in the body's thread what has landed in another one."""
        for commit in self._under_way.landed() if self._under_way is not None else ():
            self.landed = commit.events[-1]
            self._tell(commit.events, (), commit.also)

    def _tell_started(self, start: Commit) -> None:
        """Have a child run whose start has landed, or left alone until its time has come."""
        engine, later = self.engine, start.ownership.at is not None
        engine.store.on_commit(engine.ring if later else partial(engine.started, start.execution_id))

    def start_of(
        self, *, ownership: Ownership, new: NewExecution, timers: tuple[TimerRow, ...] = ()
    ) -> Commit:
        """The kept start as a commit that lands with another execution's."""
        return Commit(
            execution_id=self.execution_id,
            events=tuple(self.kept),
            projection=project(self.fold),
            ownership=ownership,
            new=new,
            timers=timers,
        )

    def _woken(self) -> tuple[str, ...]:
        """Who is to learn of an end: the parent that may wait for it, and children that are to end with it."""
        if not any(event.kind in TERMINAL and event.kind != Kind.EXECUTION_CONTINUED for event in self.kept):
            return ()
        parent = self.fold.options.get("parent")
        closing = [child for child, policy in self.fold.children.items() if policy == "cancel"]
        return (*([parent] if parent else []), *closing)

    def _tell(
        self, landed: tuple[Event, ...], wake: tuple[str, ...], started: tuple[Commit, ...] = ()
    ) -> None:
        fold, on_commit = self.fold, self.engine.store.on_commit
        on_commit(lambda: self.engine.announce(fold.flow_id, fold.version, landed))
        for execution_id in wake:
            on_commit(partial(self.engine.woken, execution_id))
        for start in started:
            self._tell_started(start)

    def _pass_notes(self, sequence: int) -> bool:
        """Fold what stands where the next event should; False if it is more than notes of others."""
        tail = self.engine.store.read(self.execution_id, after=sequence - 1)
        if not tail or not all(may_be_passed_by_owner(event.kind, event.is_kernel) for event in tail):
            return False
        self.rebase(self.kept)
        return True

    def rebase(self, keep: list[Event]) -> None:
        """Read the log again and put the given facts behind it, under new sequences."""
        events = self.engine.store.read(self.execution_id)
        fold = Fold()
        for event in events:
            fold.apply(event)
        self.kept = []
        for event in keep:
            moved = replace(event, sequence=fold.last_sequence + 1)
            fold.apply(moved)
            self.kept.append(moved)
        self.fold = fold


# What an owner meets when its append is refused for good: it owns the log no longer.
LOST: Final = (StaleFenceError, SequenceOccupied)
