"""The reference store keeps the contract."""

from __future__ import annotations

from typing import Any

import pytest

from loom_django.stores.memory import MemoryStore
from loom_django.testing import (
    EventStoreConformance,
    InboxStoreConformance,
    LeaseStoreConformance,
    RetentionStoreConformance,
    ScheduleStoreConformance,
    TimerStoreConformance,
)

pytestmark = pytest.mark.once


class InMemory:
    store: Any

    def make_store(self):
        return MemoryStore()

    def lose_fence(self, execution_id):
        return self.store._tables.fences.pop(execution_id, None) is not None


class TestEvents(InMemory, EventStoreConformance):
    pass


class TestTimers(InMemory, TimerStoreConformance):
    pass


class TestLeases(InMemory, LeaseStoreConformance):
    pass


class TestInbox(InMemory, InboxStoreConformance):
    pass


class TestSchedules(InMemory, ScheduleStoreConformance):
    pass


class TestRetention(InMemory, RetentionStoreConformance):
    pass
