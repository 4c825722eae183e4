"""Schedules: what is due is started or skipped, once, whichever node looks first.

A start, a skip and the move of the schedule's mark are one transaction, and the mark moves by compare-and-set. So
any number of nodes may look, with clocks that disagree: what is due, and what was missed, is told by the
database's clock, and whoever comes second finds the occurrence decided.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from loom_django import signals
from loom_django.definitions import Flow
from loom_django.engine.core import Engine, to_micros
from loom_django.engine.start import Started, check_startable, start
from loom_django.errors import LoomError, StoreUnavailableError
from loom_django.kernel.keys import occurrence_id
from loom_django.scheduling import MAX_CATCH_UP, Schedule, schedules
from loom_django.services.dispatch import Dispatcher, dispatch_start
from loom_django.stores.base import ScheduleRow

log = logging.getLogger("loom_django.schedules")

Why = Literal["missed", "paused", "overlap", "catch-up-limit"]

# Occurrences that are told one by one at a look. Of a longer silence the newest are; the rest is told as a span.
MOST: Final = MAX_CATCH_UP

# A schedule is looked at when an occurrence is due, and at least every so many seconds.
LOOK_EVERY: Final = 60.0

# A schedule that fails is tried again after a pause that doubles, and reported at most every so many seconds.
PAUSE_FIRST: Final = 1.0
PAUSE_MAX: Final = 60.0
REPORT_EVERY: Final = 600.0

# How often an act on a schedule is tried again that a rival was faster than.
ATTEMPTS: Final = 20


@dataclass(frozen=True, slots=True)
class Skipped:
    """An occurrence that is not started, and why."""

    occurrence: datetime
    why: Why


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to become of everything up to ``until``.

    ``unlisted`` is True if there were more occurrences, before all of these; they are skipped too.
    """

    until: datetime
    start: tuple[datetime, ...] = ()
    skip: tuple[Skipped, ...] = ()
    unlisted: bool = False


def plan(schedule: Schedule, row: ScheduleRow, now: datetime, grace: float) -> Plan | None:
    """Decide what is due by ``now``, the store's clock; None if nothing is.

    ``grace`` is the number of seconds after which an occurrence that nobody looked at counts as missed.
    """
    due = schedule.newest(row.decided_until, now, MOST + 1)
    if not due:
        return None
    until, unlisted = due[-1], len(due) > MOST
    due = due[-MOST:]
    if row.paused_at is not None:
        return Plan(until, (), _skipped(due, "paused"), unlisted)
    late = [occurrence for occurrence in due if (now - occurrence).total_seconds() > grace]
    in_time = due[len(late) :]
    match schedule.catch_up:
        case "all":
            limit = max(schedule.catch_up_limit, len(in_time))
            return Plan(until, tuple(due[-limit:]), _skipped(due[:-limit], "catch-up-limit"), unlisted)
        case "latest" if not in_time:
            return Plan(until, (late[-1],), _skipped(late[:-1], "missed"), unlisted)
        case _:
            return Plan(until, tuple(in_time), _skipped(late, "missed"), unlisted)


def _skipped(occurrences: Sequence[datetime], why: Why) -> tuple[Skipped, ...]:
    return tuple(Skipped(occurrence, why) for occurrence in occurrences)


@dataclass(slots=True)
class _Watched:
    """A schedule as this process sees it."""

    schedule: Schedule
    look_at: int = 0  # microseconds, by the store's clock
    reconciled: bool = False  # its row tells how it is declared here
    failures: int = 0
    not_before: float = 0.0  # by the monotonic clock
    reported_at: float = float("-inf")


class ScheduleService:
    """Starts the flows of schedules when they are due."""

    name = "schedules"

    def __init__(
        self,
        engine: Engine,
        dispatcher: Callable[[], Dispatcher],
        *,
        declared: Callable[[], Sequence[Schedule]] = schedules.all,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.dispatcher = dispatcher
        self.declared = declared
        self.clock = clock
        self.started = 0
        self._watched: dict[str, _Watched] = {}

    def tick(self) -> bool:
        """Decide what is due of each schedule; True if something was.

        One that fails is reported and tried again later; the others go on.

        Raises:
            StoreUnavailableError: the database stayed away.
        """
        more = False
        for schedule in self.declared():
            watched = self._watched.get(schedule.id)
            if watched is None or watched.schedule is not schedule:
                watched = self._watched[schedule.id] = _Watched(schedule)
            if watched.look_at <= self.engine.now() and watched.not_before <= self.clock():
                more |= self._look(watched)
        return more

    def next_in(self) -> float | None:
        """In how many seconds the next schedule is to be looked at; None if there is none."""
        now = self.engine.now()
        ahead = (watched.look_at - now for watched in self._watched.values() if watched.look_at > now)
        return min((micros / 1_000_000 for micros in ahead), default=None)

    def _look(self, watched: _Watched) -> bool:
        try:
            decided = self._decide(watched)
        except StoreUnavailableError:
            raise
        except Exception as exc:
            if self.engine.store.is_connection_lost(exc):
                raise
            self._failed(watched, exc)
            return False
        watched.failures = 0
        return decided

    def _decide(self, watched: _Watched) -> bool:
        schedule, store = watched.schedule, self.engine.store
        row = seen(self.engine, schedule, reconcile=not watched.reconciled)
        now = store.now()
        watched.reconciled = True
        planned = plan(schedule, row, now, self.engine.settings().MISFIRE_GRACE)
        if planned is None:
            watched.look_at = self._next_look(schedule, max(row.decided_until, now), now)
            return False
        try:
            self.started += self._carry_out(schedule, row, planned)
        except Exception as exc:
            # A stricter isolation than Django's default breaks the transaction of whoever comes second.
            if store.is_connection_lost(exc) or not self._overtaken(row):
                raise
            log.debug("another node has decided: %s", exc, extra={"schedule_id": schedule.id})
        return True

    def _overtaken(self, row: ScheduleRow) -> bool:
        now = self.engine.store.schedule_row(row.id)
        return now is not None and now.revision != row.revision

    def _next_look(self, schedule: Schedule, after: datetime, now: datetime) -> int:
        latest = now + timedelta(seconds=LOOK_EVERY)
        return to_micros(min([latest, *schedule.following(after)]))

    def _carry_out(self, schedule: Schedule, row: ScheduleRow, planned: Plan) -> int:
        """Do what is planned, unless another node has; return how many were started."""
        store = self.engine.store
        # Before the transaction: what is wrong with the declaration is said without one.
        ready = startable(schedule) if planned.start else None
        started: list[Started] = []
        skipped = list(planned.skip)
        moved = replace(row, decided_until=planned.until)
        with store.transaction():
            if not store.move_schedule(row, moved):
                log.debug("another node has decided", extra={"schedule_id": schedule.id})
                return 0
            store.on_commit(lambda: report(schedule, started, skipped, row, unlisted=planned.unlisted))
            last = row.last_execution_id
            if ready is not None:
                for occurrence in planned.start:
                    if schedule.overlap == "skip" and last and store.chain_runs(last):
                        skipped.append(Skipped(occurrence, "overlap"))
                        continue
                    execution_id = execution_id_of(schedule.id, occurrence)
                    dispatcher = self.dispatcher()
                    one = start_run(self.engine, dispatcher, *ready, execution_id, scheduled_at=occurrence)
                    last = one.execution_id
                    started.append(one)
            _note(self.engine, replace(moved, revision=row.revision + 1), last, skipped)
        return len(started)

    def _failed(self, watched: _Watched, exc: Exception) -> None:
        watched.not_before = self.clock() + min(PAUSE_MAX, PAUSE_FIRST * 2 ** min(watched.failures, 10))
        watched.failures += 1
        if watched.failures > 1 and self.clock() - watched.reported_at < REPORT_EVERY:
            return
        watched.reported_at = self.clock()
        log.error(
            'schedule "%s" failed; trying again: %s',
            watched.schedule.id,
            exc,
            # An error of loom's own says all there is to say.
            exc_info=None if isinstance(exc, LoomError) else exc,
            extra={"schedule_id": watched.schedule.id},
        )


# What services and acts share.


def execution_id_of(schedule_id: str, occurrence: datetime) -> str:
    """The id of an occurrence's execution: the same on every node."""
    return occurrence_id(schedule_id, to_micros(occurrence) // 1000)


def seen(engine: Engine, schedule: Schedule, *, reconcile: bool = False) -> ScheduleRow:
    """The row of a schedule. One that is seen for the first time begins now.

    With ``reconcile`` the row tells how the schedule is declared here; what was decided stays.
    """
    store = engine.store
    declared = (schedule.flow_id, schedule.cron, schedule.time_zone)
    row = store.schedule_row(schedule.id)
    if row is None:
        new = ScheduleRow(schedule.id, *declared, decided_until=store.now())
        store.add_schedule(new)
        row = store.schedule_row(schedule.id) or new
    changed = replace(row, flow_id=schedule.flow_id, cron=schedule.cron, time_zone=schedule.time_zone)
    if reconcile and changed != row and store.move_schedule(row, changed):
        row = replace(changed, revision=row.revision + 1)
    return row


def startable(schedule: Schedule) -> tuple[Flow[..., Any], dict[str, Any]]:
    """The flow that a schedule starts, and its input.

    Raises:
        FlowNotFoundError: it is not registered here. InvalidInputError: it is pinned, or takes other arguments.
    """
    flow = schedule.flow()
    check_startable(flow)
    return flow, schedule.bound(flow)


def start_run(
    engine: Engine,
    dispatcher: Dispatcher,
    flow: Flow[..., Any],
    given: Mapping[str, Any],
    execution_id: str,
    *,
    scheduled_at: datetime | None = None,
) -> Started:
    """Start one execution in the open transaction; it is dispatched after the commit."""
    ticket = dispatcher.ticket()
    options = flow.using(execution_id=execution_id).options
    started = start(engine, flow, given, options, ticket.ownership, scheduled_at=scheduled_at)
    dispatch_start(engine, dispatcher, started, ticket)
    return started


def _note(engine: Engine, row: ScheduleRow, last: str, skipped: Sequence[Skipped]) -> None:
    newest = max(skipped, key=lambda one: one.occurrence, default=None)
    noted = replace(row, last_execution_id=last)
    if newest is not None:
        noted = replace(noted, skipped_at=newest.occurrence, skipped_why=newest.why)
    if noted != row:
        engine.store.move_schedule(row, noted)


def report(
    schedule: Schedule,
    started: Sequence[Started],
    skipped: Sequence[Skipped],
    row: ScheduleRow,
    *,
    unlisted: bool,
) -> None:
    """Say what was decided: lines in the log, and a signal for each occurrence that was skipped."""
    about = {"schedule_id": schedule.id}
    for one in started:
        log.info("a schedule's flow is started", extra={**about, "execution_id": one.execution_id})
    for why in sorted({one.why for one in skipped}):
        times = [one.occurrence.isoformat() for one in skipped if one.why == why]
        log.log(
            logging.INFO if why == "paused" else logging.WARNING,
            'schedule "%s" skipped %d (%s): %s',
            schedule.id,
            len(times),
            why,
            times[0] if len(times) == 1 else f"{times[0]} to {times[-1]}",
            extra=about,
        )
    if unlisted:
        log.warning(
            'schedule "%s" skipped all of its earlier occurrences since %s',
            schedule.id,
            row.decided_until.isoformat(),
            extra=about,
        )
    if signals.schedule_skipped.has_listeners():
        for item in skipped:
            _send(schedule, item)


def _send(schedule: Schedule, item: Skipped) -> None:
    sender, version = _sender(schedule)
    about = {
        "schedule_id": schedule.id,
        "occurrence": item.occurrence,
        "why": item.why,
        "execution_id": execution_id_of(schedule.id, item.occurrence),
        "flow_id": schedule.flow_id,
        "version": version,
        "sequence": None,
    }
    for receiver, outcome in signals.schedule_skipped.send_robust(sender, **about):
        if isinstance(outcome, Exception):
            log.error("a receiver failed: %r", receiver, exc_info=outcome, extra={"schedule_id": schedule.id})


def _sender(schedule: Schedule) -> tuple[Any, int | None]:
    try:
        flow = schedule.flow()
    except LoomError:
        from loom_django.models import Execution

        return Execution, None
    return flow, flow.version


# What a person, or a program, does to a schedule.


def pause(engine: Engine, schedule_id: str, *, reason: str, principal: str | None) -> bool:
    """Skip what falls due from now on; False if it was paused already.

    Raises:
        ScheduleNotFoundError: it is not declared here, and never was seen.
    """
    return _change(
        engine, schedule_id, "pause", reason, principal, lambda row, now: replace(row, paused_at=now)
    )


def resume(engine: Engine, schedule_id: str, *, reason: str, principal: str | None) -> bool:
    """Start what falls due from now on; what fell due until then is skipped. False if it was not paused.

    Raises:
        ScheduleNotFoundError: it is not declared here, and never was seen.
    """
    schedule = schedules.get(schedule_id)
    skipped: tuple[Skipped, ...] = ()
    before: ScheduleRow | None = None

    def change(row: ScheduleRow, now: datetime) -> ScheduleRow:
        nonlocal skipped, before
        before = row
        due = [] if schedule is None else schedule.newest(row.decided_until, now, MOST)
        skipped = _skipped(due, "paused")
        thawed = replace(row, paused_at=None, decided_until=max(row.decided_until, now))
        return replace(thawed, skipped_at=due[-1], skipped_why="paused") if due else thawed

    done = _change(engine, schedule_id, "resume", reason, principal, change)
    if done and skipped and schedule is not None and before is not None:
        row, told = before, schedule
        engine.store.on_commit(lambda: report(told, (), skipped, row, unlisted=False))
    return done


def trigger(
    engine: Engine, dispatcher: Dispatcher, schedule_id: str, *, reason: str, principal: str | None
) -> Started:
    """Start the schedule's flow now, beside its occurrences, paused or not, whatever else runs.

    Raises:
        ScheduleNotFoundError: it is not declared here.
        FlowNotFoundError, InvalidInputError: its flow is not registered, is pinned, or takes other arguments.
    """
    schedule = schedules.find(schedule_id)
    flow, given = startable(schedule)
    store = engine.store
    for _ in range(ATTEMPTS):
        row = seen(engine, schedule)
        now = store.now()
        with store.transaction():
            execution_id = _free_id(engine, schedule_id, now)
            acted = _acted(row, "trigger", reason, principal, now)
            if store.move_schedule(row, replace(acted, last_execution_id=execution_id)):
                return start_run(engine, dispatcher, flow, given, execution_id)
    raise _contended(schedule_id)


def _free_id(engine: Engine, schedule_id: str, now: datetime) -> str:
    """An id between two occurrences, which lie on whole seconds, that no execution has."""
    ms = to_micros(now) // 1000
    while ms % 1000 == 0 or engine.store.status(occurrence_id(schedule_id, ms)) is not None:
        ms += 1
    return occurrence_id(schedule_id, ms)


def _change(
    engine: Engine,
    schedule_id: str,
    act: Literal["pause", "resume"],
    reason: str,
    principal: str | None,
    change: Callable[[ScheduleRow, datetime], ScheduleRow],
) -> bool:
    store = engine.store
    for _ in range(ATTEMPTS):
        row = known(engine, schedule_id)
        if (row.paused_at is None) != (act == "pause"):
            return False
        now = store.now()
        if store.move_schedule(row, _acted(change(row, now), act, reason, principal, now)):
            return True
    raise _contended(schedule_id)


def known(engine: Engine, schedule_id: str) -> ScheduleRow:
    """The row of a schedule that is declared here, or of one that vanished from the code.

    Raises:
        ScheduleNotFoundError: neither.
    """
    row = engine.store.schedule_row(schedule_id)
    return row if row is not None else seen(engine, schedules.find(schedule_id))


def _acted(row: ScheduleRow, act: str, reason: str, principal: str | None, now: datetime) -> ScheduleRow:
    return replace(row, last_act=act, acted_at=now, acted_by=principal or "", act_reason=reason)


def _contended(schedule_id: str) -> StoreUnavailableError:
    return StoreUnavailableError(f"schedule {schedule_id!r} kept being changed by others", ATTEMPTS)
