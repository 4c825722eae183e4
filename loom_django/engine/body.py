"""One run of a flow's body: what it may ask for, what the log already answers, and when it must stop.

A body is run again from its top on every resume. Everything it asks for has an identity made of names and
counts alone (step ids, wait ids, notes), so the same question finds the same answer in the log. What the log
answers is served; what it does not is done once, with a durable marker before any effect.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from uuid import UUID

from loom_django.conf import LoomSettings
from loom_django.definitions import Flow, Tool
from loom_django.engine import kept, snapshots, steps
from loom_django.engine.core import Engine, from_micros, to_micros
from loom_django.engine.doubt import doubt_waits, park_fields, record_doubts, with_open_doubts
from loom_django.engine.drive import (
    Driver,
    Enter,
    Invoke,
    Io,
    Land,
    Landing,
    Outcome,
    Steps,
    carried_out,
)
from loom_django.engine.journal import LOST, Journal
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import (
    ContextMisuseError,
    DuplicateStepError,
    ExecutionConflictError,
    FlowDivergenceError,
    HistoryLimitError,
    InvalidInputError,
    LoomError,
    OpenTransactionError,
    UndeclaredStepError,
    UnreadableValueError,
    WaitTimedOut,
)
from loom_django.kernel import codec, keys
from loom_django.kernel.divergence import Watch, wait_in_words
from loom_django.kernel.durations import Duration, seconds
from loom_django.kernel.events import KERNEL_KINDS, Encoded, Event, Kind
from loom_django.kernel.state import (
    HISTORY_DECISION,
    ON_BUDGET,
    ON_CHILD,
    ON_MESSAGE,
    ON_TIMER,
    Decision,
    Frame,
    Wait,
    WaitStatus,
    is_reserved,
)
from loom_django.stores.base import NOBODY, Commit, Message, SequenceOccupied, TimerRow, WakesMoved

T = TypeVar("T")

log = logging.getLogger("loom_django.run")

_PACKAGE: Final = str(Path(__file__).resolve().parent.parent)

# durability="deferred" keeps at most so many facts, for at most so many microseconds.
DEFERRED_EVENTS: Final = 100
DEFERRED_MICROS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Compensation:
    """A step that is to run if the flow fails."""

    step_id: str
    tool: Tool[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# A line of the flow's: the short name of its file, and its number.
Place = tuple[str, int]


def in_words(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


# Where and how a step was asked for, and the path of the branch that did. In words only if somebody must be told.
AskedAt = tuple[Place, str, str]


@dataclass
class Deciding:
    """A decider that is running, and the steps that are its decision's."""

    path: str
    asked: list[str] = field(default_factory=list)
    since: int = 0  # see Decision.inner_since

    def served(self, decision: Decision) -> None:
        """A decision inside this one was served: its steps are this one's too."""
        self.asked += decision.inner_steps or ()
        self.reaches(decision.inner_since)

    def reaches(self, since: int) -> None:
        self.since = min(filter(None, (self.since, since)), default=0)


@dataclass
class Shared:
    """What the branches of one body run have in common."""

    unserved: int
    sealed: Unwind | None = None
    misuse: BaseException | None = None
    landed_once: bool = False
    asked: dict[str, AskedAt] = field(default_factory=dict)  # by step
    tools: dict[str, Tool[..., Any]] = field(default_factory=dict)  # of the steps that were asked for
    deciding: list[Deciding] = field(default_factory=list)
    compensations: list[Compensation] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)  # the body, and its branches while they run
    watch: Watch | None = None  # None if nobody looks, or enough was said
    undoing: bool = False  # while compensations run
    told_length: bool = False  # that the log is long
    refused_new: int = 0  # how often the flow has asked for more than the log takes


# What the log answers, where it holds nothing.
UNANSWERED: Final = steps.UNANSWERED

# What a decision's record names of the steps that its decider ran.
MAX_INNER_STEPS: Final = 4096
MAX_INNER_BYTES: Final = 65_536

# How often a flow may catch that its log is full, and ask for something new all the same.
MOST_REFUSED: Final = 100


class Body:
    """The state of one body run, or of one of its parallel branches; what contexts and steps stand on.

    ``path`` is the scope that it runs in: "" for the body itself.
    """

    path = ""
    bound_at: Place | None = None  # of a bound step: the line that gave it to ctx.parallel

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        flow: Flow[..., Any],
        driver: Driver,
        shared: Shared | None = None,
    ) -> None:
        self.engine = engine
        self.journal = journal
        self.execution_id = journal.execution_id
        self.flow = flow
        self.driver = driver
        self.settings: LoomSettings = engine.settings()
        self.shared = shared or Shared(_recorded_facts(journal))
        self.shared.bodies.append(self)
        self.clock = journal.fold.started_at
        self.thread = threading.get_ident()
        self.joined = False  # while its branches run
        self.place: Place = ("", 0)  # of the call in hand
        self.unawaited: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._in_transaction: Callable[[], bool] | None = None  # asked at each call, where those are made

    @property
    def sealed(self) -> Unwind | None:
        """Why this body goes no further."""
        return self.shared.sealed

    @sealed.setter
    def sealed(self, unwind: Unwind | None) -> None:
        self.shared.sealed = unwind

    @property
    def misuse(self) -> BaseException | None:
        return self.shared.misuse

    @misuse.setter
    def misuse(self, error: BaseException | None) -> None:
        self.shared.misuse = error

    def over(self) -> None:
        """The run is over: its log, with all values in it, goes with the last who holds the body, and not with a cycle
        that waits for the collection of garbage."""
        self.shared.bodies.clear()
        if self.shared.sealed is not None:
            self.shared.sealed.__traceback__ = None

    # Entering and leaving.

    @property
    def is_replaying(self) -> bool:
        return self.shared.unserved > 0

    def enter(self, what: str) -> None:
        """Admit a call of the context, or say why not.

        Raises:
            ContextMisuseError: from another thread, or while an earlier call was not awaited.
            OpenTransactionError: inside an open atomic block.
            Unwind: the body was stopped, and went on.
        """
        driver = self.driver
        self.place = self.bound_at or source_place()  # here: rules may run on the stack of another thread
        if driver.closed:
            self._refuse_late(what)
        if self.sealed is not None:
            raise self.sealed
        if driver.stop.is_set():
            raise self.seal(Why.INTERRUPTED)  # the process is draining: the rest is another's
        if threading.get_ident() != self.thread:
            self.refuse(
                ContextMisuseError(
                    f"ctx.{what} was called in another thread than the flow's; the order of its calls would be "
                    f"left to chance. Use ctx.parallel, or threads inside one tool."
                )
            )
        if self.joined:
            self.refuse(
                ContextMisuseError(
                    f"ctx.{what} was called in a branch on the ctx around it: use the ctx that the branch is given"
                )
            )
        if driver.calling and what != "now":
            self.refuse(
                ContextMisuseError(
                    f"ctx.{what} was called in a tool, or in a decider that takes no argument: a replay, which does not "
                    f"run them again, would not ask for it. Call it in the flow, or in a decider that takes the ctx"
                )
            )
        if not driver.in_body():
            self.check_task(what)
        if self.unawaited:
            forgotten = ", ".join(sorted(set(self.unawaited.values())))
            self.unawaited.clear()
            self.refuse(ContextMisuseError(f"ctx.{forgotten} was not awaited before ctx.{what}: write await"))
        if self._in_transaction is None:
            self._in_transaction = self.engine.store.transaction_check()
        if self._in_transaction():
            self.refuse(OpenTransactionError(f"ctx.{what}"))

    def check_task(self, what: str) -> None:
        """Refuse a call from another task than the body's, or from another thread.

        Raises:
            ContextMisuseError: from elsewhere. Unwind: it comes from what an ended or a stopped body left behind.
        """
        if self.driver.in_body() and not self.driver.closed:
            return
        if self.driver.closed:
            self._refuse_late(what)
        if self.sealed is not None:
            raise self.sealed
        self.refuse(
            ContextMisuseError(
                f"ctx.{what} was called in another task or thread than the flow's (asyncio.gather, create_task, "
                f"a task group); the order of its calls would be left to chance. Use ctx.parallel; other "
                f"threads and tasks belong inside one tool."
            )
        )

    def _refuse_late(self, what: str) -> NoReturn:
        """Refuse a call that comes when the body has ended: from what it left running, or from a body after it."""
        error = _late_call(what)
        raise Unwind(Why.OVER, error) if self.flow.is_async else error

    def refuse(self, error: LoomError) -> NoReturn:
        """Raise misuse, and let nothing of this body be dispatched after it."""
        self.misuse = error
        self.sealed = Unwind(Why.MISUSED, error)
        raise error

    def seal(self, why: Why, cause: BaseException | None = None) -> Unwind:
        """Stop the body at its next call; called from other threads too."""
        if self.shared.sealed is None:
            self.shared.sealed = Unwind(why, cause)
        if why is Why.LOST:
            for body in tuple(self.shared.bodies):
                body.driver.interrupt()
        return self.shared.sealed

    def raise_seal(self) -> None:
        """Leave the body if it has been stopped."""
        if (seal := self.sealed) is not None:
            raise seal

    def begin_live(self) -> None:
        """Leave the body if it may do nothing that the log does not hold."""
        self.raise_seal()

    def begin_new(self) -> None:
        """Leave the body if it may not begin what the log knows nothing of.

        What has been begun goes on whatever the length of the log: outcomes, retries, verdicts, compensations.

        Raises:
            HistoryLimitError: the log is full. An outcome to the flow: it may end, or continue as new.
        """
        self.begin_live()
        self.check_length()

    def check_length(self) -> None:
        """Refuse what is new in a full log, and tell once in a run of one that is long."""
        shared, length = self.shared, self.journal.fold.last_sequence
        if shared.undoing:
            return
        known = self.journal.fold.decisions.get(HISTORY_DECISION)
        if known is not None or length >= self.settings.HISTORY_MAX_EVENTS:
            self._refuse_new(length, known)
        if length >= self.settings.HISTORY_WARN_EVENTS and not shared.told_length:
            shared.told_length = True
            log.warning(
                "the log of an execution has %d events, and may have %d: its flow should continue_as_new",
                length,
                self.settings.HISTORY_MAX_EVENTS,
                extra={"execution_id": self.execution_id, "flow_id": self.flow.id},
            )

    def _refuse_new(self, length: int, known: Decision | None) -> NoReturn:
        error = HistoryLimitError(self.execution_id, length, self.settings.HISTORY_MAX_EVENTS)
        self.shared.refused_new += 1
        if self.shared.refused_new > MOST_REFUSED:
            self.refuse(error)  # a loop that catches it would go on for ever
        if known is not None:
            self.served(known.at)
        elif self.flow.on_error == "fail":
            # What follows, compensations too, must follow on a replay, whatever the setting is by then.
            fields = {"decision": HISTORY_DECISION, "value": Encoded.of(length)}
            self.did(self.journal.record(Kind.DECISION_RECORDED, fields).data["at"])
        raise error

    def begin_child(self, child_id: str) -> None:
        """Leave the body if it may not start what the log does not hold."""
        self.begin_new()

    def begin_continuing(self) -> Steps[None]:
        """Leave the body if it may not end here and go on in a successor."""
        self.begin_live()
        if (watch := self.shared.watch) is not None:
            yield from self._compare(watch.skipped(), "continue_as_new")

    def ends_of(self, ids: Sequence[str]) -> dict[str, Event | None]:
        """How these executions ended, as the store has it now."""
        self.settle()
        return self.ask_store(lambda: self.engine.store.ended(ids))

    def branch(self, path: str, driver: Driver) -> BranchBody:
        """A body for a parallel branch of this one."""
        return BranchBody(self, path, driver)

    def lose(self) -> None:
        """The lease is another's: stop at the next call."""
        self.seal(Why.LOST)

    def reached(self, point: str, step_id: str) -> None:
        """Tell the testing kit; a crash that it stages there is the end of this run."""
        if self.engine.crash_point is None:
            return
        try:
            self.engine.reached(point, self.execution_id, step_id)
        except Unwind as unwind:
            self.sealed = unwind
            raise

    # Writing.

    def land(self, **what: Any) -> None:
        """:meth:`landing`, in this thread."""
        carried_out(self.landing(**what))

    def landing(self, **what: Any) -> Landing[None]:
        """Make the kept facts durable, or stop the body.

        Raises:
            WakesMoved: look again. ExecutionConflictError: a child's id is taken; nothing from its start on landed.
        """
        try:
            # A lease may be over: whether the append still holds is the store's to say.
            yield from self.journal.landing(**what)
        except WakesMoved:
            raise
        except LOST as exc:
            if isinstance(exc, SequenceOccupied) and exc.execution_id in self.journal.fold.children:
                yield Io(partial(self._refuse_taken, exc.execution_id))
            raise self.seal(Why.LOST, exc) from exc
        except Exception as exc:
            raise self.seal(Why.STORE, exc) from exc
        self.shared.landed_once = True

    def land_start(self, start: Commit) -> None:
        """Make the kept facts durable together with a child's start; one that follows another need not be waited for.

        Only where the appends of several threads share commits.
        """
        journal = self.journal
        apart = self.engine.store.shares_commits and not self.driver.one_thread
        # Not beside branches: what their tools have done meanwhile would go with a start that is refused.
        if apart and len(self.shared.bodies) == 1 and journal.may_go_on():
            journal.send(start, self.driver.beside)
        else:
            journal.ride_start(start)
            self.land()

    def settle(self) -> None:
        """Wait until all children that were started are there."""
        self.journal.settle()
        if not self.journal.is_settled:
            self.land()

    def _refuse_taken(self, child_id: str) -> NoReturn:
        """Refuse to start a child under an id that is another's.

        Its end would wake its own parent, or nobody: whoever waited for it here would wait for ever.
        """
        self.ask_store(self.journal.take_back_starts)
        self.refuse(ExecutionConflictError(child_id, "parent"))

    def ask_store(self, call: Callable[[], T]) -> T:
        """Read from the store; a flow is not to take a database's outage for an outcome."""
        try:
            return call()
        except Exception as exc:
            raise self.seal(Why.STORE, exc) from exc

    def decode(self, tree: Any) -> Any:
        """A recorded value. One that this code cannot read leaves the execution alone, it does not fail it."""
        try:
            return codec.decode(tree)
        except UnreadableValueError as exc:
            raise self.seal(Why.REFUSED, exc) from exc

    @property
    def deferred(self) -> bool:
        return (self.flow.durability or self.settings.DURABILITY) == "deferred"

    def may_defer(self) -> bool:
        """True if a boundary may wait under ``durability="deferred"``."""
        kept = self.journal.kept
        if not self.deferred or not self.shared.landed_once or not kept or not self.journal.is_settled:
            return False
        age = self.journal.stamp() - kept[0].data["at"]
        return len(kept) < DEFERRED_EVENTS and age < DEFERRED_MICROS

    def served(self, at: int) -> None:
        """Move the body's clock to a fact that it has consumed."""
        self.shared.unserved -= 1
        if at > self.clock:
            self.clock = at

    def did(self, at: int) -> None:
        """Move the body's clock to a fact that it has made; it replays no longer."""
        self.shared.unserved = 0
        if at > self.clock:
            self.clock = at

    # Names.

    def count(self, name: str) -> int:
        """How many times this name has been asked for in this run, this time included."""
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name]

    def ask(self, step_id: str, how: str) -> None:
        """Note that a step is asked for; an id may be asked for once in a run."""
        asked, now = self.shared.asked, (self.place, how, self.path)
        if step_id in asked:
            lines = (f"{in_words(place)} {how}" for place, how, _ in (asked[step_id], now))
            self.refuse(DuplicateStepError(step_id, *lines))
        asked[step_id] = now
        if self.shared.deciding:
            for deciding in self._deciders():
                deciding.asked.append(step_id)

    def _deciders(self) -> list[Deciding]:
        """The deciders that this body runs inside of."""
        if not self.shared.deciding:
            return []
        return [
            deciding
            for deciding in self.shared.deciding
            if not deciding.path or self.path == deciding.path or self.path.startswith(f"{deciding.path}.")
        ]

    def where(self) -> str:
        """The flow's line that asked."""
        return in_words(self.place)

    def mint(self, kind: str, name: str = "") -> str:
        """The next identity of that kind in this scope, from names and counts alone."""
        number = self.count(f"{kind}:{name}")
        scope = f"[{self.path}]" if self.path else ""
        return f"{kind}{scope}:{name}#{number}" if name else f"{kind}{scope}#{number}"

    def undeclared(self, step_id: str, instead: str = "") -> NoReturn:
        self.refuse(UndeclaredStepError(step_id, self.flow.id, list(self.flow.steps), instead))

    # What a flow asks for. Each is a generator of commands; what the log holds is told without one.

    def run(self, tool: Tool[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        yield Enter(partial(self.enter, "run"))
        step_id, answer = self.ask_to_run(tool)
        if answer is not UNANSWERED:
            return answer
        return (yield from self.perform(step_id, tool, args, kwargs))

    def ask_to_run(self, tool: Tool[..., Any]) -> tuple[str, Any]:
        """The id of the step that ``ctx.run(tool, …)`` asks for, and :meth:`answer`."""
        step_id = steps.id_for(self, tool)
        return step_id, self.answer(step_id, tool)

    def answer(self, step_id: str, tool: Tool[..., Any]) -> Any:
        """The outcome that the log holds of a step; UNANSWERED if it holds none. A failure is raised."""
        return steps.answer(self, step_id, tool)

    def perform(
        self,
        step_id: str,
        tool: Tool[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        within: steps.InLoop | None = None,
    ) -> Steps[Any]:
        """Serve a step whose id is known, or run it."""
        return (yield from steps.perform(self, step_id, tool, args, kwargs, within))

    def serve(self, frame: Frame) -> Any:
        """The recorded outcome of a settled step, for which no tool is needed."""
        self.asked_for(frame.step_id)
        return steps.serve(self, frame)

    def run_step(self, step_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Steps[Any]:
        yield Enter(partial(self.enter, "run_step"))
        tool, answer = self.ask_to_run_step(step_id)
        if answer is not UNANSWERED:
            return answer
        return (yield from self.perform(step_id, tool, args, kwargs))

    def ask_to_run_step(self, step_id: str) -> tuple[Tool[..., Any], Any]:
        """The tool of the step that ``ctx.run_step(step_id, …)`` asks for, and :meth:`answer`."""
        tool = steps.tool_of(self, step_id)
        self.ask(step_id, "by its id")
        return tool, self.answer(step_id, tool)

    def suspend(self, on: str, correlation_key: str | None, timeout: Duration | None) -> Steps[Any]:
        yield Enter(partial(self.enter, "suspend"))
        self.checked(lambda: keys.check_id(on, "name of a wait"))
        if is_reserved(on) or on == ON_BUDGET:
            self.refuse(
                InvalidInputError(f"a flow cannot wait on {on!r}: that name is reserved, take another")
            )
        if correlation_key is not None:
            self.checked(lambda: keys.check_id(correlation_key, "correlation key"))
        wait_id = self.mint("wait", on)
        wait = self._find_wait(wait_id)
        if wait is None:
            self.begin_new()
            yield from self._park(Wait(wait_id, on, correlation_key, self.timeout_at(timeout)))
            raise AssertionError("a first park does not return")
        if not wait.answered:
            wait = yield from self.wait_again(wait, "waiting")
            return self.take(wait, live=True)
        return self.take(wait)

    def sleep(self, duration: Duration) -> Steps[None]:
        yield Enter(partial(self.enter, "sleep"))
        length = self.checked(lambda: seconds(duration, "duration of a sleep"))
        yield from self._sleep_until(self.journal.stamp() + round(length * 1_000_000), always=length > 0)

    def sleep_until(self, when: datetime) -> Steps[None]:
        yield Enter(partial(self.enter, "sleep_until"))
        if not is_aware(when):
            self.refuse(
                InvalidInputError(
                    f"sleep_until takes an aware datetime that exists in UTC, not {when!r}: give it a time zone"
                )
            )
        yield from self._sleep_until(to_micros(when), always=False)

    def _sleep_until(self, wake_at: int, *, always: bool) -> Steps[None]:
        wait_id = self.mint("sleep")
        wait = self._find_wait(wait_id)
        if wait is None and not always and wake_at <= self.journal.stamp():
            return
        if wait is None:
            self.begin_new()
        if wait is None or not wait.answered:
            yield from self._park(Wait(wait_id, ON_TIMER, None, wait.wake_at if wait else wake_at))
            raise AssertionError("a park does not return")
        self.served(wait.answered_at)

    def receive(self, name: str, timeout: Duration | None) -> Steps[Any]:
        yield Enter(partial(self.enter, "receive"))
        self.checked(lambda: keys.check_id(name, "name of a message"))
        wait_id = self.mint("message", name)
        wait = self._find_wait(wait_id)
        if wait is not None and wait.answered:
            return self.take(wait)
        (self.begin_new if wait is None else self.begin_live)()
        wake_at = wait.wake_at if wait else self.timeout_at(timeout)
        while True:
            wakes = yield Io(self.wakes)
            taken = yield Io(lambda: self._take_message(wait_id, name))
            if taken:
                if self.deferred:
                    yield Land(self.landing)  # a message that was taken must not come again after an effect
                return self.take(self.journal.fold.waits[wait_id], live=True)
            # A message that came since the look refuses the park: the body looks again.
            yield from self._park(Wait(wait_id, ON_MESSAGE, name, wake_at), wakes=wakes)

    def wait_again(self, wait: Wait, reason: str) -> Steps[Wait]:
        """Take the answer that was kept for a wait of an earlier park, or park on that wait again."""
        self.begin_live()
        yield from self.before_park([wait])
        while True:
            wakes = yield Io(self.wakes)
            if (yield Io(lambda: self._take_kept(wait))):
                if self.deferred:
                    yield Land(self.landing)
                return self.journal.fold.waits[wait.id]
            # An answer that came since the look refuses the park: the body looks again.
            yield Land(partial(self.park, reason, [wait], wakes=wakes))

    def _take_kept(self, wait: Wait) -> bool:
        known = self._find_wait(wait.id)
        if known is not None and known.answered:
            return True  # another branch waits for the same, and has taken it
        message = self.ask_store(lambda: kept.find(self.engine, self.journal.fold, wait))
        if message is None:
            return False
        self.journal.record(Kind.MESSAGE_CONSUMED, kept.fields_of(wait, message))
        self.journal.ride(message=message.number, wait=wait)
        return True

    def wakes(self) -> int:
        return self.ask_store(lambda: self.engine.store.wakes(self.journal.fold.chain))

    def _take_message(self, wait_id: str, name: str) -> bool:
        fold = self.journal.fold
        for message in self.ask_store(lambda: self.engine.store.inbox(fold.chain, name)):
            if message.number not in fold.messages:
                self.journal.record(Kind.MESSAGE_CONSUMED, message_fields(wait_id, message))
                self.journal.ride(message=message.number, wait=fold.waits.get(wait_id))
                return True
        return False

    def decide(self, decision_id: str, decider: Callable[..., Any], context: Any) -> Steps[Any]:
        yield Enter(partial(self.enter, "decide"))
        answer = self.ask_to_decide(decision_id, decider)
        if answer is not UNANSWERED:
            return answer
        return (yield from self.make_decision(decision_id, decider, context))

    def ask_to_decide(self, decision_id: str, decider: Callable[..., Any]) -> Any:
        """The decision that the log holds; UNANSWERED if it holds none."""
        self.checked(lambda: keys.check_id(decision_id, "decision id"))
        if is_reserved(decision_id):
            self.refuse(InvalidInputError(f"{decision_id!r} is a reserved name: take another decision id"))
        if not callable(decider):
            self.refuse(InvalidInputError(f"the decider of {decision_id!r} is a function, not {decider!r}"))
        known = self.journal.fold.decisions.get(decision_id)
        if known is not None:
            self.served(known.at)
            self._served_decision(known)
            return self.decode(known.value)
        return UNANSWERED

    def make_decision(self, decision_id: str, decider: Callable[..., Any], context: Any) -> Steps[Any]:
        """Have a decision made that the log does not hold, and record it."""
        self.begin_new()
        if not self.journal.is_settled:
            yield Io(self.settle)
        inner = Deciding(self.path)
        if takes_arguments(decider):
            value = yield from self._decide_with_steps(decider, context, inner)
        else:
            is_async = inspect.iscoroutinefunction(decider)
            outcome: Outcome = yield Invoke(decider, is_async, None, _ignore_late)
            if outcome.error is not None:
                raise outcome.error
            value = outcome.value
        text = self.checked(lambda: self.encode(value, f"the value of decision {decision_id!r}"))
        fields = {"decision": decision_id, "value": text, **self._inner_fields(inner)}
        event = self.journal.record(Kind.DECISION_RECORDED, fields)
        self.did(event.data["at"])
        return codec.decode(text.tree)

    def _decide_with_steps(
        self, decider: Callable[[Any], Any], context: Any, deciding: Deciding
    ) -> Steps[Any]:
        """Run a decider that asks the context; the steps that it asks for belong to its decision."""
        self.shared.deciding.append(deciding)
        try:
            return (yield Enter(lambda: decider(context)))
        finally:
            self.shared.deciding = [other for other in self.shared.deciding if other is not deciding]

    def _served_decision(self, known: Decision) -> None:
        if self.shared.watch is not None:
            self.shared.watch.decided(known)
        for deciding in self._deciders():
            deciding.served(known)

    def _inner_fields(self, inner: Deciding) -> dict[str, Any]:
        """What a decision's record says of its decider's steps."""
        named = _bounded(inner.asked)
        if len(named) < len(inner.asked):
            frames = self.journal.fold.frames
            begun = (frames[step_id].first_sequence for step_id in inner.asked if step_id in frames)
            inner.reaches(min(begun, default=0))
        return {"inner_steps": named or None, "inner_since": inner.since or None}

    def on_failure(self, tool: Tool[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.enter("on_failure")
        self.driver.exclusively(lambda: self._compensate_by(tool, args, kwargs))

    def _compensate_by(self, tool: Tool[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        step_id = steps.id_for(self, tool)
        steps.check_arguments(self, step_id, tool, args, kwargs)
        self.shared.compensations.append(Compensation(step_id, tool, args, dict(kwargs)))

    def emit(self, kind: str, payload: Any) -> None:
        self.enter("emit")
        self.checked(lambda: keys.check_id(kind, "kind of an event"))
        if kind in KERNEL_KINDS:
            self.refuse(
                InvalidInputError(f"{kind!r} cannot be emitted: give a name that is no kind of the kernel")
            )
        value = self._encoded(payload, f"payload of {kind}")
        self.driver.exclusively(lambda: self._note(kind, self.mint("emit"), {"value": value}))

    def meter(self, resource: str, amount: Any) -> None:
        self.enter("meter")
        fields = self.checked(lambda: metered(resource, amount))
        self.driver.exclusively(lambda: self._note(Kind.RESOURCE_METERED, self.mint("meter"), fields))

    def _note(self, kind: str, note: str, fields: Mapping[str, Any]) -> None:
        if note in self.journal.fold.noted:
            self.shared.unserved -= 1
            return
        self.begin_new()
        self.shared.unserved = 0
        self.journal.record(kind, {"note": note, **fields})

    def uuid4(self) -> UUID:
        self.enter("uuid4")
        seed = hashlib.sha256(f"{self.execution_id}:{self.mint('uuid')}".encode()).digest()
        return UUID(bytes=seed[:16], version=4)

    def random(self) -> random.Random:
        self.enter("random")
        return random.Random(f"{self.execution_id}:{self.mint('random')}")  # noqa: S311  repeatable

    # Waiting.

    def _find_wait(self, wait_id: str) -> Wait | None:
        return self.journal.fold.waits.get(wait_id)

    def take(self, wait: Wait, *, live: bool = False) -> Any:
        (self.did if live else self.served)(wait.answered_at)
        if wait.status is WaitStatus.TIMED_OUT:
            on = wait.correlation_key or wait.on if wait.on == ON_MESSAGE else wait.on
            raise WaitTimedOut(on, wait.correlation_key, from_micros(wait.answered_at))
        return self.decode(wait.answer)

    def timeout_at(self, timeout: Duration | None) -> int | None:
        if timeout is None:
            return None
        length: float = self.checked(lambda: seconds(timeout, "timeout"))
        return self.journal.stamp() + round(length * 1_000_000)

    def _park(self, wait: Wait, *, wakes: int | None = None) -> Steps[None]:
        """Park on one wait; returns only if a wake moved meanwhile."""
        yield from self.before_park([wait])
        yield Land(lambda: self.park("waiting", [wait], wakes=wakes))

    # Divergence: points that a body may not pass unnoticed which skips what its log holds.

    @property
    def divergence(self) -> str:
        """What becomes of a body that does so."""
        return self.flow.divergence or self.settings.DIVERGENCE

    def watch(self) -> None:
        """Begin to look; what is recorded from here on was asked for by this run."""
        if self.divergence != "off":
            fold = self.journal.fold
            self.shared.watch = Watch(fold.frames.values(), fold.migrated_sequence)

    def asked_for(self, step_id: str) -> None:
        """This run has come to a step, recorded or not."""
        if self.shared.watch is not None:
            self.shared.watch.asked(step_id)

    def before_step(self, step_id: str) -> Steps[None]:
        """A step is to start."""
        if (watch := self.shared.watch) is not None:
            frame = self.journal.fold.frames.get(step_id)
            skipped = watch.skipped(watch.before(frame, self.path))
            yield from self._compare(skipped, f"step {step_id!r}")

    def before_park(self, waits: Sequence[Wait]) -> Steps[None]:
        """The body is to park."""
        if (watch := self.shared.watch) is not None:
            yield from self._compare(watch.skipped(), " and ".join(map(wait_in_words, waits)))

    def after_scope(self, scope: str) -> Steps[None]:
        """A parallel scope is over, and no branch of it has failed."""
        if (watch := self.shared.watch) is not None:
            yield from self._compare(watch.skipped_in(scope), "the end of ctx.parallel")

    def before_reopening(self, scope: str, branch: str) -> Steps[None]:
        """A branch of a parallel scope does not fail any more: what came of its failure must be asked for by now."""
        if (watch := self.shared.watch) is not None:
            skipped = watch.skipped_in(scope) if self.path else watch.skipped()
            yield from self._compare(skipped, f"the end of branch {branch!r}, which has failed before")

    def before_end(self) -> Landing[None]:
        """The body has returned."""
        if (watch := self.shared.watch) is not None and (skipped := watch.skipped()):
            code = inspect.unwrap(self.flow.func).__code__
            line = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            yield Io(partial(self._diverge, skipped, "the end of the flow", line))

    def _compare(self, skipped: tuple[str, ...], seen: str) -> Steps[None]:
        if skipped:
            yield Io(partial(self._diverge, skipped, seen, self.where()))

    def _diverge(self, skipped: tuple[str, ...], seen: str, line: str) -> None:
        """Say so, once in a run, and go on; or stop the body."""
        self.shared.watch = None
        error = FlowDivergenceError(self.execution_id, skipped, seen, line)
        if self.divergence == "fail":
            raise self.seal(Why.DIVERGED, error)
        self.tell_divergence(logging.WARNING, error)

    def tell_divergence(self, level: int, error: FlowDivergenceError) -> None:
        """Log a divergence, and send its signal."""
        fold = self.journal.fold
        log.log(level, "%s", error, extra={"execution_id": self.execution_id, "flow_id": fold.flow_id})
        self.engine.diverged(fold.flow_id, fold.version, fold.last_sequence, error)

    def park(
        self,
        reason: str,
        waits: list[Wait],
        *,
        wakes: int | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> Landing[None]:
        """Write the park with everything that can end it, and leave the body.

        Returns only if ``wakes`` moved: then nothing was written.
        """
        waits = with_open_doubts(self.journal.fold, waits)
        timers = tuple(
            TimerRow(self.execution_id, from_micros(wait.wake_at))
            for wait in waits
            if wait.wake_at is not None
        )
        self.journal.record(Kind.EXECUTION_SUSPENDED, park_fields(reason, waits, error))
        try:
            yield from self.landing(ownership=NOBODY, timers=timers, wakes=wakes)
        except WakesMoved:
            yield Io(lambda: self.ask_store(lambda: self.journal.rebase(self.journal.kept[:-1])))
            return
        self.engine.watch.remember(self.journal.fold, self.journal.writer)
        if snapshots.due(self.journal):
            yield Io(partial(snapshots.take, self.journal))
        # Whatever was said meanwhile by others (misuse in another task): the park has landed, and is the end.
        self.sealed, self.misuse = Unwind(Why.PARKED), None
        raise self.sealed

    def park_in_doubt(self, doubts: list[Frame], cause: str) -> Landing[None]:
        """Park on effects whose fate nobody knows; leaves the body."""
        record_doubts(self.journal, doubts, cause)
        yield from self.park("effect-indoubt", doubt_waits(doubts))

    # Values.

    def encode(self, value: Any, path: str) -> Encoded:
        return Encoded.of(value, path=path, limit=self.settings.MAX_PAYLOAD_BYTES)

    def _encoded(self, value: Any, path: str) -> Encoded:
        return self.checked(lambda: self.encode(value, path))  # type: ignore[no-any-return]

    def checked(self, call: Callable[[], Any]) -> Any:
        """Run a check of the flow's own input; what it raises is misuse."""
        try:
            return call()
        except LoomError as exc:
            self.refuse(exc)

    def now(self) -> datetime:
        self.enter("now")
        return from_micros(self.clock)


@dataclass(frozen=True, slots=True)
class Parked:
    """What a branch waits for, and the count of wakes that it saw before it looked."""

    reason: str
    waits: list[Wait]
    wakes: int | None


class BranchBody(Body):
    """One parallel branch: names, clock and counts of its own, the log and the seal of the whole body.

    It does not park by itself: it is left, and its scope parks when no other branch runs. ``closed`` is one of
    a scope that has failed, now or by the log: it goes as far as the log, and does nothing new; nor do the branches
    inside it.
    """

    def __init__(self, parent: Body, path: str, driver: Driver) -> None:
        super().__init__(parent.engine, parent.journal, parent.flow, driver, parent.shared)
        self.path = path
        self.parent = parent
        self.clock = parent.clock
        self.closed = False
        self.parked: Parked | None = None
        self._stopped: Unwind | None = None

    def _refuse_late(self, what: str) -> NoReturn:
        if self.parent.driver.closed:
            self.parent._refuse_late(what)
        self.raise_seal()
        self.refuse(_late_call(what))

    @property
    def sealed(self) -> Unwind | None:
        around = self.parent.sealed
        return around if around is not None else self._stopped

    @sealed.setter
    def sealed(self, unwind: Unwind | None) -> None:
        self.shared.sealed = unwind

    def stop(self, why: Why) -> Unwind:
        """Leave this branch alone at its next call."""
        if self._stopped is None:
            self._stopped = Unwind(why)
        return self._stopped

    def begin_live(self) -> None:
        self.parent.begin_live()  # a scope inside of a closed branch does nothing new either
        super().begin_live()
        if self._is_closed():
            raise self.stop(Why.SIBLING)

    def _is_closed(self) -> bool:
        around = self.parent
        return self.closed or (isinstance(around, BranchBody) and around._is_closed())

    def before_park(self, waits: Sequence[Wait]) -> Steps[None]:
        """The scope parks, and asks then."""
        yield from ()

    def raise_seal(self) -> None:
        """A sibling's failure does not stop a step whose marker is durable."""
        if self.parent.sealed is not None:
            raise self.parent.sealed

    def park(
        self,
        reason: str,
        waits: list[Wait],
        *,
        wakes: int | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> Landing[None]:
        self.begin_live()
        self.parked = Parked(reason, waits, wakes)
        yield from ()  # its scope writes the park
        raise self.stop(Why.WAITING)


def _late_call(what: str) -> ContextMisuseError:
    return ContextMisuseError(
        f"ctx.{what} was called on the ctx of a flow or a branch that had ended: use the ctx that the function is given"
    )


def _recorded_facts(journal: Journal) -> int:
    fold = journal.fold
    served = sum(1 for frame in fold.frames.values() if frame.settled)
    waits = sum(1 for wait in fold.waits.values() if wait.answered and wait.on != ON_CHILD)
    return served + waits + len(fold.decisions) + len(fold.noted) + len(fold.child_ids)


def _bounded(inner: Sequence[str]) -> list[str]:
    """As many of a decider's steps as its record may name."""
    kept, size = [], 0
    for step_id in inner[:MAX_INNER_STEPS]:
        size += len(step_id)
        if size > MAX_INNER_BYTES:
            break
        kept.append(step_id)
    return kept


def _ignore_late(outcome: Outcome) -> None:
    """A decider has no timeout, so it cannot return late."""


def message_fields(wait_id: str, message: Message) -> dict[str, Any]:
    """The payload of MESSAGE_CONSUMED."""
    return {
        "wait": wait_id,
        "on": ON_MESSAGE,
        "name": message.name,
        "number": message.number,
        "message": message.message_id,
        "payload": Encoded(message.body),
        "principal": message.principal or None,
        "reason": message.reason or None,
    }


def metered(resource: str, amount: Any) -> dict[str, Any]:
    """The payload of RESOURCE_METERED.

    Raises:
        InvalidIdError: the resource is no name. InvalidInputError: no finite amount of 0 or more.
    """
    keys.check_id(resource, "metered resource")
    if isinstance(amount, bool) or not isinstance(amount, int | float | Decimal):
        raise InvalidInputError(f"a metered amount is an int, float or Decimal, not {amount!r}")
    exact = Decimal(str(amount) if isinstance(amount, float) else amount)
    if not exact.is_finite() or exact < 0:
        raise InvalidInputError(f"a metered amount is finite and not negative, not {amount!r}")
    return {"resource": resource, "amount": Encoded.of(exact)}


def takes_arguments(function: Callable[..., Any]) -> bool:
    """True too for one whose signature cannot be read, as of some built-in functions."""
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:
        return True


def is_aware(when: object) -> bool:
    """True for an aware datetime that is a point in time in UTC too."""
    if not isinstance(when, datetime) or when.utcoffset() is None:
        return False
    try:
        when.astimezone(UTC)
    except OverflowError:
        return False
    return True


def source_place() -> Place:
    """Where the flow made the call that :meth:`Body.enter` admits: the nearest frame outside this package."""
    # enter() and its caller are of this package. Each frame that is looked at is made for it.
    frame = sys._getframe(3)
    while not (name := _name_outside(frame.f_code.co_filename)) and frame.f_back is not None:
        frame = frame.f_back
    return name, frame.f_lineno


@cache
def _name_outside(filename: str) -> str:
    """The short name of a file outside this package; "" for one of its own."""
    return "" if filename.startswith(_PACKAGE) else os.path.basename(filename)
