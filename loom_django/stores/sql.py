"""What the stores over the two databases share: the calls that are the same over both.

No model is imported: the tables are named, so a store can be made before the app registry is ready. All work
goes over Django's connection of the calling thread, so it joins a caller's ``atomic()`` by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

from django.db import Error, connections, transaction

from loom_django import compat
from loom_django.errors import OpenTransactionError, StaleFenceError, StoreUnavailableError
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.state import Status
from loom_django.stores.base import (
    ANY_FLOW,
    NO_LIMIT,
    Acquired,
    AppendRefused,
    Changed,
    Claimed,
    Commit,
    Due,
    Ended,
    Head,
    Known,
    Lease,
    Loaded,
    Look,
    Message,
    ParkFences,
    Pipe,
    QueueClaim,
    QueueLimits,
    RowLocked,
    SequenceOccupied,
    Snapshot,
    Stale,
    Taken,
    TimerRow,
    Upcoming,
    WakesMoved,
)
from loom_django.stores.batches import Batches, Seat
from loom_django.stores.group import AppendGroup
from loom_django.stores.retention import RetentionCalls
from loom_django.stores.schedules import ScheduleCalls
from loom_django.stores.statements import SHARED, Statement

try:
    import orjson
except ImportError:  # the extra "speed"; the standard library writes the same
    orjson = None  # type: ignore[assignment]

logger = logging.getLogger("loom_django.stores")

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# The clock's offset is measured again after so many seconds, or when the host's clock was moved by so many.
CLOCK_AGE: Final = 15.0
CLOCK_STEP: Final = 0.05

# Events of a log that goes back, in one statement.
RESTORED_AT_ONCE: Final = 1000

Row = Sequence[Any]
_T = TypeVar("_T")


class _Unchanged(Exception):
    """Roll back what was begun: nothing is to change."""


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


class SqlStore(ScheduleCalls, RetentionCalls, ABC):
    """A :class:`~loom_django.stores.base.Store` over Django's connection of one alias."""

    statements: Mapping[str, Statement] = SHARED

    def __init__(self, alias: str = "default", *, give_up: float = 30.0) -> None:
        self.alias = alias
        self.give_up = give_up
        self.sleep: Callable[[float], None] = time.sleep
        self._grouping = threading.Lock()
        self._groupers = 0
        self._group: AppendGroup | None = None
        self._writing = threading.Lock()  # while the writer's connection is used, made or closed
        self._writer: SqlStore | None = None
        self._shift = timedelta()
        self._offset: float | None = None
        self._measured_at = 0.0  # by the monotonic clock
        self._apart = 0.0  # the host's clock less the monotonic one, which nobody moves

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
    def _make_writer(self) -> SqlStore:
        """A store that appends for a group, over a connection of its own."""

    @abstractmethod
    def _claim_batch(self, parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Take ready executions and return their ids and flows; committed when this returns."""

    @abstractmethod
    def is_connection_lost(self, error: BaseException) -> bool:
        """True if an error means that the connection went."""

    # The log and its fences.

    def append(self, commit: Commit) -> None:
        _check(commit)
        group = self._group_for([commit])
        refused = self._land([commit])[0] if group is None else group.land(commit)
        if group is not None and isinstance(refused, RowLocked):
            refused = self._land([commit])[0]  # it waits by itself, and holds nobody up
        if refused is not None:
            raise refused

    @property
    def shares_commits(self) -> bool:
        group = self._group
        return group is not None and group.usable

    def append_shared(self, commits: Sequence[Commit]) -> list[Exception | None]:
        with self.grouping():  # also where none is open: it holds many rows, and is not to wait long for one
            group = self._group_for(commits)
            return self.append_many(commits) if group is None else group.land_all(commits)

    def pipe(self, loop: asyncio.AbstractEventLoop) -> Pipe | None:
        return None

    def _group_for(self, commits: Sequence[Commit]) -> AppendGroup | None:
        """What these may go with others in: not a caller's transaction, nor where a note needs one of its own."""
        group = self._group
        if group is None or not group.usable or compat.open_transaction(self.connection):
            return None
        return None if not commits or any(commit.after_end for commit in commits) else group

    @contextmanager
    def grouping(self) -> Iterator[None]:
        with self._grouping:
            self._groupers += 1
            if self._group is None:
                self._group = AppendGroup(self._land_group)
        try:
            yield
        finally:
            with self._grouping:
                self._groupers -= 1
                if not self._groupers:
                    self._group = None
                    self._end_group()

    def _land_group(self, commits: Sequence[Commit]) -> list[Exception | None]:
        """Land what a group appends, each by itself; what waits for a lock of others is let fall."""
        with self._writing:
            if self._groupers:
                if self._writer is None:
                    self._writer = self._make_writer()
                self._writer.sleep, self._writer._shift = self.sleep, self._shift
                return self._writer.append_many(commits)
        return self.append_many(commits)  # the group has ended meanwhile, and its connection with it

    def _end_group(self) -> None:
        """Nothing is appended in a group any more."""
        with self._writing:
            if self._writer is not None:
                self._writer.connection.close()
                self._writer = None

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
        for batch in Batches(fit):
            for seat, outcome in self._land_behind(batch, refused):
                if outcome is not None:
                    refused.update(dict.fromkeys(seat.commit.writers, outcome))
                for place in seat.places:
                    outcomes[place] = outcome
        return outcomes

    def _land_behind(
        self, batch: Sequence[Seat], refused: Mapping[tuple[str, int], Exception]
    ) -> list[tuple[Seat, Exception | None]]:
        """Land a batch, but for what follows a refused commit of its execution: a rival's event may stand in
        the refused one's place, and it would land behind that."""
        if not refused:
            return list(zip(batch, self._land([seat.commit for seat in batch]), strict=True))
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
        return self._in_the_way(commit, *self._run("why", {"id": key, "wakes_of": commit.wakes_of or key})[0])

    def _in_the_way(
        self, commit: Commit, token: int | None, wakes: int | None, last: int | None
    ) -> Exception | None:
        """Why a commit may not land, by its execution's token, the wakes it presents and the end of the log."""
        key = commit.execution_id
        if not commit.may_pass(token or 0):
            return StaleFenceError(key, commit.presented, token)
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
        return [self._event(execution_id, *row) for row in rows]

    def _event(
        self,
        execution_id: str,
        sequence: int,
        kind: str,
        body: str,
        fence: int | None,
        writer: int,
        is_kernel: bool,
        recorded_at: Any,
    ) -> Event:
        return Event(execution_id, sequence, kind, body, fence, writer, is_kernel, self._time(recorded_at))

    def read_short(self, ids: Sequence[str], *, most: int) -> dict[str, list[Event]]:
        logs: dict[str, list[Event]] = {}
        for key, *row in self._run("read_short", {"ids": dumps(list(ids)), "limit": most + 1}) if ids else ():
            logs.setdefault(key, []).append(self._event(key, *row))
        return {key: log for key, log in logs.items() if len(log) <= most}

    def load(self, execution_id: str, *, after: int = 0, format: str = "") -> Loaded:
        loaded = self._behind_snapshot(execution_id, format) if format else None
        if loaded is None:
            token, wakes = self._fence_row(execution_id)
            loaded = Loaded(tuple(self.read(execution_id, after=after)), token, wakes)
        return loaded

    def _behind_snapshot(self, execution_id: str, format: str) -> Loaded | None:
        """In one statement, so token and log are of one moment; None for no event: a snapshot may be beyond the end."""
        rows = self._run("read_behind_snapshot", {"id": execution_id, "format": format})
        if not rows:
            return None
        events = tuple(self._event(execution_id, *row[:-4]) for row in rows)
        *_, seal, body, token, wakes = rows[0]
        snapshot = None if seal is None else Snapshot(execution_id, format, events[0].sequence, seal, body)
        return Loaded(events, token or 0, wakes or 0, snapshot)

    def save_snapshot(self, snapshot: Snapshot, *, passed: int) -> None:
        key = snapshot.execution_id
        values = {"sequence": snapshot.sequence, "seal": snapshot.seal, "body": snapshot.body}
        with self.transaction():
            self._run("save_snapshot", {"id": key, "format": snapshot.format, **values})
            self._run("drop_passed_snapshots", {"id": key, "format": snapshot.format, "passed": passed})

    def drop_snapshots(self, execution_id: str) -> None:
        self._run("delete_snapshots", {"id": execution_id})

    def status(self, execution_id: str) -> Status | None:
        rows = self._run("status", {"id": execution_id})
        return Status(rows[0][0]) if rows else None

    def head(self, execution_id: str) -> Head | None:
        rows = self._run("head", {"id": execution_id})
        return Head(Status(rows[0][0]), *rows[0][1:]) if rows else None

    def newest(self, execution_id: str) -> Ended | None:
        rows = self._run("newest", {"id": execution_id})
        return self._ended_row(rows[0]) if rows else None

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

    def acquire_fence_if(self, execution_id: str, *, fence: int, park_seq: int) -> Acquired | Stale:
        found: Acquired | Stale = Stale(0)
        with suppress(_Unchanged), self._under_fence(execution_id, "acquire_fence_if") as token:
            found = Stale(token)
            head, answered = self._run("since_park", {"id": execution_id, "park": park_seq})[0]
            if token != fence or answered or head < park_seq:
                raise _Unchanged
            found = Acquired(self.acquire_fence(execution_id), head)
        return found

    def acquire_fences_at(self, looks: Sequence[Look]) -> dict[str, Taken]:
        if not looks:
            return {}
        with self._seeing_each_commit("acquire_fences_at"):
            ids = {"ids": dumps(sorted(look.execution_id for look in looks))}
            self._run("make_fences", ids)
            # The locks in a statement of their own: what was committed before them is seen by the next one.
            held = {row[0] for row in self._run("hold_fences", ids)}
            free = [_look_row(look) for look in looks if look.execution_id in held]
            rows = self._run("acquire_fences_at", {"looks": dumps(free)})
        return {execution_id: Taken(token, recoveries) for execution_id, token, recoveries in rows}

    def ensure_park_fences(self, *, after: str, limit: int) -> ParkFences:
        rows = self._run("parked_after", {"after": after, "limit": limit})
        parked = [execution_id for execution_id, newest in rows if newest == Kind.EXECUTION_SUSPENDED]
        made = self._run("ensure_fences", {"ids": dumps(parked)}) if parked else []
        return ParkFences(rows[-1][0] if rows else None, len(parked), len(made))

    @contextmanager
    def walking_parks(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield

    def append_if_unchanged(self, commit: Commit, *, fence: int) -> None:
        _check(commit)
        self._until_answered(lambda: self._append_under_fence(commit, fence))

    def _until_answered(self, work: Callable[[], _T]) -> _T:
        """Do a transaction of the store's own again for as long as nobody knows what came of it.

        Raises:
            StoreUnavailableError: the database stayed away.
        """
        backoff = Backoff(self.give_up, self.sleep)
        while True:
            try:
                return work()
            except Error as error:
                if compat.open_transaction(self.connection) or not self._may_resend(error):
                    raise
                if not backoff.again():
                    raise StoreUnavailableError(attempts=backoff.attempts) from error

    def _append_under_fence(self, commit: Commit, fence: int) -> None:
        with self._under_fence(commit.execution_id, "append_if_unchanged") as token:
            if self._had_landed(commit):
                return
            changed = Changed(commit.execution_id, commit.first_sequence)
            if token != fence or self._is_another(commit):
                raise changed
            refused = self._land_under_fence(replace(commit, fence=token))
            if isinstance(refused, AppendRefused):
                raise changed from refused
            if refused is not None:
                raise refused

    def _is_another(self, commit: Commit) -> bool:
        """True if what had ended was deleted, and its id begun anew: the log may be as long as it was."""
        seen = commit.projection
        names = {
            "id": commit.execution_id,
            "status": str(seen.status),
            "created_at": from_micros(seen.created_at),
        }
        return commit.after_end and bool(self._run("other_life", names))

    def _land_under_fence(self, commit: Commit) -> Exception | None:
        """Land a commit in the open transaction, which holds its fence row."""
        return self._land([commit])[0]

    def _patience(self, commits: Sequence[Commit]) -> float:
        """For how many seconds commits are sent again while the database is away."""
        return max([self.give_up, *[commit.patience for commit in commits]])

    def _may_resend(self, error: Error) -> bool:
        """True if a transaction of the store's own that met this error is to be done again."""
        if not self.is_connection_lost(error):
            return False
        self.connection.close()
        return True

    @contextmanager
    def _under_fence(self, execution_id: str, call: str | None, *others: str) -> Iterator[int]:
        """A transaction that holds an execution's fence row, and those of others; gives the token.

        What the lock waited for is seen as well; in a caller's transaction that reads from one snapshot, a row that
        has changed since is an error.
        """
        with self._seeing_each_commit(call):
            rows = {key: self._run("hold_fence", {"id": key})[0] for key in sorted({execution_id, *others})}
            yield rows[execution_id][0]

    @contextmanager
    def _seeing_each_commit(self, call: str | None) -> Iterator[None]:
        """A transaction of the store's own, or behind a savepoint in a caller's, whose statements see what is
        committed by then; without a ``call`` to be refused, a caller's may read from one snapshot."""
        joined = compat.open_transaction(self.connection)
        if joined and call is not None:  # before a block of the store's own looks like a caller's
            self._see_each_commit(call, joined=True)
        with self.transaction():
            if not joined:
                self._see_each_commit("", joined=False)
            yield

    @abstractmethod
    def _see_each_commit(self, call: str, *, joined: bool) -> None:
        """Have each statement of the open transaction read from a snapshot of its own; with ``joined``, see that
        it does.

        Raises:
            OpenTransactionError: the transaction is a caller's, and reads from one snapshot.
        """

    def ended(self, ids: Sequence[str]) -> dict[str, Event | None]:
        if not ids:
            return {}
        rows = self._run("ended", {"ids": dumps(sorted(set(ids)))})
        return {
            key: None
            if sequence is None
            else self._event(newest, sequence, kind, body, fence, writer, is_kernel, recorded_at)
            for key, newest, sequence, kind, body, fence, writer, is_kernel, recorded_at in rows
        }

    def delete_execution(self, execution_id: str, *, last: Event | None = None) -> bool:
        finished = self._run("finished", {"id": execution_id})
        if not finished:
            return False
        chain = finished[0][0]
        with suppress(_Unchanged), self._under_fence(execution_id, "delete_execution", chain):
            if not self._run("finished", {"id": execution_id}):
                raise _Unchanged
            if last is not None and self._end_of(execution_id) != (last.sequence, last.writer):
                raise _Unchanged
            ids = {"id": execution_id, "chain": chain}
            for name in (
                "delete_events", "delete_row", "delete_timers", "delete_inbox", "delete_fence",
                "delete_snapshots",
            ):  # fmt: skip
                self._run(name, ids)
            return True
        return False

    def _end_of(self, execution_id: str) -> tuple[int, int] | None:
        """Sequence and writer of the last event."""
        rows = self._run("end_of_log", {"id": execution_id})
        return (rows[0][0], rows[0][1]) if rows else None

    def restore(self, commit: Commit) -> bool:
        _check(commit)
        key, parked = commit.execution_id, commit.projection.status == Status.SUSPENDED
        row = {"id": key, "ready": commit.ownership.mode == "ready", **row_of(commit)}
        with suppress(_Unchanged), self.transaction():
            if parked:
                self._run("ensure_fences", {"ids": dumps([key])})
            for start in range(0, len(commit.events), RESTORED_AT_ONCE):
                piece = [
                    self._recorded_event(event) for event in commit.events[start : start + RESTORED_AT_ONCE]
                ]
                if len(self._run("restore_events", {"id": key, "events": dumps(piece)})) != len(piece):
                    raise _Unchanged
            if not self._run("restore_row", row):
                raise _Unchanged
            for timer in commit.timers:
                self._run("schedule", {"id": key, **timer_row(timer)})
            return True
        return False

    def _recorded_event(self, event: Event) -> dict[str, Any]:
        return {
            "sequence": event.sequence,
            "kind": str(event.kind),
            "body": event.body,
            "fence": event.fence,
            "writer": event.writer,
            "kernel": bool(event.is_kernel),
            "recorded_at": None if event.recorded_at is None else self._recorded(event.recorded_at),
        }

    @abstractmethod
    def _recorded(self, instant: datetime) -> Any:
        """An instant as "restore_events" takes it in JSON."""

    # The wakes that are owed.

    def schedule(self, row: TimerRow) -> None:
        self._run("schedule", {"id": row.execution_id, **timer_row(row)})

    def claim_due(
        self, *, limit: int, hold: float, known: Known, redrive: bool, since: datetime | None = None
    ) -> list[Due]:
        names = {"limit": limit, "hold": hold, "redrive": redrive, "since": since, **_flow_filter(known)}
        rows = self._due_rows(names)
        if not rows:
            return []
        held, now = self._instant(rows[0][8]), self._instant(rows[0][9])  # the same for all of a claim
        dues = []
        for execution_id, told, redrive, deadline, not_before, tries, flow_id, version, *_ in rows:
            wake_at = self._instant(told)
            row = TimerRow(execution_id, wake_at, redrive, bool(deadline), held, tries)
            dues.append(Due(row, now, flow_id, version, self._time(not_before) or wake_at))
        dues.sort(key=attrgetter("at"))
        return dues

    @abstractmethod
    def _due_rows(self, parameters: Mapping[str, Any]) -> list[Row]:
        """Take due rows: the timer's six columns as they were, flow and version, until when it is held, and now."""

    def put_off(self, row: TimerRow, *, delay: float, tries: int) -> None:
        names = {"id": row.execution_id, "wake_at": row.wake_at, "claimed": row.not_before}
        self._run("put_off", {**names, "delay": delay, "tries": tries})

    def retire(self, execution_id: str, wake_at: datetime, *, claimed: TimerRow | None = None) -> None:
        if claimed is None:
            self._run("retire", {"id": execution_id, "wake_at": wake_at})
        else:
            names = {"id": execution_id, "wake_at": wake_at, "claimed": claimed.not_before}
            self._run("retire_claimed", names)

    def retire_redrives(self, execution_id: str, *, claimed: TimerRow) -> None:
        self._run("retire_redrives", {"id": execution_id, "claimed": claimed.not_before})

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
        besides: Sequence[str] = (),
    ) -> list[Claimed]:
        lease = {"owner": owner, "token": token, "ttl": ttl, "limit": limit}
        return self._fenced(
            self._claim_batch({**lease, **_flow_filter(known), **_queue_filter(queues, besides)}), token
        )

    def claim_limited(
        self, queue: str, limits: QueueLimits, *, owner: str, token: int, ttl: float, limit: int, known: Known
    ) -> QueueClaim:
        # Looked at without the lock first: mostly there is nothing to claim, or no room.
        most, again_in, _, _ = self._queue_room(queue, limits)
        if most == 0:
            return QueueClaim([], again_in)
        look = {"owner": owner, "token": token, "ttl": ttl, **_flow_filter(known), **_queue_filter([queue])}
        with self._under_queue(queue, "claim_limited"):
            most, again_in, now, next_at = self._queue_room(queue, limits)
            taken = self._claim_batch({**look, "limit": min(limit, most)}) if most > 0 else []
            if taken and limits.rate is not None:
                spent = limits.spent(len(taken), now=now, next_at=next_at)
                self._run("spend_rate", {"queue": queue, "next_at": spent})
        return QueueClaim(self._fenced(taken, token), again_in)

    @contextmanager
    def _under_queue(self, queue: str, call: str) -> Iterator[None]:
        """A transaction in which nobody else claims of that queue, and all earlier claims of it are seen."""
        with self._seeing_each_commit(call):
            self._run("hold_queue", {"queue": queue})
            yield

    def _queue_room(
        self, queue: str, limits: QueueLimits
    ) -> tuple[int, float | None, datetime, datetime | None]:
        """How many may be claimed, 0 if none is ready; when to look again; the time; the mark of the rate."""
        row = self._run("queue_room", {"queue": queue, **_queue_filter([queue])})[0]
        held, next_at, now, ready = row[0], self._time(row[1]), self._instant(row[2]), row[3]
        most, again_in = limits.admits(held=held, now=now, next_at=next_at) if ready else (0, None)
        return most, again_in, now, next_at

    def upcoming(self, *, queues: Sequence[str] | None = None) -> Upcoming:
        now, timer, ready = self._run("upcoming", _queue_filter(queues))[0]
        return Upcoming(self._instant(now), self._time(timer), self._time(ready))

    def _fenced(self, taken: Sequence[tuple[str, str]], token: int) -> list[Claimed]:
        """Take the fences of what was just claimed."""
        if not taken:
            return []
        ids = dumps(sorted(execution_id for execution_id, _ in taken))
        # The fences in a statement of their own: together with the rows of executions they would be taken
        # in the wrong order, against everyone who holds a fence and waits for a row.
        fences = {row[0]: row[1] for row in self._run("acquire_fences", {"ids": ids})}
        return [
            Claimed(execution_id, token, fences[execution_id], flow_id) for execution_id, flow_id in taken
        ]

    def renew(self, leases: Sequence[tuple[str, int]], *, ttl: float) -> set[str]:
        if not leases:
            return set()
        return {row[0] for row in self._run("renew", {"leases": _pairs(leases), "ttl": ttl})}

    def release(self, execution_id: str, token: int, *, delay: float = 0.0) -> bool:
        return bool(self._run("release", {"id": execution_id, "token": token, "delay": delay}))

    def release_all(self, ids: Sequence[str], token: int) -> set[str]:
        if not ids:
            return set()
        return {row[0] for row in self._run("release_all", {"ids": dumps(list(ids)), "token": token})}

    def expired(self, *, limit: int) -> list[Lease]:
        return [self._lease(row) for row in self._run("expired", {"limit": limit})]

    def leases(self, *, limit: int) -> list[Lease]:
        return [self._lease(row) for row in self._run("leases", {"limit": limit})]

    def take_over(self, lease: Lease, *, owner: str, token: int, ttl: float, forced: bool = False) -> bool:
        names = {"id": lease.execution_id, "seen": lease.token, "owner": owner, "token": token, "ttl": ttl}
        return bool(self._run("take_over", {**names, "forced": forced}))

    def take_over_all(self, leases: Sequence[Lease], *, owner: str, token: int, ttl: float) -> set[str]:
        if not leases:
            return set()
        seen = _pairs([(lease.execution_id, lease.token) for lease in leases])
        names = {"leases": seen, "owner": owner, "token": token, "ttl": ttl}
        return {row[0] for row in self._run("take_over_all", names)}

    def held(self, execution_id: str) -> Lease | None:
        rows = self._run("held", {"id": execution_id})
        return self._lease(rows[0]) if rows else None

    def stale_ready(self, *, grace: float, limit: int, known: Known = ANY_FLOW) -> list[Lease]:
        parameters = {"before": -grace, "limit": limit, **_flow_filter(known)}
        return [self._lease(row) for row in self._run("stale_ready", parameters)]

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

    # Notices; a database that has none says so.

    @property
    def notifies(self) -> bool:
        return False

    def notify(self) -> None:
        raise NotImplementedError(f"the database {self.alias!r} has no notices")

    def listen(self) -> AbstractContextManager[Callable[[float], bool]]:
        raise NotImplementedError(f"the database {self.alias!r} has no notices")

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
        principal: str = "",
        reason: str = "",
    ) -> bool: ...

    def send_unless_answered(
        self,
        execution_id: str,
        *,
        since: int,
        name: str,
        message_id: str,
        body: str,
        wait: str,
        chain: str | None = None,
    ) -> bool:
        inbox = chain or execution_id
        with self._under_fence(execution_id, "send_unless_answered", inbox):
            head, answered = self._run("since_park", {"id": execution_id, "park": since})[0]
            if answered or head < since:
                raise Changed(execution_id, since)
            return self.send(
                inbox, name=name, message_id=message_id, body=body, wait=wait, receiver=execution_id
            )

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
        self._measured_at, self._apart = time.monotonic(), _apart()
        self._offset = (asked - before - (after - before) / 2).total_seconds()

    def clock_is_old(self) -> bool:
        old = time.monotonic() - self._measured_at >= CLOCK_AGE
        moved = abs(_apart() - self._apart) >= CLOCK_STEP
        return self._offset is None or old or moved

    def check_clock(self) -> None:
        if not self.clock_is_old():
            return
        if self._offset is None:
            self.measure()
            return
        if self.in_testcase():
            return
        try:
            self.measure()
        except Error as error:
            if self.in_transaction():
                raise  # the transaction is broken by it
            logger.debug("the store's clock could not be read; the offset stays: %s", error)

    def shift_clock(self, by: timedelta) -> None:
        self._shift += by
        self._offset = None

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Any]: ...

    def in_transaction(self) -> bool:
        # In a loop each task would make a connection of its own to be looked at.
        return not compat.refuses_queries() and compat.in_any_transaction(self.connection)

    def transaction_check(self) -> Callable[[], bool]:
        if compat.refuses_queries():  # as it does while a loop runs
            return lambda: not compat.in_loop() and self.in_transaction()
        connection = self.connection  # to look for it costs more than the check
        return partial(compat.in_any_transaction, connection)

    def leave_transaction(self) -> bool:
        return self.in_transaction() and compat.leave_transaction(self.connection)

    def check_caller(self, call: str, *, answers: bool = False) -> None:
        joined = self.in_transaction()
        if joined and not self.connection.in_atomic_block:
            raise OpenTransactionError(
                call,
                "autocommit is off, or BEGIN was sent, and no atomic block is open, so there is no commit to "
                "wait for",
                "Use transaction.atomic().",
            )
        if answers and joined:
            self._see_each_commit(call, joined=True)
        if not joined and (other := compat.other_transaction(self.alias)):
            logger.warning(
                "%s inside a transaction on database %r only: it is not part of that transaction, since the "
                "log is on %r",
                call,
                other,
                self.alias,
            )

    def in_testcase(self) -> bool:
        return compat.has_testcases() and compat.in_testcase(self.connection)

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


def _apart() -> float:
    return time.time() - time.monotonic()


def dumps(value: Any) -> str:
    """JSON without spaces; instants in ISO 8601."""
    if orjson is not None:
        try:
            return orjson.dumps(value).decode()
        except TypeError:
            pass  # what it refuses, such as an integer beyond 64 bits, the standard library may take
    return json.dumps(value, separators=(",", ":"), default=datetime.isoformat)


def chain_of_causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def row_of(commit: Commit, instant: Callable[[int], Any] | None = None) -> dict[str, Any]:
    """The columns of ``loom_execution`` that are told by the log and by the start.

    What the log tells in microseconds is given as ``instant`` makes it, by default as a datetime, like the others.
    """
    instant = instant or from_micros
    told, new = commit.projection, commit.new
    row: dict[str, Any] = {
        "flow_id": told.flow_id,
        "version": told.version,
        "status": str(told.status),
        "last_sequence": told.last_sequence,
        "flow_hash": told.flow_hash,
        "code_hash": told.code_hash,
        "created_at": instant(told.created_at),
        "updated_at": instant(told.updated_at),
        "finished_at": instant(told.finished_at) if told.finished_at else None,
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
    """The wake times to drop; one that the same commit owes again stays, in whatever order that is done."""
    if not commit.timers_off:
        return commit.timers_off
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


def _pairs(leases: Sequence[tuple[str, int]]) -> str:
    """Leases by (execution id, token)."""
    return dumps([{"id": execution_id, "token": token} for execution_id, token in leases])


def _look_row(look: Look) -> dict[str, Any]:
    return {
        "id": look.execution_id,
        "head": look.head,
        "fence": look.fence,
        "lease": look.lease,
        "progress": look.progress,
    }


def _flow_filter(known: Known) -> dict[str, Any]:
    return {"any_flow": known.flows is None, "known": dumps(dict(known.flows or {}))}


def _queue_filter(queues: Sequence[str] | None, besides: Sequence[str] = ()) -> dict[str, Any]:
    """The parameters by which a look for work knows its queues."""
    return {"any_queue": queues is None, "queues": dumps(list(queues or ())), "besides": dumps(list(besides))}


def _check(commit: Commit) -> None:
    commit.check()
    for other in commit.also:
        other.check()
