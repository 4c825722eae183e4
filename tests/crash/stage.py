"""What a test arms in a process before it runs: where the process dies, stops or waits.

Points are those of a step's life (``engine.reached``), with "in-effect" where the tool itself says that it has
acted; and every statement that goes to the database, whoever sends it.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from django.db import connections

# How long anything here may wait for another process, in seconds; a failing test's bound, not a passing one's.
PATIENCE = 60.0


def die() -> NoReturn:
    """End as a power cut would: no handler runs, nothing is flushed.

    Sent to the calling thread, which so does nothing more: one sent to the process is taken by any thread.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")


def freeze() -> None:
    """Stop the whole process, this thread at once, until somebody sends SIGCONT."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


ACTS: dict[str, Callable[[], None]] = {"die": die, "freeze": freeze}


def wait_for(path: Path | str) -> None:
    """Wait for a file that another process makes."""
    deadline = time.monotonic() + PATIENCE
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not made within {PATIENCE} s")
        time.sleep(0.005)


class Stage:
    """Where this process is to act, and how often it has been there."""

    def __init__(self) -> None:
        self.points: dict[tuple[str, str], tuple[int, str]] = {}
        self.lock = threading.Lock()
        self.statement: tuple[str, int, str] | None = None
        self.statements: list[str] = []

    # A step's life.

    def arm(self, point: str, step: str, *, times: int = 1, act: str = "die") -> None:
        """Act when a step comes to a point for the ``times``-th time."""
        self.points[point, step] = (times, act)

    def reached(self, point: str, step: str) -> None:
        with self.lock:
            left, act = self.points.get((point, step), (0, ""))
            if not act:
                return
            self.points[point, step] = (left - 1, act)
        if left == 1:
            ACTS[act]()

    def engine_reached(self, point: str, execution_id: str, step: str) -> None:
        if point != "in-effect":  # the engine says it before the call; the tools say it when they have acted
            self.reached(point, step)

    # Statements.

    def watch_statements(self, when: str = "never", number: int = 0, act: str = "die") -> None:
        """Count what goes to the database, and act before or after the ``number``-th statement."""
        self.statement = (when, number, act)
        watch(self._before, self._after)

    def _before(self, sql: str) -> int:
        with self.lock:
            self.statements.append(sql)
            number = len(self.statements)
        self._meet("before", number)
        return number

    def _after(self, number: int) -> None:
        self._meet("after", number)

    def _meet(self, when: str, number: int) -> None:
        if self.statement is not None and self.statement[:2] == (when, number):
            ACTS[self.statement[2]]()


stage = Stage()


def watch(before: Callable[[str], int], after: Callable[[int], None]) -> None:
    """Call back around each statement of this process, below Django and below loom's own cursors."""

    def around(call: Callable[..., Any], sql_of: Callable[..., str]) -> Callable[..., Any]:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            number = before(sql_of(*args))
            result = call(self, *args, **kwargs)
            after(number)
            return result

        return watched

    def text(sql: Any = "", *_: Any) -> str:
        return str(sql)

    for alias in connections:
        engine = connections.settings[alias]["ENGINE"]
        if engine.endswith("postgresql"):
            import psycopg

            psycopg.Cursor.execute = around(psycopg.Cursor.execute, text)  # type: ignore[method-assign]
            psycopg.Connection.commit = around(psycopg.Connection.commit, lambda: "COMMIT")  # type: ignore[method-assign]
            _watch_piped(before, after)
        elif engine.endswith("sqlite3"):
            from django.db.backends.sqlite3.base import SQLiteCursorWrapper

            class Watched(sqlite3.Connection):
                execute = around(sqlite3.Connection.execute, text)
                commit = around(sqlite3.Connection.commit, lambda: "COMMIT")

            SQLiteCursorWrapper.execute = around(SQLiteCursorWrapper.execute, text)  # type: ignore[method-assign]
            connections.settings[alias].setdefault("OPTIONS", {})["factory"] = Watched


def _watch_piped(before: Callable[[str], int], after: Callable[[int], None]) -> None:
    """The same around each statement of an event loop: when it is sent, and when its answer has come."""
    from loom_django.stores.postgresql_pipe import PostgresPipe

    send = PostgresPipe.send

    def watched(self: Any, commits: Any, tell: Any) -> bool:
        number = before("an append of an event loop")

        def told(landed: Any) -> None:
            after(number)
            tell(landed)

        return send(self, commits, told)

    PostgresPipe.send = watched  # type: ignore[method-assign]
