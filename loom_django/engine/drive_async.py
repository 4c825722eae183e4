"""Drives ``async def`` flows, in an event loop that stands still while the engine touches the database.

So Django's connection is never used from inside a running loop, and the rules are those of plain flows.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeVar

from loom_django.engine import calls
from loom_django.engine.calls import Call, Here, boxed, moved
from loom_django.engine.drive import (
    Branch,
    Command,
    CutOff,
    Driver,
    Enter,
    Invoke,
    Io,
    Join,
    Land,
    Outcome,
    Pause,
    Steps,
)
from loom_django.engine.unwind import Unwind, Why

T = TypeVar("T")


# What came of a call: its value, or what it raised.
Answer = tuple[Any, BaseException | None]


class Asked:
    """What somebody in a loop has asked for and waits for, however often it is cancelled meanwhile."""

    __slots__ = ("_answer", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None

    def tell(self, answer: Answer) -> None:
        """Give the answer; called in the loop's thread."""
        self._answer = answer
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, cut: Callable[[], None]) -> Any:
        """The answer, as a value or raised; ``cut`` is called for a cancellation, and may raise to wait no longer."""
        while self._answer is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                cut()
        result, error = self._answer
        if isinstance(error, StopIteration):
            raise RuntimeError("a call raised StopIteration") from error
        if error is not None:
            raise error
        return result


class AsyncDriver(Driver):
    """Carries commands out for a coroutine body, in a loop that only runs between them."""

    def __init__(self, *, one_thread: bool) -> None:
        super().__init__(one_thread=one_thread)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._asked: list[Callable[[], None]] = []
        self._wake: asyncio.Future[None] | None = None
        self._cut = False

    # The body's, of a branch's driver.
    _root: AsyncDriver | None = None

    @property
    def closed(self) -> bool:
        if self._left or (self._task is not None and self._task.done()):
            return True
        return self._root is not None and self._root.closed

    def in_body(self) -> bool:
        try:
            return self._task is not None and asyncio.current_task() is self._task
        except RuntimeError:  # no loop runs in this thread
            return False

    def begin(self, steps: Steps[T]) -> Command | None:
        """Let a call of the context enter, and its rules go on to what may have to be waited for: that command.

        None if they cannot go on yet.

        Raises:
            StopIteration: the log has the answer.
        """
        command = next(steps)
        if not isinstance(command, Enter):
            return command
        try:
            command.call()
        except BaseException as exc:
            return steps.throw(exc)
        return steps.send(None)

    async def drive(self, steps: Steps[T], command: Command | None = None) -> T:
        """Run a generator of commands to its end and return its result; from a command on, if it has begun.

        A flow that cancels its own task does not get at the rules: what was asked for is done, or has the
        outcome that it was cut off; what is known by then is recorded, and nothing new is begun.

        Raises:
            CutOff: the body's task was cancelled meanwhile.
        """
        self._cut = False
        try:
            command = command or next(steps)
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
            return result if result is None or not inspect.isawaitable(result) else await result
        if isinstance(command, Join):
            return await self._join(command)
        if isinstance(command, Io):
            return await self._outside(command.call)
        if isinstance(command, Pause):
            return await self._pause(command.seconds)
        if command.is_async or self._is_beside:
            return await self._beside(command)
        return await self._outside(lambda: self.call_sync(command))

    # True where plain tools are not to stop the loop, since others run in it: a branch's siblings.
    _is_beside = False

    async def _pause(self, length: float) -> None:
        await self._outside(lambda: self.pause(length))

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

    def _branch_driver(self) -> AsyncDriver:
        return _AsyncBranchDriver(self)

    async def _branch(self, branch: Branch) -> None:
        driver = self._branch_driver()
        driver._task = asyncio.current_task()
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
        await self._perform(Land(lambda: branch.end(ended)))

    async def _outside(self, call: Callable[[], Any]) -> Any:
        """Have a call made while the loop stands still. A cancellation that comes meanwhile is kept."""
        if self.closed:
            raise Unwind(Why.INTERRUPTED)
        return await self._ask(call).wait(self._cut_off)

    def _ask(self, call: Callable[[], Any]) -> Asked:
        """Have a call made where it may wait; its answer comes in this loop."""
        asked, context = Asked(asyncio.get_running_loop()), contextvars.copy_context()
        self._bring(lambda: asked.tell(answered(call, context)))
        self._ring()
        return asked

    async def _beside(self, command: Invoke) -> Outcome:
        """Call an async tool in a loop and a thread of its own, with this loop running on."""
        loop = asyncio.get_running_loop()
        bell = asyncio.Event()
        call = self._new_call(command, tell=lambda: _call_in(loop, bell.set), post=self._post)
        why: BaseException | None = None
        try:
            self._start(call)
            if command.timeout is None:
                await bell.wait()
            else:
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
        self._root: AsyncDriver = root
        self.stop = root.stop
        self._own, self._here = root._own, root._here
        self._is_beside = not root.sequential

    def call_sync(self, command: Invoke) -> Outcome:
        return self._root.call_sync(command)

    def _bring(self, work: Callable[[], None]) -> None:
        self._root._bring(work)

    def _ring(self) -> None:
        self._root._ring()

    def _post(self, work: Callable[[], None]) -> None:
        self._root._post(work)


def answered(call: Callable[[], Any], context: contextvars.Context) -> Answer:
    """Make a call in the context of the task that asked for it."""
    try:
        return moved(context, call), None
    except BaseException as exc:
        return None, exc


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call in a loop, wherever this is."""
    if asyncio._get_running_loop() is loop:
        call()
    else:
        loop.call_soon_threadsafe(call)
