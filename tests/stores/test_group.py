"""Appends that share a commit: what joins, who waits for whom, and what a broken one does to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

from loom_django.errors import StaleFenceError
from loom_django.stores import group as group_module
from loom_django.stores import store_for
from loom_django.stores.base import Commit, SequenceOccupied
from loom_django.stores.group import AppendGroup
from loom_django.testing.conformance import Log, StoreConformance

if connection.vendor == "postgresql":
    from loom_django.stores import postgresql_append
    from tests.stores.rivals import connect, holding, wait_until_blocked

of_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL alone")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing of the kind has happened"
        time.sleep(0.001)


class Appender:
    """An append in a thread of its own."""

    def __init__(self, append: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self._append = append
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._append()
        except BaseException as error:
            self.outcome = error
        finally:
            connection.close()

    def join(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive(), "left waiting"
        return self.outcome

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


class Gate:
    """Stands in front of a group: the first batch waits until it is let through, so that others queue behind it."""

    def __init__(self, group: AppendGroup) -> None:
        self.group = group
        self.batches: list[list[Commit]] = []
        self._land = group._land
        self._entered, self._go = threading.Event(), threading.Event()
        group._land = self._pass

    def _pass(self, commits: Sequence[Commit]) -> list[Exception | None]:
        self.batches.append(list(commits))
        if len(self.batches) == 1:
            self._entered.set()
            assert self._go.wait(30)
        return self._land(commits)

    def behind(self, first: Callable[[], Any], others: Sequence[Callable[[], Any]]) -> list[Appender]:
        """Start the first, and behind it the others, in this order."""
        appenders = [Appender(first)]
        assert self._entered.wait(30)
        for number, other in enumerate(others, 1):
            appenders.append(Appender(other))
            wait_for(partial(self._queued, number))
        return appenders

    def _queued(self, count: int) -> bool:
        return len(self.group._queue) == count

    def open(self) -> None:
        self._go.set()


class TestQueue:
    """Who goes ahead, and that nobody is left waiting."""

    @pytest.fixture
    def commits(self) -> list[Any]:
        return [object() for _ in range(5)]

    def run(self, gate: Gate, commits: list[Any]) -> list[Any]:
        appends = [lambda commit=commit: gate.group.land(commit) for commit in commits]
        appenders = gate.behind(appends[0], appends[1:])
        gate.open()
        return [one.join() for one in appenders]

    def test_what_comes_meanwhile_goes_together(self, commits):
        """The first goes by itself; all that queued behind it are one batch."""
        gate = Gate(AppendGroup(lambda batch: [None] * len(batch)))
        assert self.run(gate, commits) == [None] * 5
        assert gate.batches == [commits[:1], commits[1:]]

    def test_each_gets_its_own_outcome(self, commits):
        """Outcomes go back by place."""
        told = {id(commit): ValueError(number) for number, commit in enumerate(commits)}
        gate = Gate(AppendGroup(lambda batch: [told[id(commit)] for commit in batch]))
        assert self.run(gate, commits) == [told[id(commit)] for commit in commits]

    def test_several_of_one_thread_are_one_seat(self, commits):
        """They go with what others append, and each gets its own outcome."""
        told = {id(commit): ValueError(number) for number, commit in enumerate(commits)}
        gate = Gate(AppendGroup(lambda batch: [told[id(commit)] for commit in batch]))
        appends = [
            lambda: gate.group.land(commits[0]),
            lambda: gate.group.land_all(commits[1:4]),
            lambda: gate.group.land(commits[4]),
        ]
        appenders = gate.behind(appends[0], appends[1:])
        gate.open()
        outcomes = [told[id(commit)] for commit in commits]
        assert [one.join() for one in appenders] == [outcomes[0], outcomes[1:4], outcomes[4]]
        assert gate.batches == [commits[:1], commits[1:]]

    def test_one_that_is_interrupted_while_it_lands_leaves_nobody_waiting(self, commits):
        """A signal in the thread that lands a batch: the others of the batch are sent again."""

        def land(batch: Sequence[Commit]) -> list[Exception | None]:
            if len(batch) == 4:
                raise KeyboardInterrupt
            return [None] * len(batch)

        gate = Gate(AppendGroup(land))
        first, interrupted, *others = self.run(gate, commits)
        assert isinstance(interrupted, KeyboardInterrupt)
        assert [first, *others] == [None] * 4
        assert gate.batches == [commits[:1], commits[1:], commits[2:]]

    def test_one_that_is_interrupted_while_it_waits_is_not_waited_for(self, commits, monkeypatch):
        """A signal in a thread that was to go ahead next: the one behind it does."""
        waits = group_module._Seat.wait

        def wait(seat: Any) -> None:
            waits(seat)
            if seat.commits[0] is commits[1]:
                raise KeyboardInterrupt

        monkeypatch.setattr(group_module._Seat, "wait", wait)
        gate = Gate(AppendGroup(lambda batch: [None] * len(batch)))
        first, interrupted, *others = self.run(gate, commits)
        assert isinstance(interrupted, KeyboardInterrupt)
        assert [first, *others] == [None] * 4
        assert gate.batches == [commits[:1], commits[2:]]

    def test_one_that_is_interrupted_while_it_tells_leaves_nobody_waiting(self, commits):
        """A signal after the batch has landed, before all of it is told: the others are sent again."""

        def told(outcomes: list[None]) -> Iterator[None]:
            yield from outcomes[:2]
            raise KeyboardInterrupt

        def land(batch: Sequence[Commit]) -> Any:
            outcomes = [None] * len(batch)
            return told(outcomes) if len(batch) == 4 else outcomes

        gate = Gate(AppendGroup(land))
        first, interrupted, *others = self.run(gate, commits)
        assert isinstance(interrupted, KeyboardInterrupt)
        assert [first, *others] == [None] * 4
        assert gate.batches == [commits[:1], commits[1:], commits[2:]]

    def test_one_that_has_gone_is_not_sent_again(self, commits, monkeypatch):
        """A signal in a thread whose commit is on its way, then one in the thread that lands it."""
        on_its_way, waits = threading.Event(), group_module._Seat.wait

        def wait(seat: Any) -> None:
            if seat.commits[0] is commits[2]:
                assert on_its_way.wait(30)
                raise KeyboardInterrupt
            waits(seat)

        def land(batch: Sequence[Commit]) -> list[Exception | None]:
            if len(batch) == 4:
                on_its_way.set()
                appenders[2].join()
                raise KeyboardInterrupt
            return [None] * len(batch)

        monkeypatch.setattr(group_module._Seat, "wait", wait)
        gate = Gate(AppendGroup(land))
        appends = [lambda commit=commit: gate.group.land(commit) for commit in commits]
        appenders = gate.behind(appends[0], appends[1:])
        gate.open()
        assert [type(one.join()).__name__ for one in appenders] == [
            "NoneType", "KeyboardInterrupt", "KeyboardInterrupt", "NoneType", "NoneType"
        ]  # fmt: skip
        assert gate.batches == [commits[:1], commits[1:], commits[3:]]


@pytest.mark.django_db(transaction=True)
class TestShared(StoreConformance):
    """Over a database: one batch, and what one of it does to the others."""

    store: Any

    def make_store(self):
        return store_for("default")

    @contextmanager
    def queued(self, *commits: Commit) -> Iterator[list[Appender]]:
        """Appends that are one batch when the block ends."""
        first = self.running()
        with self.store.grouping():
            self.gate = Gate(self.store._group)
            appends = [
                lambda commit=commit: self.store.append(commit) for commit in (first.commit(), *commits)
            ]
            appenders = self.gate.behind(appends[0], appends[1:])
            yield appenders[1:]
            self.gate.open()
            for one in appenders:
                one.join()
        assert [len(batch) for batch in self.gate.batches[:2]] == [1, len(commits)]

    def lock(self, log: Log) -> str:
        return f"select from loom_fence where execution_id = '{log.id}' for update"

    def lengths(self, logs: Sequence[Log]) -> list[int]:
        return [len(self.store.read(log.id)) for log in logs]

    def test_a_refused_neighbour(self):
        """One whose sequence is taken and one with a stale token fail by themselves; the others land."""
        logs = [self.running() for _ in range(6)]
        commits = [log.commit() for log in logs]
        with self.queued(*commits) as appends:
            rival = Log(logs[1].id, self.flow_id)
            rival.start()
            self.store._land([rival.commit()])
            self.store.acquire_fence(logs[4].id)
        outcomes = [type(one.outcome) for one in appends]
        none = type(None)
        assert outcomes == [none, SequenceOccupied, none, none, StaleFenceError, none]
        assert self.lengths(logs) == [2, 2, 2, 2, 1, 2]

    def test_a_caller_s_transaction_has_its_own_commit(self):
        """What is appended inside atomic() is the caller's: it does not queue, and is gone with the block."""
        log = self.running()
        with self.store.grouping():
            gate = Gate(self.store._group)
            with transaction.atomic():
                self.store.append(log.commit())
                transaction.set_rollback(True)
        assert gate.batches == []
        assert self.lengths([log]) == [1]

    def test_a_forked_child_has_no_part_in_it(self, monkeypatch):
        """Whoever was ahead in the parent is not in the child, and nobody there waits for it."""
        log = self.running()
        with self.store.grouping():
            group = self.store._group
            monkeypatch.setattr(group, "_ahead", object())
            monkeypatch.setattr(group, "_pid", -1)
            appends = Appender(lambda: self.store.append(log.commit()))
            assert appends.join() is None
        assert self.lengths([log]) == [2]

    def test_nothing_is_left_of_a_group(self):
        """At its end the group is gone, and its connection too; whoever is not alone in it leaves it to the other."""
        with self.store.grouping():
            with self.store.grouping():
                self.store.append(self.running().commit())
            assert self.store._group is not None
            self.store.append(self.running().commit())
        assert self.store._group is None
        log = self.running()
        self.store.append(log.commit())
        assert self.lengths([log]) == [2]

    def test_what_is_on_its_way_when_a_group_ends(self):
        """It lands all the same, and leaves no connection behind."""
        log = self.running()
        with self.store.grouping():
            gate = Gate(self.store._group)
            (appends,) = gate.behind(lambda: self.store.append(log.commit()), [])
        gate.open()
        assert appends.join() is None
        assert self.lengths([log]) == [2]
        assert getattr(self.store, "_writer", None) is None

    @of_postgresql
    def test_a_locked_neighbour(self):
        """Whoever meets a row that somebody holds waits by itself, for as long as that takes."""
        locked, free = self.parked(), [self.running() for _ in range(3)]
        commits = [free[0].commit(), locked.answer(), *(log.commit() for log in free[1:])]
        with holding(self.lock(locked)) as rival, self.queued(*commits) as appends:
            self.gate.open()
            for place in (0, 2, 3):
                assert appends[place].join() is None
            wait_until_blocked()
            assert appends[1].waits
            self.store.append(free[0].commit())  # and nobody queues behind it
            rival.commit()
        assert appends[1].outcome is None
        assert self.lengths([locked, *free]) == [3, 3, 2, 2]

    @of_postgresql
    @pytest.mark.parametrize("grouped", [True, False])
    def test_a_locked_one_of_many(self, grouped):
        """A caller with several executions is told which one waits for a row, and sends that one by itself; so it
        does not wait for one with the rows of all in its hands, in a group or not."""
        locked, free = self.parked(), [self.running() for _ in range(3)]
        commits = [free[0].commit(), locked.answer(), *(log.commit() for log in free[1:])]
        with self.store.grouping() if grouped else nullcontext(), holding(self.lock(locked)) as rival:
            outcomes = self.store.append_shared(commits)
            assert [type(outcome).__name__ for outcome in outcomes] == [
                "NoneType", "RowLocked", "NoneType", "NoneType"
            ]  # fmt: skip
            waits = Appender(lambda: self.store.append_many([commits[1]]))
            wait_until_blocked()
            assert self.store.append_shared([log.commit() for log in free]) == [None] * 3
            rival.commit()
            assert waits.join() == [None]
        assert self.lengths([locked, *free]) == [3, 3, 3, 3]

    def test_many_in_a_caller_s_transaction(self):
        """They are the caller's, and are gone with its block."""
        logs = [self.running() for _ in range(2)]
        with self.store.grouping():
            gate = Gate(self.store._group)
            with transaction.atomic():
                assert self.store.append_shared([log.commit() for log in logs]) == [None] * 2
                transaction.set_rollback(True)
        assert gate.batches == []
        assert self.lengths(logs) == [1, 1]

    @of_postgresql
    def test_a_connection_that_is_lost_in_a_batch(self, monkeypatch):
        """Nobody knows what came of it: all are sent again, and each is there once."""
        monkeypatch.setattr(postgresql_append, "BRIEF", "30s")
        postgresql_append.text_of.cache_clear()
        locked, free = self.parked(), [self.running() for _ in range(3)]
        commits = [locked.answer(), *(log.commit() for log in free)]
        try:
            with holding(self.lock(locked)) as rival, self.queued(*commits) as appends:
                self.gate.open()
                (pid,) = wait_until_blocked()
                with connect(autocommit=True) as operator:
                    operator.execute("select pg_terminate_backend(%s)", [pid])
                assert wait_until_blocked() != [pid]
                rival.commit()
        finally:
            postgresql_append.text_of.cache_clear()
        assert [one.outcome for one in appends] == [None] * 4
        assert self.lengths([locked, *free]) == [3, 2, 2, 2]
