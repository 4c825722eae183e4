"""The harness: flows run in the test's own thread and connection, on a clock that the test moves.

While a harness is entered nothing runs by itself. What a test has started or answered stands ready in the
database (a start that was rolled back does not), and :meth:`Harness.run` drives it. Time stands still until
:meth:`Harness.advance`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, get_args

from django.core.signals import setting_changed

from loom_django.conf import get_settings
from loom_django.definitions import Tool
from loom_django.engine import answers
from loom_django.engine.body import Body, is_aware
from loom_django.engine.context import StepContext
from loom_django.engine.core import Engine, Identity, NoKeeper, random_token, to_micros
from loom_django.engine.drive import Command, Driver, Invoke, Outcome
from loom_django.engine.drive_async import AsyncDriver
from loom_django.engine.drive_sync import SyncDriver
from loom_django.engine.run import Ended, run_execution
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import ContextMisuseError, InvalidInputError, OpenTransactionError
from loom_django.kernel.state import ON_CHILD, ON_MESSAGE, TERMINAL_STATUSES
from loom_django.runtime import loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.recovery import recover_abandoned
from loom_django.services.timers import TimerService
from loom_django.stores import store_for
from loom_django.stores.base import READY, Claimed
from loom_django.testing.determinism import check_replay

Point = Literal["before-start", "before-effect", "in-effect", "after-effect", "after-outcome"]
POINTS: Final[tuple[Point, ...]] = get_args(Point)

# More body runs in one call than any test needs: flows that answer each other without end stop here.
TURNS: Final = 10_000

_NOTHING: Final[Any] = object()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool: what it was given, whatever came of it."""

    step_id: str
    idempotency_key: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    execution_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """An effect that waits for a verdict."""

    execution_id: str
    step_id: str
    idempotency_key: str
    cause: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A point of a step's life that a run has come to.

    ``execution`` counts the executions of a test from 0, ``number`` the times of this very point from 1.
    """

    execution: int
    execution_id: str = field(compare=False)
    flow_id: str
    step_id: str
    point: Point
    number: int
    tool: Tool[..., Any] = field(compare=False, repr=False)


class Harness:
    """Drives flows in a test; made by :func:`harness`."""

    def __init__(self) -> None:
        self._engine_in_use: Engine | None = None
        self._clock: datetime | None = None
        self._shift = timedelta()
        self._stubs: dict[tuple[Callable[..., Any], str | None], Callable[..., Any]] = {}
        self._made: list[tuple[Call, Callable[..., Any]]] = []
        self._armed: list[Callable[[Passage], bool]] = []
        self._passages: list[Passage] = []
        self._times: Counter[tuple[str, str, Point]] = Counter()
        self._entered: list[str] = []  # the executions whose bodies were run, in the order of their first run
        self._bodies: dict[str, Body] = {}  # those that are running now
        self._receiving: set[str] = set()  # those that are parked on a message
        self._died = False
        self._recovers_at_once = False

    def __enter__(self) -> Harness:
        if self in _entered_harnesses:
            raise ContextMisuseError("this harness is in use already: make another one by harness()")
        _entered_harnesses.append(self)
        self._install()
        setting_changed.connect(self._settings_changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setting_changed.disconnect(self._settings_changed)
        _entered_harnesses.remove(self)
        self._engine_in_use = None
        loom.reset()
        if _entered_harnesses:
            _entered_harnesses[-1]._install()

    def _settings_changed(self, *, setting: str, **kwargs: Any) -> None:
        # The runtime has heard of it before and has dropped its engine.
        if setting in ("LOOM", "DATABASES") and _entered_harnesses[-1] is self:
            self._install()

    def _install(self) -> None:
        """Put an engine of the test's own in the place of the configured one."""
        usual = loom.engine
        engine = _StandingEngine(
            store_for(get_settings().DATABASE),
            usual.settings,
            usual.registry,
            keeper=NoKeeper(),
            announce=usual.announce,
            diverged=usual.diverged,
            crash_point=self._reached,
            # The longest delay that the policy allows, so that a test can tell how far to move the clock.
            draw=lambda: math.nextafter(1.0, 0.0),
        )
        engine.harness = self
        engine.stubs = _Stubs(self)
        engine.store.shift_clock(self._shift)
        self._engine_in_use = engine
        loom._engine = engine
        loom._dispatcher = WorkerDispatcher()

    @property
    def _engine(self) -> Engine:
        if self._engine_in_use is None:
            raise ContextMisuseError(
                "the harness is not in use: enter it, by `with harness() as h:` or self.enterContext(harness())"
            )
        return self._engine_in_use

    # Running.

    def run(self) -> None:
        """Run whatever is ready in the database until each execution is parked or over.

        After each park the log is played again against the body. After a crash that :meth:`crash` made, the
        clock is moved past the dead process's lease and recovery takes over first.

        Raises:
            NonDeterminismError: a body does not ask for what its log holds.
            OpenTransactionError: inside ``atomic()``; TestCase's own does not count.
        """
        self._refuse_misplaced("harness.run()")
        self._take_over()
        self._drive()

    def _refuse_misplaced(self, call: str) -> None:
        if self._bodies:
            raise ContextMisuseError(f"{call} in a flow or a tool: the harness is running already")
        if self._engine.store.in_transaction():
            raise OpenTransactionError(
                call, "what was started here is not committed yet", "Call it after the block."
            )

    def _drive(self) -> None:
        for _ in range(TURNS):
            self._deliver()
            claimed = self._claim()
            if claimed is None:
                return
            self._run_body(claimed)
            if self._died and not self._recovers_at_once:
                return
            self._take_over()
        raise AssertionError(f"{TURNS} body runs and still something is ready: do flows answer each other?")

    def _claim(self) -> Claimed | None:
        """Take the execution that a worker would take next."""
        engine = self._engine
        claimed = engine.store.claim_ready(
            owner=engine.identity.name,
            token=random_token(),
            ttl=engine.settings().LEASE_TTL,
            limit=1,
            known=engine.known(),
        )
        return claimed[0] if claimed else None

    def _run_body(self, claimed: Claimed) -> None:
        engine, execution_id = self._engine, claimed.execution_id
        body: Body | None = None
        try:
            ended = run_execution(
                engine, execution_id, token=claimed.token, fence=claimed.fence, on_start=self._enter_body
            )
        finally:
            body = self._bodies.pop(execution_id, None)
        if body is None:
            return  # this process cannot serve it; the log line says why
        if body.sealed is not None and body.sealed.why is Why.STORE and body.sealed.cause is not None:
            raise body.sealed.cause
        if ended in (Ended.PARKED, Ended.FINISHED):
            self._note_receiving(body)
            check_replay(engine, execution_id)

    def _enter_body(self, body: Body) -> None:
        kind = _AsyncOnClock if body.flow.is_async else _SyncOnClock
        body.driver = kind(self)
        self._bodies[body.execution_id] = body
        if body.execution_id not in self._entered:
            self._entered.append(body.execution_id)

    def _note_receiving(self, body: Body) -> None:
        fold = body.journal.fold
        if any(wait.on in (ON_MESSAGE, ON_CHILD) for wait in fold.pending_waits()):
            self._receiving.add(body.execution_id)
        else:
            self._receiving.discard(body.execution_id)
        if fold.status in TERMINAL_STATUSES:
            for child in fold.children:
                answers.close_with_parent(self._engine, child)

    def _deliver(self) -> None:
        """Deliver what came in a transaction whose end a TestCase does not tell: messages, ends of children."""
        for execution_id in sorted(self._receiving):
            answers.deliver(self._engine, execution_id, READY)

    # Time.

    @property
    def now(self) -> datetime:
        """What the clock of flows, timers and leases says; aware, UTC. It stands until it is moved."""
        if self._clock is None:
            self._clock = self._engine.store.now()
        return self._clock

    def advance(self, to: timedelta | datetime) -> None:
        """Move the clock by a length or to an aware point in time, and let happen what falls due on the way.

        Timers fire, and delayed starts are run, in the order of their times; what a timer wakes is run before the
        next one. What is ready is run first. In a tool or a stub only the clock moves: so a call outlasts its ``timeout=``.

        Raises:
            InvalidInputError: backwards, or a naive datetime.
        """
        target = self._target(to)
        if self._bodies:
            self._move_to(target)
            return
        self.run()
        while not self._died:
            timer, start = self._engine.store.next_due(), self._engine.store.upcoming().ready
            if start is not None and start <= target and (timer is None or start < timer):
                self._move_to(start)
            elif timer is None or timer > target:
                break
            else:
                self._move_to(timer)
                if not self._fire():
                    # A row that only another process can serve stands before the others: they are taken together.
                    self._move_to(target)
                    if not self._fire():
                        break
            self._drive()
        self._move_to(target)
        if not self._died:
            self._drive()  # what was to start behind such a row

    def _target(self, to: timedelta | datetime) -> datetime:
        if isinstance(to, timedelta):
            target = self.now + to
        elif is_aware(to):
            target = to.astimezone(UTC)
        else:
            raise InvalidInputError(f"advance takes a timedelta or an aware datetime, not {to!r}")
        if target < self.now:
            raise InvalidInputError(
                f"the clock stands at {self.now.isoformat()} and goes forward only, not {to!r}"
            )
        return target

    def _move_to(self, instant: datetime) -> None:
        """Set the clock. The store's own goes on from there, so it is never behind."""
        self._clock = max(self.now, instant)
        behind = self._clock - self._engine.store.now()
        if behind > timedelta():
            self._engine.store.shift_clock(behind)
            self._shift += behind

    def _fire(self) -> bool:
        """Fire one timer that is due; False if there is none that this process can serve."""
        return TimerService(self._engine, lambda: loom.dispatcher, limit=1).tick()

    # Tools.

    def stub(
        self,
        tool: Tool[..., Any],
        result: Any = _NOTHING,
        *,
        raises: BaseException | type[BaseException] | None = None,
        calls: Callable[..., Any] | None = None,
    ) -> None:
        """Answer for a tool: with a result, an exception, or a function that gets what the tool gets.

        The newest stub of a tool counts. A stub of ``tool.keyed(key)`` or ``tool.named(id)`` is for that step.

        Raises:
            InvalidInputError: not exactly one of ``result``, ``raises`` and ``calls``.
        """
        if [result is not _NOTHING, raises is not None, calls is not None].count(True) != 1:
            raise InvalidInputError("stub() takes one of: a result, raises= or calls=")
        self._stubs[tool.func, tool.step_id] = calls or _answering(result, raises)

    def calls(self, tool: Tool[..., Any]) -> list[Call]:
        """The calls of a tool so far, stubbed or not; of one step for ``tool.keyed(key)``, ``tool.named(id)``."""
        return [
            call
            for call, func in self._made
            if func is tool.func and (tool.step_id is None or call.step_id == tool.step_id)
        ]

    @contextmanager
    def _called(
        self, func: Callable[..., Any], ctx: StepContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Callable[..., Any]]:
        """Around a tool's effect: the call is noted, and a crash in the effect happens after it."""
        call = Call(
            step_id=ctx.step_id,
            idempotency_key=ctx.idempotency_key,
            args=copy.deepcopy(args),
            kwargs=copy.deepcopy(dict(kwargs)),
            execution_id=ctx.execution_id,
            attempt=ctx.attempt,
        )
        self._made.append((call, func))
        dies = self._passes("in-effect", ctx.execution_id, ctx.step_id)
        try:
            yield self._stubs.get((func, ctx.step_id)) or self._stubs.get((func, None)) or func
        finally:
            if dies:
                self._die(ctx.execution_id)

    # Crashes.

    def crash(self, tool: Tool[..., Any], point: Point) -> None:
        """Let the process die when a step of this tool next comes to a point; once.

        ``before-start`` nothing of the step is in the log. ``before-effect`` it is marked as begun.
        ``in-effect`` the effect has happened, the call has not returned. ``after-effect`` it has returned.
        ``after-outcome`` its outcome is recorded, as durably as it would be then. :meth:`run` stops at the
        crash; the next one recovers.

        Raises:
            InvalidInputError: no such point.
        """
        check_point(point)
        self._armed.append(lambda passage: passage.point == point and _belongs_to(passage, tool))

    def _reached(self, point: str, execution_id: str, step_id: str) -> None:
        # The engine's "in-effect" is before the call; a crash there would be one before the effect.
        if point in POINTS and point != "in-effect" and self._passes(point, execution_id, step_id):
            self._die(execution_id)

    def _passes(self, point: Point, execution_id: str, step_id: str) -> bool:
        """Note a passage; True if the process is to die here."""
        body = self._bodies[execution_id]
        self._times[execution_id, step_id, point] += 1
        passage = Passage(
            execution=self._entered.index(execution_id),
            execution_id=execution_id,
            flow_id=body.flow.id,
            step_id=step_id,
            point=point,
            number=self._times[execution_id, step_id, point],
            tool=body.shared.tools[step_id],
        )
        self._passages.append(passage)
        for armed in self._armed:
            if armed(passage):
                self._armed.remove(armed)
                return True
        return False

    def _die(self, execution_id: str) -> NoReturn:
        """Leave the body so that nothing more is written: its lease stays, as a dead process's does."""
        self._died = True
        body = self._bodies[execution_id]
        body.sealed = Unwind(Why.CRASHED)
        raise body.sealed

    def _take_over(self) -> None:
        """After a crash: another process, later than every lease of the dead one, recovers."""
        if not self._died:
            return
        self._died = False
        engine = self._engine
        engine.identity = Identity()
        leases = [engine.store.held(execution_id) for execution_id in self._entered]
        self._move_to(max((lease.until for lease in leases if lease is not None), default=self.now))
        summary = recover_abandoned(loom, leases=engine.store)
        for execution_id, why in summary.failures:
            raise AssertionError(f"execution {execution_id!r} could not be recovered: {why}")

    # Looking.

    def events(self, execution_id: str) -> list[str]:
        """The kinds of an execution's log, in order.

        Raises:
            ExecutionNotFoundError: no such execution.
        """
        return [event.kind for event in loom.history(execution_id)]

    def in_doubt(self) -> list[Doubt]:
        """The effects that wait for a verdict, the oldest execution first."""
        from loom_django.models import Execution

        found = Execution.objects.using(get_settings().DATABASE).in_doubt().order_by("created_at", "pk")
        return [
            Doubt(
                execution_id,
                frame.step_id,
                frame.idempotency_key(execution_id),
                frame.cause,
            )
            for execution_id in found.values_list("pk", flat=True)
            for frame in loom.state(execution_id).in_doubt
        ]


_entered_harnesses: list[Harness] = []


def harness() -> Harness:
    """A harness to be entered: ``with harness() as h:``, or ``self.enterContext(harness())`` in ``setUp``."""
    return Harness()


def check_point(point: str) -> None:
    """Refuse a name that is no point of a step's life.

    Raises:
        InvalidInputError: with the names there are.
    """
    if point not in POINTS:
        raise InvalidInputError(f"{point!r} is no point of a step's life; the points are {', '.join(POINTS)}")


def _answering(result: Any, raises: BaseException | type[BaseException] | None) -> Callable[..., Any]:
    def answer(ctx: StepContext, /, *args: Any, **kwargs: Any) -> Any:
        if raises is not None:
            raise raises
        return result

    return answer


def _belongs_to(passage: Passage, tool: Tool[..., Any]) -> bool:
    if tool.step_id is not None:
        return passage.step_id == tool.step_id
    return passage.tool.func is tool.func


class _StandingEngine(Engine):
    """An engine whose clock is the harness's."""

    harness: Harness

    def now(self) -> int:
        return to_micros(self.harness.now)


class _Stubs(dict[str, Any]):
    """What the engine asks for a tool's function: every call goes by the harness."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self._harness = harness

    def get(self, name: str, func: Any = None) -> Any:
        harness = self._harness
        if not inspect.iscoroutinefunction(func):

            def call(ctx: StepContext, /, *args: Any, **kwargs: Any) -> Any:
                with harness._called(func, ctx, args, kwargs) as effect:
                    return effect(ctx, *args, **kwargs)

            return call

        async def acall(ctx: StepContext, /, *args: Any, **kwargs: Any) -> Any:
            with harness._called(func, ctx, args, kwargs) as effect:
                value = effect(ctx, *args, **kwargs)
                return await value if inspect.isawaitable(value) else value

        return acall


class _OnClock(Driver):
    """Measures calls by the harness's clock, in the test's own thread; waits in process take no time."""

    def __init__(self, harness: Harness) -> None:
        super().__init__(one_thread=False)
        self._harness = harness

    @property
    def sequential(self) -> bool:
        return True

    def call_sync(self, command: Invoke) -> Outcome:
        return super().call_sync(replace(command, timeout=None))

    def _judged(self, command: Command, began: datetime, outcome: Any) -> Any:
        """What became of a call, by the clock that the test moves."""
        if not isinstance(command, Invoke):
            return outcome
        elapsed = (self._harness.now - began).total_seconds()
        if command.timeout is not None and elapsed >= command.timeout:
            return Outcome(error=TimeoutError(), timed_out=True, elapsed=elapsed)
        return replace(outcome, elapsed=elapsed)

    def pause(self, length: float) -> None:
        self._harness._move_to(self._harness.now + timedelta(seconds=length))


class _SyncOnClock(_OnClock, SyncDriver):
    def sibling(self) -> SyncDriver:
        return _SyncOnClock(self._harness)

    def _perform(self, command: Command) -> Any:
        began = self._harness.now
        return self._judged(command, began, super()._perform(command))


class _AsyncOnClock(_OnClock, AsyncDriver):
    async def _perform(self, command: Command) -> Any:
        began = self._harness.now
        return self._judged(command, began, await super()._perform(command))
