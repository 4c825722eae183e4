"""The configured runtime: ``loom``, its async twins, and the handles that it returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from asgiref.sync import sync_to_async

from loom_django import conf, definitions
from loom_django.definitions import Flow, registry
from loom_django.engine import answers, forks, inbox, moves
from loom_django.engine.answers import MISSING, Resolution
from loom_django.engine.core import Engine, from_micros
from loom_django.engine.drive import in_body
from loom_django.engine.outside import Appended
from loom_django.engine.start import Started, start
from loom_django.errors import (
    ContextMisuseError,
    ExecutionCancelledError,
    ExecutionFailedError,
    ExecutionNotFoundError,
    FlowNotFoundError,
    InvalidInputError,
    OpenTransactionError,
    ResultTimeoutError,
    shown,
)
from loom_django.kernel import codec, keys
from loom_django.kernel.durations import Duration, seconds
from loom_django.kernel.events import Event
from loom_django.kernel.fold import Fold, fold
from loom_django.kernel.state import ON_DIVERGED, ON_ERROR, TERMINAL_STATUSES, ExecutionState, Status, Wait
from loom_django.services import schedules
from loom_django.services.dispatch import (
    Dispatcher,
    InlineDispatcher,
    TasksDispatcher,
    Ticket,
    WorkerDispatcher,
    dispatch_start,
    hand_on,
)
from loom_django.services.leases import LeaseKeeper
from loom_django.services.notices import Notifier
from loom_django.services.redrive import look_now
from loom_django.stores import store_for
from loom_django.stores.base import READY, Ended, Ownership, Store

if TYPE_CHECKING:
    from loom_django.engine.core import Keeper

R = TypeVar("R")

# How often ``Handle.result`` looks, in seconds: soon at first, then less often.
RESULT_POLLS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)


# A reason is a sentence or a few; what is longer belongs into a system of its own.
MAX_REASON: Final = 2_000
MAX_PRINCIPAL: Final = 255

_BIGGEST: Final = 2**62


def _check_id(execution_id: object) -> str:
    """An id that is to be looked up, which one that could never have been given is not."""
    return keys.check_id(execution_id, "execution id")


def _checked_principal(principal: Any) -> str | None:
    """The name of a user, or a name."""
    if principal is None:
        return None
    if hasattr(principal, "get_username"):
        return keys.check_text(answers.principal_name(principal), "principal", MAX_PRINCIPAL)
    if not isinstance(principal, str):
        raise InvalidInputError(f"principal={shown(principal)} must be a user or a name")
    return keys.check_text(principal, "principal", MAX_PRINCIPAL)


def _checked_kinds(kinds: Any) -> frozenset[str]:
    names = None if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    if names is None or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(
            f"kinds={shown(kinds)} must be kinds of events: pass a list of Kind members or texts"
        )
    return frozenset(str(name) for name in names)


@dataclass(frozen=True, slots=True)
class PendingWait:
    """One thing that an execution waits for. ``wake_at`` is aware UTC, or None."""

    on: str
    correlation_key: str | None
    wake_at: datetime | None

    @classmethod
    def of(cls, wait: Wait) -> PendingWait:
        return cls(wait.on, wait.correlation_key, None if wait.wake_at is None else from_micros(wait.wake_at))


class Handle(Generic[R]):
    """An execution as a program sees it: one that has continued as new is what its newest successor is.

    Attributes:
        id, flow_id: of the execution.
        created: True if the call that returned this handle made the execution.
    """

    def __init__(self, loom: Loom, id: str, flow_id: str, *, created: bool = False) -> None:
        self._loom = loom
        self.id = id
        self.flow_id = flow_id
        self.created = created
        self._state: ExecutionState | None = None

    @property
    def status(self) -> Status:
        """Where the execution stands now: one cheap query."""
        return self._newest().status

    @property
    def waits(self) -> tuple[PendingWait, ...]:
        """What it waits for now."""
        return tuple(PendingWait.of(wait) for wait in self._loom.state(self._newest().id).pending_waits)

    def refresh(self) -> Handle[R]:
        """Read the log again; returns the handle itself."""
        self._state = self._loom.state(self._newest().id)
        return self

    def _newest(self) -> Ended:
        newest = self._loom.store.newest(self.id)
        if newest is None:
            raise ExecutionNotFoundError(self.id)
        return newest

    async def arefresh(self) -> Handle[R]:
        """:meth:`refresh`, awaited."""
        return await sync_to_async(self.refresh)()

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the end and return the result. For scripts and tests; a view reads ``status``.

        Raises:
            ExecutionFailedError, ExecutionCancelledError: it ended so.
            ResultTimeoutError: it has not ended within ``timeout`` (seconds or timedelta).
            OpenTransactionError: inside a transaction, where its start may not have been committed.
            ContextMisuseError: inside a flow's body.
        """
        self._check_may_wait()
        limit = None if timeout is None else seconds(timeout, "timeout")
        if limit is None and self._loom.store.in_testcase():
            limit = 0.0  # nobody else sees the test's transaction, so nobody else could end it
        began = time.monotonic()
        tries = 0
        while self.status not in TERMINAL_STATUSES:
            elapsed = time.monotonic() - began
            if limit is not None and elapsed >= limit:
                raise ResultTimeoutError(self.id, limit)
            pause = RESULT_POLLS[min(tries, len(RESULT_POLLS) - 1)]
            time.sleep(pause if limit is None else min(pause, limit - elapsed))
            tries += 1
        return self._outcome()

    async def aresult(self, timeout: Duration | None = None) -> R:
        """:meth:`result`, awaited; the event loop is free meanwhile."""
        limit = None if timeout is None else seconds(timeout, "timeout")
        began = time.monotonic()
        tries = 0
        while (await sync_to_async(lambda: self.status)()) not in TERMINAL_STATUSES:
            elapsed = time.monotonic() - began
            if limit is not None and elapsed >= limit:
                raise ResultTimeoutError(self.id, limit)
            pause = RESULT_POLLS[min(tries, len(RESULT_POLLS) - 1)]
            await asyncio.sleep(pause if limit is None else min(pause, limit - elapsed))
            tries += 1
        return await sync_to_async(self._outcome)()

    def _check_may_wait(self) -> None:
        if in_body():
            raise ContextMisuseError(
                "handle.result() in a flow's body would hold its thread: wait for it outside"
            )
        if self._loom.store.in_transaction():
            raise OpenTransactionError(
                "handle.result() inside atomic()",
                "it would wait for an execution that starts only at commit",
                "Read handle.status later, or wait after the block.",
            )
        if _in_event_loop():
            raise ContextMisuseError("handle.result() would block the event loop: await handle.aresult()")

    def _outcome(self) -> R:
        state = self.refresh()._state
        if state is None:
            raise ExecutionNotFoundError(self.id)
        if state.status is Status.FAILED:
            error = state.error or {}
            raise ExecutionFailedError(
                self.id, str(error.get("type", "")), str(codec.decode(error.get("message", "")))
            )
        if state.status is Status.CANCELLED:
            raise ExecutionCancelledError(self.id, state.reason)
        if state.successor is not None:
            raise ExecutionNotFoundError(state.successor)  # it was removed, or not restored
        result: R = codec.decode(state.result)
        return result

    def __repr__(self) -> str:
        return f"<Handle {self.id} of {self.flow_id}>"


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_DISPATCHERS: Final[Mapping[str, Callable[[Engine], Dispatcher]]] = {
    "inline": InlineDispatcher,
    "worker": lambda engine: WorkerDispatcher(engine.ring),
    "tasks": TasksDispatcher,
}


class Loom:
    """Starts, answers, ends and reads executions.

    These calls are code and trusted: they check no permission. ``principal`` (a user or a name) is recorded
    with what was done and nothing else. Acts of the admin and of the commands check permissions themselves.
    Every call has an awaited twin whose name begins with ``a``.
    """

    def __init__(self, store: Store | None = None, *, keeper: Keeper | None = None) -> None:
        self._given_store = store
        self._given_keeper = keeper
        self._engine: Engine | None = None
        self._dispatcher: Dispatcher | None = None
        conf.on_change(self.reset)

    # What it is made of.

    def reset(self) -> None:
        """Read the settings again at the next call."""
        self._engine = None
        self._dispatcher = None

    @property
    def engine(self) -> Engine:
        """The engine, for the services around it."""
        if self._engine is None:
            from loom_django.services.announce import announce, flow_diverged, tells

            store = self._given_store or store_for(conf.get_settings().DATABASE)
            keeper = self._given_keeper or LeaseKeeper(store, conf.get_settings)
            ring = Notifier(store, conf.get_settings).ring
            self._engine = Engine(
                store,
                conf.get_settings,
                registry,
                keeper,
                announce=announce,
                tells=tells,
                diverged=flow_diverged,
                ring=ring,
                started=lambda execution_id: self.dispatcher.dispatch(execution_id, Ticket(READY), None),
                woken=lambda execution_id: look_now(self.engine, lambda: self.dispatcher, execution_id),
            )
        return self._engine

    @property
    def store(self) -> Store:
        return self.engine.store

    @property
    def dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            self._dispatcher = _DISPATCHERS[conf.get_settings().DISPATCHER](self.engine)
        return self._dispatcher

    @dispatcher.setter
    def dispatcher(self, dispatcher: Dispatcher | None) -> None:
        self._dispatcher = dispatcher

    # Starting.

    def start(
        self,
        flow_id: str | Flow[..., Any],
        /,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        version: int | None = None,
        **options: Any,
    ) -> Handle[Any]:
        """Start an execution by the flow's id: that version, else the highest that is not pinned.

        ``options`` are those of :meth:`Flow.using`. See :meth:`Flow.start` for what is raised; and

        Raises:
            FlowNotFoundError: no such flow, or no such version, is registered.
        """
        if version is not None:
            keys.check_whole(version, "version", 1, definitions.MAX_INT)
        if isinstance(args, str | bytes) or not isinstance(args, Iterable):
            raise InvalidInputError(f"args={shown(args)} must be a tuple or a list of arguments")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise InvalidInputError(f"kwargs={shown(kwargs)} must be a mapping of names to arguments")
        if isinstance(flow_id, Flow):
            flow = flow_id
        else:
            flow = registry.current(keys.check_id(flow_id, "flow id"), version)
        return self.start_flow(flow.using(**options) if options else flow, tuple(args), dict(kwargs or {}))

    def start_flow(
        self, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Handle[Any]:
        self.store.check_caller("start")
        given = flow.bind_input(args, kwargs)
        ticket = self.dispatcher.ticket()
        at_once = ticket.token is not None
        started = start(self.engine, flow, given, flow.options, ticket.ownership, at_once=at_once)
        dispatch_start(self.engine, self.dispatcher, started, ticket)
        return Handle(self, started.execution_id, started.flow_id, created=started.created)

    async def astart_flow(
        self, flow: Flow[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Handle[Any]:
        return await sync_to_async(self.start_flow)(flow, args, kwargs)

    def _deliver_after_commit(self, execution_id: str) -> None:
        self.store.on_commit(lambda: self.engine.woken(execution_id))

    def _handed_on(self, appended: Appended, ticket: Ticket) -> Handle[Any]:
        hand_on(self.engine, self.dispatcher, appended, ticket)
        if appended.kept:
            self._deliver_after_commit(appended.journal.execution_id)
        return Handle(self, appended.journal.execution_id, appended.journal.fold.flow_id)

    # Answering.

    def resume(
        self,
        execution_id: str,
        /,
        *,
        event_type: str,
        payload: Any = None,
        correlation_key: str | None = None,
        principal: Any = None,
        fence: int | None = None,
        fence_if_parked_at: int | None = None,
        allow_flow_code_mismatch: bool = False,
    ) -> Handle[Any]:
        """Answer what a flow waits for by ``ctx.suspend(event_type)``.

        Of any number of callers one wins, and the body that it set going is not fenced out by the others. A
        wait that is pending while the body runs, since another wait of its park was answered, is answered as
        well: the answer is kept until the body comes to it.

        Args:
            fence: a token that the caller holds; for executions that are driven by hand.
            fence_if_parked_at: what :meth:`parked_at_sequence` gave; the fence is taken only if that park is
                unanswered, so that whoever ran the body before can write nothing more. Goes before ``fence``.
                An execution that was ever fenced is answered like this, on its newest park, without it too.

        Raises:
            ExecutionNotFoundError: no such execution.
            ResumeRefusedError: nothing waits for this; ``reason`` says how. Nothing was written.
            ResumeContendedError: others took the fence three times over, and the park is unanswered still.
                Nothing was written; it may be called again.
            StaleFenceError: ``fence`` is not the newest token.
            OpenTransactionError: in a transaction above READ COMMITTED.
            FlowCodeMismatchError: the flow's code is not the one recorded.
            UnencodableValueError, PayloadTooLargeError: the payload cannot be recorded.
        """
        self.store.check_caller("loom.resume", answers=True)
        _check_id(execution_id)
        keys.check_id(event_type, "event_type")
        if correlation_key is not None:
            keys.check_id(correlation_key, "correlation_key")
        if fence is not None:
            keys.check_whole(fence, "fence", 0, _BIGGEST)
        if fence_if_parked_at is not None:
            keys.check_whole(fence_if_parked_at, "fence_if_parked_at", 0, _BIGGEST)
        principal = _checked_principal(principal)
        ticket = self.dispatcher.ticket()
        appended = answers.resume(
            self.engine,
            execution_id,
            event_type=event_type,
            payload=payload,
            correlation_key=correlation_key,
            principal=principal,
            fence=fence,
            fence_if_parked_at=fence_if_parked_at,
            allow_flow_code_mismatch=allow_flow_code_mismatch,
            ownership=ticket.ownership,
        )
        return self._handed_on(appended, ticket)

    def resolve(
        self,
        execution_id: str,
        step_id: str,
        resolution: Resolution,
        /,
        *,
        output: Any = MISSING,
        error: Any = MISSING,
        park_sequence: int | None = None,
        principal: Any = None,
        reason: str = "",
    ) -> Handle[Any]:
        """Settle an effect in doubt: give its result, have it run anew with a fresh key, or fail it.

        Args:
            park_sequence: of the park, or of the EFFECT_INDOUBT, that the verdict answers; another one is
                refused.

        Raises:
            InvalidInputError: an unknown resolution; an output that is missing, or does not belong.
            VerdictRefusedError: the step is not in doubt (any more); it says who answered and when.
            FlowCodeMismatchError: the flow's code is not the one recorded.
        """
        self.store.check_caller("loom.resolve", answers=True)
        _check_id(execution_id)
        keys.check_id(step_id, "step id")
        if park_sequence is not None:
            keys.check_whole(park_sequence, "park_sequence", 0, _BIGGEST)
        keys.check_text(reason, "reason", MAX_REASON)
        principal = _checked_principal(principal)
        ticket = self.dispatcher.ticket()
        appended = answers.resolve(
            self.engine,
            execution_id,
            step_id,
            resolution,
            output=output,
            error=error,
            park_sequence=park_sequence,
            principal=principal,
            reason=reason,
            ownership=ticket.ownership,
        )
        return self._handed_on(appended, ticket)

    def resume_as(
        self,
        execution_id: str,
        /,
        flow: str | Flow[..., Any],
        *,
        version: int | None = None,
        event_type: str | None = None,
        payload: Any = None,
        strategy: moves.Strategy = "replay-check",
        correlation_key: str | None = None,
        fence_if_parked_at: int | None = None,
        principal: Any = None,
        reason: str = "",
    ) -> Handle[Any]:
        """Move an execution to other code and answer its park, in one append: EXECUTION_MIGRATED and
        EXECUTION_RESUMED. From then on it is held to the target's hash and fingerprint.

        Without ``event_type`` it is moved and not answered. That is how an execution is moved that sleeps, or
        waits for a message, a child, a verdict or a fix; and one that is to be run and that nobody holds.

        Args:
            flow: the target: a Flow, or an id: then that ``version``, or else the one that new starts get.
            strategy: ``"replay-check"`` proves that the target declares every recorded step, by itself or
                through a family, and that it gets its arguments; ``"operator-ack"`` takes your word for it.
            fence_if_parked_at: the park that was looked at; if it is over, nothing is written.

        Raises:
            ExecutionNotFoundError: no such execution. FlowNotFoundError: the target is not registered here.
            FlowCodeMismatchError: (``kind`` "replay-check") the target does not declare what the log holds;
                :meth:`replay_check` tells the same beforehand.
            ResumeRefusedError: it is over, runs, or does not wait for this answer. Nothing was written.
            ResumeContendedError, OpenTransactionError: as for :meth:`resume`.
        """
        self.store.check_caller("loom.resume_as", answers=True)
        _check_id(execution_id)
        moves.check_strategy(strategy)
        target = self._move_target(flow, version)
        if event_type is not None:
            keys.check_id(event_type, "event_type")
        elif payload is not None or correlation_key is not None:
            raise InvalidInputError("payload= and correlation_key= belong to an answer: give event_type= too")
        if correlation_key is not None:
            keys.check_id(correlation_key, "correlation_key")
        if fence_if_parked_at is not None:
            keys.check_whole(fence_if_parked_at, "fence_if_parked_at", 0, _BIGGEST)
        keys.check_text(reason, "reason", MAX_REASON)
        principal = _checked_principal(principal)
        ticket = self.dispatcher.ticket()
        appended = answers.move(
            self.engine,
            execution_id,
            target,
            event_type=event_type,
            payload=payload,
            correlation_key=correlation_key,
            strategy=strategy,
            principal=principal,
            reason=reason,
            fence_if_parked_at=fence_if_parked_at,
            ownership=ticket.ownership,
        )
        if event_type is not None:
            return self._handed_on(appended, ticket)
        self._deliver_after_commit(execution_id)  # what has come meanwhile could not be taken by the old code
        return Handle(self, execution_id, target.id)

    def replay_check(
        self, execution_id: str, /, flow: str | Flow[..., Any], *, version: int | None = None
    ) -> moves.MoveReport:
        """What :meth:`resume_as` would be told by its replay check, and the park that it would answer.

        Raises:
            ExecutionNotFoundError: no such execution. FlowNotFoundError: the target is not registered here.
        """
        return moves.report(Fold(self.state(execution_id)), self._move_target(flow, version))

    def _move_target(self, flow: object, version: int | None) -> Flow[..., Any]:
        if version is not None:
            keys.check_whole(version, "version", 1, definitions.MAX_INT)
        given = flow if isinstance(flow, Flow) else keys.check_id(flow, "flow id")
        return moves.target(registry, given, version)

    def retry_error(self, execution_id: str, /, *, principal: Any = None, reason: str = "") -> Handle[Any]:
        """Run an execution again that is parked on an error of its body (``on_error="park"``).

        Raises:
            ResumeRefusedError: it is not parked on an error.
        """
        return self._open_gate("loom.retry_error", ON_ERROR, execution_id, principal, reason)

    def retry_diverged(self, execution_id: str, /, *, principal: Any = None, reason: str = "") -> Handle[Any]:
        """Run an execution again that is parked because its body did not ask for what its log holds.

        Raises:
            ResumeRefusedError: it is not parked for that.
            FlowCodeMismatchError: the flow's code is not the recorded one.
        """
        return self._open_gate("loom.retry_diverged", ON_DIVERGED, execution_id, principal, reason)

    def _open_gate(self, call: str, gate: str, execution_id: str, principal: Any, reason: str) -> Handle[Any]:
        self.store.check_caller(call, answers=True)
        _check_id(execution_id)
        keys.check_text(reason, "reason", MAX_REASON)
        principal = _checked_principal(principal)
        ticket = self.dispatcher.ticket()
        appended = answers.open_gate(
            self.engine, execution_id, gate, principal=principal, reason=reason, ownership=ticket.ownership
        )
        return self._handed_on(appended, ticket)

    def cancel(self, execution_id: str, /, *, reason: str = "", principal: Any = None) -> Handle[Any]:
        """End an execution. What a running body has begun may still happen; it can record nothing more.

        Raises:
            ExecutionNotFoundError: no such execution.
            ExecutionClosedError: it ended otherwise. A second cancel is answered, not an error.
        """
        self.store.check_caller("loom.cancel", answers=True)
        _check_id(execution_id)
        keys.check_text(reason, "reason", MAX_REASON)
        principal = _checked_principal(principal)
        appended = answers.cancel(self.engine, execution_id, reason=reason, principal=principal)
        return Handle(self, execution_id, appended.journal.fold.flow_id)

    def fork(
        self,
        execution_id: str,
        /,
        *,
        from_step: str,
        new_execution_id: str | None = None,
        flow: str | Flow[..., Any] | None = None,
        principal: Any = None,
    ) -> Handle[Any]:
        """Start a new execution over what another one had done before a step was first begun.

        What is copied is served and not done again; the rest is done under the new id, so under new idempotency
        keys. The source is not touched. Idempotent by ``new_execution_id``.

        Args:
            flow: another version to run the copy, by an id (its current one) or a Flow; the recorded one if left out.

        Raises:
            ExecutionNotFoundError: no such execution.
            InvalidInputError: it never began that step; children had been started before it whose end was not
                known; the flow is another one, or pinned.
            ExecutionConflictError: the new id is taken.
            FlowCodeMismatchError: without ``flow``: no registered version is the recorded one.
        """
        self.store.check_caller("loom.fork")
        keys.check_id(from_step, "from_step")
        target = registry.current(keys.check_id(flow, "flow id")) if isinstance(flow, str) else flow
        return self._copied(
            execution_id,
            new_execution_id,
            lambda ownership, new_id: forks.fork(
                self.engine,
                execution_id,
                from_step,
                ownership,
                new_id=new_id,
                flow=target,
                principal=_checked_principal(principal),
            ),
        )

    def rerun(
        self, execution_id: str, /, *, new_execution_id: str | None = None, principal: Any = None
    ) -> Handle[Any]:
        """Start a failed execution again as a new one, from the step that it failed with.

        If no step's failure ended it, all of its steps are kept, and the body goes on behind them.

        Raises:
            InvalidInputError: it has not failed, or its compensations have run. For the rest see :meth:`fork`.
        """
        self.store.check_caller("loom.rerun")
        return self._copied(
            execution_id,
            new_execution_id,
            lambda ownership, new_id: forks.rerun(
                self.engine, execution_id, ownership, new_id=new_id, principal=_checked_principal(principal)
            ),
        )

    def _copied(
        self, execution_id: str, new_id: str | None, copy: Callable[[Ownership, str | None], Started]
    ) -> Handle[Any]:
        _check_id(execution_id)
        if new_id is not None:
            keys.check_execution_id(new_id, "new_execution_id")
        ticket = self.dispatcher.ticket()
        started = copy(ticket.ownership, new_id)
        dispatch_start(self.engine, self.dispatcher, started, ticket)
        return Handle(self, started.execution_id, started.flow_id, created=started.created)

    def record_outcome(
        self,
        execution_id: str,
        /,
        outcome: str,
        payload: Any = None,
        *,
        step_id: str | None = None,
        principal: Any = None,
    ) -> Handle[Any]:
        """Note something about an execution that has ended, as often as there is something to note.

        Args:
            outcome: what happened, in a few words.
            step_id: a step that was in doubt when the execution ended: this says what became of its effect,
                and the step leaves the queue of doubts.

        Raises:
            ExecutionNotFoundError: no such execution. InvalidInputError: it has not ended.
            VerdictRefusedError: the step is not in doubt.
        """
        self.store.check_caller("loom.record_outcome", answers=True)
        _check_id(execution_id)
        if step_id is not None:
            keys.check_id(step_id, "step id")
        principal = _checked_principal(principal)
        keys.check_id(outcome, "outcome")
        appended = answers.record_outcome(
            self.engine, execution_id, outcome, payload, step_id=step_id, principal=principal
        )
        return Handle(self, execution_id, appended.journal.fold.flow_id)

    def send(
        self, execution_id: str, /, name: str, payload: Any = None, *, message_id: str | None = None
    ) -> bool:
        """Send a message to a flow's ``ctx.receive(name)``; it is kept until it is wanted.

        Returns:
            False if a message of that ``message_id`` was sent before: the first payload stands.

        Raises:
            ExecutionNotFoundError: no such execution. ExecutionClosedError: it has ended.
            UnencodableValueError, PayloadTooLargeError: the payload cannot be recorded.
        """
        self.store.check_caller("loom.send")
        _check_id(execution_id)
        if not inbox.send(self.engine, execution_id, name, payload, message_id=message_id):
            return False
        # The row is kept; the park is answered after the commit, and by the timer loop if this process dies.
        self._deliver_after_commit(execution_id)
        return True

    # Schedules.

    def pause_schedule(self, schedule_id: str, /, *, reason: str, principal: Any = None) -> bool:
        """Skip what falls due from now on; False, and nothing changes, if the schedule is paused already.

        Raises:
            ScheduleNotFoundError: no schedule of that id is declared here, and none was ever seen.
        """
        return schedules.pause(
            self.engine,
            schedule_id,
            **self._schedule_act("loom.pause_schedule", schedule_id, reason, principal),
        )

    def resume_schedule(self, schedule_id: str, /, *, reason: str, principal: Any = None) -> bool:
        """Start what falls due from now on; what fell due until then is skipped. False if it is not paused.

        Raises:
            ScheduleNotFoundError: no schedule of that id is declared here, and none was ever seen.
        """
        return schedules.resume(
            self.engine,
            schedule_id,
            **self._schedule_act("loom.resume_schedule", schedule_id, reason, principal),
        )

    def trigger_schedule(self, schedule_id: str, /, *, reason: str, principal: Any = None) -> Handle[Any]:
        """Start a schedule's flow now, beside its occurrences: paused or not, whatever else runs.

        Raises:
            ScheduleNotFoundError: no schedule of that id is declared here.
            FlowNotFoundError, InvalidInputError: its flow is not registered, is pinned, or takes other arguments.
        """
        about = self._schedule_act("loom.trigger_schedule", schedule_id, reason, principal)
        started = schedules.trigger(self.engine, self.dispatcher, schedule_id, **about)
        return Handle(self, started.execution_id, started.flow_id, created=started.created)

    def _schedule_act(self, call: str, schedule_id: str, reason: str, principal: Any) -> dict[str, Any]:
        """What an act on a schedule records, checked."""
        self.store.check_caller(call)
        keys.check_id(schedule_id, "schedule id")
        keys.check_text(reason, "reason", MAX_REASON)
        return {"reason": reason, "principal": _checked_principal(principal)}

    # Reading.

    def handle(self, execution_id: str, /) -> Handle[Any]:
        """The handle of an execution.

        Raises:
            ExecutionNotFoundError: no such execution.
        """
        events = self.store.read(_check_id(execution_id), limit=1)
        if not events:
            raise ExecutionNotFoundError(execution_id)
        return Handle(self, execution_id, events[0].data["flow"])

    def state(self, execution_id: str, /) -> ExecutionState:
        """The fold of the whole log.

        Raises:
            ExecutionNotFoundError: no such execution.
        """
        events = self.store.read(_check_id(execution_id))
        if not events:
            raise ExecutionNotFoundError(execution_id)
        return fold(events)

    def history(
        self,
        execution_id: str,
        /,
        *,
        kinds: Iterable[str] | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[Event]:
        """Events of the log in order, from ``after + 1``; all of them unless ``limit`` is given.

        Raises:
            ExecutionNotFoundError: no such execution.
        """
        _check_id(execution_id)
        keys.check_whole(after, "after", 0, _BIGGEST)
        if limit is not None:
            keys.check_whole(limit, "limit", 0, _BIGGEST)
        wanted = None if kinds is None else _checked_kinds(kinds)
        if self.store.status(execution_id) is None:
            raise ExecutionNotFoundError(execution_id)
        if wanted is None:
            return self.store.read(execution_id, after=after, limit=limit)
        events = [event for event in self.store.read(execution_id, after=after) if event.kind in wanted]
        return events if limit is None else events[:limit]

    def parked_at_sequence(self, execution_id: str, /) -> int | None:
        """The sequence of the newest park while it is unanswered; None otherwise."""
        return self.state(execution_id).park_sequence

    # The awaited twins.

    async def astart(self, flow_id: str | Flow[..., Any], /, **options: Any) -> Handle[Any]:
        """:meth:`start`, awaited."""
        return await sync_to_async(self.start)(flow_id, **options)

    async def aresume(self, execution_id: str, /, **options: Any) -> Handle[Any]:
        """:meth:`resume`, awaited."""
        return await sync_to_async(self.resume)(execution_id, **options)

    async def aresolve(
        self, execution_id: str, step_id: str, resolution: Resolution, /, **options: Any
    ) -> Handle[Any]:
        """:meth:`resolve`, awaited."""
        return await sync_to_async(self.resolve)(execution_id, step_id, resolution, **options)

    async def aresume_as(
        self, execution_id: str, /, flow: str | Flow[..., Any], **options: Any
    ) -> Handle[Any]:
        """:meth:`resume_as`, awaited."""
        return await sync_to_async(self.resume_as)(execution_id, flow, **options)

    async def areplay_check(
        self, execution_id: str, /, flow: str | Flow[..., Any], *, version: int | None = None
    ) -> moves.MoveReport:
        """:meth:`replay_check`, awaited."""
        return await sync_to_async(self.replay_check)(execution_id, flow, version=version)

    async def aretry_error(self, execution_id: str, /, **options: Any) -> Handle[Any]:
        """:meth:`retry_error`, awaited."""
        return await sync_to_async(self.retry_error)(execution_id, **options)

    async def aretry_diverged(self, execution_id: str, /, **options: Any) -> Handle[Any]:
        """:meth:`retry_diverged`, awaited."""
        return await sync_to_async(self.retry_diverged)(execution_id, **options)

    async def acancel(self, execution_id: str, /, **options: Any) -> Handle[Any]:
        """:meth:`cancel`, awaited."""
        return await sync_to_async(self.cancel)(execution_id, **options)

    async def arecord_outcome(
        self, execution_id: str, /, outcome: str, payload: Any = None, **options: Any
    ) -> Handle[Any]:
        """:meth:`record_outcome`, awaited."""
        return await sync_to_async(self.record_outcome)(execution_id, outcome, payload, **options)

    async def afork(self, execution_id: str, /, **options: Any) -> Handle[Any]:
        """:meth:`fork`, awaited."""
        return await sync_to_async(self.fork)(execution_id, **options)

    async def arerun(self, execution_id: str, /, **options: Any) -> Handle[Any]:
        """:meth:`rerun`, awaited."""
        return await sync_to_async(self.rerun)(execution_id, **options)

    async def asend(
        self, execution_id: str, /, name: str, payload: Any = None, *, message_id: str | None = None
    ) -> bool:
        """:meth:`send`, awaited."""
        return await sync_to_async(self.send)(execution_id, name, payload, message_id=message_id)

    async def apause_schedule(self, schedule_id: str, /, *, reason: str, principal: Any = None) -> bool:
        """:meth:`pause_schedule`, awaited."""
        return await sync_to_async(self.pause_schedule)(schedule_id, reason=reason, principal=principal)

    async def aresume_schedule(self, schedule_id: str, /, *, reason: str, principal: Any = None) -> bool:
        """:meth:`resume_schedule`, awaited."""
        return await sync_to_async(self.resume_schedule)(schedule_id, reason=reason, principal=principal)

    async def atrigger_schedule(
        self, schedule_id: str, /, *, reason: str, principal: Any = None
    ) -> Handle[Any]:
        """:meth:`trigger_schedule`, awaited."""
        return await sync_to_async(self.trigger_schedule)(schedule_id, reason=reason, principal=principal)

    async def ahandle(self, execution_id: str, /) -> Handle[Any]:
        """:meth:`handle`, awaited."""
        return await sync_to_async(self.handle)(execution_id)

    async def astate(self, execution_id: str, /) -> ExecutionState:
        """:meth:`state`, awaited."""
        return await sync_to_async(self.state)(execution_id)

    async def ahistory(self, execution_id: str, /, **options: Any) -> list[Event]:
        """:meth:`history`, awaited."""
        return await sync_to_async(self.history)(execution_id, **options)

    async def aparked_at_sequence(self, execution_id: str, /) -> int | None:
        """:meth:`parked_at_sequence`, awaited."""
        return await sync_to_async(self.parked_at_sequence)(execution_id)


loom = Loom()
definitions.bind_runtime(lambda: loom)

__all__ = ["FlowNotFoundError", "Handle", "Loom", "PendingWait", "loom"]
