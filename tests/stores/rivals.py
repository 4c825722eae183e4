"""Rivals for the stores over PostgreSQL: connections of their own, and a way to see who waits for a lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection, connections

from tests import postgres


def connect(**options: Any) -> psycopg.Connection[Any]:
    """A connection to the test's database that Django knows nothing of."""
    url = postgres.url_with(os.environ[postgres.URL], database=str(connection.settings_dict["NAME"]))
    return psycopg.connect(url, **options)


def wait_until_blocked(count: int = 1) -> list[int]:
    """Wait until so many backends of the test's database wait for a lock; return their process ids."""
    deadline = time.monotonic() + 20
    with connect(autocommit=True) as looker:
        while time.monotonic() < deadline:
            rows = looker.execute(
                "select pid from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock'"
            ).fetchall()
            if len(rows) >= count:
                return [row[0] for row in rows]
    raise AssertionError(f"{count} were expected to wait for a lock")


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

    def join(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        return self.result


@contextmanager
def holding(*statements: str) -> Iterator[psycopg.Connection[Any]]:
    """A rival's transaction with these statements done and not committed."""
    with connect() as rival:
        for statement in statements:
            rival.execute(statement.encode())
        yield rival
