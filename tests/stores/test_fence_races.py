"""Answers, parks and ends against whoever takes the fence or deletes: one of the two, in every order.

One side is held in the middle of its transaction, and the other is seen to wait for it, before it goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import pytest
from django.db import OperationalError, connection, transaction

from loom_django.errors import OpenTransactionError, StaleFenceError
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.projection import project
from loom_django.stores import store_for
from loom_django.stores.base import (
    NOBODY,
    READY,
    Acquired,
    AppendRefused,
    Changed,
    Commit,
    SequenceOccupied,
    Stale,
)
from loom_django.testing.conformance import Log, StoreConformance, held_by

if os.environ.get("LOOM_TEST_DATABASE") != "postgresql":
    pytest.skip("of PostgreSQL alone: the others have one writer at a time", allow_module_level=True)

import psycopg

from loom_django.stores import postgresql, postgresql_append
from loom_django.stores.postgresql import PostgresStore, acquire_if_script
from tests.stores.rivals import (
    InBlock,
    InThread,
    connect,
    database_default,
    deadlocks,
    holding,
    wait_until_alone,
    wait_until_blocked,
)

pytestmark = pytest.mark.django_db(transaction=True)

LEVELS: Final = ("read committed", "repeatable read", "serializable")
STRICT: Final = LEVELS[1:]
UNKNOWN: Final = "EXECUTION_TELEPORTED"  # a kernel kind of a newer node's
ANSWERS: Final = (Kind.EXECUTION_RESUMED, Kind.EXECUTION_SUSPENDED, Kind.EXECUTION_CANCELLED, UNKNOWN)
PARK: Final = 2  # where the logs of these tests are parked


def answer(log: Log, kind: str, fence: int | None = None) -> Commit:
    """A commit that answers the park of a log, by the kind named."""
    owner = READY if kind == Kind.EXECUTION_RESUMED else NOBODY
    if kind != UNKNOWN:
        return log.commit(kind, ownership=owner, fence=fence)
    event = Event(log.id, log.fold.last_sequence + 1, kind, "{}", writer=log.writer, is_kernel=True)
    log.fold.apply(event)
    return Commit(log.id, (event,), project(log.fold), ownership=owner, fence=fence)


@pytest.fixture
def default_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test's database has this isolation as its default, for all that connect from now on."""
    with database_default("default_transaction_isolation", request.param):
        yield request.param


class Races(StoreConformance):
    store: PostgresStore

    def make_store(self) -> Any:
        return store_for("default")

    def parked_under(self, token: int) -> Log:
        """Parked under a token that was taken, or by somebody who never took one (0)."""
        log = self.running()
        for _ in range(token):
            self.store.acquire_fence(log.id)
        self.store.append(log.park(fence=token or None))
        assert log.fold.park_sequence == PARK
        return log

    def fenced_row(self, log: Log) -> bool:
        with connect(autocommit=True) as looker:
            return looker.execute("select from loom_fence where execution_id = %s", [log.id]).rowcount == 1

    def acquire(self, log: Log, fence: int = 0) -> Acquired | Stale:
        return self.store.acquire_fence_if(log.id, fence=fence, park_seq=PARK)

    def appended(self, form: str, commit: Commit) -> Callable[[], None]:
        """The append of a commit by itself, or in one statement with those of other executions."""
        if form == "single":
            return lambda: self.store.append(commit)
        others = [self.running().commit(), self.parked().answer(), self.running().end()]

        def append_many() -> None:
            outcomes = self.store.append_many([*others[:2], commit, others[2]])
            assert outcomes[:2] + outcomes[3:] == [None] * 3
            if outcomes[2] is not None:
                raise outcomes[2]

        return append_many

    @contextmanager
    def acquiring(self, log: Log, fence: int = 0) -> Iterator[psycopg.Connection[Any]]:
        """A rival whose conditional acquire has succeeded and is not committed: the store's own script."""
        script = acquire_if_script(log.id, fence, PARK, joined=False)
        with holding() as rival:
            cursor = rival.execute(f"begin; {script}".encode())
            while cursor.nextset():
                pass
            assert cursor.fetchall() == [(fence + 1, PARK)]
            yield rival

    @contextmanager
    def landing(self, commit: Commit) -> Iterator[psycopg.Connection[Any]]:
        """A rival whose append has gone through and is not committed: the store's own statement."""
        text = postgresql_append.text_of(postgresql_append.parts_of([commit], timedelta()))
        with holding() as rival:
            cursor = psycopg.RawCursor(rival).execute(
                text.encode(), [postgresql_append.document([commit], timedelta())]
            )
            assert cursor.fetchall() == [(commit.execution_id,)]
            yield rival


def my_pid() -> int:
    pid: int = connection.connection.info.backend_pid
    return pid


@pytest.mark.parametrize("default_level", LEVELS, indirect=True)
@pytest.mark.parametrize("form", ["single", "batch"])
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("token", [0, 1])
@pytest.mark.usefixtures("default_level")
class TestAnswerAgainstAcquire(Races):
    """Of an answer and a conditional acquire of one park exactly one succeeds."""

    def test_the_answer_is_first(self, form: str, kind: str, token: int) -> None:
        """The acquire waits for the answer's commit, sees it and changes nothing."""
        log = self.parked_under(token)
        append = self.appended(form, answer(log, kind, token or None))
        with transaction.atomic():
            append()
            acquiring = InThread(lambda: self.acquire(log, token))
            wait_until_blocked(by=my_pid())
        assert acquiring.join() == Stale(token)
        assert self.store.fence(log.id) == token
        assert self.store.read(log.id)[-1].kind == kind

    def test_the_acquire_is_first(self, form: str, kind: str, token: int) -> None:
        """The answer waits for the acquire's commit, and its token is stale."""
        log = self.parked_under(token)
        append = self.appended(form, answer(log, kind, token or None))
        with self.acquiring(log, token) as rival:
            answering = InThread(append)
            wait_until_blocked(by=rival.info.backend_pid)
            rival.commit()
        with pytest.raises(StaleFenceError):
            answering.join()
        assert self.store.fence(log.id) == token + 1
        assert len(self.store.read(log.id)) == PARK

    def test_an_answer_that_is_rolled_back_was_none(self, form: str, kind: str, token: int) -> None:
        """The acquire waits all the same, and succeeds."""
        log = self.parked_under(token)
        append = self.appended(form, answer(log, kind, token or None))
        with transaction.atomic():
            append()
            acquiring = InThread(lambda: self.acquire(log, token))
            wait_until_blocked(by=my_pid())
            transaction.set_rollback(True)
        assert acquiring.join() == Acquired(token + 1, PARK)


@pytest.mark.parametrize("default_level", LEVELS, indirect=True)
@pytest.mark.parametrize("form", ["single", "batch"])
@pytest.mark.parametrize("token", [0, 1])
@pytest.mark.usefixtures("default_level")
class TestAnswersThatTakeTheToken(Races):
    """Against whoever else answers or acquires: one of the two, and the token is that of who was first."""

    def taking(self, log: Log, token: int) -> Commit:
        return log.answer(takes=token, fence=token + 1)

    @pytest.mark.parametrize("rival_takes", [False, True])
    def test_another_answer_is_first(self, form: str, token: int, rival_takes: bool) -> None:
        """It is waited for, and then this one is late: by the sequence, or by the token that the other took."""
        log = self.parked_under(token)
        rival = log.fork()
        append = self.appended(form, self.taking(log, token))
        with self.landing(
            self.taking(rival, token) if rival_takes else rival.answer(fence=token or None)
        ) as other:
            appending = InThread(append)
            wait_until_blocked(by=other.info.backend_pid)
            other.commit()
        with pytest.raises(StaleFenceError if rival_takes else SequenceOccupied):
            appending.join()
        assert self.store.fence(log.id) == token + rival_takes
        assert len(self.store.read(log.id)) == PARK + 1

    def test_it_is_first(self, form: str, token: int) -> None:
        """An answer under the token of before, and an acquire, wait for it and are stale."""
        log = self.parked_under(token)
        append = self.appended(form, log.fork().answer(fence=token or None))
        with self.landing(self.taking(log, token)) as first:
            answering = InThread(append)
            acquiring = InThread(lambda: self.acquire(log, token))
            wait_until_blocked(2)
            first.commit()
        with pytest.raises(StaleFenceError):
            answering.join()
        assert acquiring.join() == Stale(token + 1)
        assert self.store.fence(log.id) == token + 1
        assert len(self.store.read(log.id)) == PARK + 1

    @pytest.mark.parametrize("answers", [True, False])
    def test_an_acquire_is_first(self, form: str, token: int, answers: bool) -> None:
        """It is waited for; the token that this one would take is gone. So it is of facts that answer nothing."""
        log = self.parked_under(token)
        taking = self.taking(log, token) if answers else log.commit(takes=token, fence=token + 1)
        append = self.appended(form, taking)
        with self.acquiring(log, token) as rival:
            appending = InThread(append)
            wait_until_blocked(by=rival.info.backend_pid)
            rival.commit()
        with pytest.raises(StaleFenceError):
            appending.join()
        assert self.store.fence(log.id) == token + 1
        assert len(self.store.read(log.id)) == PARK

    def test_who_was_first_is_undone(self, form: str, token: int) -> None:
        """Then this one lands."""
        log = self.parked_under(token)
        rival = log.fork()
        append = self.appended(form, self.taking(log, token))
        with self.landing(self.taking(rival, token)) as other:
            appending = InThread(append)
            wait_until_blocked(by=other.info.backend_pid)
            other.rollback()
        appending.join()
        assert self.store.fence(log.id) == token + 1
        assert self.store.read(log.id)[-1].writer == log.writer


class TestParkAgainstAcquire(Races):
    """A park makes the row at which it is met, also if nobody ever took a token."""

    def test_a_park_without_a_token_leaves_a_row(self) -> None:
        """With token 0, to be locked by an answer; what never parked has none."""
        log = self.running()
        assert not self.fenced_row(log)
        self.store.append(log.park())
        assert self.fenced_row(log)
        assert self.store.fence(log.id) == 0

    def test_the_first_acquire_of_a_park_that_has_not_committed(self) -> None:
        """It waits for the row that the park makes; before the park there was nothing to answer."""
        log = self.running()
        with transaction.atomic():
            self.store.append(log.park())
            acquiring = InThread(lambda: self.acquire(log))
            wait_until_blocked(by=my_pid())
        assert acquiring.join() == Acquired(1, PARK)

    def test_the_first_park_waits_for_an_acquire(self) -> None:
        """Whoever takes the first token makes the row; the park that has not seen it is refused."""
        log = self.running()
        with transaction.atomic():
            assert self.store.acquire_fence(log.id) == 1
            parking = InThread(lambda: self.store.append(log.park()))
            wait_until_blocked(by=my_pid())
        with pytest.raises(StaleFenceError):
            parking.join()
        assert len(self.store.read(log.id)) == 1

    def test_no_row_is_made_for_an_execution_that_is_not_there(self) -> None:
        """A name that was mistyped leaves nothing behind."""
        log = self.log()
        assert self.acquire(log) == Stale(0)
        assert not self.fenced_row(log)


class TestStepFacts(Races):
    """What answers nothing does not touch the lock: the sequence guards it."""

    @pytest.mark.parametrize("form", ["single", "batch"])
    @pytest.mark.parametrize("token", [0, 1])
    def test_they_land_while_somebody_holds_the_row(self, form: str, token: int) -> None:
        """A step's outcome goes past a locked row, with or without a token, alone or among others."""
        log = self.running()
        for _ in range(token):
            self.store.acquire_fence(log.id)
        if not token:
            self.store.append(log.park())
            self.store.append(log.answer(held_by()))
        append = self.appended(form, log.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED, fence=token or None))
        with holding(f"select from loom_fence where execution_id = '{log.id}' for update"):
            # In a batch the others' answers lock their own rows only.
            InThread(append, session="set lock_timeout = '10s'").join()
        assert self.store.read(log.id)[-1].kind == Kind.STEP_COMPLETED

    def test_the_sequence_guards_them(self) -> None:
        """Of two facts for one place one lands."""
        log = self.parked()
        self.store.append(log.answer(held_by()))
        rival = log.fork()
        with transaction.atomic():
            self.store.append(log.commit())
            appending = InThread(lambda: self.store.append(rival.commit()))
            wait_until_blocked(by=my_pid())
        with pytest.raises(AppendRefused):
            appending.join()

    def test_a_fact_of_the_owner_meets_the_new_token_or_is_before_it(self) -> None:
        """One that passes the guard while the acquire is in flight is a fact of before; the next is refused."""
        log = self.parked_under(1)
        self.store.append(log.answer(held_by(), fence=1))
        with transaction.atomic():
            assert self.store.acquire_fence(log.id) == 2
            InThread(lambda: self.store.append(log.commit(fence=1))).join()
        self.refused(log.commit(fence=1), StaleFenceError)


class TestLockOrder(Races):
    """Fence rows are locked in order of id, also those that an append finds missing."""

    @pytest.fixture(autouse=True)
    def _no_deadlock(self) -> Iterator[None]:
        before = deadlocks()
        with database_default("deadlock_timeout", "100ms"):
            yield
        wait_until_alone()
        assert deadlocks() == before

    def test_a_row_that_was_made_meanwhile(self) -> None:
        """It comes first in order: whoever did not find it makes it before anything else is waited for."""
        made, there = sorted((self.running(), self.running()), key=lambda log: log.id)
        self.store.append(there.park())
        ends = [self.running().end(wake=(made.id, there.id)) for _ in range(2)]
        with holding(f"select from loom_fence where execution_id = '{there.id}' for update") as rival:
            late = InThread(lambda: self.store.append(ends[0]))
            wait_until_blocked(by=rival.info.backend_pid)
            parking = InThread(lambda: self.store.append(made.park()))
            later = InThread(lambda: self.store.append(ends[1]))
            wait_until_blocked(3)
            rival.commit()
        for one in (late, parking, later):
            one.join()
        assert (self.store.wakes(made.id), self.store.wakes(there.id)) == (2, 2)


class TestLockMode(Races):
    """Why an append does not share the rows that it locks."""

    def ends(self) -> tuple[Log, list[Commit]]:
        parent = self.parked()
        return parent, [self.running().end(wake=(parent.id,)) for _ in range(2)]

    def shared(self, commit: Commit) -> None:
        """As an append would begin that reads the rows FOR SHARE, and as it goes on."""
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                "select from loom_fence where execution_id = any(%s) for share", [list(commit.wake)]
            )
            self.barrier.wait(30)
            self.store.append(commit)

    def test_two_ends_that_share_their_parent_s_row_wait_for_each_other(self) -> None:
        """Each goes on to write the row: the server ends one of them."""
        self.barrier = threading.Barrier(2)
        parent, commits = self.ends()
        before = deadlocks()
        with database_default("deadlock_timeout", "100ms"):
            both = [InThread(partial(self.shared, commit)) for commit in commits]
            outcomes = [self.outcome(one) for one in both]
        assert sorted(outcomes) == ["40P01", "landed"]
        wait_until_alone()
        assert deadlocks() == before + 1
        assert self.store.wakes(parent.id) == 1

    def outcome(self, thread: InThread) -> str:
        try:
            thread.join()
        except OperationalError as error:
            return str(postgresql.sqlstate(error))
        return "landed"


class TestWithoutTheGuards(Races):
    """Each guard is needed: without it both succeed, and a body that was just answered is fenced out."""

    @pytest.fixture
    def unlocked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts_of = postgresql_append.parts_of
        monkeypatch.setattr(
            postgresql, "parts_of", lambda *args: replace(parts_of(*args), lock=False, fences=False)
        )

    @pytest.mark.parametrize("form", ["single", "batch"])
    @pytest.mark.usefixtures("unlocked")
    def test_an_answer_without_the_lock_is_not_seen(self, form: str) -> None:
        """The answer is in flight; the acquire does not wait, and looks before it is committed."""
        log = self.parked()
        append = self.appended(form, log.answer())
        with transaction.atomic():
            append()
            assert InThread(lambda: self.acquire(log)).join() == Acquired(1, PARK)
        assert len(self.store.read(log.id)) == PARK + 1

    @pytest.mark.parametrize("form", ["single", "batch"])
    @pytest.mark.usefixtures("unlocked")
    def test_an_answer_without_the_lock_does_not_see(self, form: str) -> None:
        """The acquire is in flight; the answer lands under the token of before."""
        log = self.parked()
        append = self.appended(form, log.answer())
        with self.acquiring(log) as rival:
            InThread(append).join()
            rival.commit()
        assert self.store.fence(log.id) == 1
        assert len(self.store.read(log.id)) == PARK + 1

    @pytest.mark.usefixtures("unlocked")
    def test_an_answer_that_takes_the_token_without_the_lock_takes_another(self) -> None:
        """The acquire is in flight; the answer lands under its token, which is not the one that stands then."""
        log = self.parked_under(1)
        with self.acquiring(log, 1) as rival:
            appending = InThread(lambda: self.store.append(log.answer(takes=1, fence=2)))
            wait_until_blocked(by=rival.info.backend_pid)
            rival.commit()
            appending.join()
        assert self.store.fence(log.id) == 3
        assert len(self.store.read(log.id)) == PARK + 1

    @pytest.mark.parametrize("default_level", ["repeatable read"], indirect=True)
    @pytest.mark.usefixtures("default_level")
    def test_an_acquire_that_reads_from_one_snapshot_does_not_see(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits for the answer's lock as it should, and then looks at the log of before.

        (At SERIALIZABLE the server would notice, and the acquire would be sent again.)
        """
        monkeypatch.setattr(
            postgresql,
            "acquire_if_script",
            lambda *args, joined: acquire_if_script(*args, joined=True),
        )
        log = self.parked()
        with transaction.atomic():
            self.store.append(log.answer())
            acquiring = InThread(lambda: self.acquire(log))
            wait_until_blocked(by=my_pid())
        assert acquiring.join() == Acquired(1, PARK)
        assert len(self.store.read(log.id)) == PARK + 1


class TestCallersTransaction(Races):
    """A conditional call joins a caller's block if each statement there has a snapshot of its own."""

    def test_at_read_committed_it_sees_what_was_committed_since(self) -> None:
        """The block has read the park before; the answer comes from elsewhere; the acquire is stale."""
        log = self.parked()
        with transaction.atomic():
            assert len(self.store.read(log.id)) == PARK
            InThread(lambda: self.store.append(log.answer())).join()
            assert self.acquire(log) == Stale(0)

    def test_it_is_the_block_s_to_commit(self) -> None:
        """Rolled back, the token was never taken."""
        log = self.parked()
        with transaction.atomic():
            assert self.acquire(log) == Acquired(1, PARK)
            transaction.set_rollback(True)
        assert self.store.fence(log.id) == 0
        assert self.acquire(log) == Acquired(1, PARK)

    @pytest.mark.parametrize("default_level", STRICT, indirect=True)
    @pytest.mark.usefixtures("default_level")
    @pytest.mark.parametrize("call", ["acquire_fence_if", "append_if_unchanged", "delete_execution"])
    def test_above_it_is_refused(self, call: str) -> None:
        """Nothing is written, and the block can go on."""
        log = self.running()
        self.store.append(log.end())
        before = self.snapshot(log.fork().commit(Kind.OUTCOME_RECORDED))
        calls: dict[str, Callable[[], object]] = {
            "acquire_fence_if": lambda: self.acquire(log),
            "append_if_unchanged": lambda: self.store.append_if_unchanged(
                log.commit(Kind.OUTCOME_RECORDED), fence=0
            ),
            "delete_execution": lambda: self.store.delete_execution(log.id),
        }
        with transaction.atomic():
            with pytest.raises(OpenTransactionError, match=call):
                calls[call]()
            assert len(self.store.read(log.id)) == PARK
        assert self.snapshot(log.fork().commit(Kind.OUTCOME_RECORDED)) == before
        assert not self.fenced_row(log)


@pytest.mark.parametrize("default_level", LEVELS, indirect=True)
@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.usefixtures("default_level")
class TestUnchangedAndDeleted(Races):
    """A fact about what has ended, the deletion of it, and an acquire: each sees the other or is refused."""

    def ended(self, *, fenced: bool) -> Log:
        log = self.running()
        if fenced:
            self.store.acquire_fence(log.id)
        self.store.append(log.end(fence=int(fenced) or None))
        assert self.fenced_row(log) == fenced
        return log

    def noting(self, log: Log, *, fenced: bool) -> Callable[[], None]:
        commit = log.fork().commit(Kind.OUTCOME_RECORDED)
        return lambda: self.store.append_if_unchanged(commit, fence=int(fenced))

    def rows(self, log: Log) -> dict[str, int]:
        """How many rows of an execution there are, by table."""
        columns = {"loom_event": "execution_id", "loom_execution": "id", "loom_timer": "execution_id"}
        with connect(autocommit=True) as looker:
            return {
                table: looker.execute(f"select from {table} where {column} = %s".encode(), [log.id]).rowcount
                for table, column in columns.items()
            }

    GONE: Final = {"loom_event": 0, "loom_execution": 0, "loom_timer": 0}

    def test_a_deletion_waits_for_a_fact_and_takes_it_along(self, fenced: bool) -> None:
        """The fact landed first: it goes with the rest."""
        log = self.ended(fenced=fenced)
        with InBlock(self.noting(log, fenced=fenced)) as holder:
            deleting = InThread(lambda: self.store.delete_execution(log.id))
            wait_until_blocked(by=holder.pid)
        assert deleting.join() is True
        assert self.rows(log) == self.GONE
        assert self.fenced_row(log) == fenced

    def test_a_fact_waits_for_a_deletion_and_is_refused(self, fenced: bool) -> None:
        """There is no log any more, so no event may be left behind."""
        log = self.ended(fenced=fenced)
        with InBlock(lambda: self.store.delete_execution(log.id)) as holder:
            noting = InThread(self.noting(log, fenced=fenced))
            wait_until_blocked(by=holder.pid)
        with pytest.raises(Changed):
            noting.join()
        assert self.rows(log) == self.GONE
        assert self.fenced_row(log) == fenced

    def test_a_fact_waits_for_an_acquire_and_is_refused(self, fenced: bool) -> None:
        """The token is not the one that was observed."""
        log = self.ended(fenced=fenced)
        with InBlock(lambda: self.store.acquire_fence(log.id)) as holder:
            noting = InThread(self.noting(log, fenced=fenced))
            wait_until_blocked(by=holder.pid)
        with pytest.raises(Changed):
            noting.join()
        assert len(self.store.read(log.id)) == PARK

    def test_an_acquire_waits_for_a_fact(self, fenced: bool) -> None:
        """And sees it: the head that it tells is the fact's."""
        log = self.ended(fenced=fenced)
        with InBlock(self.noting(log, fenced=fenced)) as holder:
            acquiring = InThread(
                lambda: self.store.acquire_fence_if(log.id, fence=int(fenced), park_seq=PARK)
            )
            wait_until_blocked(by=holder.pid)
        assert acquiring.join() == Acquired(int(fenced) + 1, PARK + 1)

    def test_of_two_facts_for_one_place_one_lands(self, fenced: bool) -> None:
        """The second waits, and the log is not as it was observed."""
        log = self.ended(fenced=fenced)
        with InBlock(self.noting(log, fenced=fenced)) as holder:
            noting = InThread(self.noting(log, fenced=fenced))
            wait_until_blocked(by=holder.pid)
        with pytest.raises(Changed):
            noting.join()
        assert len(self.store.read(log.id)) == PARK + 1

    def test_an_acquire_waits_for_a_deletion(self, fenced: bool) -> None:
        """Nothing is there to be answered; a real token stays what it was."""
        log = self.ended(fenced=fenced)
        with InBlock(lambda: self.store.delete_execution(log.id)) as holder:
            acquiring = InThread(lambda: self.acquire(log, int(fenced)))
            wait_until_blocked(by=holder.pid)
        assert acquiring.join() == Stale(int(fenced))
        assert self.rows(log) == self.GONE

    @pytest.mark.parametrize("kind", [Kind.EXECUTION_DENIED, Kind.EFFECT_RETURNED_LATE])
    def test_a_deletion_takes_a_note_in_flight_along(self, fenced: bool, kind: str) -> None:
        """Notes that present no token may come at any time; none is left without its execution."""
        log = self.ended(fenced=fenced)
        with InBlock(lambda: self.store.append(log.commit(kind))) as holder:
            deleting = InThread(lambda: self.store.delete_execution(log.id))
            wait_until_blocked(by=holder.pid)
        assert deleting.join() is True
        assert self.rows(log) == self.GONE
        assert self.fenced_row(log) == fenced

    @pytest.mark.parametrize("kind", [Kind.EXECUTION_DENIED, Kind.EFFECT_RETURNED_LATE])
    @pytest.mark.parametrize("form", ["single", "batch"])
    def test_a_note_that_waited_for_a_deletion_is_refused(self, fenced: bool, form: str, kind: str) -> None:
        """It would be a log that begins in its middle, and a row for it."""
        log = self.ended(fenced=fenced)
        append = self.appended(form, log.commit(kind))
        with InBlock(lambda: self.store.delete_execution(log.id)) as holder:
            noting = InThread(append)
            wait_until_blocked(by=holder.pid)
        with pytest.raises(SequenceOccupied):
            noting.join()
        assert self.rows(log) == self.GONE
        assert self.fenced_row(log) == fenced

    @pytest.mark.parametrize("form", ["single", "batch"])
    @pytest.mark.parametrize("what", ["step", "park", "end"])
    def test_an_append_from_before_the_end_that_waited_for_a_deletion_is_refused(
        self, fenced: bool, what: str, form: str
    ) -> None:
        """What it saw of the log is gone: it would be the middle of one, with a row for it."""
        log, token = self.running(), None
        if fenced:
            token = self.store.acquire_fence(log.id)
        late = log.fork()
        commit = {"step": late.commit, "park": late.park, "end": late.end}[what](fence=token)
        append = self.appended(form, commit)

        def ends_and_goes() -> None:
            self.store.append(log.end(fence=token))
            assert self.store.delete_execution(log.id)

        with InBlock(ends_and_goes) as holder:
            appending = InThread(append)
            wait_until_blocked(by=holder.pid)
        with pytest.raises((SequenceOccupied, StaleFenceError)):
            appending.join()
        assert self.rows(log) == self.GONE
        assert self.store.fence(log.id) == (token or 0)

    @pytest.mark.parametrize("unchanged", [False, True])
    def test_a_note_is_of_one_life_of_an_id(self, fenced: bool, unchanged: bool) -> None:
        """Deleted, begun anew and as long as it was: what was judged is not what is there now."""
        log = self.ended(fenced=fenced)
        fence = self.store.fence(log.id)
        note = log.fork().commit(Kind.OUTCOME_RECORDED if unchanged else Kind.EXECUTION_DENIED)
        assert self.store.delete_execution(log.id)
        again = Log(log.id, log.flow_id)
        self.store.append(again.start(held_by()))
        self.store.append(again.park(fence=self.store.fence(log.id) or None))
        append = partial(self.store.append_if_unchanged, fence=fence) if unchanged else self.store.append
        with pytest.raises(Changed if unchanged else SequenceOccupied):
            append(note)
        assert len(self.store.read(log.id)) == PARK
        assert self.owner(again) == "parked"

    def test_of_two_deletions_one_deletes(self, fenced: bool) -> None:
        """The other finds nothing, and leaves no row."""
        log = self.ended(fenced=fenced)
        with InBlock(lambda: self.store.delete_execution(log.id)) as holder:
            deleting = InThread(lambda: self.store.delete_execution(log.id))
            wait_until_blocked(by=holder.pid)
        assert deleting.join() is False
        assert self.rows(log) == self.GONE
        assert self.fenced_row(log) == fenced
