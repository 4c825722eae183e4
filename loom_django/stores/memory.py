"""The reference store: what each call of :mod:`loom_django.stores.base` means, in the fewest words.

It lives in one process and forgets everything with it. One lock makes every call atomic, and after each
change of an execution it asserts that exactly one of four holds: finished, parked, ready, held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import itemgetter

from loom_django.errors import StaleFenceError
from loom_django.kernel.events import TERMINAL, Event, Kind, is_answering
from loom_django.kernel.projection import Projection
from loom_django.kernel.state import TERMINAL_STATUSES, Status
from loom_django.stores.base import (
    ANY_FLOW,
    Acquired,
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
    NewExecution,
    Ownership,
    ParkFences,
    Pipe,
    QueueClaim,
    QueueLimits,
    ScheduleRow,
    SequenceOccupied,
    Snapshot,
    Stale,
    Taken,
    TimerRow,
    Upcoming,
    WakesMoved,
)

logger = logging.getLogger("loom_django.stores")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)  # never changed; one for each append, and a frozen one would cost thrice as much
class _Row:
    """One execution: its projection, and who is to run it."""

    new: NewExecution
    projection: Projection
    ready_at: datetime | None = None
    owner: str = ""
    token: int | None = None
    until: datetime | None = None

    def check(self) -> None:
        status = self.projection.status
        unowned = status in TERMINAL_STATUSES or status == Status.SUSPENDED
        ready = self.ready_at is not None
        held = self.token is not None and self.until is not None
        if ready + held != (not unowned):
            raise AssertionError(
                f"{status}, ready {ready}, held {held}: not one of finished, parked, ready, held"
            )


@dataclass(frozen=True, slots=True)
class _FenceRow:
    token: int = 0
    wakes: int = 0
    recoveries: int = 0
    recovered_sequence: int = 0


_UNFENCED = _FenceRow()


@dataclass
class _Tables:
    logs: defaultdict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[str, _Row] = field(default_factory=dict)
    fences: dict[str, _FenceRow] = field(default_factory=dict)
    timers: defaultdict[str, dict[datetime, TimerRow]] = field(default_factory=lambda: defaultdict(dict))
    # What a claim has made of a timer, and since when that was due.
    held: dict[tuple[str, datetime], tuple[TimerRow, datetime]] = field(default_factory=dict)
    inboxes: defaultdict[str, dict[str, Message]] = field(default_factory=lambda: defaultdict(dict))
    taken: set[int] = field(default_factory=set)
    schedules: dict[str, ScheduleRow] = field(default_factory=dict)
    queues: dict[str, datetime] = field(default_factory=dict)  # what their rates have spent
    snapshots: dict[str, dict[str, Snapshot]] = field(default_factory=dict)  # by execution and format

    def copy(self) -> _Tables:
        return _Tables(
            defaultdict(list, {key: list(log) for key, log in self.logs.items()}),
            dict(self.rows),
            dict(self.fences),
            defaultdict(dict, {key: dict(rows) for key, rows in self.timers.items()}),
            dict(self.held),
            defaultdict(dict, {key: dict(inbox) for key, inbox in self.inboxes.items()}),
            set(self.taken),
            dict(self.schedules),
            dict(self.queues),
            {key: dict(kept) for key, kept in self.snapshots.items()},
        )


class MemoryStore:
    """A :class:`~loom_django.stores.base.Store` without a database."""

    def __init__(self, clock: Callable[[], datetime] | None = None) -> None:
        self._clock = clock
        self._shift = timedelta()
        self._offset = 0.0  # the same in seconds
        self._lock = threading.RLock()
        self._depth = 0  # of open transactions; the lock's holder is the only one who is in them
        self._rollback = False
        self._after: list[Callable[[], None]] = []
        self._tables = _Tables()
        self._seen_at: datetime | None = None  # any loop, last
        self._numbers = itertools.count(1)

    # The log and its fences.

    def append(self, commit: Commit) -> None:
        with self._lock:
            group = (commit, *commit.also)
            for member in group:
                member.check()
            if all(map(self._landed, group)):
                return
            now = self.now()
            for member in group:
                self._guard(member)
            rows = [self._next_row(member, now) for member in group]
            for member, row in zip(group, rows, strict=True):
                self._write(member, row, now)

    def append_many(self, commits: Sequence[Commit]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        refused: dict[tuple[str, int], Exception] = {}
        for commit in commits:
            outcome = next((refused[key] for key in commit.writers if key in refused), None)
            if outcome is None:
                try:
                    self.append(commit)
                except Exception as error:
                    outcome = error
            if outcome is not None:
                refused.update(dict.fromkeys(commit.writers, outcome))
            outcomes.append(outcome)
        return outcomes

    @property
    def shares_commits(self) -> bool:
        return False

    def append_shared(self, commits: Sequence[Commit]) -> list[Exception | None]:
        return self.append_many(commits)

    def pipe(self, loop: asyncio.AbstractEventLoop) -> Pipe | None:
        return None

    @contextmanager
    def grouping(self) -> Iterator[None]:
        """Nothing is gained by it."""
        yield

    def _landed(self, commit: Commit) -> bool:
        before = commit.first_sequence - 1
        there = self._tables.logs[commit.execution_id][before : before + len(commit.events)]
        return len(there) == len(commit.events) and all(
            old.writer == new.writer != 0 for old, new in zip(there, commit.events, strict=True)
        )

    def _guard(self, commit: Commit) -> None:
        fence = self._fence_row(commit.execution_id)
        if not commit.may_pass(fence.token):
            raise StaleFenceError(commit.execution_id, commit.presented, fence.token)
        if commit.wakes not in (None, self._fence_row(commit.wakes_of or commit.execution_id).wakes):
            raise WakesMoved(commit.execution_id, commit.first_sequence)
        if len(self._tables.logs[commit.execution_id]) != commit.first_sequence - 1:
            raise SequenceOccupied(commit.execution_id, commit.first_sequence)

    def _next_row(self, commit: Commit, now: datetime) -> _Row:
        there = self._tables.rows.get(commit.execution_id)
        if there is None:  # a start; or a log that lost its row, which is for somebody to run
            owned = commit.projection.status in (Status.PENDING, Status.RUNNING)
            there = _Row(commit.new or NewExecution(), commit.projection, ready_at=now if owned else None)
        row = _own(there, commit.projection, commit.ownership, now)
        row.check()
        return row

    def _write(self, commit: Commit, row: _Row, now: datetime) -> None:
        tables, key = self._tables, commit.execution_id
        if commit.new is not None and (fence := self._fence_row(key)).token:
            tables.fences[key] = _FenceRow(fence.token + 1, fence.wakes)
        if commit.takes is not None:
            self.acquire_fence(key)
        if commit.parks:
            tables.fences.setdefault(key, _UNFENCED)
            tables.fences.setdefault(commit.wakes_of or key, _UNFENCED)
        for woken in commit.wake:
            self._wake(woken, woken, now)
        tables.logs[key] += [event.recorded(now) for event in commit.events]
        tables.rows[key] = row
        self._drop_timers(commit)
        for timer in commit.timers:
            self._upsert(timer)
        tables.taken.update(commit.messages)

    def _drop_timers(self, commit: Commit) -> None:
        rows = self._tables.timers.get(commit.execution_id)
        if not rows:
            return
        for wake_at, timer in list(rows.items()):
            plain = timer.redrive is None and not timer.deadline
            if commit.timers_off is None or (plain and wake_at in commit.timers_off):
                del rows[wake_at]

    def _wake(self, execution_id: str, receiver: str, now: datetime) -> None:
        fence = self._fence_row(execution_id)
        self._tables.fences[execution_id] = replace(fence, wakes=fence.wakes + 1)
        self._upsert(TimerRow(receiver, now, redrive=0))

    def _put(self, execution_id: str, row: _Row) -> None:
        row.check()
        self._tables.rows[execution_id] = row

    def _fence_row(self, execution_id: str) -> _FenceRow:
        return self._tables.fences.get(execution_id, _UNFENCED)

    def read(self, execution_id: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        with self._lock:
            log = self._tables.logs[execution_id]
            return log[after : None if limit is None else after + limit]

    def read_short(self, ids: Sequence[str], *, most: int) -> dict[str, list[Event]]:
        with self._lock:
            logs = {key: self.read(key) for key in ids}
            return {key: log for key, log in logs.items() if 0 < len(log) <= most}

    def load(self, execution_id: str, *, after: int = 0, format: str = "") -> Loaded:
        with self._lock:
            fence = self._fence_row(execution_id)
            snapshot = self._tables.snapshots.get(execution_id, {}).get(format)
            if snapshot is not None and snapshot.sequence > len(self._tables.logs.get(execution_id, ())):
                snapshot = None
            start = after if snapshot is None else snapshot.sequence - 1
            return Loaded(tuple(self.read(execution_id, after=start)), fence.token, fence.wakes, snapshot)

    def save_snapshot(self, snapshot: Snapshot, *, passed: int) -> None:
        with self._lock:
            row = self._tables.rows.get(snapshot.execution_id)
            if row is None or row.projection.status in TERMINAL_STATUSES:
                return
            there = self._tables.snapshots.get(snapshot.execution_id, {})
            left = {name: kept for name, kept in there.items() if kept.sequence > passed}
            self._tables.snapshots[snapshot.execution_id] = {**left, snapshot.format: snapshot}

    def drop_snapshots(self, execution_id: str) -> None:
        with self._lock:
            self._tables.snapshots.pop(execution_id, None)

    def status(self, execution_id: str) -> Status | None:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            return row.projection.status if row else None

    def head(self, execution_id: str) -> Head | None:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            if row is None:
                return None
            last = self._tables.logs[execution_id][-1]
            return Head(row.projection.status, row.new.parent_id, last.sequence, last.writer)

    def newest(self, execution_id: str) -> Ended | None:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            chain = (row.new.chain if row else None) or execution_id
            return next(reversed(self._members(chain)), None)

    def fence(self, execution_id: str) -> int:
        with self._lock:
            return self._fence_row(execution_id).token

    def wakes(self, execution_id: str) -> int:
        with self._lock:
            return self._fence_row(execution_id).wakes

    def acquire_fence(self, execution_id: str) -> int:
        with self._lock:
            fence = self._fence_row(execution_id)
            self._tables.fences[execution_id] = replace(fence, token=fence.token + 1)
            return fence.token + 1

    def acquire_fence_if(self, execution_id: str, *, fence: int, park_seq: int) -> Acquired | Stale:
        with self._lock:
            token, log = self._fence_row(execution_id).token, self._tables.logs[execution_id]
            if token != fence or self._answered(execution_id, park_seq) or len(log) < park_seq:
                return Stale(token)
            return Acquired(self.acquire_fence(execution_id), len(log))

    def acquire_fences_at(self, looks: Sequence[Look]) -> dict[str, Taken]:
        with self._lock:
            taken = {}
            for look in looks:
                key, row = look.execution_id, self._tables.rows.get(look.execution_id)
                as_seen = len(self._tables.logs[key]) == look.head and look.fence in (None, self.fence(key))
                if not as_seen or (look.lease is not None and (row is None or row.token != look.lease)):
                    continue
                if look.progress is not None:
                    self.count_recovery(key, sequence=look.progress)
                taken[key] = Taken(self.acquire_fence(key), self._fence_row(key).recoveries)
            return taken

    def _answered(self, execution_id: str, since: int) -> bool:
        return any(
            is_answering(event.kind, event.is_kernel) for event in self._tables.logs[execution_id][since:]
        )

    def ensure_park_fences(self, *, after: str, limit: int) -> ParkFences:
        with self._lock:
            logs, fences = self._tables.logs, self._tables.fences
            ids = sorted(key for key, log in logs.items() if key > after and any(map(_is_park, log)))[:limit]
            parked = [key for key in ids if _is_parked(logs[key])]
            made = [key for key in parked if key not in fences]
            fences.update(dict.fromkeys(made, _UNFENCED))
            return ParkFences(ids[-1] if ids else None, len(parked), len(made))

    @contextmanager
    def walking_parks(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield

    def append_if_unchanged(self, commit: Commit, *, fence: int) -> None:
        with self._lock:
            if self._landed(commit):
                return
            token, log = self._fence_row(commit.execution_id).token, self._tables.logs[commit.execution_id]
            if token != fence or len(log) != commit.first_sequence - 1:
                raise Changed(commit.execution_id, commit.first_sequence)
            self.append(replace(commit, fence=token))

    def ended(self, ids: Sequence[str]) -> dict[str, Event | None]:
        with self._lock:
            logs = {key: self._tables.logs[self._newest_id(key)] for key in ids if key in self._tables.rows}
            return {
                key: next((event for event in reversed(log) if event.kind in TERMINAL), None)
                for key, log in logs.items()
            }

    def delete_execution(self, execution_id: str, *, last: Event | None = None) -> bool:
        with self._lock:
            tables = self._tables
            row = tables.rows.get(execution_id)
            if row is None or row.projection.status not in TERMINAL_STATUSES:
                return False
            if last is not None:
                end = tables.logs[execution_id][-1]
                if (end.sequence, end.writer) != (last.sequence, last.writer):
                    return False
            del tables.rows[execution_id]
            tables.logs.pop(execution_id, None)
            tables.timers.pop(execution_id, None)
            tables.snapshots.pop(execution_id, None)
            chain = row.new.chain or execution_id
            if not any((other.new.chain or key) == chain for key, other in tables.rows.items()):
                tables.inboxes.pop(chain, None)
                self._delete_fence(chain)
            if chain != execution_id:
                self._delete_fence(execution_id)
            return True

    def ended_before(
        self, status: Status, before: datetime, *, after: tuple[datetime, str] | None = None, limit: int
    ) -> list[Ended]:
        with self._lock:
            found = [
                (row.finished_at, row.id, row)
                for row in map(self._ended_row, self._tables.rows)
                if row.status == status and row.finished_at is not None and row.finished_at < before
            ]
            return [row for at, key, row in sorted(found) if after is None or (at, key) > after][:limit]

    def children(self, execution_id: str, *, after: str = "", limit: int) -> list[Ended]:
        with self._lock:
            ids = sorted(
                key
                for key, row in self._tables.rows.items()
                if row.new.parent_id == execution_id and key > after
            )
            return [self._ended_row(key) for key in ids[:limit]]

    def chain_members(self, execution_id: str) -> list[Ended]:
        with self._lock:
            rows = self._tables.rows
            if execution_id not in rows:
                return []
            return self._members(self._ended_row(execution_id).chain)

    def _newest_id(self, execution_id: str) -> str:
        """Whoever goes on for an execution that is there: itself, unless it was continued."""
        if self._tables.rows[execution_id].projection.status != Status.CONTINUED:
            return execution_id
        newest = self.newest(execution_id)
        return newest.id if newest else execution_id

    def _members(self, chain: str) -> list[Ended]:
        """Oldest first."""
        rows = self._tables.rows
        members = [key for key in rows if self._ended_row(key).chain == chain]
        members.sort(key=lambda key: (rows[key].projection.created_at, key))
        return [self._ended_row(key) for key in members]

    def _ended_row(self, execution_id: str) -> Ended:
        row = self._tables.rows[execution_id]
        told = row.projection
        finished = _EPOCH + timedelta(microseconds=told.finished_at) if told.finished_at else None
        return Ended(execution_id, row.new.chain or execution_id, told.status, finished)

    def decided(self, execution_id: str) -> NewExecution | None:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            return None if row is None else replace(row.new, chain=row.new.chain or execution_id)

    def restore(self, commit: Commit) -> bool:
        commit.check()
        with self._lock:
            tables, key, now = self._tables, commit.execution_id, self.now()
            if key in tables.rows or tables.logs[key]:
                return False
            if commit.projection.status == Status.SUSPENDED:
                tables.fences.setdefault(key, _UNFENCED)
            row = self._next_row(commit, now)
            tables.logs[key] += [
                replace(event, recorded_at=event.recorded_at or now) for event in commit.events
            ]
            tables.rows[key] = row
            for timer in commit.timers:
                self._upsert(timer)
            return True

    def _delete_fence(self, execution_id: str) -> None:
        if self._fence_row(execution_id).token == 0:
            self._tables.fences.pop(execution_id, None)

    # The wakes that are owed.

    def schedule(self, row: TimerRow) -> None:
        with self._lock:
            self._upsert(row)

    def _upsert(self, row: TimerRow) -> None:
        rows = self._tables.timers[row.execution_id]
        there = rows.get(row.wake_at)
        if there is not None:
            redrive = there.redrive if row.redrive is None else row.redrive
            row = replace(row, redrive=redrive, deadline=row.deadline or there.deadline)
        rows[row.wake_at] = row

    def _all_timers(self) -> Iterator[TimerRow]:
        for rows in self._tables.timers.values():
            yield from rows.values()

    def claim_due(
        self, *, limit: int, hold: float, known: Known, redrive: bool, since: datetime | None = None
    ) -> list[Due]:
        with self._lock:
            now, tables = self.now(), self._tables
            line = sorted([(row, self._due_since(row)) for row in self._all_timers()], key=itemgetter(1))
            due = [
                (row, at)
                for row, at in line
                if _due_at(row) <= now
                and (since or at) <= at
                and (redrive or row.redrive is None)
                and self._serves(known, row)
            ]
            claimed = []
            for row, at in due[:limit]:
                held = replace(row, not_before=now + timedelta(seconds=hold))
                tables.timers[row.execution_id][row.wake_at] = held
                claimed.append(Due(held, now, *self._flow_of(row.execution_id), at))
            there = {_key(row) for row, _ in line}
            tables.held = {key: kept for key, kept in tables.held.items() if key in there}
            tables.held |= {_key(due.row): (due.row, due.at) for due in claimed}
            return claimed

    def _due_since(self, row: TimerRow) -> datetime:
        """Where it stands in line: a hold keeps it from others, but does not move it."""
        kept = self._tables.held.get(_key(row))
        return kept[1] if kept is not None and kept[0] is row else _due_at(row)

    def _serves(self, known: Known, row: TimerRow) -> bool:
        there = self._tables.rows.get(row.execution_id)
        if there is None:
            return True
        continued = self.newest(row.execution_id) if there.projection.status == Status.CONTINUED else None
        return known.admits(*self._flow_of(continued.id if continued else row.execution_id))

    def _flow_of(self, execution_id: str) -> tuple[str, int]:
        row = self._tables.rows.get(execution_id)
        return (row.projection.flow_id, row.projection.version) if row else ("", 0)

    def put_off(self, row: TimerRow, *, delay: float, tries: int) -> None:
        with self._lock:
            rows = self._tables.timers[row.execution_id]
            there = rows.get(row.wake_at)
            if there is not None and there.not_before == row.not_before:
                not_before = self.now() + timedelta(seconds=delay)
                rows[row.wake_at] = replace(there, not_before=not_before, tries=tries)

    def retire(self, execution_id: str, wake_at: datetime, *, claimed: TimerRow | None = None) -> None:
        with self._lock:
            rows = self._tables.timers[execution_id]
            there = rows.get(wake_at)
            if there is not None and (claimed is None or there.not_before == claimed.not_before):
                del rows[wake_at]

    def retire_redrives(self, execution_id: str, *, claimed: TimerRow) -> None:
        with self._lock:
            rows = self._tables.timers[execution_id]
            for row in [row for row in rows.values() if row.redrive is not None and not row.deadline]:
                if row.not_before == claimed.not_before:
                    del rows[row.wake_at]

    def timers(self, execution_id: str) -> list[TimerRow]:
        with self._lock:
            return sorted(self._tables.timers[execution_id].values(), key=lambda row: row.wake_at)

    def next_due(self) -> datetime | None:
        with self._lock:
            return min(map(_due_at, self._all_timers()), default=None)

    # Who is alive and holds an execution.

    def claim(self, execution_id: str, *, owner: str, token: int, ttl: float) -> bool:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            if row is None or row.ready_at is None or row.ready_at > self.now():
                return False
            self._put(
                execution_id,
                _own(row, row.projection, Ownership("held", owner=owner, token=token, ttl=ttl), self.now()),
            )
            return True

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
        with self._lock:
            ready = [
                (-row.new.priority, row.ready_at, execution_id)
                for execution_id, row in self._tables.rows.items()
                if row.ready_at is not None
                and row.ready_at <= self.now()
                and (queues is None or row.new.queue in queues)
                and row.new.queue not in besides
                and known.admits(row.projection.flow_id, row.projection.version)
            ]
            claimed = []
            for _, _, execution_id in sorted(ready)[:limit]:
                self.claim(execution_id, owner=owner, token=token, ttl=ttl)
                flow_id = self._tables.rows[execution_id].projection.flow_id
                claimed.append(Claimed(execution_id, token, self.acquire_fence(execution_id), flow_id))
            return claimed

    def claim_limited(
        self, queue: str, limits: QueueLimits, *, owner: str, token: int, ttl: float, limit: int, known: Known
    ) -> QueueClaim:
        with self._lock:
            now, marks = self.now(), self._tables.queues
            rows = [row for row in self._tables.rows.values() if row.new.queue == queue]
            if not any(row.ready_at is not None and row.ready_at <= now for row in rows):
                return QueueClaim([])
            held = sum(row.token is not None for row in rows)
            most, again_in = limits.admits(held=held, now=now, next_at=marks.get(queue))
            claims = self.claim_ready(
                owner=owner, token=token, ttl=ttl, limit=min(limit, most), known=known, queues=[queue]
            )
            if claims and limits.rate is not None:
                marks[queue] = limits.spent(len(claims), now=now, next_at=marks.get(queue))
            return QueueClaim(claims, again_in)

    def upcoming(self, *, queues: Sequence[str] | None = None) -> Upcoming:
        with self._lock:
            now = self.now()
            due = (_due_at(row) for row in self._all_timers())
            ready = (
                row.ready_at
                for row in self._tables.rows.values()
                if row.ready_at is not None and (queues is None or row.new.queue in queues)
            )
            return Upcoming(now, *(min((at for at in all if at > now), default=None) for all in (due, ready)))

    def renew(self, leases: Sequence[tuple[str, int]], *, ttl: float) -> set[str]:
        with self._lock:
            held = {
                key for key, token in leases if (row := self._tables.rows.get(key)) and row.token == token
            }
            for execution_id in held:
                until = self.now() + timedelta(seconds=ttl)
                self._put(execution_id, replace(self._tables.rows[execution_id], until=until))
            return held

    def release(self, execution_id: str, token: int, *, delay: float = 0.0) -> bool:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            if row is None or row.token != token:
                return False
            self._put(
                execution_id,
                _own(row, row.projection, Ownership("ready"), self.now() + timedelta(seconds=delay)),
            )
            return True

    def release_all(self, ids: Sequence[str], token: int) -> set[str]:
        with self._lock:
            return {key for key in ids if self.release(key, token)}

    def expired(self, *, limit: int) -> list[Lease]:
        with self._lock:
            return [lease for lease in self._leases() if lease.until <= self.now()][:limit]

    def leases(self, *, limit: int) -> list[Lease]:
        with self._lock:
            return self._leases()[:limit]

    def _leases(self) -> list[Lease]:
        leases = [lease for key in self._tables.rows if (lease := self.held(key)) is not None]
        return sorted(leases, key=lambda lease: lease.until)

    def take_over(self, lease: Lease, *, owner: str, token: int, ttl: float, forced: bool = False) -> bool:
        with self._lock:
            row = self._tables.rows.get(lease.execution_id)
            if row is None or row.until is None or row.token != lease.token:
                return False
            if row.until > self.now() and not forced:
                return False
            held = Ownership("held", owner=owner, token=token, ttl=ttl)
            self._put(lease.execution_id, _own(row, row.projection, held, self.now()))
            return True

    def take_over_all(self, leases: Sequence[Lease], *, owner: str, token: int, ttl: float) -> set[str]:
        with self._lock:
            return {
                lease.execution_id
                for lease in leases
                if self.take_over(lease, owner=owner, token=token, ttl=ttl)
            }

    def held(self, execution_id: str) -> Lease | None:
        with self._lock:
            row = self._tables.rows.get(execution_id)
            if row is None or row.token is None or row.until is None:
                return None
            return Lease(execution_id, row.owner, row.token, row.until, *self._flow_of(execution_id))

    def stale_ready(self, *, grace: float, limit: int, known: Known = ANY_FLOW) -> list[Lease]:
        with self._lock:
            before = self.now() - timedelta(seconds=grace)
            stale = [
                Lease(key, "", 0, row.ready_at, *self._flow_of(key))
                for key, row in self._tables.rows.items()
                if row.ready_at is not None and row.ready_at < before and known.admits(*self._flow_of(key))
            ]
            return sorted(stale, key=lambda lease: lease.until)[:limit]

    def beat(self, name: str, kind: str) -> None:
        with self._lock:
            self._seen_at = self.now()

    def loop_seen(self, *, within: float) -> bool:
        return self._seen_at is not None and self._seen_at > self.now() - timedelta(seconds=within)

    def count_recovery(self, execution_id: str, *, sequence: int) -> int:
        with self._lock:
            fence = self._fence_row(execution_id)
            count = fence.recoveries + 1 if fence.recovered_sequence == sequence else 1
            self._tables.fences[execution_id] = replace(fence, recoveries=count, recovered_sequence=sequence)
            return count

    # Notices: whoever shares this store is in this process.

    @property
    def notifies(self) -> bool:
        return False

    def notify(self) -> None:
        raise NotImplementedError("there are no notices here")

    def listen(self) -> AbstractContextManager[Callable[[float], bool]]:
        raise NotImplementedError("there are no notices here")

    # Messages.

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
    ) -> bool:
        with self._lock:
            inbox = self._tables.inboxes[execution_id]
            if message_id in inbox:
                return False
            inbox[message_id] = Message(
                next(self._numbers), execution_id, name, message_id, body, wait, principal, reason
            )
            self._wake(execution_id, receiver or execution_id, self.now())
            return True

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
        with self._lock:
            if len(self._tables.logs[execution_id]) < since or self._answered(execution_id, since):
                raise Changed(execution_id, since)
            return self.send(
                chain or execution_id,
                name=name,
                message_id=message_id,
                body=body,
                wait=wait,
                receiver=execution_id,
            )

    def inbox(self, execution_id: str, name: str) -> list[Message]:
        with self._lock:
            return [message for message in self._untaken(execution_id) if message.name == name]

    def message_names(self, execution_id: str) -> set[str]:
        with self._lock:
            return {message.name for message in self._untaken(execution_id)}

    def _untaken(self, execution_id: str) -> Iterator[Message]:
        for message in self._tables.inboxes[execution_id].values():
            if message.number not in self._tables.taken:
                yield message

    # Schedules.

    def schedule_row(self, schedule_id: str) -> ScheduleRow | None:
        with self._lock:
            return self._tables.schedules.get(schedule_id)

    def schedule_rows(self) -> list[ScheduleRow]:
        with self._lock:
            return sorted(self._tables.schedules.values(), key=lambda row: row.id)

    def add_schedule(self, row: ScheduleRow) -> bool:
        with self._lock:
            return self._tables.schedules.setdefault(row.id, row) is row

    def move_schedule(self, seen: ScheduleRow, row: ScheduleRow) -> bool:
        with self._lock:
            there = self._tables.schedules.get(seen.id)
            if there is None or there.revision != seen.revision:
                return False
            self._tables.schedules[seen.id] = replace(row, revision=seen.revision + 1)
            return True

    def chain_runs(self, execution_id: str) -> bool:
        with self._lock:
            return any(
                row.projection.status not in TERMINAL_STATUSES
                for key, row in self._tables.rows.items()
                if execution_id in (key, row.new.chain)
            )

    # The clock and the transaction.

    def now(self) -> datetime:
        return (datetime.now(UTC) if self._clock is None else self._clock()) + self._shift

    def clock_offset(self) -> float:
        if self._clock is None:
            return self._offset
        return (self.now() - datetime.now(UTC)).total_seconds()

    def measure(self) -> None:
        """Nothing to do: the offset is never remembered."""

    def clock_is_old(self) -> bool:
        return False

    def check_clock(self) -> None:
        """Nothing to do: the offset is never remembered."""

    def shift_clock(self, by: timedelta) -> None:
        self._shift += by
        self._offset = self._shift.total_seconds()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All calls of the block land or none; other threads wait until it ends."""
        with self._lock:
            saved, registered, outermost = self._tables.copy(), len(self._after), self._depth == 0
            self._depth += 1
            try:
                yield
                failed = self._rollback
            except BaseException:
                failed = True
                raise
            finally:
                self._depth -= 1
                if failed:
                    self._tables = saved
                    del self._after[registered:]
                if outermost:
                    after, self._after, self._rollback = self._after, [], False
        if outermost:
            for callback in after:
                _call_robustly(callback)

    def set_rollback(self) -> None:
        """Mark the open transaction for rollback, as ``transaction.set_rollback(True)`` does."""
        self._rollback = True

    def in_transaction(self) -> bool:
        # Whoever else asks waits for the lock, and finds the transaction over.
        with self._lock:
            return self._depth > 0

    def transaction_check(self) -> Callable[[], bool]:
        return self.in_transaction

    def leave_transaction(self) -> bool:
        return False  # a block of transaction() ends with its call

    def check_caller(self, call: str, *, answers: bool = False) -> None:
        """A program may always call."""

    def in_testcase(self) -> bool:
        return False

    def on_commit(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._depth:
                self._after.append(callback)
                return
        _call_robustly(callback)

    def marked_for_rollback(self) -> bool:
        with self._lock:
            return self._rollback

    def is_connection_lost(self, error: BaseException) -> bool:
        return False

    def close_connections(self) -> None:
        """Nothing to do: there is no connection."""

    def close_old_connections(self) -> None:
        """Nothing to do: there is no connection."""


def _own(row: _Row, told: Projection, ownership: Ownership, now: datetime) -> _Row:
    """The row, with what the log tells, under its owner after a commit."""
    match ownership.mode:
        case "keep":
            return _Row(row.new, told, row.ready_at, row.owner, row.token, row.until)
        case "ready":
            return _Row(row.new, told, ready_at=ownership.at or now)
        case "held":
            until = now + timedelta(seconds=ownership.ttl)
            return _Row(row.new, told, owner=ownership.owner, token=ownership.token, until=until)
        case _:
            return _Row(row.new, told)


def _is_park(event: Event) -> bool:
    return event.kind == Kind.EXECUTION_SUSPENDED


def _is_parked(log: Sequence[Event]) -> bool:
    """True if nothing has answered the newest park."""
    answering = (event for event in reversed(log) if is_answering(event.kind, event.is_kernel))
    newest = next(answering, None)
    return newest is not None and _is_park(newest)


def _key(row: TimerRow) -> tuple[str, datetime]:
    return row.execution_id, row.wake_at


def _due_at(row: TimerRow) -> datetime:
    return max(row.wake_at, row.not_before or row.wake_at)


def _call_robustly(callback: Callable[[], None]) -> None:
    """A callback that fails is reported; it never breaks whoever committed."""
    try:
        callback()
    except Exception:
        logger.exception("a callback after commit failed")
