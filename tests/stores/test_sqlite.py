"""What only SQLite can show: one file, one writer at a time, and processes that meet in it."""

from __future__ import annotations

import itertools
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from loom_django.errors import StoreUnavailableError
from loom_django.kernel.events import Kind
from loom_django.kernel.projection import project
from loom_django.stores import store_for
from loom_django.stores.base import NOBODY, Commit, TimerRow
from loom_django.stores.sqlite import SqliteStore
from loom_django.testing.conformance import StoreConformance, held_by
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

AT = datetime(2030, 1, 1, tzinfo=UTC)
COUNT = """
import sys
import django
django.setup()
from loom_django.stores import store_for
from loom_django.testing.conformance import Log, held_by
store = store_for("default")
shared, name = sys.argv[1:]
log = Log(name, "flow")
store.append(log.start(held_by()))
for _ in range(30):
    store.append(log.commit())
    print(store.acquire_fence(shared), flush=True)
"""


@pytest.fixture(autouse=True)
def _sqlite_alone():
    if connection.vendor != "sqlite":
        pytest.skip("of SQLite alone")


class Sqlite(StoreConformance):
    store: SqliteStore

    def make_store(self):
        return store_for("default")

    @pytest.fixture(autouse=True)
    def _rivals_go(self):
        self.rivals: list[sqlite3.Connection] = []
        yield
        for rival in self.rivals:
            rival.close()

    def rival(self) -> sqlite3.Connection:
        """Another connection to the file, which takes the write lock when it is told to."""
        rival = sqlite3.connect(str(connection.settings_dict["NAME"]), isolation_level=None)
        rival.execute("pragma busy_timeout = 0")
        self.rivals.append(rival)
        return rival

    def impatient(self) -> None:
        """A locked file is an error at once, so that the store's own patience shows."""
        connection.ensure_connection()
        connection.connection.execute("pragma busy_timeout = 0")


def make_rows(kit: StoreConformance) -> None:
    assert kit.owner(kit.running()) == "held"


class TestTheFile(Sqlite):
    def test_it_writes_ahead(self):
        """The first change puts the file into WAL mode, so that readers and the writer do not wait."""
        self.store.close_connections()
        rival = self.rival()
        rival.execute("pragma journal_mode = delete")
        # The suite's own settings would see to it at each connection.
        init = connection.settings_dict["OPTIONS"].pop("init_command")
        try:
            make_rows(self)
            assert self.rival().execute("pragma journal_mode").fetchone() == ("wal",)
        finally:
            connection.settings_dict["OPTIONS"]["init_command"] = init

    def test_a_file_that_others_use_in_its_old_mode_is_used_in_it(self):
        """It works all the same; a later process may change it."""
        self.store.close_connections()
        rival = self.rival()
        rival.execute("pragma journal_mode = delete")
        init = connection.settings_dict["OPTIONS"].pop("init_command")
        try:
            rival.execute("begin")
            rival.execute("select count(*) from loom_event").fetchall()
            self.impatient()
            self.store.sleep = lambda _: rival.commit()
            make_rows(self)
        finally:
            connection.settings_dict["OPTIONS"]["init_command"] = init
            self.store.close_connections()
            rival.execute("pragma journal_mode = wal")

    def test_two_processes_share_it(self, child_env):
        """Four processes write and fence at once: each log is whole, and no token is given twice."""
        shared = self.parked()
        names = [f"{self.flow_id}-child-{number}" for number in range(4)]
        children = [
            subprocess.Popen(
                [sys.executable, "-c", COUNT, shared.id, name],
                env=child_env(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        ]
        tokens = [int(line) for child in children for line in child.communicate(timeout=120)[0].split()]
        assert [child.returncode for child in children] == [0] * 4
        assert sorted(tokens) == list(range(1, 121))
        for name in names:
            assert [event.sequence for event in self.store.read(name)] == list(range(1, 32))


class TestPatience(Sqlite):
    """A file that is locked is waited for; nothing has landed."""

    def test_an_append_waits_for_the_other_writer(self):
        """It is sent again until the lock is free."""
        log, rival = self.running(), self.rival()
        self.impatient()
        rival.execute("begin immediate")
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                rival.execute("commit")

        self.store.sleep = pause
        self.store.append(log.commit())
        assert pauses == [0.05, 0.1, 0.2]
        assert len(self.store.read(log.id)) == 2

    def test_the_calls_around_an_append_wait_too(self):
        """A claim, a fence, a message and a transaction."""
        log, rival = self.started(), self.rival()
        self.impatient()
        self.store.sleep = lambda _: rival.commit()
        for call in (
            lambda: self.store.claim(log.id, owner="me", token=1, ttl=60),
            lambda: self.store.acquire_fence(log.id),
            lambda: self.store.send(log.id, name="n", message_id="1", body="1"),
            lambda: self.store.claim_due(limit=1, hold=1, known=self.known, redrive=True),
            self.transact,
        ):
            rival.execute("begin immediate")
            assert call()
            assert not rival.in_transaction

    def transact(self) -> bool:
        with self.store.transaction():
            Order.objects.create(customer="c", amount="1.00")
        return True

    def test_a_lock_at_commit_lands_once(self, monkeypatch):
        """Even there nothing has landed: it is rolled back and done again."""
        log = self.running()
        locked: list[str] = []
        plain = SqliteStore._say

        def say(store, command):
            if command == "commit" and not locked:
                locked.append(command)
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise OperationalError(*error.args) from error
            plain(store, command)

        monkeypatch.setattr(SqliteStore, "_say", say)
        self.store.append(log.commit())
        assert locked
        assert len(self.store.read(log.id)) == 2
        assert not connection.connection.in_transaction

    def test_a_file_that_stays_locked_is_reported(self):
        """After the time given, with nothing written and nothing left open."""
        log, rival = self.running(), self.rival()
        self.impatient()
        rival.execute("begin immediate")
        self.store.give_up = 0.2
        self.store.sleep = lambda _: None
        commit = log.commit()
        with pytest.raises(StoreUnavailableError, match="locked"):
            self.store.append(commit)
        rival.execute("rollback")
        self.store.append(commit)
        assert len(self.store.read(log.id)) == 2

    @pytest.mark.parametrize("grouped", [True, False])
    def test_a_signal_behind_the_lock_gives_it_back(self, monkeypatch, grouped):
        """A thread that waits for the file is where a signal is met: right behind the statement that got the lock."""
        log, say = self.running(), SqliteStore._say

        def interrupted(store: SqliteStore, command: str) -> None:
            say(store, command)
            if command == "begin immediate":
                monkeypatch.setattr(SqliteStore, "_say", say)
                raise KeyboardInterrupt

        with self.store.grouping() if grouped else nullcontext():
            monkeypatch.setattr(SqliteStore, "_say", interrupted)
            with pytest.raises(KeyboardInterrupt):
                self.store.append(log.fork().commit())
            self.rival().execute("begin immediate").execute("rollback")
            self.store.append(log.commit())
        assert len(self.store.read(log.id)) == 2

    def test_in_a_caller_s_transaction_the_lock_is_the_caller_s(self):
        """A deferred transaction that has read cannot wait: its error goes to whoever opened it."""
        log, rival = self.running(), self.rival()

        @transaction.atomic
        def late() -> None:
            list(Order.objects.all())
            rival.execute("insert into loom_fence values ('other', 0, 0, 0, 0)")
            self.store.append(log.commit())

        with pytest.raises(OperationalError, match="locked"):
            late()
        assert len(self.store.read(log.id)) == 1


class TestTransaction(Sqlite):
    """A transactional tool's block takes the write lock at its beginning."""

    def test_it_begins_immediate(self):
        """Reading first and writing then cannot fail, because no other writer comes in between."""
        rival = self.rival()
        with self.store.transaction():
            assert not Order.objects.exists()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                rival.execute("begin immediate")
            Order.objects.create(customer="c", amount="1.00")
        assert Order.objects.count() == 1

    def test_other_blocks_begin_as_the_project_says(self):
        """Only this block is changed, not the connection's setting."""
        own: Any = connection
        before = own.transaction_mode
        with self.store.transaction():
            assert own.transaction_mode == before
        rival = self.rival()
        with transaction.atomic():
            rival.execute("begin immediate")
            rival.execute("rollback")

    def test_it_nests_in_a_caller_s(self):
        """There it is a savepoint: what is undone in it leaves the caller's work."""
        log = self.started(held_by())
        with transaction.atomic():
            Order.objects.create(customer="kept", amount="1.00")
            with pytest.raises(ZeroDivisionError):
                self.fail_inside(log)
        assert Order.objects.get().customer == "kept"
        assert len(self.store.read(log.id)) == 1

    def fail_inside(self, log) -> None:
        with self.store.transaction():
            Order.objects.create(customer="lost", amount="1.00")
            self.store.append(log.commit())
            raise ZeroDivisionError


class TestAFullDisk(Sqlite):
    """Wherever in a commit there is no room any more."""

    @contextmanager
    def room(self, pages: int) -> Iterator[None]:
        """The file may grow by so many pages, as if the disk ended there."""
        driver = connection.connection
        (count,) = driver.execute("pragma page_count").fetchone()
        driver.execute(f"pragma max_page_count = {count + pages}").fetchall()
        try:
            yield
        finally:
            driver.execute("pragma max_page_count = 1073741823").fetchall()

    def fat(self) -> Commit:
        """A commit that needs new pages for each kind of row."""
        log, child = self.running(), self.log()
        timers = tuple(TimerRow(log.id, AT + timedelta(seconds=second)) for second in range(100))
        woken = tuple(f"{log.id}-woken-{number}" for number in range(100))
        started = child.start(attributes=json.dumps({"x": "x" * 20_000}))
        events = (log.event(Kind.STEP_STARTED, args="x" * 20_000), log.event(Kind.EXECUTION_SUSPENDED))
        told = project(log.fold)
        connection.connection.execute("vacuum")  # else it would take pages that others have left
        return Commit(log.id, events, told, ownership=NOBODY, timers=timers, wake=woken, also=(started,))

    def test_a_commit_that_finds_no_room_leaves_nothing(self):
        """It says why, at whichever statement; with room enough the same commit lands."""
        commit = self.fat()
        for pages in itertools.count():
            before = self.snapshot(commit)
            try:
                with self.room(pages):
                    self.store.append(commit)
                break
            except OperationalError as error:
                why = str(error)
            assert "disk is full" in why
            assert self.snapshot(commit) == before
            assert not connection.connection.in_transaction
        assert pages > 10
        assert len(self.store.read(commit.execution_id)) == 3

    def test_a_block_in_which_there_was_no_room_is_whole_or_not_at_all(self):
        """SQLite ends the transaction at some of its statements: the caller's block may not go on behind that."""
        commit = self.fat()
        ends: Counter[tuple[str, ...]] = Counter()
        for pages in range(10):
            Order.objects.all().delete()
            before = self.snapshot(commit)
            with suppress(transaction.TransactionManagementError), transaction.atomic():
                Order.objects.create(customer="before", amount=1)
                with self.room(pages), pytest.raises(OperationalError, match="disk is full"):
                    self.store.append(commit)
                Order.objects.create(customer="after", amount=1)
            assert self.snapshot(commit) == before
            ends[tuple(Order.objects.order_by("pk").values_list("customer", flat=True))] += 1
        assert set(ends) <= {(), ("before", "after")}, ends
        assert ends[()]
