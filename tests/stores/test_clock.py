"""The clock of facts follows the store's, also in a process that lives for months."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, transaction
from django.test import TestCase

from loom_django.stores import sql, store_for


class Asked:
    """A store of this database that tells how often its clock was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: Any = store_for("default")
        self.times = 0
        self.ahead = timedelta()
        self.error: Exception | None = None
        monkeypatch.setattr(self.store, "now", self.now)

    def now(self) -> datetime:
        self.times += 1
        if self.error is not None:
            raise self.error
        return datetime.now(UTC) + self.ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.mark.django_db(transaction=True)
def test_the_offset_is_measured_again_when_it_is_old(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database's clock that was set right reaches a process that never restarts."""
    asked.store.check_clock()
    asked.ahead = timedelta(minutes=5)
    asked.store.check_clock()
    assert asked.times == 1
    assert abs(asked.store.clock_offset()) < 5
    monkeypatch.setattr(asked.store, "_measured_at", time.monotonic() - sql.CLOCK_AGE)
    asked.store.check_clock()
    assert abs(asked.store.clock_offset() - 300) < 5


@pytest.mark.django_db(transaction=True)
def test_a_step_of_the_hosts_clock_is_noticed_at_once(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset was true for the clock before the step."""
    asked.store.check_clock()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    asked.store.check_clock()
    assert asked.times == 2
    asked.store.check_clock()
    assert asked.times == 2


@pytest.mark.django_db(transaction=True)
def test_facts_are_stamped_without_a_question(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old the offset is: no query where facts are made."""
    asked.store.check_clock()
    monkeypatch.setattr(asked.store, "_measured_at", time.monotonic() - 3600)
    asked.store.clock_offset()
    assert asked.times == 1


@pytest.mark.django_db(transaction=True)
def test_a_clock_that_cannot_be_asked_stops_nothing(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset stays; inside a transaction, which the error has broken, it is told."""
    asked.store.check_clock()
    monkeypatch.setattr(asked.store, "_measured_at", time.monotonic() - 3600)
    asked.error = DatabaseError("away")
    asked.store.check_clock()
    with pytest.raises(DatabaseError), transaction.atomic():
        asked.store.check_clock()


class InATestCase(TestCase):
    def test_a_testcase_is_asked_once(self) -> None:
        """Tests that count queries count the same on a slow day."""
        store: Any = store_for("default")
        store.measure()
        store._measured_at -= 3600
        before = store._measured_at
        store.check_clock()
        assert store._measured_at == before
