"""Drives plain flows: the body in its own thread, its parallel branches in threads of theirs.

All rules of the engine run in the body's thread, whoever asks; see :class:`Room`.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from django.db import Error, connections

from loom_django.compat import renew_connections
from loom_django.engine.calls import measured, moved
from loom_django.engine.drive import (
    Branch,
    Command,
    Driver,
    Enter,
    Io,
    Join,
    Outcome,
    Pause,
    Steps,
    carried_out,
    inside_body,
)
from loom_django.engine.unwind import Unwind, Why

T = TypeVar("T")

# Branches of one execution that run at the same time, at most; the others follow. Each may hold a connection.
MAX_BRANCH_THREADS: Final = 16

_CALLED_HERE: Final = (Enter, Io)


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
        if isinstance(command, _CALLED_HERE):
            return command.call()
        if isinstance(command, Pause):
            return self.pause(command.seconds)
        if isinstance(command, Join):
            return self._join(command)
        return self.call_in_thread(command) if command.is_async else self.call_sync(command)

    def _join(self, join: Join) -> None:
        if self.sequential:
            for branch in join.branches:
                carried_out(branch.end(_measured_branch(branch, self.sibling())))
            return
        try:
            crew = _Crew(join.branches, self)
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
            self._left = True
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
                target=moved, args=(context, self._work), name=f"loom-branch-{number}", daemon=True
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
        self._driver.post(lambda: self._ended(branch, outcome))
        with suppress(Error):  # a thread that ended here would leave the branches behind this one to nobody
            renew_connections()

    def _ended(self, branch: Branch, outcome: Outcome) -> None:
        try:
            carried_out(branch.end(outcome))
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
