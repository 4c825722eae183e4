"""The store over PostgreSQL: an append is one statement, one round trip and one parameter, whatever is in it.

The statements go through cursors that bind on the server, so that PostgreSQL keeps them prepared, where
Django's own would bind on the client. While somebody watches Django's queries (DEBUG, a test that counts,
an ``execute_wrapper``), they go through Django's cursor instead, and are seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg
from django.db import Error, transaction

from loom_django import compat
from loom_django.errors import StoreUnavailableError
from loom_django.kernel.events import is_answering
from loom_django.stores.base import APPEND_RETRIES, Commit, Known, RowLocked, SequenceOccupied
from loom_django.stores.sql import (
    EPOCH,
    READY_HEAD,
    SHARED,
    UPSERT_TIMER,
    Backoff,
    Row,
    SqlStore,
    Statement,
    chain_of_causes,
    dialect,
    dumps,
    named,
    ready_filter,
    row_of,
    timer_row,
    timers_off,
)

# Statements of more commits than this are sent in parts: one part must not hold its rows for long.
MOST_COMMITS: Final = 256

# Errors after which nothing has landed and the same may be sent again.
_TRANSIENT: Final = ("40001", "40P01")  # serialization_failure, deadlock_detected

WORDS: Final = {
    # In a subselect, because a volatile function in a comparison keeps it from using an index.
    "now": "(select clock_timestamp() + cast(%(shift)s as float8) * interval '1 microsecond')",
    "later": "(select clock_timestamp() + cast(%(shift)s as float8) * interval '1 microsecond' + cast(%({0})s as float8) * interval '1 second')",
    "at": "cast(%({0})s as timestamptz)",
    "time": "cast(extract(epoch from {0}) * 1000000 as bigint)",
    "text": "cast({0} as text)",
    "is": "is not distinct from",
    "lock": "for update",
    "lock_free": "for no key update of {0} skip locked",
}

OWN: Final = named(
    Statement("now", "The store's clock.", "select $time($now)", repeatable=True),
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
        "Due wakes, those due longest first; the filters come before the limit, so that rows which this "
        "node cannot serve never starve others.",
        """
        with due as (
            select t.id, coalesce(t.not_before, t.wake_at) as due, x.flow_id, x.version
            from loom_timer t left join loom_execution x on x.id = t.execution_id
            where coalesce(t.not_before, t.wake_at) <= $now
            and (%(redrive)s or t.redrive is null)
            and (%(any_flow)s or x.id is null or exists (
                select 1 from json_each_text(cast(%(known)s as json)) known
                where known.key = x.flow_id and x.version <= cast(known.value as integer)
            ))
            order by coalesce(t.not_before, t.wake_at) limit %(limit)s
            $lock_free(t)
        )
        update loom_timer t set not_before = $later(hold) from due where t.id = due.id
        returning t.execution_id, $time(t.wake_at), t.redrive, t.deadline, $time(t.not_before), t.tries,
            $time(due.due), $time($now), coalesce(due.flow_id, ''), coalesce(due.version, 0)
        """,
    ),
    Statement(
        "claim_ready",
        "The head of the queues becomes held; rows that others are taking are left out.",
        f"""
        {READY_HEAD},
        head as (
            select ready.* from priorities p cross join lateral (
                select x.id, x.priority, x.ready_at from loom_execution x
                where x.priority = p.priority and x.ready_at <= $now
                and (%(any_queue)s or x.queue in (
                    select json_array_elements_text(cast(%(queues)s as json))
                ))
                and (%(any_flow)s or exists (
                    select 1 from json_each_text(cast(%(known)s as json)) known
                    where known.key = x.flow_id and x.version <= cast(known.value as integer)
                ))
                order by x.ready_at limit %(limit)s
                $lock_free(x)
            ) ready
            limit %(limit)s
        )
        update loom_execution x set
            ready_at = null, lease_owner = %(owner)s, lease_token = %(token)s, lease_until = $later(ttl)
        from head where x.id = head.id
        returning x.id, head.priority, $time(head.ready_at)
        """,
    ),
    Statement(
        "renew",
        "All leases of a process at once; locked in order of id, as appends lock them.",
        """
        with ours as materialized (
            select x.id from loom_execution x
            join json_to_recordset(cast(%(leases)s as json)) as l(id text, token bigint)
            on l.id = x.id and l.token = x.lease_token
            order by x.id for no key update of x
        )
        update loom_execution x set lease_until = $later(ttl) from ours where x.id = ours.id
        returning x.id
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
            insert into loom_message (execution_id, name, message_id, payload, sent_at, taken, wait)
            values (%(id)s, %(name)s, %(message_id)s, %(body)s, $now, false, %(wait)s)
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
)

# The append. Its one parameter is an array of flat objects; "k" says what each is:
#   c  a commit: what is presented to the guard, who owns the execution then, and its row
#   e  an event     t  a timer row     o  a wake time whose plain rows go (none: all rows)
#   m  a message taken     w  an execution that is woken     s  the clock's shift
# Payloads travel as strings: the server unwraps each once, byte by byte as it was written, and takes any JSON,
# where nested ones would be parsed at each look and refused for an escape that no text can hold.
#
# The planner takes `k = 'c'` for one row in two hundred and so expects one row of each kind. That is wanted:
# every look into a table is then by its index, whatever its size was when the statement was planned.
#
# Each part reads from the part before it, since only data dependency orders the writes of one statement: fence
# rows, events, execution rows, timer rows, messages, each in order of id.
#
# No ON CONFLICT DO NOTHING for the events: of a commit of several it would let some land. A rival's write
# makes the statement fail whole, and then who wrote the sequence is read.
_APPEND: Final = """
with d as materialized (
    select * from json_to_recordset($1::json) as d(
        k text, id text, g integer, size integer, seq bigint, fence bigint, free boolean, parks boolean,
        fresh boolean, wakes bigint, wakes_of text, mode text, owner text, token bigint, ttl float8, at timestamptz,
        kind text, body text, writer bigint, kernel boolean,
        other text, redrive smallint, deadline boolean, not_before timestamptz, tries integer,
        number bigint, line json
    )
),
clock as materialized (
    select clock_timestamp()
        + coalesce((select number from d where k = 's'), 0) * interval '1 microsecond' as now
),
fences as materialized (
    select ids.id, f.token, f.wakes
    from (
        select id from d where k = 'c'
        union select wakes_of from d where k = 'c' and wakes_of is not null
        union select other from d where k = 'w'
        order by 1
    ) ids left join lateral (
        select token, wakes from loom_fence where execution_id = ids.id {lock}
    ) f on true
),
fit as materialized (
    select c.*, own.token as held, own.token is null as unfenced, seen.token is null as unseen
    from d c
    join fences own on own.id = c.id
    left join fences seen on seen.id = c.wakes_of
    where c.k = 'c'
    and (c.free or coalesce(own.token, 0) = 0 or own.token = c.fence)
    and (c.wakes is null or c.wakes = coalesce(seen.wakes, 0))
    and c.seq - 1 = coalesce((select max(e.sequence) from loom_event e where e.execution_id = c.id), 0)
),
whole as materialized (
    select * from (select fit.*, count(*) over (partition by g) as met from fit) w where met = size
),
fenced as (
    insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
    select id, max(moves), sum(wakes), 0, 0 from (
        select id, 0 as moves, 0 as wakes from whole where parks and unfenced
        union all select wakes_of, 0, 0 from whole where parks and unseen
        union all select id, 1, 0 from whole where fresh and held > 0
        union all select d.other, 0, 1 from d join whole on whole.id = d.id where d.k = 'w'
    ) f group by id order by id
    on conflict (execution_id) do update set
        token = loom_fence.token + excluded.token,
        wakes = loom_fence.wakes + excluded.wakes,
        recoveries = case when excluded.token > 0 then 0 else loom_fence.recoveries end,
        recovered_sequence = case when excluded.token > 0 then 0 else loom_fence.recovered_sequence end
    where excluded.token > 0 or excluded.wakes > 0 or (loom_fence.token = 0 and loom_fence.wakes = 0)
    returning execution_id
),
landing as materialized (
    select * from (
        select whole.*, count(*) over (partition by g) as made
        from whole cross join (select count(*) from fenced) done
        where not parks or (
            (not unfenced or id in (select execution_id from fenced))
            and (not unseen or wakes_of in (select execution_id from fenced))
        )
    ) l where made = size
),
logged as (
    insert into loom_event (
        execution_id, sequence, kind, payload, fence, writer, is_kernel, recorded_at
    )
    select d.id, d.seq, d.kind, d.body::json, d.fence, d.writer, d.kernel, clock.now
    from d join landing on landing.id = d.id cross join clock
    where d.k = 'e' order by d.id, d.seq
    returning sequence
),
told as (
    insert into loom_execution (
        id, {columns}, ready_at, lease_owner, lease_token, lease_until
    )
    select
        l.id, {values},
        case l.mode
            when 'ready' then coalesce(l.at, clock.now)
            when 'keep' then case when r.status in ('PENDING', 'RUNNING') then clock.now end
        end,
        coalesce(l.owner, ''), l.token, clock.now + l.ttl * interval '1 second'
    from landing l cross join lateral json_to_record(l.line) as r({types})
    cross join clock cross join (select count(*) from logged) done
    order by l.id
    on conflict (id) do update set
        {updates},
        (ready_at, lease_owner, lease_token, lease_until) = (
            select
                case l.mode when 'keep' then loom_execution.ready_at else excluded.ready_at end,
                case l.mode when 'keep' then loom_execution.lease_owner else excluded.lease_owner end,
                case l.mode when 'keep' then loom_execution.lease_token else excluded.lease_token end,
                case l.mode when 'keep' then loom_execution.lease_until else excluded.lease_until end
            from landing l where l.id = excluded.id
        )
    returning id
),
owed as (
    insert into loom_timer (execution_id, wake_at, redrive, deadline, not_before, tries)
    select execution_id, wake_at, max(redrive), bool_or(deadline), min(not_before), max(tries) from (
        select d.other as execution_id, d.at as wake_at, d.redrive, d.deadline, d.not_before, d.tries
        from d join landing on landing.id = d.id where d.k = 't'
        union all
        select d.other, clock.now, 0, false, null, 0
        from d join landing on landing.id = d.id cross join clock where d.k = 'w'
    ) t cross join (select count(*) from told) done
    group by 1, 2 order by 1, 2
    {upsert_timer}
    returning id
),
dropped as (
    delete from loom_timer t using (
        select d.id, d.at from d join landing on landing.id = d.id
        cross join (select count(*) from owed) done
        where d.k = 'o'
    ) o
    where t.execution_id = o.id
    and (o.at is null or (t.wake_at = o.at and t.redrive is null and not t.deadline))
    returning t.id
),
taken as (
    update loom_message m set taken = true from (
        select d.number from d join landing on landing.id = d.id
        cross join (select count(*) from dropped) done
        where d.k = 'm'
    ) t
    where m.number = t.number
    returning m.number
)
select id from landing
"""

# The columns of loom_execution that the log or the start tells: type, and what stands there for a log that
# has lost its row. Those of the second part are decided by the start for good.
_TOLD: Final = {
    "flow_id": "text",
    "version": "integer",
    "status": "text",
    "last_sequence": "bigint",
    "flow_hash": "text",
    "code_hash": "text",
    "created_at": "timestamptz",
    "updated_at": "timestamptz",
    "finished_at": "timestamptz",
    "current_step": "text",
    "in_doubt": "integer",
    "waits": "json",
    "waiting_on": "text",
    "error_type": "text",
    "error_message": "text",
}
_DECIDED: Final = {
    "queue": ("text", "'default'"),
    "priority": ("integer", "0"),
    "not_before": ("timestamptz", "null"),
    "deadline": ("timestamptz", "null"),
    "parent_id": ("text", "null"),
    "chain": ("text", "l.id"),
    "subject_type": ("text", "''"),
    "subject_id": ("text", "''"),
    "attributes": ("jsonb", "'{}'"),
    "scheduled_at": ("timestamptz", "null"),
}


def _append_text(*, lock: bool) -> str:
    columns = [*_TOLD, *_DECIDED]
    types = _TOLD | {name: kind for name, (kind, _) in _DECIDED.items()}
    # JSON in JSON: it travels as a string, like a payload.
    as_text = {name: "text" if kind in ("json", "jsonb") else kind for name, kind in types.items()}
    values = [f"r.{name}::{types[name]}" if as_text[name] != types[name] else f"r.{name}" for name in _TOLD]
    values += [
        f"coalesce(r.{name}{'::jsonb' if kind == 'jsonb' else ''}, {otherwise})"
        for name, (kind, otherwise) in _DECIDED.items()
    ]
    text = _APPEND
    for word, said in {
        "lock": "for no key update" if lock else "limit 1",
        "columns": ", ".join(columns),
        "values": ", ".join(values),
        "types": ", ".join(f"{name} {kind}" for name, kind in as_text.items()),
        "updates": ", ".join(f"{name} = excluded.{name}" for name in _TOLD),
        "upsert_timer": UPSERT_TIMER,
    }.items():
        text = text.replace("{" + word + "}", said)
    return " ".join(text.split())


APPEND: Final = Statement(
    "append",
    "Any number of commits in one statement; the fence rows are only looked at. `limit 1` keeps the planner "
    "from turning the look into a join that reads the whole table.",
    _append_text(lock=False),
)
APPEND_LOCKED: Final = Statement(
    "append_locked",
    "The same where an event answers or ends a park: the fence rows are locked, so that an acquire sees the "
    "answer or refuses it. NO KEY UPDATE and not SHARE: two who share the row would both have to wait for the "
    "other when each goes on to write it.",
    _append_text(lock=True),
)


def _document(commits: Sequence[Commit], shift: timedelta) -> str:
    """The append's one parameter."""
    rows: list[dict[str, Any]] = []
    if shift:
        rows.append({"k": "s", "number": shift // timedelta(microseconds=1)})
    for group, commit in enumerate(commits):
        members = (commit, *commit.also)
        for member in members:
            rows.append(_commit_row(member, group, len(members)))
            rows.extend(_event_rows(member))
            rows.extend(_other_rows(member))
    return dumps(rows)


def _commit_row(commit: Commit, group: int, size: int) -> dict[str, Any]:
    own, line = commit.ownership, row_of(commit)
    row = {
        "k": "c",
        "id": commit.execution_id,
        "g": group,
        "size": size,
        "seq": commit.first_sequence,
        "free": commit.unguarded,
        "parks": commit.parks,
        "fresh": commit.new is not None,
        "mode": own.mode,
        "line": {name: _plain(value) for name, value in line.items() if value is not None},
    }
    if commit.fence is not None:
        row["fence"] = commit.fence
    if commit.wakes is not None:
        row["wakes"] = commit.wakes
    if commit.parks:
        row["wakes_of"] = commit.wakes_of or commit.execution_id
    if own.mode == "held":
        row |= {"owner": own.owner, "token": own.token, "ttl": own.ttl}
    elif own.at is not None:
        row["at"] = own.at.isoformat()
    return row


def _event_rows(commit: Commit) -> Iterator[dict[str, Any]]:
    for event in commit.events:
        row = {
            "k": "e",
            "id": commit.execution_id,
            "seq": event.sequence,
            "kind": str(event.kind),
            "body": event.body,
            "writer": event.writer,
            "kernel": event.is_kernel,
        }
        if event.fence is not None:
            row["fence"] = event.fence
        yield row


def _other_rows(commit: Commit) -> Iterator[dict[str, Any]]:
    key = commit.execution_id
    for timer in commit.timers:
        columns = {name: _plain(value) for name, value in timer_row(timer).items()}
        yield {"k": "t", "id": key, "other": timer.execution_id, "at": columns.pop("wake_at"), **columns}
    off = timers_off(commit)
    if off is None:
        yield {"k": "o", "id": key}
    else:
        yield from ({"k": "o", "id": key, "at": wake_at.isoformat()} for wake_at in off)
    yield from ({"k": "m", "id": key, "number": number} for number in commit.messages)
    yield from ({"k": "w", "id": key, "other": woken} for woken in commit.wake)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _needs_lock(commits: Sequence[Commit]) -> bool:
    return any(
        member.parks
        or member.wake
        or any(is_answering(event.kind, event.is_kernel) for event in member.events)
        for commit in commits
        for member in (commit, *commit.also)
    )


def sqlstate(error: BaseException) -> str | None:
    """The server's own word for an error, through Django's wrapping."""
    for cause in chain_of_causes(error):
        if isinstance(cause, psycopg.Error):
            return cause.sqlstate
    return None


class PostgresStore(SqlStore):
    """The :class:`~loom_django.stores.base.Store` over PostgreSQL."""

    statements: Mapping[str, Statement] = dialect([*SHARED.values(), *OWN.values()], WORDS)

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
        with connection.wrap_database_errors:
            cursor = (psycopg.RawCursor if raw else psycopg.Cursor)(connection.connection)
            cursor.execute(sql, parameters, prepare=prepare)
            return cursor.fetchall() if cursor.description else []

    def _execute_watched(self, sql: str, parameters: Any) -> list[Row]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            rows: list[Row] = cursor.fetchall() if cursor.description else []
            return rows

    def is_connection_lost(self, error: BaseException) -> bool:
        for cause in chain_of_causes(error):
            if isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError):
                return cause.sqlstate is None or cause.sqlstate[:2] in ("08", "57")
        return False

    # Appends.

    def _land(self, commits: Sequence[Commit]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for start in range(0, len(commits), MOST_COMMITS):
            outcomes += self._land_part(commits[start : start + MOST_COMMITS])
        return outcomes

    def _land_part(self, commits: Sequence[Commit]) -> list[Exception | None]:
        try:
            landed = self._send(commits)
        except StoreUnavailableError as error:
            return [error] * len(commits)
        except Error as error:
            if len(commits) > 1:
                # One that is blocked, refused or broken must not fail its neighbours: each by itself.
                return [self._land_part([commit])[0] for commit in commits]
            return [self._judge(commits[0], error)]
        return [None if commit.execution_id in landed else self._settle(commit) for commit in commits]

    def _judge(self, commit: Commit, error: Error) -> Exception | None:
        match sqlstate(error):
            case "23505":  # unique_violation: a rival was first, or this very commit had landed
                return self._settle(commit)
            case "55P03":  # lock_not_available
                refused: Exception = RowLocked(commit.execution_id, commit.first_sequence)
                refused.__cause__ = error
                return refused
            case _:
                return error

    def _settle(self, commit: Commit, tries: int = APPEND_RETRIES) -> Exception | None:
        """Find out why a commit was let fall; one that nothing stands in the way of is sent again.

        That happens where a rival came and went between the statement's snapshot and now.
        """
        members = (commit, *commit.also)
        for _ in range(tries):
            try:
                reasons = [self._refusal(member) for member in members]
            except LookupError:
                try:
                    if commit.execution_id in self._send([commit]):
                        return None
                except Error as error:
                    if sqlstate(error) != "23505":
                        return self._judge(commit, error)
            except Error as error:
                return error
            else:
                return next((reason for reason in reasons if reason is not None), None)
        return SequenceOccupied(commit.execution_id, commit.first_sequence)

    def _send(self, commits: Sequence[Commit]) -> set[str]:
        """Send the statement until it is answered; return the commits that landed.

        Raises:
            StoreUnavailableError: the database stayed away.
        """
        statement = APPEND_LOCKED if _needs_lock(commits) else APPEND
        document = [_document(commits, self._shift)]
        if compat.open_transaction(self.connection):
            return self._send_inside(statement, document)
        backoff, tries = Backoff(self.give_up, self.sleep), 0
        while True:
            try:
                return {row[0] for row in self._execute(statement.sql, document, raw=True)}
            except Error as error:
                if sqlstate(error) in _TRANSIENT and len(commits) == 1 and tries < APPEND_RETRIES:
                    tries += 1  # nothing landed: the same again
                elif self.is_connection_lost(error):
                    # The server may be committing yet: never decided by a look, always by the same rows again.
                    self.connection.close()
                    if not backoff.again():
                        raise StoreUnavailableError(attempts=backoff.attempts) from error
                else:
                    raise

    def _send_inside(self, statement: Statement, document: list[str]) -> set[str]:
        """In a caller's transaction, which a refusal must not break: behind a savepoint of its own."""
        self._execute("savepoint loom_append", prepare=False)
        try:
            rows = self._execute(statement.sql, document, raw=True)
        except Error:
            with suppress(Error):
                self._execute("rollback to savepoint loom_append", prepare=False)
                self._execute("release savepoint loom_append", prepare=False)
            raise
        self._execute("release savepoint loom_append", prepare=False)
        return {row[0] for row in rows}

    # The rest that PostgreSQL does in its own way.

    def _claim_batch(self, lease: Mapping[str, Any], known: Known, queues: Sequence[str] | None) -> list[str]:
        rows = self._run("claim_ready", {**lease, **ready_filter(known, queues)})
        return [row[0] for row in sorted(rows, key=lambda row: (-row[1], row[2]))]

    def send(
        self,
        execution_id: str,
        *,
        name: str,
        message_id: str,
        body: str,
        wait: str = "",
        receiver: str | None = None,
    ) -> bool:
        message = {"id": execution_id, "name": name, "message_id": message_id, "body": body, "wait": wait}
        return bool(self._run("send", {**message, "receiver": receiver or execution_id}))

    def now(self) -> datetime:
        return self._instant(self._run("now", {})[0][0])

    def _time(self, value: int | None) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=value)

    def transaction(self) -> AbstractContextManager[Any]:
        return transaction.atomic(using=self.alias)


def _bind(value: Any) -> Any:
    """As text of no type: the column decides, and a statement is prepared once and not per width of an int."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)
