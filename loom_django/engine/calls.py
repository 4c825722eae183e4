"""Calls that are made in threads and loops of loom's own, so that they can be cut off, or left behind.

An async tool, and a plain one with a timeout, runs in a thread of its own; an async one in a loop of its own
too. Whoever waits for it can stop waiting at any time: the thread goes on, is counted, and tells what became
of the call when it ends.

``sync_to_async``, and so Django's async ORM, looks up the thread for its work in the context. A body that was
started in a request would find the request's thread, which is waiting for that very body. So calls and bodies
get a context of their own, with a thread of loom's own behind it (:class:`OwnThread`), or in a TestCase the
one that holds the test's transaction (:class:`Here`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, TypeVar

from asgiref.sync import AsyncToSync, SyncToAsync, ThreadSensitiveContext
from django.db import connections

from loom_django import compat
from loom_django.engine.unwind import Unwind

P = ParamSpec("P")
T = TypeVar("T")

# How long a cancelled async call may take to notice, in seconds, before it is left behind.
CANCEL_GRACE: float = 5.0

# How long a thread that has nothing to do may take to end, in seconds, before it is left to itself.
_END: Final = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a tool's call ended: ``value``, or ``error``; ``timed_out`` if nobody waited for its end."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    elapsed: float = 0.0


class Abandoned:
    """Threads whose tool outlived its timeout; counted, since each holds a thread until its call returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def change(self, by: int) -> None:
        with self._lock:
            self.count += by


abandoned = Abandoned()


def measured(call: Callable[[], Any]) -> Outcome:
    started = time.monotonic()
    try:
        value = call()
    except BaseException as exc:
        return Outcome(error=exc, elapsed=time.monotonic() - started)
    return Outcome(value=value, elapsed=time.monotonic() - started)


def moved(context: contextvars.Context, call: Callable[[], T]) -> T:
    """Call in a context that was copied in another thread."""

    def adopted() -> T:
        compat.adopt_locals()
        return call()

    return context.run(adopted)


async def boxed(call: Callable[[], Any]) -> Outcome:
    """Await a call and return how it ended: a SystemExit let into a task would end the loop around it.

    How long it took is told without the turns of a busy loop before its first step and behind its last.
    """
    started = time.monotonic()
    try:
        value = await call()
    except asyncio.CancelledError:
        raise
    except BaseException as exc:
        return Outcome(error=exc, elapsed=time.monotonic() - started)
    return Outcome(value=value, elapsed=time.monotonic() - started)


# Where sync_to_async does its work.


def set_apart(executor: Executor) -> None:
    """Have ``sync_to_async`` in the current context work in ``executor``, whatever the context was before."""
    AsyncToSync.executors.current = None
    SyncToAsync.deadlock_context.set(False)
    work_in(executor)


def work_in(executor: Executor) -> None:
    """:func:`set_apart` in a context that knows of no thread but one of loom's own."""
    apart = ThreadSensitiveContext()
    SyncToAsync.thread_sensitive_context.set(apart)
    SyncToAsync.context_to_thread_executor[apart] = executor


class Call:
    """One call of a tool in a thread of its own.

    ``tell`` is called, in other threads than the waiting one too, when there is something to see: the outcome,
    or a reason to wait no longer.
    """

    _set_apart = staticmethod(set_apart)

    def __init__(
        self,
        call: Callable[[], Any],
        *,
        is_async: bool,
        on_late: Callable[[Outcome], None],
        executor: Executor,
        tell: Callable[[], None],
    ) -> None:
        self.outcome: Outcome | None = None
        self.why: BaseException | None = None
        self._call = call
        self.is_async = is_async
        self._on_late = on_late
        self._tell = tell
        self._executor = executor
        self._context = contextvars.copy_context()
        self._context.run(self._set_apart, executor)
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Outcome]] | None = None
        self._cancelled = False
        self._given_up = False
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def start(self) -> None:
        threading.Thread(target=self._run, name="loom-tool", daemon=True).start()

    def interrupt(self, why: BaseException) -> bool:
        """Cancel the call for this reason and let nobody wait for it; False if that was done before."""
        if self.why is not None:
            return False
        self.why = why
        self.cancel()
        self._tell()
        return True

    def cancel(self) -> None:
        """Have an async call cancelled; once, so that what it awaits to clean up is not cut off too."""
        with self._lock:
            if self._running is not None and not self._cancelled:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel, context=contextvars.Context())
            self._cancelled = True

    def give_up(self) -> Outcome | None:
        """Leave the call behind, unless it has ended: then its outcome."""
        with self._lock:
            if self.outcome is None and not self._given_up:
                self._given_up = True
                abandoned.change(1)
            return self.outcome

    def forsake(self) -> None:
        """If a cancelled sync_to_async has left its work under way, leave that behind."""
        if isinstance(self._executor, Share):
            self._executor.forsake()

    def _run(self) -> None:
        try:
            outcome = moved(self._context, self._in_loop if self.is_async else lambda: measured(self._call))
            if self._end(outcome):
                self._on_late(outcome)
        finally:
            connections.close_all()

    def _end(self, outcome: Outcome) -> bool:
        """Tell how the call ended; True if nobody waits for it any more and it came to something."""
        with self._lock:
            self.outcome = outcome
            late = self._given_up
        with contextlib.suppress(RuntimeError):  # the loop that waited is closed
            self._tell()
        if late:
            abandoned.change(-1)
        return late and not isinstance(outcome.error, asyncio.CancelledError | Unwind)

    def _in_loop(self) -> Outcome:
        started = time.monotonic()
        loop = asyncio.new_event_loop()
        try:
            outcome = self._awaited(loop)
        except BaseException as exc:  # the tool stopped its loop
            outcome = Outcome(error=exc)
        finally:
            shut_down(loop)
        return replace(outcome, elapsed=time.monotonic() - started)

    def _awaited(self, loop: asyncio.AbstractEventLoop) -> Outcome:
        task = loop.create_task(boxed(self._call))
        with self._lock:
            self._running = (loop, task)
            if self._cancelled:
                task.cancel()
        try:
            loop.run_until_complete(asyncio.wait({task}))
        finally:
            with self._lock:
                self._running = None
        return Outcome(error=asyncio.CancelledError()) if task.cancelled() else task.result()


def shut_down(loop: asyncio.AbstractEventLoop) -> None:
    """End what was left running in a loop, and the loop; what will not end goes on in a thread of its own."""
    rest = asyncio.all_tasks(loop)
    for task in rest:
        task.cancel()
    try:
        if rest:
            loop.run_until_complete(asyncio.wait(rest, timeout=CANCEL_GRACE))
        with contextlib.suppress(TimeoutError):
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), CANCEL_GRACE))
    finally:
        rest = asyncio.all_tasks(loop)
        if rest:
            abandoned.change(1)
            threading.Thread(target=_run_out, args=(loop, rest), name="loom-rest", daemon=True).start()
        else:
            loop.close()


def _run_out(loop: asyncio.AbstractEventLoop, rest: set[asyncio.Task[Any]]) -> None:
    try:
        loop.run_until_complete(asyncio.wait(rest))
    finally:
        abandoned.change(-1)
        loop.close()
        connections.close_all()


def in_testcase() -> bool:
    """True in a thread one of whose connections lives in a TestCase's transaction."""
    return compat.has_testcases() and any(
        compat.in_testcase(connection) for connection in connections.all(initialized_only=True)
    )


class Here(Executor):
    """Has work done by the thread that runs the body, where it waits for what it has called."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._post(lambda: _resolve(future, lambda: fn(*args, **kwargs)))
        return future


class OwnThread(Executor):
    """Does one piece of work after the other in a thread of its own, which is made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        self._open: set[Future[Any]] = set()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the flow's body has ended: what it left running gets no thread any more")
            self._open.add(future)
            self._put(lambda: _resolve(future, lambda: fn(*args, **kwargs)))
        future.add_done_callback(self._open.discard)
        return future

    def _put(self, piece: Callable[[], None]) -> None:
        if self._work is None:
            self._work = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._work,), name="loom-sync", daemon=True)
            self._thread.start()
        self._work.put(piece)

    def _queued(self) -> list[Callable[[], None]]:
        """Take out what has not begun: it is another call's, of a sibling branch."""
        pieces: list[Callable[[], None]] = []
        with contextlib.suppress(queue.Empty):
            while self._work is not None and (piece := self._work.get_nowait()) is not None:
                pieces.append(piece)
        return pieces

    def renew(self) -> None:
        """Have broken connections of the thread dropped before its next work."""
        with self._lock:
            if self._work is not None:
                self._work.put(compat.renew_connections)

    def forsake(self) -> None:
        """If work is under way in the thread, leave it behind, counted: what comes next gets another."""
        with self._lock:
            if self._work is not None and any(not future.done() for future in tuple(self._open)):
                abandoned.change(1)
                left, rest = self._work, self._queued()
                left.put(lambda: abandoned.change(-1))
                left.put(None)
                self._work = self._thread = None
                for piece in rest:
                    self._put(piece)

    def close(self) -> None:
        """End the thread, and its connections with it; work that is stuck is left behind."""
        if (thread := self.let_end()) is not None:
            thread.join(_END)

    def let_end(self) -> threading.Thread | None:
        """:meth:`close` without waiting for the thread, if there is one."""
        self.forsake()
        with self._lock:
            self._closed = True
            if self._work is not None:
                self._work.put(None)
            return self._thread


class Share(Executor):
    """What one call has done in an :class:`OwnThread`, where calls of sibling branches work too."""

    def __init__(self, own: OwnThread) -> None:
        self._own = own
        self._open: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._own.submit(fn, *args, **kwargs)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def forsake(self) -> None:
        """Leave the thread behind if work of this call is under way in it."""
        if any(not future.done() for future in tuple(self._open)):
            self._own.forsake()


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    try:
        while (piece := work.get()) is not None:
            piece()
    finally:
        connections.close_all()


def _resolve(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)
