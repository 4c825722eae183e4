"""The stores over SQLite and PostgreSQL keep the contract; each pass of the suite runs its own."""

from __future__ import annotations

import pytest
from django.db import connection

from loom_django.stores import store_for
from loom_django.testing import (
    EventStoreConformance,
    InboxStoreConformance,
    LeaseStoreConformance,
    RetentionStoreConformance,
    ScheduleStoreConformance,
    TimerStoreConformance,
)

pytestmark = pytest.mark.django_db(transaction=True)


class OverDjango:
    def make_store(self):
        return store_for("default")

    def lose_fence(self, execution_id):
        with connection.cursor() as cursor:
            cursor.execute("delete from loom_fence where execution_id = %s", [execution_id])
            return cursor.rowcount == 1


class TestEvents(OverDjango, EventStoreConformance):
    pass


class TestTimers(OverDjango, TimerStoreConformance):
    pass


class TestLeases(OverDjango, LeaseStoreConformance):
    pass


class TestInbox(OverDjango, InboxStoreConformance):
    pass


class TestSchedules(OverDjango, ScheduleStoreConformance):
    pass


class TestRetention(OverDjango, RetentionStoreConformance):
    pass
