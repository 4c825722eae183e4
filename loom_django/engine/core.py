"""What every part of the engine needs of the world, handed in: store, settings, clock, randomness, names."""

from __future__ import annotations

import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from loom_django.conf import LoomSettings
from loom_django.definitions import Registry
from loom_django.engine.watch import Watch
from loom_django.errors import FlowDivergenceError
from loom_django.kernel.events import Event
from loom_django.stores.base import Known, Ownership, Store

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(instant: datetime) -> int:
    """An aware datetime as microseconds since the epoch, exactly."""
    return (instant - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The aware UTC datetime of a fact's time."""
    return _EPOCH + timedelta(microseconds=micros)


class Keeper(Protocol):
    """Keeps leases alive while bodies run."""

    def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None: ...

    def drop(self, execution_id: str, token: int) -> None: ...

    def keeps(self, execution_id: str, token: int) -> bool:
        """True if this process is at work under that lease, whatever its end in the database says."""


class NoKeeper:
    """For a TestCase, and for stores that are one process's own: nothing to keep alive."""

    def hold(self, execution_id: str, token: int, on_lost: Callable[[], None]) -> None:
        """Nothing to do."""

    def drop(self, execution_id: str, token: int) -> None:
        """Nothing to do."""

    def keeps(self, execution_id: str, token: int) -> bool:
        return False


def _announce_nothing(flow_id: str, version: int, events: tuple[Event, ...]) -> None:
    """Nobody listens."""


def _tells_of_all(events: tuple[Event, ...]) -> bool:
    """Whoever announces looks by itself."""
    return True


def _no_divergence_told(flow_id: str, version: int, sequence: int, error: FlowDivergenceError) -> None:
    """The log line has to do."""


def _tell_nobody() -> None:
    """Whoever waits looks by itself."""


def _nobody_told(execution_id: str) -> None:
    """Nobody is told of an execution."""


def random_token() -> int:
    """A random number that fits a signed 64-bit column and is never 0."""
    return secrets.randbits(62) + 1


def new_execution_id() -> str:
    """A random UUID that begins with the time (version 7): what is started together lies together in each index."""
    millis = time.time_ns() // 1_000_000 & (1 << 48) - 1
    random = secrets.randbits(74)
    bits = millis << 80 | 0x7 << 76 | random >> 62 << 64 | 0b10 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=bits))


class Identity:
    """The name under which this process holds leases: random, drawn anew in a forked child."""

    def __init__(self) -> None:
        self._pid = 0
        self._name = ""

    @property
    def name(self) -> str:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._name = f"{socket.gethostname()[:100]}:{self._pid}:{secrets.token_hex(6)}"
        return self._name


@dataclass
class Engine:
    """One configured engine over one store."""

    store: Store
    settings: Callable[[], LoomSettings]
    registry: Registry
    keeper: Keeper = field(default_factory=NoKeeper)
    identity: Identity = field(default_factory=Identity)
    announce: Callable[[str, int, tuple[Event, ...]], None] = _announce_nothing
    # False if there is nothing to announce of these events, which spares a body the way to where it may be done.
    tells: Callable[[tuple[Event, ...]], bool] = _tells_of_all
    # Tells of a body that does not ask for what its log holds; the sequence is the newest of the log.
    diverged: Callable[[str, int, int, FlowDivergenceError], None] = _no_divergence_told
    # Tells idle loops, in other processes too, that something is ready; after the commit that made it so.
    ring: Callable[[], None] = _tell_nobody
    # Has an execution run that a body of this process has just made ready; after the commit.
    started: Callable[[str], None] = _nobody_told
    # Has an execution looked at that a commit of this process has just woken; after the commit. Both only make
    # it quicker: a row says what is to be done.
    woken: Callable[[str], None] = _nobody_told
    watch: Watch = field(default_factory=Watch)
    # Points at which the testing kit stops a run as a crash would; nobody else sets it.
    crash_point: Callable[[str, str, str], None] | None = None
    # Tools that the testing kit answers for.
    stubs: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[], float] = field(default_factory=lambda: secrets.SystemRandom().random)

    def now(self) -> int:
        """The store's clock in microseconds, as far as this process knows it; no round trip."""
        return time.time_ns() // 1000 + round(self.store.clock_offset() * 1_000_000)

    def known(self) -> Known:
        return Known(self.registry.highest())

    def held(self, token: int) -> Ownership:
        """Ownership by this process under a token."""
        return Ownership("held", owner=self.identity.name, token=token, ttl=self.settings().LEASE_TTL)

    def reached(self, point: str, execution_id: str, step_id: str = "") -> None:
        """Tell the testing kit that a run has come to a point of a step's life."""
        if self.crash_point is not None:
            self.crash_point(point, execution_id, step_id)
