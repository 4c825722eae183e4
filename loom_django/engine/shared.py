"""One event loop for all ``async def`` bodies of a worker: each body, branch and async tool is a task in it.

Nothing of the engine that waits runs in the loop's thread: calls of the store are made in a few threads beside it,
and so are plain tools. What blocks the loop all the same, a body or an async tool that does not await, stops every
body in it; their leases are kept meanwhile by the keeper's own thread, and the log says who it was.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from django.db import Error

from loom_django.compat import leave_transactions, renew_connections
from loom_django.engine import calls
from loom_django.engine.calls import Call, Outcome, Share, abandoned, boxed, measured, moved
from loom_django.engine.drive import Append, Command, Invoke, Io, Land, Landing, Steps, inside_body
from loom_django.engine.drive_async import Answer, Asked, AsyncDriver, answered
from loom_django.engine.threads import Threads
from loom_django.engine.unwind import Unwind, Why
from loom_django.stores.base import Commit, Pipe, RowLocked, Store

try:
    from uvloop import new_event_loop
except ImportError:  # it comes with the extra "speed"
    from asyncio import new_event_loop  # type: ignore[assignment]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("loom_django.run")

# Threads beside the loop: for calls of the store, for plain tools and for what tools give to asyncio.to_thread, and for
# starts of children that bodies do not wait for. Each has a connection of its own if it uses one.
STORE_THREADS: Final = 16
TOOL_THREADS: Final = 16
START_THREADS: Final = 4

# So many commits of one turn of the loop are sent before all of it is composed: enough to share a statement, few enough that
# the server has something to do meanwhile. Of 8, 16 and 32 this was the quickest.
PIECE: Final = 16

# A way for the loop to append by itself is opened anew so many seconds after the last try, at the earliest.
OPEN_AGAIN: Final = 5.0

# A loop that has stood still for longer, in seconds, is told of.
BLOCKED: Final = 1.0

# Work that waits for a thread while none has become free for so many seconds is told of.
FULL: Final = 10.0

# How often a body that waits in process looks whether the process is to end, in seconds.
_LOOK: Final = 0.2


_HOLDS_STORE: Final = "Row locks, transactional tools and receivers of signals hold them"
_HOLDS_TOOLS: Final = "Give tools that may hang a timeout=, or write them async"


class _Scope:
    """The tasks of one body, or of one call of an async tool."""

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        self.tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        if self.tasks:  # the first one lasts as long as the scope
            task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def rest(self) -> set[asyncio.Task[Any]]:
        return {task for task in self.tasks if not task.done()}

    async def end(self) -> None:
        """Cancel what is left; what does not end within the grace time is counted until it does."""
        rest = self.rest()
        for task in rest:
            task.cancel()
        if rest:  # they may have ended meanwhile
            _, rest = await asyncio.wait(rest, timeout=calls.CANCEL_GRACE)
        if rest:
            abandoned.change(1)
            asyncio.gather(*rest, return_exceptions=True).add_done_callback(lambda _: abandoned.change(-1))


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("loom_scope", default=None)


class _Task(asyncio.Task[Any]):
    """A task that is cancelled out of its own scope, or by the engine: asyncio.all_tasks() are those of all bodies."""

    def cancel(self, msg: Any = None) -> bool:
        scope = _scope.get()
        return (scope is None or self in scope.tasks) and super().cancel(msg)


class _Writer:
    """Lands what the bodies append, with whatever else has come by then; there is no timer and no smallest batch.

    Where the store has a pipe, the loop sends by itself: what is composed in one turn goes in pieces, so that the server
    works on one while the next is composed. What the pipe cannot take, or has lost, goes by a thread, one grouped call
    at a time. Each turn's answers are handed out in one turn.
    """

    def __init__(self, place: BodyLoop, store: Store) -> None:
        self._place = place
        self._store = store
        self._thread = Threads("loom-writer", 1)  # no other call of the store keeps it waiting
        self._waiting: list[tuple[Commit, Asked]] = []
        self._is_due = False  # what waits is sent at the end of this turn
        self._in_thread = 1  # batches that the thread has, or that wait for it; and the first look for a pipe
        self._pipe: Pipe | None = None
        self._open_at = 0.0  # not before this instant, by the monotonic clock
        self._ended = False
        try:
            self._thread.put(self._open_first)
        except RuntimeError:  # no thread is to be had now; whoever appends is told so
            self._in_thread = 0

    def land(self, commit: Commit) -> Asked:
        """Have a commit landed; called in the loop."""
        asked = Asked(self._place.loop)
        self._waiting.append((commit, asked))
        if self._pipe is not None and len(self._waiting) % PIECE == 0:
            self._send()
        elif not self._is_due:
            self._is_due = True
            self._place.loop.call_soon(self._send_rest)
        return asked

    def _send_rest(self) -> None:
        self._is_due = False
        self._send()

    def _send(self) -> None:
        """Send what waits, if it may go yet."""
        pipe = self._pipe
        if pipe is not None and not pipe.has_room:
            pipe.look()
        if pipe is not None and pipe.closed:
            pipe = self._pipe = None
        if not self._waiting or (self._in_thread if pipe is None else not pipe.has_room):
            return
        most = len(self._waiting) if pipe is None else pipe.most
        batch, self._waiting = self._waiting[:most], self._waiting[most:]
        if pipe is None or not pipe.send([commit for commit, _ in batch], partial(self._told, batch)):
            self._send_by_thread(batch)

    def _told(self, batch: Sequence[tuple[Commit, Asked]], landed: Sequence[bool]) -> None:
        """What the pipe says of a batch."""
        self._send()  # so that the next batch is on its way before those of this one go on
        unknown = []
        for one, has_landed in zip(batch, landed, strict=True):
            if has_landed:
                one[1].tell((None, None))
            else:
                unknown.append(one)
        if unknown:
            self._send_by_thread(unknown)

    def _send_by_thread(self, batch: Sequence[tuple[Commit, Asked]]) -> None:
        self._in_thread += 1
        try:
            self._thread.put(partial(self._append, batch))
        except RuntimeError as error:  # no thread is to be had: nobody is left waiting for one
            self._landed(batch, [error] * len(batch))

    def _append(self, batch: Sequence[tuple[Commit, Asked]]) -> None:
        outcomes: Sequence[BaseException | None]
        try:
            outcomes = self._store.append_shared([commit for commit, _ in batch])
        except BaseException as error:
            outcomes = [error] * len(batch)
        self._place.loop.call_soon_threadsafe(self._landed, batch, outcomes)
        if self._pipe is None and not any(outcomes):
            self._open()  # the database is there

    def _landed(
        self, batch: Sequence[tuple[Commit, Asked]], outcomes: Sequence[BaseException | None]
    ) -> None:
        self._in_thread -= 1
        self._send()
        for (commit, asked), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, RowLocked):
                self._place.store.put(partial(self._append_alone, commit, asked))
            else:
                asked.tell((None, outcome))

    def _open_first(self) -> None:
        self._open()
        self._place.loop.call_soon_threadsafe(self._landed, (), ())

    def _open(self) -> None:
        """Open a pipe, if the store has one; in the thread."""
        if time.monotonic() < self._open_at:
            return
        self._open_at = time.monotonic() + OPEN_AGAIN
        try:
            pipe = self._store.pipe(self._place.loop)
        except Exception as error:
            log.info("appends of async bodies go through a thread, for no connection is to be had: %s", error)
            return
        if pipe is None:
            self._open_at = float("inf")
        elif self._ended:  # it took longer than was waited for, and the loop may turn no more
            pipe.close()
        else:
            self._place.loop.call_soon_threadsafe(self._begin, pipe)

    def _begin(self, pipe: Pipe) -> None:
        try:
            if self._pipe is None and not self._ended:
                pipe.begin()
                self._pipe = pipe
                return
        except Exception as error:
            log.info("appends of async bodies go through a thread: %r", error)
            if isinstance(error, NotImplementedError):  # this loop watches no socket, and never will
                self._open_at = float("inf")
        pipe.close()

    def end(self) -> None:
        """Called when nothing runs any more, from another thread than the loop's."""
        self._ended = True
        self._place.loop.call_soon_threadsafe(self._close)
        self._thread.end()

    def _close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def _append_alone(self, commit: Commit, asked: Asked) -> None:
        """Land what waits for a row that others hold, for as long as that takes."""
        outcome: BaseException | None
        try:
            (outcome,) = self._store.append_many([commit])
        except BaseException as error:
            outcome = error
        self._place.loop.call_soon_threadsafe(asked.tell, (None, outcome))


class BodyLoop:
    """The loop, in a thread of its own, and the threads beside it."""

    def __init__(self, store: Store) -> None:
        self.loop: asyncio.AbstractEventLoop = new_event_loop()
        self.loop.set_task_factory(self._new_task)
        self.loop.set_default_executor(_Executor(TOOL_THREADS, thread_name_prefix="loom-to-thread"))
        self.store = Threads("loom-store", STORE_THREADS)
        self.tools = Threads("loom-plain", TOOL_THREADS)
        self.starts = Threads("loom-starts", START_THREADS)
        self.slots = asyncio.Semaphore(TOOL_THREADS)
        self._writer = _Writer(self, store)
        self.tools_waiting = 0  # for a slot
        self._own: set[asyncio.Task[Any]] = set()
        self._scopes: set[_Scope] = set()
        self._lock = threading.Lock()
        self._answers: list[tuple[Asked, Answer]] = []
        self._ended = threading.Event()
        self._told_full: dict[str, float] = {}  # since when, by what was told of
        self._beaten_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="loom-bodies", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="loom-bodies-watch", daemon=True).start()

    # Called from other threads.

    def run(self, calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
        """Run coroutines in the loop; they raise nothing."""

        def begin() -> None:
            for call in calls:
                self.spawn(call())

        self.loop.call_soon_threadsafe(begin)

    def end(self) -> None:
        """End the loop and its threads; for when nothing runs in it any more."""
        self._ended.set()
        self._writer.end()
        self.loop.call_soon_threadsafe(self.loop.stop)
        for threads in (self.store, self.starts, self.tools):
            threads.end()

    @property
    def stood_still(self) -> float:
        """For how long a task has held the loop up, in seconds."""
        return time.monotonic() - self._beaten_at

    @property
    def blocked(self) -> bool:
        """True while a task holds the loop up: what is begun in it now does not run."""
        return self.stood_still > BLOCKED

    # Called in the loop.

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run something of the engine's as a task that belongs to no body."""
        task = self.loop.create_task(coroutine, context=contextvars.Context())
        self._own.add(task)
        task.add_done_callback(self._own.discard)

    async def do(self, call: Callable[[], T]) -> T:
        """Make a call of the engine's in a thread where it may wait."""
        return await self.ask(call).wait(lambda: None)  # type: ignore[no-any-return]

    def ask(self, call: Callable[[], Any]) -> Asked:
        """Have a call made in a thread where it may wait."""
        asked, context = Asked(self.loop), contextvars.copy_context()

        def work() -> None:
            with inside_body():
                self._bring(asked, answered(call, context))

        self.store.put(work)
        return asked

    async def carry_out(
        self,
        landing: Landing[T],
        do: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]] | None = None,
        cut: Callable[[], None] = lambda: None,
    ) -> T:
        """Make kept facts durable: what composes runs here, its appends go to the writer, and the rest to ``do``."""
        do = do or self.do
        try:
            command = next(landing)
            while True:
                try:
                    if isinstance(command, Append):
                        result = await self._writer.land(command.commit).wait(cut)
                    else:
                        result = await do(command.call)
                except BaseException as exc:
                    command = landing.throw(exc)
                else:
                    command = landing.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _bring(self, asked: Asked, answer: Answer) -> None:
        """Give the loop an answer: those that come before it takes them are taken in one turn of it."""
        with self._lock:
            self._answers.append((asked, answer))
            first = len(self._answers) == 1
        if first:
            self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            answers, self._answers = self._answers, []
        for asked, answer in answers:
            asked.tell(answer)

    def begin_task(
        self, call: Callable[[], Any], execution_id: str, context: contextvars.Context
    ) -> tuple[asyncio.Task[Outcome], _Scope]:
        """Begin a user's coroutine, in a scope of its own for the tasks that it makes."""
        scope = _Scope(execution_id)
        self._scopes.add(scope)
        context.run(_scope.set, scope)
        return self.loop.create_task(boxed(call), context=context), scope

    def forget(self, scope: _Scope) -> None:
        """What a scope was made for is over."""
        self._scopes.discard(scope)
        for task in tuple(scope.tasks):
            if task.done():  # which holds the scope by its context, and what it has returned
                scope.tasks.discard(task)

    @staticmethod
    def _new_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> asyncio.Task[Any]:
        task = _Task(coroutine, loop=loop, context=context, **more)
        scope = _scope.get() if context is None else context.get(_scope)
        if scope is not None:
            scope.add(task)
        return task

    # The loop's thread, and the one that watches it.

    def _run(self) -> None:
        with inside_body():
            self.loop.call_soon(self._beat)
            while not self._ended.is_set():
                try:
                    self.loop.run_forever()  # until the end, or until a tool has stopped it
                except BaseException:
                    log.exception(
                        "a task of an async body let this out into the event loop; the others go on"
                    )
        calls.shut_down(self.loop)  # of what was left behind some may be running still

    def _beat(self) -> None:
        self._beaten_at = time.monotonic()
        self.loop.call_later(BLOCKED / 4, self._beat)

    def _watch(self) -> None:
        told_of = 0.0
        while not self._ended.wait(BLOCKED / 4):
            beaten_at = self._beaten_at
            if self.blocked and beaten_at != told_of:
                told_of = beaten_at
                self._tell_blocked(self.stood_still)
            self._tell_full()

    def _tell_full(self) -> None:
        about = (
            (self.store, self.store.waiting, STORE_THREADS, "calls of the store", _HOLDS_STORE),
            (self.tools, self.tools_waiting, TOOL_THREADS, "plain tools", _HOLDS_TOOLS),
        )
        for threads, waiting, most, what, why in about:
            since = threads.taken_at
            if waiting > 0 and time.monotonic() - since > FULL and self._told_full.get(what) != since:
                self._told_full[what] = since
                log.warning(
                    "%d %s of async bodies wait: for %.0f s none of the %d threads for them has become free. %s",
                    waiting,
                    what,
                    time.monotonic() - since,
                    most,
                    why,
                )

    def _tell_blocked(self, still: float) -> None:
        running = asyncio.current_task(self.loop)
        by = next((scope.execution_id for scope in tuple(self._scopes) if running in scope.tasks), None)
        frame = sys._current_frames().get(self._thread.ident or 0)
        log.warning(
            "the event loop has stood still for %.1f s, and with it all async bodies of this process: execution "
            "%s blocks it, at %s. Await what waits, and give what computes long to asyncio.to_thread or to a "
            "plain tool",
            still,
            by or "of " + ", ".join(sorted({scope.execution_id for scope in tuple(self._scopes)})),
            _line(frame),
            extra={"execution_id": by},
        )


def _line(frame: Any) -> str:
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Executor(ThreadPoolExecutor):
    """Where asyncio.to_thread works: no work finds connections that are broken, or in another one's transaction."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def work() -> T:
            with suppress(Error):
                renew_connections()
            try:
                return fn(*args, **kwargs)
            finally:
                if leave_transactions():
                    log.warning(
                        "what a tool gave to asyncio.to_thread left a transaction open: it is rolled back"
                    )

        return super().submit(work)


class _TaskCall(Call):
    """A call of an async tool as a task of the shared loop."""

    _set_apart = staticmethod(calls.work_in)  # the body was begun in a context that had nothing in it
    place: BodyLoop
    execution_id: str

    def start(self) -> None:
        loop = self.place.loop
        task, self._scope = self.place.begin_task(self._call, self.execution_id, self._context)
        with self._lock:
            self._running = (loop, task)
            if self._cancelled:
                task.cancel()
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Outcome]) -> None:
        with self._lock:
            self._running = None
        cancelled = task.cancelled()
        outcome = (
            Outcome(error=asyncio.CancelledError(), elapsed=self.elapsed) if cancelled else task.result()
        )
        if self._scope.rest():
            self.place.spawn(self._clear(outcome))
        else:
            self._finish(outcome)

    async def _clear(self, outcome: Outcome) -> None:
        await self._scope.end()
        self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        self.place.forget(self._scope)
        if self._end(outcome):
            self.place.store.put(lambda: self._on_late(outcome))


class _PlainCall(Call):
    """A call of a plain tool in one of the threads for those."""

    _set_apart = staticmethod(calls.work_in)
    place: BodyLoop

    def start(self) -> None:
        self.place.tools.put(self._work)

    def give_up(self) -> Outcome | None:
        before = self._given_up
        outcome = super().give_up()
        if self._given_up and not before:
            self.place.tools.left_behind(1)
        return outcome

    def _work(self) -> None:
        with inside_body():
            outcome = moved(self._context, partial(measured, self._call))
        if self._end(outcome):
            self._on_late(outcome)
        if self._given_up:
            self.place.tools.left_behind(-1)


async def _turn() -> None:
    """Let one turn of the loop pass."""
    await asyncio.sleep(0)


class _Gate:
    """One at a time goes in; as soon as it has left, all that wait may go on in one turn of the loop."""

    def __init__(self) -> None:
        self.taken = False
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Return when nobody is inside, in a turn in which nobody has gone in since."""
        while self.taken:
            free = asyncio.get_running_loop().create_future()
            self._waiting.append(free)
            await free

    async def enter(self) -> None:
        await self.wait()
        self.taken = True

    def leave(self) -> None:
        self.taken = False
        waiting, self._waiting = self._waiting, []
        for free in waiting:
            if not free.done():
                free.set_result(None)


class SharedDriver(AsyncDriver):
    """Carries commands out for one body of many in a loop, or for a branch of one.

    The rules of a body run in the loop's thread. What they make durable is composed there too, so while it is landed
    other rules of the body go on; while one of them asks the store in another thread, none does.
    """

    _is_beside = True

    def __init__(self, place: BodyLoop, execution_id: str, root: SharedDriver | None = None) -> None:
        super().__init__(one_thread=False)
        self._place = place
        self.beside = place.starts.put
        self._execution_id = execution_id
        self._root: SharedDriver | None = root
        self._landing: _Gate = _Gate() if root is None else root._landing
        self._away: _Gate = _Gate() if root is None else root._away
        self._ruling: Any = threading.RLock() if root is None else root._ruling
        if root is not None:
            self.stop, self._own = root.stop, root._own

    def exclusively(self, call: Callable[[], T]) -> T:
        # In the loop's thread this waits only for a sibling branch that asks the store in another one.
        with self._ruling:
            return call()

    def begin(self, steps: Steps[T]) -> Command | None:
        return None if self._away.taken else super().begin(steps)

    async def drive(self, steps: Steps[T], command: Command | None = None) -> T:
        if self._away.taken:
            await self._settle()
        return await super().drive(steps, command)

    async def _perform(self, command: Command) -> Any:
        if isinstance(command, Land):
            return await self._land(command.landing())
        if isinstance(command, Io):
            return await super()._perform(command)
        try:
            result = await super()._perform(command)
        except GeneratorExit:
            raise
        except BaseException:
            await self._settle()
            raise
        if self._away.taken:
            await self._settle()
        return result

    async def _settle(self) -> None:
        """Wait until no rule of another branch is away in a thread: the rules are to go on."""
        await self._kept(self._away.wait)

    async def _enter(self, gate: _Gate) -> None:
        if gate.taken:
            await self._kept(gate.enter)
        else:
            gate.taken = True

    async def _kept(self, wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Wait; a cancellation that comes meanwhile is kept, as in every call of the engine's."""
        while True:
            try:
                await wait()
            except asyncio.CancelledError:
                self._cut_off()
            else:
                return

    async def _land(self, landing: Landing[T]) -> T:
        """Land what is kept, of all branches. Other rules may go on meanwhile: what they record is landed next."""
        if self.closed:
            raise Unwind(Why.INTERRUPTED)
        if self._root is not None:
            await self._kept(_turn)  # so that what all branches record in this one is landed together
        await self._enter(self._landing)
        try:
            landed = await self._place.carry_out(landing, self._go_away, self._cut_later)
        finally:
            self._landing.leave()
        if self.closed:
            raise Unwind(Why.INTERRUPTED)
        return landed

    def _cut_later(self) -> None:
        """Whether a body that has ended was cut off or not: what is under way is waited for."""
        self._cut = True

    async def _outside(self, call: Callable[[], Any]) -> Any:
        await self._enter(self._landing)
        try:
            return await self._go_away(call)
        finally:
            self._landing.leave()

    async def _go_away(self, call: Callable[[], Any]) -> Any:
        await self._enter(self._away)
        try:
            return await super()._outside(call)
        finally:
            self._away.leave()

    def _ask(self, call: Callable[[], Any]) -> Asked:
        return self._place.ask(partial(self.exclusively, call))

    async def _pause(self, length: float) -> None:
        end = time.monotonic() + length
        while (left := end - time.monotonic()) > 0:
            if self.stop.is_set():
                raise Unwind(Why.INTERRUPTED)
            await self._kept(partial(asyncio.sleep, min(left, _LOOK)))

    async def _beside(self, command: Invoke) -> Outcome:
        if command.is_async:
            return await super()._beside(command)
        self._place.tools_waiting += 1
        try:
            await self._kept(self._place.slots.acquire)
        finally:
            self._place.tools_waiting -= 1
        try:
            if self._interrupted:  # lost while it waited: another owner may have begun this tool
                return Outcome(error=asyncio.CancelledError())
            return await super()._beside(command)
        finally:
            self._place.slots.release()

    def _new_call(
        self, command: Invoke, *, tell: Callable[[], None], post: Callable[[Callable[[], None]], None]
    ) -> Call:
        self._own.renew()
        kind = _TaskCall if command.is_async else _PlainCall
        call = kind(
            command.call,
            is_async=command.is_async,
            on_late=command.on_late,
            executor=Share(self._own),
            tell=tell,
        )
        call.place = self._place
        if isinstance(call, _TaskCall):
            call.execution_id = self._execution_id
        return call

    def _branch_driver(self) -> AsyncDriver:
        return SharedDriver(self._place, self._execution_id, self._root or self)

    async def run_task(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine body as a task of the loop."""
        context = contextvars.copy_context()
        context.run(calls.work_in, self._own)
        self._task, scope = self._place.begin_task(call, self._execution_id, context)
        try:
            outcome: Outcome = await self._task
        finally:
            self._left = True
            if scope.rest():
                await scope.end()
            self._place.forget(scope)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def ended(self) -> Callable[[], None] | None:
        """The body has ended: what is to be called yet where the thread for sync_to_async may be waited for."""
        return None if self._own.let_end() is None else self._own.close
