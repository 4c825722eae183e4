"""How an execution that somebody should run gets run.

Every dispatcher leaves a row that says so, in the commit that made it runnable: a lease for a body that this
process runs at once, else ``ready_at``. So a process that dies in between leaves nothing lost.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from loom_django.engine import answers
from loom_django.engine.core import Engine, random_token
from loom_django.engine.journal import Journal
from loom_django.engine.outside import Appended
from loom_django.engine.run import Ended, run_execution
from loom_django.stores.base import READY, Ownership

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
    """Leaves the execution ready; a worker claims it."""

    def ticket(self) -> Ticket:
        return Ticket(READY)

    def dispatch(self, execution_id: str, ticket: Ticket, journal: Journal | None) -> None:
        """Nothing more: ``ready_at`` is the message."""


# What is to run after the body that runs here; a tool's own thread sees it too, with the rest of its context.
_queued: ContextVar[deque[Any] | None] = ContextVar("loom_queued", default=None)


class InlineDispatcher:
    """Runs the body in the caller's thread until it parks or ends.

    A body that starts or answers other executions has them run after it, in a loop, not inside it. A failing
    body never raises at the caller: how it ended is in the log.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stop: threading.Event | None = None  # set by a loop that is to end: bodies are handed back

    def ticket(self) -> Ticket:
        if self.engine.store.in_transaction() or self._queue() is not None:
            return Ticket(READY)  # nobody runs it before the commit, or before the running body ends
        token = random_token()
        return Ticket(self.engine.held(token), token)

    def dispatch(self, execution_id: str, ticket: Ticket, journal: Journal | None) -> None:
        queue = self._queue()
        item = (execution_id, ticket.token, journal)
        if queue is not None:
            queue.append(item)
            return
        queue = deque([item])
        entered = _queued.set(queue)
        try:
            while queue:
                self._run(*queue.popleft())
        finally:
            _queued.reset(entered)

    @staticmethod
    def _queue() -> deque[Any] | None:
        return _queued.get()

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


def hand_on(engine: Engine, dispatcher: Dispatcher, appended: Appended, ticket: Ticket) -> None:
    """Have an execution run whose park was just answered, once that is committed."""
    if appended.events:
        journal = appended.journal
        engine.store.on_commit(lambda: dispatcher.dispatch(journal.execution_id, ticket, journal))


def deliver_now(engine: Engine, dispatcher: Dispatcher, execution_id: str) -> None:
    """Answer a park with what was put into the inbox just now; if that fails, its re-drive row is still due."""
    try:
        ticket = dispatcher.ticket()
        hand_on(engine, dispatcher, answers.deliver(engine, execution_id, ticket.ownership), ticket)
    except Exception:
        logging.getLogger("loom_django.inbox").warning(
            "the inbox could not be delivered at once; the timer loop will",
            exc_info=True,
            extra={"execution_id": execution_id},
        )


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
