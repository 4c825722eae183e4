"""What a store promises, for every store alike.

One :class:`Commit` is everything that must land together: events, the projection, timer rows, the lease or
the ready mark, messages taken. A store lands all of it or nothing.

Lock order, everywhere: **schedule rows, fence rows, events, execution rows, timer rows, message rows**; several
rows of a kind in order of execution id. A snapshot is written with no lock held, and goes last. A claim starts at the execution row (SKIP LOCKED), commits, and takes its
fences in a second statement. A transactional tool's append takes the fence after the tool's own work.

The fence row orders all who must not act on an old look: an append that answers, parks or ends, the acquires,
a note about what has ended, :meth:`EventStore.append_if_unchanged`, :meth:`EventStore.delete_execution` and
:meth:`InboxStore.send_unless_answered`. Each of them either sees what the other did, or is refused.

Clock: every "now" below is the store's (:meth:`Store.now`): the database's, plus an offset that only the
testing kit sets. All durations are seconds, all instants aware datetimes in UTC; facts inside payloads are
integer microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol

from loom_django.kernel.events import ANSWERING, AUDIT, Event, Kind
from loom_django.kernel.projection import Projection
from loom_django.kernel.state import TERMINAL_STATUSES, ExecutionState, Status

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


class Changed(AppendRefused):
    """The token, the end of the log, or who is to write is not what was observed."""


class WakesMoved(AppendRefused):
    """A wake arrived between the body's look and its park: look again."""


class Overtaken(AppendRefused):
    """Another writer was there first, and the transaction in which this was to land is broken by that.

    Only of a commit that ``closes`` it. The log is to be read once the transaction is rolled back.
    """


class RowLocked(AppendRefused):
    """Another transaction held a row for longer than the connection's ``lock_timeout``.

    Only where the connection has one: a writer of many executions, so that one of them does not stall all.
    The same commit may be sent again on a connection that waits.
    """


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
    refused, or tells until when a loop holds it; ``tries`` counts how often it was refused.
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
    wait: str = ""  # the wait that an answer was stored for; "" for a message
    principal: str = ""  # the person who sent it, and why; "" for a program
    reason: str = ""


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


@dataclass(slots=True)  # one for each append; a frozen one would cost thrice as much
class Commit:
    """What lands together for one execution.

    ``events`` are consecutive. ``fence`` is presented to the guard: an append to an execution whose token
    is not 0 must carry exactly it; ``new`` and a commit of audit kinds alone are exempt. ``projection`` is
    the fold after the last event. ``new`` makes the execution's row (the first event is sequence 1); where
    a deleted execution left a token behind, the start moves it, and :meth:`EventStore.fence` tells it.
    ``takes`` is the token that must stand, whichever it is, for a commit that moves it by one: it lands under the new
    token, its ``fence``, or the old one stands. ``closes`` says that the open transaction is the engine's own, and
    rolled back as a whole if this does not land: it needs no savepoint then.
    ``wakes`` is the count of wakes that the body saw before it decided to park, ``wakes_of`` whose they are
    (the first of a chain; None: the execution's own). ``timers`` may be another execution's (a parent's).
    ``timers_off`` are wake times whose plain rows go, the marks of a re-drive or a deadline keep a row;
    None means all rows of the execution (at its end). ``wake`` are other executions that are woken by this
    commit: each one's wakes go up by 1 and it gets a due re-drive row. ``also`` are commits of other
    executions (a child's or a successor's start): all land, or none; they hold no ``also`` of their own.
    ``patience`` is for how many seconds it is worth being sent again while the database is away, if that is
    longer than the store's own patience: an owner's is the length of its lease.
    """

    execution_id: str
    events: tuple[Event, ...]
    projection: Projection
    fence: int | None = None
    ownership: Ownership = KEEP
    new: NewExecution | None = None
    wakes: int | None = None
    wakes_of: str | None = None
    timers: tuple[TimerRow, ...] = ()
    timers_off: tuple[datetime, ...] | None = ()
    messages: tuple[int, ...] = ()
    wake: tuple[str, ...] = ()
    also: tuple[Commit, ...] = ()
    patience: float = 0.0
    takes: int | None = None
    closes: bool = False

    @property
    def first_sequence(self) -> int:
        return self.events[0].sequence

    @property
    def writers(self) -> list[tuple[str, int]]:
        """The executions that it writes to, each with its writer."""
        return [(one.execution_id, one.events[0].writer) for one in (self, *self.also)]

    @property
    def unguarded(self) -> bool:
        """True if the fence does not guard it: a start, or notes of others."""
        if self.new is not None:
            return True
        return self.events[0].kind in AUDIT and all(event.kind in AUDIT for event in self.events)

    @property
    def presented(self) -> int | None:
        """The token that it shows to the guard."""
        return self.fence if self.takes is None else self.takes

    def may_pass(self, token: int) -> bool:
        """True if the guard lets it by where this token stands."""
        return token == self.takes if self.takes is not None else self.unguarded or token in (0, self.fence)

    @property
    def after_end(self) -> bool:
        """True for notes about what has ended, which may be deleted meanwhile."""
        return self.projection.status in TERMINAL_STATUSES and self.new is None and self.unguarded

    @property
    def parks(self) -> bool:
        """True if the execution's fence row must be there afterwards, so that a sender meets the park."""
        return self.wakes is not None or Kind.EXECUTION_SUSPENDED in [event.kind for event in self.events]

    def check(self) -> None:
        """Refuse what no caller may send.

        Raises:
            ValueError: the events are not consecutive ones of the execution, a start does not begin at 1,
                the ownership does not go with the status (a park or an end is owned by nobody), or what takes
                a token is no fact of an owner, or lands under another than the next.
        """
        first = self.events[0].sequence
        for sequence, event in enumerate(self.events, first):
            if event.sequence != sequence or event.execution_id != self.execution_id:
                raise ValueError(
                    f"events of a commit to {self.execution_id!r} must be consecutive ones of it"
                )
        if (self.new is not None) != (first == 1):
            raise ValueError(f"a commit to {self.execution_id!r} starts at 1 if and only if it is a start")
        if self.takes is not None and (self.unguarded or self.fence != self.takes + 1):
            raise ValueError(
                f"a commit to {self.execution_id!r} that takes token {self.takes} is an owner's, under the next one"
            )
        unowned = self.projection.status not in (Status.PENDING, Status.RUNNING)
        if self.ownership.mode == "keep":
            if self.new is not None or (unowned and any(event.kind in ANSWERING for event in self.events)):
                raise ValueError(
                    f"a start, a park and an end of {self.execution_id!r} must say who owns it then"
                )
        elif unowned != (self.ownership.mode == "nobody"):
            raise ValueError(
                f"{self.execution_id!r} would be {self.projection.status} and {self.ownership.mode}"
            )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fold of a log as it was behind one of its events; see :mod:`loom_django.kernel.snapshot`."""

    execution_id: str
    format: str
    sequence: int
    seal: str
    body: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A log with the token and the wakes that stood before it was read, or at that moment.

    With a ``snapshot`` the events begin with the one that this stands behind. ``state`` is what it holds, once
    somebody has looked whether it fits.
    """

    events: tuple[Event, ...]
    fence: int
    wakes: int
    snapshot: Snapshot | None = None
    state: ExecutionState | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Where an execution stands, and the last event of its log: another log of that id ends otherwise."""

    status: Status
    parent_id: str | None
    sequence: int
    writer: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """A token that was taken, and the last sequence of the log as it stood then."""

    fence: int
    head: int


@dataclass(frozen=True, slots=True)
class Stale:
    """The token had moved, or the park was answered: nothing changed. ``fence`` is the token now."""

    fence: int


@dataclass(frozen=True, slots=True)
class Look:
    """A log as it was looked at, for a token that is to be taken only while it is still like that.

    It ends at ``head``. ``fence`` is the token that must stand, None for any; ``lease`` the token of the lease under
    which the execution must be held, None for whoever holds it. ``progress`` counts a takeover, as
    :meth:`LeaseStore.count_recovery` does for that sequence; None counts nothing.
    """

    execution_id: str
    head: int
    fence: int | None = None
    lease: int | None = None
    progress: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """A token that was taken for a :class:`Look`, and the takeovers that are counted by now."""

    fence: int
    recoveries: int


@dataclass(frozen=True, slots=True)
class ParkFences:
    """One batch of a walk over the executions that have parked.

    ``position`` is the last one looked at, None if there was none; ``parked`` of them are unanswered, and
    ``made`` of those had no fence row before.
    """

    position: str | None
    parked: int
    made: int


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
    """An execution that the caller now holds, with the fence taken for it, and the flow that its row names."""

    execution_id: str
    token: int
    fence: int
    flow_id: str = ""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What one queue may take of the whole cluster.

    ``concurrency`` is how many of its executions may be held at a time; what is held under a lease that has
    ended counts until somebody takes it. ``rate`` is how many may be claimed per second, on average: what a
    second of rest has saved up (one at least) may go at once. None is no limit.
    """

    concurrency: int | None = None
    rate: float | None = None

    def admits(self, *, held: int, now: datetime, next_at: datetime | None) -> tuple[int, float | None]:
        """How many more may be claimed now, and if it is the rate that admits none: in how many seconds."""
        most = NO_LIMIT if self.concurrency is None else max(0, self.concurrency - held)
        if self.rate is None or most == 0:
            return most, None
        saved = max(1.0, self.rate)
        ahead = 0.0 if next_at is None else max(0.0, (next_at - now).total_seconds()) * self.rate
        # A rate that was lowered, or raised, since: nobody waits for longer than all that can be saved.
        free = saved - min(ahead, saved)
        if free < 1.0 - _TINY:
            return 0, (1.0 - free) / self.rate
        return min(most, int(free + _TINY)), None

    def spent(self, count: int, *, now: datetime, next_at: datetime | None) -> datetime:
        """The mark after so many claims: the instant from which on a whole second's worth is saved up again."""
        if self.rate is None:
            raise ValueError("there is no rate to spend")
        latest = now + timedelta(seconds=max(1.0, self.rate) / self.rate)
        begun = now if next_at is None else min(max(next_at, now), latest)
        return begun + timedelta(seconds=count / self.rate)


NO_LIMIT: Final = 2**62
_TINY: Final = 1e-6


@dataclass(frozen=True, slots=True)
class QueueClaim:
    """What was taken of a queue with limits; ``again_in`` seconds its rate admits more, None if it was not that."""

    claims: list[Claimed]
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class Upcoming:
    """When, after ``now`` by the store's clock, the next timer is due and the next execution becomes ready."""

    now: datetime
    timer: datetime | None
    ready: datetime | None

    def seconds_to(self, at: datetime | None) -> float | None:
        """How long it is until an instant; None for none."""
        return None if at is None else (at - self.now).total_seconds()


@dataclass(frozen=True, slots=True)
class Due:
    """A due timer row, with what is needed to judge it. ``now`` is the store's at the claim, ``at`` when it became due."""

    row: TimerRow
    now: datetime
    flow_id: str
    version: int
    at: datetime


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

    def names(self, flow_id: str) -> bool:
        """True if it admits some version of a flow."""
        return self.flows is None or flow_id in self.flows

    @classmethod
    def either(cls, *known: Known) -> Known:
        """What one of these admits at least; they share no flow."""
        if len(known) == 1:
            return known[0]
        return cls({flow_id: most for one in known for flow_id, most in (one.flows or {}).items()})


ANY_FLOW: Final = Known()


# Of each commit that was sent: True if it has landed. Of the others nothing is known.
Told = Callable[[Sequence[bool]], None]


class Pipe(Protocol):
    """Lands commits out of an event loop, without a thread that waits for them. All calls are made in the loop's thread."""

    closed: bool
    """True when nothing more can be sent by it: it was closed, or its connection is lost."""

    most: int
    """So many commits may go at once."""

    def begin(self) -> None:
        """Have the loop watch it. Raises NotImplementedError where a loop watches nothing."""

    @property
    def has_room(self) -> bool:
        """True if more may be sent before an answer has come."""

    def send(self, commits: Sequence[Commit], tell: Told) -> bool:
        """Send commits, each of which lands or not by itself; False if these cannot go by it, and nothing was sent.

        ``tell`` is called once. What has not been seen to land goes by :meth:`EventStore.append_shared`, and may have
        landed for all that.
        """

    def look(self) -> None:
        """Take the answers that have come."""

    def close(self) -> None:
        """Let go of the connection; nothing is on its way any more."""


class EventStore(Protocol):
    """The log and its fences."""

    def append(self, commit: Commit) -> None:
        """Land a commit, durable when this returns (in a caller's transaction: when that commits).

        Sent again after a lost connection until it lands or is refused: an occupied sequence whose event
        carries this commit's ``writer`` means that it had landed (a ``writer`` of 0 proves nothing).

        Raises:
            StaleFenceError: the execution's token is not the one presented.
            SequenceOccupied: another writer was first, or the predecessor is missing.
            WakesMoved: ``commit.wakes`` is not the count any more.
            ExecutionConflictError: never; a start on a taken id is ``SequenceOccupied``.
            StoreUnavailableError: the database stayed away; nothing is known to have landed.
            RowLocked: only where the connection has a ``lock_timeout``.
        """

    def grouping(self) -> AbstractContextManager[None]:
        """Inside it, appends that several threads make at the same time land in shared commits, each by itself.

        An append in an open transaction is the caller's as ever.
        """

    def append_many(self, commits: Sequence[Commit]) -> list[Exception | None]:
        """Land several executions' commits, each by itself: None where it landed, else why not.

        Commits of one execution land in the order given; one behind a refused one of the same writer is
        refused as well.
        """

    @property
    def shares_commits(self) -> bool:
        """True inside :meth:`grouping`, where appends of several threads cost little more than one."""

    def append_shared(self, commits: Sequence[Commit]) -> list[Exception | None]:
        """:meth:`append_many`, inside :meth:`grouping` together with what others append at that time.

        But in a caller's transaction, a commit that meets a row which somebody holds is let fall after a moment, and
        nobody else waits for it: its outcome is ``RowLocked``, and ``append_many`` waits with it.
        """

    def pipe(self, loop: asyncio.AbstractEventLoop) -> Pipe | None:
        """A way for an event loop to land commits by itself; None where there is none. Called where it may be waited for.

        Raises:
            django.db.Error: no connection is to be had.
        """

    def read(self, execution_id: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """The log in order, from ``after + 1``; all of it unless ``limit`` is given."""

    def read_short(self, ids: Sequence[str], *, most: int) -> dict[str, list[Event]]:
        """Several whole logs in one go, those with at most so many events; the others are left out."""

    def load(self, execution_id: str, *, after: int = 0, format: str = "") -> Loaded:
        """The log with token and wakes; those are read first, or with it, so a rival's move is refused, not missed.

        With a ``format``, from the snapshot of that format on, read with the event that it stands behind; all of
        the log if there is no such snapshot, or no such event. Whether it fits is for the caller to say.
        """

    def save_snapshot(self, snapshot: Snapshot, *, passed: int) -> None:
        """Keep a snapshot in place of the one of its format; nothing, if the execution has ended or is gone.

        Those of other formats go that stand behind no event after ``passed``.
        """

    def drop_snapshots(self, execution_id: str) -> None:
        """Remove all snapshots of an execution; they are made anew."""

    def status(self, execution_id: str) -> Status | None:
        """The status by the projection, without reading the log; None if there is no such execution."""

    def head(self, execution_id: str) -> Head | None:
        """Where an execution stands, without reading the log; None if there is no such execution."""

    def newest(self, execution_id: str) -> Ended | None:
        """The newest member of a chain, by the id of any member; None if there is no such execution.

        One that continues no other and was not continued is its own chain. The first member's id finds the
        others even where it is gone itself.
        """

    def fence(self, execution_id: str) -> int:
        """The current token; 0 if nobody ever acquired one."""

    def wakes(self, execution_id: str) -> int:
        """The count of wakes, to be read before the look that a park relies on."""

    def acquire_fence(self, execution_id: str) -> int:
        """Move the token up by one and return it; older tokens are stale from now on."""

    def acquire_fence_if(self, execution_id: str, *, fence: int, park_seq: int) -> Acquired | Stale:
        """Move the token if it is still ``fence`` and nothing has answered the park at ``park_seq`` since.

        One atomic step: an answer that lands meanwhile is either seen here, or refused with the token that
        it presents. What answers is told by :func:`~loom_django.kernel.events.is_answering`.

        Raises:
            OpenTransactionError: in a caller's transaction whose snapshot is older than this call.
        """

    def acquire_fences_at(self, looks: Sequence[Look]) -> dict[str, Taken]:
        """Move the tokens of several executions, of each that is still as it was looked at; others are left out.

        One atomic step for all, in order of id, as :meth:`acquire_fence_if` is for one. One whose row somebody else
        has locked just then may be left out. Not done again after a lost connection: what it took then is a token
        that nobody uses.

        Raises:
            OpenTransactionError: in a caller's transaction whose snapshot is older than this call.
        """

    def ensure_park_fences(self, *, after: str, limit: int) -> ParkFences:
        """See that unanswered parks have their fence rows: the next ``limit`` executions that ever parked.

        By the log, not by the projection, in order of id, from behind ``after``. Tokens that are there stay.
        For logs that other hands wrote: an append of a park makes the row by itself.
        """

    def walking_parks(self) -> AbstractContextManager[None]:
        """Around a walk by :meth:`ensure_park_fences` over a big log: what makes it cheap, taken off after it.

        Appends go on meanwhile. What a killed walk has left behind is used, or taken off.
        """

    def append_if_unchanged(self, commit: Commit, *, fence: int) -> None:
        """Land events that carry no token, if token and log are still as they were observed.

        The log is to end right before the commit's first event. For facts about what nobody runs.

        Raises:
            Changed: they are not; read again. OpenTransactionError: as for ``acquire_fence_if``.
            StoreUnavailableError: the database stayed away; nothing is known to have landed.
        """

    def ended(self, ids: Sequence[str]) -> dict[str, Event | None]:
        """The last event of each execution that has ended, None for one that lives; others are left out.

        One that was continued ends with the newest of its chain, by an event of that one.
        """

    def delete_execution(self, execution_id: str, *, last: Event | None = None) -> bool:
        """Remove a finished execution's rows. A token that was ever acquired stays; a 0 row goes.

        Messages and wakes are the chain's: they go with its last member. False, and nothing removed, if it
        is not finished or not there; with ``last``, also if its log does not end with that event: a note was
        added to it since, or it is another execution of that id.
        """


class TimerStore(Protocol):
    """The wakes that are owed."""

    def schedule(self, row: TimerRow) -> None:
        """Upsert a row; the mark of a re-drive or a deadline that is there is never dropped.

        A row that was put off is due by the new row's times again.
        """

    def claim_due(
        self, *, limit: int, hold: float, known: Known, redrive: bool, since: datetime | None = None
    ) -> list[Due]:
        """Take due rows: no other claim sees them for ``hold`` seconds (``not_before`` tells until when, for all the same).

        What is given back after that stands in line where it stood. A hold need not outlast a crash of the database.

        Those that are due longest first; with ``since``, of those that became due then or later. Rows of flows
        outside ``known``, and re-drive rows where ``redrive`` is False, are left out before the limit; a row whose
        execution is gone goes to anybody (its ``flow_id`` is ""). A row is due when wake_at, and not_before if any, have passed.
        """

    def put_off(self, row: TimerRow, *, delay: float, tries: int) -> None:
        """Move the row's ``not_before`` to ``delay`` seconds from now and set its tries.

        Nothing, if its ``not_before`` is not the given row's any more: the wake was written anew meanwhile.
        """

    def retire(self, execution_id: str, wake_at: datetime, *, claimed: TimerRow | None = None) -> None:
        """Remove one row; with ``claimed``, only if it was not written anew since that claim."""

    def retire_redrives(self, execution_id: str, *, claimed: TimerRow) -> None:
        """Remove the re-drive rows that were taken by the claim of this one, but for what was written anew since."""

    def timers(self, execution_id: str) -> list[TimerRow]:
        """All rows of an execution, soonest first."""

    def next_due(self) -> datetime | None:
        """When the soonest row will be due, to sleep until then."""


class LeaseStore(Protocol):
    """Who is alive and holds an execution."""

    def claim(self, execution_id: str, *, owner: str, token: int, ttl: float) -> bool:
        """Take a *ready* execution under a lease.

        False if it is not ready (held, parked, over), or only from a later time on.
        """

    def claim_ready(
        self,
        *,
        owner: str,
        token: int,
        ttl: float,
        limit: int,
        known: Known,
        queues: Sequence[str] | None = None,
        besides: Sequence[str] = (),
    ) -> list[Claimed]:
        """Take ready executions in a batch, by priority (high first) and age; then their fences.

        Of all queues, or of those named; ``besides`` names queues that are left out. Of one priority the queue
        comes first whose head has been ready longest.
        """

    def claim_limited(
        self, queue: str, limits: QueueLimits, *, owner: str, token: int, ttl: float, limit: int, known: Known
    ) -> QueueClaim:
        """Take ready executions of one queue within its limits, exactly, however many claim at a time."""

    def upcoming(self, *, queues: Sequence[str] | None = None) -> Upcoming:
        """When something will have to be done that need not be done yet, to sleep until then."""

    def renew(self, leases: Sequence[tuple[str, int]], *, ttl: float) -> set[str]:
        """Prolong the given (execution id, token) leases in one statement; return the ids still held."""

    def release(self, execution_id: str, token: int, *, delay: float = 0.0) -> bool:
        """Hand back: the lease goes, the execution is ready again, ``delay`` seconds from now.

        False if the token is not the holder's. A row whose ``ready_at`` lies ahead is not claimed before.
        """

    def release_all(self, ids: Sequence[str], token: int) -> set[str]:
        """Hand several back in one statement; return those that were the holder's of that token.

        A row that somebody else has locked just then may be left out.
        """

    def expired(self, *, limit: int) -> list[Lease]:
        """Leases that ended by the store's clock, oldest first."""

    def leases(self, *, limit: int) -> list[Lease]:
        """All leases, expired or not, those that end first in front."""

    def take_over(self, lease: Lease, *, owner: str, token: int, ttl: float, forced: bool = False) -> bool:
        """Take an expired lease by its token; False if it was renewed, released or taken meanwhile.

        With ``forced`` it may be alive, and renewed since; False only if it is another's by now.
        """

    def take_over_all(self, leases: Sequence[Lease], *, owner: str, token: int, ttl: float) -> set[str]:
        """Take expired leases in one statement, each by its own token and end; return the ids that were taken.

        A row that somebody else has locked just then may be left out.
        """

    def held(self, execution_id: str) -> Lease | None:
        """The lease on an execution, expired or not."""

    def stale_ready(self, *, grace: float, limit: int, known: Known = ANY_FLOW) -> list[Lease]:
        """Executions that have been ready for longer than ``grace`` seconds (owner "" and token 0).

        Those of flows outside ``known`` are left out before the limit.
        """

    def count_recovery(self, execution_id: str, *, sequence: int) -> int:
        """Count a takeover of an execution whose log ends at ``sequence``; another end starts at 1 again."""


class InboxStore(Protocol):
    """Messages, kept until a receive wants them."""

    def send(
        self,
        execution_id: str,
        *,
        name: str,
        message_id: str,
        body: str,
        wait: str = "",
        receiver: str | None = None,
        principal: str = "",
        reason: str = "",
    ) -> bool:
        """Store a message, add 1 to the receiver's wakes and leave a due re-drive row; one transaction.

        ``execution_id`` is the chain that owns inbox and wakes, ``receiver`` the member that the re-drive
        row is for (None: the same). False if a message of that id is there already (nothing changes).
        ``principal`` and ``reason`` are kept with a message that a person sent.
        """

    def send_unless_answered(
        self,
        execution_id: str,
        *,
        since: int,
        name: str,
        message_id: str,
        body: str,
        wait: str,
        chain: str | None = None,
    ) -> bool:
        """As :meth:`send`, if nothing behind the sequence ``since`` has parked, answered or ended it.

        ``execution_id`` is the member whose log is looked at; ``chain`` owns its inbox (None: the same). For an answer to be kept for a running body: one atomic step, as :meth:`EventStore.acquire_fence_if`.

        Raises:
            Changed: something has; read again. OpenTransactionError: as for ``acquire_fence_if``.
        """

    def inbox(self, execution_id: str, name: str) -> list[Message]:
        """The messages of that name that no commit has taken, oldest first."""

    def message_names(self, execution_id: str) -> set[str]:
        """The names under which untaken messages lie."""


class NodeStore(Protocol):
    """Which loops are alive; a hint for whom to hand work to, never a reason to take work from anybody."""

    def beat(self, name: str, kind: str) -> None:
        """A loop of that kind says that it is alive; those that have not for a day are forgotten."""

    def loop_seen(self, *, within: float) -> bool:
        """True if any loop has said so within that many seconds, by the store's clock."""


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """What has been decided of a schedule, and what a person last did to it.

    Everything up to ``decided_until`` is decided: started or skipped. ``revision`` counts the changes of the row.
    ``flow_id``, ``cron`` and ``time_zone`` tell how it was declared last, for whoever does not have the code.
    ``skipped_at`` and ``skipped_why`` are of the newest occurrence that was skipped.
    """

    id: str
    flow_id: str
    cron: str
    time_zone: str
    decided_until: datetime
    revision: int = 0
    paused_at: datetime | None = None
    last_execution_id: str = ""
    skipped_at: datetime | None = None
    skipped_why: str = ""
    last_act: str = ""
    acted_at: datetime | None = None
    acted_by: str = ""
    act_reason: str = ""


class ScheduleStore(Protocol):
    """What has been decided of each schedule."""

    def schedule_row(self, schedule_id: str) -> ScheduleRow | None:
        """The row as it is now; None for a schedule that was never seen."""

    def schedule_rows(self) -> list[ScheduleRow]:
        """All rows, in order of their ids."""

    def add_schedule(self, row: ScheduleRow) -> bool:
        """Insert a row; False if there is one of that id, which stays as it is."""

    def move_schedule(self, seen: ScheduleRow, row: ScheduleRow) -> bool:
        """Write a row over the one that was ``seen``; False, and nothing written, if that has moved since.

        The revision goes up by 1, whatever ``row`` says of it. In a transaction the row stays the caller's until
        its end: a rival waits, and then finds that it has moved.
        """

    def chain_runs(self, execution_id: str) -> bool:
        """True while an execution, or one that continues it, has not ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One row of those that retention looks at; ``finished_at`` is None while it has not ended."""

    id: str
    chain: str
    status: Status
    finished_at: datetime | None


class RetentionStore(Protocol):
    """What is old, what belongs to it, and how a log that was taken away is put back."""

    def ended_before(
        self, status: Status, before: datetime, *, after: tuple[datetime, str] | None = None, limit: int
    ) -> list[Ended]:
        """Those of one status that ended before an instant, oldest first; from behind (finished_at, id)."""

    def children(self, execution_id: str, *, after: str = "", limit: int) -> list[Ended]:
        """The executions that were started as its children, in order of id, from behind ``after``."""

    def chain_members(self, execution_id: str) -> list[Ended]:
        """The members of the chain that an execution belongs to, oldest first; none if it is not there."""

    def decided(self, execution_id: str) -> NewExecution | None:
        """What its start decided for good, as its row has it; None if it is not there."""

    def restore(self, commit: Commit) -> bool:
        """Put back a whole log, from its start on, with the fences, writers and instants of its events.

        ``projection`` is the fold of all of it, ``new`` what :meth:`decided` had told, ``timers`` the wakes that
        are owed. A park gets its fence row. False, and nothing written, if there is such an execution, or a log
        without one.
        """


class NoticeStore(Protocol):
    """Telling loops at once that there is something to do; they look by themselves too, so one may be lost."""

    @property
    def notifies(self) -> bool:
        """True if there is such a thing here."""

    def notify(self) -> None:
        """Tell all that listen, in a transaction of its own; on connections of loom's own threads only."""

    def listen(self) -> AbstractContextManager[Callable[[float], bool]]:
        """Listen on a connection of its own; the call waits so many seconds at most, and is True if told."""


class Store(
    EventStore,
    TimerStore,
    LeaseStore,
    InboxStore,
    NodeStore,
    ScheduleStore,
    RetentionStore,
    NoticeStore,
    Protocol,
):
    """All of it over one database, with the seams of that database's transactions."""

    def now(self) -> datetime:
        """The store's clock, asked."""

    def clock_offset(self) -> float:
        """Seconds by which the store's clock is ahead of this process's, as they were measured last."""

    def measure(self) -> None:
        """Measure the offset again."""

    def clock_is_old(self) -> bool:
        """True if :meth:`check_clock` would ask the database."""

    def check_clock(self) -> None:
        """Measure the offset again if that was some time ago, or the host's clock has been moved since.

        Called where a query more is no matter: before a body is run, and before an append from outside.
        """

    def shift_clock(self, by: timedelta) -> None:
        """Move this store's clock; for the testing kit only."""

    def transaction(self) -> AbstractContextManager[Any]:
        """A transaction on the store's database for a transactional tool and its append."""

    def in_transaction(self) -> bool:
        """True inside a caller's open transaction; TestCase's own does not count."""

    def transaction_check(self) -> Callable[[], bool]:
        """:meth:`in_transaction` for the thread, or the task, that asks for it: to be called often, and only there."""

    def leave_transaction(self) -> bool:
        """Roll back what somebody left open on this thread's connection, and close that; True if it was so.

        TestCase's own transaction is nobody's to leave.
        """

    def check_caller(self, call: str, *, answers: bool = False) -> None:
        """Refuse a writing call that could not hang on to a commit; warn where it would join none.

        Raises:
            OpenTransactionError: a transaction is open, and no atomic block is. With ``answers``, a call that
                judges the log as it is now: the caller's transaction reads from one snapshot all through.
        """

    def in_testcase(self) -> bool:
        """True where the connection lives in a TestCase transaction: one thread, one connection."""

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Call back after the caller's transaction has committed; at once if there is none."""

    def marked_for_rollback(self) -> bool:
        """True if the open transaction will roll back without an exception."""

    def is_connection_lost(self, error: BaseException) -> bool:
        """True if an error means that the connection went, so that nobody knows what was committed."""

    def close_connections(self) -> None:
        """Close this thread's connections, at its end; loom's own threads only."""

    def close_old_connections(self) -> None:
        """Drop connections of this thread that are broken or past their age; loom's own threads only."""
