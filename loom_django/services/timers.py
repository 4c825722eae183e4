"""The wakes that are owed: due rows are taken, judged against the log, and answered in one append each.

A row goes only when its wait is no longer pending. A row that cannot be served now is put off, so that it
neither vanishes nor stands in the way of others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from loom_django.engine import answers
from loom_django.engine.core import Engine, to_micros
from loom_django.errors import (
    FlowCodeMismatchError,
    RedriveExhaustedError,
    ResumeContendedError,
    StoreUnavailableError,
)
from loom_django.kernel.backoff import redrive_delay
from loom_django.services import announce
from loom_django.services.dispatch import Dispatcher, InlineDispatcher, hand_on
from loom_django.services.redrive import ArrivalRedriver, Redriver
from loom_django.services.worker import SHORT
from loom_django.stores.base import Due, TimerRow

log = logging.getLogger("loom_django.timers")

BATCH: Final = 50

# Seconds for which a taken row is nobody else's; a loop that died gives it back after that.
HOLD: Final = 10.0

# For so many seconds a pass over many due rows goes on behind what it has taken, and is not made to look for what
# was written before that.
PASS: Final = 1.0

# A row that was contended so often is reported once, and tried again only every so many seconds.
MAX_TRIES: Final = 8
PUT_OFF: Final = 600.0


class TimerService:
    """Takes due timer rows and wakes what waits for them."""

    name = "timers"

    def __init__(
        self,
        engine: Engine,
        dispatcher: Callable[[], Dispatcher],
        *,
        limit: int = BATCH,
        redrivers: Sequence[Redriver] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.dispatcher = dispatcher
        self.limit = limit
        self.redrivers = (ArrivalRedriver(engine, dispatcher),) if redrivers is None else tuple(redrivers)
        self.clock = clock
        self.fired = 0
        self._since: datetime | None = None
        self._pass_ends = 0.0

    def tick(self) -> bool:
        """Serve one batch of due rows; True if there were any, or may be more: what woke is to be run.

        Raises:
            StoreUnavailableError: the database stayed away; the rows are due again after their hold.
        """
        went_on = self._since is not None
        dues = self._claim()
        fired = self._fired_together(dues)
        for alike in _by_execution([due for due in dues if due.row.execution_id not in fired]):
            if len(alike) == 1 or not self._served_together(alike):
                for due in alike:
                    self._serve(due)
        return bool(dues) or went_on

    def _claim(self) -> list[Due]:
        """Take the next rows; while there are many, behind the last ones, whose old places the index still holds."""
        if self.clock() >= self._pass_ends:
            self._since, self._pass_ends = None, self.clock() + PASS
        dues = self.engine.store.claim_due(
            limit=self.limit,
            hold=HOLD,
            known=self.engine.known(),
            redrive=bool(self.redrivers),
            since=self._since,
        )
        self._since = dues[-1].at if len(dues) == self.limit else None
        return dues

    def serve_one(self, execution_id: str, flow_id: str, version: int) -> None:
        """Serve the due rows of one execution, whether or not they are held back."""
        store = self.engine.store
        now = store.now()
        for row in store.timers(execution_id):
            if row.wake_at <= now:
                self._serve(Due(row, now, flow_id, version, row.wake_at))

    def _fired_together(self, dues: Sequence[Due]) -> set[str]:
        """Answer the plain wakes of a batch together; return whose was answered.

        Not where the bodies are run at once, each under a lease from its answer on; and of an execution with several
        due rows each goes by itself, in order.
        """
        dispatcher = self.dispatcher()
        rows = Counter(due.row.execution_id for due in dues)
        plain = {
            due.row.execution_id: due for due in dues if rows[due.row.execution_id] == 1 and _is_plain(due)
        }
        if len(plain) < 2 or isinstance(dispatcher, InlineDispatcher):
            return set()
        tickets = {execution_id: dispatcher.ticket() for execution_id in plain}
        wakes = {
            execution_id: (due.row.wake_at, tickets[execution_id].ownership)
            for execution_id, due in plain.items()
        }
        try:
            fired = answers.fire_timers(self.engine, wakes, most=SHORT)
        except StoreUnavailableError:
            raise
        except Exception as exc:
            if self.engine.store.is_connection_lost(exc):
                raise
            log.debug("each is woken by itself: %s", exc)
            return set()
        self.fired += len(fired)
        for execution_id, appended in fired.items():
            hand = partial(hand_on, self.engine, dispatcher, appended, tickets[execution_id])
            self._guarded(plain[execution_id], hand)
        return set(fired)

    def _served_together(self, dues: Sequence[Due]) -> bool:
        """Serve re-drive rows of one execution with one look, if nothing of its park is over; False leaves them."""
        execution_id, store = dues[0].row.execution_id, self.engine.store
        at = {to_micros(due.row.wake_at) for due in dues}
        try:
            if not self._in_vain(execution_id, at):
                return False
            self._redrive(execution_id)
        except StoreUnavailableError:
            raise
        except Exception as exc:
            if store.is_connection_lost(exc):
                raise
            return False  # it is told of each row by itself
        store.retire_redrives(execution_id, claimed=dues[0].row)
        return True

    def _serve(self, due: Due) -> None:
        self._guarded(due, partial(self._fire, due))

    def _guarded(self, due: Due, act: Callable[[], None]) -> None:
        """Do it for one row; a failure puts that off, and stops no other."""
        try:
            act()
        except StoreUnavailableError:
            raise
        except ResumeContendedError as exc:
            self._contended(due, exc)
        except Exception as exc:
            if self.engine.store.is_connection_lost(exc):
                raise
            self._put_off(due, PUT_OFF, exc, report=due.row.tries == 0)

    def _fire(self, due: Due) -> None:
        row, store = due.row, self.engine.store
        if not due.flow_id:
            store.retire(row.execution_id, row.wake_at, claimed=row)
            return
        if row.deadline:
            answers.expire(self.engine, row.execution_id)
            store.retire(row.execution_id, row.wake_at, claimed=row)
            return
        woken = False
        if row.redrive is None or not self._in_vain(row.execution_id, (to_micros(row.wake_at),)):
            woken = self._wake(row)
        if row.redrive is not None and not woken:
            woken = self._redrive(row.execution_id)
        if row.redrive is not None or not woken:
            # Its wait is not pending any more, or what it stands for has been looked at.
            store.retire(row.execution_id, row.wake_at, claimed=row)

    def _in_vain(self, execution_id: str, at: Collection[int]) -> bool:
        """Tell that nothing of its park is over, by itself or ``at`` these instants; False says nothing."""
        engine = self.engine
        return engine.watch.in_vain(engine, execution_id, engine.store.head(execution_id), at=at)

    def _wake(self, row: TimerRow) -> bool:
        """Answer the waits of that instant; the append takes the row along."""
        dispatcher = self.dispatcher()
        ticket = dispatcher.ticket()
        appended = answers.fire_timer(self.engine, row.execution_id, row.wake_at, ticket.ownership)
        self.fired += bool(appended.events)
        hand_on(self.engine, dispatcher, appended, ticket)
        return bool(appended.events)

    def _redrive(self, execution_id: str) -> bool:
        """Show a re-drive row around; True if one of the re-drivers had something to do.

        Raises:
            ResumeContendedError: one of them is to be asked again.
        """
        for redriver in self.redrivers:
            try:
                told = redriver.redrive(execution_id)
            except (StoreUnavailableError, ResumeContendedError, FlowCodeMismatchError):
                raise
            except Exception as exc:
                if self.engine.store.is_connection_lost(exc):
                    raise
                raise ResumeContendedError(execution_id, 1) from exc
            if told == "contended":
                raise ResumeContendedError(execution_id, 1)
            if told == "done":
                self.fired += 1
                return True
        return False

    def _contended(self, due: Due, exc: Exception) -> None:
        tries = due.row.tries + 1
        if tries < MAX_TRIES:
            delay = redrive_delay(tries, self.engine.draw())
            self.engine.store.put_off(due.row, delay=delay, tries=tries)
            return
        exhausted = RedriveExhaustedError(due.row.execution_id, tries)
        exhausted.__cause__ = exc
        self._put_off(due, PUT_OFF, exhausted, report=tries == MAX_TRIES)
        if tries == MAX_TRIES:
            announce.redrive_exhausted(self.engine.store, due, tries)

    def _put_off(self, due: Due, delay: float, exc: Exception, *, report: bool) -> None:
        row = due.row
        self.engine.store.put_off(row, delay=delay, tries=row.tries + 1)
        if report:
            log.error(
                "a wake is put off: %s",
                exc,
                exc_info=exc,
                extra={"execution_id": row.execution_id, "wake_at": row.wake_at.isoformat()},
            )


def _is_plain(due: Due) -> bool:
    """True for the wake of a wait, of an execution that is there."""
    return due.row.redrive is None and not due.row.deadline and bool(due.flow_id)


def _by_execution(dues: Sequence[Due]) -> Iterable[list[Due]]:
    """The re-drive rows of an execution together, every other row by itself."""
    groups: dict[object, list[Due]] = {}
    for number, due in enumerate(dues):
        told_alike = due.row.redrive is not None and not due.row.deadline and due.flow_id
        groups.setdefault(due.row.execution_id if told_alike else number, []).append(due)
    return groups.values()
