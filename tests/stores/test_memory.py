"""The reference store keeps the contract."""

from __future__ import annotations

import pytest

from loom_django.stores.memory import MemoryStore
from loom_django.testing import (
    EventStoreConformance,
    InboxStoreConformance,
    LeaseStoreConformance,
    ScheduleStoreConformance,
    TimerStoreConformance,
)

pytestmark = pytest.mark.once


class InMemory:
    def make_store(self):
        return MemoryStore()


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
