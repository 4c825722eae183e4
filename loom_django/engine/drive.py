"""One core, two ways to run it.

The engine's rules are generators that yield *commands* and get their results sent back; nothing in them waits.
A driver carries the commands out: :class:`SyncDriver` in the body's own thread, :class:`AsyncDriver` for
``async def`` bodies, whose event loop is stopped while the engine touches the database. So both kinds of flow
obey the same rules, and Django's connection is never used from inside a running loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from django.db import connections

from loom_django.compat import renew_connections
from loom_django.engine import calls
from loom_django.engine.calls import Call, Here, Outcome, OwnThread, abandoned, boxed, measured
from loom_django.engine.unwind import Unwind, Why

__all__ = [
    "AsyncDriver",
    "Branch",
    "Command",
    "CutOff",
    "Driver",
    "Enter",
    "Invoke",
    "Io",
    "Join",
    "Outcome",
    "Pause",
    "Steps",
    "SyncDriver",
    "abandoned",
]

T = TypeVar("T")


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

    def end(self, outcome: Outcome) -> None:
        """It has ended so; called where the engine's rules run."""


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


class Driver:
    """What both drivers share: the calls that are made in threads."""

    def __init__(self, *, one_thread: bool) -> None:
        self.one_thread = one_thread  # a TestCase: no other thread sees its transaction
        self.stop = threading.Event()
        self._own = OwnThread()
        self._here = one_thread or calls.in_testcase()
        self._call: Call | None = None
        self._interrupted = False

    @property
    def sequential(self) -> bool:
        """True where all must happen in one thread: branches run one after the other there."""
        return self.one_thread

    @property
    def closed(self) -> bool:
        """True when the body has ended: what it left running may do nothing more."""
        return False

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
            outcome = measured(command.call)
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
            if not _serve(inbox, command.timeout, lambda: bool(call.outcome or call.why)):
                why = TimeoutError()
        except (KeyboardInterrupt, SystemExit) as exc:
            why = exc
        outcome = call.give_up()
        if outcome is None and command.is_async:
            call.cancel()
            try:
                _serve(inbox, calls.CANCEL_GRACE, lambda: call.outcome is not None)
            except (KeyboardInterrupt, SystemExit) as exc:
                why = exc
        return self._ended(call, outcome, why or call.why)

    def _new_call(
        self, command: Invoke, *, tell: Callable[[], None], post: Callable[[Callable[[], None]], None]
    ) -> Call:
        self._own.renew()
        executor = Here(post) if self._here else self._own
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
        self._own.forsake()  # a cancelled sync_to_async has left its work under way
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


def _serve(
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


# Branches of one execution that run at the same time, at most; the others follow. Each may hold a connection.
MAX_BRANCH_THREADS: Final = 16


class SyncDriver(Driver):
    """Carries commands out in the thread that runs the body."""

    def __init__(self, *, one_thread: bool) -> None:
        super().__init__(one_thread=one_thread)
        self._room = Room()

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
        if isinstance(command, Io | Enter):
            return command.call()
        if isinstance(command, Pause):
            return self.pause(command.seconds)
        if isinstance(command, Join):
            return self._join(command)
        return self.call_in_thread(command) if command.is_async else self.call_sync(command)

    def _join(self, join: Join) -> None:
        if self.sequential:
            for branch in join.branches:
                branch.end(_measured_branch(branch, self.sibling()))
            return
        crew = _Crew(join.branches, self)
        try:
            try:
                self._room.serve(crew.over.is_set)
            except (KeyboardInterrupt, SystemExit) as exc:
                join.interrupted(exc)
                self._room.serve(crew.over.is_set)
        except BaseException:
            self._room.close()
            raise

    def sibling(self) -> SyncDriver:
        """The driver of a branch that runs in this thread."""
        return SyncDriver(one_thread=self.one_thread)

    def branch_driver(self) -> SyncDriver:
        """The driver of a branch, whose rules run in this driver's thread."""
        driver = _BranchDriver(self._room)
        driver.stop = self.stop
        return driver

    def post(self, work: Callable[[], None]) -> None:
        """Have work done where the rules run; called from other threads."""
        self._room.post(work)

    def run_body(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            self._own.close()


class Room:
    """The thread of a body, while parallel branches of it run in threads of their own.

    All rules of the engine run there, one piece after the other, on that thread's connection: what a branch asks
    for is brought here, and only tools and the flow's own code run beside each other. So nothing of the engine
    needs a lock.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.closed = False

    def post(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def ask(self, call: Callable[[], T]) -> T:
        """Have a call made there, and wait for its result.

        Raises:
            Unwind: nobody serves any more.
        """
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answer.put((call(), None))
            except BaseException as exc:
                answer.put((None, exc))

        self.post(work)
        while True:
            try:
                result, error = answer.get(timeout=1.0)
                break
            except queue.Empty:
                if self.closed:
                    raise Unwind(Why.INTERRUPTED) from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def serve(self, until: Callable[[], bool]) -> None:
        """Do what is brought until something is so."""
        while not until():
            self._work.get()()

    def close(self) -> None:
        """Nobody serves any more: whoever asks is sent away."""
        self.closed = True


class _Crew:
    """The threads in which a scope's branches run."""

    def __init__(self, branches: Sequence[Branch], driver: SyncDriver) -> None:
        self._waiting = deque(branches)
        self._left = len(branches)
        self._driver = driver
        self.over = threading.Event()
        for number in range(min(len(branches), MAX_BRANCH_THREADS)):
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(self._work,), name=f"loom-branch-{number}", daemon=True
            )
            thread.start()

    def _work(self) -> None:
        try:
            while True:
                try:
                    branch = self._waiting.popleft()
                except IndexError:
                    return
                self._run(branch)
        finally:
            connections.close_all()

    def _run(self, branch: Branch) -> None:
        driver = self._driver.branch_driver()
        outcome = _measured_branch(branch, driver)
        renew_connections()
        self._driver.post(lambda: self._ended(branch, outcome))

    def _ended(self, branch: Branch, outcome: Outcome) -> None:
        try:
            branch.end(outcome)
        finally:
            self._left -= 1
            if not self._left:
                self.over.set()


def _measured_branch(branch: Branch, driver: SyncDriver) -> Outcome:
    with inside_body():
        return measured(lambda: driver.run_body(branch.enter(driver)))


@dataclass(frozen=True, slots=True)
class _Done:
    value: Any


class _BranchDriver(SyncDriver):
    """Drives a branch: its rules in the body's thread, its tools and its own code in this one."""

    def __init__(self, room: Room) -> None:
        super().__init__(one_thread=False)
        self._room = room

    def drive(self, steps: Steps[T]) -> T:
        step: Callable[[], Command] = lambda: next(steps)  # noqa: E731
        while True:
            command = self._room.ask(partial(self._advance, steps, step))
            if isinstance(command, _Done):
                return command.value  # type: ignore[no-any-return]
            try:
                result = self._perform(command)
            except BaseException as exc:
                step = partial(steps.throw, exc)
            else:
                step = partial(steps.send, result)

    def _advance(self, steps: Steps[Any], step: Callable[[], Command]) -> Command | _Done:
        """Let the rules run on to what is to be done in the branch's own thread."""
        try:
            command = step()
            while isinstance(command, Io):
                try:
                    result = command.call()
                except BaseException as exc:
                    command = steps.throw(exc)
                else:
                    command = steps.send(result)
        except StopIteration as stop:
            return _Done(stop.value)
        return command

    def exclusively(self, call: Callable[[], T]) -> T:
        return self._room.ask(call)

    def _join(self, join: Join) -> None:
        crew = _Crew(join.branches, self)
        while not crew.over.wait(1.0):
            if self._room.closed:
                raise Unwind(Why.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Something to be done while the loop stands still; its context is the asking task's."""

    call: Callable[[], Any]
    context: contextvars.Context
    answer: asyncio.Future[tuple[Any, BaseException | None]]


class AsyncDriver(Driver):
    """Carries commands out for a coroutine body, in a loop that only runs between them."""

    def __init__(self, *, one_thread: bool) -> None:
        super().__init__(one_thread=one_thread)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Outcome] | None = None
        self._asked: list[Callable[[], None]] = []
        self._wake: asyncio.Future[None] | None = None
        self._cut = False
        self._left = False

    @property
    def closed(self) -> bool:
        return self._left or (self._task is not None and self._task.done())

    def in_body(self) -> bool:
        try:
            return self._task is not None and asyncio.current_task() is self._task
        except RuntimeError:  # no loop runs in this thread
            return False

    async def drive(self, steps: Steps[T]) -> T:
        """Run a generator of commands to its end and return its result.

        A flow that cancels its own task does not get at the rules: what was asked for is done, or has the
        outcome that it was cut off; what is known by then is recorded, and nothing new is begun.

        Raises:
            CutOff: the body's task was cancelled meanwhile.
        """
        self._cut = False
        try:
            command = next(steps)
            while True:
                if self._cut and not isinstance(command, Io):
                    command = steps.throw(CutOff())
                    continue
                try:
                    result = await self._perform(command)
                except GeneratorExit as exc:
                    if self.closed:
                        steps.close()
                        raise
                    command = steps.throw(exc)
                except BaseException as exc:
                    command = steps.throw(exc)
                else:
                    cut = self._cut and isinstance(command, Io)
                    command = steps.throw(CutOff()) if cut else steps.send(result)
        except StopIteration as stop:
            if self._cut:
                raise CutOff from None
            return stop.value  # type: ignore[no-any-return]

    async def _perform(self, command: Command) -> Any:
        if isinstance(command, Enter):
            result = command.call()
            return await result if inspect.isawaitable(result) else result
        if isinstance(command, Join):
            return await self._join(command)
        if isinstance(command, Io):
            return await self._outside(command.call)
        if isinstance(command, Pause):
            return await self._outside(lambda: self.pause(command.seconds))
        if command.is_async or self._is_beside:
            return await self._beside(command)
        return await self._outside(lambda: self.call_sync(command))

    # True for a branch: its plain tools are not to stop the loop, in which its siblings run.
    _is_beside = False

    async def _join(self, join: Join) -> None:
        """A task for each branch, in this loop; a body that is cut off meanwhile waits for them all the same."""
        tasks = [asyncio.create_task(self._branch(branch)) for branch in join.branches]
        while not all(task.done() for task in tasks):
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError:
                for task in tasks:
                    if self.closed:
                        task.cancel()
                self._cut_off()
        for task in tasks:
            task.result()

    async def _branch(self, branch: Branch) -> None:
        driver = _AsyncBranchDriver(self)
        driver.task = asyncio.current_task()
        started = time.monotonic()
        try:
            value = await branch.enter(driver)()
        except asyncio.CancelledError as exc:
            if self.closed:
                raise
            outcome = Outcome(error=exc)
        except BaseException as exc:
            outcome = Outcome(error=exc)
        else:
            outcome = Outcome(value=value)
        ended = replace(outcome, elapsed=time.monotonic() - started)
        await self._outside(lambda: branch.end(ended))

    async def _outside(self, call: Callable[[], Any]) -> Any:
        """Have a call made while the loop stands still. A cancellation that comes meanwhile is kept."""
        if self.closed:
            raise Unwind(Why.INTERRUPTED)
        asked = _Asked(call, contextvars.copy_context(), asyncio.get_running_loop().create_future())
        self._bring(lambda: _answer(asked))
        self._ring()
        while True:
            try:
                result, error = await asyncio.shield(asked.answer)
            except asyncio.CancelledError:
                self._cut_off()
            else:
                break
        if isinstance(error, StopIteration):
            raise RuntimeError("a call raised StopIteration") from error
        if error is not None:
            raise error
        return result

    async def _beside(self, command: Invoke) -> Outcome:
        """Call an async tool in a loop and a thread of its own, with this loop running on."""
        loop = asyncio.get_running_loop()
        bell = asyncio.Event()
        call = self._new_call(command, tell=lambda: _call_in(loop, bell.set), post=self._post)
        why: BaseException | None = None
        try:
            self._start(call)
            async with asyncio.timeout(command.timeout):
                await bell.wait()
        except TimeoutError:
            why = TimeoutError()
        except (KeyboardInterrupt, SystemExit) as exc:
            why = exc
        except asyncio.CancelledError:
            if self.closed:
                call.cancel()
                call.give_up()
            self._cut_off()
            why = CutOff()
        outcome = call.give_up()
        if outcome is None and command.is_async:
            call.cancel()
            await self._grace(call, bell)
        return self._ended(call, outcome, why or call.why)

    async def _grace(self, call: Call, bell: asyncio.Event) -> None:
        """Wait for a cancelled call as long as it may take to notice."""
        end = time.monotonic() + calls.CANCEL_GRACE
        while True:
            bell.clear()
            if call.outcome is not None:
                return
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await bell.wait()
            except TimeoutError:
                return
            except asyncio.CancelledError:
                self._cut_off()

    def _cut_off(self) -> None:
        if self.closed:
            raise Unwind(Why.INTERRUPTED)
        self._cut = True

    def _bring(self, work: Callable[[], None]) -> None:
        self._asked.append(work)

    def _ring(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _post(self, work: Callable[[], None]) -> None:
        """Have work done by the body's thread while its loop stands still; called from other threads too."""
        if self.closed or self._loop is None:
            raise RuntimeError("the flow's body has ended: what it left running gets no thread any more")
        self._bring(work)
        self._loop.call_soon_threadsafe(self._ring)

    def run_body(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine body, doing what it asks for between turns of the loop."""
        self._loop = loop = asyncio.new_event_loop()
        executor: Executor = Here(self._post) if self._here else self._own
        context = contextvars.copy_context()
        context.run(calls.set_apart, executor)
        try:
            self._task = loop.create_task(boxed(call), context=context)
            outcome = self._pump(loop, self._task)
        finally:
            self._left = True
            try:
                calls.shut_down(loop)
            finally:
                self._own.close()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _pump(self, loop: asyncio.AbstractEventLoop, body: asyncio.Task[Outcome]) -> Outcome:
        while True:
            self._wake = loop.create_future()
            if self._asked:
                self._wake.set_result(None)
            either: set[asyncio.Future[Any]] = {body, self._wake}
            try:
                loop.run_until_complete(asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED))
            except (KeyboardInterrupt, SystemExit) as exc:
                if self._call is None or not self._call.interrupt(exc):
                    raise
            asked, self._asked = self._asked, []
            for work in asked:
                work()
            if body.done():
                return body.result()


class _AsyncBranchDriver(AsyncDriver):
    """Drives a branch as a task of its own in the body's loop."""

    def __init__(self, root: AsyncDriver) -> None:
        super().__init__(one_thread=root.one_thread)
        self._root = root
        self.stop = root.stop
        self._own, self._here = root._own, root._here
        self._is_beside = not root.sequential

    @property
    def task(self) -> asyncio.Task[Any] | None:
        return self._task

    @task.setter
    def task(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task

    @property
    def closed(self) -> bool:
        return self._root.closed or (self._task is not None and self._task.done())

    def call_sync(self, command: Invoke) -> Outcome:
        return self._root.call_sync(command)

    def _bring(self, work: Callable[[], None]) -> None:
        self._root._bring(work)

    def _ring(self) -> None:
        self._root._ring()

    def _post(self, work: Callable[[], None]) -> None:
        self._root._post(work)


def _answer(asked: _Asked) -> None:
    answer: tuple[Any, BaseException | None]
    try:
        answer = asked.context.run(asked.call), None
    except BaseException as exc:
        answer = None, exc
    if not asked.answer.done():
        asked.answer.set_result(answer)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call in a loop, from another thread or between its turns."""
    loop.call_soon_threadsafe(call)
