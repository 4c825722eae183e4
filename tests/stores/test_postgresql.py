"""What only PostgreSQL can show: statements and round trips, lock waits, lost connections, isolation."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from loom_django.errors import StaleFenceError, StoreUnavailableError
from loom_django.kernel.events import Kind
from loom_django.stores import store_for
from loom_django.stores.base import (
    READY,
    Commit,
    Known,
    QueueLimits,
    RowLocked,
    SequenceOccupied,
    TimerRow,
    WakesMoved,
)
from loom_django.testing.conformance import Log, StoreConformance, held_by

if os.environ.get("LOOM_TEST_DATABASE") != "postgresql":
    pytest.skip("of PostgreSQL alone", allow_module_level=True)

import psycopg

from loom_django.stores import sql
from loom_django.stores.postgresql import PostgresStore
from loom_django.stores.postgresql_append import Parts, text_of
from tests.shop.models import Order
from tests.stores.rivals import InThread, connect, deadlocks, holding, wait_until_blocked

pytestmark = pytest.mark.django_db(transaction=True)

INSERT = """
    insert into loom_event (execution_id, sequence, kind, payload, writer, is_kernel, recorded_at)
    values (%s, %s, 'X', '{}', %s, true, now())
"""
REPEATABLE = "set default_transaction_isolation = 'repeatable read'"


def lock(log: Log) -> str:
    return f"select from loom_fence where execution_id = '{log.id}' for update"


class Postgres(StoreConformance):
    store: PostgresStore

    def make_store(self):
        return store_for("default")

    def append_in_thread(self, commit: Commit, *, session: str = "") -> InThread:
        return InThread(lambda: self.store.append(commit), session=session)


class TestOneStatement(Postgres):
    """An append is one statement and one round trip, whatever is in it."""

    @pytest.fixture
    def sent(self, monkeypatch):
        """The statements that go to the server, by whatever kind of cursor."""
        texts: list[str] = []
        plain = psycopg.Cursor.execute

        def execute(cursor, query, *args, **kwargs):
            texts.append(query)
            return plain(cursor, query, *args, **kwargs)

        monkeypatch.setattr(psycopg.Cursor, "execute", execute)
        return texts

    def commits(self, log: Log) -> list[Commit]:
        at = self.store.now() + timedelta(seconds=9)
        parent = self.parked()
        return [
            log.start(held_by(), parent_id=parent.id),
            log.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED, Kind.STEP_STARTED),
            log.park(wakes=0, timers=(TimerRow(log.id, at), TimerRow(log.id, at, deadline=True))),
            log.answer(timers_off=(at,), messages=(1, 2)),
            log.commit(Kind.CHILD_STARTED, also=(self.log().start(),)),
            log.end(wake=(parent.id,)),
        ]

    def test_each_append_sends_one_statement(self, sent):
        """Start, step, park, answer, child, end: one statement each."""
        for commit in self.commits(self.log()):
            sent.clear()
            self.store.append(commit)
            assert len(sent) == 1

    def test_many_appends_send_one_statement(self, sent):
        """A batch of 64 executions that do different things is one statement."""
        commits = [self.log().start() for _ in range(30)]
        commits += [self.running().park(wakes=0) for _ in range(30)]
        commits += [self.running().end() for _ in range(4)]
        sent.clear()
        assert self.store.append_many(commits) == [None] * 64
        assert len(sent) == 1

    def test_a_prepared_append_is_one_round_trip(self, tmp_path):
        """libpq's own trace shows one Sync from the client and one answer."""
        log = self.running()
        self.store.append(log.commit())
        with (tmp_path / "trace").open("w+") as trace:
            connection.connection.pgconn.trace(trace.fileno())
            self.store.append(log.commit())
            connection.connection.pgconn.untrace()
            trace.seek(0)
            lines = [line.split("\t") for line in trace]
        assert [line[3].strip() for line in lines if line[1] == "F" and "Sync" in line[3]] == ["Sync"]
        assert len([line for line in lines if line[1] == "B" and "ReadyForQuery" in line[3]]) == 1

    def test_the_server_keeps_the_statement(self):
        """One prepared statement serves batches of every size."""
        for size in (1, 2, 64):
            self.store.append_many([self.started().commit() for _ in range(size)])
        assert self.prepared().count(text_of(Parts())) == 1

    def prepared(self) -> list[str]:
        rows = connection.connection.execute("select statement from pg_prepared_statements").fetchall()
        return [row[0] for row in rows]

    def test_behind_a_pooler_nothing_is_prepared(self, monkeypatch):
        """Each transaction has another server there; Django's setting for it is obeyed."""
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
        log = self.running()
        self.store.append(log.commit())
        assert self.store.claim(log.id, owner="me", token=1, ttl=1) is False
        assert self.prepared() == []

    def test_whoever_watches_django_s_queries_sees_it(self):
        """A test that counts queries counts appends, and they work the same way."""
        log = self.running()
        with CaptureQueriesContext(connection) as queries:
            self.store.append(log.commit())
            assert self.store.fence(log.id) == 0
        assert len(queries) == 2
        assert "loom_event" in queries[0]["sql"]
        assert len(self.store.read(log.id)) == 2

    @pytest.mark.parametrize("lock", [False, True])
    @pytest.mark.parametrize("fences", [False, True])
    @pytest.mark.parametrize("rest", [False, True])
    def test_every_look_is_by_an_index(self, lock, fences, rest):
        """The plan for any parameter can do without reading a table as a whole."""
        if not lock and fences:
            lock = True  # whoever writes a fence row locks it first
        parts = Parts(
            lock=lock,
            fences=fences,
            fresh=rest,
            groups=rest,
            owners=rest,
            timers=rest,
            timers_off=rest,
            messages=rest,
        )
        with connect(autocommit=True) as looker:
            looker.execute(
                "set enable_seqscan = off"
            )  # of a table that it knows to be empty it reads all of nothing
            plan = looker.execute(f"explain (generic_plan) {text_of(parts)}".encode()).fetchall()
        scans = [row[0].strip() for row in plan if "Seq Scan" in row[0]]
        assert scans == []

    @pytest.mark.parametrize("joins", ["nestloop", "hashjoin", "mergejoin"])
    @pytest.mark.parametrize("rest", ["", "fences", "also"])
    def test_rows_are_written_in_order_of_id(self, joins, rest):
        """The order of all locks, whatever order the commits came in and however the server joins."""
        logs = sorted((self.log() for _ in range(20)), key=lambda log: log.id, reverse=True)
        commits = [log.start() for log in logs]
        if rest == "also":
            commits = [replace(commit, also=(self.log().start(),)) for commit in commits]
        if rest == "fences":
            commits.append(self.running().park(wakes=0))
        with transaction.atomic(), connection.cursor() as cursor:
            for other in {"nestloop", "hashjoin", "mergejoin"} - {joins}:
                cursor.execute(f"set local enable_{other} = off")
            cursor.execute("set local plan_cache_mode = force_custom_plan")
            assert self.store.append_many(commits) == [None] * len(commits)
            cursor.execute("select id from loom_execution where status = 'PENDING' order by ctid")
            written = [row[0] for row in cursor.fetchall()]
        assert written == sorted(written)
        assert len(written) == len(logs) * (2 if rest == "also" else 1)


class TestLockWaits(Postgres):
    """What was committed while an append waited for a lock is seen by it."""

    def test_a_fence_taken_meanwhile_refuses_the_answer(self):
        """The acquire wins: the append that waited for it is stale, and nothing of it landed."""
        log = self.parked()
        with holding(f"update loom_fence set token = 1 where execution_id = '{log.id}'") as rival:
            waiting = self.append_in_thread(log.answer())
            wait_until_blocked()
            rival.commit()
        with pytest.raises(StaleFenceError):
            waiting.join()
        assert len(self.store.read(log.id)) == 2

    def test_a_fence_given_back_lets_the_answer_land(self):
        """The acquire rolled back, so the token is what was presented."""
        log = self.parked()
        with holding(f"update loom_fence set token = 1 where execution_id = '{log.id}'") as rival:
            waiting = self.append_in_thread(log.answer())
            wait_until_blocked()
            rival.rollback()
        waiting.join()
        assert len(self.store.read(log.id)) == 3

    def test_an_answer_in_flight_keeps_an_acquire_waiting(self):
        """The append's row lock orders the two: the acquirer reads the answer after it."""
        log = self.parked()
        with transaction.atomic():
            self.store.append(log.answer())
            acquiring = InThread(lambda: (self.store.acquire_fence(log.id), len(self.store.read(log.id))))
            wait_until_blocked()
        assert acquiring.join() == (1, 3)

    def test_a_step_s_fact_waits_for_nobody(self):
        """Only what answers a park locks the fence row; a step goes past a locked one."""
        log = self.running()
        self.store.acquire_fence(log.id)
        with holding(lock(log)):
            self.append_in_thread(log.commit(fence=1)).join()
        assert len(self.store.read(log.id)) == 2

    def test_the_first_park_meets_a_sender_that_has_not_committed(self):
        """The fence row is not there for the look, and still the wake is not lost."""
        log = self.running()
        with holding(
            f"insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence) "
            f"values ('{log.id}', 0, 1, 0, 0)"
        ) as rival:
            waiting = self.append_in_thread(log.park(wakes=0))
            wait_until_blocked()
            rival.commit()
        with pytest.raises(WakesMoved):
            waiting.join()

    def test_the_first_park_meets_an_acquirer_that_has_not_committed(self):
        """The same for a token, with no count of wakes presented at all."""
        log = self.running()
        with holding(
            f"insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence) "
            f"values ('{log.id}', 1, 0, 0, 0)"
        ) as rival:
            waiting = self.append_in_thread(log.park())
            wait_until_blocked()
            rival.commit()
        with pytest.raises(StaleFenceError):
            waiting.join()

    def test_a_member_s_first_park_meets_an_acquirer(self):
        """The chain's row is there and its count is right; its own row is made meanwhile, with a token."""
        first, log = self.parked(), self.running()
        with holding(
            f"insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence) "
            f"values ('{log.id}', 1, 0, 0, 0)"
        ) as rival:
            waiting = self.append_in_thread(log.park(wakes=0, wakes_of=first.id))
            wait_until_blocked()
            rival.commit()
        with pytest.raises(StaleFenceError):
            waiting.join()

    def test_a_member_s_park_meets_a_sender_to_its_chain(self):
        """Its own row is there; the chain's is made meanwhile, with a wake."""
        first, log = self.log(), self.parked()
        self.store.append(log.answer(held_by()))
        with holding(
            f"insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence) "
            f"values ('{first.id}', 0, 1, 0, 0)"
        ) as rival:
            waiting = self.append_in_thread(log.park(wakes=0, wakes_of=first.id))
            wait_until_blocked()
            rival.commit()
        with pytest.raises(WakesMoved):
            waiting.join()

    def test_a_park_that_looked_at_nothing_is_sent_again(self):
        """A row made meanwhile refuses the statement; nothing is in the way then, so it lands."""
        log = self.running()
        with holding(
            f"insert into loom_fence (execution_id, token, wakes, recoveries, recovered_sequence) "
            f"values ('{log.id}', 0, 1, 0, 0)"
        ) as rival:
            waiting = self.append_in_thread(log.park())
            wait_until_blocked()
            rival.commit()
        waiting.join()
        assert self.owner(log) == "parked"

    def test_a_wake_meanwhile_refuses_a_later_park(self):
        """The row is there and locked: its count is read after the wait."""
        log = self.parked()
        self.store.append(log.answer(held_by()))
        with holding(f"update loom_fence set wakes = wakes + 1 where execution_id = '{log.id}'") as rival:
            waiting = self.append_in_thread(log.park(wakes=0))
            wait_until_blocked()
            rival.commit()
        with pytest.raises(WakesMoved):
            waiting.join()

    def test_a_locked_row_is_told_from_a_refusal(self):
        """With a lock_timeout the one that is blocked is reported; its neighbour lands."""
        blocked, free = self.parked(), self.parked()
        commits = [blocked.answer(), free.answer()]
        with holding(lock(blocked)):
            writing = InThread(lambda: self.store.append_many(commits), session="set lock_timeout = '50ms'")
            outcomes = writing.join()
        assert isinstance(outcomes[0], RowLocked)
        assert outcomes[1] is None
        self.store.append(commits[0])
        assert self.owner(blocked) == "ready"


class TestNoDeadlock(Postgres):
    """Everybody locks in one order, so nobody waits in a circle."""

    @pytest.fixture(autouse=True)
    def _none(self):
        before = deadlocks()
        yield
        assert deadlocks() == before

    def test_two_parks_of_one_execution(self):
        """They queue at the fence row; one lands, the other is refused by the sequence."""
        log = self.parked()
        self.store.append(log.answer(held_by()))
        rival = log.fork()
        with holding(lock(log)) as holder:
            both = [self.append_in_thread(one.park(wakes=0)) for one in (log, rival)]
            wait_until_blocked(2)
            holder.commit()
        assert sorted(self.outcome(one) for one in both) == ["SequenceOccupied", "landed"]

    def test_two_first_parks_of_one_execution(self):
        """Without a row to queue at, the second waits for the first one's row."""
        for _ in range(10):
            log = self.running()
            parks = [log.fork().park(wakes=0) for _ in range(2)]
            both = [self.append_in_thread(park) for park in parks]
            assert sorted(self.outcome(one) for one in both) == ["SequenceOccupied", "landed"]

    def outcome(self, thread: InThread) -> str:
        try:
            thread.join()
        except SequenceOccupied:
            return "SequenceOccupied"
        return "landed"

    def test_two_ends_that_wake_one_parent(self):
        """Both lock the parent's row and then write it: sharing it would be a circle."""
        parent, children = self.parked(), [self.running(), self.running()]
        with holding(lock(parent)) as holder:
            both = [self.append_in_thread(child.end(wake=(parent.id,))) for child in children]
            wait_until_blocked(2)
            holder.commit()
        for one in both:
            one.join()
        assert self.store.wakes(parent.id) == 2

    def test_batches_that_touch_the_same_rows_in_other_order(self):
        """Rows are locked by id, not in the order of the commits."""
        parents = sorted((self.parked() for _ in range(2)), key=lambda log: log.id)
        ends = [self.running() for _ in range(4)]
        one = [ends[0].end(wake=(parents[0].id,)), ends[1].end(wake=(parents[1].id,))]
        other = [ends[2].end(wake=(parents[1].id,)), ends[3].end(wake=(parents[0].id,))]
        with holding(lock(parents[0])) as first, holding(lock(parents[1])) as second:
            both = [InThread(partial(self.store.append_many, commits)) for commits in (one, other)]
            wait_until_blocked(2)
            first.commit()
            second.commit()
        assert [thread.join() for thread in both] == [[None, None], [None, None]]

    def test_renewals_and_appends_of_many(self):
        """A renewal locks executions by id, as a batch of appends does."""
        logs = [self.started(held_by("me", 1)) for _ in range(20)]
        leases = [(log.id, 1) for log in reversed(logs)]

        def append():
            for _ in range(15):
                assert self.store.append_many([log.commit() for log in logs]) == [None] * 20

        def renew():
            for _ in range(40):
                assert len(self.store.renew(leases, ttl=60)) == 20

        threads = [InThread(append), InThread(renew)]
        for thread in threads:
            thread.join()

    def test_a_row_that_somebody_holds_does_not_stall_the_renewal_of_others(self):
        """A view may hold an execution for longer than a lease lasts; the lease is ours all the same."""
        mine, free, gone = (self.started(held_by("me", token, 10)) for token in (1, 2, 3))
        before = self.store.now()
        wanted = [(mine.id, 1), (free.id, 2), (gone.id, 99)]
        with holding(f"select from loom_execution where id in ('{mine.id}', '{gone.id}') for update"):
            renewing = InThread(
                lambda: self.store.renew(wanted, ttl=60), session="set statement_timeout = '10s'"
            )
            assert renewing.join() == {mine.id, free.id}
        lease = self.store.held(free.id)
        assert lease is not None
        assert lease.until >= before + timedelta(seconds=60)

    def test_a_claim_waits_for_a_fence_without_holding_its_row(self):
        """Whoever holds the fence goes on to the execution's row; the claim has committed its own by then."""
        log = self.started()
        self.store.acquire_fence(log.id)
        with holding("set lock_timeout = '5s'", lock(log)) as rival:
            claiming = InThread(
                lambda: self.store.claim_ready(owner="me", token=1, ttl=60, limit=9, known=self.known)
            )
            wait_until_blocked()
            rival.execute(f"select from loom_execution where id = '{log.id}' for update".encode())
            rival.commit()
        (claimed,) = claiming.join()
        assert claimed.fence == 2

    def test_claims_leave_out_what_others_hold(self):
        """Neither a claim of work nor one of timers waits for a row that somebody has locked."""
        logs = [self.started() for _ in range(2)]
        for log in logs:
            self.store.schedule(TimerRow(log.id, self.store.now()))
        with holding(
            f"select from loom_execution where id = '{logs[0].id}' for update",
            f"select from loom_timer where execution_id = '{logs[0].id}' for update",
        ):
            ready = self.store.claim_ready(owner="me", token=1, ttl=60, limit=9, known=self.known)
            due = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        assert [one.execution_id for one in ready] == [logs[1].id]
        assert [one.row.execution_id for one in due] == [logs[1].id]

    def test_a_timer_that_is_written_anew_amid_a_claim_is_held_or_not_claimed(self, monkeypatch):
        """Who was told of one that is not held could neither put it off nor retire it, and shared it with others."""
        log = self.started()
        row = TimerRow(log.id, self.store.now())
        self.store.schedule(row)
        claim = self.store.statements["claim_due"]
        # It stands still between its snapshot and its first row.
        slow = replace(
            claim, sql=claim.sql.replace("as later,", "as later, pg_advisory_xact_lock_shared(7),")
        )
        monkeypatch.setattr(PostgresStore, "statements", {**self.store.statements, "claim_due": slow})
        with holding("select pg_advisory_xact_lock(7)") as rival:
            claiming = InThread(
                lambda: self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
            )
            wait_until_blocked()
            self.store.schedule(row)
            rival.commit()
        told = [one.row for one in claiming.join()]
        assert told == [one for one in self.store.timers(log.id) if one.not_before is not None]

    def test_a_hold_does_not_wait_for_the_disk(self):
        """Whoever loses it by a crash of the server has lost the connection too; a caller's transaction waits as ever."""
        log = self.started()
        on, unwritten = [("on",)], "select pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"

        def claim() -> None:
            self.store.schedule(TimerRow(log.id, self.store.now()))
            assert self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)

        for _ in range(50):  # the server writes it a moment later, and may be quicker than the look
            claim()
            if self.store._execute(unwritten) == [(True,)]:
                break
        else:
            pytest.fail("each was on disk")
        assert self.store._execute("show synchronous_commit") == on
        with transaction.atomic():
            claim()
            assert self.store._execute("show synchronous_commit") == on

    def test_a_claim_does_not_wait_for_the_disk(self):
        """Its fences do, which are taken behind it; what follows in the session, or in a caller's transaction, does too."""
        on, unwritten = [("on",)], "select pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"
        lease: dict[str, Any] = {"owner": "me", "token": 7, "ttl": 60, "limit": 9, "known": self.known}
        levels: list[Any] = []
        written: list[bool] = []
        run = self.store._run

        def looked(name: str, parameters: Any) -> Any:
            rows = run(name, parameters)
            if name == "claim_ready":
                written.append(self.store._execute(unwritten) == [(False,)])
                levels.append(self.store._execute("show synchronous_commit"))
            return rows

        with patch.object(self.store, "_run", looked):
            for _ in range(50):  # the server writes it a moment later, and may be quicker than the look
                log = self.started()
                assert [one.execution_id for one in self.store.claim_ready(**lease)] == [log.id]
                if not written[-1]:
                    break
            else:
                pytest.fail("each was on disk")
            with transaction.atomic():
                self.started()
                assert len(self.store.claim_ready(**lease)) == 1
                self.started(queue="q")
                assert self.store.claim_limited("q", QueueLimits(concurrency=1), **lease).claims
        assert set(map(tuple, levels)) == {tuple(on)}

    def test_events_are_written_before_the_row(self):
        """All appends reach what they write in one order: this one waits for the row with its events in its hands."""
        log = self.running()
        commit = log.commit()
        with holding(f"select from loom_execution where id = '{log.id}' for update") as rival:
            waiting = self.append_in_thread(commit)
            wait_until_blocked()
            with connect() as another:
                another.execute("set local lock_timeout = '100ms'")
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    another.execute(
                        "insert into loom_event (execution_id, sequence, kind, payload, writer, is_kernel, recorded_at) "
                        "values (%s, %s, 'X', '{}', 1, true, now())",
                        [log.id, commit.first_sequence],
                    )
            rival.commit()
        waiting.join()
        assert len(self.store.read(log.id)) == 2


class TestIsolation(Postgres):
    """A server whose default is stricter than READ COMMITTED is served too."""

    @pytest.mark.parametrize("level", ["repeatable read", "serializable"])
    def test_an_append_that_waited_is_sent_again(self, level):
        """The server reports a serialization failure; nothing landed, the same rows land then."""
        log = self.parked()
        answer = log.answer()
        with holding(f"update loom_fence set wakes = wakes + 1 where execution_id = '{log.id}'") as rival:
            waiting = self.append_in_thread(answer, session=f"set default_transaction_isolation = '{level}'")
            wait_until_blocked()
            rival.commit()
        waiting.join()
        assert len(self.store.read(log.id)) == 3

    def test_an_acquire_that_waited_is_sent_again(self):
        """So are the calls around an append."""
        log = self.parked()
        with holding(f"update loom_fence set token = 4 where execution_id = '{log.id}'") as rival:
            waiting = InThread(lambda: self.store.acquire_fence(log.id), session=REPEATABLE)
            wait_until_blocked()
            rival.commit()
        assert waiting.join() == 5

    def test_in_a_caller_s_transaction_it_is_the_caller_s(self):
        """There is no fresh snapshot in there: the error goes to whoever opened the transaction."""
        log = self.parked()
        answer = log.answer()

        def append():
            with transaction.atomic():
                self.store.append(answer)

        with holding(f"update loom_fence set wakes = wakes + 1 where execution_id = '{log.id}'") as rival:
            waiting = InThread(append, session=REPEATABLE)
            wait_until_blocked()
            rival.commit()
        with pytest.raises(OperationalError):
            waiting.join()
        assert len(self.store.read(log.id)) == 2


class TestLostConnections(Postgres):
    """Nobody knows what a lost connection had done, so the same rows are sent until they are answered."""

    def test_an_append_cut_off_in_the_middle_lands_once(self):
        """The backend is terminated while it waits for a lock; the append is sent again by itself."""
        log = self.parked()
        with holding(lock(log)) as rival:
            waiting = self.append_in_thread(log.answer())
            (pid,) = wait_until_blocked()
            rival.execute("select pg_terminate_backend(%s)", [pid])
            (again,) = self.blocked_but(pid)
            assert again != pid
            rival.commit()
        waiting.join()
        assert [event.sequence for event in self.store.read(log.id)] == [1, 2, 3]

    def blocked_but(self, pid: int) -> list[int]:
        while True:
            others = [found for found in wait_until_blocked() if found != pid]
            if others:
                return others

    @pytest.mark.parametrize("batch", [False, True])
    def test_an_append_whose_answer_was_lost_had_landed(self, monkeypatch, batch):
        """It committed, and the connection went before the answer: sent again, it finds its own writer."""
        logs = [self.running() for _ in range(3 if batch else 1)]
        lost: list[int] = []
        plain = PostgresStore._execute

        def execute(store, sql, *args, **kwargs):
            rows = plain(store, sql, *args, **kwargs)
            if not lost and "loom_event" in sql:
                lost.append(1)
                connection.connection.close()
                raise OperationalError("gone") from psycopg.OperationalError("gone")
            return rows

        monkeypatch.setattr(PostgresStore, "_execute", execute)
        assert self.store.append_many([log.commit() for log in logs]) == [None] * len(logs)
        assert lost
        for log in logs:
            assert len(self.store.read(log.id)) == 2

    def test_a_look_that_is_cut_off_is_no_answer(self, monkeypatch):
        """The answer to an append is lost, and so is the look at what came of it: it is found all the same."""
        log = self.running()
        lost: list[str] = []
        plain = PostgresStore._execute

        def execute(store, sql, *args, **kwargs):
            if "between" in sql and lost.count("look") < 3:
                lost.append("look")
                raise OperationalError("gone") from psycopg.OperationalError("gone")
            rows = plain(store, sql, *args, **kwargs)
            if "append" not in lost and "loom_event" in sql:
                lost.append("append")
                raise OperationalError("gone") from psycopg.OperationalError("gone")
            return rows

        monkeypatch.setattr(PostgresStore, "_execute", execute)
        self.store.append(log.commit())
        assert lost == ["append", "look", "look", "look"]
        monkeypatch.undo()
        assert len(self.store.read(log.id)) == 2

    def test_a_broken_connection_is_replaced(self):
        """What can be asked twice is asked twice; what cannot is an error, once."""
        log = self.running()
        for ask in (lambda: self.store.read(log.id), lambda: self.store.acquire_fence(log.id)):
            self.break_connection()
            ask()
        self.break_connection()
        with pytest.raises(OperationalError) as caught:
            self.store.claim(log.id, owner="me", token=1, ttl=1)
        assert self.store.is_connection_lost(caught.value)
        assert self.store.claim(log.id, owner="me", token=1, ttl=1) is False

    def break_connection(self):
        connection.ensure_connection()
        pid = connection.connection.info.backend_pid
        with connect(autocommit=True) as other:
            other.execute("select pg_terminate_backend(%s, 5000)", [pid])

    def test_a_database_that_stays_away_is_reported(self, monkeypatch):
        """After the time given the append gives up, with pauses that grow, and says how often it tried."""
        log = self.running()
        commit = log.commit()
        connection.close()
        pauses: list[float] = []
        self.store.give_up = 0.3
        self.store.sleep = pauses.append

        def connect_nowhere(_):
            raise psycopg.OperationalError("no route")

        monkeypatch.setattr(connection, "get_new_connection", connect_nowhere)
        with pytest.raises(StoreUnavailableError) as caught:
            self.store.append(commit)
        assert caught.value.attempts == len(pauses) + 2
        assert pauses[0] == 0.05
        assert pauses == sorted(pauses)
        monkeypatch.undo()
        self.store.append(commit)

    def test_inside_a_caller_s_transaction_it_is_the_caller_s(self):
        """The transaction went with the connection: sending the append alone again would be a lie."""
        log = self.running()

        @transaction.atomic
        def buy():
            Order.objects.create(customer="c", amount="1.00")
            self.break_connection()
            self.store.append(log.commit())

        with pytest.raises(OperationalError) as caught:
            buy()
        assert self.store.is_connection_lost(caught.value)
        assert not Order.objects.exists()
        assert len(self.store.read(log.id)) == 1

    def test_other_errors_are_not_a_lost_connection(self):
        """A statement that was cancelled or refused, a Python error."""
        with connect() as other:
            other.execute("set statement_timeout = 1")
            with pytest.raises(psycopg.errors.QueryCanceled) as caught:
                other.execute("select pg_sleep(9)")
        assert not self.store.is_connection_lost(caught.value)
        assert not self.store.is_connection_lost(ValueError())
        assert not self.store.is_connection_lost(OperationalError("of no driver"))


class TestCallersTransaction(Postgres):
    """A refusal inside a caller's atomic() is a refusal, and no broken transaction."""

    def test_a_rival_s_write_breaks_nothing(self):
        """Even where the sequence is lost in the index itself, the caller's transaction goes on."""
        log = self.running()
        rival = log.fork().commit()
        with holding() as other:
            other.execute(INSERT, [log.id, 2, rival.events[0].writer])

            def buy():
                with transaction.atomic():
                    Order.objects.create(customer="before", amount="1.00")
                    with pytest.raises(SequenceOccupied):
                        self.store.append(log.commit())
                    Order.objects.create(customer="after", amount="1.00")

            buying = InThread(buy)
            wait_until_blocked()
            other.commit()
        buying.join()
        assert Order.objects.count() == 2

    def test_what_landed_is_the_caller_s_to_commit(self):
        """It is there with the block, and gone with it."""
        kept, lost = self.running(), self.running()
        with transaction.atomic():
            self.store.append(kept.commit())
        with suppress(ZeroDivisionError), transaction.atomic():
            assert self.store.append_many([lost.commit(), lost.park(wakes=0)]) == [None, None]
            raise ZeroDivisionError
        assert len(self.store.read(kept.id)) == 2
        assert len(self.store.read(lost.id)) == 1

    def test_a_locked_fence_belongs_to_the_transaction(self):
        """An answer inside atomic() holds the fence row until the commit."""
        log = self.parked()
        with transaction.atomic():
            self.store.append(log.answer())
            acquiring = InThread(lambda: self.store.acquire_fence(log.id))
            wait_until_blocked()
        acquiring.join()


class TestClock(Postgres):
    """Leases and due times go by the server's clock."""

    def test_the_clock_moves_inside_a_transaction(self):
        """clock_timestamp(), not now(), which is the transaction's beginning."""
        with transaction.atomic():
            first = self.store.now()
            assert self.store.now() > first

    def test_a_process_whose_clock_is_wrong_keeps_its_leases(self, monkeypatch):
        """The end of a lease is computed by the server; the process's clock is not asked."""

        class Wrong(datetime):
            @classmethod
            def now(cls, tz=None):
                return super().now(tz) + timedelta(days=9)

        monkeypatch.setattr(sql, "datetime", Wrong)
        log = self.started()
        (claimed,) = self.store.claim_ready(owner="me", token=1, ttl=60, limit=9, known=Known(None))
        assert claimed.execution_id == log.id
        assert self.store.expired(limit=9) == []
        assert abs(self.store.clock_offset() + 9 * 86_400) < 60


class TestGroups(Postgres):
    """Commits that go together, where rivals come in between."""

    def test_a_member_lost_in_the_index_takes_the_others_along(self):
        """The child's id is taken by a rival that has not committed: the parent's event does not land."""
        parent, child = self.running(), self.log()
        with holding() as other:
            other.execute(INSERT, [child.id, 1, 5])
            commit = parent.commit(Kind.CHILD_STARTED, also=(child.start(),))
            waiting = self.append_in_thread(commit)
            wait_until_blocked()
            other.commit()
        with pytest.raises(SequenceOccupied) as caught:
            waiting.join()
        assert caught.value.execution_id == child.id
        assert len(self.store.read(parent.id)) == 1

    def test_a_batch_that_meets_a_rival_is_split(self):
        """One sequence lost in the index fails its own commit; the 63 others land."""
        logs = [self.running() for _ in range(64)]
        with holding() as other:
            other.execute(INSERT, [logs[20].id, 2, 5])
            commits = [log.commit() for log in logs]
            waiting = InThread(lambda: self.store.append_many(commits))
            wait_until_blocked()
            other.commit()
        outcomes = waiting.join()
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [SequenceOccupied]
        assert outcomes[20] is not None

    def test_a_commit_that_the_database_refuses_fails_alone(self):
        """What breaks a constraint or a type is an error of its own commit."""
        good, bad = self.running(), self.parked()
        broken = bad.commit(Kind.EXECUTION_RESUMED)  # nobody is to run it: no one of four
        outcomes = self.store.append_many([broken, good.commit(), self.log().start(READY)])
        assert outcomes[0] is not None
        assert outcomes[1:] == [None, None]
        assert self.owner(bad) == "parked"

    def test_many_more_than_one_statement_takes(self):
        """A thousand starts land in parts."""
        commits = [self.log().start() for _ in range(600)]
        assert self.store.append_many(commits) == [None] * 600

    def test_an_outcome_and_the_next_boundary_ride_together(self):
        """An outcome and the next boundary of one execution are one commit to the server."""
        log = self.running()
        with CaptureQueriesContext(connection) as queries:
            outcomes = self.store.append_many([log.commit(), log.commit()])
        assert outcomes == [None, None]
        assert len(queries) == 1
