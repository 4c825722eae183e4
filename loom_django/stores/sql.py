"""What the two databases share: statements by name, and the calls that are the same over both.

A statement stands here once, in words that both databases take. What they say differently is written with a
``$``: ``$now`` is the store's clock, ``$later(x)`` is that plus the parameter x in seconds, ``$at(x)`` an
instant handed in, ``$time(column)`` an instant handed out, ``$is`` equality that takes NULL for a value, and
``$lock``, ``$lock_free(t)`` take the rows read (the second leaves out those that others hold).

No model is imported: the tables are named, so a store can be made before the app registry is ready. All work
goes over Django's connection of the calling thread, so it joins a caller's ``atomic()`` by itself.
"""

from __future__ import annotations

import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db import connections, transaction

from loom_django import compat
from loom_django.errors import OpenTransactionError, StaleFenceError
from loom_django.kernel.events import Event
from loom_django.kernel.state import TERMINAL_STATUSES, Status
from loom_django.stores.base import (
    Claimed,
    Commit,
    Due,
    Known,
    Lease,
    Loaded,
    Message,
    SequenceOccupied,
    TimerRow,
    WakesMoved,
)

try:
    import orjson
except ImportError:  # the extra "speed"; the standard library writes the same
    orjson = None  # type: ignore[assignment]

logger = logging.getLogger("loom_django.stores")

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
NO_LIMIT: Final = 2**62

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: its text, and why it is there.

    ``repeatable`` ones may be sent again when the connection was lost and nobody knows if they had run.
    """

    name: str
    why: str
    sql: str
    repeatable: bool = False


def named(*statements: Statement) -> dict[str, Statement]:
    return {statement.name: statement for statement in statements}


_TERMINAL = ", ".join(f"'{status}'" for status in sorted(TERMINAL_STATUSES))
_TIMER = "t.execution_id, $time(t.wake_at), t.redrive, t.deadline, $time(t.not_before), t.tries"
UPSERT_TIMER = """
    on conflict (execution_id, wake_at) do update set
        redrive = coalesce(excluded.redrive, loom_timer.redrive),
        deadline = case when excluded.deadline then excluded.deadline else loom_timer.deadline end,
        not_before = excluded.not_before,
        tries = excluded.tries
"""
# The queue's head, whatever lies behind it: for each priority in turn the oldest rows that are ready now. A
# plain ORDER BY would sort all that is ready, or walk over all that is to be ready one day. The order of
# the priorities is that of the recursion; an ORDER BY on top would read all before the limit.
READY_HEAD: Final = """
    with recursive priorities(priority) as (
        select * from (
            select priority from loom_execution where ready_at is not null order by priority desc limit 1
        ) highest
        union all
        select (
            select x.priority from loom_execution x
            where x.ready_at is not null and x.priority < p.priority order by x.priority desc limit 1
        )
        from priorities p where p.priority is not null
    )
"""

SHARED: Final = named(
    Statement(
        "read",
        "A log, or a part of it, in order.",
        """
        select sequence, kind, $text(payload), fence, writer, is_kernel, $time(recorded_at)
        from loom_event where execution_id = %(id)s and sequence > %(after)s
        order by sequence limit %(limit)s
        """,
        repeatable=True,
    ),
    Statement(
        "fence",
        "Token and wakes; no row says 0 and 0.",
        "select token, wakes from loom_fence where execution_id = %(id)s",
        repeatable=True,
    ),
    Statement(
        "status",
        "Where an execution stands, by the projection.",
        "select status from loom_execution where id = %(id)s",
        repeatable=True,
    ),
    Statement(
        "acquire_fence",
        "The token moves; all that carry an older one are refused from here on.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        values (%(id)s, 1, 0, 0, 0)
        on conflict (execution_id) do update set token = loom_fence.token + 1
        returning token
        """,
        repeatable=True,
    ),
    Statement(
        "why",
        "After a refusal: what stands in the way, and if it is this very commit, landed before.",
        """
        select
            (select token from loom_fence where execution_id = %(id)s),
            (select wakes from loom_fence where execution_id = %(wakes_of)s),
            (select max(sequence) from loom_event where execution_id = %(id)s)
        """,
        repeatable=True,
    ),
    Statement(
        "writers",
        "Who wrote the sequences that a commit wanted.",
        """
        select sequence, writer from loom_event
        where execution_id = %(id)s and sequence between %(first)s and %(last)s order by sequence
        """,
        repeatable=True,
    ),
    # Deletion: in the lock order, the fence row first.
    Statement(
        "lock_fence",
        "Appends that answer, acquires and the deletion of an execution wait for each other here.",
        "select token from loom_fence where execution_id = %(id)s $lock",
    ),
    Statement(
        "finished",
        "Checked under the fence's lock: only what has ended may go.",
        f"select chain from loom_execution where id = %(id)s and status in ({_TERMINAL})",
    ),
    Statement("delete_events", "The log goes.", "delete from loom_event where execution_id = %(id)s"),
    Statement("delete_row", "The execution's row goes.", "delete from loom_execution where id = %(id)s"),
    Statement("delete_timers", "Its wakes go.", "delete from loom_timer where execution_id = %(id)s"),
    Statement(
        "delete_inbox",
        "The chain's messages go with its last member.",
        """
        delete from loom_message where execution_id = %(chain)s
        and not exists (select 1 from loom_execution where chain = %(chain)s and chain <> id)
        and not exists (select 1 from loom_execution where id = %(chain)s)
        """,
    ),
    Statement(
        "delete_fence",
        "A row without a token goes, unless it counts the wakes of a chain that lives on.",
        """
        delete from loom_fence where token = 0 and execution_id in (%(id)s, %(chain)s)
        and not exists (
            select 1 from loom_execution
            where chain = loom_fence.execution_id and chain <> id
        )
        and not exists (select 1 from loom_execution where id = loom_fence.execution_id)
        """,
    ),
    # Timers.
    Statement(
        "schedule",
        "Owe a wake; marks that are there stay.",
        f"""
        insert into loom_timer (execution_id, wake_at, redrive, deadline, not_before, tries)
        values (%(id)s, $at(wake_at), %(redrive)s, %(deadline)s, $at(not_before), %(tries)s)
        {UPSERT_TIMER}
        """,
        repeatable=True,
    ),
    Statement(
        "put_off",
        "Only the row that was claimed: one that was written anew since is due at its own time.",
        """
        update loom_timer set not_before = $later(delay), tries = %(tries)s
        where execution_id = %(id)s and wake_at = $at(wake_at) and not_before $is $at(claimed)
        """,
    ),
    Statement(
        "retire",
        "The wake is done with.",
        "delete from loom_timer where execution_id = %(id)s and wake_at = $at(wake_at)",
        repeatable=True,
    ),
    Statement(
        "retire_claimed",
        "The wake is done with, unless it was written anew since the claim.",
        """
        delete from loom_timer
        where execution_id = %(id)s and wake_at = $at(wake_at) and not_before $is $at(claimed)
        """,
        repeatable=True,
    ),
    Statement(
        "timers",
        "What is owed to one execution.",
        f"select {_TIMER} from loom_timer t where execution_id = %(id)s order by wake_at",
        repeatable=True,
    ),
    Statement(
        "next_due",
        "The first entry of the index of what is due.",
        """
        select $time(coalesce(not_before, wake_at)) from loom_timer
        order by coalesce(not_before, wake_at) limit 1
        """,
        repeatable=True,
    ),
    # Leases. Each is one conditional statement; the rows that come back say who won.
    Statement(
        "claim",
        "Ready becomes held.",
        """
        update loom_execution set
            ready_at = null, lease_owner = %(owner)s, lease_token = %(token)s, lease_until = $later(ttl)
        where id = %(id)s and ready_at <= $now
        returning id
        """,
    ),
    Statement(
        "release",
        "Held becomes ready.",
        """
        update loom_execution set
            ready_at = $later(delay), lease_owner = '', lease_token = null, lease_until = null
        where id = %(id)s and lease_token = %(token)s
        returning id
        """,
    ),
    Statement(
        "expired",
        "Who died, or was cut off, while holding an execution.",
        """
        select id, lease_owner, lease_token, $time(lease_until), flow_id, version
        from loom_execution where lease_until <= $now order by lease_until limit %(limit)s
        """,
        repeatable=True,
    ),
    Statement(
        "leases",
        "Who holds what.",
        """
        select id, lease_owner, lease_token, $time(lease_until), flow_id, version
        from loom_execution where lease_until is not null order by lease_until limit %(limit)s
        """,
        repeatable=True,
    ),
    Statement(
        "take_over",
        "From the holder that was seen, and only while its lease is over.",
        """
        update loom_execution set
            lease_owner = %(owner)s, lease_token = %(token)s, lease_until = $later(ttl)
        where id = %(id)s and lease_token = %(seen)s and lease_until <= $now
        returning id
        """,
    ),
    Statement(
        "held",
        "Who holds one execution.",
        """
        select id, lease_owner, lease_token, $time(lease_until), flow_id, version
        from loom_execution where id = %(id)s and lease_token is not null
        """,
        repeatable=True,
    ),
    Statement(
        "stale_ready",
        "Ready for so long that whoever was told of it must have died.",
        """
        select id, '', 0, $time(ready_at), flow_id, version
        from loom_execution where ready_at < $later(before) order by ready_at limit %(limit)s
        """,
        repeatable=True,
    ),
    Statement(
        "count_recovery",
        "One more takeover without a new event, or the first one of another place in the log.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        values (%(id)s, 0, 0, 1, %(sequence)s)
        on conflict (execution_id) do update set
            recoveries = case when loom_fence.recovered_sequence = excluded.recovered_sequence
                then loom_fence.recoveries + 1 else 1 end,
            recovered_sequence = excluded.recovered_sequence
        returning recoveries
        """,
    ),
    Statement(
        "beat",
        "A loop is alive.",
        """
        insert into loom_node (name, kind, seen_at) values (%(name)s, %(kind)s, $now)
        on conflict (name) do update set kind = excluded.kind, seen_at = excluded.seen_at
        """,
        repeatable=True,
    ),
    Statement(
        "forget_nodes",
        "Loops that ended long ago.",
        "delete from loom_node where seen_at < $later(before)",
        repeatable=True,
    ),
    Statement(
        "loop_seen",
        "Is there anybody to hand work to?",
        "select 1 from loom_node where seen_at > $later(before) limit 1",
        repeatable=True,
    ),
    # Messages.
    Statement(
        "inbox",
        "What no commit has taken, oldest first.",
        """
        select number, execution_id, name, message_id, $text(payload), wait from loom_message
        where execution_id = %(id)s and name = %(name)s and not taken order by number
        """,
        repeatable=True,
    ),
    Statement(
        "message_names",
        "Under which names something lies.",
        "select distinct name from loom_message where execution_id = %(id)s and not taken",
        repeatable=True,
    ),
)


class Backoff:
    """How long to go on trying: pauses that double from 50 ms to 1 s, until the time is up."""

    def __init__(self, seconds: float, sleep: Callable[[float], None]) -> None:
        self._until = time.monotonic() + seconds
        self._sleep = sleep
        self._pause = 0.0
        self.attempts = 1

    def again(self) -> bool:
        """Pause, the first time not at all; False if the time is up."""
        if time.monotonic() + self._pause >= self._until:
            return False
        if self._pause:
            self._sleep(self._pause)
        self._pause = min(max(self._pause * 2, 0.05), 1.0)
        self.attempts += 1
        return True


class SqlStore(ABC):
    """A :class:`~loom_django.stores.base.Store` over Django's connection of one alias."""

    statements: Mapping[str, Statement] = SHARED

    def __init__(self, alias: str = "default", *, give_up: float = 30.0) -> None:
        self.alias = alias
        self.give_up = give_up
        self.sleep: Callable[[float], None] = time.sleep
        self._shift = timedelta()
        self._offset: float | None = None

    @property
    def connection(self) -> Any:
        """Django's connection of the calling thread."""
        return connections[self.alias]

    # What a database does in its own way.

    @abstractmethod
    def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Row]:
        """Run a statement by its name and return the rows that it gives."""

    @abstractmethod
    def _time(self, value: Any) -> datetime | None:
        """An instant as the database hands it out."""

    @abstractmethod
    def _land(self, commits: Sequence[Commit]) -> list[Exception | None]:
        """Land commits (with their ``also``) that share no execution, each by itself."""

    @abstractmethod
    def _claim_batch(
        self, parameters: Mapping[str, Any], known: Known, queues: Sequence[str] | None
    ) -> list[str]:
        """Take ready executions and return their ids; committed when this returns."""

    @abstractmethod
    def is_connection_lost(self, error: BaseException) -> bool:
        """True if an error means that the connection went."""

    # The log and its fences.

    def append(self, commit: Commit) -> None:
        _check(commit)
        refused = self._land([commit])[0]
        if refused is not None:
            raise refused

    def append_many(self, commits: Sequence[Commit]) -> list[Exception | None]:
        outcomes: list[Exception | None] = [None] * len(commits)
        refused: dict[tuple[str, int], Exception] = {}
        fit = []
        for place, commit in enumerate(commits):
            try:
                _check(commit)
            except ValueError as error:
                outcomes[place] = error
            else:
                fit.append((place, commit))
        for batch in _Batches(fit):
            for seat, outcome in self._land_behind(batch, refused):
                if outcome is not None:
                    refused.update(dict.fromkeys(seat.commit.writers, outcome))
                for place in seat.places:
                    outcomes[place] = outcome
        return outcomes

    def _land_behind(
        self, batch: Sequence[_Seat], refused: Mapping[tuple[str, int], Exception]
    ) -> list[tuple[_Seat, Exception | None]]:
        """Land a batch, but for what follows a refused commit of its execution: a rival's event may stand in
        the refused one's place, and it would land behind that."""
        behind = {
            id(seat): next((refused[key] for key in seat.commit.writers if key in refused), None)
            for seat in batch
        }
        free = [seat for seat in batch if behind[id(seat)] is None]
        landed = (
            dict(zip(map(id, free), self._land([seat.commit for seat in free]), strict=True)) if free else {}
        )
        return [(seat, behind[id(seat)] or landed[id(seat)]) for seat in batch]

    def _refusal(self, commit: Commit) -> Exception | None:
        """Why a commit did not land, read afresh; None if it had landed before.

        Raises:
            LookupError: nothing is in its way any more, so it may be sent again.
        """
        members = (commit, *commit.also)
        if all(map(self._had_landed, members)):
            return None
        for member in members:
            if (reason := self._obstacle(member)) is not None:
                return reason
        raise LookupError(commit.execution_id)

    def _obstacle(self, commit: Commit) -> Exception | None:
        key = commit.execution_id
        token, wakes, last = self._run("why", {"id": key, "wakes_of": commit.wakes_of or key})[0]
        if not commit.unguarded and (token or 0) not in (0, commit.fence):
            return StaleFenceError(key, commit.fence, token)
        if commit.wakes is not None and commit.wakes != (wakes or 0):
            return WakesMoved(key, commit.first_sequence)
        if (last or 0) != commit.first_sequence - 1:
            return SequenceOccupied(key, commit.first_sequence)
        return None

    def _had_landed(self, commit: Commit) -> bool:
        """True if all its sequences carry its writers: told by the writer, never by equal content."""
        first, last = commit.first_sequence, commit.events[-1].sequence
        rows = self._run("writers", {"id": commit.execution_id, "first": first, "last": last})
        ours = [(event.sequence, event.writer) for event in commit.events]
        return [tuple(row) for row in rows] == ours and all(writer != 0 for _, writer in ours)

    def read(self, execution_id: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        limited = NO_LIMIT if limit is None else limit
        rows = self._run("read", {"id": execution_id, "after": after, "limit": limited})
        moment = self._time
        return [
            Event(execution_id, sequence, kind, body, fence, writer, is_kernel, moment(recorded_at))
            for sequence, kind, body, fence, writer, is_kernel, recorded_at in rows
        ]

    def load(self, execution_id: str, *, after: int = 0) -> Loaded:
        token, wakes = self._fence_row(execution_id)
        return Loaded(tuple(self.read(execution_id, after=after)), token, wakes)

    def status(self, execution_id: str) -> Status | None:
        rows = self._run("status", {"id": execution_id})
        return Status(rows[0][0]) if rows else None

    def fence(self, execution_id: str) -> int:
        return self._fence_row(execution_id)[0]

    def wakes(self, execution_id: str) -> int:
        return self._fence_row(execution_id)[1]

    def _fence_row(self, execution_id: str) -> tuple[int, int]:
        rows = self._run("fence", {"id": execution_id})
        return (rows[0][0], rows[0][1]) if rows else (0, 0)

    def acquire_fence(self, execution_id: str) -> int:
        token: int = self._run("acquire_fence", {"id": execution_id})[0][0]
        return token

    def delete_execution(self, execution_id: str) -> bool:
        with self.transaction():
            self._run("lock_fence", {"id": execution_id})
            finished = self._run("finished", {"id": execution_id})
            if not finished:
                return False
            ids = {"id": execution_id, "chain": finished[0][0]}
            for name in (
                "delete_events", "delete_row", "delete_timers", "delete_inbox", "delete_fence"
            ):  # fmt: skip
                self._run(name, ids)
            return True

    # The wakes that are owed.

    def schedule(self, row: TimerRow) -> None:
        self._run("schedule", {"id": row.execution_id, **timer_row(row)})

    def claim_due(self, *, limit: int, hold: float, known: Known, redrive: bool) -> list[Due]:
        rows = self._due_rows({"limit": limit, "hold": hold, "redrive": redrive, **_flow_filter(known)})
        return [
            Due(self._timer_row(columns), self._instant(now), flow_id, version)
            for *columns, _was_due, now, flow_id, version in sorted(rows, key=lambda row: row[6])
        ]

    def _due_rows(self, parameters: Mapping[str, Any]) -> list[Row]:
        """Take due rows: the timer's six columns, when it was due, now, flow and version."""
        return self._run("claim_due", parameters)

    def put_off(self, row: TimerRow, *, delay: float, tries: int) -> None:
        names = {"id": row.execution_id, "wake_at": row.wake_at, "claimed": row.not_before}
        self._run("put_off", {**names, "delay": delay, "tries": tries})

    def retire(self, execution_id: str, wake_at: datetime, *, claimed: TimerRow | None = None) -> None:
        if claimed is None:
            self._run("retire", {"id": execution_id, "wake_at": wake_at})
        else:
            names = {"id": execution_id, "wake_at": wake_at, "claimed": claimed.not_before}
            self._run("retire_claimed", names)

    def timers(self, execution_id: str) -> list[TimerRow]:
        return [self._timer_row(row) for row in self._run("timers", {"id": execution_id})]

    def next_due(self) -> datetime | None:
        rows = self._run("next_due", {})
        return self._time(rows[0][0]) if rows else None

    def _timer_row(self, row: Row) -> TimerRow:
        execution_id, wake_at, redrive, deadline, not_before, tries = row
        return TimerRow(
            execution_id, self._instant(wake_at), redrive, bool(deadline), self._time(not_before), tries
        )

    def _instant(self, value: Any) -> datetime:
        instant = self._time(value)
        if instant is None:
            raise ValueError("a column that may not be empty is empty")
        return instant

    # Who is alive and holds an execution.

    def claim(self, execution_id: str, *, owner: str, token: int, ttl: float) -> bool:
        return bool(self._run("claim", {"id": execution_id, "owner": owner, "token": token, "ttl": ttl}))

    def claim_ready(
        self,
        *,
        owner: str,
        token: int,
        ttl: float,
        limit: int,
        known: Known,
        queues: Sequence[str] | None = None,
    ) -> list[Claimed]:
        lease = {"owner": owner, "token": token, "ttl": ttl, "limit": limit}
        ids = self._claim_batch(lease, known, queues)
        if not ids:
            return []
        # The fences in a statement of their own: together with the rows of executions they would be taken
        # in the wrong order, against everyone who holds a fence and waits for a row.
        fences = {row[0]: row[1] for row in self._run("acquire_fences", {"ids": dumps(sorted(ids))})}
        return [Claimed(execution_id, token, fences[execution_id]) for execution_id in ids]

    def renew(self, leases: Sequence[tuple[str, int]], *, ttl: float) -> set[str]:
        if not leases:
            return set()
        pairs = dumps([{"id": execution_id, "token": token} for execution_id, token in leases])
        return {row[0] for row in self._run("renew", {"leases": pairs, "ttl": ttl})}

    def release(self, execution_id: str, token: int, *, delay: float = 0.0) -> bool:
        return bool(self._run("release", {"id": execution_id, "token": token, "delay": delay}))

    def expired(self, *, limit: int) -> list[Lease]:
        return [self._lease(row) for row in self._run("expired", {"limit": limit})]

    def leases(self, *, limit: int) -> list[Lease]:
        return [self._lease(row) for row in self._run("leases", {"limit": limit})]

    def take_over(self, lease: Lease, *, owner: str, token: int, ttl: float) -> bool:
        names = {"id": lease.execution_id, "seen": lease.token, "owner": owner, "token": token, "ttl": ttl}
        return bool(self._run("take_over", names))

    def held(self, execution_id: str) -> Lease | None:
        rows = self._run("held", {"id": execution_id})
        return self._lease(rows[0]) if rows else None

    def stale_ready(self, *, grace: float, limit: int) -> list[Lease]:
        return [self._lease(row) for row in self._run("stale_ready", {"before": -grace, "limit": limit})]

    def count_recovery(self, execution_id: str, *, sequence: int) -> int:
        count: int = self._run("count_recovery", {"id": execution_id, "sequence": sequence})[0][0]
        return count

    def _lease(self, row: Row) -> Lease:
        execution_id, owner, token, until, flow_id, version = row
        return Lease(execution_id, owner, token, self._instant(until), flow_id, version)

    def beat(self, name: str, kind: str) -> None:
        self._run("beat", {"name": name, "kind": kind})
        self._run("forget_nodes", {"before": -86_400.0})

    def loop_seen(self, *, within: float) -> bool:
        return bool(self._run("loop_seen", {"before": -within}))

    # Messages.

    @abstractmethod
    def send(
        self,
        execution_id: str,
        *,
        name: str,
        message_id: str,
        body: str,
        wait: str = "",
        receiver: str | None = None,
    ) -> bool: ...

    def inbox(self, execution_id: str, name: str) -> list[Message]:
        return [Message(*row) for row in self._run("inbox", {"id": execution_id, "name": name})]

    def message_names(self, execution_id: str) -> set[str]:
        return {row[0] for row in self._run("message_names", {"id": execution_id})}

    # The clock and the transaction.

    @abstractmethod
    def now(self) -> datetime: ...

    def clock_offset(self) -> float:
        if self._offset is None:
            self.measure()
        return self._offset or 0.0

    def measure(self) -> None:
        before = datetime.now(UTC)
        asked = self.now()
        after = datetime.now(UTC)
        self._offset = (asked - before - (after - before) / 2).total_seconds()

    def shift_clock(self, by: timedelta) -> None:
        self._shift += by
        self._offset = None

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Any]: ...

    def in_transaction(self) -> bool:
        return compat.in_transaction(self.connection)

    def check_caller(self, call: str) -> None:
        connection = self.connection
        if self.in_transaction() and not connection.in_atomic_block:
            raise OpenTransactionError(
                call,
                "autocommit is off and no atomic block is open, so there is no commit to wait for",
                "Use transaction.atomic().",
            )
        if not self.in_transaction() and (other := compat.other_transaction(self.alias)):
            logger.warning(
                "%s inside a transaction on database %r only: it is not part of that transaction, since the "
                "log is on %r",
                call,
                other,
                self.alias,
            )

    def in_testcase(self) -> bool:
        return compat.in_testcase(self.connection)

    def on_commit(self, callback: Callable[[], None]) -> None:
        if self.in_transaction():
            transaction.on_commit(callback, using=self.alias, robust=True)
            return
        try:
            callback()
        except Exception:
            logger.exception("a callback after commit failed")

    def marked_for_rollback(self) -> bool:
        connection = self.connection
        return bool(connection.in_atomic_block and connection.needs_rollback)

    def close_connections(self) -> None:
        connections.close_all()

    def close_old_connections(self) -> None:
        compat.renew_connections()


def dumps(value: Any) -> str:
    """JSON in ASCII without spaces."""
    if orjson is not None:
        try:
            return orjson.dumps(value).decode()
        except TypeError:
            pass  # what it refuses, such as an integer beyond 64 bits, the standard library may take
    return json.dumps(value, separators=(",", ":"))


def chain_of_causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def dialect(statements: Iterable[Statement], words: Mapping[str, str]) -> dict[str, Statement]:
    """The statements with each ``$word`` in one database's own; ``{0}`` is what stands in parentheses."""

    def say(match: re.Match[str]) -> str:
        return words[match[1]].format(pattern.sub(say, match[2] or ""))

    pattern = re.compile(r"\$(now|later|at|time|text|is|lock_free|lock)\b(?:\(((?:[^()]|\([^()]*\))*)\))?")
    return {one.name: replace(one, sql=pattern.sub(say, " ".join(one.sql.split()))) for one in statements}


def row_of(commit: Commit) -> dict[str, Any]:
    """The columns of ``loom_execution`` that are told by the log and by the start, instants as datetimes."""
    told, new = commit.projection, commit.new
    row: dict[str, Any] = {
        "flow_id": told.flow_id,
        "version": told.version,
        "status": str(told.status),
        "last_sequence": told.last_sequence,
        "flow_hash": told.flow_hash,
        "code_hash": told.code_hash,
        "created_at": from_micros(told.created_at),
        "updated_at": from_micros(told.updated_at),
        "finished_at": from_micros(told.finished_at) if told.finished_at else None,
        "current_step": told.current_step,
        "in_doubt": told.in_doubt,
        "waits": told.waits,
        "waiting_on": told.waiting_on,
        "error_type": told.error_type,
        "error_message": told.error_message,
    }
    if new is not None:
        row |= {
            "queue": new.queue,
            "priority": new.priority,
            "not_before": new.not_before,
            "deadline": new.deadline,
            "parent_id": new.parent_id,
            "chain": new.chain or commit.execution_id,
            "subject_type": new.subject_type,
            "subject_id": new.subject_id,
            "attributes": new.attributes,
            "scheduled_at": new.scheduled_at,
        }
    return row


def from_micros(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def timers_off(commit: Commit) -> tuple[datetime, ...] | None:
    """The wake times to drop; one that the same commit owes again stays."""
    if commit.timers_off is None:
        return None
    kept = {timer.wake_at for timer in commit.timers if timer.execution_id == commit.execution_id}
    return tuple(wake_at for wake_at in commit.timers_off if wake_at not in kept)


def timer_row(row: TimerRow) -> dict[str, Any]:
    later = row.not_before if row.not_before is not None and row.not_before > row.wake_at else None
    return {
        "wake_at": row.wake_at,
        "redrive": row.redrive,
        "deadline": row.deadline,
        "not_before": later,
        "tries": row.tries,
    }


def _flow_filter(known: Known) -> dict[str, Any]:
    return {"any_flow": known.flows is None, "known": dumps(dict(known.flows or {}))}


def ready_filter(known: Known, queues: Sequence[str] | None) -> dict[str, Any]:
    """The parameters by which a claim looks for work."""
    return {**_flow_filter(known), "any_queue": queues is None, "queues": dumps(list(queues or ()))}


def _check(commit: Commit) -> None:
    commit.check()
    for other in commit.also:
        other.check()


@dataclass(slots=True)
class _Seat:
    """A commit on its way: the places that it has among those handed in, and its batch."""

    places: list[int]
    commit: Commit
    batch: int = 0


class _Batches:
    """Commits in groups that one statement may carry; each execution's commits keep their order.

    No two of a group touch one execution, but for wakes of the same one.
    """

    def __init__(self, commits: Iterable[tuple[int, Commit]]) -> None:
        self._batches: list[list[_Seat]] = []
        self._newest: dict[str, _Seat] = {}  # per execution that is written to
        self._woken: dict[str, int] = {}  # per execution that is woken: the newest batch that does it
        for place, commit in commits:
            if not self._ride(place, commit):
                self._seat(_Seat([place], commit))

    def __iter__(self) -> Iterator[list[_Seat]]:
        return iter(self._batches)

    def _ride(self, place: int, commit: Commit) -> bool:
        """Join the commit before it, if that one only adds events, so that one refusal is true of both."""
        seat = self._newest.get(commit.execution_id)
        if seat is None or self._woken.get(commit.execution_id, -1) >= seat.batch:
            return False
        earlier = seat.commit
        alike = _identity(earlier) == _identity(commit)
        follows = earlier.events[-1].sequence + 1 == commit.first_sequence
        if (
            not (alike and follows and _only_adds(earlier))
            or commit.also
            or commit.wake
            or commit.wakes is not None
        ):
            return False
        seat.places.append(place)
        seat.commit = replace(commit, events=(*earlier.events, *commit.events))
        return True

    def _seat(self, seat: _Seat) -> None:
        members = (seat.commit, *seat.commit.also)
        own = {one.execution_id for one in members} | {one.wakes_of for one in members if one.wakes_of}
        woken = {woken for one in members for woken in one.wake}
        after = [self._newest[key].batch + 1 for key in own | woken if key in self._newest]
        after += [self._woken[key] + 1 for key in own if key in self._woken]
        seat.batch = max(after, default=0)
        self._newest.update(dict.fromkeys(own, seat))
        self._woken.update(dict.fromkeys(woken, seat.batch))
        if seat.batch == len(self._batches):
            self._batches.append([])
        self._batches[seat.batch].append(seat)


def _identity(commit: Commit) -> tuple[Any, ...]:
    return commit.execution_id, commit.events[0].writer, commit.fence, commit.unguarded


def _only_adds(commit: Commit) -> bool:
    more = (commit.also, commit.wake, commit.timers, commit.timers_off, commit.messages)
    return commit.ownership.mode == "keep" and commit.wakes is None and not any(more)
