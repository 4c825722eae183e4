"""Taking up what a dead process left behind.

Who is dead is a fact about the cluster, not about the log: an expired lease says so, or the caller's own
predicate. A takeover takes the expired lease by its token, reads the log again, fences the predecessor out, puts
in doubt what must not run twice, and hands the execution on. One bad log stops nothing but itself.

Where others run the bodies, all that a pass found goes through these together, in a few statements. What is out of
the ordinary goes by itself, behind the others; a row that somebody has locked holds up nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from loom_django.engine.code import flow_for
from loom_django.engine.core import Engine, random_token
from loom_django.engine.doubt import LOST as LOST_IN_DOUBT
from loom_django.engine.doubt import open_doubts, park_fields, record_park_in_doubt
from loom_django.engine.journal import Journal
from loom_django.engine.outside import ATTEMPTS, open_journal
from loom_django.engine.run import refusal_delay
from loom_django.errors import FlowDivergenceError, InvalidInputError, OpenTransactionError
from loom_django.kernel.events import AUDIT, Event, Kind
from loom_django.kernel.state import ON_DIVERGED, ON_POISONED, Status, Wait
from loom_django.services import announce
from loom_django.services.dispatch import Dispatcher, InlineDispatcher, TasksDispatcher, Ticket
from loom_django.services.worker import SHORT
from loom_django.stores.base import NOBODY, READY, Acquired, Lease, LeaseStore, Loaded, Look

log = logging.getLogger("loom_django.recovery")

# Beginning a step again is no progress: a step that kills its process does that every time.
_NO_PROGRESS: Final = AUDIT | {str(Kind.STEP_STARTED)}


@dataclass(frozen=True, slots=True)
class Summary:
    """What a pass found and did.

    ``scanned`` rows were looked at, ``candidates`` of them abandoned, ``recovered`` handed on (or parked for
    an operator), ``failed`` left as they are and named in ``failures`` as (execution id, why). ``enqueued``
    were ready and taken by nobody, so that the task backend was told of them again.
    """

    scanned: int = 0
    candidates: int = 0
    recovered: int = 0
    failed: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    enqueued: int = 0


class Host(Protocol):
    """What a pass needs of the runtime."""

    @property
    def engine(self) -> Engine: ...

    @property
    def dispatcher(self) -> Dispatcher: ...


def recover_abandoned(
    loom: Host,
    *,
    is_abandoned: Callable[[Lease], bool] | None = None,
    leases: LeaseStore | None = None,
    fenced: bool = True,
    limit: int = 50,
) -> Summary:
    """Recover executions whose process died; a pass to be run by a worker, a cron or a job.

    Args:
        is_abandoned: your judgement of one holder. Required without ``leases``, and without a default:
            either answer would be wrong for somebody. With leases it narrows the expired ones further.
        leases: where leases are read; the candidates are those that have expired by its clock, and what has
            been ready for longer than ``READY_GRACE`` without being taken.
        fenced: take a fencing token, so that a predecessor that is not dead can append nothing more.
        limit: at most so many of each.

    Raises:
        InvalidInputError: neither ``leases`` nor ``is_abandoned`` was given.
    """
    if leases is None and is_abandoned is None:
        raise InvalidInputError(
            "without leases, is_abandoned= is required: a running execution of a healthy process looks the same "
            "as an abandoned one. Pass leases=loom.store, or your own judgement"
        )
    if loom.engine.store.in_transaction():
        raise OpenTransactionError(
            "recovery", "each takeover must be durable by itself", "Run it after the block."
        )
    run = _Pass(loom, fenced)
    if leases is None:
        run.all(loom.engine.store.leases(limit=limit), is_abandoned, forced=True)
    else:
        run.all(leases.expired(limit=limit), is_abandoned, forced=False)
        run.stale(leases, grace=loom.engine.settings().READY_GRACE, limit=limit)
    return run.summary()


class _Pass:
    def __init__(self, loom: Host, fenced: bool, *, counted: bool = True) -> None:
        self.loom = loom
        self.counted = counted
        self.engine = loom.engine
        self.fenced = fenced
        self.scanned = self.candidates = self.recovered = self.enqueued = 0
        self.failures: list[tuple[str, str]] = []

    def summary(self) -> Summary:
        failures = tuple(self.failures)
        return Summary(
            self.scanned, self.candidates, self.recovered, len(failures), failures, enqueued=self.enqueued
        )

    def all(
        self, found: Iterable[Lease], is_abandoned: Callable[[Lease], bool] | None, *, forced: bool
    ) -> None:
        inline = isinstance(self.loom.dispatcher, InlineDispatcher)
        together = self.fenced and self.counted and not forced and not inline
        candidates = []
        for lease in found:
            self.scanned += 1
            if not forced and self.engine.keeper.keeps(lease.execution_id, lease.token):
                continue  # this very process is at work on it; only the renewal is late
            if not self._tried(lease.execution_id, partial(self._is_candidate, lease, is_abandoned)):
                continue
            if together:
                candidates.append(lease)
            else:
                self._guarded(lease.execution_id, partial(self._lease, lease, forced))
        if len(candidates) > 1:
            self._together(candidates)
        else:
            for lease in candidates:
                self._guarded(lease.execution_id, partial(self._lease, lease, forced))

    def _is_candidate(self, lease: Lease, is_abandoned: Callable[[Lease], bool] | None) -> bool:
        if is_abandoned is not None and not is_abandoned(lease):
            return False
        self.candidates += 1
        return True

    def stale(self, leases: LeaseStore, *, grace: float, limit: int) -> None:
        """What has been ready too long.

        A worker's queue is served by its workers; inline, nobody else comes; a task may have been lost.
        """
        dispatcher, known = self.loom.dispatcher, self.engine.known()
        if isinstance(dispatcher, TasksDispatcher):
            self.enqueued += dispatcher.remind(
                lambda most: leases.stale_ready(grace=grace, limit=most, known=known), limit
            )
        if not isinstance(dispatcher, InlineDispatcher):
            return
        for lease in leases.stale_ready(grace=grace, limit=limit, known=known):
            self.scanned += 1
            self.candidates += 1
            self._guarded(lease.execution_id, partial(self._ready, lease.execution_id))

    def _guarded(self, execution_id: str, recover: Callable[[], bool]) -> None:
        self.recovered += self._tried(execution_id, recover)

    def _tried(self, execution_id: str, act: Callable[[], bool]) -> bool:
        """What it says; False if it failed, which is noted, and stops nobody else."""
        try:
            return act()
        except Exception as exc:
            if self.engine.store.is_connection_lost(exc):
                raise
            self.failures.append((execution_id, str(exc) or type(exc).__name__))
            log.error(
                "an execution could not be recovered: %s",
                exc,
                exc_info=exc,
                extra={"execution_id": execution_id},
            )
            return False

    def _together(self, leases: Sequence[Lease]) -> None:
        """Take several over and have others go on with them."""
        store, token = self.engine.store, random_token()
        owner, ttl = self.engine.identity.name, self.engine.settings().LEASE_TTL
        taken = self._of_all(lambda: store.take_over_all(leases, owner=owner, token=token, ttl=ttl))
        if taken is None:
            for lease in leases:
                self._guarded(lease.execution_id, partial(self._lease, lease, False))
            return
        owners = {lease.execution_id: lease.owner for lease in leases if lease.execution_id in taken}
        ordinary = self._fenced_out_together(list(owners), token)
        go_on: dict[str, Journal] = {}
        poisoned: list[tuple[Journal, int, str]] = []
        for execution_id, (journal, newest, count) in ordinary.items():
            if count > self._max_recoveries(journal):
                poisoned.append((journal, count, owners[execution_id]))
            else:
                self._announce(journal, newest, owners[execution_id])
                go_on[execution_id] = journal
        released = self._of_all(lambda: store.release_all(list(go_on), token)) or set()
        for execution_id, journal in go_on.items():
            hand_on = partial(self._hand_over, execution_id, token, journal)
            self._guarded(
                execution_id, partial(self._dispatched, execution_id) if execution_id in released else hand_on
            )
        # Whoever may have to be waited for comes last, and holds up nobody.
        for journal, count, previous in poisoned:
            self._guarded(journal.execution_id, partial(self._poisoned, journal, count, previous))
        for execution_id, previous in owners.items():
            if execution_id not in ordinary:
                self._guarded(execution_id, partial(self._taken, execution_id, token, previous))

    def _of_all(self, act: Callable[[], set[str]]) -> set[str] | None:
        """What was done for several in one statement; None if that failed, and each is to go by itself."""
        try:
            return act()
        except Exception as exc:
            if self.engine.store.is_connection_lost(exc):
                raise
            log.debug("each is recovered by itself: %s", exc)
            return None

    def _dispatched(self, execution_id: str) -> bool:
        self.loom.dispatcher.dispatch(execution_id, Ticket(READY), None)
        return True

    def _fenced_out_together(self, ids: Sequence[str], token: int) -> dict[str, tuple[Journal, Event, int]]:
        """Of those that this process holds, the ones that can go on as they are: their tokens are taken, and the
        takeover is counted. Each with the newest event of its log, and the count.

        The log is judged before the token is taken, and that is taken only while it ends there and the lease is
        ours: so nobody has parked or answered it, and whoever comes later is refused.
        """
        store = self.engine.store
        found: dict[str, tuple[Journal, Event]] = {}
        looks = []
        try:
            for execution_id, events in store.read_short(ids, most=SHORT).items():
                journal = self._ordinary(tuple(events))
                if journal is not None:
                    found[execution_id] = journal, events[-1]
                    end, at = events[-1].sequence, progress(tuple(events))
                    looks.append(Look(execution_id, end, lease=token, progress=at))
            fences = store.acquire_fences_at(looks)
        except Exception as exc:
            if store.is_connection_lost(exc):
                raise
            log.debug("each is recovered by itself: %s", exc)
            return {}
        for execution_id, fence in fences.items():
            found[execution_id][0].present(fence.fence)
        return {key: (*found[key], fence.recoveries) for key, fence in fences.items()}

    def _ordinary(self, events: tuple[Event, ...]) -> Journal | None:
        """A log that a body may go on with; None for one to be looked at by itself, where its error is told."""
        try:
            journal = open_journal(self.engine, Loaded(events, 0, 0))
            self._check_code(journal)
        except Exception:
            return None
        to_run = journal.fold.status in (Status.PENDING, Status.RUNNING)
        return journal if to_run and not open_doubts(journal.fold) else None

    def _poisoned(self, journal: Journal, count: int, previous_owner: str) -> bool:
        self._announce(journal, self._park(journal, count)[-1], previous_owner)
        return True

    def _announce(self, journal: Journal, newest: Event, previous_owner: str) -> None:
        announce.execution_recovered(journal.fold.flow_id, journal.fold.version, newest, previous_owner)

    def _lease(self, lease: Lease, forced: bool) -> bool:
        store, token = self.engine.store, random_token()
        owner, ttl = self.engine.identity.name, self.engine.settings().LEASE_TTL
        # A forced takeover's holder may be alive; the fence that is taken next is what stops it.
        taken = store.take_over(lease, owner=owner, token=token, ttl=ttl, forced=forced)
        return self._taken(lease.execution_id, token, lease.owner) if taken else False

    def _ready(self, execution_id: str) -> bool:
        token = random_token()
        taken = self.engine.store.claim(
            execution_id, owner=self.engine.identity.name, token=token, ttl=self.engine.settings().LEASE_TTL
        )
        return self._taken(execution_id, token) if taken else False

    def _taken(self, execution_id: str, token: int, previous_owner: str | None = None) -> bool:
        """Bring an execution that this process holds to where somebody can go on with it."""
        store = self.engine.store
        try:
            loaded = self._fenced_out(execution_id, token)
            if loaded is None:
                return False  # its owner parked or ended it before the fence was taken
            journal = open_journal(self.engine, loaded)
            if journal.fold.status not in (Status.PENDING, Status.RUNNING):
                return False  # the row says held, and the log does not: for loom_verify
            self._check_code(journal)
        except Exception as exc:
            if not store.is_connection_lost(exc):
                store.release(execution_id, token, delay=refusal_delay(self.engine, execution_id, exc))
            raise
        count = 0
        if self.counted:
            count = store.count_recovery(execution_id, sequence=progress(loaded.events))
        parked = self._park(journal, count)
        if previous_owner is not None and self.counted:
            self._announce(journal, (parked or loaded.events)[-1], previous_owner)
        return bool(parked) or self._hand_over(execution_id, token, journal)

    def _fenced_out(self, execution_id: str, token: int) -> Loaded | None:
        """The log of an execution that this process holds, under a token that was taken for it; None if it has
        gone on without us.

        A predecessor that was only late may park after the takeover, and be answered and run by somebody else,
        who is not to be fenced out. While the lease is ours nobody has parked or ended it; and where somebody
        does so behind this look, the acquire is stale.
        """
        store = self.engine.store
        for _ in range(ATTEMPTS):
            loaded = store.load(execution_id)
            lease = store.held(execution_id)
            if lease is None or lease.token != token:
                return None
            if not self.fenced or not loaded.events:
                return loaded
            head = loaded.events[-1].sequence
            acquired = store.acquire_fence_if(execution_id, fence=loaded.fence, park_seq=head)
            if isinstance(acquired, Acquired):
                tail = store.read(execution_id, after=head) if acquired.head > head else ()
                return replace(loaded, events=(*loaded.events, *tail), fence=acquired.fence)
        store.release(execution_id, token)  # whoever claims it next takes the fence with it
        return None

    def _check_code(self, journal: Journal) -> None:
        fold = journal.fold
        flow_for(self.engine, fold)
        if fold.unknown_kinds:
            raise InvalidInputError(f"its log holds kinds that this node does not know: {fold.unknown_kinds}")

    def _park(self, journal: Journal, count: int) -> tuple[Event, ...]:
        """Park what a person must look at; return the events of that, none if a body may go on.

        ``count`` is how often it was taken over without progress.
        """
        doubts = open_doubts(journal.fold)
        if doubts:
            record_park_in_doubt(journal, doubts, LOST_IN_DOUBT)
        elif count > self._max_recoveries(journal):
            number = 1 + sum(1 for wait in journal.fold.waits.values() if wait.on == ON_POISONED)
            waits = [Wait(f"poisoned#{number}", ON_POISONED)]
            journal.record(Kind.EXECUTION_SUSPENDED, park_fields("poisoned", waits))
        else:
            return ()
        return journal.land(ownership=NOBODY)

    def _max_recoveries(self, journal: Journal) -> int:
        own = flow_for(self.engine, journal.fold).max_recoveries
        return own if own is not None else self.engine.settings().MAX_RECOVERIES

    def _hand_over(self, execution_id: str, token: int, journal: Journal) -> bool:
        """Have somebody go on with it; False if it was taken from this process meanwhile."""
        dispatcher = self.loom.dispatcher
        if isinstance(dispatcher, InlineDispatcher):
            # Through the dispatcher's queue: if a body is running in this thread, this one runs after it.
            dispatcher.dispatch(execution_id, Ticket(self.engine.held(token), token), journal)
            self._report_divergence(journal)
        elif self.engine.store.release(execution_id, token):
            return self._dispatched(execution_id)
        else:
            return False
        return True

    def _report_divergence(self, journal: Journal) -> None:
        """An execution that was run here, and parked at once because its body skips what its log holds, is not
        recovered."""
        fold = journal.fold
        if any(wait.on == ON_DIVERGED for wait in fold.pending_waits()):
            park = self.engine.store.read(fold.execution_id, after=fold.last_sequence - 1)[0]
            error = park.data["error"]
            raise FlowDivergenceError(
                fold.execution_id, error["expected"], error["seen"], error["source_line"]
            )


def progress(events: tuple[Event, ...]) -> int:
    """The sequence of the newest event that is progress of the body."""
    return max((event.sequence for event in events if event.kind not in _NO_PROGRESS), default=1)


def recover_one(loom: Host, execution_id: str) -> Summary:
    """Take one execution over from its holder, whatever its lease says: an operator's judgement."""
    lease = loom.engine.store.held(execution_id)
    found = [] if lease is None else [lease]
    run = _Pass(loom, fenced=True)
    run.all(found, None, forced=True)
    return run.summary()


def hand_back(loom: Host, execution_ids: Iterable[str]) -> Summary:
    """Give up executions that this process holds and will not finish, as a recovery pass would take them.

    What must not run twice is put in doubt, the rest is ready for others at once. It counts as no recovery: a
    process that is told to end has not been killed by what it runs.
    """
    held = (loom.engine.store.held(execution_id) for execution_id in execution_ids)
    run = _Pass(loom, fenced=True, counted=False)
    run.all([lease for lease in held if lease is not None], None, forced=True)
    return run.summary()


class RecoveryService:
    """A recovery pass now and then, inside a loop."""

    name = "recovery"

    def __init__(self, loom: Host, *, limit: int = 50, clock: Callable[[], float] = time.monotonic) -> None:
        self.loom = loom
        self.limit = limit
        self.clock = clock
        self.next_at = 0.0
        self.recovered = 0

    def tick(self) -> bool:
        """Run a pass if it is time; True if it recovered any: there may be more, and those are to be run."""
        if self.clock() < self.next_at:
            return False
        engine = self.loom.engine
        summary = recover_abandoned(self.loom, leases=engine.store, limit=self.limit)
        self.recovered += summary.recovered
        more = summary.candidates >= self.limit and summary.recovered > 0
        # A quarter of the lease, so that a dead holder is noticed soon after its lease ended; with jitter.
        pause = engine.settings().LEASE_TTL / 4 * (0.75 + engine.draw() / 2)
        self.next_at = 0.0 if more else self.clock() + pause
        return summary.recovered > 0


# An execution that an admin act leaves ready is taken by an inline timer loop when it is this old, in seconds: a
# caller that runs its own start after its commit comes first.
LEFT_READY: Final = 1.0


class ReadyService:
    """Inside a timer loop of an inline project: runs what others have left ready."""

    name = "ready"

    def __init__(self, loom: Host, *, limit: int = 10) -> None:
        self.loom = loom
        self.limit = limit

    def tick(self) -> bool:
        """Run a few; True if any was run."""
        run = _Pass(self.loom, fenced=True)
        engine = self.loom.engine
        run.stale(engine.store, grace=LEFT_READY, limit=self.limit)
        return run.recovered > 0
