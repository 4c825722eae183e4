"""A proxy in front of PostgreSQL that counts round trips and cuts a connection at a chosen one.

It understands just enough of the wire protocol: where a message ends, which statement a message runs, and when
the server's answer is complete. It never changes a byte.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["before", "after", "within", "blind"]

# What a client sends last, before it waits for an answer: Sync, Query.
_ENDS_OF_REQUEST = (b"S", b"Q")
_PARTS_OF_REQUEST = (b"P", b"B", b"D", b"E", b"C")
_READY = b"Z"


@dataclass
class RoundTrip:
    """What a client sent before it waited, and how often it had the statement parsed."""

    texts: list[str] = field(default_factory=list)
    parsed: int = 0

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def appends(self) -> bool:
        return "insert into loom_event" in self.text

    @property
    def commits(self) -> bool:
        return self.text.strip().upper() == "COMMIT"


@dataclass
class Cut:
    """Cut the connection at the ``number``-th round trip that ``at`` picks.

    before: the server gets nothing of it. after: the server has answered, the client hears nothing. within: the
    client gets the first half of the answer. blind: the server gets it, and the client is cut off at once, while
    the server may be at work.
    """

    number: int
    how: How
    at: Callable[[RoundTrip], bool] = lambda trip: True
    seen: int = 0
    done: bool = False

    def meets(self, trip: RoundTrip) -> bool:
        if self.done or not self.at(trip):
            return False
        self.seen += 1
        self.done = self.seen == self.number
        return self.done


class Proxy:
    """Listens on a loopback port and passes on to a server; a context manager."""

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.cut: Cut | None = None
        self.trips: list[RoundTrip] = []
        self.connections = 0
        self.refused = 0
        self.refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="proxy")
        self._acceptor.start()

    @property
    def address(self) -> dict[str, Any]:
        """What to change in a database's settings."""
        return {"HOST": "127.0.0.1", "PORT": str(self.port)}

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                self.refused += 1
                client.close()
                continue
            link = _Link(self, client)
            with self._lock:
                self.connections += 1
                self._links.add(link)
            thread = threading.Thread(target=link.run, name="proxy-link")
            self._threads.append(thread)
            thread.start()

    def begin(self, trip: RoundTrip) -> Cut | None:
        """Note a round trip; the cut, if this is where it is."""
        with self._lock:
            self.trips.append(trip)
            return self.cut if self.cut is not None and self.cut.meets(trip) else None

    def left(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """As if the server were stopped: connections are cut, and new ones refused."""
        self.refusing = True
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut_off()
        yield
        self.refusing = False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut_off()
        self._acceptor.join()
        for thread in self._threads:
            thread.join()


class _Link:
    """One client's connection and the server's for it."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = socket.create_connection(proxy.server)
        for end in (self.client, self.server):
            # Messages go on one by one, and none may wait for the answer to the one before it.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._statements: dict[bytes, str] = {}
        self._trip = RoundTrip()
        self._request = b""
        self._answer = b""
        self._cut: Cut | None = None

    def run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.client, selectors.EVENT_READ, (_Messages(typed=False), self._asked))
                selector.register(self.server, selectors.EVENT_READ, (_Messages(typed=True), self._answered))
                while True:
                    for key, _ in selector.select():
                        messages, handle = key.data
                        source: Any = key.fileobj
                        came = source.recv(1 << 16)
                        if not came:
                            return
                        for message in messages.take(came):
                            handle(message)
        except (OSError, _CutOff):
            pass
        finally:
            self.cut_off()
            self.client.close()
            self.server.close()
            self.proxy.left(self)

    def cut_off(self) -> None:
        """End both connections; the link's own thread notices and closes them."""
        _end(self.client)
        _end(self.server)

    def _asked(self, message: bytes) -> None:
        """Pass a request on when it is whole, so that "before" means that the server saw nothing of it."""
        if _asks_for_encryption(message):
            self.client.sendall(b"N")
            return
        kind = message[:1]
        self._note(kind, message[5:])
        self._request += message
        if kind in _ENDS_OF_REQUEST:
            trip, self._trip = self._trip, RoundTrip()
            self._cut = self.proxy.begin(trip)
        elif kind in _PARTS_OF_REQUEST:
            return
        if self._cut is not None and self._cut.how == "before":
            raise _CutOff
        request, self._request = self._request, b""
        self.server.sendall(request)
        if self._cut is not None and self._cut.how == "blind":
            _end(self.client)
            self._let_the_server_finish()
            raise _CutOff

    def _let_the_server_finish(self) -> None:
        messages = _Messages(typed=True)
        while came := self.server.recv(1 << 16):
            if any(message[:1] == _READY for message in messages.take(came)):
                return

    def _answered(self, message: bytes) -> None:
        if self._cut is None:
            self.client.sendall(message)
            return
        self._answer += message
        if message[:1] == _READY:
            if self._cut.how == "within":
                self.client.sendall(self._answer[: len(self._answer) // 2])
            raise _CutOff

    def _note(self, kind: bytes, body: bytes) -> None:
        """Which statement does the message run?"""
        if kind == b"Q":
            self._trip.texts.append(_text(body))
        elif kind == b"P":
            name, rest = body.split(b"\0", 1)
            self._statements[name] = _text(rest)
            self._trip.parsed += 1
        elif kind == b"B":
            _portal, rest = body.split(b"\0", 1)
            self._trip.texts.append(self._statements.get(rest.split(b"\0", 1)[0], ""))


class _CutOff(Exception):
    """This connection is over."""


class _Messages:
    """Cuts a stream into messages. A client's first ones have no type, up to the one that starts the session."""

    def __init__(self, *, typed: bool) -> None:
        self._typed = typed
        self._unread = b""

    def take(self, came: bytes) -> Iterator[bytes]:
        self._unread += came
        while len(self._unread) >= (head := 5 if self._typed else 4):
            size = head - 4 + int(struct.unpack("!i", self._unread[head - 4 : head])[0])
            if len(self._unread) < size:
                return
            message, self._unread = self._unread[:size], self._unread[size:]
            self._typed = self._typed or not _asks_for_encryption(message)
            yield message


def _asks_for_encryption(message: bytes) -> bool:
    return len(message) == 8 and struct.unpack("!i", message[4:8])[0] in (80877103, 80877104)


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
