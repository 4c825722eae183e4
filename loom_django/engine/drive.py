"""One core, two ways to run it.

The engine's rules are generators that yield *commands* and get their results sent back; nothing in them waits.
A driver carries the commands out: :class:`SyncDriver` in the body's own thread, :class:`AsyncDriver` for
``async def`` bodies, whose event loop is stopped while the engine touches the database. So both kinds of flow
obey the same rules, and Django's connection is never used from inside a running loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from loom_django.engine.unwind import Unwind, Why

T = TypeVar("T")

# How long a cancelled async tool may take to notice, in seconds, before it is left behind.
CANCEL_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Io:
    """Run this against the store, in a thread where that is allowed."""

    call: Callable[[], Any]


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a tool's call ended: ``value``, or ``error``; ``timed_out`` if nobody waited for its end."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    elapsed: float = 0.0


Command = Io | Invoke | Pause
Steps = Generator[Command, Any, T]


class Abandoned:
    """Threads whose tool outlived its timeout; counted, since each holds a thread until its call returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def change(self, by: int) -> None:
        with self._lock:
            self.count += by


abandoned = Abandoned()


class Driver:
    """What both drivers share: the calls that are made in threads."""

    def __init__(self, *, close_connections: Callable[[], None], one_thread: bool) -> None:
        self.close_connections = close_connections
        self.one_thread = one_thread  # a TestCase: no other thread sees its transaction
        self.stop = threading.Event()

    def call_sync(self, command: Invoke) -> Outcome:
        """Call a plain tool, in a thread of its own if it has a timeout."""
        if command.timeout is None or self.one_thread:
            outcome = _measured(command.call)
            late = command.timeout is not None and outcome.elapsed > command.timeout
            return Outcome(error=TimeoutError(), timed_out=True, elapsed=outcome.elapsed) if late else outcome
        return self._call_in_thread(command, command.timeout)

    def _call_in_thread(self, command: Invoke, timeout: float) -> Outcome:
        context = contextvars.copy_context()
        done = threading.Event()
        lock = threading.Lock()
        box: list[Outcome] = []
        given_up = False

        def run() -> None:
            outcome = context.run(_measured, command.call)
            try:
                with lock:
                    box.append(outcome)
                    late = given_up
                if late:
                    abandoned.change(-1)
                    command.on_late(outcome)
            finally:
                done.set()
                self.close_connections()

        started = time.monotonic()
        threading.Thread(target=run, name="loom-tool", daemon=True).start()
        done.wait(timeout)
        with lock:
            if box:
                return box[0]
            given_up = True
        abandoned.change(1)
        return Outcome(error=TimeoutError(), timed_out=True, elapsed=time.monotonic() - started)

    def pause(self, length: float) -> None:
        if self.stop.wait(length):
            raise Unwind(Why.INTERRUPTED)


def _measured(call: Callable[[], Any]) -> Outcome:
    started = time.monotonic()
    try:
        value = call()
    except Unwind:
        raise
    except BaseException as exc:
        return Outcome(error=exc, elapsed=time.monotonic() - started)
    return Outcome(value=value, elapsed=time.monotonic() - started)


class SyncDriver(Driver):
    """Carries commands out in the thread that runs the body."""

    def drive(self, steps: Steps[T]) -> T:
        """Run a generator of commands to its end and return its result."""
        try:
            command = next(steps)
            while True:
                try:
                    result = self._perform(command)
                except BaseException as exc:
                    command = steps.throw(exc)
                else:
                    command = steps.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _perform(self, command: Command) -> Any:
        if isinstance(command, Io):
            return command.call()
        if isinstance(command, Pause):
            return self.pause(command.seconds)
        if command.is_async:
            return asyncio.run(_await_measured(command.call, command.timeout))
        return self.call_sync(command)

    def run_body(self, call: Callable[[], Any]) -> Any:
        return call()


class AsyncDriver(Driver):
    """Carries commands out for a coroutine body, in a loop that only runs between them."""

    def __init__(self, *, close_connections: Callable[[], None], one_thread: bool) -> None:
        super().__init__(close_connections=close_connections, one_thread=one_thread)
        self._asked: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._wake: asyncio.Future[None] | None = None

    async def drive(self, steps: Steps[T]) -> T:
        """Run a generator of commands to its end and return its result."""
        try:
            command = next(steps)
            while True:
                try:
                    result = await self._perform(command)
                except BaseException as exc:
                    command = steps.throw(exc)
                else:
                    command = steps.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _perform(self, command: Command) -> Any:
        if isinstance(command, Io):
            return await self._outside(command.call)
        if isinstance(command, Pause):
            return await self._outside(lambda: self.pause(command.seconds))
        if command.is_async:
            return await _await_measured(command.call, command.timeout)
        return await self._outside(lambda: self.call_sync(command))

    async def _outside(self, call: Callable[[], Any]) -> Any:
        """Have a call made while the loop stands still."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append((call, future))
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        return await future

    def run_body(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine body, doing what it asks for between turns of the loop."""
        loop = asyncio.new_event_loop()
        try:
            outcome = self._pump(loop, loop.create_task(_boxed(call)))
        finally:
            _shut_down(loop)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _pump(self, loop: asyncio.AbstractEventLoop, body: asyncio.Task[Outcome]) -> Outcome:
        while True:
            self._wake = loop.create_future()
            if self._asked:
                self._wake.set_result(None)
            either: set[asyncio.Future[Any]] = {body, self._wake}
            loop.run_until_complete(asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED))
            asked, self._asked = self._asked, []
            for call, future in asked:
                self._answer(call, future)
            if body.done() and not asked:
                return body.result()

    @staticmethod
    def _answer(call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = call()
        except BaseException as exc:
            # A future refuses StopIteration, and a waiter that was cancelled takes nothing.
            if not future.done():
                future.set_exception(exc)
        else:
            if not future.done():
                future.set_result(result)


async def _await_measured(call: Callable[[], Any], timeout: float | None) -> Outcome:
    started = time.monotonic()
    task = asyncio.ensure_future(_boxed(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        raise
    elapsed = time.monotonic() - started
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE)
        return Outcome(error=TimeoutError(), timed_out=True, elapsed=elapsed)
    if task.cancelled():
        return Outcome(error=asyncio.CancelledError(), elapsed=elapsed)
    outcome = task.result()
    if isinstance(outcome.error, Unwind):
        raise outcome.error
    return replace(outcome, elapsed=elapsed)


async def _boxed(call: Callable[[], Any]) -> Outcome:
    """Await a call and return how it ended: a SystemExit let into a task would end the loop around it."""
    try:
        return Outcome(value=await call())
    except asyncio.CancelledError:
        raise
    except BaseException as exc:
        return Outcome(error=exc)


def _shut_down(loop: asyncio.AbstractEventLoop) -> None:
    """End what a body left running, as ``asyncio.run`` does."""
    try:
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
