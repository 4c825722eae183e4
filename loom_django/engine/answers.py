"""What ends a park, or an execution, from outside its body: resumes, verdicts, wakes, messages, cancels.

Each is judged against the log as it is at the append. An answer names one wait; a wait that is answered or gone
refuses it, and says who answered and when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NoReturn, get_args

from loom_django.definitions import Flow
from loom_django.engine import budgets, children, doubt, kept, moves
from loom_django.engine.body import message_fields
from loom_django.engine.code import flow_for, target_of
from loom_django.engine.core import Engine, from_micros, to_micros
from loom_django.engine.doubt import park_fields
from loom_django.engine.journal import Journal
from loom_django.engine.outside import (
    ATTEMPTS,
    Appended,
    Compose,
    Landing,
    answer_park,
    answer_parks,
    append_fenced,
    append_note,
)
from loom_django.errors import (
    ExecutionClosedError,
    FlowCodeMismatchError,
    InvalidInputError,
    ResumeContendedError,
    ResumeRefusedError,
    StaleFenceError,
    VerdictRefusedError,
)
from loom_django.kernel.events import Encoded, Kind
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import (
    GATES,
    ON_CHILD,
    ON_MESSAGE,
    ON_VERDICT,
    TERMINAL_STATUSES,
    Frame,
    Status,
    Wait,
    is_reserved,
)
from loom_django.stores.base import NOBODY, Changed, Ownership, TimerRow

Resolution = Literal["completed-with-result", "retry-fresh", "fail"]
RESOLUTIONS: Final = get_args(Resolution)

# "No output was given", since None is an output.
MISSING: Final[Any] = type("Missing", (), {"__repr__": lambda self: "MISSING"})()

TIMER_EVENT: Final = "TimerFired"
MESSAGE_EVENT: Final = "MessageArrived"
VERDICT_ERROR: Final = "OperatorVerdict"
DEADLINE_ERROR: Final = "DeadlineExceeded"


# Looks at the fold that an answer would be appended to, and raises to refuse.
Judge = Callable[[Fold], None]


# What an answer says: the name that it came under, its payload, who gave it, why.
_Said = tuple[str, Encoded | None, str | None, str | None]


class _BodyRuns(Exception):
    """The wait that is answered is pending, and no park holds it: another wait of its park was answered, and
    the body runs, or stands before a gate."""

    def __init__(self, journal: Journal, wait: Wait, answer: _Said) -> None:
        super().__init__(wait.id)
        self.journal = journal
        self.wait = wait
        self.answer = answer


def principal_name(principal: Any) -> str | None:
    """A user or a name, as the log keeps it."""
    if principal is None:
        return None
    username = getattr(principal, "get_username", None)
    return str(username() if username is not None else principal)[:255]


# How often an execution may go on in a successor while somebody else is about to act on it.
HAND_OVERS: Final = 20


def _on_newest(engine: Engine, execution_id: str, act: Callable[[str], Appended]) -> Appended:
    """Act on an execution, or if its log has ended in a successor, on the newest of its chain.

    Raises:
        ResumeContendedError: it went on in a successor again and again; nothing was written.
    """
    target = execution_id
    for _ in range(HAND_OVERS):
        refused: ExecutionClosedError | ResumeRefusedError | None = None
        try:
            appended = act(target)
            if appended.journal.fold.status != Status.CONTINUED:
                return appended
        except (ExecutionClosedError, ResumeRefusedError) as exc:
            refused = exc
            if engine.store.status(target) != Status.CONTINUED:
                raise  # nobody goes on for it; the first id may be another execution's by now
        newest = engine.store.newest(execution_id)
        if newest is None or newest.id == target:
            if refused is not None:
                raise refused
            return appended
        target = newest.id
    raise ResumeContendedError(execution_id, HAND_OVERS)


def resume(
    engine: Engine,
    execution_id: str,
    *,
    event_type: str,
    payload: Any = None,
    correlation_key: str | None = None,
    principal: Any = None,
    reason: str = "",
    fence: int | None = None,
    fence_if_parked_at: int | None = None,
    allow_flow_code_mismatch: bool = False,
    judge: Judge | None = None,
    ownership: Ownership,
) -> Appended:
    """Answer the pending wait on ``event_type``, of the newest of a chain.

    What was looked at (``judge``), and tokens and parks, are of one log: an answer with them is for that one.

    Raises:
        ResumeRefusedError: nothing waits for it; ``reason`` says how. Nothing was written.
        InvalidInputError: a budget's new limit is none, or used up already. Nothing was written.
        ResumeContendedError: others took the fence every time, and the park is unanswered still.
        StaleFenceError: ``fence`` was given, and is not the newest token.
        FlowCodeMismatchError: the flow's code is not the recorded one.
    """
    if event_type == ON_VERDICT:
        return _resume_with_verdict(
            engine, execution_id, payload, principal, fence, fence_if_parked_at, ownership
        )
    text = _encoded(engine, payload, "payload")
    who = principal_name(principal)

    def compose(journal: Journal) -> Landing:
        _judged(journal, judge)
        if fence_if_parked_at is not None:
            _asked_at(engine, journal.fold, fence_if_parked_at, event_type, correlation_key)
        wait = _pending_wait(journal.fold, event_type, correlation_key)
        if allow_flow_code_mismatch:
            _migrate(engine, journal, who)
        check_code(engine, journal.fold)
        return _answer(journal, wait, event_type, text, who, reason, ownership)

    if judge is None and fence is None and fence_if_parked_at is None:
        return _on_newest(engine, execution_id, lambda target: _land_answer(engine, target, compose))
    return _land_answer(engine, execution_id, compose, fence, fence_if_parked_at is not None)


def _land_answer(
    engine: Engine,
    execution_id: str,
    compose: Callable[[Journal], Landing],
    fence: int | None = None,
    fences: bool = False,
) -> Appended:
    """Land an answer, or keep it where its wait is pending while the body runs."""
    given = None if fences else fence
    for _ in range(ATTEMPTS):
        try:
            return answer_park(engine, execution_id, compose, fence=given, fences=fences)
        except _BodyRuns as runs:
            _check_fence(engine, execution_id, given)
            try:
                stored = kept.keep(engine, runs.journal.fold, runs.wait, *runs.answer)
            except Changed:
                continue  # it has parked again meanwhile
            if not stored:
                _refuse_second(runs.journal, runs.wait)
            return Appended(runs.journal, (), kept=True)
    raise ResumeContendedError(execution_id, ATTEMPTS)


def _check_fence(engine: Engine, execution_id: str, given: int | None) -> None:
    """What is kept is no append, so no guard compares the token that the caller holds."""
    if given is None:
        return
    current = engine.store.fence(execution_id)
    if current not in (0, given):
        raise StaleFenceError(execution_id, given, current)


def _refuse_second(journal: Journal, wait: Wait) -> NoReturn:
    """Refuse an answer to a wait for which one is kept."""
    fold = journal.fold
    reason: Literal["no-such-wait", "not-suspended"] = (
        "no-such-wait" if fold.status == Status.SUSPENDED else "not-suspended"
    )
    message = kept.find(journal.engine, fold, wait)
    who = kept.principal_of(message) if message is not None else None
    detail = f"An answer{f' by {who}' if who else ''} is stored and waits to be taken."
    if wait.on == ON_VERDICT:
        raise VerdictRefusedError(
            fold.execution_id, reason, str(wait.correlation_key), answered_by=who, detail=detail
        )
    raise ResumeRefusedError(fold.execution_id, reason, detail)


def _judged(journal: Journal, judge: Judge | None) -> None:
    if judge is not None:
        judge(journal.fold)


def _asked_at(
    engine: Engine, fold: Fold, park_sequence: int, event_type: str, correlation_key: str | None
) -> None:
    """Refuse an answer to a park that is over, unless what was asked there is pending still."""
    if fold.park_sequence == park_sequence:
        return
    events = engine.store.read(fold.execution_id, after=park_sequence - 1, limit=1) if park_sequence else []
    if not events or events[0].kind != Kind.EXECUTION_SUSPENDED:
        detail = f"Sequence {park_sequence} of its log is no park."
        raise ResumeRefusedError(fold.execution_id, "not-suspended", detail)
    for item in events[0].data["waits"]:
        fits = item["on"] == event_type and correlation_key in (None, item.get("key"))
        if fits and item["id"] in fold.open_waits:
            return
    now = f", and it is parked at {fold.park_sequence} now" if fold.park_sequence else ""
    before = _answered_before(fold, event_type)
    detail = f"The park at {park_sequence} is over{now}" + (f": {before}." if before else ".")
    raise ResumeRefusedError(fold.execution_id, "not-suspended", detail)


def check_code(engine: Engine, fold: Fold) -> None:
    """Refuse an execution whose recorded code no registered flow has.

    Raises:
        FlowCodeMismatchError: with the ways out.
    """
    flow_for(engine, fold)


def _migrate(engine: Engine, journal: Journal, principal: str | None) -> None:
    """Re-point an execution to the code that is registered now; the caller vouches for it."""
    fold = journal.fold
    try:
        flow_for(engine, fold)
    except FlowCodeMismatchError:
        target = target_of(engine, fold)
        if target is None:
            raise
        moves.record(journal, target, "operator-ack", principal)


def _answer(
    journal: Journal,
    wait: Wait,
    event_type: str,
    text: Encoded | None,
    principal: str | None,
    reason: str | None,
    ownership: Ownership,
) -> Landing:
    budgets.check_answer(journal.fold, wait, text)
    if wait.id not in journal.fold.park_waits:
        raise _BodyRuns(journal, wait, (event_type, text, principal, reason))
    if kept.find_unseen(journal, wait) is not None:
        _refuse_second(journal, wait)
    fields = {
        "wait": wait.id,
        "event": event_type,
        "payload": text,
        "principal": principal,
        "reason": reason or None,
    }
    return _resumed(journal, wait, fields, ownership)


def _resumed(
    journal: Journal,
    wait: Wait,
    fields: Mapping[str, Any],
    ownership: Ownership,
    messages: tuple[int, ...] = (),
) -> Landing:
    """Record the answer to a wait of the park, and have the body run.

    A verdict beside a gate settles its effect; the body does not run before the gate is opened.
    """
    fold = journal.fold
    others = [other for other in fold.pending_waits() if other.id != wait.id]
    at_gate = any(other.on in GATES for other in others)
    reason, park = fold.reason, fold.park_sequence or 0
    journal.record(Kind.EXECUTION_RESUMED, fields)
    if at_gate:
        (parked,) = journal.engine.store.read(fold.execution_id, after=park - 1, limit=1)
        journal.record(Kind.EXECUTION_SUSPENDED, park_fields(reason, others, parked.data.get("error")))
        ownership = NOBODY
    return Landing(ownership, timers_off=_timer_of(wait), messages=messages)


def _timer_of(wait: Wait) -> tuple[datetime, ...]:
    return () if wait.wake_at is None else (from_micros(wait.wake_at),)


def _encoded(engine: Engine, value: Any, path: str) -> Encoded:
    return Encoded.of(value, path=path, limit=engine.settings().MAX_PAYLOAD_BYTES)


def _pending_wait(fold: Fold, event_type: str, correlation_key: str | None) -> Wait:
    """The one pending wait that an answer means, or the refusal that says why there is none.

    A wait of a park that another wait has ended is pending still, though the body runs.
    """
    fitting = [
        wait
        for wait in (fold.waits[wait_id] for wait_id in fold.open_waits)
        if wait.on == event_type and correlation_key in (None, wait.correlation_key)
    ]
    if fold.status in TERMINAL_STATUSES or (fold.status != Status.SUSPENDED and not fitting):
        reason: Literal["terminal", "not-suspended"] = (
            "terminal" if fold.status in TERMINAL_STATUSES else "not-suspended"
        )
        raise ResumeRefusedError(fold.execution_id, reason, _answered_before(fold, event_type))
    if is_reserved(event_type):
        raise ResumeRefusedError(
            fold.execution_id, "reserved-wait", f"{event_type} is answered by its own call only"
        )
    if len(fitting) > 1:
        raise ResumeRefusedError(
            fold.execution_id,
            "ambiguous-wait",
            "give correlation_key=, one of " + ", ".join(repr(wait.correlation_key) for wait in fitting),
        )
    if not fitting:
        raise ResumeRefusedError(fold.execution_id, "no-such-wait", _waits_for(fold, event_type))
    return fitting[0]


def _waits_for(fold: Fold, event_type: str) -> str:
    waits = [
        f"{wait.on} ({wait.correlation_key})" if wait.correlation_key else wait.on
        for wait in fold.pending_waits()
    ]
    advice = (
        " Use the verdict form or loom.resolve." if ON_VERDICT in {w.on for w in fold.pending_waits()} else ""
    )
    return f"It is not waiting for {event_type!r}: it waits for {', '.join(waits)}.{advice}"


def _answered_before(fold: Fold, event_type: str) -> str:
    answered = [wait for wait in fold.waits.values() if wait.on == event_type and wait.answered]
    if not answered:
        return ""
    last = answered[-1]
    who = f" by {last.answered_by}" if last.answered_by else ""
    return f"{event_type!r} was {last.status.value}{who} at {from_micros(last.answered_at).isoformat()}"


# Moves to other code.


class _BegunMeanwhile(Exception):
    """A parked execution was answered between the look and the append."""


class _ParkedMeanwhile(Exception):
    """An execution that was to be run has parked between the look and the append."""


def move(
    engine: Engine,
    execution_id: str,
    target: Flow[..., Any],
    *,
    event_type: str | None = None,
    payload: Any = None,
    correlation_key: str | None = None,
    strategy: moves.Strategy = "replay-check",
    principal: Any = None,
    reason: str = "",
    fence_if_parked_at: int | None = None,
    judge: Judge | None = None,
    ownership: Ownership,
) -> Appended:
    """Re-point an execution to other code, and with ``event_type`` answer its park in the same append.

    Without an answer it stays parked on what it waits for; and one that nobody holds though it is to be run,
    since no node has its code, can be moved too.

    Raises:
        ResumeRefusedError: it is over or held, or nothing waits for the answer. Nothing was written.
        ResumeContendedError: others were first every time.
        FlowCodeMismatchError: (``kind`` "replay-check") the log holds what the target does not declare.
    """
    made = _Move(
        engine,
        execution_id,
        target,
        strategy=strategy,
        answer=None if event_type is None else (event_type, _encoded(engine, payload, "payload")),
        correlation_key=correlation_key,
        principal=principal_name(principal),
        reason=reason,
        park_sequence=fence_if_parked_at,
        judge=judge,
        ownership=ownership,
    )
    return made.land()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    engine: Engine = field(kw_only=False)
    execution_id: str = field(kw_only=False)
    target: Flow[..., Any] = field(kw_only=False)
    strategy: moves.Strategy
    answer: tuple[str, Encoded] | None
    correlation_key: str | None
    principal: str | None
    reason: str
    park_sequence: int | None
    judge: Judge | None
    ownership: Ownership

    def land(self) -> Appended:
        for _ in range(ATTEMPTS):
            try:
                if self._may_be_idle(self.engine.store.status(self.execution_id)):
                    return append_note(self.engine, self.execution_id, self._of_idle, unchanged=True)
                fences = self.park_sequence is not None
                return answer_park(self.engine, self.execution_id, self._of_parked, fences=fences)
            except (_BegunMeanwhile, _ParkedMeanwhile):
                continue
            except _BodyRuns:
                detail = "It stands before a gate: move it without event_type=, then open the gate."
                raise ResumeRefusedError(self.execution_id, "no-such-wait", detail) from None
        raise ResumeContendedError(self.execution_id, ATTEMPTS)

    def _may_be_idle(self, status: Status | None) -> bool:
        """Tell whether it can be moved as one that is to be run: nobody has asked for a park."""
        asked = self.answer is not None or self.park_sequence is not None
        return not asked and status in (Status.PENDING, Status.RUNNING)

    def _of_parked(self, journal: Journal) -> Landing:
        fold = journal.fold
        if self._may_be_idle(fold.status):
            raise _BegunMeanwhile
        event_type = self.answer[0] if self.answer is not None else None
        _check_parked(self.engine, fold, event_type, self.correlation_key, self.park_sequence)
        if self.answer is None:
            self._record(journal)
            # Wakes that were put off, since no node had the code, are due again.
            wakes = {wait.wake_at for wait in fold.pending_waits() if wait.wake_at is not None}
            rows = (TimerRow(self.execution_id, from_micros(wake)) for wake in sorted(wakes))
            return Landing(timers=tuple(rows))
        name, text = self.answer
        wait = _pending_wait(fold, name, self.correlation_key)
        self._record(journal)
        return _answer(journal, wait, name, text, self.principal, self.reason, self.ownership)

    def _of_idle(self, journal: Journal) -> Landing:
        fold = journal.fold
        if fold.status == Status.SUSPENDED:
            raise _ParkedMeanwhile
        if fold.status in TERMINAL_STATUSES:
            raise ResumeRefusedError(self.execution_id, "terminal")
        if (holder := self.engine.store.held(self.execution_id)) is not None:
            detail = f"{holder.owner or 'A process'} holds it: wait until it has parked, or recover it first."
            raise ResumeRefusedError(self.execution_id, "not-suspended", detail)
        self._record(journal)
        return Landing()

    def _record(self, journal: Journal) -> None:
        _judged(journal, self.judge)
        if self.strategy == "replay-check":
            moves.report(journal.fold, self.target).check()
        moves.record(journal, self.target, self.strategy, self.principal, self.reason)


def _check_parked(
    engine: Engine, fold: Fold, event_type: str | None, correlation_key: str | None, park_sequence: int | None
) -> None:
    """Refuse to move what is not parked, or not where the caller has seen it."""
    if fold.status in TERMINAL_STATUSES:
        raise ResumeRefusedError(fold.execution_id, "terminal")
    if park_sequence is not None and event_type is not None:
        _asked_at(engine, fold, park_sequence, event_type, correlation_key)
    elif park_sequence is not None and park_sequence != fold.park_sequence:
        now = f"it is parked at {fold.park_sequence} now" if fold.park_sequence else "it is not parked now"
        raise ResumeRefusedError(fold.execution_id, "not-suspended", f"{now}, not at {park_sequence}")
    if fold.status != Status.SUSPENDED:
        detail = "It can be moved when it has parked, or when nobody holds it and no answer is given."
        raise ResumeRefusedError(fold.execution_id, "not-suspended", detail)


# Verdicts.


def resolve(
    engine: Engine,
    execution_id: str,
    step_id: str,
    resolution: str,
    *,
    output: Any = MISSING,
    error: Any = MISSING,
    park_sequence: int | None = None,
    principal: Any = None,
    reason: str = "",
    fence: int | None = None,
    fence_if_parked_at: int | None = None,
    judge: Judge | None = None,
    ownership: Ownership,
) -> Appended:
    """Settle an effect in doubt.

    Raises:
        InvalidInputError: an unknown resolution, or an output that is missing or does not belong.
        VerdictRefusedError: the step is not in doubt (any more); nothing was written.
        ResumeContendedError: others took the fence every time, and the park is unanswered still.
        UnencodableValueError, PayloadTooLargeError: the output cannot be recorded.
    """
    verdict = _verdict(step_id, resolution, output, error)
    text = _encoded(engine, verdict, "output")

    def compose(journal: Journal) -> Landing:
        _judged(journal, judge)
        if fence_if_parked_at is not None:
            _asked_at(engine, journal.fold, fence_if_parked_at, ON_VERDICT, step_id)
        wait = _doubt_of(journal.fold, step_id, park_sequence)
        check_code(engine, journal.fold)
        return _answer(journal, wait, ON_VERDICT, text, principal_name(principal), reason, ownership)

    return _land_answer(engine, execution_id, compose, fence, fence_if_parked_at is not None)


def _verdict(step_id: str, resolution: str, output: Any, error: Any) -> dict[str, Any]:
    if resolution not in RESOLUTIONS:
        raise InvalidInputError(f"{resolution!r} is no verdict; the verdicts are {', '.join(RESOLUTIONS)}")
    if resolution == "completed-with-result" and output is MISSING:
        raise InvalidInputError(
            "completed-with-result needs output=: the result that the step is to have (None will do)"
        )
    if resolution != "completed-with-result" and output is not MISSING:
        raise InvalidInputError(f"output= does not go with {resolution}")
    if resolution != "fail" and error is not MISSING:
        raise InvalidInputError(f"error= does not go with {resolution}")
    verdict: dict[str, Any] = {"step_id": step_id, "resolution": resolution}
    if resolution == "completed-with-result":
        verdict["output"] = output
    if resolution == "fail":
        message = "an operator settled the effect as failed" if error in (MISSING, None, "") else str(error)
        verdict["error"] = {"type": VERDICT_ERROR, "bases": [], "message": message, "traceback": ""}
    return verdict


def _resume_with_verdict(
    engine: Engine,
    execution_id: str,
    payload: Any,
    principal: Any,
    fence: int | None,
    fence_if_parked_at: int | None,
    ownership: Ownership,
) -> Appended:
    """A plain resume of a reserved wait goes the same way as ``resolve``, with the same checks."""
    if not isinstance(payload, dict) or "step_id" not in payload or "resolution" not in payload:
        raise InvalidInputError(
            f"the payload of {ON_VERDICT} is {{'step_id': …, 'resolution': …}}: better call loom.resolve"
        )
    return resolve(
        engine,
        execution_id,
        str(payload["step_id"]),
        str(payload["resolution"]),
        output=payload.get("output", MISSING),
        error=payload.get("error", MISSING),
        principal=principal,
        reason=str(payload.get("reason", "")),
        fence=fence,
        fence_if_parked_at=fence_if_parked_at,
        ownership=ownership,
    )


def _doubt_of(fold: Fold, step_id: str, park_sequence: int | None) -> Wait:
    """The pending wait for a verdict on a step, or the refusal that says what became of it."""
    frame = fold.frames.get(step_id)
    wait = fold.waits.get(doubt.doubt_wait_id(frame)) if frame is not None else None
    if frame is None or wait is None or not wait.pending or fold.status in TERMINAL_STATUSES:
        _refuse_verdict(fold, step_id)
    if park_sequence is not None and park_sequence not in (fold.park_sequence, frame.in_doubt_sequence):
        _refuse_stale(fold, step_id, park_sequence, frame)
    return wait


def _refuse_verdict(fold: Fold, step_id: str) -> NoReturn:
    last = _last_verdict(fold, step_id)
    if fold.status in TERMINAL_STATUSES:
        reason: Any = "terminal"
    else:
        reason = "no-such-wait" if fold.status == Status.SUSPENDED else "not-suspended"
    if last is None:
        raise VerdictRefusedError(
            fold.execution_id, reason, step_id, detail=f"step {step_id!r} is not in doubt"
        )
    raise VerdictRefusedError(
        fold.execution_id,
        reason,
        step_id,
        answered_by=last.answered_by or None,
        answered_at=from_micros(last.answered_at),
        sequence=last.answered_sequence,
    )


def _refuse_stale(fold: Fold, step_id: str, park_sequence: int, frame: Frame) -> NoReturn:
    last = _last_verdict(fold, step_id)
    raise VerdictRefusedError(
        fold.execution_id,
        "stale-park",
        step_id,
        answered_by=(last.answered_by or None) if last else None,
        answered_at=from_micros(last.answered_at) if last else None,
        sequence=last.answered_sequence if last else None,
        detail=f"the question of sequence {park_sequence} is over; the open one is {frame.in_doubt_sequence}",
    )


def _last_verdict(fold: Fold, step_id: str) -> Wait | None:
    given = [
        wait
        for wait in fold.waits.values()
        if wait.on == ON_VERDICT and wait.correlation_key == step_id and wait.answered
    ]
    return given[-1] if given else None


# Gates: reserved waits that a status-only answer re-opens.


def open_gate(
    engine: Engine,
    execution_id: str,
    gate: str,
    *,
    principal: Any = None,
    reason: str = "",
    judge: Judge | None = None,
    ownership: Ownership,
) -> Appended:
    """Answer a reserved gate (an error, a poisoned execution) without a payload.

    Raises:
        ResumeRefusedError: it is not parked on that gate.
    """

    def compose(journal: Journal) -> Landing:
        _judged(journal, judge)
        fold = journal.fold
        waits = [wait for wait in fold.pending_waits() if wait.on == gate]
        if not waits:
            suspended = fold.status == Status.SUSPENDED
            ended = fold.status in TERMINAL_STATUSES
            why: Any = "no-such-wait" if suspended else "terminal" if ended else "not-suspended"
            raise ResumeRefusedError(execution_id, why, _waits_for(fold, gate) if suspended else "")
        check_code(engine, fold)
        return _answer(journal, waits[0], gate, None, principal_name(principal), reason, ownership)

    return answer_park(engine, execution_id, compose)


# Wakes.


def fire_timer(engine: Engine, execution_id: str, wake_at: datetime, ownership: Ownership) -> Appended:
    """Answer every wait of that instant in one append; no events if none is pending: the row is obsolete.

    Raises:
        FlowCodeMismatchError: the flow's code is not the recorded one; the row stays.
    """
    return answer_park(engine, execution_id, _firing(wake_at, ownership), fences=True)


def fire_timers(
    engine: Engine, wakes: Mapping[str, tuple[datetime, Ownership]], *, most: int
) -> dict[str, Appended]:
    """As :func:`fire_timer`, for several executions together; those that are left out are to be fired by themselves.

    Left out are those that :func:`~loom_django.engine.outside.answer_parks` leaves out.
    """
    composed = {
        execution_id: _firing(wake_at, ownership) for execution_id, (wake_at, ownership) in wakes.items()
    }
    return answer_parks(engine, composed, most=most)


def _firing(wake_at: datetime, ownership: Ownership) -> Compose:
    instant = to_micros(wake_at)

    def compose(journal: Journal) -> Landing | None:
        due = [wait for wait in journal.fold.pending_waits() if wait.wake_at == instant]
        if not due:
            return None
        check_code(journal.engine, journal.fold)
        for wait in due:
            journal.record(Kind.TIMER_FIRED, {"wait": wait.id, "wake_at": instant})
        journal.record(Kind.EXECUTION_RESUMED, {"wait": due[0].id, "event": TIMER_EVENT})
        return Landing(ownership, timers_off=(wake_at,))

    return compose


def deliver(engine: Engine, execution_id: str, ownership: Ownership) -> Appended:
    """Answer a park with what has come: children that have ended, an answer that was kept for one of its waits,
    or the oldest message that a ``receive`` waits for. No events if there is nothing to do.

    What has come is the chain's: it is for the newest.
    """

    def compose(journal: Journal) -> Landing | None:
        fold = journal.fold
        if (done := children.finished_wait(engine, fold)) is not None:
            check_code(engine, fold)
            journal.record(Kind.EXECUTION_RESUMED, {"wait": done.id, "event": children.CHILD_EVENT})
            return Landing(ownership, timers_off=_timer_of(done))
        for wait in fold.pending_waits():
            if wait.on == ON_CHILD:
                continue
            if wait.on != ON_MESSAGE:
                if (message := kept.find(engine, fold, wait)) is not None:
                    check_code(engine, fold)
                    fields = kept.fields_of(wait, message)
                    journal.record(Kind.MESSAGE_CONSUMED, fields)
                    resumed = {name: fields[name] for name in ("wait", "event", "principal", "reason")}
                    return _resumed(journal, wait, resumed, ownership, (message.number,))
                continue
            for message in engine.store.inbox(fold.chain, str(wait.correlation_key)):
                if message.number in fold.messages:
                    continue
                check_code(engine, fold)
                fields = message_fields(wait.id, message)
                journal.record(Kind.MESSAGE_CONSUMED, fields)
                by = {name: fields[name] for name in ("wait", "principal", "reason")}
                journal.record(Kind.EXECUTION_RESUMED, {**by, "event": MESSAGE_EVENT})
                return Landing(ownership, timers_off=_timer_of(wait), messages=(message.number,))
        return None

    return _on_newest(engine, execution_id, lambda target: answer_park(engine, target, compose, fences=True))


# Ends.


def close_with_parent(engine: Engine, execution_id: str) -> Appended | None:
    """Cancel a child whose parent has ended, if it was started to end with it; None if it was not."""
    events = engine.store.read(execution_id, limit=1)
    options = events[0].data.get("options") or {} if events else {}
    parent = options.get("parent")
    if parent is None or options.get("on_parent_close") != "cancel":
        return None
    newest = engine.store.newest(parent)
    if newest is not None and newest.status not in TERMINAL_STATUSES:
        return None
    child = engine.store.newest(execution_id)
    if child is None or child.status in TERMINAL_STATUSES:
        return None
    try:
        return cancel(engine, execution_id, reason=f"its parent {parent} has ended")
    except ExecutionClosedError:
        return None  # by itself, meanwhile


def cancel(engine: Engine, execution_id: str, *, reason: str = "", principal: Any = None) -> Appended:
    """End an execution, the newest of its chain. A running body can append nothing more; what it has begun may
    still happen.

    A started step that must not run twice is put in doubt by the same append. Cancelling what is cancelled
    is answered with no events.

    Raises:
        ExecutionClosedError: it ended otherwise.
        ResumeContendedError: it changed hands again and again; nothing was written.
    """

    def record(journal: Journal) -> Landing | None:
        fold = journal.fold
        if fold.status == Status.CANCELLED:
            return None
        if fold.status in TERMINAL_STATUSES:
            raise ExecutionClosedError(fold.execution_id, str(fold.status))
        doubt.record_doubts(journal, doubt.open_doubts(fold), doubt.CANCELLED)
        fields = {"reason": reason or None, "principal": principal_name(principal)}
        journal.record(Kind.EXECUTION_CANCELLED, fields)
        return Landing(NOBODY, timers_off=None)

    return _on_newest(engine, execution_id, lambda target: _end(engine, target, record))


def expire(engine: Engine, execution_id: str) -> Appended:
    """End an execution whose deadline has passed; no events if it has ended."""

    def record(journal: Journal) -> Landing | None:
        fold = journal.fold
        if fold.status in TERMINAL_STATUSES:
            return None
        doubt.record_doubts(journal, doubt.open_doubts(fold), doubt.EXPIRED)
        error = {
            "type": DEADLINE_ERROR,
            "bases": [],
            "message": "the execution's deadline has passed",
            "traceback": "",
        }
        journal.record(Kind.EXECUTION_FAILED, {"error": error})
        return Landing(NOBODY, timers_off=None)

    return _end(engine, execution_id, record)


def _end(engine: Engine, execution_id: str, record: Callable[[Journal], Landing | None]) -> Appended:
    """Append an end. What is parked is ended at the sequence seen; what may run is fenced out first."""

    def of_parked(journal: Journal) -> Landing | None:
        if journal.fold.status in (Status.PENDING, Status.RUNNING):
            raise _BegunMeanwhile
        return record(journal)

    for _ in range(ATTEMPTS):
        if engine.store.status(execution_id) in (Status.PENDING, Status.RUNNING):
            return append_fenced(engine, execution_id, record)
        try:
            return answer_park(engine, execution_id, of_parked, fences=True)
        except _BegunMeanwhile:
            continue
    raise ResumeContendedError(execution_id, ATTEMPTS)


# After the end.


def record_outcome(
    engine: Engine,
    execution_id: str,
    outcome: str,
    payload: Any = None,
    *,
    step_id: str | None = None,
    principal: Any = None,
    reason: str = "",
) -> Appended:
    """Note something about an execution that has ended; with a step, what became of its effect in doubt.

    Raises:
        InvalidInputError: it has not ended; a parked effect is settled by a verdict.
        VerdictRefusedError: the step is not in doubt.
    """
    text = _encoded(engine, payload, "payload")

    def compose(journal: Journal) -> Landing:
        fold = journal.fold
        if fold.status not in TERMINAL_STATUSES:
            raise InvalidInputError(
                f"an outcome is noted after the end, and {execution_id!r} is {fold.status}: use loom.resolve"
            )
        if step_id is not None and step_id not in fold.doubtful:
            _refuse_verdict(fold, step_id)
        fields = {
            "outcome": outcome,
            "payload": text,
            "step": step_id,
            "principal": principal_name(principal),
            "reason": reason or None,
        }
        journal.record(Kind.OUTCOME_RECORDED, fields)
        return Landing()

    return append_note(engine, execution_id, compose, unchanged=True)
