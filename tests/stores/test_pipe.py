"""What an event loop lands by itself: in what order, what a refusal or a lost connection leaves unknown, and that the
other way of landing settles it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, connections
from django.db.backends.signals import connection_created

from loom_django.errors import StaleFenceError
from loom_django.kernel.events import Kind
from loom_django.kernel.projection import project
from loom_django.stores import store_for
from loom_django.stores.base import Commit, SequenceOccupied
from loom_django.stores.memory import MemoryStore
from loom_django.testing.conformance import Log, StoreConformance

pytestmark = [
    pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL alone"),
    pytest.mark.django_db(transaction=True),
]

if connection.vendor == "postgresql":
    from loom_django.stores import postgresql_append
    from loom_django.stores.postgresql_pipe import AT_ONCE
    from tests.concurrency.proxy import Cut, Proxy
    from tests.stores.rivals import connect, holding, wait_until_blocked

PATIENCE = 30.0


class TestPipe(StoreConformance):
    """A loop that a test turns, and a pipe of the store in it."""

    store: Any

    def make_store(self):
        return store_for("default")

    @pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
    def piped(self, request: pytest.FixtureRequest) -> Iterator[None]:
        kind = asyncio if request.param == "asyncio" else pytest.importorskip("uvloop")
        self.loop = kind.new_event_loop()
        self.pipe: Any = None
        yield
        if self.pipe is not None:
            self.turn(self.pipe.close)
        self.loop.close()

    def open(self) -> Any:
        self.pipe = self.store.pipe(self.loop)
        self.turn(self.pipe.begin)
        return self.pipe

    def turn(self, call: Callable[[], Any]) -> Any:
        """Make a call in the loop, in one turn of it."""

        async def made() -> Any:
            return call()

        return self.loop.run_until_complete(made())

    def told(self, *batches: Sequence[Commit]) -> list[list[bool]]:
        """Send batches in one turn, and give what is told of each, in the order of the sending."""
        answers: list[Any] = []

        def send(place: int, batch: Sequence[Commit]) -> None:
            assert self.pipe.send(batch, lambda landed: answers.append((place, list(landed))))

        self.turn(lambda: [send(place, batch) for place, batch in enumerate(batches)])
        self.until(lambda: len(answers) == len(batches))
        assert [place for place, _ in answers] == list(range(len(batches)))
        return [landed for _, landed in answers]

    def until(self, so: Callable[[], bool]) -> None:
        async def come() -> None:
            async with asyncio.timeout(PATIENCE):
                while not so():
                    await asyncio.sleep(0.001)

        self.loop.run_until_complete(come())

    def lengths(self, logs: Sequence[Log]) -> list[int]:
        return [len(self.store.read(log.id)) for log in logs]

    @contextmanager
    def waiting_long(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """What meets a locked row waits for it, until the connection is gone."""
        postgresql_append.text_of.cache_clear()
        try:
            with monkeypatch.context() as patched:
                patched.setattr(postgresql_append, "BRIEF", "30s")
                yield
        finally:
            postgresql_append.text_of.cache_clear()

    def kill(self) -> None:
        with connect(autocommit=True) as operator:
            pid = self.pipe._server.backend_pid
            operator.execute("select pg_terminate_backend(%s, 5000)", [pid])

    def test_batches_land_in_order(self):
        """More than one is on its way, of different shapes; each is answered by itself."""
        self.open()
        logs, parked = [self.running() for _ in range(5)], self.parked()
        batches = [[log.commit() for log in logs], [parked.answer()], [log.end() for log in logs]]
        assert self.told(*batches) == [[True] * 5, [True], [True] * 5]
        assert self.lengths(logs) == [3] * 5
        assert self.lengths([parked]) == [3]

    def test_a_statement_is_prepared_once(self):
        """The next batch of the same shape finds it."""
        self.open()
        log = self.running()
        for _ in range(3):
            assert self.told([log.commit()]) == [[True]]
        assert len(self.pipe._names) == 1

    def test_it_has_room_for_so_many_at_a_time(self):
        """Whoever sends looks for answers first."""
        self.open()
        logs = [self.running() for _ in range(AT_ONCE)]
        room: list[bool] = []

        def send() -> None:
            for log in logs:
                room.append(self.pipe.has_room)
                assert self.pipe.send([log.commit()], lambda landed: None)
            room.append(self.pipe.has_room)

        self.turn(send)
        assert room == [True] * AT_ONCE + [False]
        self.until(lambda: self.pipe.has_room)

    def test_a_refused_neighbour(self):
        """Of what was let fall nothing is known; the other way of landing finds out, and the pipe is used on."""
        self.open()
        logs = [self.running() for _ in range(4)]
        self.store.append(logs[1].fork().commit())
        self.store.acquire_fence(logs[2].id)
        commits = [log.commit() for log in logs]
        assert self.told(commits) == [[True, False, False, True]]
        outcomes = self.store.append_shared(commits)
        assert [type(outcome) for outcome in outcomes] == [
            type(None), SequenceOccupied, StaleFenceError, type(None)
        ]  # fmt: skip
        assert self.told([logs[0].commit()]) == [[True]]
        assert self.lengths(logs) == [3, 2, 1, 2]

    def test_a_row_that_somebody_holds(self):
        """The statement fails after a moment, and so nothing of it has landed; what is behind it is not held up."""
        self.open()
        locked, free = self.parked(), [self.running() for _ in range(2)]
        with holding(f"select from loom_fence where execution_id = '{locked.id}' for update"):
            batches = [[free[0].commit(), locked.answer()], [free[1].commit()]]
            assert self.told(*batches) == [[False, False], [True]]
        assert not self.pipe.closed
        assert self.store.append_shared(batches[0]) == [None, None]
        assert self.lengths([*free, locked]) == [2, 2, 3]

    @pytest.mark.parametrize("state", ["40001", "23505", "57014", "23514"])
    def test_what_fails_at_its_commit_has_not_landed(self, state):
        """Its rows were told before that: by a deferred constraint, or where the server finds no serial order."""
        self.open()
        log = self.running()
        with connect(autocommit=True) as operator:
            operator.execute(
                f"create function at_commit() returns trigger language plpgsql as "
                f"$$ begin raise exception 'at commit' using errcode = '{state}'; end $$"
            )
            operator.execute(
                "create constraint trigger at_commit after insert on loom_event deferrable initially deferred "
                "for each row execute function at_commit()"
            )
            try:
                commit = log.commit()
                assert self.told([commit]) == [[False]]
            finally:
                operator.execute("drop function at_commit cascade")
        assert self.pipe.closed == (state == "23514"), "of a commit's own errors it goes on"
        assert self.lengths([log]) == [1]
        assert self.store.append_shared([commit]) == [None]

    def test_a_connection_that_is_lost_under_way(self, monkeypatch):
        """The backend is terminated with one statement in its hands and another one waiting: nothing is known of either."""
        self.open()
        locked, free = self.parked(), self.running()
        batches = [[locked.answer()], [free.commit()]]
        answers: list[list[bool]] = []
        with (
            self.waiting_long(monkeypatch),
            holding(f"select from loom_fence where execution_id = '{locked.id}' for update"),
        ):
            self.turn(lambda: [self.pipe.send(batch, answers.append) for batch in batches])
            wait_until_blocked()
            self.kill()
            self.until(lambda: len(answers) == 2)
        assert answers == [[False], [False]]
        assert self.pipe.closed
        assert not self.pipe.send([free.commit()], answers.append)
        assert self.store.append_shared([batch[0] for batch in batches]) == [None, None]
        assert self.lengths([locked, free]) == [3, 2]

    def test_a_connection_that_is_lost_while_nothing_is_sent(self):
        """It is seen by the loop, or at the next sending at the latest."""
        self.open()
        self.kill()
        self.until(lambda: self.pipe.closed)
        assert not self.pipe.has_room

    def test_the_next_one_has_the_number_of_one_that_is_lost(self):
        """The loop watches the new connection, though libpq closed the old one before it could be told."""
        lost = self.open()
        self.kill()
        self.until(lambda: lost.closed)
        self.open()
        assert self.pipe._socket == lost._socket
        log = self.running()
        assert self.told([log.commit()]) == [[True]]

    @pytest.mark.parametrize("how", ["before", "after", "within", "blind"])
    def test_an_answer_that_is_lost(self, how, monkeypatch):
        """Whether the statement was done or not: sent again, it is there once."""
        settings = connection.settings_dict
        log = self.running()
        with Proxy(settings["HOST"], int(settings["PORT"])) as proxy:
            with monkeypatch.context() as through:
                here = connections.settings["default"]
                through.setitem(here, "HOST", "127.0.0.1")
                through.setitem(here, "PORT", str(proxy.port))
                self.open()
            proxy.cut = Cut(1, how, at=lambda trip: trip.appends)
            commit = log.commit()
            assert self.told([commit]) == [[False]]
            assert proxy.cut.done
            assert self.pipe.closed
        assert self.store.append_shared([commit]) == [None]
        assert self.lengths([log]) == [2]

    def test_more_than_the_socket_takes(self):
        """It is written as the socket takes it, with the loop running on meanwhile."""
        self.open()
        logs = [self.running() for _ in range(3)]
        large = [
            Commit(log.id, (log.event(Kind.STEP_STARTED, args="x" * 9_000_000),), project(log.fold))
            for log in logs
        ]
        answers: list[Any] = []
        assert self.turn(lambda: self.pipe.send(large, answers.append) and self.pipe._is_writing)
        self.until(lambda: bool(answers))
        assert answers == [[True] * 3]
        assert not self.pipe._is_writing
        assert self.told([logs[0].commit()]) == [[True]]

    def test_what_cannot_go_by_it(self):
        """Two of one execution, one that is no commit, and a note about what has ended: nothing is sent."""
        self.open()
        log, ended = self.running(), self.running()
        self.store.append(ended.end())
        first, second = log.commit(), log.commit()
        torn = Commit(log.id, (first.events[0], self.running().event("STEP_STARTED")), first.projection)
        note = ended.commit("EXECUTION_DENIED")
        answers: list[Any] = []
        for batch in ([first, second], [torn], [note]):
            assert not self.turn(partial(self.pipe.send, batch, answers.append))
        assert self.told([first]) == [[True]]
        assert answers == []
        assert self.lengths([log, ended]) == [2, 2]

    def test_an_error_that_is_no_commit_s_own_ends_it(self):
        """Somebody has it forget what it prepared: the next one is unknown, and the connection is let go."""
        self.open()
        log = self.running()
        assert self.told([log.commit()]) == [[True]]
        commit = log.commit()
        for text in self.pipe._names:
            self.pipe._names[text] = b"forgotten"
        assert self.told([commit]) == [[False]]
        assert self.pipe.closed
        assert self.store.append_shared([commit]) == [None]

    @pytest.mark.parametrize("why", ["pooler", "watched", "traced", "old libpq"])
    def test_where_there_is_none(self, why, monkeypatch):
        """Behind a transaction pooler nothing stays prepared, and who watches Django's queries sees all of them."""

        def trace(connection: Any, **_: Any) -> None:
            connection.execute_wrappers.append(lambda execute, *args: execute(*args))

        if why == "pooler":
            monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
        elif why == "watched":
            connection.force_debug_cursor = True
        elif why == "traced":
            connection_created.connect(trace)
        else:
            monkeypatch.setattr("psycopg.Pipeline.is_supported", lambda: False)
        try:
            assert self.store.pipe(self.loop) is None
        finally:
            connection.force_debug_cursor = False
            connection_created.disconnect(trace)
        assert MemoryStore().pipe(self.loop) is None

    def test_where_a_loop_watches_nothing(self, monkeypatch):
        """It says so, and the connection is let go all the same."""

        def refuse(*_: Any) -> None:
            raise NotImplementedError

        pipe = self.store.pipe(self.loop)
        watchless: Any = SimpleNamespace(add_reader=refuse, remove_reader=refuse, remove_writer=refuse)
        pipe._loop = watchless
        with pytest.raises(NotImplementedError):
            pipe.begin()
        pipe.close()
        assert pipe._driver.closed

    def test_whatever_a_sending_raises_is_told(self, monkeypatch):
        """A loop that cannot watch for room, say: nobody is left waiting, and nothing is raised into a body."""
        self.open()

        def refuse() -> None:
            raise OSError("no more files")

        monkeypatch.setattr(self.pipe, "_flush", refuse)
        answers: list[Any] = []
        assert self.turn(partial(self.pipe.send, [self.running().commit()], answers.append))
        assert answers == [[False]]
        assert self.pipe.closed

    def test_an_answer_that_is_missing_ends_it(self, monkeypatch):
        """Rather than being waited for in a circle."""
        self.open()
        answers: list[Any] = []
        server = SimpleNamespace(consume_input=lambda: None, is_busy=lambda: False, get_result=lambda: None)
        commit = self.running().commit()

        def send() -> None:
            assert self.pipe.send([commit], answers.append)
            self.pipe._server = server  # in the same turn: the real answer is not seen
            self.pipe.look()

        self.turn(send)
        assert answers == [[False]]
        assert self.pipe.closed

    def test_it_is_closed_without_django(self):
        """In a loop Django refuses to close a connection; the backend goes all the same."""
        pid = self.open()._server.backend_pid
        self.turn(self.pipe.close)
        end = time.monotonic() + PATIENCE
        with connect(autocommit=True) as looker:
            while looker.execute("select 1 from pg_stat_activity where pid = %s", [pid]).fetchone():
                assert time.monotonic() < end
                time.sleep(0.001)
