"""What has been decided of each schedule: the calls over both databases, and their statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from loom_django.kernel.state import TERMINAL_STATUSES
from loom_django.stores.base import ScheduleRow
from loom_django.stores.statements import Statement, named

_COLUMNS: Final = (
    "id", "flow_id", "cron", "time_zone", "decided_until", "revision", "paused_at", "last_execution_id",
    "skipped_at", "skipped_why", "last_act", "acted_at", "acted_by", "act_reason",
)  # fmt: skip
_TIMES: Final = frozenset({"decided_until", "paused_at", "skipped_at", "acted_at"})
_MOVED: Final = tuple(name for name in _COLUMNS if name not in ("id", "revision"))

_GIVEN: Final = {name: f"$at({name})" if name in _TIMES else f"%({name})s" for name in _COLUMNS}
_READ: Final = ", ".join(f"$time({name})" if name in _TIMES else name for name in _COLUMNS)
_TERMINAL: Final = ", ".join(f"'{status}'" for status in sorted(TERMINAL_STATUSES))

STATEMENTS: Final = named(
    Statement(
        "schedule_row",
        "What has been decided of a schedule.",
        f"select {_READ} from loom_schedule where id = %(id)s",
        repeatable=True,
    ),
    Statement(
        "schedule_rows",
        "The same of all; a project has some dozens.",
        f"select {_READ} from loom_schedule order by id",
        repeatable=True,
    ),
    Statement(
        "add_schedule",
        "A schedule that is seen for the first time; whoever comes second finds it.",
        f"""
        insert into loom_schedule ({", ".join(_COLUMNS)}) values ({", ".join(_GIVEN.values())})
        on conflict (id) do nothing
        returning id
        """,
    ),
    Statement(
        "move_schedule",
        "Compare and set: a rival that read the same row waits here, and then finds that it has moved.",
        f"""
        update loom_schedule
        set {", ".join(f"{name} = {_GIVEN[name]}" for name in _MOVED)}, revision = revision + 1
        where id = %(id)s and revision = %(revision)s
        returning id
        """,
    ),
    Statement(
        "chain_runs",
        "Whether an execution, or one that continues it, has not ended; two look-ups by an index each.",
        f"""
        select id from (
            select id, status from loom_execution where id = %(id)s
            union all
            select id, status from loom_execution where chain = %(id)s and chain <> id
        ) members
        where status not in ({_TERMINAL}) limit 1
        """,
        repeatable=True,
    ),
)


class ScheduleCalls:
    """The :class:`~loom_django.stores.base.ScheduleStore` over a database."""

    def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Sequence[Any]]:
        raise NotImplementedError

    def _time(self, value: Any) -> datetime | None:
        raise NotImplementedError

    def schedule_row(self, schedule_id: str) -> ScheduleRow | None:
        rows = self._run("schedule_row", {"id": schedule_id})
        return self._schedule(rows[0]) if rows else None

    def schedule_rows(self) -> list[ScheduleRow]:
        return [self._schedule(row) for row in self._run("schedule_rows", {})]

    def _schedule(self, columns: Sequence[Any]) -> ScheduleRow:
        told = dict(zip(_COLUMNS, columns, strict=True))
        return ScheduleRow(**told | {name: self._time(told[name]) for name in _TIMES})

    def add_schedule(self, row: ScheduleRow) -> bool:
        return bool(self._run("add_schedule", _parameters(row)))

    def move_schedule(self, seen: ScheduleRow, row: ScheduleRow) -> bool:
        return bool(
            self._run("move_schedule", {**_parameters(row), "id": seen.id, "revision": seen.revision})
        )

    def chain_runs(self, execution_id: str) -> bool:
        return bool(self._run("chain_runs", {"id": execution_id}))


def _parameters(row: ScheduleRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _COLUMNS}
