"""The store over SQLite: every change is one transaction that takes the write lock at its beginning.

One writer at a time makes all checks exact: the update of an execution's row says what must be so for its commit to
land, and only a commit that is unlike most, or meets something, is looked at first. Fences hold here too, because a
web process and a worker share the file. A writer that finds the file locked tries again,
also when the lock is met at COMMIT: nothing has landed then.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeVar

from django.db import Error, OperationalError

from loom_django import compat
from loom_django.errors import StoreUnavailableError
from loom_django.kernel.events import Event
from loom_django.kernel.state import Status
from loom_django.stores.base import Commit
from loom_django.stores.retention import STATEMENTS as RETENTION
from loom_django.stores.schedules import STATEMENTS as SCHEDULES
from loom_django.stores.sql import (
    EPOCH,
    Backoff,
    Row,
    SqlStore,
    chain_of_causes,
    dumps,
    row_of,
    timer_row,
    timers_off,
)
from loom_django.stores.statements import (
    LANES,
    LANES_IN_ORDER,
    SERVES,
    SHARED,
    UPSERT_TIMER,
    Statement,
    dialect,
    named,
)

_T = TypeVar("_T")

WORDS: Final = {
    "now": "%(now)s",
    "later": "%({0})s",
    "at": "%({0})s",
    "time": "{0}",
    "text": "{0}",
    "is": "is",
    "known": "json_each(%(known)s)",
    "ids": "(select value as id from json_each(%(ids)s)) as ids",
    "leases": "(select json_extract(value, '$.id') as id, json_extract(value, '$.token') as token "
    "from json_each(%(leases)s)) as l",
    "looks": "(select json_extract(value, '$.id') as id, json_extract(value, '$.head') as head, "
    "json_extract(value, '$.fence') as fence, json_extract(value, '$.lease') as lease, "
    "json_extract(value, '$.progress') as progress from json_each(%(looks)s)) as l",
    "list": "select value from json_each(%({0})s)",
    "lock_free": "",
}
# Parameters that are seconds from now; SQLite's own clock functions know milliseconds only.
_SECONDS: Final = frozenset({"ttl", "delay", "hold", "before"})

_TOLD: Final = (
    "flow_id", "version", "status", "last_sequence", "flow_hash", "code_hash", "created_at", "updated_at",
    "finished_at", "current_step", "in_doubt", "waits", "waiting_on", "error_type", "error_message",
)  # fmt: skip
_DECIDED: Final = (
    "queue", "priority", "not_before", "deadline", "parent_id", "chain", "subject_type", "subject_id",
    "attributes", "scheduled_at",
)  # fmt: skip
_OWNER: Final = ("ready_at", "lease_owner", "lease_token", "lease_until")
# An update writes every index of a column that it names, changed or not. These the first event tells for good; an
# execution that is moved to another flow is the exception, and told of by itself.
_MOVES: Final = tuple(name for name in _TOLD if name not in ("flow_id", "created_at"))

_EPOCH: Final = EPOCH.replace(tzinfo=None)

# Events in one statement.
EVENTS_AT_ONCE: Final = 8

_EVENT: Final = ("id", "sequence", "kind", "body", "fence", "writer", "kernel")

# What an append without a look is sure of: the log ends before it, and the token is its own, or the one that it takes.
_FREE: Final = """
    where id = %(id)s and flow_id = %(flow_id)s
    and (select coalesce(max(sequence), 0) from loom_event where execution_id = %(id)s) = %(before)s
    and coalesce((select token from loom_fence where execution_id = %(id)s), 0) in (%(or_fence)s, %(fence)s)
"""
# What only a park and its answer change; what is left out of an update must be as it is said to be.
_STEADY: Final = ("in_doubt", "waiting_on")
_AND_STEADY: Final = "and in_doubt = %(in_doubt)s and waiting_on = %(waiting_on)s"


def _events(count: int) -> Statement:
    rows = [", ".join(f"%({column}_{place})s" for column in _EVENT) for place in range(count)]
    return Statement(
        f"events_{count}",
        "Rows of logs.",
        f"""
        insert into loom_event (execution_id, sequence, kind, payload, fence, writer, is_kernel, recorded_at)
        values {", ".join(f"({row}, $now)" for row in rows)}
        """,
    )


def _update(columns: Sequence[str]) -> str:
    return f"update loom_execution set {', '.join(f'{name} = %({name})s' for name in columns)}"


OWN: Final = named(
    Statement(
        "look",
        "What could stand in the way of a commit, and what the projection's row says now, if it is there.",
        """
        select
            (select token from loom_fence where execution_id = %(id)s),
            (select wakes from loom_fence where execution_id = %(wakes_of)s),
            (select max(sequence) from loom_event where execution_id = %(id)s),
            x.status, x.flow_id
        from (select 1) left join loom_execution x on x.id = %(id)s
        """,
    ),
    Statement(
        "move", "To another flow.", "update loom_execution set flow_id = %(flow_id)s where id = %(id)s"
    ),
    *(_events(count) for count in range(1, EVENTS_AT_ONCE + 1)),
    Statement(
        "new_row",
        "The projection's row at its start, or of a log that had lost it.",
        f"""
        insert into loom_execution (id, {", ".join((*_TOLD, *_DECIDED, *_OWNER))})
        select %(id)s, {", ".join(f"%({name})s" for name in (*_TOLD, *_DECIDED, *_OWNER))}
        where %(looked)s or not (
            exists (select 1 from loom_event where execution_id = %(id)s)
            or exists (select 1 from loom_fence where execution_id = %(id)s and token > 0)
        )
        """,
    ),
    Statement(
        "tell_more",
        "The projection after more events; status and owner stay.",
        f"{_update([name for name in _MOVES if name != 'status'])} where id = %(id)s",
    ),
    Statement(
        "tell",
        "The projection after more events; its owner stays.",
        f"{_update(_MOVES)} where id = %(id)s",
    ),
    Statement(
        "tell_and_own",
        "The projection after more events, and who owns the execution then.",
        f"{_update((*_MOVES, *_OWNER))} where id = %(id)s",
    ),
    Statement(
        "go_on",
        "More events of one that is under way, if nothing stands in the way.",
        f"""
        {_update([name for name in _MOVES if name not in ("status", "finished_at", *_STEADY)])}
        {_FREE} {_AND_STEADY} and status = %(status)s
        """,
    ),
    Statement(
        "set_going",
        "The first events behind a start, if nothing stands in the way.",
        f"""
        {_update([name for name in _MOVES if name not in ("finished_at", *_STEADY)])}
        {_FREE} {_AND_STEADY}
        """,
    ),
    Statement(
        "end",
        "An end, if nothing stands in the way.",
        f"{_update([name for name in (*_MOVES, *_OWNER) if name not in _STEADY])} {_FREE} {_AND_STEADY}",
    ),
    Statement(
        "hand_over",
        "More events and another owner, or none, if nothing stands in the way.",
        f"{_update((*_MOVES, *_OWNER))} {_FREE}",
    ),
    Statement(
        "ensure_fence",
        "A park has its row, so that senders and acquirers meet it.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        values (%(id)s, 0, 0, 0, 0) on conflict (execution_id) do nothing
        """,
    ),
    Statement(
        "move_fence",
        "A start on an id that had a token runs under a new one.",
        """
        update loom_fence set token = token + 1, recoveries = 0, recovered_sequence = 0
        where execution_id = %(id)s and token > 0
        """,
    ),
    Statement(
        "wake",
        "One more wake.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        values (%(id)s, 0, 1, 0, 0)
        on conflict (execution_id) do update set wakes = loom_fence.wakes + 1
        """,
    ),
    Statement(
        "owe_redrive",
        "Somebody is to look at the execution.",
        f"""
        insert into loom_timer (execution_id, wake_at, redrive, deadline, tries)
        values (%(id)s, $now, 0, 0, 0)
        {UPSERT_TIMER}
        """,
    ),
    Statement(
        "drop_plain",
        "A wake is not owed any more; marks keep their row.",
        """
        delete from loom_timer
        where execution_id = %(id)s and wake_at = $at(wake_at) and redrive is null and not deadline
        """,
    ),
    Statement("take", "A message is used up.", "update loom_message set taken = 1 where number = %(number)s"),
    Statement(
        "message",
        "A message, unless its id is there.",
        """
        insert into loom_message
        (execution_id, name, message_id, payload, sent_at, taken, wait, principal, reason)
        values (%(id)s, %(name)s, %(message_id)s, %(body)s, $now, 0, %(wait)s, %(principal)s, %(reason)s)
        on conflict (execution_id, message_id) do nothing
        returning number
        """,
    ),
    Statement(
        "acquire_fences",
        "The fences of a batch that was just claimed.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        select value, 1, 0, 0, 0 from json_each(%(ids)s) where true
        on conflict (execution_id) do update set token = loom_fence.token + 1
        returning execution_id, token
        """,
    ),
    Statement(
        "claim_due",
        "Due wakes from an instant on, those due longest first; the filters come before the limit, so that rows "
        "which this node cannot serve never starve others. Instants come as text, which Django would parse otherwise.",
        f"""
        with known as (select key, value from $known)
        select t.execution_id, cast(t.wake_at as text), t.redrive, t.deadline, cast(t.not_before as text), t.tries,
            coalesce(x.flow_id, ''), coalesce(x.version, 0), $later(hold), $now, t.id
        from loom_timer t left join loom_execution x on x.id = t.execution_id
        where coalesce(t.not_before, t.wake_at) between coalesce($at(since), '') and $now
        and (t.held_until is null or t.held_until <= $now)
        and (%(redrive)s or t.redrive is null)
        and (%(any_flow)s or x.id is null or {SERVES})
        order by coalesce(t.not_before, t.wake_at) limit %(limit)s
        """,
    ),
    Statement(
        "hold_timers",
        "Due wakes that were picked are out of sight until their hold is over.",
        "update loom_timer set held_until = $later(hold) where id in ($list(ids))",
    ),
    Statement("lanes", "Where to look for work, in order.", f"{LANES} {LANES_IN_ORDER}"),
    Statement(
        "head_of_lane",
        "The rows to claim.",
        """
        select x.id, x.flow_id from loom_execution x
        where x.queue = %(queue)s and x.priority = %(priority)s and x.ready_at <= $now
        and (%(any_flow)s or exists (
            select 1 from json_each(%(known)s) known
            where known.key = x.flow_id and x.version <= known.value
        ))
        order by x.ready_at limit %(limit)s
        """,
    ),
    Statement(
        "claim_all",
        "Ready becomes held, for rows just seen to be ready.",
        """
        update loom_execution set
            ready_at = null, lease_owner = %(owner)s, lease_token = %(token)s, lease_until = $later(ttl)
        where id in ($list(ids))
        """,
    ),
    Statement(
        "read_short",
        "The beginnings of several logs; sequences have no gaps.",
        """
        select execution_id, sequence, kind, $text(payload), fence, writer, is_kernel, $time(recorded_at)
        from loom_event where execution_id in ($list(ids)) and sequence <= %(limit)s order by 1, 2
        """,
        repeatable=True,
    ),
    Statement(
        "renew",
        "All leases of a process at once.",
        """
        update loom_execution set lease_until = $later(ttl)
        from $leases
        where loom_execution.id = l.id and loom_execution.lease_token = l.token
        returning loom_execution.id
        """,
        repeatable=True,
    ),
    Statement(
        "restore_events",
        "A piece of a log as it was recorded.",
        """
        insert into loom_event (
            execution_id, sequence, kind, payload, fence, writer, is_kernel, recorded_at
        )
        select %(id)s, value ->> 'sequence', value ->> 'kind', value ->> 'body', value ->> 'fence',
            value ->> 'writer', value ->> 'kernel', coalesce(value ->> 'recorded_at', $now)
        from json_each(%(events)s) where true
        on conflict (execution_id, sequence) do nothing
        returning sequence
        """,
    ),
)


class _Look(NamedTuple):
    """What is there before a commit; None for what is not."""

    token: int | None
    wakes: int | None
    last: int | None
    status: str | None
    flow_id: str | None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A statement in both forms, and which of its parameters this store fills in."""

    watched: str  # for Django's cursor
    direct: str  # for sqlite3's own, which binds by place in a third of the time that names take
    names: tuple[str, ...]  # of the places
    wants_now: bool
    seconds: tuple[str, ...]

    def bound(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple([parameters[name] for name in self.names])


def _prepare(statement: Statement) -> _Prepared:
    # By place, one that stands twice is bound twice: of numbered ones Python 3.12.0 to 3.12.3 warns at each statement.
    direct, names = re.sub(r"%\(\w+\)s", "?", statement.sql), tuple(re.findall(r"%\((\w+)\)s", statement.sql))
    seconds = tuple(name for name in dict.fromkeys(names) if name in _SECONDS)
    return _Prepared(statement.sql, direct, names, "now" in names, seconds)


@cache
def _command(text: str) -> _Prepared:
    return _Prepared(text, text, (), False, ())


class _Sender:
    """The shortest way of a statement to the file, in a transaction that has begun: instants are text already, who
    watches is looked up once, and the driver's errors are left to whoever began it."""

    __slots__ = ("_connection", "_driver", "_prepared")

    def __init__(self, connection: Any, prepared: Mapping[str, _Prepared]) -> None:
        self._connection = connection
        self._driver = None if _is_watched(connection) else connection.connection
        self._prepared = prepared

    def rows(self, name: str, bound: Mapping[str, Any]) -> list[Row]:
        prepared = self._prepared[name]
        if self._driver is None:
            return _watched(self._connection, prepared, bound)[0]
        rows: list[Row] = self._driver.execute(prepared.direct, prepared.bound(bound)).fetchall()
        return rows

    def change(self, name: str, bound: Mapping[str, Any]) -> int:
        """How many rows it changed."""
        prepared = self._prepared[name]
        if self._driver is None:
            return _watched(self._connection, prepared, bound)[1]
        count: int = self._driver.execute(prepared.direct, prepared.bound(bound)).rowcount
        return count


def _is_watched(connection: Any) -> bool:
    return bool(connection.queries_logged or connection.execute_wrappers)


def _watched(connection: Any, prepared: _Prepared, parameters: Mapping[str, Any]) -> tuple[list[Row], int]:
    """The rows that it gives, and how many it changed."""
    with connection.cursor() as cursor:
        cursor.execute(prepared.watched, parameters or None)
        return list(cursor.fetchall()) if cursor.description else [], cursor.rowcount


class SqliteStore(SqlStore):
    """The :class:`~loom_django.stores.base.Store` over SQLite."""

    statements: Mapping[str, Statement] = dialect(
        [*SHARED.values(), *SCHEDULES.values(), *RETENTION.values(), *OWN.values()], WORDS
    )
    _prepared: Mapping[str, _Prepared] = {name: _prepare(one) for name, one in statements.items()}

    def __init__(self, alias: str = "default", *, give_up: float = 30.0) -> None:
        super().__init__(alias, give_up=give_up)
        self._asked_to_write_ahead = False

    # How a statement gets to the file.

    def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Row]:
        prepared = self._prepared[name]
        bound = _texts(parameters)
        if prepared.wants_now or prepared.seconds:
            now = parameters.get("now") or self.now()
            bound["now"] = _text(now)
            for key in prepared.seconds:
                bound[key] = _text(now + timedelta(seconds=parameters[key]))
        connection = self.connection
        if compat.begun_by_hand(connection) or compat.open_transaction(connection):
            try:
                return self._execute(connection, prepared, bound)
            except Error:
                compat.mark_if_rolled_back(connection)
                raise
        return self._patiently(lambda: self._execute(connection, prepared, bound))

    def _execute(self, connection: Any, prepared: _Prepared, parameters: Mapping[str, Any]) -> list[Row]:
        connection.ensure_connection()
        if connection.in_atomic_block:
            connection.validate_no_broken_transaction()
        if _is_watched(connection):
            return _watched(connection, prepared, parameters)[0]
        with connection.wrap_database_errors:
            rows: list[Row] = connection.connection.execute(
                prepared.direct, prepared.bound(parameters)
            ).fetchall()
            return rows

    def _say(self, command: str) -> None:
        self._execute(self.connection, _command(command), {})

    def _patiently(self, work: Callable[[], _T], patience: float | None = None) -> _T:
        """Do a piece of work that is one transaction, again for as long as the file is locked.

        Raises:
            StoreUnavailableError: it stayed locked.
        """
        backoff = Backoff(self.give_up if patience is None else patience, self.sleep)
        while True:
            try:
                self._write_ahead()
                return work()
            except Error as error:
                if not _is_locked(error):
                    raise
                if not backoff.again():
                    problem = "the SQLite file stayed locked"
                    raise StoreUnavailableError(problem, attempts=backoff.attempts) from error

    def _write_ahead(self) -> None:
        """Once: readers and the writer do not wait for each other. The file remembers it.

        While others use the file in its old mode it cannot be changed; a later process does it then.
        """
        if not self._asked_to_write_ahead:
            self._asked_to_write_ahead = True
            with suppress(OperationalError):
                self._say("pragma journal_mode = wal")

    def _atomically(self, work: Callable[[], _T], patience: float | None = None) -> _T:
        """Do all of it or nothing: in a transaction of its own, or behind a savepoint in a caller's."""
        connection = self.connection
        if compat.open_transaction(connection):
            if not connection.connection.in_transaction:
                # Autocommit is off, nothing was written yet: releasing an outermost savepoint would commit.
                self._say("begin")
            begin, commit = "savepoint loom", "release savepoint loom"
            rollback = ("rollback to savepoint loom", "release savepoint loom")
            return self._between(begin, work, commit, rollback)
        whole = partial(self._between, "begin immediate", work, "commit", ("rollback",))
        return self._patiently(whole, patience)

    def _between(self, begin: str, work: Callable[[], _T], commit: str, rollback: Sequence[str]) -> _T:
        inside, begun = self._in_transaction(), False
        try:
            self._say(begin)
            begun = True
            result = work()
            self._say(commit)
        except BaseException:
            compat.mark_if_rolled_back(self.connection)
            # A signal may be raised right behind the statement that has begun it.
            if begun or (self._in_transaction() and not inside):
                with suppress(Error):
                    for command in rollback:
                        self._say(command)
            raise
        return result

    def _in_transaction(self) -> bool:
        driver = self.connection.connection
        return driver is not None and driver.in_transaction

    def _make_writer(self) -> SqlStore:
        return _Writer(self.alias, give_up=self.give_up)

    def is_connection_lost(self, error: BaseException) -> bool:
        return False  # it is a file

    def _see_each_commit(self, call: str, *, joined: bool) -> None:
        """Under the write lock nobody else commits."""

    # Appends.

    def _land(self, commits: Sequence[Commit]) -> list[Exception | None]:
        def land() -> list[Exception | None]:
            connection = self.connection
            with connection.wrap_database_errors:
                return self._land_all(commits, _Sender(connection, self._prepared))

        try:
            if all(commit.closes for commit in commits) and self._in_transaction():
                return land()  # it has begun, and is rolled back as a whole
            return self._atomically(land, self._patience(commits))
        except StoreUnavailableError as error:
            return [error] * len(commits)
        except Exception as error:
            if len(commits) > 1:
                # One that is broken must not fail its neighbours: each by itself.
                return [self._land([commit])[0] for commit in commits]
            return [error]

    def _land_all(self, commits: Sequence[Commit], to: _Sender) -> list[Exception | None]:
        """Under the write lock nothing can come between what is found and what is written."""
        now = self.now()
        outcomes: list[Exception | None] = []
        events: list[Event] = []
        for commit in commits:
            if not (_write_row_if_free(commit, now, to) or self._look_and_write_rows(commit, now, to)):
                outcomes.append(self._refusal(commit))
                continue
            for member in (commit, *commit.also):
                events += member.events
                _write_rest(member, now, to)
            outcomes.append(None)
        _write_events(events, now, to)
        return outcomes

    def _look_and_write_rows(self, commit: Commit, now: datetime, to: _Sender) -> bool:
        """The rows of a commit and of those with it; False, and nothing written, if something is in its way."""
        members = (commit, *commit.also)
        looks = [_look(member, to) for member in members]
        for member, look in zip(members, looks, strict=True):
            if self._in_the_way(member, look.token, look.wakes, look.last) is not None:
                return False
        for member, look in zip(members, looks, strict=True):
            _write_row(member, look, now, to)
        return True

    # The rest that SQLite does in its own way.

    def _due_rows(self, parameters: Mapping[str, Any]) -> list[Row]:
        def hold() -> list[Row]:
            one = {**parameters, "now": self.now()}
            rows = self._run("claim_due", one)
            if rows:
                self._run("hold_timers", {**one, "ids": dumps([row[-1] for row in rows])})
            return rows

        return self._atomically(hold)

    def _claim_batch(self, parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
        def claim() -> list[tuple[str, str]]:
            claimed: list[tuple[str, str]] = []
            for queue, priority in self._run("lanes", parameters):
                left = parameters["limit"] - len(claimed)
                if left <= 0:
                    break
                lane = {**parameters, "queue": queue, "priority": priority, "limit": left}
                claimed += [(row[0], row[1]) for row in self._run("head_of_lane", lane)]
            if claimed:
                self._run("claim_all", {**parameters, "ids": dumps([row[0] for row in claimed])})
            return claimed

        return self._atomically(claim)

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
        message = {"id": execution_id, "name": name, "message_id": message_id, "body": body, "wait": wait}
        message |= {"principal": principal, "reason": reason}

        def send() -> bool:
            if not self._run("message", message):
                return False
            self._run("wake", {"id": execution_id})
            self._run("owe_redrive", {"id": receiver or execution_id})
            return True

        return self._atomically(send)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._shift

    def _time(self, value: datetime | str | None) -> datetime | None:
        if isinstance(value, str):
            return datetime.fromisoformat(value + "+00:00")
        return None if value is None else value.replace(tzinfo=UTC)

    def _recorded(self, instant: datetime) -> str:
        return _text(instant)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """As ``atomic()``, with the write lock taken at its beginning."""
        with ExitStack() as stack:
            block = compat.ImmediateAtomic(self.alias)
            if compat.open_transaction(self.connection):
                stack.enter_context(block)
            else:
                self._patiently(lambda: stack.enter_context(block))
            yield


class _Writer(SqliteStore):
    """Appends for a group, on a connection that is nobody else's.

    SQLite drops the pages that a connection has read when another one has written: over the connections of its threads
    a group would read them again for each batch.
    """

    def __init__(self, alias: str, *, give_up: float) -> None:
        super().__init__(alias, give_up=give_up)
        self._connection = compat.shared_connection(alias)

    @property
    def connection(self) -> Any:
        return self._connection


def _look(commit: Commit, to: _Sender) -> _Look:
    key = commit.execution_id
    return _Look(*to.rows("look", {"id": key, "wakes_of": commit.wakes_of or key})[0])


def _write_row_if_free(commit: Commit, now: datetime, to: _Sender) -> bool:
    """The row of a commit that is as most are; False, and nothing written, if one has to look first."""
    if commit.also or commit.wakes is not None:
        return False
    row = _row(commit)
    ends = row["finished_at"] is not None
    if commit.new is not None:
        name = "new_row"
        row |= {"looked": 0, **_owned(commit, now)}
    elif commit.unguarded:
        return False
    elif commit.ownership.mode != "keep":
        name = "end" if ends else "hand_over"
        row |= _owned(commit, now)
    elif ends:
        return False
    else:
        name = "set_going" if commit.first_sequence == 2 else "go_on"
    row |= {"before": commit.first_sequence - 1, "fence": commit.presented, "or_fence": commit.takes or 0}
    return to.change(name, row) == 1


def _write_row(commit: Commit, look: _Look, now: datetime, to: _Sender) -> None:
    row = _row(commit)
    row["looked"] = 1
    if commit.new is not None:
        if look.token:
            to.change("move_fence", row)
        to.change("new_row", row | _owned(commit, now))
    elif look.status is None:
        to.change("new_row", {**_LOST, "chain": commit.execution_id, **row, **_owned(commit, now)})
    elif commit.ownership.mode != "keep":
        to.change("tell_and_own", row | _owned(commit, now))
    else:
        to.change("tell_more" if look.status == row["status"] else "tell", row)
    if look.flow_id not in (None, row["flow_id"]):
        to.change("move", row)


def _write_rest(commit: Commit, now: datetime, to: _Sender) -> None:
    key = commit.execution_id
    if commit.parks:
        for row in {key, commit.wakes_of or key}:
            to.change("ensure_fence", {"id": row})
    if commit.takes is not None:
        to.rows("acquire_fence", {"id": key})
    for woken in commit.wake:
        to.change("wake", {"id": woken})
        to.change("owe_redrive", {"id": woken, "now": _text(now)})
    off = timers_off(commit)
    if off is None:
        to.change("delete_timers", {"id": key})
    for wake_at in off or ():
        to.change("drop_plain", {"id": key, "wake_at": _text(wake_at)})
    for timer in commit.timers:
        to.change("schedule", _texts({"id": timer.execution_id, **timer_row(timer)}))
    for number in commit.messages:
        to.change("take", {"number": number})


def _write_events(events: Sequence[Event], now: datetime, to: _Sender) -> None:
    written = _text(now)
    for start in range(0, len(events), EVENTS_AT_ONCE):
        some = events[start : start + EVENTS_AT_ONCE]
        names: dict[str, Any] = {"now": written}
        for place, event in enumerate(some):
            names[f"id_{place}"] = event.execution_id
            names[f"sequence_{place}"] = event.sequence
            names[f"kind_{place}"] = str(event.kind)
            names[f"body_{place}"] = event.body
            names[f"fence_{place}"] = event.fence
            names[f"writer_{place}"] = event.writer
            names[f"kernel_{place}"] = int(event.is_kernel)  # a bool is bound in ten times the time
        to.change(f"events_{len(some)}", names)


def _row(commit: Commit) -> dict[str, Any]:
    row = row_of(commit, _text_of_micros)
    row["id"] = commit.execution_id
    return row if commit.new is None else _texts(row)


# What stands in a row of a log that had lost it.
_LOST: Final[Mapping[str, Any]] = {
    "queue": "default",
    "priority": 0,
    "not_before": None,
    "deadline": None,
    "parent_id": None,
    "subject_type": "",
    "subject_id": "",
    "attributes": "{}",
    "scheduled_at": None,
}


def _owned(commit: Commit, now: datetime) -> dict[str, Any]:
    """The columns that say who is to run the execution after a commit."""
    own = commit.ownership
    row: dict[str, Any] = dict.fromkeys(_OWNER)
    row["lease_owner"] = own.owner if own.mode == "held" else ""
    if own.mode == "held":
        row |= {"lease_token": own.token, "lease_until": _text(now + timedelta(seconds=own.ttl))}
    elif own.mode == "ready":
        row["ready_at"] = _text(own.at or now)
    elif own.mode == "keep" and commit.projection.status in (Status.PENDING, Status.RUNNING):
        row["ready_at"] = _text(now)  # of a lost row only: somebody is to run it
    return row


def _texts(names: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _text(value) if isinstance(value, datetime) else value for key, value in names.items()}


def _text(instant: datetime) -> str:
    """As Django writes it: UTC without a zone. Equal lengths are not needed, the order is that of time."""
    if instant.tzinfo is not UTC:
        instant = instant.astimezone(UTC)
    return str(instant.replace(tzinfo=None))


def _text_of_micros(micros: int) -> str:
    return str(_EPOCH + timedelta(microseconds=micros))


def _is_locked(error: BaseException) -> bool:
    return any(
        isinstance(cause, sqlite3.OperationalError)
        and cause.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        for cause in chain_of_causes(error)
    )
