"""The statements that both databases share, by name, each with its reason.

What the two say differently is written with a ``$``: ``$now`` is the store's clock, ``$later(x)`` is that
plus the parameter x in seconds, ``$at(x)`` an instant handed in, ``$time(column)`` an instant handed out,
``$text(column)`` JSON as text, ``$is`` equality that takes NULL for a value, ``$ids`` the rows (``id``)
of a JSON list handed in, ``$list(x)`` selects the texts of another, and ``$lock_free(t)`` takes the rows read,
but for those that others hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from loom_django.kernel.events import ANSWERING, KERNEL_KINDS, TERMINAL, Kind
from loom_django.kernel.state import TERMINAL_STATUSES, Status


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


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


_TERMINAL = _list(TERMINAL_STATUSES)
# As kernel.events.is_answering has it: an unknown kind answers if it carries the kernel's stamp.
ANSWERS: Final = f"(kind in ({_list(ANSWERING)}) or (is_kernel and kind not in ({_list(KERNEL_KINDS)})))"
_TIMER = "t.execution_id, $time(t.wake_at), t.redrive, t.deadline, $time(coalesce(t.held_until, t.not_before)), t.tries"
UPSERT_TIMER = """
    on conflict (execution_id, wake_at) do update set
        redrive = coalesce(excluded.redrive, loom_timer.redrive),
        deadline = case when excluded.deadline then excluded.deadline else loom_timer.deadline end,
        not_before = excluded.not_before,
        held_until = null,
        tries = excluded.tries
"""
# When the first timer that a loop holds is given back, should that loop have died. What is held is due, and stands at the
# head of the index; the limit keeps the planner from a walk over the table, and behind so many a loop's next poll finds it.
_GIVEN_BACK: Final = """
    select min(held_until) from (
        select held_until from loom_timer where coalesce(not_before, wake_at) <= $now
        order by coalesce(not_before, wake_at) limit 1000
    ) due where held_until > $now
"""
# A lane is what is ready of one queue and one priority. All lanes are found by an index probe each, however long
# they are, and each is then read from its head: a plain ORDER BY would sort all that is ready, or walk over all
# that is to be ready one day. The order is put on the lanes; one on their rows would read all before the limit.
LANES: Final = """
    with recursive queues(queue) as (
        select (select x.queue from loom_execution x where x.ready_at is not null order by x.queue limit 1)
        union all
        select (
            select x.queue from loom_execution x
            where x.ready_at is not null and x.queue > q.queue order by x.queue limit 1
        )
        from queues q where q.queue is not null
    ), lanes(queue, priority) as (
        select q.queue, (
            select x.priority from loom_execution x
            where x.ready_at is not null and x.queue = q.queue order by x.priority desc limit 1
        )
        from queues q where q.queue is not null
        and (%(any_queue)s or q.queue in ($list(queues))) and q.queue not in ($list(besides))
        union all
        select l.queue, (
            select x.priority from loom_execution x
            where x.ready_at is not null and x.queue = l.queue and x.priority < l.priority
            order by x.priority desc limit 1
        )
        from lanes l where l.priority is not null
    )
"""
LANES_IN_ORDER: Final = """
    select l.queue, l.priority from lanes l where l.priority is not null order by l.priority desc, (
        select x.ready_at from loom_execution x
        where x.queue = l.queue and x.priority = l.priority and x.ready_at is not null
        order by x.ready_at limit 1
    )
"""

# The next execution that has parked; as written here the predicate of a partial index is known to hold.
_NEXT_PARKED: Final = f"""
    select execution_id from loom_event where kind = '{Kind.EXECUTION_SUSPENDED}' and execution_id > {{after}}
    order by execution_id limit 1
"""

# The newest successor that began after the first member; else that one. Of a chain that was removed in part, and
# whose first id was given anew, the others are no successors.
_NEWEST: Final = """
    coalesce((
        select s.id from loom_execution s
        where s.chain = {first} and s.chain <> s.id and s.created_at >= coalesce(
            (select f.created_at from loom_execution f where f.id = {first}), s.created_at
        )
        order by s.created_at desc limit 1
    ), {first})
"""

# Whether a node has the code that a wake of x is for, by the rows ``known``: once x was continued, that of the newest
# of its chain, which is found without a sort, whatever the planner thinks of the index.
SERVES: Final = f"""
    exists (
        select 1 from known where known.key = x.flow_id and x.version <= cast(known.value as integer)
        and x.status <> '{Status.CONTINUED}'
    ) or x.status = '{Status.CONTINUED}' and exists (
        select 1 from loom_execution n join known on known.key = n.flow_id
        where n.version <= cast(known.value as integer) and n.id = (
            select s.id from loom_execution s where s.chain = x.chain and s.chain <> s.id and s.created_at = (
                select max(m.created_at) from loom_execution m where m.chain = x.chain and m.chain <> m.id
            )
        )
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
        "read_behind_snapshot",
        "A log from the event of its snapshot on, which comes with that event; without one, all of it. Token and wakes are "
        "looked up once, and stand in each row.",
        """
        select e.sequence, e.kind, $text(e.payload), e.fence, e.writer, e.is_kernel, $time(e.recorded_at), s.seal, s.body,
            (select token from loom_fence where execution_id = %(id)s),
            (select wakes from loom_fence where execution_id = %(id)s)
        from loom_event e left join loom_snapshot s
            on s.execution_id = e.execution_id and s.format = %(format)s and s.sequence = e.sequence
        where e.execution_id = %(id)s and e.sequence >= coalesce((
            select sequence from loom_snapshot where execution_id = %(id)s and format = %(format)s
        ), 1)
        order by e.sequence
        """,
        repeatable=True,
    ),
    Statement(
        "save_snapshot",
        "In place of the one of its format, while the execution lives.",
        f"""
        insert into loom_snapshot (execution_id, format, sequence, seal, body, taken_at)
        select x.id, %(format)s, %(sequence)s, %(seal)s, %(body)s, $now from loom_execution x
        where x.id = %(id)s and x.status not in ({_TERMINAL})
        on conflict (execution_id, format) do update set
            sequence = excluded.sequence, seal = excluded.seal, body = excluded.body, taken_at = excluded.taken_at
        """,
    ),
    Statement(
        "drop_passed_snapshots",
        "Those of other formats that are not newer than a sequence.",
        """
        delete from loom_snapshot
        where execution_id = %(id)s and format <> %(format)s and sequence <= %(passed)s
        """,
    ),
    Statement(
        "delete_snapshots",
        "All snapshots of an execution go.",
        "delete from loom_snapshot where execution_id = %(id)s",
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
        "head",
        "Whether a park is still the one that was looked at: no payload is read, however many children it names.",
        """
        select x.status, x.parent_id, e.sequence, e.writer from loom_execution x
        join loom_event e on e.execution_id = x.id and e.sequence = (
            select max(last.sequence) from loom_event last where last.execution_id = x.id
        )
        where x.id = %(id)s
        """,
        repeatable=True,
    ),
    Statement(
        "newest",
        "The newest member of a chain, by the id of any of them: a probe for each of three rows.",
        f"""
        with c as (
            select coalesce((select chain from loom_execution where id = %(id)s), %(id)s) as first
        )
        select id, chain, status, $time(finished_at) from loom_execution
        where id = {_NEWEST.format(first="(select first from c)")}
        """,
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
        "hold_fence",
        "The row is there and locked until the end of the transaction; token as it is under the lock.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        values (%(id)s, 0, 0, 0, 0)
        on conflict (execution_id) do update set token = loom_fence.token
        returning token
        """,
    ),
    Statement(
        "make_fences",
        "Rows of those that have none, in order of id.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        select id, 0, 0, 0, 0 from $ids
        where exists (select 1 from loom_event where execution_id = ids.id and sequence = 1)
        and not exists (select 1 from loom_fence where execution_id = ids.id) order by id
        on conflict (execution_id) do nothing
        """,
    ),
    Statement(
        "hold_fences",
        "As hold_fence, for several; a row that others have locked is left out.",
        """
        select f.execution_id from loom_fence f join $ids on ids.id = f.execution_id
        order by f.execution_id $lock_free(f)
        """,
    ),
    Statement(
        "acquire_fences_at",
        "Under the locks: the tokens of those that are as they were looked at, with the count of takeovers.",
        """
        update loom_fence set
            token = loom_fence.token + 1,
            recoveries = case when l.progress is null then loom_fence.recoveries
                when loom_fence.recovered_sequence = l.progress then loom_fence.recoveries + 1 else 1 end,
            recovered_sequence = coalesce(l.progress, loom_fence.recovered_sequence)
        from $looks
        where loom_fence.execution_id = l.id and (l.fence is null or loom_fence.token = l.fence)
        and l.head = (select max(sequence) from loom_event where execution_id = l.id)
        and (l.lease is null or l.lease = (select lease_token from loom_execution where id = l.id))
        returning loom_fence.execution_id, loom_fence.token, loom_fence.recoveries
        """,
    ),
    Statement(
        "since_park",
        "Where the log ends, and if anything since a park has answered it.",
        f"""
        select
            (select coalesce(max(sequence), 0) from loom_event where execution_id = %(id)s),
            exists (
                select 1 from loom_event
                where execution_id = %(id)s and sequence > %(park)s and {ANSWERS}
            )
        """,
    ),
    Statement(
        "parked_after",
        "The next executions that have ever parked, each with the newest kind that has to do with its parks. "
        "From one to the next by a probe: one execution may have parked a thousand times.",
        f"""
        with recursive parked(id, place) as (
            select * from (
                select execution_id, 1 from ({_NEXT_PARKED.format(after="%(after)s")}) first
            ) head
            union all
            select ({_NEXT_PARKED.format(after="p.id")}), p.place + 1
            from parked p where p.id is not null and p.place < %(limit)s
        )
        select p.id, (
            select kind from loom_event where execution_id = p.id and {ANSWERS} order by sequence desc limit 1
        )
        from parked p where p.id is not null order by p.place
        """,
        repeatable=True,
    ),
    Statement(
        "ensure_fences",
        "The rows of parks that were written without one, in order of id; tokens stay.",
        """
        insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence)
        select id, 0, 0, 0, 0 from $ids where true order by id
        on conflict (execution_id) do nothing
        returning execution_id
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
    Statement(
        "other_life",
        "Whether the row is of another execution of that id than the one that ended as it was seen.",
        """
        select 1 from loom_execution
        where id = %(id)s and not (status = %(status)s and created_at = $at(created_at))
        """,
    ),
    Statement(
        "ended",
        "How executions, or the newest of their chains, ended; notes may stand behind the end.",
        f"""
        select m.id, m.newest, e.sequence, e.kind, $text(e.payload), e.fence, e.writer, e.is_kernel,
            $time(e.recorded_at)
        from (
            select x.id, case x.status when '{Status.CONTINUED}' then {_NEWEST.format(first="x.chain")}
                else x.id end as newest
            from $ids join loom_execution x on x.id = ids.id
        ) m left join loom_event e on e.execution_id = m.newest and e.sequence = (
            select max(last.sequence) from loom_event last
            where last.execution_id = m.newest and last.kind in ({_list(TERMINAL)})
            and (select n.status from loom_execution n where n.id = m.newest) in ({_TERMINAL})
        )
        """,
        repeatable=True,
    ),
    # Deletion: in the lock order, the fence row first ("hold_fence").
    Statement(
        "finished",
        "Checked under the fence's lock: only what has ended may go.",
        f"select chain from loom_execution where id = %(id)s and status in ({_TERMINAL})",
    ),
    Statement(
        "end_of_log",
        "Whether the log is still the one that was looked at.",
        """
        select sequence, writer from loom_event where execution_id = %(id)s
        order by sequence desc limit 1
        """,
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
        update loom_timer set not_before = $later(delay), held_until = null, tries = %(tries)s
        where execution_id = %(id)s and wake_at = $at(wake_at)
        and coalesce(held_until, not_before) $is $at(claimed)
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
        where execution_id = %(id)s and wake_at = $at(wake_at)
        and coalesce(held_until, not_before) $is $at(claimed)
        """,
        repeatable=True,
    ),
    Statement(
        "retire_redrives",
        "All that one claim took, which holds them until the same instant.",
        """
        delete from loom_timer
        where execution_id = %(id)s and redrive is not null and not deadline and held_until = $at(claimed)
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
        "The first entry of the index of what is due; of rows that are held, what is free or given back first.",
        f"""
        select $time(at) from (
            select case when held_until is null then due else (
                select min(at) from (
                    select (
                        select coalesce(not_before, wake_at) from loom_timer
                        where held_until is null or held_until <= $now
                        order by coalesce(not_before, wake_at) limit 1
                    ) as at union all {_GIVEN_BACK}
                ) soonest
            ) end as at
            from (
                select coalesce(not_before, wake_at) as due, held_until from loom_timer
                order by coalesce(not_before, wake_at) limit 1
            ) head
        ) next
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
        "release_all",
        "Several become ready; a row that others have locked is left out, for each is locked in order of id.",
        """
        with free as materialized (
            select x.id from loom_execution x join $ids on ids.id = x.id
            where x.lease_token = %(token)s order by x.id $lock_free(x)
        )
        update loom_execution set
            ready_at = $now, lease_owner = '', lease_token = null, lease_until = null
        from free where loom_execution.id = free.id
        returning loom_execution.id
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
        where id = %(id)s and lease_token = %(seen)s and (%(forced)s or lease_until <= $now)
        returning id
        """,
    ),
    Statement(
        "take_over_all",
        "As take_over, each lease by its own token and end; rows that others are taking are left out.",
        """
        with free as materialized (
            select x.id from loom_execution x join $leases on l.id = x.id and l.token = x.lease_token
            where x.lease_until <= $now order by x.id $lock_free(x)
        )
        update loom_execution set
            lease_owner = %(owner)s, lease_token = %(token)s, lease_until = $later(ttl)
        from free where loom_execution.id = free.id
        returning loom_execution.id
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
        from loom_execution x where ready_at < $later(before)
        and (%(any_flow)s or exists (
            select 1 from $known known
            where known.key = x.flow_id and x.version <= cast(known.value as integer)
        ))
        order by ready_at limit %(limit)s
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
    # Queues with limits.
    Statement(
        "queue_room",
        "How many of a queue are held, from when on its rate admits one, the time, and is anything ready?",
        f"""
        {LANES}
        select
            (select count(*) from loom_execution where queue = %(queue)s and lease_until is not null),
            (select $time(next_at) from loom_queue where name = %(queue)s),
            $time($now),
            exists (
                select 1 from lanes l where (
                    select x.ready_at from loom_execution x
                    where x.queue = l.queue and x.priority = l.priority and x.ready_at is not null
                    order by x.ready_at limit 1
                ) <= $now
            )
        """,
        repeatable=True,
    ),
    Statement(
        "hold_queue",
        "One claim of a queue with limits at a time: what is held is counted, and then no other claim adds to it.",
        """
        insert into loom_queue (name) values (%(queue)s)
        on conflict (name) do update set name = excluded.name
        """,
    ),
    Statement(
        "spend_rate",
        "So many of it were begun.",
        "update loom_queue set next_at = $at(next_at) where name = %(queue)s",
    ),
    Statement(
        "upcoming",
        "What has to be done next, if nothing has to be done now: the first timer, and the first that is to be "
        "ready, from now on.",
        f"""
        {LANES}
        select $time($now), (
            select $time(min(at)) from (
                select (
                    select coalesce(not_before, wake_at) from loom_timer
                    where coalesce(not_before, wake_at) > $now order by coalesce(not_before, wake_at) limit 1
                ) as at union all {_GIVEN_BACK}
            ) soonest
        ), (
            select min($time((
                select x.ready_at from loom_execution x
                where x.queue = l.queue and x.priority = l.priority and x.ready_at > $now
                order by x.ready_at limit 1
            ))) from lanes l
        )
        """,
        repeatable=True,
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
        select number, execution_id, name, message_id, $text(payload), wait, principal, reason from loom_message
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


def dialect(statements: Iterable[Statement], words: Mapping[str, str]) -> dict[str, Statement]:
    """The statements with each ``$word`` in one database's own; ``{0}`` is what stands in parentheses."""

    def say(match: re.Match[str]) -> str:
        return words[match[1]].format(pattern.sub(say, match[2] or ""))

    pattern = re.compile(
        r"\$(now|later|at|time|text|is|lock_free|known|ids|list|leases|looks)\b(?:\(((?:[^()]|\([^()]*\))*)\))?"
    )
    return {one.name: replace(one, sql=pattern.sub(say, " ".join(one.sql.split()))) for one in statements}
