"""What a store promises, for every store alike.

One :class:`Commit` is everything that must land together: events, the projection, timer rows, the lease or
the ready mark, messages taken. A store lands all of it or nothing.

Lock order, everywhere: **fence rows, events, execution rows, timer rows, message rows**; several rows of a
kind in order of execution id. A claim starts at the execution row (SKIP LOCKED), commits, and takes its
fences in a second statement. A transactional tool's append takes the fence after the tool's own work.

Clock: every "now" below is the store's (:meth:`Store.now`): the database's, plus an offset that only the
testing kit sets. All durations are seconds, all instants aware datetimes in UTC; facts inside payloads are
integer microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol

from loom_django.kernel.events import Event
from loom_django.kernel.projection import Projection

# An append that met a serialization failure or a deadlock is sent again; nothing landed.
APPEND_RETRIES: Final = 5


class AppendRefused(Exception):
    """Nothing landed. Internal: the engine turns it into what its caller should hear."""

    def __init__(self, execution_id: str, sequence: int) -> None:
        super().__init__(execution_id, sequence)
        self.execution_id = execution_id
        self.sequence = sequence


class SequenceOccupied(AppendRefused):
    """Another writer holds that sequence, or the one before it is missing."""


class WakesMoved(AppendRefused):
    """A wake arrived between the body's look and its park: look again."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who is to run the execution after a commit: at most one of ready and held.

    ``keep`` leaves the row's owner as it is, ``nobody`` is for parked and finished executions, ``ready``
    says that somebody should run it (``at`` None: now), ``held`` gives it to ``owner`` under ``token`` for
    ``ttl`` seconds by the store's clock.
    """

    mode: Literal["keep", "nobody", "ready", "held"]
    at: datetime | None = None
    owner: str = ""
    token: int = 0
    ttl: float = 0.0


KEEP: Final = Ownership("keep")
NOBODY: Final = Ownership("nobody")
READY: Final = Ownership("ready")


@dataclass(frozen=True, slots=True)
class TimerRow:
    """A wake that is owed: ``(execution_id, wake_at)`` is unique.

    ``redrive`` is None for a plain wake and the attempt's number for a re-drive row; an upsert never drops
    the mark. ``deadline`` rows stay until the execution ends. ``not_before`` puts off a row that was
    refused; ``tries`` counts how often.
    """

    execution_id: str
    wake_at: datetime
    redrive: int | None = None
    deadline: bool = False
    not_before: datetime | None = None
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an inbox; ``number`` orders them, ``message_id`` makes sending idempotent."""

    number: int
    execution_id: str
    name: str
    message_id: str
    body: str  # the payload in the codec's form, as text


@dataclass(frozen=True, slots=True)
class NewExecution:
    """The columns of an execution's row that its start decides for good."""

    queue: str = "default"
    priority: int = 0
    not_before: datetime | None = None
    deadline: datetime | None = None
    parent_id: str | None = None
    chain: str | None = None
    subject_type: str = ""
    subject_id: str = ""
    attributes: str = "{}"  # JSON object
    scheduled_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What lands together for one execution.

    ``events`` are consecutive. ``fence`` is presented to the guard: an append to an execution whose token
    is not 0 must carry exactly it; audit kinds and ``new`` are exempt. ``projection`` is the fold after the
    last event. ``new`` makes the execution's row (the first event is sequence 1). ``wakes`` is the count of
    wakes that the body saw before it decided to park. ``timers_off`` are wake times whose plain rows go;
    None means all rows of the execution (at its end).
    """

    execution_id: str
    events: tuple[Event, ...]
    projection: Projection
    fence: int | None = None
    ownership: Ownership = KEEP
    new: NewExecution | None = None
    wakes: int | None = None
    timers: tuple[TimerRow, ...] = ()
    timers_off: tuple[datetime, ...] | None = ()
    messages: tuple[int, ...] = ()

    @property
    def first_sequence(self) -> int:
        return self.events[0].sequence


@dataclass(frozen=True, slots=True)
class Loaded:
    """A log with the token and the wakes that stood before it was read."""

    events: tuple[Event, ...]
    fence: int
    wakes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds an execution, until when by the store's clock."""

    execution_id: str
    owner: str
    token: int
    until: datetime
    flow_id: str = ""
    version: int = 1


@dataclass(frozen=True, slots=True)
class Claimed:
    """An execution that the caller now holds, with the fence taken for it."""

    execution_id: str
    token: int
    fence: int


@dataclass(frozen=True, slots=True)
class Due:
    """A due timer row, with what is needed to judge it. ``now`` is the store's at the claim."""

    row: TimerRow
    now: datetime
    flow_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Known:
    """The flows that a node has registered, each with its highest version.

    A row of a flow that is not here, or of a version above the one here, is left to a node that has it.
    None as ``flows`` admits everything.
    """

    flows: Mapping[str, int] | None = field(default=None)

    def admits(self, flow_id: str, version: int) -> bool:
        if self.flows is None:
            return True
        return version <= self.flows.get(flow_id, 0)


class EventStore(Protocol):
    """The log and its fences."""

    def append(self, commit: Commit) -> None:
        """Land a commit, durable when this returns.

        Sent again after a lost connection until it lands or is refused: an occupied sequence whose event
        carries this commit's ``writer`` means that it had landed.

        Raises:
            StaleFenceError: the execution's token is not the one presented.
            SequenceOccupied: another writer was first, or the predecessor is missing.
            WakesMoved: ``commit.wakes`` is not the count any more.
            ExecutionConflictError: never; a start on a taken id is ``SequenceOccupied``.
            StoreUnavailableError: the database stayed away; nothing is known to have landed.
        """

    def append_many(self, commits: Sequence[Commit]) -> list[Exception | None]:
        """Land several executions' commits, each by itself: None where it landed, else why not."""

    def read(self, execution_id: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """The log in order, from ``after + 1``; all of it unless ``limit`` is given."""

    def load(self, execution_id: str, *, after: int = 0) -> Loaded:
        """The log with token and wakes; those are read first, so a rival's move is refused, not missed."""

    def fence(self, execution_id: str) -> int:
        """The current token; 0 if nobody ever acquired one."""

    def acquire_fence(self, execution_id: str) -> int:
        """Move the token up by one and return it; older tokens are stale from now on."""

    def delete_execution(self, execution_id: str) -> bool:
        """Remove a finished execution's rows. A token that was ever acquired stays; a 0 row goes.

        False, and nothing removed, if it is not finished or not there.
        """


class TimerStore(Protocol):
    """The wakes that are owed."""

    def schedule(self, row: TimerRow) -> None:
        """Upsert a row; a redrive mark that is there is never dropped."""

    def claim_due(self, *, limit: int, hold: float, known: Known, redrive: bool) -> list[Due]:
        """Take due rows: no other claim sees them for ``hold`` seconds (their ``not_before`` moves).

        Oldest first. Rows of flows outside ``known``, and re-drive rows where ``redrive`` is False, are
        left out before the limit. A row is due when wake_at, and not_before if any, have passed.
        """

    def put_off(self, row: TimerRow, *, delay: float, tries: int) -> None:
        """Move the row's ``not_before`` to ``delay`` seconds from now and set its tries."""

    def retire(self, execution_id: str, wake_at: datetime) -> None:
        """Remove one row."""

    def timers(self, execution_id: str) -> list[TimerRow]:
        """All rows of an execution, soonest first."""

    def next_due(self) -> datetime | None:
        """When the soonest row will be due, to sleep until then."""


class LeaseStore(Protocol):
    """Who is alive and holds an execution."""

    def claim(self, execution_id: str, *, owner: str, token: int, ttl: float) -> bool:
        """Take a *ready* execution under a lease. False if it is not ready (held, parked, over)."""

    def claim_ready(
        self, *, owner: str, token: int, ttl: float, limit: int, known: Known, queues: Sequence[str] | None = None
    ) -> list[Claimed]:
        """Take ready executions in a batch, by priority (high first) and age; then their fences."""

    def renew(self, leases: Sequence[tuple[str, int]], *, ttl: float) -> set[str]:
        """Prolong the given (execution id, token) leases in one statement; return the ids still held."""

    def release(self, execution_id: str, token: int) -> bool:
        """Hand back: the lease goes, the execution is ready again. False if the token is not the holder's."""

    def expired(self, *, limit: int) -> list[Lease]:
        """Leases that ended by the store's clock, oldest first."""

    def take_over(self, lease: Lease, *, owner: str, token: int, ttl: float) -> bool:
        """Take an expired lease by its token; False if it was renewed, released or taken meanwhile."""

    def held(self, execution_id: str) -> Lease | None:
        """The lease on an execution, expired or not."""

    def stale_ready(self, *, grace: float, limit: int) -> list[Lease]:
        """Executions that have been ready for longer than ``grace`` seconds (owner "" and token 0)."""

    def count_recovery(self, execution_id: str, *, sequence: int) -> int:
        """Count a takeover of an execution whose log ends at ``sequence``; a longer log starts at 1 again."""


class InboxStore(Protocol):
    """Messages, kept until a receive wants them."""

    def send(self, execution_id: str, *, name: str, message_id: str, body: str) -> bool:
        """Store a message, add 1 to the receiver's wakes and leave a due re-drive row; one transaction.

        False if a message of that id is there already (nothing changes).
        """

    def inbox(self, execution_id: str, name: str) -> list[Message]:
        """The messages of that name that no commit has taken, oldest first."""

    def message_names(self, execution_id: str) -> set[str]:
        """The names under which untaken messages lie."""


class Store(EventStore, TimerStore, LeaseStore, InboxStore, Protocol):
    """All of it over one database, with the seams of that database's transactions."""

    def now(self) -> datetime:
        """The store's clock, asked."""

    def clock_offset(self) -> float:
        """Seconds by which the store's clock is ahead of this process's; measured once, then at `measure`."""

    def measure(self) -> None:
        """Measure the offset again."""

    def shift_clock(self, by: timedelta) -> None:
        """Move this store's clock; for the testing kit only."""

    def transaction(self) -> AbstractContextManager[Any]:
        """A transaction on the store's database for a transactional tool and its append."""

    def in_transaction(self) -> bool:
        """True inside a caller's open transaction; TestCase's own does not count."""

    def in_testcase(self) -> bool:
        """True where the connection lives in a TestCase transaction: one thread, one connection."""

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Call back after the caller's transaction has committed; at once if there is none."""

    def marked_for_rollback(self) -> bool:
        """True if the open transaction will roll back without an exception."""

    def close_old_connections(self) -> None:
        """Drop connections of this thread that are broken or past their age; loom's own threads only."""
