"""Leases are renewed by one thread, whatever the bodies are doing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from loom_django.conf import LoomSettings
from loom_django.definitions import Registry
from loom_django.engine.core import Engine
from loom_django.engine.run import Ended
from loom_django.services.leases import LeaseKeeper
from loom_django.services.worker import WorkerService
from loom_django.stores.base import Claimed
from loom_django.stores.memory import MemoryStore

pytestmark = pytest.mark.once

SETTINGS = replace(LoomSettings(), LEASE_TTL=60.0, LEASE_RENEW_INTERVAL=0.01, EXECUTE_TIMEOUT=3600.0)


class Recorder(MemoryStore):
    """A store that tells when leases were renewed, and answers as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[list[str]] = []
        self.asked: list[list[tuple[str, int]]] = []
        self.changed = threading.Condition()
        self.answer: Callable[[list[str]], Iterable[str]] = lambda names: names

    def renew(self, leases: Any, *, ttl: float) -> set[str]:
        with self.changed:
            names = [name for name, _ in leases]
            self.renewed.append(names)
            self.asked.append(list(leases))
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
    keeper.drop("a", 1)
    keeper.drop("b", 2)
    assert keeper.held() == 0


def test_a_lease_that_was_given_back_during_its_renewal_is_not_lost() -> None:
    """It parked, and the renewal found it no more; the body's next lease is another matter too."""
    store, told = Recorder(), list[str]()
    keeper = LeaseKeeper(store, lambda: replace(SETTINGS, LEASE_RENEW_INTERVAL=600.0))
    keeper.hold("a", 1, lambda: told.append("lost"))

    def parked_meanwhile(names: list[str]) -> list[str]:
        keeper.drop("a", 1)
        return []

    store.answer = parked_meanwhile
    keeper.tick()
    assert store.renewed == [["a"]]
    assert told == []


def test_a_lost_lease_is_told_once_and_kept_no_longer() -> None:
    """The body hears of it from the keeper, and no renewal names it again."""
    store = Recorder()
    store.answer = lambda names: [name for name in names if name != "lost"]
    told: list[str] = []
    keeper = LeaseKeeper(store, lambda: SETTINGS)
    keeper.hold("lost", 1, lambda: told.append("lost"))
    keeper.hold("kept", 2, lambda: told.append("kept"))
    store.wait_for(3)
    keeper.drop("kept", 2)
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
    keeper.drop("a", 1)


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


def test_after_a_thread_broke_off_the_next_lease_begins_another() -> None:
    """A web process goes on, so what it runs from then on is renewed again, and what it still holds too."""
    store = Recorder()
    keeper = LeaseKeeper(store, lambda: SETTINGS)

    def breaks() -> None:
        raise MemoryError

    store.answer = lambda names: [name for name in names if name != "lost"]
    keeper.hold("old", 1, lambda: None)
    keeper.hold("lost", 2, breaks)
    thread = keeper._thread
    assert thread is not None
    thread.join(20)
    assert keeper.broken
    keeper.hold("new", 3, lambda: None)
    store.wait_for(len(store.renewed) + 2)
    assert sorted(store.renewed[-1]) == ["new", "old"]
    keeper.drop("old", 1)
    keeper.drop("new", 3)


def test_a_body_that_hung_does_not_end_the_renewal_of_its_successor() -> None:
    """One worker may claim an execution again in another thread, long before the old body's thread ends."""
    store = Recorder()
    keeper = LeaseKeeper(store, lambda: SETTINGS)
    keeper.hold("x", 1, lambda: None)
    keeper.hold("x", 2, lambda: None)
    keeper.drop("x", 1)
    assert keeper.held() == 1
    store.wait_for(len(store.renewed) + 2)
    assert store.asked[-1] == [("x", 2)]
    keeper.drop("x", 2)


def test_of_two_leases_of_one_execution_the_one_that_is_gone_is_lost() -> None:
    """The store's answer names the execution, which is still held: under the other token."""
    store = MemoryStore()
    told: list[int] = []
    keeper = LeaseKeeper(store, lambda: SETTINGS)
    keeper._keeping = True  # no thread: the test renews
    keeper.hold("x", 1, lambda: told.append(1))
    keeper.hold("x", 2, lambda: told.append(2))
    store.renew = lambda leases, *, ttl: {name for name, token in leases if token == 2}  # type: ignore[method-assign]
    keeper.tick()
    assert told == [1]
    assert keeper.held() == 1


def test_a_worker_counts_claims_not_executions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its threads may be at one execution; the end of one of them is not the other's."""
    begun, ends = threading.Semaphore(0), {1: threading.Event(), 2: threading.Event()}

    def run(engine: Engine, execution_id: str, *, token: int, **rest: Any) -> Ended:
        begun.release()
        assert ends[token].wait(20)
        return Ended.LOST

    monkeypatch.setattr("loom_django.services.worker.run_execution", run)
    worker = WorkerService(Engine(MemoryStore(), lambda: SETTINGS, Registry()), concurrency=4)
    for token in (1, 2):
        worker._submit([(Claimed("x", token, token), None)])
        assert begun.acquire(timeout=20)
    assert worker.running == 2
    ends[1].set()
    with worker._condition:
        assert worker._condition.wait_for(lambda: len(worker._held) < 2, 20)
    assert worker.held == {"x"}
    ends[2].set()
    assert worker.drain(20)


def test_a_stopped_clock_shift_is_undone() -> None:
    """The kit's shift moves what the store says the time is."""
    store = MemoryStore()
    before = store.now()
    store.shift_clock(timedelta(days=1))
    assert store.now() - before >= timedelta(days=1)
