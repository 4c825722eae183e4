"""A worker: claims ready executions in batches and runs their bodies, plain ones in threads, async ones in one loop.

Any number of copies may run. A waiting execution is a row; it holds no thread here. When the process is told to
end, nothing more is claimed, each body is stopped at its next step and handed back, and steps in flight may
finish within a grace time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final

from loom_django.conf import DEFAULT_QUEUE, Queue
from loom_django.engine.core import Engine, random_token
from loom_django.engine.drive import abandoned
from loom_django.engine.journal import Journal
from loom_django.engine.outside import open_journal
from loom_django.engine.run import run_execution, run_shared
from loom_django.engine.shared import BodyLoop
from loom_django.kernel.events import Event
from loom_django.services.dispatch import run_logged
from loom_django.services.loop import soonest
from loom_django.services.notices import GAP
from loom_django.stores.base import Claimed, Known, Loaded, QueueLimits, Store

log = logging.getLogger("loom_django.worker")

BATCH: Final = 50

# Logs of at most so many events are read together, for all that one claim has brought.
SHORT: Final = 64

# While one kind of bodies is full, the other is looked for by itself, behind all that is ready of the first. After a look
# that found nothing the next one is so many times as long in coming as that took, and so many seconds at most.
REST: Final = 20.0
REST_AT_MOST: Final = 1.0

# Threads whose tool outlived its timeout; above this a worker ends, since they can only be ended with it.
MAX_ABANDONED: Final = 32


@dataclass(frozen=True, slots=True)
class Lane:
    """Queues that are claimed from together: those of one priority without limits, or one that has some.

    ``queues`` None are all, but for ``besides``; ``at_once`` is how many bodies of it one worker runs at a time.
    """

    priority: int
    queues: tuple[str, ...] | None
    besides: tuple[str, ...] = ()
    limits: QueueLimits | None = None
    at_once: int | None = None


def lanes_of(declared: Mapping[str, Queue], served: Sequence[str] | None) -> list[Lane]:
    """How a worker of these queues (None: of all) claims; those of the highest priority first.

    A worker of all queues serves those too that are declared no more, as the default queue without limits is:
    what was started in them is not lost.
    """
    lanes: list[Lane] = []
    alike: dict[int, list[str]] = {}
    for name, about in declared.items():
        if served is not None and name not in served:
            continue
        limits = QueueLimits(about.concurrency, about.rate)
        if limits == QueueLimits() and about.worker_concurrency is None:
            alike.setdefault(about.priority, []).append(name)
        else:
            cluster = None if limits == QueueLimits() else limits
            lanes.append(Lane(about.priority, (name,), limits=cluster, at_once=about.worker_concurrency))
    if served is None:
        rest = alike.pop(0, [])
        lanes.append(Lane(0, None, besides=tuple(name for name in declared if name not in rest)))
    lanes += [Lane(priority, tuple(names)) for priority, names in alike.items()]
    return sorted(lanes, key=lambda lane: -lane.priority)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a running body counts against: its queue, where that has a bound here, and the bound of its kind."""

    queue: str | None = None
    is_async: bool = False


class WorkerService:
    """Claims what is ready and has it run."""

    name = "worker"

    def __init__(
        self,
        engine: Engine,
        *,
        concurrency: int,
        tasks: int | None = None,
        queues: Sequence[str] | None = None,
        max_executions: int | None = None,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.concurrency = concurrency  # plain bodies at a time
        self.tasks = concurrency if tasks is None else tasks  # async ones
        self.queues = queues
        self.max_executions = max_executions
        self.on_free = on_free
        self.draining = threading.Event()
        self.claimed = 0
        self.broken = False  # a thread that ran bodies has broken off
        # When to look again, by the monotonic clock: the rate of a queue admits what was ready then, or a rest is over.
        self.again_at: float | None = None
        self._rest_until: dict[tuple[tuple[str, ...] | None, bool], float] = {}  # by a lane's queues and kind
        self._asked_at = 0
        self._turns = 0
        # By a lane's queues: the kind that was claimed last.
        self._served: dict[tuple[str, ...] | None, bool] = {}
        # By claim, not by execution: a body that hangs may lose its execution to another thread of this worker.
        self._held: dict[Claimed, _Counted] = {}
        self._asynchronous = 0  # so many of them are async bodies
        self._condition = threading.Condition()
        self._claims: queue.SimpleQueue[tuple[Claimed, list[Event] | None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: BodyLoop | None = None
        self._over: list[Claimed] = []  # of the loop: what is to be let go at the end of its turn
        self._shared = ExitStack()  # while bodies run, those that append at the same time share commits

    @property
    def running(self) -> int:
        """How many bodies are running now."""
        with self._condition:
            return len(self._held)

    @property
    def held(self) -> set[str]:
        """The ids of the executions whose bodies are running now."""
        with self._condition:
            return {claim.execution_id for claim in self._held}

    def stirred(self) -> bool:
        """True if bodies are running, or some were claimed since this was asked: they may have left more to do."""
        with self._condition:
            stirred = bool(self._held) or self.claimed != self._asked_at
            self._asked_at = self.claimed
            return stirred

    @property
    def exhausted(self) -> bool:
        """True when as many executions were claimed as were asked for."""
        return self.max_executions is not None and self.claimed >= self.max_executions

    @property
    def has_room(self) -> bool:
        """True if another body of one kind at least could be run here."""
        return not self.exhausted and any(self._free(is_async) > 0 for is_async in self._kinds())

    @property
    def stuck(self) -> bool:
        """True when an async body has held up all others until their leases ended: only the process can end it."""
        limit = self.engine.settings().EXECUTE_TIMEOUT
        return self._loop is not None and self._loop.stood_still > limit

    @property
    def overrun(self) -> bool:
        """True when too many threads were left behind by timeouts."""
        return abandoned.count > MAX_ABANDONED

    def tick(self) -> bool:
        """Claim as many as there is room for; True if there may be more."""
        self._turns += 1
        self.again_at = None
        kinds = self._kinds()
        more = False
        for lane in self._lanes():
            more |= self._serve_lane(lane, kinds)
        return more

    def _serve_lane(self, lane: Lane, kinds: Mapping[bool, Known]) -> bool:
        """Claim what there is room for; True if there may be more.

        Both kinds are looked for together, as far as each has room: a look for one of them walks over all that is ready of
        the other.
        """
        rooms = self._rooms(lane, kinds)
        least = min(rooms.values(), default=0)
        if len(rooms) == len(kinds) and self._take(lane, kinds, least) < least:
            return False
        more = False
        # The kind that was served last comes last: a lane with a limit may admit no more than one.
        for is_async in sorted(kinds, key=lambda kind: kind == self._served.get(lane.queues)):
            room = self._rooms(lane, kinds).get(is_async, 0)
            if room > 0 and (len(kinds) == 1 or not self._rests(lane, is_async)):
                found = self._take_alone(lane, is_async, kinds[is_async], room)
                more |= found >= room and self._room(lane, is_async) > 0
        return more

    def _rooms(self, lane: Lane, kinds: Iterable[bool]) -> dict[bool, int]:
        """The kinds of which bodies may be begun here and now, and how many."""
        if self.draining.is_set():
            return {}
        return {is_async: room for is_async in kinds if (room := self._room(lane, is_async)) > 0}

    def _rests(self, lane: Lane, is_async: bool) -> bool:
        """True while a kind is not looked for by itself; not for ever, so the loop learns until when."""
        until = self._rest_until.get((lane.queues, is_async), 0.0)
        if until <= time.monotonic():
            return False
        self._look_again(until)
        return True

    def _take_alone(self, lane: Lane, is_async: bool, known: Known, room: int) -> int:
        began = time.monotonic()
        found = self._take(lane, {is_async: known}, room)
        if not found:
            ended = time.monotonic()
            rest = min(REST * (ended - began), REST_AT_MOST)
            self._rest_until[lane.queues, is_async] = ended + rest
        return found

    def _take(self, lane: Lane, kinds: Mapping[bool, Known], room: int) -> int:
        """Claim as many of these kinds and have them run; returns how many there were."""
        claims = self._claim(lane, room, Known.either(*kinds.values()))
        if claims:
            logs = self._short_logs(claims)
            for is_async, known in kinds.items():
                alike = [claim for claim in claims if len(kinds) == 1 or known.names(claim.flow_id)]
                if alike:
                    self._served[lane.queues] = is_async
                    counted = _Counted(_queue_counted(lane), is_async)
                    self._submit([(claim, logs.get(claim.execution_id)) for claim in alike], counted)
        return len(claims)

    def _look_again(self, at: float) -> None:
        self.again_at = at if self.again_at is None else min(self.again_at, at)

    def _kinds(self) -> dict[bool, Known]:
        """The flows of this node, plain and async ones: each kind has room of its own."""
        known = self.engine.known()
        awaited = set() if self.engine.store.in_testcase() else self.engine.registry.all_async()
        kinds = {
            is_async: Known(
                {name: most for name, most in (known.flows or {}).items() if (name in awaited) == is_async}
            )
            for is_async in (False, True)
        }
        return {is_async: kind for is_async, kind in kinds.items() if kind.flows} or {False: known}

    def _lanes(self) -> list[Lane]:
        """The lanes in order; those of one priority take turns at being first."""
        lanes: list[Lane] = []
        for _, group in groupby(
            lanes_of(self.engine.settings().queues, self.queues), lambda lane: lane.priority
        ):
            alike = list(group)
            first = self._turns % len(alike)
            lanes += alike[first:] + alike[:first]
        return lanes

    def _free(self, is_async: bool) -> int:
        """How many bodies of a kind there is room for; none for async ones while one of them blocks their loop."""
        if is_async and self._loop is not None and self._loop.blocked:
            return 0
        with self._condition:
            if is_async:
                return self.tasks - self._asynchronous
            return self.concurrency - (len(self._held) - self._asynchronous)

    def _room(self, lane: Lane, is_async: bool) -> int:
        """How many bodies of a lane and a kind may be begun here and now."""
        with self._condition:
            room = min(BATCH, self._free(is_async))
            if self.max_executions is not None:
                room = min(room, self.max_executions - self.claimed)
            if lane.at_once is not None:
                queues = [counted.queue for counted in self._held.values()]
                room = min(room, lane.at_once - queues.count(_queue_counted(lane)))
            return room

    def _claim(self, lane: Lane, room: int, known: Known) -> list[Claimed]:
        store = self.engine.store
        lease: dict[str, Any] = {
            "owner": self.engine.identity.name,
            "token": random_token(),
            "ttl": self.engine.settings().LEASE_TTL,
            "limit": room,
            "known": known,
        }
        if lane.limits is None:
            return store.claim_ready(**lease, queues=lane.queues, besides=lane.besides)
        (name,) = lane.queues or (DEFAULT_QUEUE,)
        taken = store.claim_limited(name, lane.limits, **lease)
        if taken.again_in is not None:
            self._look_again(time.monotonic() + taken.again_in)
        return taken.claims

    def _short_logs(self, claims: Sequence[Claimed]) -> Mapping[str, list[Event]]:
        """The logs of what was claimed, as far as they are short, so that not every body asks for its own."""
        try:
            return self.engine.store.read_short([claim.execution_id for claim in claims], most=SHORT)
        except Exception as exc:
            log.debug("each body reads its own log: %s", exc)  # what was claimed is run all the same
            return {}

    def _submit(
        self, claims: Sequence[tuple[Claimed, list[Event] | None]], counted: _Counted = _Counted()
    ) -> None:
        with self._condition:
            if not self._threads and self._loop is None:
                self._shared.enter_context(self.engine.store.grouping())
            self._held.update((claim, counted) for claim, _ in claims)
            self.claimed += len(claims)
            self._asynchronous += len(claims) if counted.is_async else 0
            plain = len(self._held) - self._asynchronous
        # Kept from here on: on a busy machine the body may be entered late, and its lease is not to run out.
        for claim, _ in claims:
            self.engine.keeper.hold(claim.execution_id, claim.token, _not_entered)
        if counted.is_async:
            self._loop = loop = self._loop or BodyLoop(self.engine.store)
            loop.run([partial(self._run_in, loop, claim, events) for claim, events in claims])
            return
        for taken in claims:
            self._claims.put(taken)
        while len(self._threads) < min(self.concurrency, plain):
            thread = threading.Thread(target=self._serve, name=f"loom-body-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        """Run bodies one after the other; the thread's connection is kept between them and closed at its end."""
        try:
            while (taken := self._claims.get()) is not None:
                self._run(*taken)
        except BaseException:
            # Its claim stays among those that are held: the process ends, and hands it back.
            self.broken = True
            log.exception("a thread that runs bodies broke off")
            self.on_free()
        finally:
            self.engine.store.close_connections()

    def _run(self, claim: Claimed, events: list[Event] | None) -> None:
        store = self.engine.store
        try:
            store.close_old_connections()
            run_logged(
                lambda: run_execution(
                    self.engine,
                    claim.execution_id,
                    token=claim.token,
                    fence=claim.fence or None,
                    journal=self._journal(claim, events) if events else None,
                    stop=self.draining,
                ),
                claim.execution_id,
            )
        except BaseException:
            log.exception("a body's thread broke off", extra={"execution_id": claim.execution_id})
        finally:
            store.leave_transaction()  # whatever left it: the thread's next body is not to find it
            store.close_old_connections()
            self._let_go(claim)

    async def _run_in(self, loop: BodyLoop, claim: Claimed, events: list[Event] | None) -> None:
        """Run an async body in the loop that it shares with the others."""
        try:
            await run_shared(
                self.engine,
                loop,
                claim.execution_id,
                token=claim.token,
                fence=claim.fence or None,
                journal=self._journal(claim, events) if events else None,
                stop=self.draining,
            )
        except BaseException:
            log.exception("a body run broke off", extra={"execution_id": claim.execution_id})
        finally:
            self._over.append(claim)
            if len(self._over) == 1:  # whose ends were landed together are let go together
                loop.loop.call_soon(self._let_go_in, loop)

    def _let_go_in(self, loop: BodyLoop) -> None:
        over, self._over = self._over, []
        loop.store.put(lambda: self._let_go(*over))  # in a thread: it may ring for others

    def _journal(self, claim: Claimed, events: list[Event]) -> Journal:
        """The log of what was claimed, as it was read with others."""
        return open_journal(self.engine, Loaded(tuple(events), claim.fence, 0), fence=claim.fence or None)

    def _let_go(self, *claims: Claimed) -> None:
        for claim in claims:
            self.engine.keeper.drop(claim.execution_id, claim.token)
        with self._condition:
            for claim in claims:
                if (counted := self._held.pop(claim, None)) is not None:
                    self._asynchronous -= counted.is_async
            self._condition.notify_all()
        self.on_free()

    def drain(self, grace: float) -> bool:
        """Claim nothing more and wait for the steps in flight; False if some outlived the grace time."""
        self.draining.set()
        deadline = time.monotonic() + grace
        with self._condition:
            while self._held:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
        for _ in self._threads:
            self._claims.put(None)
        for thread in self._threads:
            thread.join()
        if self._loop is not None:
            self._loop.end()
        self._shared.close()
        return True


def _queue_counted(lane: Lane) -> str | None:
    """The queue under which the bodies of a lane are counted, if they are."""
    return lane.queues[0] if lane.at_once is not None and lane.queues else None


def _not_entered() -> None:
    """A lease that is lost before its body is entered is noticed at the body's first append."""


def next_in(store: Store, worker: WorkerService, *, timers: bool) -> float | None:
    """In how many seconds a worker's loop will have something to do; None if nothing is known."""
    upcoming = store.upcoming(queues=worker.queues)
    timer = upcoming.seconds_to(upcoming.timer) if timers else None
    ready = upcoming.seconds_to(upcoming.ready) if worker.has_room else None
    # A rate may admit one every few milliseconds: some of them are claimed together.
    rate = None if worker.again_at is None else max(worker.again_at - time.monotonic(), GAP)
    return soonest(timer, ready, rate)
