"""PostgreSQL's append: one statement for any number of commits, made of the parts that these commits need.

Its one parameter is a JSON array of flat objects; ``k`` says what each of them is:

    c  a commit: what it presents to the guard, who owns the execution then, and (``line``) its row
    e  an event     t  a timer row     o  a wake time whose plain rows go (without one: all rows)
    m  a message that is taken     w  an execution that is woken

Payloads travel as strings: the server unwraps each once, as it was written byte by byte, and takes any JSON;
nested ones would be parsed at every look, and refused for an escape that no text of PostgreSQL's can hold.

The planner takes ``k = 'c'`` for one row in two hundred, so it expects one row of each kind. That is wanted:
it goes into every table by its index then, whatever size the table had when the statement was planned.

Each part reads from the part before it, since only data dependency orders the writes of one statement: fence
rows, events, execution rows, timer rows, messages, each in order of id.

No ON CONFLICT DO NOTHING for events: it would let a commit of several land in part. A rival's write makes the
statement fail as a whole, and who wrote the sequence is read afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Final

from loom_django.kernel.events import is_answering
from loom_django.stores.base import Commit
from loom_django.stores.sql import dumps, row_of, timer_row, timers_off
from loom_django.stores.statements import UPSERT_TIMER

BRIEF: Final = "200ms"

# Statements of more commits than this are sent in parts: one part must not hold its rows for long.
MOST_COMMITS: Final = 256


@dataclass(frozen=True, slots=True)
class Parts:
    """What a batch needs; each combination is a text that the server prepares once.

    ``lock``: an event answers or ends a park, so the fence rows are locked: an acquirer sees the answer, or
    the answer is refused. NO KEY UPDATE and not SHARE: two who share a row would wait for each other when
    each goes on to write it, and a row that nobody goes on to write is that of one execution, of whose
    answers one lands anyhow, so that there is nothing to share. ``fences``: fence rows are written. ``groups``: commits that land together.
    ``owners``: somebody else is to run an execution then; ``keeps``: and others stay with whom they are. ``fresh``: some
    are starts. ``takes``: some move the token of their execution. ``brief``: a row that somebody else holds is waited for
    no longer than :data:`BRIEF`, and then the statement fails with lock_not_available.
    """

    lock: bool = False
    fresh: bool = False
    fences: bool = False
    takes: bool = False
    groups: bool = False
    owners: bool = False
    keeps: bool = False
    timers: bool = False
    timers_off: bool = False
    messages: bool = False
    shift: bool = False
    brief: bool = False


def parts_of(commits: Sequence[Commit], shift: timedelta) -> Parts:
    lock = fresh = fences = takes = groups = owners = keeps = timers = timers_off = messages = False
    for commit in commits:
        groups = groups or bool(commit.also)
        for member in (commit, *commit.also):
            fences = fences or bool(member.wake) or member.parks
            takes = takes or member.takes is not None
            lock = lock or fences or takes or _answers(member)
            fresh = fresh or member.new is not None
            kept = member.ownership.mode == "keep"
            owners, keeps = owners or not kept, keeps or kept
            timers = timers or bool(member.wake or member.timers)
            timers_off = timers_off or member.timers_off != ()
            messages = messages or bool(member.messages)
    return Parts(
        lock=lock,
        fresh=fresh,
        fences=fences,
        takes=takes,
        groups=groups,
        owners=owners,
        keeps=owners and keeps,
        timers=timers,
        timers_off=timers_off,
        messages=messages,
        shift=bool(shift),
    )


def _answers(commit: Commit) -> bool:
    return any(is_answering(event.kind, event.is_kernel) for event in commit.events)


# The columns of loom_execution that log and start tell: their types, and for those that the start decides for
# good, what stands there for a log that has lost its row. JSON in JSON is a string, like a payload.
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
    "not_before": ("timestamptz", "null::timestamptz"),
    "deadline": ("timestamptz", "null::timestamptz"),
    "parent_id": ("text", "null"),
    "chain": ("text", "l.id"),
    "subject_type": ("text", "''"),
    "subject_id": ("text", "''"),
    "attributes": ("jsonb", "'{}'::jsonb"),
    "scheduled_at": ("timestamptz", "null::timestamptz"),
}
_COLUMNS: Final = ", ".join([*_TOLD, *_DECIDED])
_UPDATES: Final = ", ".join(f"{name} = excluded.{name}" for name in _TOLD)


@cache
def text_of(parts: Parts) -> str:
    """The statement of these parts."""
    # Ahead of the first row, so before any lock; for this transaction only, so it is no state of a connection.
    brief = f"where (select set_config('lock_timeout', '{BRIEF}', true)) is not null" if parts.brief else ""
    rows = f"select * from json_to_recordset($1::json) as d({_record(parts)}) {brief}"
    steps = [f"d as materialized ({rows})"]
    steps += _guard_with_fences(parts) if parts.fences else _guard(parts)
    steps += [_LOGGED, _told(parts)]
    done = "told"
    if parts.timers:
        steps.append(_owed(parts))
        done = "owed"
    if parts.timers_off:
        steps.append(_DROPPED.format(done=done))
        done = "dropped"
    if parts.messages:
        steps.append(_TAKEN.format(done=done))
    return " ".join(f"with {', '.join(steps)} select id from landing where {_NONE_GONE}".split())


def _record(parts: Parts) -> str:
    columns = [
        "k text, id text, seq bigint, fence bigint, free boolean, fresh boolean, line json",
        "kind text, body text, writer bigint, kernel boolean",
    ]
    if parts.groups:
        columns.append("g integer, size integer")
    if parts.fences:
        columns.append("parks boolean, wakes bigint, wakes_of text")
    if parts.takes:
        columns.append("takes bigint")
    if parts.owners:
        columns.append("mode text, owner text, token bigint, ttl float8")
    if parts.owners or parts.timers or parts.timers_off:
        columns.append("at timestamptz")
    if parts.fences or parts.timers:
        columns.append("other text")
    if parts.timers:
        columns.append("redrive smallint, deadline boolean, not_before timestamptz, tries integer")
    if parts.messages or parts.shift:
        columns.append("number bigint")
    return ", ".join(columns)


def _now(parts: Parts) -> str:
    shift = " + (select number from d where k = 's') * interval '1 microsecond'" if parts.shift else ""
    return f"(select clock_timestamp(){shift}) as now"


# Behind the last event there is none, and the one before the first is there: one probe of the index.
_FOLLOWS: Final = """
    c.seq - 1 = coalesce((select max(e.sequence) from loom_event e where e.execution_id = c.id), 0)
"""
_PRESENTED: Final = "(c.free or coalesce(own.token, 0) = 0 or own.token = c.fence)"


def _presented(parts: Parts) -> str:
    """What takes a token needs a row that is there; without one it is let fall, and sent again with fences."""
    return (
        f"case when c.takes is null then {_PRESENTED} else own.token = c.takes end"
        if parts.takes
        else _PRESENTED
    )


def _look(parts: Parts) -> str:
    # `limit 1` keeps the planner from turning a look without a lock into a join that reads the whole table.
    return "for no key update" if parts.lock else "limit 1"


def _guard(parts: Parts) -> list[str]:
    """No fence row is made. A start that finds a token is held back: it is sent again with fences."""
    name = "fit" if parts.groups else "landing"
    fit = f"""{name} as materialized (
        select c.*, {_now(parts)}
        from (select * from d where k = 'c' order by id) c left join lateral (
            select token from loom_fence where execution_id = c.id {_look(parts)}
        ) own on true
        where {_presented(parts)} and (not c.fresh or coalesce(own.token, 0) = 0) and {_FOLLOWS}
    )"""
    return [
        fit,
        *([_whole("landing", "fit")] if parts.groups else []),
        *([_fenced(parts)] if parts.takes else []),
    ]


def _whole(name: str, source: str) -> str:
    """Of commits that land together none is left if one has gone."""
    return f"""{name} as materialized (
        select * from (
            select {source}.*, count(*) over (partition by g) as met from {source}
        ) whole where met = size order by id
    )"""


def _guard_with_fences(parts: Parts) -> list[str]:
    """All fence rows are reached in one go in order of id: locked where they are there, made where they are
    needed and are not. (An upsert that updates nothing locks all the same.) Rows that are there are read then,
    as they are under the lock. One that somebody made after this statement's snapshot cannot be read, and one
    that was just made cannot be written: what needs that is let fall and sent again.
    """
    locked = f"""locked as materialized (
        select ids.id, f.token, f.wakes, made.execution_id is not null as made
        from ids cross join (select count(*) from reached) done
        left join reached made on made.execution_id = ids.id
        left join lateral (
            select token, wakes from loom_fence where execution_id = ids.id {_look(parts)}
        ) f on true
    )"""
    name = "fit" if parts.groups else "landing"
    fit = f"""{name} as materialized (
        select c.*, {_now(parts)}, own.token as held
        from d c join locked own on own.id = c.id left join locked seen on seen.id = c.wakes_of
        where c.k = 'c' and {_presented(parts)} and {_FOLLOWS}
        and (c.wakes is null or c.wakes = coalesce(seen.wakes, 0))
        and (not c.parks or (
            (own.made or own.token is not null) and (seen.made or seen.token is not null)
        ))
        and not exists (
            select 1 from d w join locked woken on woken.id = w.other
            where w.k = 'w' and w.id = c.id and woken.token is null
        )
        order by c.id
    )"""
    whole = [_whole("landing", "fit")] if parts.groups else []
    return [_ids(parts), _REACHED, locked, fit, *whole, _fenced(parts)]


def _ids(parts: Parts) -> str:
    needed = "parks or takes is not null" if parts.takes else "parks"
    return f"""ids as materialized (
        select id, bool_or(needed) as needed from (
            select id, {needed} as needed from d where k = 'c'
            union all select wakes_of, true from d where k = 'c' and parks
            union all select other, true from d where k = 'w'
        ) i group by id order by id
    )"""


_REACHED: Final = """reached as (
    insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
    select id, 0, 0, 0, 0 from ids
    where needed or (select true from loom_fence f where f.execution_id = ids.id limit 1)
    order by id
    on conflict (execution_id) do update set token = loom_fence.token where false
    returning execution_id
)"""


def _fenced(parts: Parts) -> str:
    """An upsert and not an update, though each of these rows is there: it goes by the key, whatever the plan.

    Of a token that a start moves it says by ``recoveries`` that they are counted anew.
    """
    moved = []
    if parts.fences:
        moved += [
            "select id, 1 as moves, 0 as wakes, 1 as anew from landing where fresh and held > 0",
            "select d.other, 0, 1, 0 from d join landing l on l.id = d.id where d.k = 'w'",
        ]
    if parts.takes:
        moved.append("select id, 1 as moves, 0 as wakes, 0 as anew from landing where takes is not null")
    return f"""fenced as (
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        select id, max(moves), sum(wakes), max(anew), 0 from ({" union all ".join(moved)}) m group by id order by id
        on conflict (execution_id) do update set
            token = loom_fence.token + excluded.token,
            wakes = loom_fence.wakes + excluded.wakes,
            recoveries = case when excluded.recoveries > 0 then 0 else loom_fence.recoveries end,
            recovered_sequence = case when excluded.recoveries > 0 then 0 else loom_fence.recovered_sequence end
    )"""


_LOGGED: Final = """logged as (
    insert into loom_event (
        execution_id, sequence, kind, payload, fence, writer, is_kernel, recorded_at
    )
    select d.id, d.seq, d.kind, d.body::json, d.fence, d.writer, d.kernel, (select now from landing limit 1)
    from d where d.k = 'e' and (d.id in (select id from landing)) is true order by d.id, d.seq
    returning sequence
)"""


def _told(parts: Parts) -> str:
    """The projection, by an upsert and not an update: that goes by the key, whatever the plan.

    It goes in the order of ``landing``, which is that of the ids: nothing that it is crossed with can turn it.
    Sorting the rows of the table, which are wide, would cost a twentieth of the statement.

    What it would insert must satisfy the constraint of one of four, though in nearly every case it updates.
    """
    kept = "case when r.status in ('PENDING', 'RUNNING') then l.now end"
    own, owners = f"{kept}, '', null, null", ""
    if parts.owners:
        own = f"""
            case l.mode when 'ready' then coalesce(l.at, l.now) when 'keep' then {kept} end,
            coalesce(l.owner, ''), l.token, l.now + l.ttl * interval '1 second'
        """
        columns = ["ready_at", "lease_owner", "lease_token", "lease_until"]
        moved = ", ".join(f"excluded.{column}" for column in columns)
        if parts.keeps:
            cases = (
                f"case l.mode when 'keep' then loom_execution.{column} else excluded.{column} end"
                for column in columns
            )
            moved = f"select {', '.join(cases)} from landing l where l.id = excluded.id"
        owners = f", ({', '.join(columns)}) = ({moved})"
    decided = {
        name: f"coalesce(r.{name}::{kind}, {otherwise})" if parts.fresh else otherwise
        for name, (kind, otherwise) in _DECIDED.items()
    }
    values = [f"r.{name}::{kind}" for name, kind in _TOLD.items()] + list(decided.values())
    sent = _TOLD | {name: kind for name, (kind, _) in _DECIDED.items() if parts.fresh}
    line = [f"{name} {'text' if kind in ('json', 'jsonb') else kind}" for name, kind in sent.items()]
    return f"""told as (
        insert into loom_execution (id, {_COLUMNS}, ready_at, lease_owner, lease_token, lease_until)
        select l.id, {", ".join(values)}, {own}
        from landing l cross join lateral json_to_record(l.line) as r({", ".join(line)})
        where (select count(*) from logged) is not null
        on conflict (id) do update set {_UPDATES}{owners}
        returning id, xmax = 0 as made
    )"""


# A row that this statement's snapshot has and the upsert has made anew was deleted meanwhile, by whom a lock was waited
# for: what the guard has seen of the log is gone. Nothing lands then, of any commit; each is looked at afresh.
_NONE_GONE: Final = """(
    select 1 / case when bool_or(
        made and (select true from loom_execution x where x.id = told.id limit 1)
    ) then 0 else 1 end from told
) = 1"""


def _owed(parts: Parts) -> str:
    woken = """
        union all select d.other, l.now, 0, false, null, 0
        from d join landing l on l.id = d.id where d.k = 'w'
    """
    return f"""owed as (
        insert into loom_timer (execution_id, wake_at, redrive, deadline, not_before, tries)
        select execution_id, wake_at, max(redrive), bool_or(deadline), min(not_before), max(tries) from (
            select d.other as execution_id, d.at as wake_at, d.redrive, d.deadline, d.not_before, d.tries
            from d join landing l on l.id = d.id where d.k = 't'
            {woken if parts.fences else ""}
        ) t cross join (select count(*) from told) done
        group by 1, 2 order by 1, 2
        {UPSERT_TIMER}
        returning id
    )"""


_DROPPED: Final = """dropped as (
    delete from loom_timer t using (
        select d.id, d.at from d join landing l on l.id = d.id cross join (select count(*) from {done}) done
        where d.k = 'o'
    ) o
    where t.execution_id = o.id
    and (o.at is null or (t.wake_at = o.at and t.redrive is null and not t.deadline))
    returning t.id
)"""

_TAKEN: Final = """taken as (
    update loom_message m set taken = true from (
        select d.number from d join landing l on l.id = d.id cross join (select count(*) from {done}) done
        where d.k = 'm'
    ) t
    where m.number = t.number
    returning m.number
)"""


def document(commits: Sequence[Commit], shift: timedelta) -> str:
    """The statement's one parameter."""
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
    own = commit.ownership
    row = {
        "k": "c",
        "id": commit.execution_id,
        "g": group,
        "size": size,
        "seq": commit.first_sequence,
        "fence": commit.fence,
        "free": commit.unguarded,
        "fresh": commit.new is not None,
        "mode": own.mode,
        "line": {name: value for name, value in row_of(commit).items() if value is not None},
    }
    if commit.takes is not None:
        row["takes"] = commit.takes
    if commit.parks:
        row |= {"parks": True, "wakes": commit.wakes, "wakes_of": commit.wakes_of or commit.execution_id}
    else:
        row["parks"] = False
    if own.mode == "held":
        row |= {"owner": own.owner, "token": own.token, "ttl": own.ttl}
    elif own.at is not None:
        row["at"] = own.at
    return row


def _event_rows(commit: Commit) -> list[dict[str, Any]]:
    return [
        {
            "k": "e",
            "id": commit.execution_id,
            "seq": event.sequence,
            "kind": str(event.kind),
            "body": event.body,
            "fence": event.fence,
            "writer": event.writer,
            "kernel": event.is_kernel,
        }
        for event in commit.events
    ]


def _other_rows(commit: Commit) -> list[dict[str, Any]]:
    if not (commit.timers or commit.messages or commit.wake) and commit.timers_off == ():
        return []
    key, rows, off = commit.execution_id, [], timers_off(commit)
    for timer in commit.timers:
        columns = timer_row(timer)
        rows.append(
            {"k": "t", "id": key, "other": timer.execution_id, "at": columns.pop("wake_at"), **columns}
        )
    if off is None:
        rows.append({"k": "o", "id": key})
    else:
        rows += [{"k": "o", "id": key, "at": wake_at} for wake_at in off]
    rows += [{"k": "m", "id": key, "number": number} for number in commit.messages]
    rows += [{"k": "w", "id": key, "other": woken} for woken in commit.wake]
    return rows
