"""Appends out of an event loop: no thread waits for them, and more than one statement is on its way at a time.

The loop itself watches the socket. In libpq's pipeline mode a statement is sent before the one ahead of it is answered; each
is a transaction of its own, and the server takes them in order.

Only what goes the plain way goes here. Of a commit that was not seen to have landed nothing is known, whatever the reason:
it goes by :meth:`~loom_django.stores.base.EventStore.append_shared`, which finds out why, waits, connects anew, and
knows its own rows again. A connection that is in any trouble is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, Final

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus

from loom_django.stores.base import Commit, Told
from loom_django.stores.batches import Batches
from loom_django.stores.postgresql_append import MOST_COMMITS, document, parts_of, text_of

log = logging.getLogger("loom_django.stores")

# So many statements are on their way at a time: one in the server's hands, and the next at hand for it.
AT_ONCE: Final = 2

# What is wrong with a commit, and not with the connection: a rival's row or lock, an execution that has gone, a statement
# that took too long.
_OWN: Final = ("23505", "22012", "40001", "40P01", "55P03", "57014")


@dataclass(slots=True)
class _Flight:
    """A statement that is on its way."""

    commits: Sequence[Commit]
    tell: Told
    landed: frozenset[str] = frozenset()


class PostgresPipe:
    """The :class:`~loom_django.stores.base.Pipe` over PostgreSQL; all its calls are made in the loop's thread.

    ``shift`` tells how far the store's clock is ahead of the server's.
    """

    most = MOST_COMMITS

    def __init__(
        self,
        driver: psycopg.Connection[Any],
        loop: asyncio.AbstractEventLoop,
        *,
        shift: Callable[[], timedelta],
    ) -> None:
        self._driver = driver
        self._server = driver.pgconn
        self._encoding = driver.info.encoding
        self._loop = loop
        self._shift = shift
        self._flying: deque[_Flight] = deque()
        self._names: dict[str, bytes] = {}  # of the statements that the server has prepared
        self._numbers = count()
        self._is_writing = False
        # Kept, since libpq closes it by itself when the connection is lost: the loop must be told before the next connection
        # has the same number, or it would watch the one that has gone.
        self._socket = driver.pgconn.socket
        self._is_watched = False
        self.closed = False

    def begin(self) -> None:
        self._server.nonblocking = 1
        self._server.enter_pipeline_mode()
        self._loop.add_reader(self._socket, self.look)
        self._is_watched = True

    @property
    def has_room(self) -> bool:
        return not self.closed and len(self._flying) < AT_ONCE

    def send(self, commits: Sequence[Commit], tell: Told) -> bool:
        if self.closed:
            return False
        try:
            if not _go_together(commits):
                return False
            shift = self._shift()
            text, body = text_of(replace(parts_of(commits, shift), brief=True)), document(commits, shift)
            parameters = [body.encode(self._encoding)]
        except Exception as error:
            log.debug("commits that cannot be put in words: %s", error)  # of each it is told by itself
            return False
        self._flying.append(_Flight(commits, tell))
        try:
            name = self._names.get(text)
            if name is None:
                name = self._names[text] = b"loom_%d" % next(self._numbers)
                self._server.send_prepare(name, text.encode())
            self._server.send_query_prepared(name, parameters)
            self._server.pipeline_sync()
            self._flush()
        except Exception as error:
            self._give_up(error)  # whatever it is, nobody is left waiting
        return True

    def look(self) -> None:
        if self.closed:
            return
        try:
            self._server.consume_input()
            was_gap = False
            while self._flying and not self._server.is_busy():
                result = self._server.get_result()
                if result is not None:
                    self._take(result)
                elif was_gap:  # one is between two statements
                    raise psycopg.OperationalError("an answer is missing")
                was_gap = result is None
        except Exception as error:
            self._give_up(error)

    def _take(self, result: Any) -> None:
        flight = self._flying[0]
        match result.status:
            case ExecStatus.PIPELINE_SYNC:
                self._flying.popleft()
                flight.tell([commit.execution_id in flight.landed for commit in flight.commits])
            case ExecStatus.TUPLES_OK:
                rows = range(result.ntuples)
                flight.landed = frozenset(result.get_value(row, 0).decode(self._encoding) for row in rows)
            case ExecStatus.COMMAND_OK | ExecStatus.PIPELINE_ABORTED:
                pass  # it is prepared; or not run, behind an error that was told
            case _:
                flight.landed = frozenset()  # of rows that were told before the commit failed, too
                state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
                if state not in _OWN:
                    raise psycopg.OperationalError(
                        f"{state}: {result.error_message.decode(errors='replace')}"
                    )

    def _flush(self) -> None:
        """Hand the socket what it takes; for the rest the loop says when it takes more."""
        is_left = bool(self._server.flush())
        if is_left and not self._is_writing:
            self._loop.add_writer(self._socket, self._write)
        elif self._is_writing and not is_left:
            self._loop.remove_writer(self._socket)
        self._is_writing = is_left

    def _write(self) -> None:
        try:
            self._flush()
        except Exception as error:
            self._give_up(error)
        self.look()  # libpq may have read, while it could not write: nothing would tell the loop of that

    def _give_up(self, error: Exception) -> None:
        """Of all that is on its way nothing is known any more."""
        is_fault = not isinstance(error, psycopg.Error)
        log.info("appends of async bodies go through a thread for a while: %s", error, exc_info=is_fault)
        flying, self._flying = self._flying, deque()
        self.close()
        for flight in flying:
            flight.tell([False] * len(flight.commits))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._is_watched:
                self._loop.remove_reader(self._socket)
            if self._is_writing:
                self._loop.remove_writer(self._socket)
            self._driver.close()


def _go_together(commits: Sequence[Commit]) -> bool:
    """True if one statement may carry all of them, each as itself, and each is one that may be sent at all."""
    try:
        for commit in commits:
            for member in (commit, *commit.also):
                member.check()
    except ValueError:
        return False
    if any(commit.after_end for commit in commits):
        return False  # a note about what has ended has a transaction of its own
    batches = list(Batches(enumerate(commits)))
    return len(batches) == 1 and all(len(seat.places) == 1 for seat in batches[0])
