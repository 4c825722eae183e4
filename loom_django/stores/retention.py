"""What is old, what belongs to it, and how a log is put back: the calls over both databases, and their statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from loom_django.kernel.state import Status
from loom_django.stores.base import Ended, NewExecution
from loom_django.stores.statements import Statement, named

_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

_DECIDED: Final = (
    "queue", "priority", "not_before", "deadline", "parent_id", "chain", "subject_type", "subject_id",
    "attributes", "scheduled_at",
)  # fmt: skip
_TIMES: Final = frozenset(
    {"created_at", "updated_at", "finished_at", "not_before", "deadline", "scheduled_at"}
)
_ROW: Final = (
    "flow_id", "version", "status", "last_sequence", "flow_hash", "code_hash", "created_at", "updated_at",
    "finished_at", "current_step", "in_doubt", "waits", "waiting_on", "error_type", "error_message", *_DECIDED,
)  # fmt: skip
_GIVEN: Final = ", ".join(f"$at({name})" if name in _TIMES else f"%({name})s" for name in _ROW)
_READ: Final = ", ".join(
    f"$time({name})" if name in _TIMES else f"$text({name})" if name == "attributes" else name
    for name in _DECIDED
)
_ENDED: Final = "id, chain, status, $time(finished_at)"

STATEMENTS: Final = named(
    Statement(
        "ended_before",
        "What is old enough, by the index of what has ended, from one page to the next by a probe.",
        f"""
        select {_ENDED} from loom_execution
        where status = %(status)s and finished_at < $at(ended_by)
        and (finished_at, id) > ($at(after_at), %(after_id)s)
        order by finished_at, id limit %(limit)s
        """,
        repeatable=True,
    ),
    Statement(
        "children",
        "Who was started by an execution.",
        f"""
        select {_ENDED} from loom_execution where parent_id = %(id)s and id > %(after)s
        order by id limit %(limit)s
        """,
        repeatable=True,
    ),
    Statement(
        "chain_members",
        "The first of a chain by its id, the others by the index of successors.",
        f"""
        with c as (select chain as first from loom_execution where id = %(id)s)
        select {_ENDED} from (
            select x.* from loom_execution x join c on x.id = c.first
            union all
            select x.* from loom_execution x join c on x.chain = c.first and x.chain <> x.id
        ) members order by created_at, id
        """,
        repeatable=True,
    ),
    Statement(
        "decided",
        "What a start decided for good.",
        f"select {_READ} from loom_execution where id = %(id)s",
        repeatable=True,
    ),
    Statement(
        "restore_row",
        "The row of a log that was put back.",
        f"""
        insert into loom_execution (id, {", ".join(_ROW)}, ready_at, lease_owner)
        values (%(id)s, {_GIVEN}, case when %(ready)s then $now end, '')
        on conflict (id) do nothing
        returning id
        """,
    ),
)


class RetentionCalls:
    """The looks of a :class:`~loom_django.stores.base.RetentionStore` over a database."""

    def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Sequence[Any]]:
        raise NotImplementedError

    def _time(self, value: Any) -> datetime | None:
        raise NotImplementedError

    def ended_before(
        self, status: Status, before: datetime, *, after: tuple[datetime, str] | None = None, limit: int
    ) -> list[Ended]:
        at, key = after or (_LONG_AGO, "")
        names = {"status": str(status), "ended_by": before, "after_at": at, "after_id": key, "limit": limit}
        return [self._ended_row(row) for row in self._run("ended_before", names)]

    def children(self, execution_id: str, *, after: str = "", limit: int) -> list[Ended]:
        rows = self._run("children", {"id": execution_id, "after": after, "limit": limit})
        return [self._ended_row(row) for row in rows]

    def chain_members(self, execution_id: str) -> list[Ended]:
        return [self._ended_row(row) for row in self._run("chain_members", {"id": execution_id})]

    def _ended_row(self, row: Sequence[Any]) -> Ended:
        return Ended(row[0], row[1], Status(row[2]), self._time(row[3]))

    def decided(self, execution_id: str) -> NewExecution | None:
        rows = self._run("decided", {"id": execution_id})
        if not rows:
            return None
        told = dict(zip(_DECIDED, rows[0], strict=True))
        return NewExecution(**told | {name: self._time(told[name]) for name in _DECIDED if name in _TIMES})
