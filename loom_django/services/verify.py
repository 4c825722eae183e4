"""The log is the truth: rows that say something else are found, and rewritten from the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db import models

from loom_django.engine import snapshots
from loom_django.engine.core import Engine, from_micros
from loom_django.kernel.events import Event
from loom_django.kernel.fold import fold
from loom_django.kernel.projection import Projection, project
from loom_django.kernel.snapshot import FORMAT
from loom_django.kernel.state import ExecutionState
from loom_django.models import Execution
from loom_django.stores.base import TimerRow

_TIMES = ("created_at", "updated_at", "finished_at")


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which the tables disagree with a log."""

    execution_id: str
    what: str
    repairable: bool = False


def verify(
    engine: Engine, alias: str, *, execution_id: str | None = None, repair: bool = False
) -> Iterator[Problem]:
    """Fold logs and yield every disagreement; with ``repair``, rewrite the rows that can be."""
    rows: models.QuerySet[Any] = models.QuerySet(Execution).using(alias).order_by("pk")
    if execution_id is not None:
        rows = rows.filter(pk=execution_id)
    for row in rows.iterator(chunk_size=200):
        try:
            events = engine.store.read(row.pk)
            state = fold(events)
        except Exception as exc:
            yield Problem(row.pk, f"its log cannot be folded: {exc}")
            continue
        yield from _row(row, state, alias, repair)
        yield from _chain(engine, state)
        yield from _waits(engine, state, repair)
        yield from _snapshot(engine, row.pk, events, repair)


def _row(row: Any, state: ExecutionState, alias: str, repair: bool) -> Iterator[Problem]:
    wanted = {**columns(project(state)), "chain": state.chain}
    wrong = {name: value for name, value in wanted.items() if getattr(row, name) != value}
    for name, value in wrong.items():
        yield Problem(row.pk, f"{name} is {getattr(row, name)!r}, the log says {value!r}", repairable=True)
    if wrong and repair:
        models.QuerySet(Execution).using(alias).filter(pk=row.pk).update(**wrong)


def _snapshot(engine: Engine, execution_id: str, events: list[Event], repair: bool) -> Iterator[Problem]:
    """A snapshot that this code would read holds what the log says up to there; those of other code it never reads."""
    loaded = engine.store.load(execution_id, format=FORMAT)
    if loaded.snapshot is None:
        return
    sequence = loaded.snapshot.sequence
    if not events or sequence > events[-1].sequence:
        return  # taken after the log was read
    state = snapshots.state_of(loaded.snapshot, loaded)
    if state is not None and state == fold(events[:sequence]):
        return
    what = "cannot be trusted, and is not read" if state is None else "says something else than the log"
    yield Problem(execution_id, f"its snapshot at event {sequence} {what}", repairable=True)
    if repair:
        engine.store.drop_snapshots(execution_id)


def columns(projection: Projection) -> dict[str, Any]:
    """A projection as the columns of ``loom_execution``."""
    values = asdict(projection)
    for name in _TIMES:
        values[name] = _instant(values[name])
    values["status"] = str(values["status"])
    return values


def _instant(micros: int) -> datetime | None:
    return from_micros(micros) if micros else None


def _chain(engine: Engine, state: ExecutionState) -> Iterator[Problem]:
    """A log that was continued is not the last of its chain; the others may have been removed before it."""
    newest = engine.store.newest(state.execution_id) if state.successor is not None else None
    if newest is not None and newest.id == state.execution_id:
        yield Problem(state.execution_id, f"it was continued as {state.successor}, which is not there")


def _waits(engine: Engine, state: ExecutionState, repair: bool) -> Iterator[Problem]:
    """Every wait of a park that time can end has the row that will end it."""
    owed = {wait.wake_at for wait in state.pending_waits if wait.wake_at is not None}
    if not owed:
        return
    there = {row.wake_at for row in engine.store.timers(state.execution_id)}
    for wake_at in sorted(owed):
        if from_micros(wake_at) not in there:
            what = f"no timer row for its wake at {from_micros(wake_at).isoformat()}"
            yield Problem(state.execution_id, what, repairable=True)
            if repair:
                engine.store.schedule(TimerRow(state.execution_id, from_micros(wake_at)))
