"""The life of one step: asked for, marked durable, run, recorded; and what is never done twice by surprise.

The rules are those of ADR 0021. A step that the log holds is served from it. Before a tool is called, one
append makes the previous outcome and this step's STEP_STARTED durable. A tool declared ``idempotent=False``
whose fate nobody knows is put in doubt, and a person decides.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from loom_django.definitions import Tool
from loom_django.engine.core import from_micros, random_token
from loom_django.engine.doubt import doubt_waits
from loom_django.engine.drive import CutOff, Invoke, Io, Land, Outcome, Pause, Steps
from loom_django.engine.late import note_late_result
from loom_django.engine.transactions import call_tool
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import (
    EffectInDoubt,
    InvalidInputError,
    LoomError,
    StaleFenceError,
    StepFailed,
    StoreUnavailableError,
)
from loom_django.kernel import backoff, codec, keys
from loom_django.kernel.events import Encoded, Event, Kind
from loom_django.kernel.failures import bounded, describe_error
from loom_django.kernel.state import ON_RETRY, Frame, FrameStatus, Wait
from loom_django.stores.base import Overtaken, SequenceOccupied

if TYPE_CHECKING:
    from loom_django.engine.body import Body

# What an operator is told of an exception that leaves an effect in doubt, in bytes at most.
MAX_CAUSE_BYTES: Final = 2000

# An outcome whose tool took longer than this many seconds is not carried to the next boundary.
CARRY_LIMIT: Final = 0.020

_SCALARS: Final = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class InLoop:
    """What a step of an agent loop is beyond a step.

    ``loop`` is the loop's name in the execution. ``content`` is a digest of what the step is asked, a part of its
    key. ``rebuilt`` gives what its tool is called with where that is more than the log keeps as its arguments.
    """

    loop: str
    content: str
    rebuilt: Callable[[], tuple[Any, ...]] | None = None


# Names.


def id_for(body: Body, tool: Any) -> str:
    """The id of the step that ``ctx.run(tool, …)`` asks for; refused if the flow does not declare it."""
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", repr(tool))
        body.undeclared(name, "decorate it with @tool and list it in steps=")
    if tool.is_keyed:
        step_id = str(tool.step_id)
        if not body.flow.in_family(step_id):
            body.undeclared(step_id.split("#", 1)[0])
        key = step_id.split("#", 1)[1]
        body.ask(step_id, f"by {tool.name}.keyed({key!r})")
        return step_id
    base = tool.step_id or _only_id(body, tool)
    if base not in body.flow.steps and not body.flow.in_family(base):
        body.undeclared(base)
    number = body.count(f"step:{base}")
    step_id = keys.repeated_id(base, body.path, number)
    body.ask(step_id, "as a plain call" if number == 1 else f"as plain {base} number {number}")
    return step_id


def _only_id(body: Body, tool: Tool[..., Any]) -> str:
    ids = body.flow.step_ids_of(tool)
    if tool.name in ids or not ids:
        return tool.name
    if len(ids) > 1:
        body.undeclared(tool.name, f"it is listed as {', '.join(ids)}: say which by .named()")
    return ids[0]


def tool_of(body: Body, step_id: str) -> Tool[..., Any]:
    """The tool that is declared under a step id or under the base of one."""
    tool = body.flow.steps.get(step_id) or body.flow.steps.get(str(step_id).split("#", 1)[0])
    if tool is None:
        body.undeclared(str(step_id))
    return tool


# The life of a step.


def perform(
    body: Body,
    step_id: str,
    tool: Tool[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    within: InLoop | None = None,
) -> Steps[Any]:
    """Serve the step from the log, or run it until it has an outcome."""
    recorded = answer(body, step_id, tool)
    if recorded is not UNANSWERED:
        return recorded
    frame = body.journal.fold.frames.get(step_id)
    given = encode_arguments(body, step_id, tool, args, kwargs, within)
    if frame is None:
        body.begin_new()
    while True:
        frame = body.journal.fold.frames.get(step_id)
        if frame is not None and frame.status is FrameStatus.IN_DOUBT:
            # A person's to settle, whatever woke the body; it is never a reason to run the step.
            yield from body.wait_again(doubt_waits([frame])[0], "effect-indoubt")
            frame = body.journal.fold.frames[step_id]
            if frame.settled:
                return serve(body, frame)
        if frame is not None and frame.status is FrameStatus.RETRYING:
            yield from _await_retry(body, frame)
        outcome = yield from _attempt(body, step_id, tool, given, within)
        if outcome is not _AGAIN:
            return outcome


_AGAIN: Final = object()


def answer(body: Body, step_id: str, tool: Tool[..., Any]) -> Any:
    """Serve the step from the log; UNANSWERED if that holds no outcome of it."""
    body.asked_for(step_id)
    body.shared.tools[step_id] = tool
    frame = body.journal.fold.frames.get(step_id)
    return serve(body, frame) if frame is not None and frame.settled else UNANSWERED


UNANSWERED: Final = object()


def serve(body: Body, frame: Frame) -> Any:
    """The recorded outcome of a settled step; a failure is raised."""
    body.served(frame.finished_at)
    if frame.status is FrameStatus.COMPLETED:
        return body.decode(frame.output)
    raise _failure(frame.step_id, frame.error or {})


def _failure(step_id: str, error: Mapping[str, Any]) -> StepFailed:
    return StepFailed(
        step_id,
        error.get("type", ""),
        _text(error.get("message", "")),
        error.get("bases", ()),
        _text(error.get("traceback", "")),
    )


def _text(tree: Any) -> str:
    return str(codec.decode(tree))


def check_arguments(
    body: Body, step_id: str, tool: Tool[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that could not be recorded when the step is to run."""
    encode_arguments(body, step_id, tool, args, kwargs)


def encode_arguments(
    body: Body,
    step_id: str,
    tool: Tool[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    within: InLoop | None = None,
) -> Encoded:
    """The arguments as the log keeps them; what cannot be recorded is refused before anything is written.

    A loop has looked at those of its steps: what a model gives is judged otherwise.
    """
    try:
        if within is None:
            tool.check_call(args, kwargs)
    except TypeError as exc:
        body.refuse(InvalidInputError(f"step {step_id!r}: {exc}: {tool.name}{tool.signature}", body.flow.id))
    try:
        return arguments_text(body, step_id, args, kwargs)
    except LoomError as exc:
        body.refuse(exc)


def arguments_text(body: Body, step_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Encoded:
    """The arguments as the log keeps them.

    Raises:
        UnencodableValueError, PayloadTooLargeError: they cannot be recorded.
    """
    given = {
        "args": codec.encode(list(args), path=f"{step_id}: args"),
        "kwargs": codec.encode(dict(kwargs), path=f"{step_id}: kwargs") if kwargs else {},
    }
    limit = body.settings.MAX_PAYLOAD_BYTES
    return Encoded.of_tree(given, path=f"arguments of step {step_id}", limit=limit)


def _attempt(
    body: Body, step_id: str, tool: Tool[..., Any], given: Encoded, within: InLoop | None
) -> Steps[Any]:
    """One attempt: the marker, the effect, its outcome. ``_AGAIN`` asks for another."""
    body.begin_live()
    yield from body.before_step(step_id)
    body.reached("before-start", step_id)
    fields = {
        "step": step_id,
        "tool": tool.name,
        "idempotent": tool.idempotent,
        "scope": body.path or None,
        "loop": within.loop if within else None,
        "content": within.content if within else None,
        "undoes": body.shared.undoing or None,
        "args": given,
    }
    started = body.journal.record(Kind.STEP_STARTED, fields)
    body.did(started.data["at"])
    if tool.idempotent is False or tool.transactional or not body.may_defer():
        yield Land(body.landing)
    body.reached("before-effect", step_id)
    body.raise_seal()  # sealed while the marker was made durable: the effect never starts
    if tool.transactional:
        return (yield from _transactional(body, step_id, tool, given, within))
    context, call = _prepared_call(body, step_id, tool, given, within)
    outcome: Outcome = yield Invoke(call, tool.is_async, tool.timeout, _late_notice(body, step_id, tool))
    body.reached("after-effect", step_id)
    # An attempt that is lost is made again, and what it has used must not be lost with it.
    at_once = _note_metered(body, step_id, context) or tool.idempotent is False
    if outcome.error is None:
        return (yield from _completed(body, step_id, tool, outcome, at_once))
    return (yield from _raised(body, step_id, tool, outcome, at_once))


def _note_metered(body: Body, step_id: str, context: Any) -> bool:
    """Record what an attempt has metered; True if that is anything."""
    for fields in context.metered:
        body.journal.record(Kind.RESOURCE_METERED, {**fields, "step": step_id})
    return bool(context.metered)


def _prepared_call(
    body: Body, step_id: str, tool: Tool[..., Any], given: Encoded, within: InLoop | None
) -> tuple[Any, Any]:
    from loom_django.engine.context import StepContext

    frame = body.journal.fold.frames[step_id]
    context = StepContext(
        execution_id=body.execution_id,
        flow_id=body.flow.id,
        step_id=step_id,
        idempotency_key=frame.idempotency_key(body.execution_id),
        attempt=frame.attempts,
        deadline=_deadline(body, tool, frame),
    )
    # A tool gets what a replay would get: containers are copies made by the codec.
    rebuilt = None if within is None else within.rebuilt
    args = codec.decode(given.tree["args"]) if rebuilt is None else rebuilt()
    kwargs = codec.decode(given.tree["kwargs"])
    func = body.engine.stubs.get(tool.name, tool.func)

    def call() -> Any:
        body.reached("in-effect", step_id)
        return call_tool(body.engine.store, tool, lambda: func(context, *args, **kwargs))

    return context, call


def _deadline(body: Body, tool: Tool[..., Any], frame: Frame) -> datetime | None:
    if tool.timeout is None:
        return None
    return from_micros(frame.started_at) + timedelta(seconds=tool.timeout)


def _late_notice(body: Body, step_id: str, tool: Tool[..., Any]) -> Any:
    engine, execution_id = body.engine, body.execution_id
    attempt = body.journal.fold.frames[step_id].attempts

    def notice(outcome: Outcome) -> None:
        if tool.idempotent is False:
            note_late_result(engine, execution_id, step_id, outcome, attempt)

    return notice


def _completed(body: Body, step_id: str, tool: Tool[..., Any], outcome: Outcome, at_once: bool) -> Steps[Any]:
    try:
        text = body.encode(outcome.value, f"result of {step_id}")
    except LoomError as exc:
        # The effect has happened; only its result cannot be kept.
        if tool.idempotent is False:
            yield from _in_doubt(body, step_id, f"the result cannot be recorded: {exc}")
        return (yield from _failed(body, step_id, tool, exc, outcome.elapsed, at_once, may_retry=False))
    event = body.journal.record(Kind.STEP_COMPLETED, {"step": step_id, "output": text})
    try:
        yield from _settled(body, event, outcome.elapsed, at_once)
    except Unwind as unwind:
        if unwind.why is Why.LOST and tool.idempotent is False:
            # Somebody else has put this effect in doubt, or will: what it returned is what they need to know.
            frame = body.journal.fold.frames[step_id]
            yield Io(
                lambda: note_late_result(body.engine, body.execution_id, step_id, outcome, frame.attempts)
            )
        raise
    return _after_codec(outcome.value, text)


def _after_codec(value: Any, recorded: Encoded) -> Any:
    return value if type(value) in _SCALARS else codec.decode(recorded.tree)


def _settled(body: Body, event: Event, elapsed: float, at_once: bool) -> Steps[None]:
    """An outcome is in hand: durable at once, or carried to the next boundary if the tool was quick."""
    body.did(event.data["at"])
    if at_once or (elapsed >= CARRY_LIMIT and not body.may_defer()):
        yield Land(body.landing)
    body.reached("after-outcome", event.data["step"])


def _raised(body: Body, step_id: str, tool: Tool[..., Any], outcome: Outcome, at_once: bool) -> Steps[Any]:
    error = outcome.error
    if error is None:
        raise AssertionError("an outcome without an error was taken for a failure")
    interrupted = _is_interrupt(body, error)
    if tool.idempotent is False and (cause := _doubt(tool, outcome, error)):
        yield from _in_doubt(body, step_id, cause, interrupt=error if interrupted else None)
    if isinstance(error, CutOff):
        raise error
    if interrupted:
        raise body.seal(Why.INTERRUPTED, error)
    if outcome.timed_out:
        error = TimeoutError(f"did not end within {tool.timeout} s")
    return (yield from _failed(body, step_id, tool, error, outcome.elapsed, at_once))


def _doubt(tool: Tool[..., Any], outcome: Outcome, error: BaseException) -> str:
    """Why nobody knows whether a non-idempotent effect happened; '' if it is known that it failed."""
    if outcome.timed_out:
        return f"no answer within {tool.timeout} s"
    if isinstance(error, CutOff):
        return "the flow cut the call off"
    for leaf in _leaves(error):
        if isinstance(leaf, EffectInDoubt):
            return bounded(str(leaf.message), MAX_CAUSE_BYTES) or "the tool cannot say"
        if isinstance(leaf, tool.in_doubt_on) or not isinstance(leaf, Exception):
            described = describe_error(leaf, MAX_CAUSE_BYTES)
            return f"{described['type']}: {described['message']}"
    return ""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """What was raised, inside groups too: a doubt is one however it is wrapped."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_interrupt(body: Body, error: BaseException) -> bool:
    """True if this process is being told to end, rather than a tool having raised something odd."""
    if isinstance(error, asyncio.CancelledError):
        return body.driver.stop.is_set() or body.sealed is not None
    in_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt | SystemExit) and in_main


def _in_doubt(
    body: Body, step_id: str, cause: str, *, interrupt: BaseException | None = None
) -> Steps[NoReturn]:
    frame = body.journal.fold.frames[step_id]
    try:
        yield Land(lambda: body.park_in_doubt([frame], cause))
    except Unwind as unwind:
        unwind.cause = interrupt
        raise
    raise AssertionError("a park does not return")


def _failed(
    body: Body,
    step_id: str,
    tool: Tool[..., Any],
    error: BaseException,
    elapsed: float,
    at_once: bool,
    *,
    may_retry: bool = True,
) -> Steps[Any]:
    """A known failure: retried by its policy, or the step's outcome."""
    described = recorded_error(body, error)
    if may_retry and isinstance(error, Exception):
        failures = body.journal.fold.frames[step_id].failures + 1
        if tool.retry is not None and backoff.retries(tool.retry, error, failures):
            yield from _retry(body, step_id, tool, described, failures)
            return _AGAIN
    event = body.journal.record(Kind.STEP_FAILED, {"step": step_id, "error": described})
    yield from _settled(body, event, elapsed, at_once)
    raise _failure(step_id, described) from error


def recorded_error(body: Body, error: BaseException) -> dict[str, Any]:
    """An error as the log keeps it: type, bases, text; texts in the codec's form."""
    described = describe_error(error, body.settings.MAX_TRACEBACK_BYTES)
    return {
        "type": described["type"],
        "bases": described["bases"],
        "message": codec.encode(described["message"]),
        "traceback": codec.encode(described["traceback"]),
    }


def _retry(
    body: Body, step_id: str, tool: Tool[..., Any], described: Mapping[str, Any], failures: int
) -> Steps[None]:
    policy = tool.retry
    if policy is None:
        raise AssertionError("no policy, no retry")
    delay = backoff.delay(policy, failures, body.engine.draw())
    fields = {
        "step": step_id,
        "error": described,
        "failures": failures,
        "fresh_key": policy.fresh_key or None,
        "next_at": body.journal.stamp() + round(delay * 1_000_000),
    }
    body.journal.record(Kind.STEP_RETRYING, fields)
    yield Land(body.landing)  # at once: the count of failures, and a fresh key, must survive a crash


def _await_retry(body: Body, frame: Frame) -> Steps[None]:
    """Wait for the next attempt: in process if it is near, else parked."""
    remaining = (frame.next_at - body.journal.stamp()) / 1_000_000
    if remaining <= 0:
        return
    if remaining <= body.settings.IN_PROCESS_RETRY_LIMIT:
        if not body.driver.one_thread:  # a TestCase does not wait for real
            yield Pause(remaining)
        return
    wait = Wait(f"retry:{frame.step_id}:{frame.failures}", ON_RETRY, frame.step_id, frame.next_at)
    known = body.journal.fold.waits.get(wait.id)
    if known is None or not known.answered:
        yield from body.before_park([wait])
        yield Land(lambda: body.park("retry", [wait]))


# Transactional steps.


def _transactional(
    body: Body, step_id: str, tool: Tool[..., Any], given: Encoded, within: InLoop | None
) -> Steps[Any]:
    """Run a tool and land its outcome in one transaction; a rollback takes both away.

    If the commit's answer was lost, or another writer's event came into being while the outcome was on its way, the log is
    read: STEP_COMPLETED there means done, else the tool runs again. The sequence lets only one of two such transactions
    commit.
    """
    context, call = _prepared_call(body, step_id, tool, given, within)
    try:
        return (yield Io(lambda: _in_transaction(body, step_id, call, context)))
    except (Unwind, CutOff):
        raise
    except BaseException as exc:
        error = exc
    if _is_interrupt(body, error):
        raise body.seal(Why.INTERRUPTED, error) from error
    frame = yield Io(lambda: _after_rollback(body, step_id, error))
    if frame.status is FrameStatus.COMPLETED:
        body.did(frame.finished_at)
        return body.decode(frame.output)
    at_once = _note_metered(body, step_id, context)
    if isinstance(error, Overtaken) or body.engine.store.is_connection_lost(error):
        return _AGAIN
    storable = not isinstance(error, LoomError | _RolledBackError)
    return (yield from _failed(body, step_id, tool, error, CARRY_LIMIT, at_once, may_retry=storable))


def _in_transaction(body: Body, step_id: str, call: Any, context: Any) -> Any:
    store = body.engine.store
    if body.journal.kept or not body.journal.is_settled:
        body.land()  # facts of other branches must not be rolled back with this one's
    body.journal.settle()  # nor what is to be told of them
    with store.transaction():
        value = call()
        text = body.encode(value, f"result of {step_id}")
        if store.marked_for_rollback():
            raise _RolledBackError("the transaction was marked for rollback, so nothing of the step was kept")
        body.reached("after-effect", step_id)
        _note_metered(body, step_id, context)
        event = body.journal.record(Kind.STEP_COMPLETED, {"step": step_id, "output": text})
        body.journal.land(closes=True)
    body.did(event.data["at"])
    body.reached("after-outcome", step_id)
    return _after_codec(value, text)


class _RolledBackError(Exception):
    """A tool's transaction that would have ended without its work."""


def _after_rollback(body: Body, step_id: str, error: BaseException) -> Frame:
    """The transaction ended in an error: read what the log holds of the step."""
    if isinstance(error, StaleFenceError | SequenceOccupied):
        raise body.seal(Why.LOST, error)
    if isinstance(error, StoreUnavailableError):
        raise body.seal(Why.STORE, error)
    # The lost transaction may still commit; what is written from here on must not be taken for its events.
    body.journal.writer = random_token()
    try:
        body.journal.rebase([])
    except Exception as exc:
        raise body.seal(Why.STORE, exc) from exc
    if isinstance(error, Overtaken) and body.journal.fold.last_sequence < error.sequence:
        # Nobody's event stands in its place: something else lets it not land, and would again.
        raise body.seal(Why.LOST, error)
    frame = body.journal.fold.frames[step_id]
    if body.sealed is not None:
        raise body.sealed
    if frame.status not in (FrameStatus.COMPLETED, FrameStatus.RUNNING):
        raise body.seal(Why.LOST, error)
    return frame
