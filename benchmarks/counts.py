"""What one execution asks of the store and of the wire, counted and not timed.

PostgreSQL's figures are read off libpq's own trace of the protocol, so nothing that is sent escapes them.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

WRITES: Final = ("append", "append_if_unchanged", "acquire_fence", "acquire_fence_if")
_MESSAGE: Final = re.compile(rb"^([FB])\t(\d+)\t(\w+)", re.MULTILINE)


@dataclass
class Counts:
    """``writes`` are calls that end in a durable commit. What a backend has not (a wire) stays 0."""

    events: int = 0
    writes: Counter[str] = field(default_factory=Counter)
    statements: int = 0
    round_trips: int = 0
    sent_bytes: int = 0
    appends: list[list[tuple[str, str]]] = field(default_factory=list)

    @property
    def commits(self) -> int:
        return sum(self.writes.values())

    def told(self) -> dict[str, int]:
        return {
            "events": self.events,
            "commits": self.commits,
            "statements": self.statements,
            "round_trips": self.round_trips,
            "sent_bytes": self.sent_bytes,
        }


def count(store: Any, work: Callable[[], object]) -> Counts:
    """Count one piece of work of the calling thread. Warm it up before: the first time prepares statements."""
    counts = Counts()
    connection = getattr(store, "connection", None)
    if connection is None:
        wire: AbstractContextManager[None] = nullcontext()
    else:
        connection.ensure_connection()
        wire = _file(connection, counts) if connection.vendor == "sqlite" else _protocol(connection, counts)
    with _calls(store, counts), wire:
        work()
    return counts


@contextmanager
def _calls(store: Any, counts: Counts) -> Iterator[None]:
    inside: list[str] = []  # a call that a store makes of another one commits with that

    def counting(name: str) -> Callable[..., Any]:
        call = getattr(store, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return call(*args, **kwargs)
            counts.writes[name] += 1
            if name.startswith("append"):
                events = [(str(event.kind), event.body) for event in args[0].events]
                counts.events += len(events)
                counts.appends.append(events)
            inside.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                inside.pop()

        return counted

    for name in WRITES:
        if hasattr(store, name):
            vars(store)[name] = counting(name)
    try:
        yield
    finally:
        for name in WRITES:
            vars(store).pop(name, None)


@contextmanager
def _file(connection: Any, counts: Counts) -> Iterator[None]:
    def note(statement: str) -> None:
        counts.statements += 1
        counts.sent_bytes += len(statement.encode())

    driver = connection.connection
    driver.set_trace_callback(note)
    try:
        yield
    finally:
        driver.set_trace_callback(None)


@contextmanager
def _protocol(connection: Any, counts: Counts) -> Iterator[None]:
    from psycopg import pq

    server = connection.connection.pgconn
    with tempfile.TemporaryFile() as file:
        server.trace(file.fileno())
        server.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield
        finally:
            server.untrace()
        file.seek(0)
        for side, length, name in _MESSAGE.findall(file.read()):
            counts.sent_bytes += int(length) + 1 if side == b"F" else 0
            counts.statements += name == b"CommandComplete"
            counts.round_trips += name == b"ReadyForQuery"
