"""How an execution that somebody should run gets run.

Every dispatcher leaves a row that says so, in the commit that made it runnable: a lease for a body that this
process runs at once, else ``ready_at``. So a process that dies in between leaves nothing lost.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from django.utils.module_loading import import_string

from loom_django.engine.core import Engine, random_token
from loom_django.engine.journal import Journal
from loom_django.engine.outside import Appended
from loom_django.engine.run import Ended, run_execution
from loom_django.engine.start import Started
from loom_django.errors import OpenTransactionError
from loom_django.kernel.state import Status
from loom_django.stores.base import READY, Lease, Ownership

log = logging.getLogger("loom_django.dispatch")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a dispatcher decided before the commit: who owns the execution after it."""

    ownership: Ownership
    token: int | None = None


class Dispatcher(Protocol):
    def ticket(self) -> Ticket:
        """Decide the owner, to be written with what makes the execution runnable."""

    def dispatch(self, execution_id: str, ticket: Ticket, journal: Journal | None) -> None:
        """Have it run, now that this is committed."""


class WorkerDispatcher:
    """Leaves the execution ready; a worker claims it. ``ring`` tells those that are idle."""

    def __init__(self, ring: Callable[[], None] = lambda: None) -> None:
        self.ring = ring

    def ticket(self) -> Ticket:
        return Ticket(READY)

    def dispatch(self, execution_id: str, ticket: Ticket, journal: Journal | None) -> None:
        """Only make it quicker: ``ready_at`` is the message."""
        self.ring()


# What is to run after the body that runs here; a tool's own thread sees it too, with the rest of its context.
_queued: ContextVar[deque[Callable[[], None]] | None] = ContextVar("loom_queued", default=None)


def in_turn(run: Callable[[], None]) -> None:
    """Run a body in this thread: now, or after the one that is running in it."""
    queue = _queued.get()
    if queue is not None:
        queue.append(run)
        return
    queue = deque([run])
    entered = _queued.set(queue)
    try:
        while queue:
            queue.popleft()()
    finally:
        _queued.reset(entered)


class InlineDispatcher:
    """Runs the body in the caller's thread until it parks or ends.

    A body that starts or answers other executions has them run after it, in a loop, not inside it. A failing
    body never raises at the caller: how it ended is in the log.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stop: threading.Event | None = None  # set by a loop that is to end: bodies are handed back

    def ticket(self) -> Ticket:
        if self.engine.store.in_transaction() or _queued.get() is not None:
            return Ticket(READY)  # nobody runs it before the commit, or before the running body ends
        token = random_token()
        return Ticket(self.engine.held(token), token)

    def dispatch(self, execution_id: str, ticket: Ticket, journal: Journal | None) -> None:
        in_turn(lambda: self._run(execution_id, ticket.token, journal))

    def _run(self, execution_id: str, token: int | None, journal: Journal | None) -> None:
        if token is None:
            journal = None  # others may have written since
            token = claim_one(self.engine, execution_id)
            if token is None:
                return
        fence = journal.fence if journal is not None else self.engine.store.fence(execution_id) or None
        run_logged(
            lambda: run_execution(
                self.engine, execution_id, token=token, fence=fence, journal=journal, stop=self.stop
            ),
            execution_id,
        )


# What makes the task; named and not imported, since it stands above this room.
MAKE_TASK: Final = "loom_django.tasks.run_task"

# An execution that nobody takes up is enqueued again after READY_GRACE, then each time after twice as long, in
# seconds at most:
REMIND_MAX: Final = 3600.0

# Of so many executions that nobody has taken up since they were enqueued again, others are not enqueued again.
REMINDED_MAX: Final = 1000


@dataclass(slots=True)
class _Reminder:
    """When an execution may be enqueued again, by the store's clock in microseconds, and how often it was."""

    due: int
    count: int


class TasksDispatcher:
    """Leaves the execution ready and has a backend of Django's Tasks told of it; the task claims it.

    The message only makes it quicker, for the row is what counts. A message that is lost, or that could not be
    sent, is sent again by recovery; whoever comes second, or late, finds nothing to claim.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reminders: dict[tuple[str, datetime], _Reminder] = {}

    def ticket(self) -> Ticket:
        return Ticket(READY)

    def dispatch(self, execution_id: str, ticket: Ticket, journal: Journal | None) -> None:
        self._enqueue(execution_id)

    def remind(self, stale: Callable[[int], Sequence[Lease]], limit: int) -> int:
        """Enqueue again what has been ready for long, ``limit`` at most; return how many.

        A message may be lost, or wait in a queue that is long: nobody can tell. So the copies are bounded. How
        often an execution was enqueued again is known to this process only; nothing is written.

        Args:
            stale: executions that have been ready for longer than ``READY_GRACE``, so many at most.
        """
        found = [(lease.execution_id, lease.until) for lease in stale(limit + len(self._reminders))]
        # What is not found any more was taken up.
        self._reminders = {key: self._reminders[key] for key in found if key in self._reminders}
        sent = 0
        for key in found:
            if sent < limit and self._due(key):
                if not self._enqueue(key[0]):
                    break  # the next pass tries again; until then nobody waits for a backend that is away
                self._note(key)
                sent += 1
        return sent

    def _due(self, key: tuple[str, datetime]) -> bool:
        reminder = self._reminders.get(key)
        if reminder is None:
            return len(self._reminders) < REMINDED_MAX
        return reminder.due <= self.engine.now()

    def _note(self, key: tuple[str, datetime]) -> None:
        earlier = self._reminders.get(key)
        count = earlier.count + 1 if earlier else 1
        pause = min(REMIND_MAX, self.engine.settings().READY_GRACE * 2.0 ** min(count, 20))
        self._reminders[key] = _Reminder(self.engine.now() + round(pause * 1_000_000), count)

    def _enqueue(self, execution_id: str) -> bool:
        try:
            import_string(MAKE_TASK)().enqueue(execution_id=execution_id)
        except Exception as exc:
            log.warning(
                "an execution could not be enqueued; it stays ready, and recovery enqueues it again: %s",
                exc,
                exc_info=exc,
                extra={"execution_id": execution_id},
            )
            return False
        return True

    def run(self, execution_id: str) -> str:
        """What the task does: claim the execution and run its body until it parks or ends.

        Returns:
            What became of it, in a word: a value of :class:`Ended`; ``"not-ready"`` if there was nothing to
            claim; ``"broken-off"`` after an error of the engine's own, which was logged; ``"queued"`` if a body
            is running in this thread and this one comes after it.

        Raises:
            OpenTransactionError: the task is run inside a transaction.
            KeyboardInterrupt, SystemExit: this process is to end; the execution was handed back before.
        """
        if self.engine.store.in_transaction():
            raise OpenTransactionError(
                "a task that runs a flow",
                "its steps must be durable one by one",
                "Use a task backend that runs its tasks outside atomic().",
            )
        came_of_it: list[str] = []
        in_turn(lambda: came_of_it.append(self._run(execution_id)))
        return came_of_it[0] if came_of_it else "queued"

    def _run(self, execution_id: str) -> str:
        token = claim_one(self.engine, execution_id)
        if token is None:
            return "not-ready"
        try:
            ended = run_logged(
                lambda: run_execution(
                    self.engine,
                    execution_id,
                    token=token,
                    fence=self.engine.store.acquire_fence(execution_id),
                ),
                execution_id,
            )
        except BaseException:
            self._enqueue(execution_id)  # it was handed back to whoever goes on
            raise
        return "broken-off" if ended is None else ended.value


def hand_on(engine: Engine, dispatcher: Dispatcher, appended: Appended, ticket: Ticket) -> None:
    """Have an execution run whose park was just answered, once that is committed; not one that stays at a gate."""
    if appended.events and appended.journal.fold.status is Status.RUNNING:
        journal = appended.journal
        engine.store.on_commit(lambda: dispatcher.dispatch(journal.execution_id, ticket, journal))


def dispatch_start(engine: Engine, dispatcher: Dispatcher, started: Started, ticket: Ticket) -> None:
    """Have a new execution run once its start is committed, or leave it ready until its time has come.

    Raises:
        StoreUnavailableError: a start that was to land with its body's first facts did not.
    """
    journal = started.journal
    try:
        if started.later:
            engine.store.on_commit(engine.ring)
        elif started.created:
            engine.store.on_commit(lambda: dispatcher.dispatch(started.execution_id, ticket, journal))
    except BaseException:  # an interrupt goes on to the caller, whatever becomes of the start
        try:
            _see_it_stands(journal)
        except Exception:
            log.exception("a start could not be recorded", extra={"execution_id": started.execution_id})
        raise
    _see_it_stands(journal)


def _see_it_stands(journal: Journal | None) -> None:
    """Whatever kept a body from its first facts: what was started is there."""
    if journal is not None:
        journal.open_alone()


def claim_one(engine: Engine, execution_id: str) -> int | None:
    """Take a ready execution under a lease of this process; None if somebody else has it."""
    token = random_token()
    ttl = engine.settings().LEASE_TTL
    taken = engine.store.claim(execution_id, owner=engine.identity.name, token=token, ttl=ttl)
    return token if taken else None


def run_logged(run: Callable[[], Ended], execution_id: str) -> Ended | None:
    """Run a body; an error of the engine's own is logged, and the lease's end hands the execution on."""
    try:
        return run()
    except Exception:
        log.exception("a body run broke off", extra={"execution_id": execution_id})
        return None
