"""Schedules to look at: those that are declared here and those that the database knows, as one list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal
from zoneinfo import ZoneInfo

from loom_django.engine.core import Engine
from loom_django.scheduling import Schedule, schedules
from loom_django.stores.base import ScheduleRow

State = Literal["active", "paused", "not declared", "not seen yet"]

NEXT: Final = 5


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """One schedule: its declaration here, if there is one, and its row, if there is one.

    ``next`` are its next occurrences by the store's clock, aware UTC; none for what is not declared here.
    """

    id: str
    schedule: Schedule | None
    row: ScheduleRow | None
    next: tuple[datetime, ...] = ()

    @property
    def state(self) -> State:
        if self.schedule is None:
            return "not declared"
        if self.row is None:
            return "not seen yet"
        return "paused" if self.row.paused_at is not None else "active"

    @property
    def flow_id(self) -> str:
        return self._told("flow_id")

    @property
    def cron(self) -> str:
        return self._told("cron")

    @property
    def time_zone(self) -> str:
        return self._told("time_zone")

    @property
    def zone(self) -> ZoneInfo | None:
        return None if self.schedule is None else self.schedule.zone

    @property
    def changed(self) -> bool:
        """True if the row tells another declaration than this process has: a deploy is under way, or no loop runs."""
        if self.schedule is None or self.row is None:
            return False
        names = ("flow_id", "cron", "time_zone")
        return any(getattr(self.row, name) != getattr(self.schedule, name) for name in names)

    def _told(self, name: str) -> str:
        return str(getattr(self.schedule if self.schedule is not None else self.row, name))


def view_of(engine: Engine, schedule_id: str) -> ScheduleView | None:
    """One schedule; None if it is neither declared here nor known to the database."""
    schedule, row = schedules.get(schedule_id), engine.store.schedule_row(schedule_id)
    if schedule is None and row is None:
        return None
    return _view(schedule_id, schedule, row, engine.store.now())


def all_schedules(engine: Engine) -> list[ScheduleView]:
    """All of them, in order of their ids."""
    rows = {row.id: row for row in engine.store.schedule_rows()}
    declared = {schedule.id: schedule for schedule in schedules.all()}
    now = engine.store.now()
    return [_view(key, declared.get(key), rows.get(key), now) for key in _ids(declared, rows)]


def _ids(*sources: Iterable[str]) -> list[str]:
    return sorted({key for source in sources for key in source})


def _view(key: str, schedule: Schedule | None, row: ScheduleRow | None, now: datetime) -> ScheduleView:
    if schedule is None:
        return ScheduleView(key, None, row)
    after = now if row is None else max(now, row.decided_until)
    return ScheduleView(key, schedule, row, tuple(schedule.following(after, NEXT)))
