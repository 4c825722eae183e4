"""Every human act goes through here: who may, what it will append, the append with its principal and reason.

``loom.*`` is code and trusted; a person is not. An act is refused without its own permission, and the refusal is
a fact of the log (EXECUTION_DENIED, once per person, act and park). An act names the question that it answers: if
that question is over, nothing is appended, and the refusal says who answered it and when.

With ``dry_run=True`` an act is judged in just the same way and appends nothing: what it returns is what it would
append. A denial must survive the transaction that it is raised in: call :func:`require` before opening one.
"""

from __future__ import annotations

import dataclasses
import enum
import getpass
import logging
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from loom_django.definitions import Tool
from loom_django.engine import answers, forks, inbox, moves
from loom_django.engine.answers import MISSING
from loom_django.engine.code import flow_for
from loom_django.engine.core import Engine, from_micros
from loom_django.engine.outside import Appended, Landing, append_note, load_existing
from loom_django.engine.start import Started
from loom_django.errors import (
    ExecutionNotFoundError,
    FlowCodeMismatchError,
    InvalidInputError,
    LoomError,
    OperatorDeniedError,
    ResumeRefusedError,
)
from loom_django.kernel import codec, keys
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import (
    ON_DIVERGED,
    ON_ERROR,
    ON_MESSAGE,
    ON_POISONED,
    FrameStatus,
    Status,
    is_reserved,
)
from loom_django.services import recovery, typed_json
from loom_django.services.dispatch import (
    Dispatcher,
    InlineDispatcher,
    Ticket,
    WorkerDispatcher,
    dispatch_start,
)
from loom_django.services.redrive import look_now
from loom_django.services.timers import TimerService
from loom_django.stores.base import READY, Commit, Ownership, SequenceOccupied, Store

if typing.TYPE_CHECKING:
    from loom_django.engine.journal import Journal

log = logging.getLogger("loom_django.operators")

MAX_REASON: Final = 2000

# How far back a repeated denial is looked for where there is no park: a minute, and so many events.
_DENIAL_MICROS: Final = 60_000_000
_DENIAL_EVENTS: Final = 500


class Host(Protocol):
    """What an act needs of the runtime."""

    @property
    def engine(self) -> Engine: ...

    @property
    def dispatcher(self) -> Dispatcher: ...


class Act(enum.StrEnum):
    """What a person may do; each has a permission of its own."""

    RESOLVE_STEP = "resolve_step"
    RESUME_EXECUTION = "resume_execution"
    CANCEL_EXECUTION = "cancel_execution"
    RETRY_ERROR = "retry_error"
    RETRY_DIVERGED = "retry_diverged"
    RECOVER_EXECUTION = "recover_execution"
    MOVE_EXECUTION = "move_execution"
    SEND_MESSAGE = "send_message"
    FORK_EXECUTION = "fork_execution"
    RERUN_EXECUTION = "rerun_execution"
    WAKE_TIMER = "wake_timer"
    RECORD_OUTCOME = "record_outcome"
    PAUSE_SCHEDULE = "pause_schedule"
    TRIGGER_SCHEDULE = "trigger_schedule"

    @property
    def permission(self) -> str:
        # What became of an effect is said by the same people, before the end and after it.
        return f"loom.{Act.RESOLVE_STEP if self is Act.RECORD_OUTCOME else self}"


@dataclass(frozen=True, slots=True)
class Operator:
    """Who acts. Without a ``user`` it is somebody at a shell, who needs no permission."""

    name: str
    user: Any = None

    @classmethod
    def of(cls, user: Any) -> Operator:
        return cls(str(user.get_username()), user)

    @classmethod
    def at_shell(cls) -> Operator:
        try:
            name = getpass.getuser()
        except (OSError, KeyError):  # no such user, as in a container
            name = "unknown"
        return cls(f"shell:{name}")

    def may(self, act: Act) -> bool:
        return self.user is None or bool(self.user.has_perm(act.permission))


@dataclass(frozen=True, slots=True)
class Copied:
    """The execution that a fork or a rerun made: ``steps`` it has, over so many copied ``events``.

    ``created`` is False if this very copy had been made before; then nothing was done. ``execution_id`` is ""
    where an id would be made up.
    """

    execution_id: str
    flow_id: str
    version: int
    created: bool
    steps: tuple[str, ...] = ()
    events: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """What an act appended, or with ``dry_run`` would append.

    ``events`` is empty if nothing is appended to the execution's log. ``runs`` tells who goes on with the
    execution, or with the new one: this process after the commit, a worker, or nobody. ``fresh_key`` is the key
    that a retry-fresh verdict gives the step. ``kept`` says that the flow is running, and takes the answer when
    it comes to the wait. ``started`` is what a fork or a rerun made, ``message`` what became of a message,
    ``wakes`` how many wakes are tried now.
    """

    act: Act
    execution_id: str
    events: tuple[Event, ...]
    runs: typing.Literal["here", "worker", "nobody"]
    fresh_key: str = ""
    kept: bool = False
    started: Copied | None = None
    message: typing.Literal["", "taken", "kept", "known"] = ""
    wakes: int = 0

    @property
    def sequence(self) -> int | None:
        return self.events[-1].sequence if self.events else None


# Permission.


def require(loom: Host, operator: Operator, act: Act, execution_id: str) -> None:
    """Refuse a person without the permission for an act, and record the refusal.

    Raises:
        OperatorDeniedError: with the permission that is missing.
    """
    if operator.may(act):
        return
    try:
        _record_denial(loom.engine, operator, act, execution_id)
    except ExecutionNotFoundError:
        pass  # no log to record it in; and whether there is one is none of their business
    except Exception:
        log.exception("a denial could not be recorded", extra=_about(operator, act, execution_id))
    log.warning("an act was denied", extra=_about(operator, act, execution_id))
    raise OperatorDeniedError(act.permission, operator.name, execution_id)


def _record_denial(engine: Engine, operator: Operator, act: Act, execution_id: str) -> None:
    name = answers.principal_name(operator.name)

    def compose(journal: Journal) -> Landing | None:
        park = journal.fold.park_sequence
        # Read behind the look at the log: a rival's equal denial is seen here, or refuses the append.
        if _denied_before(engine, journal, name, act, park):
            return None
        journal.record(
            Kind.EXECUTION_DENIED,
            {"principal": name, "act": act.value, "permission": act.permission, "park": park},
        )
        return Landing()

    append_note(engine, execution_id, compose)


def _denied_before(engine: Engine, journal: Journal, name: str | None, act: Act, park: int | None) -> bool:
    after = park if park is not None else max(0, journal.fold.last_sequence - _DENIAL_EVENTS)
    since = 0 if park is not None else journal.stamp() - _DENIAL_MICROS
    return any(
        event.kind == Kind.EXECUTION_DENIED
        and event.data.get("principal") == name
        and event.data.get("act") == act.value
        and event.data["at"] > since
        for event in engine.store.read(journal.execution_id, after=after)
    )


def _about(operator: Operator, act: Act, execution_id: str) -> dict[str, str]:
    return {"principal": operator.name, "act": act.value, "execution_id": execution_id}


# The acts.


def resolve_step(
    loom: Host,
    operator: Operator,
    execution_id: str,
    step_id: str,
    resolution: str,
    *,
    reason: str,
    output: Any = MISSING,
    error: Any = MISSING,
    question: int | None = None,
    dry_run: bool = False,
) -> Done:
    """Settle an effect in doubt.

    Args:
        output: for "completed-with-result"; a value, as read_output makes it of JSON.
        question: the sequence of the EFFECT_INDOUBT (or of the park) that was looked at; another one is refused.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason, or no such verdict.
        VerdictRefusedError: the step is not in doubt (any more), or in doubt anew.
        FlowCodeMismatchError: the flow's code is not the recorded one.
    """

    fresh_key = ""

    def append(engine: Engine, ownership: Ownership) -> Appended:
        nonlocal fresh_key
        appended = answers.resolve(
            engine,
            execution_id,
            step_id,
            resolution,
            output=output,
            error=error,
            park_sequence=question,
            principal=operator.name,
            reason=reason.strip(),
            ownership=ownership,
        )
        # Read before the body goes on: it would take the key and begin its next attempt.
        frame = appended.journal.fold.frames[step_id]
        if frame.status is FrameStatus.FRESH:
            fresh_key = frame.idempotency_key(execution_id)
        return appended

    done = _perform(loom, operator, Act.RESOLVE_STEP, execution_id, reason, append, dry_run=dry_run)
    return dataclasses.replace(done, fresh_key=fresh_key)


def resume_execution(
    loom: Host,
    operator: Operator,
    execution_id: str,
    event_type: str,
    *,
    reason: str,
    payload: Any = None,
    correlation_key: str | None = None,
    question: str | None = None,
    dry_run: bool = False,
) -> Done:
    """Answer what a flow waits for by ``ctx.suspend(event_type)``.

    Args:
        question: the id of the wait that was looked at; if it is not pending any more, nothing is appended.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason.
        ResumeRefusedError: nothing waits for this (any more), or another act answers it.
        FlowCodeMismatchError: the flow's code is not the recorded one.
    """
    if is_reserved(event_type):
        require(loom, operator, Act.RESUME_EXECUTION, execution_id)
        raise ResumeRefusedError(execution_id, "reserved-wait", f"{event_type} is answered by its own act")

    def append(engine: Engine, ownership: Ownership) -> Appended:
        return answers.resume(
            engine,
            execution_id,
            event_type=event_type,
            payload=payload,
            correlation_key=correlation_key,
            principal=operator.name,
            reason=reason.strip(),
            judge=_judge_of(question),
            ownership=ownership,
        )

    return _perform(loom, operator, Act.RESUME_EXECUTION, execution_id, reason, append, dry_run=dry_run)


def move_execution(
    loom: Host,
    operator: Operator,
    execution_id: str,
    flow: str,
    *,
    reason: str,
    version: int | None = None,
    event_type: str | None = None,
    payload: Any = None,
    correlation_key: str | None = None,
    strategy: moves.Strategy = "replay-check",
    question: str | None = None,
    park_sequence: int | None = None,
    dry_run: bool = False,
) -> Done:
    """Move an execution to other code; with ``event_type`` answer its park in the same append.

    Args:
        flow, version: the target; the version that new starts get if it is left out.
        question: the id of the wait that was looked at; if it is not pending any more, nothing is appended.
        park_sequence: of the park that was looked at; if that is over, nothing is appended.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason, or no such strategy.
        FlowNotFoundError: the target is not registered here.
        FlowCodeMismatchError: the replay check does not pass.
        ResumeRefusedError: it is over, runs, or does not wait for this answer.
    """

    def append(engine: Engine, ownership: Ownership) -> Appended:
        moves.check_strategy(strategy)
        return answers.move(
            engine,
            execution_id,
            moves.target(engine.registry, flow, version),
            event_type=event_type,
            payload=payload,
            correlation_key=correlation_key,
            strategy=strategy,
            principal=operator.name,
            reason=reason.strip(),
            fence_if_parked_at=park_sequence,
            judge=_judge_of(question),
            ownership=ownership,
        )

    return _perform(loom, operator, Act.MOVE_EXECUTION, execution_id, reason, append, dry_run=dry_run)


def move_report(loom: Host, execution_id: str, flow: str, version: int | None = None) -> moves.MoveReport:
    """What the replay check says of a move.

    Raises:
        ExecutionNotFoundError: no such execution. FlowNotFoundError: the target is not registered here.
    """
    fold = folded(load_existing(loom.engine, execution_id).events)
    return moves.report(fold, moves.target(loom.engine.registry, flow, version))


def cancel_execution(
    loom: Host, operator: Operator, execution_id: str, *, reason: str, dry_run: bool = False
) -> Done:
    """End an execution. What a running body has begun may still happen; it can record nothing more.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason.
        ExecutionClosedError: it ended otherwise. A second cancel is answered with no events.
    """

    def append(engine: Engine, ownership: Ownership) -> Appended:
        return answers.cancel(engine, execution_id, reason=reason.strip(), principal=operator.name)

    return _perform(loom, operator, Act.CANCEL_EXECUTION, execution_id, reason, append, dry_run=dry_run)


def retry_error(
    loom: Host,
    operator: Operator,
    execution_id: str,
    *,
    reason: str,
    question: str | None = None,
    dry_run: bool = False,
) -> Done:
    """Run an execution again that is parked on an error of its body.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason.
        ResumeRefusedError: it is not parked on an error, or on another one than was looked at.
        FlowCodeMismatchError: the flow's code is not the recorded one.
    """
    return _open_gate(loom, operator, Act.RETRY_ERROR, execution_id, ON_ERROR, reason, question, dry_run)


def retry_diverged(
    loom: Host,
    operator: Operator,
    execution_id: str,
    *,
    reason: str,
    question: str | None = None,
    dry_run: bool = False,
) -> Done:
    """Run an execution again that is parked because its body did not ask for what its log holds.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason.
        ResumeRefusedError: it is not parked for that, or at another gate than was looked at.
        FlowCodeMismatchError: the flow's code is not the recorded one.
    """
    act = Act.RETRY_DIVERGED
    return _open_gate(loom, operator, act, execution_id, ON_DIVERGED, reason, question, dry_run)


def recover_execution(
    loom: Host, operator: Operator, execution_id: str, *, reason: str, dry_run: bool = False
) -> Done:
    """Take an execution over from its holder, or let one go on that was parked after too many takeovers.

    A takeover appends nothing by itself: it fences the holder out, and puts in doubt what must not run twice.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason.
        ResumeRefusedError: nobody holds it, and it is not parked for this.
    """
    act = Act.RECOVER_EXECUTION
    _admit(loom, operator, act, execution_id, reason)
    loaded = load_existing(loom.engine, execution_id)
    fold = folded(loaded.events)
    if any(wait.on == ON_POISONED for wait in fold.pending_waits()):
        return _open_gate(loom, operator, act, execution_id, ON_POISONED, reason, None, dry_run)
    store = loom.engine.store
    if store.held(execution_id) is None:
        detail = "Nobody holds it, so there is nobody to take it from."
        raise ResumeRefusedError(execution_id, _why_idle(fold), detail)
    over = hand_over(loom)
    host = _Recovering(loom.engine, over.dispatcher)
    if not dry_run:
        log.info("an operator acts", extra={**_about(operator, act, execution_id), "reason": reason})
        # A body must not run inside the caller's transaction.
        store.on_commit(lambda: _recover_one(host, execution_id))
    return Done(act, execution_id, (), over.runs)


def _recover_one(loom: recovery.Host, execution_id: str) -> None:
    recovery.recover_one(loom, execution_id)


def _why_idle(fold: Fold) -> Any:
    if fold.status == Status.SUSPENDED:
        return "no-such-wait"
    return "not-suspended" if fold.status in (Status.PENDING, Status.RUNNING) else "terminal"


def _open_gate(
    loom: Host,
    operator: Operator,
    act: Act,
    execution_id: str,
    gate: str,
    reason: str,
    question: str | None,
    dry_run: bool,
) -> Done:
    def append(engine: Engine, ownership: Ownership) -> Appended:
        return answers.open_gate(
            engine,
            execution_id,
            gate,
            principal=operator.name,
            reason=reason.strip(),
            judge=_judge_of(question),
            ownership=ownership,
        )

    return _perform(loom, operator, act, execution_id, reason, append, dry_run=dry_run)


def _judge_of(question: str | None) -> answers.Judge | None:
    return None if question is None else lambda fold: _still_asks(fold, question)


def _still_asks(fold: Fold, wait_id: str) -> None:
    """Refuse an answer to a wait that is over, though another one of the same name may be open."""
    wait = fold.waits.get(wait_id)
    if wait is None:
        raise ResumeRefusedError(fold.execution_id, "no-such-wait", f"It never waited for {wait_id!r}.")
    if not wait.answered:
        return
    who = f" by {wait.answered_by}" if wait.answered_by else ""
    when = from_micros(wait.answered_at).isoformat()
    raise ResumeRefusedError(
        fold.execution_id,
        "stale-park",
        f"What was asked then was {wait.status.value}{who} at {when} (sequence {wait.answered_sequence}).",
    )


def send_message(
    loom: Host,
    operator: Operator,
    execution_id: str,
    name: str,
    payload: Any = None,
    *,
    reason: str,
    message_id: str | None = None,
    dry_run: bool = False,
) -> Done:
    """Send a message to a flow's ``ctx.receive(name)``. The log names who sent it when the flow takes it.

    ``message`` of what is returned: "taken" if the flow waits for it, "kept" until it does, "known" if one of that
    ``message_id`` was sent before, and nothing was done.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason. InvalidIdError: no name.
        ExecutionNotFoundError: no such execution. ExecutionClosedError: it has ended.
        UnencodableValueError, PayloadTooLargeError: the payload cannot be recorded.
    """
    act = Act.SEND_MESSAGE
    engine, over = _prepare(loom, operator, act, execution_id, reason, dry_run=dry_run)
    sent = inbox.send(
        engine,
        execution_id,
        name,
        payload,
        message_id=message_id,
        principal=operator.name,
        reason=reason.strip(),
    )
    if not sent:
        return Done(act, execution_id, (), "nobody", message="known")
    newest = engine.store.newest(execution_id)
    fold = folded(load_existing(engine, newest.id if newest else execution_id).events)
    wanted = any(wait.on == ON_MESSAGE and wait.correlation_key == name for wait in fold.pending_waits())
    done = Done(
        act, execution_id, (), over.runs if wanted else "nobody", message="taken" if wanted else "kept"
    )
    if not dry_run:
        _announce(operator, act, execution_id, reason, done)
        loom.engine.store.on_commit(lambda: look_now(loom.engine, lambda: over.dispatcher, execution_id))
    return done


def fork_execution(
    loom: Host,
    operator: Operator,
    execution_id: str,
    from_step: str,
    *,
    reason: str,
    new_execution_id: str | None = None,
    version: int | None = None,
    dry_run: bool = False,
) -> Done:
    """Start a new execution over what one had done before a step was first begun. The source is not touched.

    Args:
        new_execution_id: makes it idempotent; made up if left out.
        version: of the flow that the copy runs under; the recorded one if left out.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason; it never began that step, or cannot be
            copied there. ExecutionNotFoundError: no such execution. FlowNotFoundError: no such version.
        ExecutionConflictError: the new id is taken. FlowCodeMismatchError: the recorded version is not registered.
    """

    def copy(engine: Engine, ownership: Ownership) -> Started:
        flow = None
        if version is not None:
            recorded = load_existing(engine, execution_id).events[0].data["flow"]
            flow = engine.registry.current(recorded, version)
        return forks.fork(
            engine,
            execution_id,
            keys.check_id(from_step, "from_step"),
            ownership,
            new_id=new_execution_id,
            flow=flow,
            principal=operator.name,
            reason=reason.strip(),
        )

    return _copy(
        loom, operator, Act.FORK_EXECUTION, execution_id, reason, new_execution_id, copy, dry_run=dry_run
    )


def rerun_execution(
    loom: Host,
    operator: Operator,
    execution_id: str,
    *,
    reason: str,
    new_execution_id: str | None = None,
    dry_run: bool = False,
) -> Done:
    """Start a failed execution again as a new one, from the step that it failed with.

    Raises:
        InvalidInputError: no reason; or it has not failed. For the rest see :func:`fork_execution`.
    """

    def copy(engine: Engine, ownership: Ownership) -> Started:
        return forks.rerun(
            engine,
            execution_id,
            ownership,
            new_id=new_execution_id,
            principal=operator.name,
            reason=reason.strip(),
        )

    return _copy(
        loom, operator, Act.RERUN_EXECUTION, execution_id, reason, new_execution_id, copy, dry_run=dry_run
    )


def _copy(
    loom: Host,
    operator: Operator,
    act: Act,
    execution_id: str,
    reason: str,
    new_id: str | None,
    copy: Callable[[Engine, Ownership], Started],
    *,
    dry_run: bool,
) -> Done:
    engine, over = _prepare(loom, operator, act, execution_id, reason, dry_run=dry_run)
    if new_id is not None:
        keys.check_execution_id(new_id, "the new id")
    started = copy(engine, over.ticket.ownership)
    done = Done(
        act,
        execution_id,
        (),
        over.runs if started.created else "nobody",
        started=_copied(started, loom.engine),
    )
    if dry_run and new_id is None and done.started is not None:
        done = dataclasses.replace(done, started=dataclasses.replace(done.started, execution_id=""))
    if not dry_run and started.created:
        _announce(operator, act, execution_id, reason, done)
        dispatch_start(loom.engine, over.dispatcher, started, over.ticket)
    return done


def _copied(started: Started, engine: Engine) -> Copied:
    journal = started.journal
    fold = folded(engine.store.read(started.execution_id, limit=1)) if journal is None else journal.fold
    return Copied(
        started.execution_id,
        started.flow_id,
        fold.version,
        started.created,
        tuple(step for step, frame in fold.frames.items() if frame.status is FrameStatus.COMPLETED),
        fold.last_sequence,
    )


def wake_timer(
    loom: Host, operator: Operator, execution_id: str, *, reason: str, dry_run: bool = False
) -> Done:
    """Have the wakes of an execution tried now that are due, and were put off since they could not be served.

    Nothing is appended by the act itself. A wake whose time has not come is left alone.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason.
        ExecutionNotFoundError: no such execution. ResumeRefusedError: no wake of it is due.
    """
    act = Act.WAKE_TIMER
    engine, over = _prepare(loom, operator, act, execution_id, reason, dry_run=dry_run)
    fold = folded(load_existing(engine, execution_id).events)
    store = loom.engine.store
    rows, now = store.timers(execution_id), store.now()
    due = [row for row in rows if row.wake_at <= now]
    if not due:
        following = min((row.wake_at for row in rows), default=None)
        detail = f"The next is due at {following.isoformat()}." if following else "None is owed to it."
        raise ResumeRefusedError(execution_id, "not-due", detail)
    done = Done(act, execution_id, (), over.runs, wakes=len(due))
    if dry_run:
        return done
    _announce(operator, act, execution_id, reason, done)
    for row in due:
        if row.not_before is not None:
            store.put_off(row, delay=0.0, tries=0)
    if over.runs == "worker":
        store.on_commit(loom.engine.ring)
    else:
        timers = TimerService(loom.engine, lambda: over.dispatcher)
        store.on_commit(lambda: timers.serve_one(execution_id, fold.flow_id, fold.version))
    return done


def record_outcome(
    loom: Host,
    operator: Operator,
    execution_id: str,
    outcome: str,
    payload: Any = None,
    *,
    reason: str,
    step_id: str | None = None,
    dry_run: bool = False,
) -> Done:
    """Note something about an execution that has ended; with a step, what became of its effect in doubt.

    It needs the permission for verdicts.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason; or it has not ended.
        VerdictRefusedError: the step is not in doubt (any more).
        UnencodableValueError, PayloadTooLargeError: the payload cannot be recorded.
    """

    def append(engine: Engine, ownership: Ownership) -> Appended:
        return answers.record_outcome(
            engine,
            execution_id,
            keys.check_id(outcome, "outcome"),
            payload,
            step_id=step_id,
            principal=operator.name,
            reason=reason.strip(),
        )

    return _perform(loom, operator, Act.RECORD_OUTCOME, execution_id, reason, append, dry_run=dry_run)


# How an act is carried out.


@dataclass(frozen=True, slots=True)
class HandOver:
    """Who goes on with an execution after an act's commit, and who is to be told of it."""

    ticket: Ticket
    runs: typing.Literal["here", "worker"]
    dispatcher: Dispatcher


def hand_over(loom: Host) -> HandOver:
    """Decide who goes on with an execution that an act makes runnable.

    A worker or timer loop, if one was seen lately: the rest of a flow should not run inside an operator's
    request. Else this process, after the commit. Whoever shows the result says which.
    """
    dispatcher = loom.dispatcher
    if not isinstance(dispatcher, InlineDispatcher):
        return HandOver(dispatcher.ticket(), "worker", dispatcher)
    if loom.engine.store.loop_seen(within=2 * loom.engine.settings().LEASE_TTL):
        return HandOver(Ticket(READY), "worker", WorkerDispatcher())
    return HandOver(dispatcher.ticket(), "here", dispatcher)


@dataclass(frozen=True, slots=True)
class _Recovering:
    """The runtime as a recovery pass sees it that hands on as an act does."""

    engine: Engine
    dispatcher: Dispatcher


def _perform(
    loom: Host,
    operator: Operator,
    act: Act,
    execution_id: str,
    reason: str,
    append: Callable[[Engine, Ownership], Appended],
    *,
    dry_run: bool,
) -> Done:
    engine, over = _prepare(loom, operator, act, execution_id, reason, dry_run=dry_run)
    store = loom.engine.store
    appended = append(engine, over.ticket.ownership)
    events = appended.events
    execution_id = appended.journal.execution_id  # the newest of the chain
    goes_on = bool(events) and events[-1].kind == Kind.EXECUTION_RESUMED
    done = Done(act, execution_id, events, over.runs if goes_on else "nobody", kept=appended.kept)
    if not dry_run:
        _announce(operator, act, execution_id, reason, done)
        if goes_on:
            _dispatch(loom, over, execution_id, appended)
        if appended.kept or (events and not goes_on and act is Act.MOVE_EXECUTION):
            # What has come meanwhile: the old code could not take it.
            store.on_commit(lambda: look_now(loom.engine, lambda: over.dispatcher, execution_id))
    return done


def _prepare(
    loom: Host, operator: Operator, act: Act, execution_id: str, reason: str, *, dry_run: bool
) -> tuple[Engine, HandOver]:
    """Admit an act; the engine that it appends with, and who goes on."""
    _admit(loom, operator, act, execution_id, reason)
    loom.engine.store.check_caller(f"the act {act.value}", answers=True)
    over = hand_over(loom)
    if dry_run:
        return dataclasses.replace(loom.engine, store=cast(Store, _Rehearsal(loom.engine.store))), over
    return loom.engine, over


def _admit(loom: Host, operator: Operator, act: Act, execution_id: str, reason: str) -> None:
    require(loom, operator, act, execution_id)
    check_reason(reason)


def check_reason(reason: str) -> None:
    """Refuse an act without a reason, or with a book for one.

    Raises:
        InvalidInputError: so it is.
    """
    if not reason.strip():
        raise InvalidInputError("an act needs a reason: say why, for whoever reads the log later")
    if len(reason) > MAX_REASON:
        raise InvalidInputError(f"a reason has at most {MAX_REASON} characters, this one has {len(reason)}")


def _announce(operator: Operator, act: Act, execution_id: str, reason: str, done: Done) -> None:
    about = {**_about(operator, act, execution_id), "reason": reason.strip(), "sequence": done.sequence}
    log.info("an operator acted", extra=about)


def _dispatch(loom: Host, over: HandOver, execution_id: str, appended: Appended) -> None:
    journal = appended.journal
    journal.engine = loom.engine  # the body must not run on an engine that watches one act
    loom.engine.store.on_commit(lambda: over.dispatcher.dispatch(execution_id, over.ticket, journal))


class _Rehearsal:
    """A store into which nothing lands, to see what an act would append."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, commit: Commit) -> None:
        commit.check()
        if commit.new is not None and self._store.status(commit.execution_id) is not None:
            raise SequenceOccupied(commit.execution_id, commit.first_sequence)

    def append_if_unchanged(self, commit: Commit, *, fence: int) -> None:
        commit.check()

    def send(self, execution_id: str, *, name: str, message_id: str, **_: Any) -> bool:
        return all(there.message_id != message_id for there in self._store.inbox(execution_id, name))

    def send_unless_answered(self, execution_id: str, *, chain: str | None = None, **given: Any) -> bool:
        return self.send(chain or execution_id, **given)

    def acquire_fence(self, execution_id: str) -> int:
        return self._store.fence(execution_id) + 1

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Nothing was committed."""


def folded(events: typing.Iterable[Event]) -> Fold:
    """A log folded, as an accumulator."""
    fold = Fold()
    for event in events:
        fold.apply(event)
    return fold


# What an operator takes away.


_ABOUT: Final = (
    "step", "event", "decision", "resource", "name", "child", "successor", "waits", "error", "cause", "act", "principal",
    "reason",
)  # fmt: skip


def about(event: Event) -> Iterator[tuple[str, Any]]:
    """What an event is about, by name, in the order in which it is read.

    ``waits`` are those of a park, ``error`` is a recorded failure with ``type`` and ``message``; the rest is text.
    """
    return ((name, event.data[name]) for name in _ABOUT if event.data.get(name))


def exported(event: Event, payload: Any) -> dict[str, Any]:
    """An event as plain JSON, for a file; the payload is in the codec's form."""
    return {
        "execution_id": event.execution_id,
        "sequence": event.sequence,
        "kind": event.kind,
        "payload": payload,
        "fence": event.fence,
        "writer": event.writer,
        "is_kernel": event.is_kernel,
        "recorded_at": event.recorded_at.isoformat() if event.recorded_at else None,
    }


# What a verdict says.


def read_output(loom: Host, execution_id: str, step_id: str, text: str) -> Any:
    """The result of a step of the JSON that an operator typed for it.

    The tool's ``parse_output`` makes it, if it has one; else what the tool's return annotation says it is.

    Raises:
        InvalidInputError: no JSON, or not what the tool returns. UnencodableValueError, PayloadTooLargeError:
            it cannot be recorded. ExecutionNotFoundError: no such execution.
    """
    fold = folded(load_existing(loom.engine, execution_id).events)
    tool = tool_of(loom, fold, step_id)
    value = _typed_output(tool, text)
    codec.dumps(value, path="output", limit=loom.engine.settings().MAX_PAYLOAD_BYTES)
    return value


def tool_of(loom: Host, fold: Fold, step_id: str) -> Tool[..., Any] | None:
    """The tool that a step of an execution calls, as far as it is declared here."""
    try:
        flow = flow_for(loom.engine, fold)
    except FlowCodeMismatchError:
        return None
    frame = fold.frames.get(step_id)
    by_name = [tool for tool in flow.steps.values() if frame is not None and tool.name == frame.tool]
    return flow.steps.get(step_id) or flow.steps.get(step_id.split("#", 1)[0]) or next(iter(by_name), None)


def returns(tool: Tool[..., Any] | None) -> Any:
    """What a tool says that it returns; ``Any`` if it says nothing."""
    if tool is None:
        return Any
    try:
        return typing.get_type_hints(tool.func).get("return", Any)
    except Exception:  # names that exist for a type checker only
        return Any


def _typed_output(tool: Tool[..., Any] | None, text: str) -> Any:
    if tool is None or tool.parse_output is None:
        return typed_json.read_as(returns(tool), text, "the output")
    value = typed_json.read(text)
    try:
        return tool.parse_output(value)
    except LoomError:
        raise
    except ValueError as exc:
        raise InvalidInputError(str(exc) or "the tool does not take this output") from exc
    except Exception as exc:  # it is the project's code, and a person waits for an answer
        raise InvalidInputError(f"the tool does not take this output: {exc!r}") from exc
