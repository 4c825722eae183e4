"""How a store of either database stands in transactions: a caller's, TestCase's, and none."""

from __future__ import annotations

import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.test import TestCase

from loom_django.stores import store_for
from loom_django.testing.conformance import Log, StoreConformance, held_by
from tests.crash.kit import only_postgresql
from tests.shop.models import Order
from tests.stores.rivals import database_default


class OverDjango(StoreConformance):
    def make_store(self):
        return store_for("default")


class InATestCase(OverDjango, TestCase):
    """TestCase's own blocks are no transaction of anybody's."""

    def test_its_own_blocks_do_not_count(self):
        """The store knows where it is, and still says that nobody opened a transaction."""
        assert self.store.in_testcase()
        assert not self.store.in_transaction()
        with transaction.atomic():
            assert self.store.in_transaction()
            assert self.store.in_testcase()
        assert not self.store.in_transaction()

    def test_callbacks_run_at_once_unless_a_block_is_open(self):
        """With an inner atomic() they wait for what captures them, as everywhere in Django."""
        called: list[str] = []
        self.store.on_commit(lambda: called.append("at once"))
        assert called == ["at once"]
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            self.store.on_commit(lambda: called.append("after"))
            assert called == ["at once"]
        assert called == ["at once", "after"]

    def test_appends_work_and_refusals_break_nothing(self):
        """All on the test's connection."""
        log = self.started(held_by())
        rival = log.fork()
        self.store.append(log.commit())
        outcomes = self.store.append_many([rival.commit(), log.commit()])
        assert outcomes[0] is not None
        assert outcomes[1] is None
        assert len(self.store.read(log.id)) == 3

    def test_all_calls_around_an_append_work(self):
        """Claims, messages, timers and deletion join the test's transaction."""
        log = self.started()
        (claimed,) = self.store.claim_ready(owner="me", token=1, ttl=60, limit=9, known=self.known)
        assert self.store.send(log.id, name="n", message_id="1", body="1")
        assert self.store.claim_due(limit=9, hold=1, known=self.known, redrive=True)
        self.store.append(log.end(fence=claimed.fence))
        assert self.store.delete_execution(log.id)


@only_postgresql
class InATestCaseOfOneSnapshot(InATestCase):
    """The same where the server's default is stricter: nobody else can commit what a TestCase would have to see."""

    @classmethod
    def setUpClass(cls):
        cls.enterClassContext(database_default("default_transaction_isolation", "serializable"))
        super().setUpClass()


@pytest.mark.django_db(transaction=True)
class TestCallers(OverDjango):
    """Inside somebody's atomic()."""

    def test_outside_there_is_none(self):
        """Neither a transaction nor a TestCase."""
        assert not self.store.in_transaction()
        assert not self.store.in_testcase()
        assert not self.store.marked_for_rollback()

    def test_a_block_is_one(self):
        """It is seen, and so is its mark for rollback."""
        with transaction.atomic():
            assert self.store.in_transaction()
            assert not self.store.marked_for_rollback()
            transaction.set_rollback(True)
            assert self.store.marked_for_rollback()

    def test_another_thread_has_its_own(self):
        """What one thread opened is not another's."""
        seen: list[bool] = []

        def look() -> None:
            seen.append(self.store.in_transaction())
            self.store.close_connections()

        with transaction.atomic():
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert seen == [False]

    def test_autocommit_off_is_one_too(self):
        """What is appended there waits for the commit of whoever switched it off."""
        log = self.running()
        transaction.set_autocommit(False)
        try:
            assert self.store.in_transaction()
            self.store.append(log.commit())
            transaction.rollback()
            assert len(self.store.read(log.id)) == 1
            self.store.append(self.again(log))
            transaction.commit()
        finally:
            transaction.set_autocommit(True)
        assert len(self.store.read(log.id)) == 2

    def again(self, log: Log):
        """The commit that the rollback undid, by another writer."""
        fresh = Log(log.id, log.flow_id)
        fresh.start(held_by())
        return fresh.commit()

    def test_callbacks_wait_for_the_commit(self):
        """They do not run for a block that is rolled back, and a failing one breaks nobody."""
        called: list[str] = []

        @transaction.atomic
        def block(name: str, *, fail: bool) -> None:
            self.store.on_commit(lambda: called.append(name))
            self.store.on_commit(lambda: called.append(str(1 // 0)))
            assert name not in called
            if fail:
                raise ZeroDivisionError

        block("kept", fail=False)
        with pytest.raises(ZeroDivisionError):
            block("lost", fail=True)
        assert called == ["kept"]

    def test_a_start_is_there_if_and_only_if_the_purchase_is(self):
        """The rows of both roll back together."""
        log = self.log()

        @transaction.atomic
        def buy() -> None:
            Order.objects.create(customer="c", amount="1.00")
            self.store.append(log.start())
            assert self.store.status(log.id) is not None
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            buy()
        assert self.store.status(log.id) is None
        assert not Order.objects.exists()

    def test_a_mark_for_rollback_undoes_an_append(self):
        """No exception tells of it, so whoever appends last has to ask."""
        log = self.running()
        with self.store.transaction():
            self.store.append(log.commit())
            transaction.set_rollback(True)
            assert self.store.marked_for_rollback()
        assert len(self.store.read(log.id)) == 1

    def test_connections_are_dropped_when_broken_only(self):
        """A thread of loom's own keeps its connection from step to step, and replaces one that fails."""
        self.store.now()
        connection.ensure_connection()
        kept = connection.connection
        self.store.close_old_connections()
        assert connection.connection is kept
        with transaction.atomic():
            self.store.close_old_connections()
            assert connection.connection is kept
        if connection.vendor == "postgresql":
            kept.close()
            self.store.close_old_connections()
            assert Order.objects.count() == 0
            assert connection.connection is not kept
        self.store.close_connections()
        assert connection.connection is None


@pytest.mark.django_db
def test_other_databases_are_refused(monkeypatch):
    """Naming the two that are supported, and the setting."""
    monkeypatch.setattr(type(connections["default"]), "vendor", "oracle")
    with pytest.raises(ImproperlyConfigured, match="PostgreSQL or SQLite") as caught:
        store_for("default")
    assert 'LOOM["DATABASE"]' in str(caught.value)
