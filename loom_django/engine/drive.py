"""One core, two ways to run it.

The engine's rules are generators that yield *commands* and get their results sent back; nothing in them waits.
A driver carries the commands out: that of :mod:`drive_sync` in the body's own thread, that of :mod:`drive_async` for
``async def`` bodies. So both kinds of flow obey the same rules. Here are the commands, and what the drivers share.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from loom_django.engine import calls
from loom_django.engine.calls import Call, Here, Outcome, OwnThread, Share, abandoned, measured
from loom_django.engine.unwind import Unwind, Why
from loom_django.stores.base import Commit, EventStore

__all__ = [
    "Append",
    "Branch",
    "Command",
    "CutOff",
    "Driver",
    "Enter",
    "Invoke",
    "Io",
    "Join",
    "Land",
    "Landing",
    "Outcome",
    "Pause",
    "Steps",
    "abandoned",
    "carried_out",
]

T = TypeVar("T")


# Commands are made for every question of a body; a frozen one would cost thrice as much.


@dataclass(slots=True)
class Io:
    """Run this against the store, in a thread where that is allowed."""

    call: Callable[[], Any]


@dataclass(slots=True)
class Append:
    """Have this commit landed; what refuses it is raised."""

    store: EventStore
    commit: Commit

    def call(self) -> None:
        self.store.append(self.commit)


# What makes kept facts durable: composes here, and yields what is to be done where the store may be waited for.
Landing = Generator[Append | Io, Any, T]


def carried_out(landing: Landing[T]) -> T:
    """Do all of it in this thread."""
    try:
        command = next(landing)
        while True:
            try:
                result = command.call()
            except BaseException as exc:
                command = landing.throw(exc)
            else:
                command = landing.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class Land(Io):
    """Do this, with nothing else of the body's landed meanwhile; what composes runs where the rules do."""

    __slots__ = ("landing",)

    def __init__(self, landing: Callable[[], Landing[Any]]) -> None:
        super().__init__(lambda: carried_out(landing()))
        self.landing = landing


@dataclass(frozen=True, slots=True)
class Invoke:
    """Call a tool. Its answer is an :class:`Outcome`, whatever happens in it."""

    call: Callable[[], Any]
    is_async: bool
    timeout: float | None
    on_late: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait in process, at most this many seconds; ends early if the process is told to end."""

    seconds: float


@dataclass(slots=True)
class Enter:
    """Run this where the flow made its call: it looks at the caller's thread, task and connection, or is code
    of the flow's own. What it returns is awaited if it can be."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Join:
    """Run a scope's branches side by side until each has ended, or waits.

    ``interrupted`` is told of the first signal that asks the process to end; a second one is raised.
    """

    branches: Sequence[Branch]
    interrupted: Callable[[BaseException], None]


class Branch(Protocol):
    """What a driver needs of a parallel branch."""

    def enter(self, driver: Driver) -> Callable[[], Any]:
        """Take the branch's own driver; gives its function, to be called where the branch runs."""

    def end(self, outcome: Outcome) -> Landing[None]:
        """It has ended so; what is kept of it is landed."""


Command = Io | Invoke | Pause | Enter | Join
Steps = Generator[Command, Any, T]


class CutOff(BaseException):
    """The flow cancelled its own task while it waited for a call of the context."""


_current = threading.local()


def in_body() -> bool:
    """True in a thread that is running a flow's body, tools included."""
    return getattr(_current, "depth", 0) > 0


@contextmanager
def inside_body() -> Iterator[None]:
    """Count as running a body in this thread."""
    _current.depth = getattr(_current, "depth", 0) + 1
    try:
        yield
    finally:
        _current.depth -= 1


_NEVER: Final = threading.Event()


class Driver:
    """What both drivers share: the calls that are made in threads."""

    # Has something of the engine's done in a thread that many bodies share; None where each makes its own.
    beside: Callable[[Callable[[], None]], None] | None = None

    def __init__(self, *, one_thread: bool) -> None:
        self.one_thread = one_thread  # a TestCase: no other thread sees its transaction
        self.stop = _NEVER  # unless somebody says when
        self._own = OwnThread()
        self._here = one_thread or calls.in_testcase()
        self._call: Call | None = None
        self._interrupted = False
        self._left = False
        self.calling = False  # a plain tool, or a decider, in the thread of the body

    @property
    def sequential(self) -> bool:
        """True where all must happen in one thread: branches run one after the other there."""
        return self.one_thread

    @property
    def closed(self) -> bool:
        """True when the body has ended: what it left running may do nothing more."""
        return self._left

    def in_body(self) -> bool:
        """True where the body itself runs, rather than something that it has set going beside it."""
        return True

    def exclusively(self, call: Callable[[], T]) -> T:
        """Run something of the engine's that does not wait, where all of its rules run."""
        return call()

    def interrupt(self) -> None:
        """Cancel the async tool that runs, and any that would; called from other threads."""
        self._interrupted = True
        call = self._call
        if call is not None:
            call.interrupt(asyncio.CancelledError())

    def call_sync(self, command: Invoke) -> Outcome:
        """Call a plain tool, in a thread of its own if it has a timeout."""
        if command.timeout is None or self.one_thread:
            self.calling = True
            try:
                outcome = measured(command.call)
            finally:
                self.calling = False
            if isinstance(outcome.error, Unwind):
                raise outcome.error
            late = command.timeout is not None and outcome.elapsed > command.timeout
            return Outcome(error=TimeoutError(), timed_out=True, elapsed=outcome.elapsed) if late else outcome
        return self.call_in_thread(command)

    def call_in_thread(self, command: Invoke) -> Outcome:
        """Call a tool in a thread of its own and wait for it, doing meanwhile what it needs done here."""
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        call = self._new_call(command, tell=lambda: inbox.put(None), post=inbox.put)
        why: BaseException | None = None
        try:
            self._start(call)
            if not serve(inbox, command.timeout, lambda: bool(call.outcome or call.why)):
                why = TimeoutError()
        except (KeyboardInterrupt, SystemExit) as exc:
            why = exc
        outcome = call.give_up()
        if outcome is None and command.is_async:
            call.cancel()
            try:
                serve(inbox, calls.CANCEL_GRACE, lambda: call.outcome is not None)
            except (KeyboardInterrupt, SystemExit) as exc:
                why = exc
        return self._ended(call, outcome, why or call.why)

    def _new_call(
        self, command: Invoke, *, tell: Callable[[], None], post: Callable[[Callable[[], None]], None]
    ) -> Call:
        self._own.renew()
        executor = Here(post) if self._here else Share(self._own)
        return Call(
            command.call, is_async=command.is_async, on_late=command.on_late, executor=executor, tell=tell
        )

    def _start(self, call: Call) -> None:
        if call.is_async:
            self._call = call
        call.start()
        if call.is_async and self._interrupted:
            call.interrupt(asyncio.CancelledError())

    def _ended(self, call: Call, outcome: Outcome | None, why: BaseException | None) -> Outcome:
        """What the waiting came to: an outcome that was there in time, or the reason to wait no longer."""
        self._call = None
        call.forsake()
        cancelled = outcome is not None and isinstance(outcome.error, asyncio.CancelledError)
        if why is not None and (
            outcome is None or cancelled or isinstance(why, KeyboardInterrupt | SystemExit)
        ):
            timed_out = isinstance(why, TimeoutError)
            return Outcome(error=why, timed_out=timed_out, elapsed=call.elapsed)
        if outcome is None:
            raise AssertionError("a call was given up without a reason")
        if isinstance(outcome.error, Unwind):
            raise outcome.error
        return outcome

    def pause(self, length: float) -> None:
        if self.stop.wait(length):
            raise Unwind(Why.INTERRUPTED)


def serve(
    inbox: queue.SimpleQueue[Callable[[], None] | None], seconds: float | None, until: Callable[[], bool]
) -> bool:
    """Do what comes in until something has happened; False if it has not within these seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    while not until():
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return False
        try:
            work = inbox.get(timeout=left)
        except queue.Empty:
            return until()
        if work is not None:
            work()
    return True
