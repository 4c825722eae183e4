"""Rivals for the stores over PostgreSQL: connections of their own, and a way to see who waits for a lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection, connections, transaction
from psycopg import sql

from tests import postgres


def connect(**options: Any) -> psycopg.Connection[Any]:
    """A connection to the test's database that Django knows nothing of."""
    url = postgres.url_with(os.environ[postgres.URL], database=str(connection.settings_dict["NAME"]))
    return psycopg.connect(url, **options)


def wait_until_blocked(count: int = 1, *, by: int | None = None) -> list[int]:
    """Wait until so many backends of the test's database wait for a lock; return their process ids.

    ``by`` is the backend that is to be the one they wait for.
    """
    deadline = time.monotonic() + 20
    with connect(autocommit=True) as looker:
        while time.monotonic() < deadline:
            rows = looker.execute(
                "select pid from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock'"
                " and (%(by)s::int is null or %(by)s = any(pg_blocking_pids(pid)))",
                {"by": by},
            ).fetchall()
            if len(rows) >= count:
                return [row[0] for row in rows]
    raise AssertionError(f"{count} were expected to wait for a lock")


def wait_until_alone() -> None:
    """Wait until no backend but this thread's is there: those that ended have told their statistics."""
    deadline = time.monotonic() + 20
    connection.ensure_connection()
    own = connection.connection.info.backend_pid
    others = """
        select pid, backend_type, state, query from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid not in (%s, %s)
    """
    with connect(autocommit=True) as looker:
        while found := looker.execute(others, [own, looker.info.backend_pid]).fetchall():
            assert time.monotonic() < deadline, f"other backends stay: {found}"


@contextmanager
def database_default(setting: str, value: str) -> Iterator[None]:
    """The test's database has this default for a setting, for all that connect from now on."""
    name = sql.Identifier(str(connection.settings_dict["NAME"]))
    command = sql.SQL("alter database {} {} {} {}")

    def alter(act: str, what: sql.Composable) -> None:
        with connect(autocommit=True) as operator:
            operator.execute(command.format(name, sql.SQL(act), sql.Identifier(setting), what))
        connection.close()

    alter("set", sql.SQL("= {}").format(sql.Literal(value)))
    try:
        yield
    finally:
        alter("reset", sql.SQL(""))


def deadlocks() -> int:
    with connect(autocommit=True) as looker:
        # The counters of a backend arrive at its end, or when it says so.
        looker.execute("select pg_stat_force_next_flush()")
        row = looker.execute(
            "select deadlocks from pg_stat_database where datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


class InThread:
    """Work in a thread of its own, with its own connection of Django's."""

    def __init__(self, work: Callable[[], Any], *, session: str = "") -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._session = session
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._session:
                with connection.cursor() as cursor:
                    cursor.execute(self._session)
            self.result = self._work()
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()

    def join(self, patience: float = 30) -> Any:
        self._thread.join(patience)
        assert not self._thread.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        return self.result


class InBlock:
    """Work that is done in a transaction, in a thread of its own, and committed at the end of the block."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.pid = 0
        self._work = work
        self._done, self._go_on = threading.Event(), threading.Event()

    def __enter__(self) -> InBlock:
        self._thread = InThread(self._hold)
        assert self._done.wait(30), "still waiting"
        return self

    def _hold(self) -> None:
        try:
            with transaction.atomic():
                with connection.cursor() as cursor:
                    # What looks again under a lock is refused in a block of one snapshot.
                    cursor.execute("set transaction isolation level read committed")
                self.pid = connection.connection.info.backend_pid
                self._work()
                self._done.set()
                assert self._go_on.wait(30)
        finally:
            self._done.set()

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join()


@contextmanager
def holding(*statements: str) -> Iterator[psycopg.Connection[Any]]:
    """A rival's transaction with these statements done and not committed."""
    with connect() as rival:
        for statement in statements:
            rival.execute(statement.encode())
        yield rival
