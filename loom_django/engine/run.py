"""A body run from its entry to whatever ends it.

Every body runs under a lease. It is entered with the log folded; frames that were begun and whose fate nobody
knows are put in doubt before the body is entered. It ends by a park, an end of the execution, or by losing it.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from loom_django.definitions import Flow
from loom_django.engine import snapshots
from loom_django.engine.body import Body
from loom_django.engine.code import flow_for
from loom_django.engine.compensation import compensated
from loom_django.engine.context import AsyncFlowContext, FlowContext
from loom_django.engine.core import Engine
from loom_django.engine.doubt import LOST as LOST_IN_DOUBT
from loom_django.engine.doubt import open_doubts
from loom_django.engine.drive import Driver, Io, Landing, carried_out, inside_body
from loom_django.engine.drive_async import AsyncDriver
from loom_django.engine.drive_sync import SyncDriver
from loom_django.engine.journal import Journal
from loom_django.engine.outside import open_journal
from loom_django.engine.shared import BodyLoop, SharedDriver
from loom_django.engine.steps import recorded_error
from loom_django.engine.transactions import leave_transaction_of
from loom_django.engine.unwind import Unwind, Why, late_call
from loom_django.errors import (
    MAX_NAMED_STEPS,
    ContextMisuseError,
    FlowCodeMismatchError,
    FlowDivergenceError,
    LoomError,
    OpenTransactionError,
    StepFailed,
)
from loom_django.kernel import codec
from loom_django.kernel.events import Kind
from loom_django.kernel.state import ON_DIVERGED, ON_ERROR, Status, Wait
from loom_django.stores.base import NOBODY

log = logging.getLogger("loom_django.run")

# How long refused code is left alone before it is looked at again, in seconds.
REFUSED_DELAY = 600.0


class Ended(enum.Enum):
    """What became of a body run."""

    PARKED = "parked"
    FINISHED = "finished"
    LOST = "lost"
    REFUSED = "refused"
    INTERRUPTED = "interrupted"


def run_execution(
    engine: Engine,
    execution_id: str,
    *,
    token: int,
    fence: int | None,
    journal: Journal | None = None,
    stop: threading.Event | None = None,
    on_start: Callable[[Body], None] | None = None,
) -> Ended:
    """Run the body of an execution that this process holds under ``token``, until it parks or ends.

    Args:
        fence: the fencing token to present; None if the execution was never fenced.
        journal: the log as this process has just written or read it, to spare the read.
        stop: set when the process is to end.

    Raises:
        OpenTransactionError: the caller's transaction is open; nothing was written.
        KeyboardInterrupt, SystemExit: raised in the main thread while a tool ran, after it was accounted for.
    """
    driver_for = partial(_driver, engine, stop=stop)
    body = carried_out(_entered(engine, execution_id, token, fence, journal, driver_for))
    if body is None:
        return Ended.REFUSED
    body.journal.once_open(partial(engine.keeper.hold, execution_id, token, body.lose))
    try:
        with inside_body():
            if on_start is not None:
                on_start(body)
            return _run(body, token)
    finally:
        engine.keeper.drop(execution_id, token)
        body.over()


async def run_shared(
    engine: Engine,
    place: BodyLoop,
    execution_id: str,
    *,
    token: int,
    fence: int | None,
    journal: Journal | None,
    stop: threading.Event,
) -> Ended:
    """:func:`run_execution` of an ``async def`` flow, as a task of a loop that it shares with others."""
    driver = SharedDriver(place, execution_id)
    driver.stop = stop
    body = await place.carry_out(
        _entered(
            engine,
            execution_id,
            token,
            fence,
            journal,
            lambda flow: driver if flow.is_async else _driver(engine, flow, stop=stop),
        )
    )
    if body is None:
        return Ended.REFUSED
    engine.keeper.hold(execution_id, token, body.lose)
    try:
        if body.driver is not driver:  # row and log disagree about its flow
            return await place.do(partial(_run, body, token))
        value = raised = None
        try:
            value = await driver.run_task(await place.carry_out(_call_of(body)))
        except BaseException as exc:
            raised = exc
        if (close := driver.ended()) is not None:
            await place.do(close)
        return await place.carry_out(_ended(body, token, value, raised))
    finally:
        raised = None  # its traceback holds this frame
        engine.keeper.drop(execution_id, token)
        body.over()


def _entered(
    engine: Engine,
    execution_id: str,
    token: int,
    fence: int | None,
    journal: Journal | None,
    driver_for: Callable[[Flow[..., Any]], Driver],
) -> Landing[Body | None]:
    """A body that is ready to run; None if this node cannot serve the execution."""
    store = engine.store
    if store.in_transaction():
        raise OpenTransactionError(
            "running a flow's body",
            "its steps must be durable one by one",
            "Start it inside the block: it runs after the commit.",
        )
    if journal is None:  # folded where it is read: of a long log that takes long
        journal = yield Io(lambda: open_journal(engine, snapshots.load(engine, execution_id), fence=fence))
    flow = yield from _flow_of(engine, journal, token)
    if flow is None:
        return None
    if store.clock_is_old():  # measured before facts are stamped in an event loop, where no query may be
        yield Io(store.check_clock)
    journal.patience = engine.settings().LEASE_TTL
    return Body(engine, journal, flow, driver_for(flow))


def _flow_of(engine: Engine, journal: Journal, token: int) -> Landing[Flow[..., Any] | None]:
    """The registered flow for a log; None, with the execution handed back, if this node cannot serve it."""
    fold = journal.fold
    if fold.status not in (Status.PENDING, Status.RUNNING):
        return None  # its former owner parked or ended it between the takeover and the fence
    about = {"execution_id": fold.execution_id, "flow_id": fold.flow_id}
    delay = REFUSED_DELAY
    try:
        flow = flow_for(engine, fold)
        if not fold.unknown_kinds:
            return flow
        log.error("an execution is left alone: its log has unknown kinds %s", fold.unknown_kinds, extra=about)
    except FlowCodeMismatchError as exc:
        delay = yield Io(partial(refusal_delay, engine, fold.execution_id, exc))
        level = logging.ERROR if delay else logging.INFO  # a node of another release is no error
        log.log(level, "an execution is left alone: %s", exc, extra=about)
    yield Io(partial(engine.store.release, fold.execution_id, token, delay=delay))
    return None


def refusal_delay(engine: Engine, execution_id: str, refused: BaseException) -> float:
    """How long an execution that this process holds is left alone whose code was refused, in seconds.

    One that only this process cannot serve is another one's at once; but not where its row tells of a flow that is
    known here: row and log disagree, and this process would claim it again and again.
    """
    elsewhere = isinstance(refused, FlowCodeMismatchError) and refused.kind in ("flow", "version")
    return 0.0 if elsewhere and not _claimable(engine, execution_id) else REFUSED_DELAY


def _claimable(engine: Engine, execution_id: str) -> bool:
    row = engine.store.held(execution_id)
    return row is not None and row.version <= engine.registry.highest().get(row.flow_id, 0)


def _driver(engine: Engine, flow: Flow[..., Any], *, stop: threading.Event | None) -> Driver:
    kind: type[Driver] = AsyncDriver if flow.is_async else SyncDriver
    driver = kind(one_thread=engine.store.in_testcase())
    if stop is not None:
        driver.stop = stop
    return driver


def _run(body: Body, token: int) -> Ended:
    """Enter the body in this thread, and record how it ended."""
    driver: Any = body.driver
    body.thread = threading.get_ident()  # where its calls of the context come from
    value = raised = None
    try:
        value = driver.run_body(carried_out(_call_of(body)))
    except BaseException as exc:
        raised = exc
    try:
        return carried_out(_ended(body, token, value, raised))
    finally:
        raised = None  # its traceback holds this frame


def _call_of(body: Body) -> Landing[Callable[[], Any]]:
    """The call of the flow's function; leaves the body if effects are in doubt."""
    doubts = open_doubts(body.journal.fold)
    if doubts:
        yield from body.park_in_doubt(doubts, LOST_IN_DOUBT)
    body.watch()
    args, kwargs = body.flow.unbind(body.decode(body.journal.fold.input))
    context: Any = AsyncFlowContext(body) if body.flow.is_async else FlowContext(body)
    return compensated(body, lambda: body.flow.func(context, *args, **kwargs))


def _ended(body: Body, token: int, value: Any, raised: BaseException | None) -> Landing[Ended]:
    """Record how the body ended. What a seal says goes before what the body made of it."""
    leave_transaction_of(body)
    if body.misuse is None and body.sealed is None and body.unawaited:
        forgotten = ", ".join(sorted(set(body.unawaited.values())))
        body.misuse = ContextMisuseError(
            f"ctx.{forgotten} was not awaited before the flow returned: write await"
        )
    if body.sealed is None and (late := late_call(raised)) is not None:
        body.misuse = late
    for left in (body.sealed, raised):
        if isinstance(left, Unwind) and left.why is Why.CRASHED:
            return Ended.LOST
    if body.journal.is_waited_for:
        yield Io(body.journal.settle)
    if not body.journal.is_settled and (body.sealed is None or body.sealed.why not in (Why.LOST, Why.STORE)):
        with suppress(Unwind, LoomError):  # the body is sealed, or misused, then
            yield from body.landing()
    if body.misuse is not None:
        return (yield from _finish(body, _fail(body, body.misuse)))
    unwind = body.sealed or (raised if isinstance(raised, Unwind) else None)
    if unwind is not None:
        return (yield from _unwound(body, token, unwind))
    if raised is None:
        return (yield from _finish(body, _complete(body, value)))
    if isinstance(raised, KeyboardInterrupt | SystemExit) and _in_main_thread():
        return (yield from _unwound(body, token, Unwind(Why.INTERRUPTED, raised)))
    return (yield from _finish(body, _fail(body, raised)))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _unwound(body: Body, token: int, unwind: Unwind) -> Landing[Ended]:
    cause = unwind.cause
    if unwind.why is Why.PARKED:
        if cause is not None:
            raise cause
        return Ended.PARKED
    if unwind.why is Why.CONTINUED:
        return Ended.FINISHED
    if unwind.why is Why.DIVERGED and isinstance(cause, FlowDivergenceError):
        return (yield from _diverged(body, cause))
    if unwind.why is Why.REFUSED:
        yield from _refuse(body, token, cause)
        return Ended.REFUSED
    if unwind.why is Why.INTERRUPTED:
        yield from _hand_back(body, token)
        if cause is not None and _in_main_thread():
            raise cause
        return Ended.INTERRUPTED
    level = logging.INFO if unwind.why is Why.LOST else logging.ERROR
    log.log(
        level,
        "a body run was given up: %s (%r)",
        unwind.why.value,
        cause,
        extra={"execution_id": body.execution_id, "flow_id": body.flow.id},
    )
    return Ended.LOST


def _refuse(body: Body, token: int, cause: BaseException | None) -> Landing[None]:
    """Leave an execution alone that this code cannot read; a node, or a later release, that can goes on."""
    log.error(
        "an execution is left alone: %s",
        cause,
        extra={"execution_id": body.execution_id, "flow_id": body.flow.id},
    )
    yield Io(partial(body.engine.store.release, body.execution_id, token, delay=REFUSED_DELAY))


def _hand_back(body: Body, token: int) -> Landing[None]:
    """Give the execution to somebody else at once; facts that were kept are made durable if that goes.

    Not with a start that has not landed: that lands by itself, so that no step seems begun that was not.
    """
    try:
        if body.journal.opening is None:
            yield from body.journal.landing()
        yield Io(partial(body.engine.store.release, body.execution_id, token))
        if snapshots.due(body.journal):
            yield Io(partial(snapshots.take, body.journal))
    except Exception as exc:
        log.warning(
            "an interrupted execution could not be handed back; its lease will run out",
            exc_info=exc,
            extra={"execution_id": body.execution_id},
        )


def _finish(body: Body, write: Landing[Ended]) -> Landing[Ended]:
    """Write an end; the store may still refuse it."""
    body.sealed = None
    try:
        ended = yield from write
    except Unwind as unwind:
        return (yield from _unwound(body, 0, unwind))
    if ended is Ended.FINISHED and body.journal.snapshot:
        yield Io(partial(snapshots.forget, body.journal))
    return ended


def _complete(body: Body, value: Any) -> Landing[Ended]:
    yield from body.before_end()
    try:
        text = body.encode(value, f"result of flow {body.flow.id}")
    except LoomError as exc:
        return (yield from _fail(body, exc))
    body.journal.record(Kind.EXECUTION_COMPLETED, {"result": text})
    yield from body.landing(ownership=NOBODY, timers_off=None)
    return Ended.FINISHED


def _fail(body: Body, error: BaseException) -> Landing[Ended]:
    described = failure_of(body, error)
    if body.flow.on_error == "park":
        return (yield from _park_on_gate(body, "error", ON_ERROR, described))
    body.journal.record(Kind.EXECUTION_FAILED, {"error": described})
    yield from body.landing(ownership=NOBODY, timers_off=None)
    log.warning(
        "the body of an execution raised: %s",
        described["type"],
        exc_info=error,
        extra={"execution_id": body.execution_id, "flow_id": body.flow.id},
    )
    return Ended.FINISHED


def _diverged(body: Body, error: FlowDivergenceError) -> Landing[Ended]:
    """Park a body that skips what its log holds, until somebody has set its code right."""
    body.sealed = None
    found = {
        "expected": list(error.expected[:MAX_NAMED_STEPS]),
        "seen": error.seen,
        "source_line": error.source_line,
    }
    described = {**recorded_error(body, error), "traceback": "", **found}
    ended = yield from _park_on_gate(body, "diverged", ON_DIVERGED, described)
    if ended is Ended.PARKED:
        yield Io(partial(body.tell_divergence, logging.ERROR, error))
    return ended


def _park_on_gate(body: Body, reason: str, gate: str, error: Mapping[str, Any]) -> Landing[Ended]:
    number = 1 + sum(1 for wait in body.journal.fold.waits.values() if wait.on == gate)
    try:
        yield from body.park(reason, [Wait(f"{reason}#{number}", gate)], error=error)
    except Unwind as unwind:
        return (yield from _unwound(body, 0, unwind))
    raise AssertionError("a park at a gate does not return")


def failure_of(body: Body, error: BaseException) -> dict[str, Any]:
    """An uncaught error as the log keeps it; a step's failure keeps the type of what failed in the step."""
    described = recorded_error(body, error)
    if isinstance(error, StepFailed):
        described |= {
            "type": error.error_type,
            "bases": list(error.bases),
            "message": codec.encode(error.message),
            "step": error.step_id,
        }
    return described
