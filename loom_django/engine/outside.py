"""Appends by somebody who does not run the body: answers, cancels, notes, wakes.

The log is read, judged and appended to at the sequence that was seen, under the token that was read. Whoever
was beaten to that sequence, or fenced out meanwhile, reads and judges again; so of two answers one wins, and
the other learns what the log says now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from loom_django.engine.core import Engine, random_token
from loom_django.engine.journal import LOST, Journal
from loom_django.errors import ExecutionNotFoundError, ResumeContendedError
from loom_django.kernel.events import Event
from loom_django.kernel.fold import Fold
from loom_django.stores.base import KEEP, Loaded, Ownership

ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Landing:
    """What belongs to the recorded facts; see :class:`~loom_django.stores.base.Commit`."""

    ownership: Ownership = KEEP
    timers_off: tuple[datetime, ...] | None = ()
    messages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Appended:
    """What came of an outside append: the journal as it is now, and the events that landed, if any."""

    journal: Journal
    events: tuple[Event, ...]


def open_journal(engine: Engine, loaded: Loaded, *, fence: int | None = None) -> Journal:
    """A journal over a log that was read, presenting the token that was read with it."""
    fold = Fold()
    for event in loaded.events:
        fold.apply(event)
    token = loaded.fence if fence is None else fence
    return Journal(engine, fold, fence=token or None, writer=random_token())


def load_existing(engine: Engine, execution_id: str) -> Loaded:
    """Read a log with its token.

    Raises:
        ExecutionNotFoundError: there is none of that id.
    """
    loaded = engine.store.load(execution_id)
    if not loaded.events:
        raise ExecutionNotFoundError(execution_id)
    return loaded


def append_outside(
    engine: Engine,
    execution_id: str,
    compose: Callable[[Journal], Landing | None],
    *,
    acquire: bool = False,
    fence: int | None = None,
) -> Appended:
    """Read, let ``compose`` judge and record, and land; again if somebody else was first.

    ``compose`` raises to refuse, or returns None when there is nothing to append. With ``acquire`` the token
    is moved first, so that whoever runs the body can append nothing more.

    Raises:
        ExecutionNotFoundError: there is no such execution.
        ResumeContendedError: somebody else was first every time; nothing was written.
    """
    last: Exception | None = None
    engine.store.check_clock()
    for _ in range(ATTEMPTS):
        taken = engine.store.acquire_fence(execution_id) if acquire else fence
        journal = open_journal(engine, load_existing(engine, execution_id), fence=taken)
        landing = compose(journal)
        if landing is None:
            return Appended(journal, ())
        try:
            events = journal.land(
                ownership=landing.ownership,
                timers_off=landing.timers_off,
                messages=landing.messages,
                pass_notes=False,
            )
        except LOST as exc:
            last = exc
            continue
        return Appended(journal, events)
    raise ResumeContendedError(execution_id, ATTEMPTS) from last


def note(engine: Engine, execution_id: str, kind: str, fields: dict[str, Any]) -> Appended:
    """Append one audit fact, wherever the log ends just then."""

    def compose(journal: Journal) -> Landing:
        journal.record(kind, fields)
        return Landing()

    return append_outside(engine, execution_id, compose)
