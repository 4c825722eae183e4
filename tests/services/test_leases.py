"""Leases are renewed by one thread, whatever the bodies are doing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from loom_django.conf import LoomSettings
from loom_django.services.leases import LeaseKeeper
from loom_django.stores.memory import MemoryStore

pytestmark = pytest.mark.once

SETTINGS = replace(LoomSettings(), LEASE_TTL=60.0, LEASE_RENEW_INTERVAL=0.01, EXECUTE_TIMEOUT=3600.0)


class Recorder(MemoryStore):
    """A store that tells when leases were renewed, and answers as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[list[str]] = []
        self.changed = threading.Condition()
        self.answer: Callable[[list[str]], Iterable[str]] = lambda names: names

    def renew(self, leases: Any, *, ttl: float) -> set[str]:
        with self.changed:
            names = [name for name, _ in leases]
            self.renewed.append(names)
            self.changed.notify_all()
        return set(self.answer(names))

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.renewed) >= count, 20)


def test_all_of_a_processs_leases_go_in_one_statement_per_interval() -> None:
    """Two bodies, one renewal for both, again and again."""
    store = Recorder()
    keeper = LeaseKeeper(store, lambda: replace(SETTINGS, LEASE_RENEW_INTERVAL=0.05))
    keeper.hold("a", 1, lambda: None)
    keeper.hold("b", 2, lambda: None)
    store.wait_for(2)
    assert all(sorted(names) == ["a", "b"] for names in store.renewed)
    keeper.drop("a")
    keeper.drop("b")
    assert keeper.held() == 0


def test_a_lost_lease_is_told_once_and_kept_no_longer() -> None:
    """The body hears of it from the keeper, and no renewal names it again."""
    store = Recorder()
    store.answer = lambda names: [name for name in names if name != "lost"]
    told: list[str] = []
    keeper = LeaseKeeper(store, lambda: SETTINGS)
    keeper.hold("lost", 1, lambda: told.append("lost"))
    keeper.hold("kept", 2, lambda: told.append("kept"))
    store.wait_for(3)
    keeper.drop("kept")
    assert told == ["lost"]
    assert store.renewed[-1] == ["kept"]


def test_a_body_that_hangs_is_given_up_after_execute_timeout() -> None:
    """Renewal ends, so that another process may take the execution up."""
    store = Recorder()
    told = threading.Event()
    keeper = LeaseKeeper(store, lambda: replace(SETTINGS, EXECUTE_TIMEOUT=0.03))
    keeper.hold("hung", 1, told.set)
    assert told.wait(20)
    assert keeper.held() == 0


def test_a_database_that_is_away_does_not_lose_leases() -> None:
    """A renewal that fails is tried again; only the store's word loses a lease."""
    store = Recorder()

    def away(names: list[str]) -> list[str]:
        if len(store.renewed) < 3:
            raise ConnectionError("the database is away")
        return names

    store.answer = away
    told: list[str] = []
    keeper = LeaseKeeper(store, lambda: SETTINGS)
    keeper.hold("a", 1, lambda: told.append("a"))
    store.wait_for(5)
    assert told == []
    assert keeper.held() == 1
    assert not keeper.broken
    keeper.drop("a")


def test_a_thread_that_breaks_off_is_noticed() -> None:
    """A process must not go on as if its leases were renewed."""
    store = Recorder()
    keeper = LeaseKeeper(store, lambda: SETTINGS)
    keeper.hold("a", 1, lambda: None)

    def breaks() -> None:
        raise SystemExit

    store.answer = lambda names: []
    keeper.hold("a", 1, breaks)
    thread = keeper._thread
    assert thread is not None
    thread.join(20)
    assert keeper.broken


def test_a_stopped_clock_shift_is_undone() -> None:
    """The kit's shift moves what the store says the time is."""
    store = MemoryStore()
    before = store.now()
    store.shift_clock(timedelta(days=1))
    assert store.now() - before >= timedelta(days=1)
