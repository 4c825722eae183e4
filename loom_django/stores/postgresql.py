"""The store over PostgreSQL: an append is one statement, one round trip and one parameter, whatever is in it.

The statements go through cursors that bind on the server, so that PostgreSQL keeps them prepared, where
Django's own would bind on the client. While somebody watches Django's queries (DEBUG, a test that counts,
an ``execute_wrapper``), they go through Django's cursor instead, and are seen.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

import psycopg
from django.db import Error, transaction

from loom_django import compat
from loom_django.errors import OpenTransactionError, StaleFenceError, StoreUnavailableError
from loom_django.kernel.events import Kind
from loom_django.stores.base import (
    APPEND_RETRIES,
    Acquired,
    AppendRefused,
    Commit,
    Overtaken,
    Pipe,
    RowLocked,
    SequenceOccupied,
    Stale,
)
from loom_django.stores.postgresql_append import MOST_COMMITS, Parts, document, parts_of, text_of
from loom_django.stores.postgresql_pipe import PostgresPipe
from loom_django.stores.retention import STATEMENTS as RETENTION
from loom_django.stores.schedules import STATEMENTS as SCHEDULES
from loom_django.stores.sql import EPOCH, Backoff, Row, SqlStore, chain_of_causes
from loom_django.stores.statements import (
    ANSWERS,
    LANES,
    LANES_IN_ORDER,
    SERVES,
    SHARED,
    UPSERT_TIMER,
    Statement,
    dialect,
    named,
)

# A connection exception, an operator's intervention, a transaction that sat idle for too long. No state at
# all means that the client noticed by itself.
_LOST: Final = ("08", "57P", "25P03")
# Errors after which nothing has landed and the same may be sent again.
_TRANSIENT: Final = ("40001", "40P01")  # serialization_failure, deadlock_detected
# What a commit meets that waited for a rival: unique_violation, or division_by_zero, by which the statement says that the
# execution was deleted meanwhile.
_OVERTAKEN: Final = ("23505", "22012")

_NOW: Final = "clock_timestamp() + cast(%(shift)s as float8) * interval '1 microsecond'"
WORDS: Final = {
    # In a subselect, because a volatile function in a comparison keeps it from using an index.
    "now": f"(select {_NOW})",
    "later": f"(select {_NOW} + cast(%({{0}})s as float8) * interval '1 second')",
    "at": "cast(%({0})s as timestamptz)",
    "time": "cast(extract(epoch from {0}) * 1000000 as bigint)",
    "text": "cast({0} as text)",
    "is": "is not distinct from",
    "known": "json_each_text(cast(%(known)s as json))",
    "ids": "json_array_elements_text(cast(%(ids)s as json)) as ids(id)",
    "leases": "json_to_recordset(cast(%(leases)s as json)) as l(id text, token bigint)",
    "looks": "json_to_recordset(cast(%(looks)s as json)) as l("
    "id text, head bigint, fence bigint, lease bigint, progress bigint)",
    "list": "select json_array_elements_text(cast(%({0})s as json))",
    "lock_free": "for no key update of {0} skip locked",
}

# What loops listen to; channels are a database's own.
CHANNEL: Final = "loom_ready"

OWN: Final = named(
    Statement(
        "notify", "There may be something to do.", f"select pg_notify('{CHANNEL}', '')", repeatable=True
    ),
    Statement("now", "The store's clock.", "select $time($now)", repeatable=True),
    Statement(
        "read_short",
        "The beginnings of several logs. The limit keeps the planner from a join that reads the whole table.",
        """
        select ids.id, e.sequence, e.kind, $text(e.payload), e.fence, e.writer, e.is_kernel, $time(e.recorded_at)
        from $ids cross join lateral (
            select * from loom_event where execution_id = ids.id order by sequence limit %(limit)s
        ) e order by 1, 2
        """,
        repeatable=True,
    ),
    Statement(
        "acquire_fences",
        "The fences of a batch that was just claimed, in order of id.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        select id, 1, 0, 0, 0 from json_array_elements_text(cast(%(ids)s as json)) as ids(id) order by id
        on conflict (execution_id) do update set token = loom_fence.token + 1
        returning execution_id, token
        """,
    ),
    Statement(
        "claim_due",
        "Due wakes from an instant on, those due longest first; the filters come before the limit, so that rows "
        "which this node cannot serve never starve others. Where a pass goes on it begins behind what it has "
        "taken, for the index holds what was there until it is cleaned. No table is walked over, whatever the "
        "planner expects: the instant is compared in a pair, since between two plain bounds it expects few rows "
        "and would sort all that are due; executions are looked up one by one; and the timers are written by their "
        "places, which stand while they are locked. What was written anew since the statement began is locked at a place "
        "that it does not see, and is left to the next look. The limit is out of the planner's sight, which "
        "would plan anew for each claim, as long as it takes to claim fifty. The commit, if it is ours, does not wait "
        "for the disk: a crash of the server that loses a hold has ended the loop's connection too.",
        f"""
        with known as materialized (select key, value from $known), clock as materialized (
            select $now as now, $later(hold) as later,
                case when %(alone)s then set_config('synchronous_commit', 'off', true) end
        ), due as materialized (
            select t.ctid as place, t.id, t.execution_id, t.wake_at, t.redrive, t.deadline, t.not_before, t.tries,
                x.flow_id, x.version
            from loom_timer t left join lateral (
                select id, status, chain, flow_id, version from loom_execution where id = t.execution_id limit 1
            ) x on true
            where coalesce(t.not_before, t.wake_at) <= (select now from clock)
            and (coalesce(t.not_before, t.wake_at), t.id) >= (coalesce($at(since), '-infinity'), 0)
            and (t.held_until is null or t.held_until <= (select now from clock))
            and (%(redrive)s or t.redrive is null)
            and (%(any_flow)s or x.id is null or {SERVES})
            order by coalesce(t.not_before, t.wake_at) limit (select cast(%(limit)s as bigint))
            $lock_free(t)
        ), held as (
            update loom_timer set held_until = (select later from clock)
            where ctid = any (array(select place from due))
            returning id
        )
        select execution_id, $time(wake_at), redrive, deadline, $time(not_before), tries, coalesce(flow_id, ''),
            coalesce(version, 0), (select $time(later) from clock), (select $time(now) from clock)
        from due where id = any (array(select id from held))
        """,
    ),
    Statement(
        "claim_ready",
        "The head of the queues becomes held; rows that others are taking are left out. They are written by an upsert that "
        "never inserts, since they are there and locked: it goes by the key, whatever the plan. A join, or a list of places, "
        "has the planner read the whole table, and a plan is kept that was made while that was small. The commit, if it is "
        "ours, does not wait for the disk: that of the fences does, which follows before anybody runs what was claimed.",
        f"""
        {LANES},
        head as (
            select ready.* from ({LANES_IN_ORDER}) lane cross join lateral (
                select x.id, x.priority, x.ready_at from loom_execution x
                where x.queue = lane.queue and x.priority = lane.priority and x.ready_at <= $now
                and (%(any_flow)s or exists (
                    select 1 from json_each_text(cast(%(known)s as json)) known
                    where known.key = x.flow_id and x.version <= cast(known.value as integer)
                ))
                order by x.ready_at limit %(limit)s
                $lock_free(x)
            ) ready
            limit %(limit)s
        ), quick as materialized (
            select case when %(alone)s then set_config('synchronous_commit', 'off', true) end as set
        ), held as (
            insert into loom_execution (
                id, flow_id, version, status, last_sequence, flow_hash, code_hash, created_at, updated_at, current_step,
                in_doubt, waits, waiting_on, error_type, error_message, queue, priority, chain, subject_type, subject_id,
                attributes, ready_at, lease_owner
            )
            select id, '', 1, 'PENDING', 0, '', '', ready_at, ready_at, '', 0, '[]', '', '', '', '', 0, id, '', '', '{{}}',
                ready_at, ''
            from head where (select count(*) from quick where set is distinct from '') = 1
            on conflict (id) do update set
                ready_at = null, lease_owner = %(owner)s, lease_token = %(token)s, lease_until = $later(ttl)
            returning id, flow_id
        )
        select id, flow_id, head.priority, $time(head.ready_at) from held join head using (id)
        """,
    ),
    Statement(
        "renew",
        "All leases of a process at once. A row that somebody holds for long must not let the others expire, "
        "so it is left out, and its lease is still ours for as long as the token says so.",
        """
        with leases as materialized (
            select id, token from $leases
        ), free as materialized (
            select x.id from loom_execution x join leases l on l.id = x.id and l.token = x.lease_token
            order by x.id $lock_free(x)
        ), renewed as (
            update loom_execution x set lease_until = $later(ttl) from free where x.id = free.id
        )
        select x.id from loom_execution x join leases l on l.id = x.id and l.token = x.lease_token
        """,
        repeatable=True,
    ),
    Statement(
        "send",
        "A message, the receiver's count of wakes and a due re-drive row land together. The message comes "
        "first, out of the lock order: until it is committed nobody else can wait for its row but a sender "
        "of the same id, and only if it is new do the others follow.",
        f"""
        with sent as (
            insert into loom_message
            (execution_id, name, message_id, payload, sent_at, taken, wait, principal, reason)
            values (%(id)s, %(name)s, %(message_id)s, %(body)s, $now, false, %(wait)s, %(principal)s, %(reason)s)
            on conflict (execution_id, message_id) do nothing
            returning number
        ), woken as (
            insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
            select %(id)s, 0, 1, 0, 0 from sent
            on conflict (execution_id) do update set wakes = loom_fence.wakes + 1
            returning execution_id
        )
        insert into loom_timer (execution_id, wake_at, redrive, deadline, tries)
        select %(receiver)s, $now, 0, false, 0 from woken
        {UPSERT_TIMER}
        returning id
        """,
    ),
    Statement(
        "restore_events",
        "A piece of a log as it was recorded; payloads travel as strings, so that their bytes stay.",
        """
        insert into loom_event (
            execution_id, sequence, kind, payload, fence, writer, is_kernel, recorded_at
        )
        select %(id)s, sequence, kind, body::json, fence, writer, kernel,
            coalesce(recorded_at, $now)
        from json_to_recordset(cast(%(events)s as json)) as e(
            sequence bigint, kind text, body text, fence bigint, writer bigint, kernel boolean,
            recorded_at timestamptz
        ) order by sequence
        on conflict (execution_id, sequence) do nothing
        returning sequence
        """,
    ),
)


# The walk over parks reads these alone, not the whole log; once it is over nobody would ask for them.
PARKS_INDEX: Final = "loom_event_parks"
_BUILD_PARKS_INDEX: Final = f"""
    create index concurrently if not exists {PARKS_INDEX} on loom_event (execution_id)
    where kind = '{Kind.EXECUTION_SUSPENDED}'
"""
_DROP_PARKS_INDEX: Final = f"drop index concurrently if exists {PARKS_INDEX}"
# A killed client's server process builds on, so what is not valid yet may be on its way.
_PARKS_INDEX_STATE: Final = f"""
    select indisvalid, exists (
        select from pg_stat_progress_create_index building where building.index_relid = i.indexrelid
    )
    from pg_index i where i.indexrelid = to_regclass('{PARKS_INDEX}')
"""
INDEX_POLL: Final = 1.0


def acquire_if_script(execution_id: str, fence: int, park_seq: int, *, joined: bool) -> str:
    """The statements of a conditional acquire; rows come from the last two: token as it was, token and head.

    The lock is waited for before the log is looked at, in a statement of its own: at READ COMMITTED that has
    a snapshot of its own, so an answer that the lock waited for is seen. A server's default of REPEATABLE
    READ would look at the log as it was before, and fence out a body that was just answered; in a caller's
    transaction (``joined``) the level was checked.

    A simple query takes no parameters. The id goes in hexadecimal, the rest are numbers.
    """
    key = f"convert_from(decode('{execution_id.encode().hex()}', 'hex'), 'UTF8')"
    statements = [
        f"""insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        select {key}, 0, 0, 0, 0 where exists (select 1 from loom_event where execution_id = {key})
        on conflict (execution_id) do nothing""",
        f"select token from loom_fence where execution_id = {key} for update",
        f"""update loom_fence f set token = f.token + 1 from (
            select coalesce(max(sequence), 0) as head from loom_event where execution_id = {key}
        ) log
        where f.execution_id = {key} and f.token = {int(fence)} and log.head >= {int(park_seq)}
        and not exists (
            select 1 from loom_event
            where execution_id = {key} and sequence > {int(park_seq)} and {ANSWERS}
        )
        returning f.token, log.head""",
    ]
    if not joined:
        statements.insert(0, "set transaction isolation level read committed")
    return "; ".join(" ".join(statement.split()) for statement in statements)


def sqlstate(error: BaseException) -> str | None:
    """The server's own word for an error, through Django's wrapping."""
    for cause in chain_of_causes(error):
        if isinstance(cause, psycopg.Error):
            return cause.sqlstate
    return None


class PostgresStore(SqlStore):
    """The :class:`~loom_django.stores.base.Store` over PostgreSQL."""

    statements: Mapping[str, Statement] = dialect(
        [*SHARED.values(), *SCHEDULES.values(), *RETENTION.values(), *OWN.values()], WORDS
    )

    # How a statement gets to the server.

    def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Row]:
        statement = self.statements[name]
        bound = {key: _bind(value) for key, value in parameters.items()}
        if "%(shift)s" in statement.sql:
            bound["shift"] = _bind(self._shift // timedelta(microseconds=1))
        tries = 0
        while True:
            try:
                return self._execute(statement.sql, bound)
            except Error as error:
                tries += 1
                if not self._may_repeat(error, statement, tries):
                    raise

    def _may_repeat(self, error: Error, statement: Statement, tries: int) -> bool:
        """True if nothing can have landed, or landing twice is the same; never inside a transaction."""
        if compat.open_transaction(self.connection):
            return False
        if sqlstate(error) in _TRANSIENT:
            return tries <= APPEND_RETRIES
        if not self.is_connection_lost(error):
            return False
        self.connection.close()
        return statement.repeatable and tries == 1

    def _execute(
        self, sql: str, parameters: Any = None, *, raw: bool = False, prepare: bool = True
    ) -> list[Row]:
        """Run one statement; with ``raw`` its one parameter is ``$1``, which spares psycopg a look at it."""
        connection = self.connection
        connection.ensure_connection()
        if connection.in_atomic_block:
            connection.validate_no_broken_transaction()
        if connection.queries_logged or connection.execute_wrappers:
            return self._execute_watched(sql.replace("$1", "%s") if raw else sql, parameters)
        # A transaction pooler gives each transaction another server: nothing stays prepared there.
        prepare = prepare and not connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        server: psycopg.Connection[Any] = connection.connection
        if prepare and server.prepare_threshold is None:
            # Django's default, with which psycopg prepares nothing. Out of reach: only what asks for it.
            server.prepare_threshold = sys.maxsize
        with connection.wrap_database_errors:
            cursor = (psycopg.RawCursor if raw else psycopg.Cursor)(server)
            cursor.execute(_encoded(sql) if raw else sql, parameters, prepare=prepare)
            return cursor.fetchall() if cursor.pgresult and cursor.pgresult.nfields else []

    def _execute_watched(self, sql: str, parameters: Any) -> list[Row]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            rows: list[Row] = cursor.fetchall() if cursor.description else []
            return rows

    def is_connection_lost(self, error: BaseException) -> bool:
        for cause in chain_of_causes(error):
            if isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError):
                return cause.sqlstate is None or cause.sqlstate.startswith(_LOST)
        return False

    # Logs and fences.

    def acquire_fence_if(self, execution_id: str, *, fence: int, park_seq: int) -> Acquired | Stale:
        """As the contract has it, in one round trip, or two in a caller's transaction."""
        joined = compat.open_transaction(self.connection)
        if joined:
            self._see_each_commit("acquire_fence_if", joined=True)
        script = acquire_if_script(execution_id, fence, park_seq, joined=joined)
        tries = 0
        while True:
            try:
                held, moved = self._execute_script(script)[-2:]
            except Error as error:
                tries += 1
                if joined or tries > APPEND_RETRIES or not self._may_resend(error):
                    raise
            else:
                return Acquired(*moved[0]) if moved else Stale(held[0][0] if held else 0)

    @contextmanager
    def walking_parks(self) -> Iterator[None]:
        """With an index of the parks alone, which is dropped at the end, also where it was left by others."""
        if compat.open_transaction(self.connection):
            yield  # none can be built there; the walk looks at the whole log then
            return
        try:
            self._have_parks_index()
            yield
        finally:
            self._drop_parks_index()

    def _have_parks_index(self) -> None:
        while True:
            states = self._execute(_PARKS_INDEX_STATE, prepare=False)
            valid, building = states[0] if states else (False, False)
            if valid:
                return
            if not building:
                self._drop_parks_index()
                self._execute(_BUILD_PARKS_INDEX, prepare=False)
                return
            self.sleep(INDEX_POLL)

    def _drop_parks_index(self) -> None:
        try:
            self._execute(_DROP_PARKS_INDEX, prepare=False)
        except Error as error:
            if not self._may_resend(error):
                raise
            self._execute(_DROP_PARKS_INDEX, prepare=False)

    def _execute_script(self, script: str) -> list[list[Row]]:
        """Run statements as one simple query, which is one transaction, and return the rows of each.

        No transaction pooler can part them, and nothing is prepared.
        """
        connection = self.connection
        connection.ensure_connection()
        if connection.in_atomic_block:
            connection.validate_no_broken_transaction()
        watched = connection.queries_logged or connection.execute_wrappers
        with (
            connection.wrap_database_errors,
            connection.cursor() if watched else psycopg.Cursor(connection.connection) as cursor,
        ):
            cursor.execute(script)
            results: list[list[Row]] = []
            while True:
                results.append(cursor.fetchall() if cursor.description else [])
                if not cursor.nextset():
                    return results

    def _see_each_commit(self, call: str, *, joined: bool) -> None:
        if not joined:
            self._execute("set transaction isolation level read committed", prepare=False)
        elif self.in_transaction():
            level = self._execute("select current_setting('transaction_isolation')")[0][0]
            if level != "read committed":
                why = f"it is {level.upper()}, so what others commit meanwhile cannot be seen in it"
                raise OpenTransactionError(call, why, "Do it after the block.")

    def _may_resend(self, error: Error) -> bool:
        return sqlstate(error) in _TRANSIENT or super()._may_resend(error)

    # Appends.

    def pipe(self, loop: asyncio.AbstractEventLoop) -> Pipe | None:
        # A transaction pooler keeps nothing prepared.
        pooled = self.connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        if pooled or self.connection.queries_logged or not psycopg.Pipeline.is_supported():
            return None
        driver = compat.driver_apart(self.alias)
        return None if driver is None else PostgresPipe(driver, loop, shift=lambda: self._shift)

    def _make_writer(self) -> SqlStore:
        return _Writer(self.alias, give_up=self.give_up)

    def _land(self, commits: Sequence[Commit]) -> list[Exception | None]:
        notes = [commit.after_end for commit in commits]
        if not any(notes):
            return self._land_at_once(commits)
        at_once = [commit for commit, is_note in zip(commits, notes, strict=True) if not is_note]
        landed = iter(self._land_at_once(at_once))
        return [
            self._land_note(commit) if is_note else next(landed)
            for commit, is_note in zip(commits, notes, strict=True)
        ]

    def _land_note(self, commit: Commit) -> Exception | None:
        """A note about what has ended meets its deletion at the fence row.

        One statement would not see what it had waited for: it would leave an event and a row of what is gone.
        """

        def land() -> None:
            with self._under_fence(commit.execution_id, None):
                if self._is_another(commit):
                    raise SequenceOccupied(commit.execution_id, commit.first_sequence)
                if (refused := self._land_under_fence(commit)) is not None:
                    raise refused

        try:
            self._until_answered(land)
        except (AppendRefused, StaleFenceError, StoreUnavailableError) as refused:
            return refused
        except Error as error:
            return self._judge(commit, error)
        return None

    def _land_under_fence(self, commit: Commit) -> Exception | None:
        return self._land_part([commit])[0]

    def _land_at_once(self, commits: Sequence[Commit]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for start in range(0, len(commits), MOST_COMMITS):
            outcomes += self._land_part(commits[start : start + MOST_COMMITS])
        return outcomes

    def _land_part(self, commits: Sequence[Commit]) -> list[Exception | None]:
        try:
            landed = self._send(commits)
        except StoreUnavailableError as error:
            return [error] * len(commits)
        except Exception as error:
            if self.is_connection_lost(error):  # with a caller's transaction in it
                return [error] * len(commits)
            if len(commits) > 1:
                # One that is blocked, refused or broken must not fail its neighbours: each by itself.
                return [self._land_part([commit])[0] for commit in commits]
            return [self._judge(commits[0], error)]
        return [None if commit.execution_id in landed else self._settle(commit) for commit in commits]

    def _judge(self, commit: Commit, error: Exception) -> Exception | None:
        match sqlstate(error):
            case code if code in _OVERTAKEN:
                if not commit.closes:
                    return self._settle(commit)
                overtaken = Overtaken(commit.execution_id, commit.first_sequence)
                overtaken.__cause__ = error
                return overtaken
            case "55P03":  # lock_not_available
                refused: Exception = RowLocked(commit.execution_id, commit.first_sequence)
                refused.__cause__ = error
                return refused
            case _:
                return error

    def _settle(self, commit: Commit) -> Exception | None:
        """Find out why a commit was let fall; one that nothing stands in the way of is sent again.

        Nothing does where a rival came and went between the statement's snapshot and now, or where a start
        found the token of a deleted execution: the second time it moves it. A look that was cut off says
        nothing either.
        """
        for _ in range(APPEND_RETRIES):
            try:
                return self._refusal(commit)
            except LookupError:
                pass
            except Error as error:
                if not self.is_connection_lost(error) or compat.open_transaction(self.connection):
                    return error
            try:
                if commit.execution_id in self._send([commit], with_fences=True):
                    return None
            except StoreUnavailableError as error:
                return error
            except Error as error:
                if commit.closes or sqlstate(error) not in _OVERTAKEN:
                    return self._judge(commit, error)
        return SequenceOccupied(commit.execution_id, commit.first_sequence)

    def _send(self, commits: Sequence[Commit], *, with_fences: bool = False) -> set[str]:
        """Send the statement until it is answered; return the commits that landed.

        Raises:
            StoreUnavailableError: the database stayed away.
        """
        parts = self._parts_of(commits)
        text = text_of(replace(parts, lock=True, fences=True) if with_fences else parts)
        parameters = [document(commits, self._shift)]
        if compat.open_transaction(self.connection):
            closes = all(commit.closes for commit in commits)
            return self._send_last(text, parameters) if closes else self._send_inside(text, parameters)
        backoff, tries = Backoff(self._patience(commits), self.sleep), 0
        while True:
            try:
                return self._send_last(text, parameters)
            except Error as error:
                if sqlstate(error) in _TRANSIENT and len(commits) == 1 and tries < APPEND_RETRIES:
                    tries += 1  # nothing landed: the same again
                elif self.is_connection_lost(error):
                    # The server may be committing yet: never decided by a look, but by the same rows again.
                    self.connection.close()
                    if not backoff.again():
                        raise StoreUnavailableError(attempts=backoff.attempts) from error
                else:
                    raise

    def _parts_of(self, commits: Sequence[Commit]) -> Parts:
        return parts_of(commits, self._shift)

    def _send_last(self, text: str, parameters: list[str]) -> set[str]:
        """As a transaction of its own, or where an error may break the one that is open."""
        return {row[0] for row in self._execute(text, parameters, raw=True)}

    def _send_inside(self, text: str, parameters: list[str]) -> set[str]:
        """In a caller's transaction, which a refusal must not break: behind a savepoint of its own."""
        self._execute("savepoint loom_append", prepare=False)
        try:
            rows = self._execute(text, parameters, raw=True)
        except Error:
            with suppress(Error):
                self._execute("rollback to savepoint loom_append", prepare=False)
                self._execute("release savepoint loom_append", prepare=False)
            raise
        self._execute("release savepoint loom_append", prepare=False)
        return {row[0] for row in rows}

    # The rest that PostgreSQL does in its own way.

    def _due_rows(self, parameters: Mapping[str, Any]) -> list[Row]:
        return self._run("claim_due", {**parameters, "alone": not compat.open_transaction(self.connection)})

    def _claim_batch(self, parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
        alone = not compat.open_transaction(self.connection)
        rows = self._run("claim_ready", {**parameters, "alone": alone})
        return [(row[0], row[1]) for row in sorted(rows, key=lambda row: (-row[2], row[3]))]

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
        return bool(self._run("send", {**message, "receiver": receiver or execution_id}))

    @property
    def notifies(self) -> bool:
        return True

    def notify(self) -> None:
        self._run("notify", {})

    @contextmanager
    def listen(self) -> Iterator[Callable[[float], bool]]:
        with compat.connection_apart(self.alias) as own:
            server: psycopg.Connection[Any] = own.connection
            server.execute(f"listen {CHANNEL}")

            def told(seconds: float) -> bool:
                return any(True for _ in server.notifies(timeout=seconds, stop_after=1))

            yield told

    def now(self) -> datetime:
        return self._instant(self._run("now", {})[0][0])

    def _time(self, value: int | None) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=value)

    def _recorded(self, instant: datetime) -> str:
        return instant.isoformat()

    def transaction(self) -> AbstractContextManager[Any]:
        return transaction.atomic(using=self.alias)


class _Writer(PostgresStore):
    """Appends for a group, on a connection that is nobody else's; rows that others hold it does not wait for."""

    def __init__(self, alias: str, *, give_up: float) -> None:
        super().__init__(alias, give_up=give_up)
        self._connection = compat.shared_connection(alias)

    @property
    def connection(self) -> Any:
        return self._connection

    def _parts_of(self, commits: Sequence[Commit]) -> Parts:
        return replace(super()._parts_of(commits), brief=True)


@cache
def _encoded(sql: str) -> bytes:
    """One of the texts of :func:`text_of`, which are few and long, as it goes to the server."""
    return sql.encode()


def _bind(value: Any) -> Any:
    """As text of no type: the column decides, and a statement is prepared once, not per width of an int."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)
