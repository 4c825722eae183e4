"""What any store must do: run these on a store of your own.

Each class is a mixin of test methods; give it the store and let pytest (or unittest) collect it::

    @pytest.mark.django_db(transaction=True)
    class TestMyEvents(EventStoreConformance):
        def make_store(self):
            return MyStore()

Some tests use threads, so a store over a database needs rows that are really committed. Every test works
under ids and flows of its own, so that a store may hold other rows; no test waits for time to pass.
"""

# ruff: noqa: S101  (tests: they assert, and draw numbers that guard nothing)

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from loom_django.errors import StaleFenceError
from loom_django.kernel.events import ANSWERING, CLASSIFICATION, Event, Kind, pack
from loom_django.kernel.fold import Fold
from loom_django.kernel.projection import project
from loom_django.kernel.state import Status
from loom_django.stores.base import (
    KEEP,
    NOBODY,
    READY,
    Acquired,
    Claimed,
    Commit,
    Ended,
    Head,
    Known,
    Lease,
    Look,
    Message,
    NewExecution,
    Ownership,
    QueueClaim,
    QueueLimits,
    ScheduleRow,
    SequenceOccupied,
    Snapshot,
    Stale,
    Store,
    Taken,
    TimerRow,
    WakesMoved,
)

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)

_AT = 1_700_000_000_000_000  # where the facts of these logs begin, in microseconds
_FIELDS: dict[str, dict[str, Any]] = {
    Kind.EXECUTION_SUSPENDED: {"waits": []},
    Kind.STEP_STARTED: {"step": "s", "tool": "t"},
    Kind.STEP_COMPLETED: {"step": "s"},
    Kind.EFFECT_RETURNED_LATE: {"step": "s"},
    Kind.EXECUTION_FAILED: {"error": {}},
    Kind.MESSAGE_CONSUMED: {"number": 1, "wait": "w", "name": "n", "on": "__loom_message__"},
}


def held_by(owner: str = "somebody", token: int = 1, ttl: float = 60.0) -> Ownership:
    return Ownership("held", owner=owner, token=token, ttl=ttl)


class Log:
    """An execution as its owner sees it: makes commits that follow one another."""

    def __init__(self, execution_id: str, flow_id: str) -> None:
        self.id = execution_id
        self.flow_id = flow_id
        self.fold = Fold()
        self.writer = random.getrandbits(60) + 1

    def event(self, kind: str, **fields: Any) -> Event:
        """The next event; it is folded here at once."""
        known = (
            {"flow": self.flow_id, "version": 1} if kind == Kind.EXECUTION_STARTED else _FIELDS.get(kind, {})
        )
        sequence = self.fold.last_sequence + 1
        event = Event(
            self.id,
            sequence,
            kind,
            pack({"at": _AT + sequence, **known, **fields}),
            writer=self.writer,
            is_kernel=kind in set(Kind),
        )
        self.fold.apply(event)
        return event

    def commit(self, *kinds: str, **options: Any) -> Commit:
        """The next events as a commit; without kinds, one step's start."""
        events = tuple(self.event(kind) for kind in kinds or (Kind.STEP_STARTED,))
        return Commit(self.id, events, project(self.fold), **options)

    def start(self, ownership: Ownership = READY, **new: Any) -> Commit:
        return self.commit(Kind.EXECUTION_STARTED, ownership=ownership, new=NewExecution(**new))

    def park(self, **options: Any) -> Commit:
        return self.commit(Kind.EXECUTION_SUSPENDED, ownership=NOBODY, **options)

    def answer(self, ownership: Ownership = READY, **options: Any) -> Commit:
        return self.commit(Kind.EXECUTION_RESUMED, ownership=ownership, **options)

    def end(self, **options: Any) -> Commit:
        return self.commit(Kind.EXECUTION_COMPLETED, ownership=NOBODY, **{"timers_off": None, **options})

    def fork(self) -> Log:
        """The same execution in the eyes of a rival, who writes from here on."""
        rival = Log(self.id, self.flow_id)
        rival.fold = Fold(self.fold.state())
        return rival


class StoreConformance:
    """What the kits share: the store under test, and ids that no other test has."""

    def make_store(self) -> Store:
        """Return the store to test; called once by each test, and again for a second process's view."""
        raise NotImplementedError

    def lose_fence(self, execution_id: str) -> bool:
        """Take an execution's fence row off behind the store's back; False, and a case less, if nobody can."""
        return False

    def setUp(self) -> None:
        self.setup_method()

    def setup_method(self, _method: object = None) -> None:
        self.store = self.make_store()
        self.flow_id = f"flow-{uuid.uuid4().hex[:12]}"
        self.known = Known({self.flow_id: 1})
        self.queue = f"queue-{self.flow_id}"
        self._logs = 0

    def log(self, *, flow_id: str | None = None, name: str | None = None) -> Log:
        """A log that is not started."""
        self._logs += 1
        return Log(name or f"{self.flow_id}-{self._logs}", flow_id or self.flow_id)

    def started(self, ownership: Ownership = READY, **new: Any) -> Log:
        log = self.log()
        self.store.append(log.start(ownership, **new))
        return log

    def running(self) -> Log:
        """Started, and held for a minute."""
        return self.started(held_by())

    def parked(self, **options: Any) -> Log:
        log = self.running()
        self.store.append(log.park(**options))
        return log

    def owner(self, log: Log) -> str:
        """Which of the four it is; asserts that it is exactly one."""
        status = self.store.status(log.id)
        assert status is not None
        held = self.store.held(log.id) is not None
        ready = any(
            lease.execution_id == log.id for lease in self.store.stale_ready(grace=-1e9, limit=10_000)
        )
        if status in (Status.PENDING, Status.RUNNING):
            assert held != ready
            return "held" if held else "ready"
        assert not held
        assert not ready
        return "parked" if status == Status.SUSPENDED else "finished"

    def refused(self, commit: Commit, reason: type[_E]) -> _E:
        """Append what must be refused, and assert that nothing of it landed."""
        before = self.snapshot(commit)
        error: _E | None = None
        try:
            self.store.append(commit)
        except reason as raised:
            error = raised
        assert error is not None, f"{commit} was not refused"
        assert self.snapshot(commit) == before
        return error

    def snapshot(self, commit: Commit) -> list[Any]:
        """All that a commit could change."""
        seen: list[Any] = []
        ids = [commit.execution_id, *(other.execution_id for other in commit.also), *commit.wake]
        for key in ids:
            seen += [
                self.store.read(key),
                self.store.status(key),
                self.store.held(key),
                self.store.timers(key),
                self.store.fence(key),
                self.store.wakes(key),
                self.store.message_names(key),
            ]
        return seen

    def in_threads(self, count: int, work: Callable[[int], _T]) -> list[_T]:
        """Do the work in threads that begin together, and return what each returned."""
        barrier = threading.Barrier(count)

        def begin(number: int) -> _T:
            barrier.wait(timeout=30)
            try:
                return work(number)
            finally:
                self.store.close_connections()

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(begin, range(count)))


def _outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "landed"


class EventStoreConformance(StoreConformance):
    """The log and its fences."""

    # Sequences.

    def test_a_log_comes_back_in_order_as_it_was_written(self) -> None:
        """Kinds, payload texts, fences, writers and stamps are read as they were appended."""
        log = self.running()
        commit = log.commit(Kind.STEP_STARTED, "shipped", Kind.STEP_COMPLETED)
        self.store.append(commit)
        read = self.store.read(log.id, after=1)
        assert [replace(event, recorded_at=None) for event in read] == list(commit.events)

    def test_payload_text_survives_byte_by_byte(self) -> None:
        """Order and doubles of keys, spacing of numbers, escapes and long numbers are the writer's."""
        log = self.running()
        body = (
            '{"at":1,"step":"s","tool":"t","b":1.10,"a":[1e2,' + "9" * 40 + '],"b":"\\u0000 \\ud800 \\u00e9"}'
        )
        event = replace(log.event(Kind.STEP_STARTED), body=body)
        self.store.append(Commit(log.id, (event,), project(log.fold)))
        assert self.store.read(log.id)[-1].body == body

    def test_ids_and_names_may_hold_any_printable_text(self) -> None:
        """Quotes, percent signs, dollars, braces and other scripts are text and nothing else."""
        odd = "o'dd \"%s %(id)s $1 {0} :id ? \\ é 日本 🧵"
        log = self.log(name=f"{self.flow_id} {odd}", flow_id=f"{self.flow_id} {odd}")
        self.store.append(log.start(queue=odd))
        known = Known({log.flow_id: 1})
        (claimed,) = self.store.claim_ready(owner=odd, token=1, ttl=60, limit=9, known=known, queues=[odd])
        assert claimed.execution_id == log.id
        assert self.store.renew([(log.id, 1)], ttl=60) == {log.id}
        self.store.append(log.commit(odd, Kind.STEP_STARTED, fence=1))
        assert self.store.read(log.id)[1].kind == odd
        assert self.store.send(log.id, name=odd, message_id=odd, body='"%s"')
        assert [message.name for message in self.store.inbox(log.id, odd)] == [odd]
        lease = self.store.held(log.id)
        assert lease is not None
        assert (lease.owner, lease.flow_id) == (odd, log.flow_id)

    def test_ids_that_differ_in_case_or_spaces_are_apart(self) -> None:
        """Ids are compared as they are written."""
        names = [f"{self.flow_id}-{suffix}" for suffix in ("a", "A", "a ", "á", "a\u0301")]
        for name in names:
            self.store.append(self.log(name=name).start())
        assert [len(self.store.read(name)) for name in names] == [1] * 5

    def test_events_are_stamped_by_the_store_s_clock(self) -> None:
        """recorded_at is aware, and lies between two looks at the store's clock."""
        before = self.store.now()
        log = self.started()
        (event,) = self.store.read(log.id)
        assert event.recorded_at is not None
        assert before <= event.recorded_at <= self.store.now()

    def test_a_part_of_a_log_can_be_read(self) -> None:
        """after and limit cut, and a log that is not there is empty."""
        log = self.running()
        self.store.append(log.commit(*[Kind.STEP_STARTED] * 5))
        assert [event.sequence for event in self.store.read(log.id, after=2)] == [3, 4, 5, 6]
        assert [event.sequence for event in self.store.read(log.id, after=2, limit=2)] == [3, 4]
        assert self.store.read(log.id, after=6) == []
        assert self.store.read(self.log().id) == []

    def test_a_gap_is_refused(self) -> None:
        """An append whose predecessor is not there does not land, whatever came of the one before it."""
        log = self.running()
        log.commit()
        self.refused(log.commit(), SequenceOccupied)

    def test_a_start_needs_no_predecessor_and_others_do(self) -> None:
        """An append to an execution that was never started is refused."""
        log = self.log()
        log.start()
        self.refused(log.commit(), SequenceOccupied)

    def test_a_start_may_land_with_what_follows_it(self) -> None:
        """A marker under a lease; a park with its fence row and its timer row; an end, with none; a child's start."""
        new, soon = NewExecution(), self.store.now() + timedelta(hours=1)
        begun, parked, ended, child = self.log(), self.log(), self.log(), self.log()
        first = begun.commit(Kind.EXECUTION_STARTED, Kind.STEP_STARTED, ownership=held_by("me", 7), new=new)
        self.store.append(first)
        assert self.owner(begun) == "held"
        timers = (TimerRow(parked.id, soon),)
        kinds = (Kind.EXECUTION_STARTED, Kind.EXECUTION_SUSPENDED)
        self.store.append(parked.commit(*kinds, ownership=NOBODY, new=new, timers=timers, wakes=0))
        assert self.owner(parked) == "parked"
        assert [row.wake_at for row in self.store.timers(parked.id)] == [soon]
        assert self._ensured(self.flow_id, 10) == (parked.id, 1, 0)
        kinds = (Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED)
        self.store.append(ended.commit(*kinds, ownership=NOBODY, new=new, timers_off=None))
        assert self.owner(ended) == "finished"
        parent = self.log()
        both = parent.commit(
            Kind.EXECUTION_STARTED,
            Kind.CHILD_STARTED,
            ownership=held_by(),
            new=new,
            also=(child.start(parent_id=parent.id),),
        )
        self.store.append(both)
        assert (self.owner(parent), self.owner(child)) == ("held", "ready")
        before = self.snapshot(both)
        self.store.append(both)  # as after an answer that was lost
        assert self.snapshot(both) == before

    def test_a_sequence_is_taken_once(self) -> None:
        """The second of two writers of one sequence is refused, with nothing of its commit landed."""
        log = self.running()
        rival = log.fork()
        self.store.append(log.commit())
        error = self.refused(rival.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED), SequenceOccupied)
        assert (error.execution_id, error.sequence) == (log.id, 2)

    def test_of_eight_writers_one_lands(self) -> None:
        """Writers that race for one sequence leave one history."""
        log = self.running()
        commits = [log.fork().commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED) for _ in range(8)]
        outcomes = self.in_threads(8, lambda number: _outcome(lambda: self.store.append(commits[number])))
        assert sorted(outcomes) == ["SequenceOccupied"] * 7 + ["landed"]
        read = self.store.read(log.id, after=1)
        assert len(read) == 2
        assert len({event.writer for event in read}) == 1

    def test_a_commit_of_many_events_lands_whole(self) -> None:
        """All of them stand in the log, in order and with their content."""
        log = self.running()
        commit = log.commit(*[Kind.STEP_STARTED, Kind.STEP_COMPLETED] * 10)
        self.store.append(commit)
        found = self.store.read(log.id, after=1)
        assert [(e.sequence, e.kind, e.body, e.writer) for e in found] == [
            (e.sequence, e.kind, e.body, e.writer) for e in commit.events
        ]

    def test_what_is_not_consecutive_is_a_mistake(self) -> None:
        """A gap inside a commit, another's event, or a start that is not the first event is a ValueError."""
        log = self.running()
        commit = log.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED, Kind.STEP_STARTED)
        gap = replace(commit, events=(commit.events[0], commit.events[2]))
        other = replace(commit, execution_id=self.log().id)
        late = replace(commit, new=NewExecution(), ownership=READY)
        for wrong in (gap, other, late):
            self.refused(wrong, ValueError)

    # Starts.

    def test_a_taken_id_refuses_a_start(self) -> None:
        """The second start of one id changes nothing."""
        log = self.started(priority=3)
        self.refused(self.log(name=log.id).start(priority=4), SequenceOccupied)

    def test_of_eight_starts_of_one_id_one_lands(self) -> None:
        """Starters that race leave one execution."""
        log = self.log()
        starts = [self.log(name=log.id).start() for _ in range(8)]
        outcomes = self.in_threads(8, lambda number: _outcome(lambda: self.store.append(starts[number])))
        assert sorted(outcomes) == ["SequenceOccupied"] * 7 + ["landed"]
        assert len(self.store.read(log.id)) == 1

    def test_the_status_is_known_without_the_log(self) -> None:
        """status follows the events, and is None for what is not there."""
        log = self.log()
        assert self.store.status(log.id) is None
        seen = []
        for commit in (log.start(held_by()), log.commit(), log.park(), log.answer(), log.end()):
            self.store.append(commit)
            seen.append(self.store.status(log.id))
        assert seen == [Status.PENDING, Status.RUNNING, Status.SUSPENDED, Status.RUNNING, Status.COMPLETED]

    def test_the_head_is_known_without_the_log(self) -> None:
        """head tells the status, the parent and the last event's place and writer; None for what is not there."""
        parent = self.running()
        log = self.log()
        assert self.store.head(log.id) is None
        commits = (
            log.start(held_by(), parent_id=parent.id),
            log.commit(),
            log.park(),
            log.answer(),
            log.end(),
        )
        for commit in commits:
            self.store.append(commit)
            last, status = commit.events[-1], commit.projection.status
            assert self.store.head(log.id) == Head(status, parent.id, last.sequence, last.writer)
        alone = self.store.head(parent.id)
        assert alone is not None
        assert alone.parent_id is None

    # The writer tells a lost acknowledgement from a rival.

    def test_what_had_landed_lands_no_second_time(self) -> None:
        """The same commit sent again returns as if it had landed now, and changes nothing."""
        log = self.running()
        commit = log.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED)
        self.store.append(commit)
        before = self.snapshot(commit)
        self.store.append(commit)
        assert self.snapshot(commit) == before

    def test_what_had_landed_is_known_behind_later_events_and_a_moved_token(self) -> None:
        """Neither a log that went on nor a fence taken since makes it a refusal."""
        log = self.running()
        start_again = Log(log.id, log.flow_id)
        start_again.writer = log.writer
        commit = log.commit()
        self.store.append(commit)
        self.store.append(log.commit())
        self.store.acquire_fence(log.id)
        self.store.append(commit)
        self.store.append(start_again.start(held_by()))
        assert len(self.store.read(log.id)) == 3

    def test_equal_content_of_another_writer_is_a_rival_s(self) -> None:
        """Only the writer decides: the same events from somebody else are refused."""
        log = self.running()
        rival = log.fork()
        self.store.append(log.commit())
        self.refused(rival.commit(), SequenceOccupied)

    def test_a_writer_of_zero_proves_nothing(self) -> None:
        """Events without a writer are never taken for one's own."""
        log = self.running()
        log.writer = 0
        commit = log.commit()
        self.store.append(commit)
        self.refused(commit, SequenceOccupied)

    def test_a_part_that_is_one_s_own_is_not_the_whole(self) -> None:
        """A longer commit of the same writer over a shorter one has not landed."""
        log = self.running()
        again = log.fork()
        again.writer = log.writer
        self.store.append(log.commit())
        self.refused(again.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED), SequenceOccupied)

    # Fences.

    def test_nobody_s_token_is_zero(self) -> None:
        """An execution that nobody fenced takes any append, whatever token is presented."""
        log = self.running()
        assert self.store.fence(log.id) == 0
        self.store.append(log.commit())
        self.store.append(log.commit(fence=3))
        assert self.store.fence(log.id) == 0

    def test_a_stale_token_is_refused(self) -> None:
        """Only the newest token may write."""
        log = self.running()
        old = self.store.acquire_fence(log.id)
        new = self.store.acquire_fence(log.id)
        error = self.refused(log.fork().commit(fence=old), StaleFenceError)
        assert (error.execution_id, error.fence, error.current) == (log.id, old, new)
        self.store.append(log.commit(fence=new))

    def test_a_missing_token_is_refused_on_a_fenced_execution(self) -> None:
        """Whoever presents none is older than any fence."""
        log = self.running()
        self.store.acquire_fence(log.id)
        for commit in (log.fork().commit(), log.fork().park(), log.fork().end()):
            self.refused(commit, StaleFenceError)

    def test_notes_of_others_need_no_token(self) -> None:
        """Audit kinds are exempt from the guard, but not in one commit with a fact."""
        log = self.running()
        self.store.acquire_fence(log.id)
        self.refused(log.fork().commit(Kind.EXECUTION_DENIED, Kind.STEP_STARTED), StaleFenceError)
        self.store.append(log.commit(Kind.EXECUTION_DENIED))
        self.store.append(log.commit(Kind.EFFECT_RETURNED_LATE, Kind.EXECUTION_DENIED))
        assert len(self.store.read(log.id)) == 4

    def test_tokens_only_grow_under_eight_threads(self) -> None:
        """No two acquirers get the same token, and none is lost."""
        log = self.parked()

        def acquire(_: int) -> list[int]:
            return [self.store.acquire_fence(log.id) for _ in range(10)]

        taken = self.in_threads(8, acquire)
        assert all(tokens == sorted(tokens) for tokens in taken)
        assert sorted(token for tokens in taken for token in tokens) == list(range(1, 81))
        assert self.store.fence(log.id) == 80

    def test_a_fence_can_come_before_its_execution(self) -> None:
        """An id that somebody fenced is started under a token moved once more."""
        log = self.log()
        self.store.acquire_fence(log.id)
        self.store.append(log.start(held_by()))
        assert self.store.fence(log.id) == 2
        self.refused(log.fork().commit(fence=1), StaleFenceError)
        self.store.append(log.commit(fence=2))

    def test_token_and_wakes_come_with_the_log(self) -> None:
        """load gives what stood before the log was read."""
        log = self.running()
        self.store.acquire_fence(log.id)
        self._wake(log)
        loaded = self.store.load(log.id, after=0)
        assert (loaded.fence, loaded.wakes) == (1, 1)
        assert [event.sequence for event in loaded.events] == [1]
        assert self.store.load(log.id, after=1).events == ()
        assert self.store.load(log.id, format="mine") == loaded
        self.store.save_snapshot(self._snapshot(log, 1), passed=0)
        behind = self.store.load(log.id, format="mine")
        assert (behind.fence, behind.wakes) == (1, 1)

    # Snapshots.

    def _snapshot(self, log: Log, sequence: int, *, format: str = "mine", body: str = "{}") -> Snapshot:
        return Snapshot(log.id, format, sequence, f"seal {body}", body)

    def test_a_log_is_read_from_its_snapshot_on(self) -> None:
        """The event that it stands behind comes with it; only the newest of a format is kept."""
        log = self.parked()
        self.store.append(log.answer())
        whole = self.store.load(log.id)
        assert self.store.load(log.id, format="mine") == whole
        for sequence in (1, 2):
            snapshot = self._snapshot(log, sequence, body='{"text": "\\u0000 ü"}')
            self.store.save_snapshot(snapshot, passed=0)
            loaded = self.store.load(log.id, format="mine")
            assert loaded.snapshot == snapshot
            assert loaded.events == whole.events[sequence - 1 :]
            assert (loaded.fence, loaded.wakes) == (whole.fence, whole.wakes)
        assert self.store.load(log.id) == whole
        self.store.drop_snapshots(log.id)
        assert self.store.load(log.id, format="mine") == whole

    def test_a_snapshot_beyond_the_end_of_a_log_is_none(self) -> None:
        """It is another log's; this one is read whole, if there is one."""
        log = self.parked()
        self.store.save_snapshot(self._snapshot(log, 7), passed=0)
        assert self.store.load(log.id, format="mine") == self.store.load(log.id)
        assert self.store.load(self.log().id, format="mine").events == ()

    def test_snapshots_of_two_formats_stand_side_by_side(self) -> None:
        """Each reads its own, until one of them is passed for the second time."""
        log = self.parked()
        for format in ("old", "new"):
            self.store.save_snapshot(self._snapshot(log, 2, format=format), passed=0)
        for format in ("old", "new"):
            loaded = self.store.load(log.id, format=format)
            assert loaded.snapshot == self._snapshot(log, 2, format=format)
        self.store.append(log.answer())
        self.store.save_snapshot(self._snapshot(log, 3, format="new"), passed=2)
        assert self.store.load(log.id, format="old").snapshot is None
        assert self.store.load(log.id, format="new").snapshot is not None

    def test_a_snapshot_goes_with_its_execution(self) -> None:
        """Deletion takes it along, and none is kept of what has ended or is not there."""
        log = self.parked()
        self.store.save_snapshot(self._snapshot(log, 1), passed=0)
        self.store.append(log.end())
        self.store.save_snapshot(self._snapshot(log, 2), passed=0)
        loaded = self.store.load(log.id, format="mine")
        assert loaded.snapshot == self._snapshot(log, 1)
        self.store.delete_execution(log.id)
        self.store.save_snapshot(self._snapshot(log, 1), passed=0)
        again = self.log(name=log.id)
        self.store.append(again.start())
        assert self.store.load(log.id, format="mine").snapshot is None

    # Parks that other hands wrote.

    def _ensured(self, after: str, limit: int) -> tuple[str | None, int, int]:
        with self.store.walking_parks():
            batch = self.store.ensure_park_fences(after=after, limit=limit)
        return batch.position, batch.parked, batch.made

    def test_a_park_has_its_fence_row(self) -> None:
        """A walk over parks that the store wrote finds them, and nothing to make."""
        log = self.parked()
        assert self._ensured(self.flow_id, 1) == (log.id, 1, 0)

    def test_a_park_that_lost_its_fence_row_gets_one(self) -> None:
        """Made once; the token is 0, so nobody is fenced out by it."""
        log = self.parked()
        if not self.lose_fence(log.id):
            return
        assert self._ensured(self.flow_id, 1) == (log.id, 1, 1)
        assert self._ensured(self.flow_id, 1) == (log.id, 1, 0)
        assert self.store.fence(log.id) == 0
        self.store.append(log.answer())

    def test_a_walk_over_parks_leaves_tokens_alone(self) -> None:
        """A row that is there is not written."""
        log = self.parked()
        self.store.acquire_fence(log.id)
        assert self._ensured(self.flow_id, 1) == (log.id, 1, 0)
        assert self.store.fence(log.id) == 1

    def test_parks_are_walked_over_in_batches_by_id(self) -> None:
        """Each batch begins behind the one before; what never parked is passed over."""
        first, _, second, third = self.parked(), self.running(), self.parked(), self.parked()
        assert self._ensured(self.flow_id, 2) == (second.id, 2, 0)
        assert self._ensured(second.id, 1) == (third.id, 1, 0)
        assert self._ensured(first.id, 1) == (second.id, 1, 0)
        assert self._ensured(chr(0x10FFFF), 1) == (None, 0, 0)

    def test_an_answered_park_needs_no_fence_row(self) -> None:
        """Answered, ended, or answered by a kind of a newer release: looked at, and not counted."""
        answered, ended, newer = self.parked(), self.parked(), self.parked()
        self.store.append(answered.answer())
        self.store.append(ended.end())
        unknown = replace(newer.event(Kind.EXECUTION_RESUMED), kind="EXECUTION_REWOUND", is_kernel=True)
        self.store.append(Commit(newer.id, (unknown,), project(newer.fold), ownership=READY))
        assert self._ensured(self.flow_id, 3) == (newer.id, 0, 0)

    def test_what_follows_a_park_without_answering_it_leaves_it_parked(self) -> None:
        """Notes of others do; a second park counts as the first did, and once."""
        log = self.parked()
        self.store.append(log.commit(Kind.EXECUTION_DENIED))
        assert self._ensured(self.flow_id, 1) == (log.id, 1, 0)
        self.store.append(log.answer(held_by()))
        self.store.append(log.park())
        assert self._ensured(self.flow_id, 1) == (log.id, 1, 0)

    # Conditional acquires.

    def acquire_if(self, log: Log, *, fence: int = 0, park_seq: int | None = None) -> Acquired | Stale:
        """As somebody who saw the newest park, written under ``fence``."""
        seen = log.fold.park_sequence if park_seq is None else park_seq
        assert seen is not None
        return self.store.acquire_fence_if(log.id, fence=fence, park_seq=seen)

    def stale(self, log: Log, *, fence: int = 0, park_seq: int | None = None) -> int:
        """Acquire what must be stale, assert that nothing changed, and return the token that was told."""
        commit = log.fork().commit()
        before = self.snapshot(commit)
        told = self.acquire_if(log, fence=fence, park_seq=park_seq)
        assert isinstance(told, Stale), f"{told}, and the log is {[event.kind for event in before[0]]}"
        assert self.snapshot(commit) == before
        assert told.fence == self.store.fence(log.id)
        return told.fence

    def test_a_conditional_acquire_moves_the_token_and_fences_the_holder_out(self) -> None:
        """It gives the next token and the log's end; whoever held the one before can append nothing."""
        log = self.parked()
        assert self.acquire_if(log) == Acquired(1, 2)
        self.store.append(log.answer(fence=1))
        self.store.append(log.park(fence=1))
        assert self.acquire_if(log, fence=1) == Acquired(2, 4)
        self.refused(log.fork().answer(fence=1), StaleFenceError)
        self.refused(log.fork().answer(), StaleFenceError)
        self.store.append(log.answer(fence=2))

    def test_a_park_that_nobody_fenced_expects_no_token(self) -> None:
        """Nobody's token is 0, and any other expectation is stale."""
        log = self.parked()
        assert self.stale(log, fence=1) == 0
        assert isinstance(self.acquire_if(log, fence=0), Acquired)

    def test_a_moved_token_is_stale(self) -> None:
        """Whoever acquired since, in whichever way, is told by the token that stands now."""
        log = self.parked()
        assert self.store.acquire_fence(log.id) == 1
        assert self.stale(log, fence=0) == 1
        assert self.acquire_if(log, fence=1) == Acquired(2, 2)
        assert self.stale(log, fence=1) == 2
        assert self.acquire_if(log, fence=2) == Acquired(3, 2)

    def test_an_answered_park_is_stale_though_its_token_stands(self) -> None:
        """Every kind that answers, with or without a payload; an answer does not move the token."""
        ends = [Kind.EXECUTION_COMPLETED, Kind.EXECUTION_FAILED, Kind.EXECUTION_CANCELLED]
        ends.append(Kind.EXECUTION_CONTINUED)
        answers: list[tuple[Kind, Ownership, dict[str, Any]]] = [
            (Kind.EXECUTION_RESUMED, READY, {"wait": "w", "event": "Go", "payload": 1}),
            (Kind.EXECUTION_RESUMED, READY, {}),
            (Kind.EXECUTION_SUSPENDED, NOBODY, {}),
            *((kind, NOBODY, {}) for kind in ends),
        ]
        assert {str(kind) for kind, _, _ in answers} == ANSWERING
        for kind, ownership, fields in answers:
            log = self.parked()
            park = log.fold.park_sequence
            commit = Commit(log.id, (log.event(kind, **fields),), project(log.fold), ownership=ownership)
            self.store.append(commit)
            assert self.stale(log, park_seq=park) == 0, kind

    def test_an_answer_behind_other_events_is_seen(self) -> None:
        """The whole log behind the park counts, however long."""
        log = self.parked()
        park = log.fold.park_sequence
        self.store.append(log.commit(*[Kind.EXECUTION_DENIED] * 30))
        self.store.append(log.answer())
        self.store.append(log.commit(*[Kind.STEP_STARTED] * 30))
        assert self.stale(log, park_seq=park) == 0

    def test_what_answered_an_earlier_park_is_no_answer_to_this_one(self) -> None:
        """Answers and parks at the park's sequence or before it are over."""
        log = self.parked()
        self.store.append(log.answer())
        self.store.append(log.park())
        assert log.fold.park_sequence == 4
        assert self.stale(log, park_seq=2) == 0
        assert self.stale(log, park_seq=3) == 0
        assert self.acquire_if(log) == Acquired(1, 4)

    def test_events_that_answer_nothing_leave_the_park_open(self) -> None:
        """Every kind of the kernel that is ignorable, and what a flow or a user emits."""
        ignorable = sorted(kind for kind, answer in CLASSIFICATION.items() if answer == "ignorable")
        assert set(ignorable) | ANSWERING == set(Kind)
        for kind in ignorable:
            log = self.parked()
            event = Event(log.id, 3, kind, pack({"at": _AT}), writer=1)
            self.store.append(Commit(log.id, (event,), project(log.fold)))
            assert self.acquire_if(log) == Acquired(1, 3), kind
        log = self.parked()
        self.store.append(log.commit("an.event.of.an.application"))
        assert self.acquire_if(log) == Acquired(1, 3)

    def test_an_unknown_kind_with_the_kernel_s_stamp_answers(self) -> None:
        """A newer node wrote it. At worst a wake is tried again, never a running body fenced out."""
        for is_kernel in (True, False):
            log = self.parked()
            event = Event(log.id, 3, "EXECUTION_BEAMED_UP", "{}", writer=1, is_kernel=is_kernel)
            # As a newer node has it, who can tell who owns the execution then.
            self.store.append(Commit(log.id, (event,), project(log.fold), ownership=NOBODY))
            if is_kernel:
                assert self.stale(log) == 0
            else:
                assert self.acquire_if(log) == Acquired(1, 3)

    def test_a_park_that_is_not_there_is_stale(self) -> None:
        """A log that ends before it, one that was deleted, and one that never was."""
        parked, deleted, never = self.parked(), self.parked(), self.log()
        assert self.stale(parked, park_seq=3) == 0
        park = deleted.fold.park_sequence
        token = self.store.acquire_fence(deleted.id)
        self.store.append(deleted.end(fence=token))
        assert self.store.delete_execution(deleted.id)
        assert self.stale(deleted, fence=token, park_seq=park) == token
        assert self.stale(never, park_seq=2) == 0
        assert self.acquire_if(parked) == Acquired(1, 2)

    def test_of_eight_conditional_acquirers_one_wins(self) -> None:
        """And so of the next eight, that come with the token which the losers were told."""
        log = self.parked()
        for token in (0, 1):
            told = self.in_threads(8, lambda _, token=token: self.acquire_if(log, fence=token))  # type: ignore[misc]
            assert sorted(told, key=repr) == [Acquired(token + 1, 2), *[Stale(token + 1)] * 7]
        assert self.store.fence(log.id) == 2

    def test_an_answer_and_a_conditional_acquire_exclude_each_other(self) -> None:
        """Never both: either the answer lands and the acquire is stale, or it is refused with its token."""
        for token in (0, 1):
            for _ in range(10):
                log = self.parked()
                if token:
                    self.store.acquire_fence(log.id)
                self._race(log, token)

    def _race(self, log: Log, token: int) -> None:
        answer, park = log.fork().answer(fence=token or None), log.fold.park_sequence
        told: list[Any] = [None, None]

        def act(number: int) -> None:
            if number:
                told[0] = _outcome(lambda: self.store.append(answer))
            else:
                told[1] = self.acquire_if(log, fence=token, park_seq=park)

        self.in_threads(2, act)
        landed = isinstance(told[1], Stale)
        assert told[0] == ("landed" if landed else "StaleFenceError"), told
        assert self.store.fence(log.id) == (token if landed else token + 1)
        assert len(self.store.read(log.id)) == (3 if landed else 2)

    def test_a_conditional_acquire_in_a_transaction_that_is_undone(self) -> None:
        """It goes with the transaction."""
        log = self.parked()
        with suppress(ZeroDivisionError), self.store.transaction():
            assert self.acquire_if(log) == Acquired(1, 2)
            raise ZeroDivisionError
        assert self.store.fence(log.id) == 0
        with self.store.transaction():
            assert self.acquire_if(log) == Acquired(1, 2)
            assert isinstance(self.acquire_if(log), Stale)
        assert self.store.fence(log.id) == 1

    # Appends that take the token.

    def test_an_append_that_takes_the_token_lands_under_the_next_one(self) -> None:
        """Whatever the token is; who held it is fenced out, and whoever took it goes on."""
        for token in range(3):
            log = self.parked()
            for _ in range(token):
                self.store.acquire_fence(log.id)
            rival = log.fork()
            self.store.append(log.answer(held_by(), takes=token, fence=token + 1))
            assert self.store.fence(log.id) == token + 1
            self.refused(rival.answer(fence=token or None), StaleFenceError)
            self.refused(rival.fork().commit(fence=token or None), StaleFenceError)
            self.store.append(log.commit(fence=token + 1))
            assert self.owner(log) == "held"

    def test_it_lands_under_no_other_token_than_it_expects(self) -> None:
        """Not where nobody ever took one either, where an append with any token does."""
        for token, takes in ((0, 1), (1, 0), (1, 2), (2, 1)):
            log = self.parked()
            for _ in range(token):
                self.store.acquire_fence(log.id)
            error = self.refused(log.fork().answer(takes=takes, fence=takes + 1), StaleFenceError)
            assert (error.fence, error.current) == (takes, token)

    def test_where_another_was_first_it_takes_no_token(self) -> None:
        """Behind a note, and behind an answer that came without one."""
        log = self.parked()
        late = log.fork()
        self.store.append(log.commit(Kind.EXECUTION_DENIED))
        self.refused(late.answer(takes=0, fence=1), SequenceOccupied)
        late = log.fork()
        self.store.append(log.answer(held_by()))
        self.refused(late.answer(takes=0, fence=1), SequenceOccupied)

    def test_sent_again_it_has_taken_one_token(self) -> None:
        """As after an answer of the store's that was lost."""
        log = self.parked()
        commit = log.answer(takes=0, fence=1)
        for _ in range(2):
            self.store.append(commit)
        self.store.append(log.park(fence=1))
        self.store.append(commit)
        assert self.store.fence(log.id) == 1
        assert len(self.store.read(log.id)) == 4

    def test_it_makes_the_row_that_it_moves(self) -> None:
        """Of a park that has lost it, and of what never parked."""
        lost = self.parked()
        self.lose_fence(lost.id)
        self.store.append(lost.answer(takes=0, fence=1))
        never = self.running()
        self.store.append(never.commit(takes=0, fence=1))
        for log in (lost, never):
            assert self.store.fence(log.id) == 1

    def test_it_lands_with_all_that_a_commit_can_hold(self) -> None:
        """A park in the same commit, wakes of its own and of others, a child's start, timers."""
        soon = self.store.now() + timedelta(hours=1)
        log, other, child = self.parked(), self.parked(), self.log()
        kinds = (Kind.EXECUTION_RESUMED, Kind.EXECUTION_SUSPENDED)
        timers = (TimerRow(log.id, soon),)
        self.store.append(log.commit(*kinds, ownership=NOBODY, takes=0, fence=1, wakes=0, timers=timers))
        assert (self.store.fence(log.id), self.owner(log)) == (1, "parked")
        assert [row.wake_at for row in self.store.timers(log.id)] == [soon]
        both = (log.id, other.id)
        end = log.commit(
            Kind.EXECUTION_RESUMED, Kind.EXECUTION_COMPLETED,
            ownership=NOBODY, takes=1, fence=2, wake=both, timers_off=None, also=(child.start(),),
        )  # fmt: skip
        self.store.append(end)
        assert [self.store.fence(key) for key in (*both, child.id)] == [2, 0, 0]
        assert [self.store.wakes(key) for key in both] == [1, 1]
        assert (self.owner(log), self.owner(child)) == ("finished", "ready")

    def test_among_others_it_lands_or_is_refused_by_itself(self) -> None:
        """In any order of ids, beside starts, ends and answers without a token."""
        logs = [self.parked() for _ in range(5)]
        self.store.acquire_fence(logs[1].id)
        commits = [
            logs[4].answer(takes=0, fence=1), logs[1].answer(takes=0, fence=1), logs[0].answer(), self.log().start(),
            logs[2].end(takes=0, fence=1), self.running().end(wake=(logs[3].id,)),
        ]  # fmt: skip
        outcomes = self.store.append_many(commits)
        assert [type(outcome).__name__ for outcome in outcomes] == [
            "NoneType",
            "StaleFenceError",
            *["NoneType"] * 4,
        ]
        assert [self.store.fence(log.id) for log in logs] == [0, 1, 1, 0, 1]

    def test_takeovers_that_were_counted_stand(self) -> None:
        """A new token is no progress."""
        log = self.parked()
        assert self.store.count_recovery(log.id, sequence=2) == 1
        self.store.append(log.answer(takes=0, fence=1))
        assert self.store.count_recovery(log.id, sequence=2) == 2

    def test_of_eight_that_take_one_token_one_lands(self) -> None:
        """The others are told that they were late, by the token or by the sequence."""
        log = self.parked()
        for token in (0, 1):
            commits = [log.fork().answer(takes=token, fence=token + 1) for _ in range(8)]

            def land(number: int, commits: list[Commit] = commits) -> str:
                return _outcome(lambda: self.store.append(commits[number]))

            told = self.in_threads(8, land)
            assert sorted(set(told)) in (
                ["StaleFenceError", "landed"], ["SequenceOccupied", "StaleFenceError", "landed"],
                ["SequenceOccupied", "landed"],
            ), told  # fmt: skip
            assert told.count("landed") == 1
            assert self.store.fence(log.id) == token + 1
            log = Log(log.id, self.flow_id)
            for event in self.store.read(log.id):
                log.fold.apply(event)
            self.store.append(log.park(fence=token + 1))

    def test_with_a_transaction_that_is_undone_the_token_was_never_taken(self) -> None:
        """It goes with the events."""
        log = self.parked()
        with suppress(ZeroDivisionError), self.store.transaction():
            self.store.append(log.fork().answer(takes=0, fence=1))
            raise ZeroDivisionError
        assert self.store.fence(log.id) == 0
        with self.store.transaction():
            self.store.append(log.answer(takes=0, fence=1))
        assert self.store.fence(log.id) == 1

    def test_what_takes_a_token_is_an_owner_s_and_lands_under_the_next(self) -> None:
        """Anything else is the caller's mistake; nothing is written."""
        log = self.parked()
        for commit in (
            log.fork().answer(takes=0), log.fork().answer(takes=0, fence=2),
            log.fork().commit(Kind.EXECUTION_DENIED, takes=0, fence=1),
        ):  # fmt: skip
            assert "takes token 0" in str(self.refused(commit, ValueError))

    # Appends to what has not changed.

    def changed(self, commit: Commit, *, fence: int) -> None:
        """Append what must find a change, and assert that nothing of it landed."""
        before = self.snapshot(commit)
        assert _outcome(lambda: self.store.append_if_unchanged(commit, fence=fence)) == "Changed"
        assert self.snapshot(commit) == before

    def test_facts_without_a_token_land_on_what_was_seen(self) -> None:
        """Whatever the token is: it is compared, neither presented by the events nor moved."""
        for token in range(3):
            log = self.parked()
            for _ in range(token):
                self.store.acquire_fence(log.id)
            # No note that anybody may append: the guard would refuse an answer without the token.
            self.store.append_if_unchanged(log.answer(), fence=token)
            self.store.append_if_unchanged(log.commit(Kind.OUTCOME_RECORDED), fence=token)
            assert self.store.fence(log.id) == token
            assert [event.fence for event in self.store.read(log.id)[2:]] == [None, None]

    def test_facts_on_what_has_changed_do_not_land(self) -> None:
        """A token that moved, a log that goes on, one that ends before, a gap."""
        log = self.parked()
        note = log.fork().commit(Kind.OUTCOME_RECORDED)
        self.changed(note, fence=1)
        self.store.acquire_fence(log.id)
        self.changed(note, fence=0)
        gap = log.fork()
        gap.commit(Kind.OUTCOME_RECORDED)
        self.changed(gap.commit(Kind.OUTCOME_RECORDED), fence=1)
        self.store.append(log.commit(Kind.EXECUTION_DENIED))
        self.changed(note, fence=1)
        self.store.append_if_unchanged(log.commit(Kind.OUTCOME_RECORDED), fence=1)

    def test_facts_about_a_deleted_execution_do_not_land(self) -> None:
        """Neither on nothing, nor on another one that was started under its id."""
        for token in (0, 1):
            log = self.running()
            fence = self.store.acquire_fence(log.id) if token else None
            self.store.append(log.end(fence=fence))
            note = log.fork().commit(Kind.OUTCOME_RECORDED)
            assert self.store.delete_execution(log.id)
            self.changed(note, fence=token)
            again = self.log(name=log.id)
            self.store.append(again.start(held_by()))
            again.writer = 0
            self.store.append(again.end(fence=self.store.fence(log.id)))
            if token:
                self.changed(note, fence=token)

    def test_facts_that_had_landed_are_known(self) -> None:
        """Sent again, with the token moved and the log gone on: known by their writer, and not doubled."""
        log = self.parked()
        note = log.commit(Kind.OUTCOME_RECORDED)
        self.store.append_if_unchanged(note, fence=0)
        self.store.append_if_unchanged(note, fence=0)
        self.store.acquire_fence(log.id)
        self.store.append(log.commit(Kind.EXECUTION_DENIED))
        self.store.append_if_unchanged(note, fence=0)
        assert len(self.store.read(log.id)) == 4
        rival = replace(note, events=tuple(replace(event, writer=7) for event in note.events))
        self.changed(rival, fence=1)

    def test_of_eight_with_facts_one_lands(self) -> None:
        """All have seen the same log."""
        log = self.parked()
        rivals = [log.fork() for _ in range(8)]

        def act(number: int) -> str:
            note = rivals[number].commit(Kind.OUTCOME_RECORDED)
            return _outcome(lambda: self.store.append_if_unchanged(note, fence=0))

        assert sorted(self.in_threads(8, act)) == [*["Changed"] * 7, "landed"]
        assert len(self.store.read(log.id)) == 3

    def test_facts_and_a_conditional_acquire_exclude_each_other(self) -> None:
        """An answer without a token lands, or the acquire does; a note lets the acquire in behind it."""
        for kind in (Kind.EXECUTION_RESUMED, Kind.OUTCOME_RECORDED):
            for _ in range(10):
                self._race_unchanged(self.parked(), kind)

    def _race_unchanged(self, log: Log, kind: Kind) -> None:
        answers, park = kind == Kind.EXECUTION_RESUMED, log.fold.park_sequence
        told: list[Any] = [None, None]

        def act(number: int) -> None:
            rival = log.fork()
            commit = rival.answer() if answers else rival.commit(kind)
            if number:
                told[0] = _outcome(lambda: self.store.append_if_unchanged(commit, fence=0))
            else:
                told[1] = self.acquire_if(log, park_seq=park)

        self.in_threads(2, act)
        if told[0] == "landed":
            assert told[1] == (Stale(0) if answers else Acquired(1, 3)), told
        else:
            assert told == ["Changed", Acquired(1, 2)]

    def test_a_deletion_is_ordered_with_conditional_acts(self) -> None:
        """What has ended takes a note or is deleted; an acquire never brings anything back."""
        for _ in range(10):
            log = self.parked()
            park = log.fold.park_sequence
            self.store.append(log.end())
            told: list[Any] = [None] * 3

            def act(number: int, log: Log = log, park: int | None = park, told: list[Any] = told) -> None:
                if number == 0:
                    told[0] = self.store.delete_execution(log.id)
                elif number == 1:
                    note = log.fork().commit(Kind.OUTCOME_RECORDED)
                    told[1] = _outcome(lambda: self.store.append_if_unchanged(note, fence=0))
                else:
                    told[2] = self.acquire_if(log, park_seq=park)

            self.in_threads(3, act)
            assert told[0] is True
            assert told[1] in ("landed", "Changed")
            assert told[2] == Stale(0)
            assert self.store.read(log.id) == []
            assert self.store.status(log.id) is None

    # Wakes.

    def _wake(self, log: Log) -> None:
        self.store.send(log.id, name="n", message_id=uuid.uuid4().hex, body="1")

    def test_a_wake_between_look_and_park_refuses_the_park(self) -> None:
        """A moved count is WakesMoved; with a fresh count the park lands."""
        log = self.running()
        seen = self.store.wakes(log.id)
        self._wake(log)
        error = self.refused(log.fork().park(wakes=seen), WakesMoved)
        assert error.execution_id == log.id
        self.store.append(log.park(wakes=self.store.wakes(log.id)))
        assert self.owner(log) == "parked"

    def test_a_park_that_looked_at_nothing_needs_no_count(self) -> None:
        """Without wakes, a park lands however many came."""
        log = self.running()
        self._wake(log)
        self.store.append(log.park())

    def test_a_member_of_a_chain_looks_at_the_chain_s_wakes(self) -> None:
        """wakes_of names the row that counts."""
        first, log = self.log(), self.running()
        self._wake(first)
        self.refused(log.fork().park(wakes=0, wakes_of=first.id), WakesMoved)
        self.store.append(log.park(wakes=1, wakes_of=first.id))

    def test_every_wake_counts_against_every_park(self) -> None:
        """Of a park and a wake that race, either the park is refused or the wake finds it parked."""
        for _ in range(10):
            log = self.running()
            seen: dict[int, str] = {}
            park = log.park(wakes=0)

            def race(number: int, log: Log = log, park: Commit = park, seen: dict[int, str] = seen) -> None:
                if number:
                    self._wake(log)
                    seen[1] = str(self.store.status(log.id))
                else:
                    seen[0] = _outcome(lambda: self.store.append(park))

            self.in_threads(2, race)
            assert seen[0] == "WakesMoved" or seen[1] == Status.SUSPENDED

    def test_a_commit_can_wake_others(self) -> None:
        """Each gets one more wake and a due re-drive row, with the commit or not at all."""
        log, parent = self.running(), self.parked()
        refused = replace(log.fork().end(wake=(parent.id,)), fence=None)
        self.store.acquire_fence(log.id)
        self.refused(refused, StaleFenceError)
        self.store.append(log.end(fence=1, wake=(parent.id,)))
        assert self.store.wakes(parent.id) == 1
        (row,) = self.store.timers(parent.id)
        assert row.redrive == 0
        assert row.wake_at <= self.store.now()

    # All or nothing.

    def _rich(self, log: Log, **options: Any) -> Commit:
        """A park that changes everything that a commit can change."""
        self.store.send(log.id, name="m", message_id="1", body="1")
        (message,) = self.store.inbox(log.id, "m")
        return log.commit(
            Kind.STEP_STARTED,
            Kind.EXECUTION_SUSPENDED,
            ownership=NOBODY,
            timers=(TimerRow(log.id, self.store.now()),),
            messages=(message.number,),
            **options,
        )

    def test_a_commit_lands_whole(self) -> None:
        """Events, projection, timers, messages and ownership are all there."""
        log = self.running()
        self.store.append(self._rich(log))
        assert [event.sequence for event in self.store.read(log.id)] == [1, 2, 3]
        assert self.owner(log) == "parked"
        assert len([row for row in self.store.timers(log.id) if row.redrive is None]) == 1
        assert self.store.message_names(log.id) == set()

    def test_a_refused_commit_leaves_nothing(self) -> None:
        """Refused by the fence, by the wakes or by the sequence: none of its parts is there."""
        log = self.running()
        commit = self._rich(log, wakes=0)
        self.refused(commit, WakesMoved)
        self.refused(replace(commit, wakes=None, events=commit.events[1:]), SequenceOccupied)
        self.store.acquire_fence(log.id)
        self.refused(replace(commit, wakes=None), StaleFenceError)

    def test_commits_that_go_together_land_together(self) -> None:
        """A child's start lands with its parent's event, and neither lands if one is refused."""
        parent, child, taken = self.running(), self.log(), self.started()
        both = replace(parent.fork().commit(Kind.CHILD_STARTED), also=(self.log(name=taken.id).start(),))
        error = self.refused(both, SequenceOccupied)
        assert error.execution_id == taken.id
        self.store.append(parent.commit(Kind.CHILD_STARTED, also=(child.start(parent_id=parent.id),)))
        assert self.owner(child) == "ready"
        ahead = parent.fork()
        ahead.commit()
        self.refused(ahead.commit(also=(self.log().start(),)), SequenceOccupied)

    def test_together_and_landed_before(self) -> None:
        """Sent again, commits that go together are known for their own."""
        parent, child = self.running(), self.log()
        commit = parent.commit(Kind.CHILD_STARTED, also=(child.start(),))
        self.store.append(commit)
        before = self.snapshot(commit)
        self.store.append(commit)
        assert self.snapshot(commit) == before

    def test_a_successor_starts_with_the_end_of_its_predecessor(self) -> None:
        """EXECUTION_CONTINUED and the next start are one commit; messages of the chain stay."""
        first = self.running()
        self._wake(first)
        successor = self.log(name=f"{first.id}~2")
        also = (successor.start(chain=first.id),)
        end = first.commit(Kind.EXECUTION_CONTINUED, ownership=NOBODY, timers_off=None, also=also)
        self.store.append(end)
        assert self.owner(first) == "finished"
        assert self.owner(successor) == "ready"

    # Ownership: exactly one of four.

    def test_exactly_one_of_four_at_every_commit(self) -> None:
        """From start to end each commit leaves the execution finished, parked, ready or held."""
        log = self.log()
        seen = []
        for commit in (
            log.start(READY),
            log.commit(Kind.EXECUTION_DENIED),
            log.park(),
            log.commit(Kind.EXECUTION_DENIED),
            log.answer(held_by()),
            log.commit(),
            log.commit(ownership=READY),
            log.commit(ownership=held_by()),
            log.park(),
            log.answer(),
            log.end(),
            log.commit(Kind.OUTCOME_RECORDED),
        ):
            self.store.append(commit)
            seen.append(self.owner(log))
        assert seen == [
            "ready", "ready", "parked", "parked", "held", "held", "ready", "held", "parked", "ready",
            "finished", "finished",
        ]  # fmt: skip

    def test_ownership_that_belies_the_status_is_a_mistake(self) -> None:
        """A start that says nothing, a park that is ready, an end that is held, a run that is nobody's."""
        log = self.running()
        fresh = self.log()
        for wrong in (
            fresh.start(KEEP),
            log.fork().commit(Kind.EXECUTION_SUSPENDED, ownership=READY),
            log.fork().commit(Kind.EXECUTION_SUSPENDED),
            log.fork().commit(Kind.EXECUTION_COMPLETED, ownership=held_by()),
            log.fork().commit(ownership=NOBODY),
        ):
            self.refused(wrong, ValueError)

    def test_what_would_be_nobody_s_to_run_does_not_land(self) -> None:
        """An answer that leaves the owner of a parked execution as it is: there is none."""
        self.refused(self.parked().commit(Kind.EXECUTION_RESUMED), Exception)

    def test_a_commit_can_hand_over_a_lease(self) -> None:
        """held gives the execution to an owner until ttl from now by the store's clock."""
        before = self.store.now()
        log = self.started(held_by("me", 7, 90))
        lease = self.store.held(log.id)
        assert lease is not None
        assert (lease.owner, lease.token, lease.flow_id, lease.version) == ("me", 7, self.flow_id, 1)
        assert before + timedelta(seconds=90) <= lease.until <= self.store.now() + timedelta(seconds=90)

    def test_keep_leaves_the_owner(self) -> None:
        """A step's facts change neither the lease nor its end."""
        log = self.running()
        before = self.store.held(log.id)
        self.store.append(log.commit())
        assert self.store.held(log.id) == before

    # Many at once.

    def test_many_land_each_by_itself(self) -> None:
        """One refused commit never fails its neighbours."""
        logs = [self.running() for _ in range(4)]
        commits = [log.commit() for log in logs]
        rival = Log(logs[1].id, self.flow_id)
        rival.start()
        self.store.append(rival.commit(Kind.STEP_STARTED))
        self.store.acquire_fence(logs[2].id)
        outcomes = self.store.append_many(commits)
        assert [type(outcome) for outcome in outcomes] == [
            type(None), SequenceOccupied, StaleFenceError, type(None),
        ]  # fmt: skip
        assert [len(self.store.read(log.id)) for log in logs] == [2, 2, 1, 2]

    def test_many_of_one_execution_land_in_order(self) -> None:
        """Several commits of one execution in one call land one behind the other."""
        logs = [self.running() for _ in range(3)]
        commits = [log.commit() for _ in range(3) for log in logs] + [log.park(wakes=0) for log in logs]
        assert self.store.append_many(commits) == [None] * 12
        for log in logs:
            assert [event.sequence for event in self.store.read(log.id)] == [1, 2, 3, 4, 5]
            assert self.owner(log) == "parked"

    def test_many_with_owners_of_their_own(self) -> None:
        """In one call some keep their owner, others begin, park, go on and end: each is owned as it says."""
        kept, parks, goes_on, ends, begins = (
            self.started(held_by("me", 7)),
            self.running(),
            self.parked(),
            self.running(),
            self.log(),
        )
        lease = self.store.held(kept.id)
        commits = [
            kept.commit(),
            parks.park(wakes=0),
            goes_on.answer(held_by("next", 9)),
            ends.end(),
            begins.start(),
        ]
        assert self.store.append_many(commits) == [None] * 5
        assert self.store.held(kept.id) == lease
        assert [self.owner(log) for log in (kept, parks, goes_on, ends, begins)] == [
            "held", "parked", "held", "finished", "ready",
        ]  # fmt: skip

    def test_behind_a_refused_one_all_are_refused(self) -> None:
        """What follows a refused commit of its execution is refused too, and leaves no gap."""
        log, other = self.running(), self.running()
        self.store.append(log.fork().commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED))
        outcomes = self.store.append_many([log.commit(), other.commit(), log.commit(), log.park(wakes=0)])
        assert [outcome is None for outcome in outcomes] == [False, True, False, False]
        assert len(self.store.read(log.id)) == 3

    def test_behind_a_refused_one_of_somebody_else_the_owner_goes_on(self) -> None:
        """Another writer's refusal is not the owner's."""
        log = self.running()
        late = log.fork()
        self.store.append(log.commit())
        outcomes = self.store.append_many([late.commit(), log.commit()])
        assert [outcome is None for outcome in outcomes] == [False, True]

    def test_many_may_wake_one(self) -> None:
        """Children that end together each count at their parent."""
        parent = self.parked()
        children = [self.running() for _ in range(5)]
        assert self.store.append_many([child.end(wake=(parent.id,)) for child in children]) == [None] * 5
        assert self.store.wakes(parent.id) == 5
        assert {row.redrive for row in self.store.timers(parent.id)} == {0}

    def test_a_wake_and_a_park_of_one_execution_in_one_call(self) -> None:
        """The child's end comes first, so the parent's park has to look again."""
        parent, child = self.running(), self.running()
        outcomes = self.store.append_many([child.end(wake=(parent.id,)), parent.park(wakes=0)])
        assert outcomes[0] is None
        assert isinstance(outcomes[1], WakesMoved)

    def test_a_mistake_among_many_is_its_own(self) -> None:
        """A commit that no caller may send is reported in its place; the others land."""
        good, bad = self.running(), self.running()
        outcomes = self.store.append_many([bad.commit(ownership=NOBODY), good.commit()])
        assert isinstance(outcomes[0], ValueError)
        assert outcomes[1] is None

    def test_appends_of_a_group_land_each_by_itself(self) -> None:
        """What threads append at the same time lands, but for what is refused, which fails nobody else."""
        logs = [self.running() for _ in range(16)]
        occupied, stale = logs[3], logs[8]
        self.store.append(occupied.fork().commit())
        self.store.acquire_fence(stale.id)

        def append(place: int) -> str:
            return _outcome(lambda: self.store.append(logs[place].commit()))

        with self.store.grouping():
            outcomes = self.in_threads(16, append)
        told = {id(occupied): "SequenceOccupied", id(stale): "StaleFenceError"}
        assert outcomes == [told.get(id(log), "landed") for log in logs]
        assert [len(self.store.read(log.id)) for log in logs] == [1 if log is stale else 2 for log in logs]

    def test_many_of_one_caller_go_with_a_group(self) -> None:
        """What callers with several executions each append at the same time: each lands or is refused by itself."""
        logs = [[self.running() for _ in range(4)] for _ in range(8)]
        refused = logs[2][1], logs[5][3]
        self.store.append(refused[0].fork().commit())
        self.store.acquire_fence(refused[1].id)

        def append(place: int) -> str:
            commits = [log.commit() for log in logs[place]] + [log.commit() for log in logs[place]]
            return " ".join(type(outcome).__name__ for outcome in self.store.append_shared(commits))

        with self.store.grouping():
            outcomes = self.in_threads(8, append)
        assert self.store.append_shared([]) == []
        told = ["NoneType"] * 8
        told_of = {2: [*told], 5: [*told]}
        told_of[2][1] = told_of[2][5] = "SequenceOccupied"
        told_of[5][3] = told_of[5][7] = "StaleFenceError"
        assert outcomes == [" ".join(told_of.get(place, told)) for place in range(8)]
        assert {len(self.store.read(log.id)) for mine in logs for log in mine if log not in refused} == {3}
        assert [len(self.store.read(log.id)) for log in refused] == [2, 1]

    def test_short_logs_are_read_together(self) -> None:
        """Whole logs of at most so many events; a longer one and one that is not there are left out."""
        short, exact, long = self.running(), self.running(), self.running()
        self.store.append(exact.commit())
        self.store.append(long.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED))
        logs = self.store.read_short([long.id, exact.id, short.id, self.log().id], most=2)
        assert logs == {log.id: self.store.read(log.id) for log in (short, exact)}
        assert self.store.read_short([], most=2) == {}

    def test_none_is_nothing(self) -> None:
        """No commits, no outcomes."""
        assert self.store.append_many([]) == []

    # Deletion.

    def test_only_what_has_ended_can_be_deleted(self) -> None:
        """What runs, waits, or is not there stays as it is."""
        running, parked = self.running(), self.parked()
        for log in (running, parked, self.log()):
            assert self.store.delete_execution(log.id) is False
        assert self.owner(running) == "held"
        assert self.owner(parked) == "parked"

    def test_deletion_takes_all_rows(self) -> None:
        """Log, row, timers and messages go, and the id is free again."""
        log = self.parked()
        self._wake(log)
        self.store.append(log.end(timers_off=()))
        assert self.store.delete_execution(log.id) is True
        assert self.store.read(log.id) == []
        assert self.store.status(log.id) is None
        assert self.store.timers(log.id) == []
        assert self.store.message_names(log.id) == set()
        assert (self.store.fence(log.id), self.store.wakes(log.id)) == (0, 0)
        self.store.append(self.log(name=log.id).start())

    def test_deletion_keeps_a_real_token(self) -> None:
        """A zombie of the deleted execution cannot write into one that is started under its id."""
        log = self.running()
        token = self.store.acquire_fence(log.id)
        zombie = log.fork()
        self.store.append(log.end(fence=token))
        assert self.store.delete_execution(log.id) is True
        assert self.store.fence(log.id) == token
        again = self.log(name=log.id)
        self.store.append(again.start(held_by()))
        assert self.store.fence(log.id) == token + 1
        self.refused(zombie.commit(fence=token), StaleFenceError)

    def test_a_chain_keeps_its_messages_until_its_last_member_goes(self) -> None:
        """Deleting an earlier member takes neither what the newest has to read nor the count it looks at."""
        first = self.running()
        self._wake(first)
        second = self.log(name=f"{first.id}~2")
        self.store.append(
            first.commit(
                Kind.EXECUTION_CONTINUED,
                ownership=NOBODY,
                timers_off=None,
                also=(second.start(held_by(), chain=first.id),),
            )
        )
        assert self.store.delete_execution(first.id) is True
        assert self.store.message_names(first.id) == {"n"}
        assert self.store.wakes(first.id) == 1
        self.store.append(second.end())
        assert self.store.delete_execution(second.id) is True
        assert self.store.message_names(first.id) == set()
        assert self.store.wakes(first.id) == 0

    def test_deletion_of_the_log_that_was_looked_at(self) -> None:
        """A note that was added since, or another execution under the id, and nothing goes."""
        log = self.running()
        self.store.append(log.end())
        seen = self.store.read(log.id)[-1]
        self.store.append(log.commit(Kind.OUTCOME_RECORDED))
        assert self.store.delete_execution(log.id, last=seen) is False
        newest = self.store.read(log.id)[-1]
        assert self.store.delete_execution(log.id, last=replace(newest, writer=1)) is False
        assert self.store.delete_execution(log.id, last=newest) is True

    # Clock and transaction.

    def test_the_clock_can_be_moved_for_tests(self) -> None:
        """shift_clock moves now, the stamps and the offset alike."""
        offset = self.store.clock_offset()
        before = self.store.now()
        self.store.shift_clock(timedelta(days=3))
        assert timedelta(days=3) <= self.store.now() - before < timedelta(days=3, minutes=5)
        assert abs(self.store.clock_offset() - offset - 3 * 86_400) < 60
        log = self.started()
        (event,) = self.store.read(log.id)
        assert event.recorded_at is not None
        assert event.recorded_at >= before + timedelta(days=3)

    def test_the_offset_leads_to_the_store_s_clock(self) -> None:
        """This process's clock plus the offset is the store's now."""
        self.store.measure()
        seen = datetime.now(UTC) + timedelta(seconds=self.store.clock_offset())
        assert abs((self.store.now() - seen).total_seconds()) < 60

    def test_a_transaction_lands_whole_or_not(self) -> None:
        """Appends of a block that raises are undone; callbacks wait for the commit."""
        log = self.running()
        called: list[str] = []
        lost = log.fork()
        check = self.store.transaction_check()
        with suppress(_Stop), self.store.transaction():
            assert self.store.in_transaction()
            assert check()
            self.store.append(lost.commit())
            self.store.on_commit(lambda: called.append("lost"))
            raise _Stop
        assert len(self.store.read(log.id)) == 1
        with self.store.transaction():
            self.store.append(log.commit())
            self.store.on_commit(lambda: called.append("kept"))
            assert not self.store.marked_for_rollback()
            assert called == []
        assert not self.store.in_transaction()
        assert not check()
        assert called == ["kept"]
        assert len(self.store.read(log.id)) == 2

    def test_a_refusal_leaves_the_transaction_usable(self) -> None:
        """What was done before and what is done after a refused append lands with the block."""
        log, other = self.running(), self.running()
        rival = log.fork()
        self.store.append(log.commit())
        with self.store.transaction():
            self.store.append(other.commit())
            self.refused(rival.commit(), SequenceOccupied)
            self.store.append(other.commit())
        assert len(self.store.read(other.id)) == 3

    def test_an_error_leaves_nothing_of_its_commit_in_the_transaction(self) -> None:
        """What the store itself refuses in the middle of a commit is undone, the rest of the block is not."""
        log, parked = self.running(), self.parked()
        with self.store.transaction():
            self.refused(parked.commit(Kind.EXECUTION_RESUMED), Exception)
            self.store.append(log.commit())
        assert len(self.store.read(parked.id)) == 2
        assert len(self.store.read(log.id)) == 2

    def test_a_callback_runs_at_once_outside_and_breaks_nobody(self) -> None:
        """Without a transaction there is nothing to wait for, and a failing callback is only reported."""
        called: list[int] = []
        self.store.on_commit(lambda: called.append(1))
        self.store.on_commit(lambda: called.append(1 // 0))
        assert called == [1]


class _Stop(Exception):
    pass


class TimerStoreConformance(StoreConformance):
    """The wakes that are owed."""

    def at(self, seconds: float) -> datetime:
        """That many seconds from a moment that is the same all through a test."""
        self._zero: datetime = getattr(self, "_zero", None) or self.store.now()
        return self._zero + timedelta(seconds=seconds)

    def due(
        self,
        *,
        limit: int = 100,
        hold: float = 60,
        redrive: bool = True,
        known: Known | None = None,
        since: datetime | None = None,
    ) -> list[str]:
        claimed = self.store.claim_due(
            limit=limit, hold=hold, known=known or self.known, redrive=redrive, since=since
        )
        return [due.row.execution_id for due in claimed if due.flow_id in ("", self.flow_id)]

    def test_rows_come_back_as_they_were_owed(self) -> None:
        """Soonest first, to the microsecond, with all their marks."""
        log = self.parked()
        rows = [
            TimerRow(log.id, self.at(5).replace(microsecond=123_456)),
            TimerRow(log.id, self.at(10).replace(microsecond=0), redrive=2),
            TimerRow(log.id, self.at(15), deadline=True),
            TimerRow(log.id, self.at(20), not_before=self.at(30), tries=4),
        ]
        for row in reversed(rows):
            self.store.schedule(row)
        assert self.store.timers(log.id) == rows

    def test_a_row_is_one_per_execution_and_instant(self) -> None:
        """Owing it twice is owing it once; another instant or execution is another row."""
        log, other = self.parked(), self.parked()
        for row in (
            TimerRow(log.id, self.at(1)),
            TimerRow(log.id, self.at(1)),
            TimerRow(other.id, self.at(1)),
        ):
            self.store.schedule(row)
        self.store.schedule(TimerRow(log.id, self.at(2)))
        assert [row.wake_at for row in self.store.timers(log.id)] == [self.at(1), self.at(2)]

    def test_an_upsert_drops_no_mark(self) -> None:
        """A plain wake on the row of a re-drive or a deadline leaves it one; a plain row takes a mark."""
        log = self.parked()
        for first, second in ((None, 3), (3, None), (1, 3)):
            self.store.schedule(TimerRow(log.id, self.at(1), redrive=first))
            self.store.schedule(TimerRow(log.id, self.at(1), redrive=second))
            (row,) = self.store.timers(log.id)
            assert row.redrive == 3
            self.store.retire(log.id, self.at(1))
        for options in ((False, True), (True, False)):
            for deadline in options:
                self.store.schedule(TimerRow(log.id, self.at(2), deadline=deadline))
            assert [row.deadline for row in self.store.timers(log.id)] == [True]
            self.store.retire(log.id, self.at(2))

    def test_a_commit_s_row_keeps_the_marks_too(self) -> None:
        """A park on the instant of a re-drive leaves its mark."""
        log = self.running()
        self.store.schedule(TimerRow(log.id, self.at(1), redrive=0))
        self.store.append(log.park(timers=(TimerRow(log.id, self.at(1)),)))
        assert [row.redrive for row in self.store.timers(log.id)] == [0]

    def test_a_wake_written_anew_is_due_at_its_own_time(self) -> None:
        """The put-off of an older wake of the same instant does not hold for it."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.put_off(due.row, delay=600, tries=5)
        assert self.due() == []
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        assert self.due() == [log.id]
        assert self.store.timers(log.id)[0].tries == 0

    def test_an_answer_takes_its_own_wakes(self) -> None:
        """timers_off drops plain rows of those instants and no others."""
        log = self.running()
        rows = (
            TimerRow(log.id, self.at(1)),
            TimerRow(log.id, self.at(2)),
            TimerRow(log.id, self.at(3), redrive=0),
            TimerRow(log.id, self.at(4), deadline=True),
        )
        self.store.append(log.park(timers=rows))
        off = (self.at(1), self.at(3), self.at(4), self.at(9))
        self.store.append(log.answer(timers_off=off))
        assert self.store.timers(log.id) == list(rows[1:])

    def test_a_wake_that_is_taken_and_owed_again_stays(self) -> None:
        """One commit that answers and parks on the same instant leaves the row."""
        log = self.running()
        row = TimerRow(log.id, self.at(1))
        self.store.append(log.park(timers=(row,)))
        self.store.append(log.park(timers=(row,), timers_off=(self.at(1),)))
        assert self.store.timers(log.id) == [row]

    def test_an_end_takes_all_rows(self) -> None:
        """Deadlines and re-drives go with the rest, another execution's stay."""
        log, other = self.running(), self.parked()
        for row in (TimerRow(log.id, self.at(1)), TimerRow(log.id, self.at(2), redrive=1, deadline=True)):
            self.store.schedule(row)
        self.store.schedule(TimerRow(other.id, self.at(1)))
        self.store.append(log.end())
        assert self.store.timers(log.id) == []
        assert len(self.store.timers(other.id)) == 1

    def test_a_commit_may_owe_another_execution_a_wake(self) -> None:
        """A row of the parent lands with the child's commit."""
        log, parent = self.running(), self.parked()
        self.store.append(log.commit(timers=(TimerRow(parent.id, self.at(1), redrive=0),)))
        assert self.store.timers(log.id) == []
        assert len(self.store.timers(parent.id)) == 1

    def test_due_rows_come_longest_due_first(self) -> None:
        """Only what is due, by wake_at or by not_before, within the limit."""
        logs = [self.parked() for _ in range(5)]
        for log, row in zip(
            logs,
            (
                TimerRow(logs[0].id, self.at(-10)),
                TimerRow(logs[1].id, self.at(-30)),
                TimerRow(logs[2].id, self.at(60)),
                TimerRow(logs[3].id, self.at(-40), not_before=self.at(-20)),
                TimerRow(logs[4].id, self.at(-40), not_before=self.at(60)),
            ),
            strict=True,
        ):
            assert log.id == row.execution_id
            self.store.schedule(row)
        assert self.due(limit=2) == [logs[1].id, logs[3].id]
        assert self.due() == [logs[0].id]
        assert self.due() == []

    def test_a_claim_may_begin_behind_an_earlier_one(self) -> None:
        """With ``since`` what became due before is left out, before the limit; what became due then is not."""
        logs = [self.parked() for _ in range(4)]
        put_off = TimerRow(logs[3].id, self.at(-99), not_before=self.at(-15))
        rows = [TimerRow(log.id, self.at(-40 + 10 * number)) for number, log in enumerate(logs[:3])]
        for row in (*rows, put_off):
            self.store.schedule(row)
        assert self.due(limit=1, since=self.at(-30)) == [logs[1].id]
        assert self.due(since=self.at(-30)) == [logs[2].id, logs[3].id]
        assert self.due(since=self.at(-30)) == []
        assert self.due() == [logs[0].id]

    def test_a_due_row_tells_what_is_needed_to_judge_it(self) -> None:
        """The row, the store's clock, flow and version."""
        log = self.parked()
        row = TimerRow(log.id, self.at(-1), redrive=2, deadline=True, tries=3)
        self.store.schedule(row)
        before = self.store.now()
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        assert replace(due.row, not_before=None) == row
        assert (due.flow_id, due.version) == (self.flow_id, 1)
        assert before <= due.now <= self.store.now()
        assert due.at == row.wake_at
        assert due.row == self.store.timers(log.id)[0]

    def test_a_claimed_row_is_nobody_else_s_while_it_is_held(self) -> None:
        """After the hold it is due again, for a claimer who died."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        assert self.due(hold=60) == [log.id]
        assert self.due() == []
        self.store.shift_clock(timedelta(seconds=61))
        assert self.due() == [log.id]

    def test_a_row_that_is_given_back_stands_where_it_stood(self) -> None:
        """A claimer who died costs it no place: by its own time, or by the one until which it was put off."""
        logs = [self.parked() for _ in range(3)]
        rows = [
            TimerRow(logs[0].id, self.at(-30)),
            TimerRow(logs[1].id, self.at(-40), not_before=self.at(-20)),
            TimerRow(logs[2].id, self.at(-10)),
        ]
        for row in rows:
            self.store.schedule(row)
        assert self.due(limit=2) == [logs[0].id, logs[1].id]
        self.store.shift_clock(timedelta(seconds=61))
        assert self.due(limit=1, since=self.at(-25)) == [logs[1].id]
        claimed = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        assert [(due.row.execution_id, due.at) for due in claimed] == [
            (logs[0].id, self.at(-30)),
            (logs[2].id, self.at(-10)),
        ]

    def test_a_row_that_was_given_back_is_put_off_and_retired_as_any_other(self) -> None:
        """By its second claim, and no more by its first."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        (first,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.shift_clock(timedelta(seconds=61))
        (second,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.put_off(first.row, delay=0, tries=9)
        self.store.retire(log.id, self.at(-1), claimed=first.row)
        assert self.store.timers(log.id) == [second.row]
        self.store.put_off(second.row, delay=0, tries=1)
        (third,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        assert third.row.tries == 1
        assert third.at > second.now
        self.store.retire(log.id, self.at(-1), claimed=third.row)
        assert self.store.timers(log.id) == []

    def test_eight_claimers_share_the_due_rows(self) -> None:
        """Each row goes to exactly one of them."""
        logs = [self.parked() for _ in range(40)]
        for log in logs:
            self.store.schedule(TimerRow(log.id, self.at(-1)))

        def claim(_: int) -> list[str]:
            mine: list[str] = []
            while claimed := self.due(limit=3):
                mine += claimed
            return mine

        shares = self.in_threads(8, claim)
        # One that finds all due rows locked by others ends early; what is left over is for the next claim.
        taken = [execution_id for share in shares for execution_id in share] + self.due()
        assert sorted(taken) == sorted(log.id for log in logs)

    def test_redrives_are_left_out_before_the_limit(self) -> None:
        """Rows that a node without a re-driver cannot judge do not starve plain ones behind them."""
        logs = [self.parked() for _ in range(4)]
        for number, log in enumerate(logs):
            self.store.schedule(TimerRow(log.id, self.at(-10 + number), redrive=0 if number < 3 else None))
        assert self.due(limit=1, redrive=False) == [logs[3].id]
        assert self.due(limit=9, redrive=False) == []
        assert self.due(limit=9) == [log.id for log in logs[:3]]

    def test_unknown_flows_are_left_out_before_the_limit(self) -> None:
        """So are versions above the highest that the node has; lower ones are known."""
        ours = [self.parked() for _ in range(2)]
        for number, log in enumerate(ours):
            self.store.schedule(TimerRow(log.id, self.at(-10 + number)))
        assert self.due(known=Known({})) == []
        assert self.due(known=Known({"another": 9})) == []
        assert self.due(known=Known({self.flow_id: 0})) == []
        assert self.due(limit=1, known=Known({"another": 1, self.flow_id: 3})) == [ours[0].id]
        stranger = self.log(flow_id=f"{self.flow_id}-strange")
        self.store.append(stranger.start(held_by()))
        self.store.append(stranger.park(timers=(TimerRow(stranger.id, self.at(-99)),)))
        assert self.due(limit=1) == [ours[1].id]

    def test_a_row_without_its_execution_goes_to_anybody(self) -> None:
        """Nobody knows its flow, and somebody has to retire it."""
        lost = self.log()
        self.store.schedule(TimerRow(lost.id, self.at(-1)))
        claimed = self.store.claim_due(limit=100, hold=60, known=Known({}), redrive=True)
        (due,) = (due for due in claimed if due.row.execution_id == lost.id)
        assert (due.flow_id, due.version) == ("", 0)

    def test_a_row_can_be_put_off(self) -> None:
        """It is due again after the delay, and remembers its tries."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.put_off(due.row, delay=600, tries=3)
        self.store.shift_clock(timedelta(seconds=599))
        assert self.due() == []
        self.store.shift_clock(timedelta(seconds=2))
        assert self.due() == [log.id]
        assert self.store.timers(log.id)[0].tries == 3

    def test_a_row_written_anew_is_not_put_off(self) -> None:
        """Whoever claimed the older wake has no say over the new one."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        self.store.put_off(due.row, delay=600, tries=3)
        assert self.due() == [log.id]

    def test_a_row_written_anew_is_not_retired_by_the_older_claim(self) -> None:
        """A body that parks again on the same instant keeps its wake."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        self.store.retire(log.id, due.row.wake_at, claimed=due.row)
        assert len(self.store.timers(log.id)) == 1
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        self.store.retire(log.id, due.row.wake_at, claimed=due.row)
        assert self.store.timers(log.id) == []

    def test_a_retired_row_is_gone(self) -> None:
        """That one only; retiring what is not there is nothing."""
        log = self.parked()
        for seconds in (1, 2):
            self.store.schedule(TimerRow(log.id, self.at(seconds)))
        self.store.retire(log.id, self.at(1))
        self.store.retire(log.id, self.at(9))
        assert [row.wake_at for row in self.store.timers(log.id)] == [self.at(2)]

    def test_redrives_of_one_claim_are_retired_together(self) -> None:
        """But for what was written anew since, what another claim took, other rows and those of others."""
        log, other = self.parked(), self.parked()
        for seconds in (-9, -8, -7, 600):
            self.store.schedule(TimerRow(log.id, self.at(seconds), redrive=0))
        self.store.schedule(TimerRow(log.id, self.at(-6)))
        self.store.schedule(TimerRow(log.id, self.at(-5), redrive=0, deadline=True))
        self.store.schedule(TimerRow(other.id, self.at(-4), redrive=0))
        claimed = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        assert len(claimed) == 6
        self.store.schedule(TimerRow(log.id, self.at(-8), redrive=0))
        self.store.schedule(TimerRow(log.id, self.at(-3), redrive=0))
        (late,) = self.store.claim_due(limit=1, hold=60, known=self.known, redrive=True)
        assert late.row.wake_at == self.at(-8)
        self.store.retire_redrives(log.id, claimed=claimed[0].row)
        left = [-8, -6, -5, -3, 600]
        assert [row.wake_at for row in self.store.timers(log.id)] == [self.at(seconds) for seconds in left]
        assert len(self.store.timers(other.id)) == 1
        self.store.retire_redrives(log.id, claimed=late.row)
        assert [row.wake_at for row in self.store.timers(log.id)] == [
            self.at(seconds) for seconds in left[1:]
        ]

    def test_the_next_due_is_known(self) -> None:
        """The soonest by wake_at or by not_before."""
        log = self.parked()
        early = self.at(-1_000_000)
        self.store.schedule(TimerRow(log.id, early))
        assert self.store.next_due() == early
        self.store.schedule(
            TimerRow(log.id, early - timedelta(days=9), not_before=early + timedelta(seconds=1))
        )
        assert self.store.next_due() == early
        self.store.retire(log.id, early)
        assert self.store.next_due() == early + timedelta(seconds=1)
        self.store.retire(log.id, early - timedelta(days=9))
        following = self.store.next_due()
        assert following is None or following > early

    def test_what_is_held_is_next_due_when_it_is_given_back(self) -> None:
        """Whoever sleeps until then finds what a dead claimer has left; and before that what is free."""
        log = self.parked()
        self.store.schedule(TimerRow(log.id, self.at(-1)))
        self.store.schedule(TimerRow(log.id, self.at(300)))
        (due,) = self.store.claim_due(limit=9, hold=60, known=self.known, redrive=True)
        assert self.store.next_due() == self.store.upcoming().timer == due.row.not_before
        self.store.schedule(TimerRow(log.id, self.at(30)))
        assert self.store.next_due() == self.store.upcoming().timer == self.at(30)
        self.store.shift_clock(timedelta(seconds=61))
        due_now = self.store.next_due()
        assert due_now is not None
        assert due_now <= self.store.now()
        assert self.store.upcoming().timer == self.at(300)


class LeaseStoreConformance(StoreConformance):
    """Who is alive and holds an execution."""

    def claim(self, log: Log, *, owner: str = "me", token: int = 7, ttl: float = 60) -> bool:
        return self.store.claim(log.id, owner=owner, token=token, ttl=ttl)

    def claim_ready(
        self, *, limit: int = 100, queues: Sequence[str] | None = None, token: int = 7
    ) -> list[str]:
        claimed = self.store.claim_ready(
            owner="me", token=token, ttl=60, limit=limit, known=self.known, queues=queues
        )
        return [one.execution_id for one in claimed]

    def test_what_is_ready_can_be_claimed_once(self) -> None:
        """The first claim holds it, the second finds it held."""
        log = self.started()
        assert self.claim(log) is True
        lease = self.store.held(log.id)
        assert lease is not None
        assert (lease.owner, lease.token) == ("me", 7)
        assert self.owner(log) == "held"
        assert self.claim(log, owner="rival", token=8) is False
        assert self.store.held(log.id) == lease

    def test_only_what_is_ready_can_be_claimed(self) -> None:
        """Held, parked, finished and unknown executions cannot."""
        finished = self.running()
        self.store.append(finished.end())
        for log in (self.running(), self.parked(), finished, self.log()):
            assert self.claim(log) is False

    def test_what_is_ready_later_is_not_claimed_before(self) -> None:
        """A start that waits for its time is claimed when it has come, by either way."""
        later = self.store.now() + timedelta(seconds=60)
        logs = [self.started(Ownership("ready", at=later)) for _ in range(2)]
        assert self.claim(logs[0]) is False
        assert self.claim_ready() == []
        self.store.shift_clock(timedelta(seconds=61))
        assert self.claim(logs[0]) is True
        assert self.claim_ready() == [logs[1].id]

    def test_a_batch_is_claimed_by_priority_and_age(self) -> None:
        """High priorities first, and within one those that have been ready longest; a fence for each."""
        now = self.store.now()
        logs = [
            self.started(Ownership("ready", at=now - timedelta(seconds=age)), priority=priority)
            for age, priority in ((10, 0), (20, 0), (5, 9), (1, -3))
        ]
        claimed = self.store.claim_ready(owner="me", token=7, ttl=60, limit=3, known=self.known)
        assert [one.execution_id for one in claimed] == [logs[2].id, logs[1].id, logs[0].id]
        for one in claimed:
            assert (one.token, one.fence) == (7, 1)
            assert self.store.fence(one.execution_id) == 1
            lease = self.store.held(one.execution_id)
            assert lease is not None
            assert (lease.owner, lease.token) == ("me", 7)
        assert self.store.fence(logs[3].id) == 0
        assert self.claim_ready() == [logs[3].id]

    def test_a_claim_s_fence_shuts_out_the_one_before(self) -> None:
        """Each claim of a batch moves the token on."""
        log = self.started()
        assert self.claim_ready() == [log.id]
        self.store.append(log.commit(fence=1))
        assert self.store.release(log.id, 7)
        (again,) = self.store.claim_ready(owner="me", token=8, ttl=60, limit=9, known=self.known)
        assert again.fence == 2
        self.refused(log.commit(fence=1), StaleFenceError)

    def test_queues_are_kept_apart(self) -> None:
        """A worker of some queues takes nothing of others, also where those fill the limit."""
        logs = [
            self.started(queue=queue, priority=priority) for queue, priority in (("a", 9), ("b", 1), ("c", 0))
        ]
        assert self.claim_ready(limit=1, queues=["b", "c"]) == [logs[1].id]
        assert self.claim_ready(queues=["x"]) == []
        assert self.claim_ready(queues=[]) == []
        assert self.claim_ready() == [logs[0].id, logs[2].id]

    def test_queues_can_be_left_out(self) -> None:
        """A claim of all queues besides some takes nothing of those, however long they are and how high."""
        kept = self.started(queue="b")
        left = [self.started(queue=queue, priority=9) for queue in ("a", "c")]
        claimed = self.store.claim_ready(
            owner="me", token=7, ttl=60, limit=1, known=self.known, besides=["a", "c"]
        )
        assert [one.execution_id for one in claimed] == [kept.id]
        assert sorted(self.claim_ready()) == sorted(log.id for log in left)

    def test_of_one_priority_the_queue_whose_head_is_oldest_comes_first(self) -> None:
        """A long queue keeps a short one waiting for no longer than it would its own."""
        now = self.store.now()
        long = [
            self.started(Ownership("ready", at=now - timedelta(seconds=age)), queue="a") for age in (9, 8, 2)
        ]
        short = self.started(Ownership("ready", at=now - timedelta(seconds=5)), queue="b")
        assert self.claim_ready(limit=2) == [long[0].id, long[1].id]
        assert self.claim_ready(limit=1) == [short.id]
        assert self.claim_ready() == [long[2].id]

    # Queues with limits.

    def claim_limited(self, limits: QueueLimits, *, limit: int = 100, token: int = 7) -> list[str]:
        claimed = self.store.claim_limited(
            self.queue, limits, owner="me", token=token, ttl=60, limit=limit, known=self.known
        )
        return [one.execution_id for one in claimed.claims]

    def test_a_queue_has_so_many_held_and_no_more(self) -> None:
        """Held by anybody, also under a lease that has ended; a park makes room, other queues take none."""
        other = self.log()
        self.store.append(other.start(held_by("somebody"), queue="other"))
        logs = [self.started(queue=self.queue) for _ in range(5)]
        first = self.claim_limited(QueueLimits(concurrency=3))
        assert len(first) == 3
        assert self.claim_limited(QueueLimits(concurrency=3)) == []
        self.store.shift_clock(timedelta(seconds=61))
        assert self.claim_limited(QueueLimits(concurrency=3)) == []
        parked = next(log for log in logs if log.id == first[0])
        self.store.append(parked.park(fence=1))
        assert len(self.claim_limited(QueueLimits(concurrency=3))) == 1
        assert len(self.claim_limited(QueueLimits())) == 1

    def test_a_limited_claim_is_by_priority_and_takes_fences(self) -> None:
        """It differs from another claim in its limits only."""
        low, high = self.started(queue=self.queue), self.started(queue=self.queue, priority=3)
        stranger = self.log(flow_id=f"{self.flow_id}-strange")
        self.store.append(stranger.start(queue=self.queue, priority=9))
        claimed = self.store.claim_limited(
            self.queue, QueueLimits(concurrency=9), owner="me", token=7, ttl=60, limit=9, known=self.known
        )
        assert claimed == QueueClaim([Claimed(log.id, 7, 1, self.flow_id) for log in (high, low)])

    def test_eight_claimers_never_hold_more_than_the_limit(self) -> None:
        """All of them together; each execution is claimed once."""
        logs = [self.started(queue=self.queue) for _ in range(30)]
        shares = self.in_threads(
            8, lambda number: self.claim_limited(QueueLimits(concurrency=7), limit=3, token=number + 1)
        )
        taken = [execution_id for share in shares for execution_id in share]
        taken += self.claim_limited(QueueLimits(concurrency=7))
        assert len(taken) == len(set(taken)) == 7
        assert set(taken) <= {log.id for log in logs}

    def test_eight_claimers_never_exceed_the_rate(self) -> None:
        """What a second of rest has saved up is spent once, whoever spends it."""
        for _ in range(30):
            self.started(queue=self.queue)
        limits = QueueLimits(rate=0.001)
        shares = self.in_threads(8, lambda number: self.claim_limited(limits, limit=3, token=number + 1))
        assert sum(map(len, shares)) == 1

    def test_a_rate_admits_more_as_time_goes_by(self) -> None:
        """A second's worth at once, then as many as the time that has passed; and it says when to look again."""
        for _ in range(30):
            self.started(queue=self.queue)
        limits = QueueLimits(rate=0.01)

        def claim() -> QueueClaim:
            return self.store.claim_limited(
                self.queue, limits, owner="me", token=7, ttl=60, limit=9, known=self.known
            )

        assert len(claim().claims) == 1
        refused = claim()
        assert refused.claims == []
        assert refused.again_in is not None
        assert 90 < refused.again_in <= 100
        self.store.shift_clock(timedelta(seconds=refused.again_in))
        assert len(claim().claims) == 1
        self.store.shift_clock(timedelta(days=9))
        assert len(self.claim_limited(QueueLimits(rate=10.0))) == 10

    def test_a_queue_that_has_nothing_ready_asks_for_no_second_look(self) -> None:
        """An exhausted rate is no reason to wake up for an empty queue."""
        self.started(queue=self.queue)
        assert len(self.claim_limited(QueueLimits(rate=0.01))) == 1
        self.started(Ownership("ready", at=self.store.now() + timedelta(seconds=900)), queue=self.queue)
        empty = self.store.claim_limited(
            self.queue, QueueLimits(rate=0.01), owner="me", token=7, ttl=60, limit=9, known=self.known
        )
        assert empty == QueueClaim([])

    def test_what_comes_next_is_known(self) -> None:
        """The first timer and the first execution that is to be ready, of those that are not due yet."""
        now, parked = self.store.now(), self.parked()
        for seconds in (-50, 300, 400):
            self.store.schedule(TimerRow(parked.id, now + timedelta(seconds=seconds)))
        for seconds, queue in ((-50, "a"), (200, "b"), (150, "c"), (900, "a")):
            self.started(Ownership("ready", at=now + timedelta(seconds=seconds)), queue=queue)
        upcoming = self.store.upcoming()
        assert now <= upcoming.now <= self.store.now()
        assert upcoming.timer == now + timedelta(seconds=300)
        assert upcoming.ready == now + timedelta(seconds=150)
        assert self.store.upcoming(queues=["a"]).ready == now + timedelta(seconds=900)
        assert self.store.upcoming(queues=["a", "b"]).ready == now + timedelta(seconds=200)
        assert self.store.upcoming(queues=["z"]).ready is None

    def test_unknown_flows_are_left_out_before_the_limit(self) -> None:
        """So are versions above the highest that the node has."""
        stranger = self.log(flow_id=f"{self.flow_id}-strange")
        self.store.append(stranger.start(priority=99))
        log = self.started()

        def claim(flows: dict[str, int] | None) -> list[str]:
            claimed = self.store.claim_ready(owner="me", token=7, ttl=60, limit=1, known=Known(flows))
            return [one.execution_id for one in claimed]

        assert claim({}) == []
        assert claim({self.flow_id: 0}) == []
        assert claim({self.flow_id: 2}) == [log.id]
        assert claim({stranger.flow_id: 1}) == [stranger.id]

    def test_eight_claimers_share_what_is_ready(self) -> None:
        """Each execution goes to exactly one of them."""
        logs = [self.started(priority=number % 3) for number in range(40)]

        def claim(number: int) -> list[str]:
            mine: list[str] = []
            while claimed := self.claim_ready(limit=3, token=number + 1):
                mine += claimed
            return mine

        shares = self.in_threads(8, claim)
        taken = [execution_id for share in shares for execution_id in share] + self.claim_ready()
        assert sorted(taken) == sorted(log.id for log in logs)

    def test_eight_claimers_of_one_execution(self) -> None:
        """One gets it."""
        log = self.started()
        won = self.in_threads(8, lambda number: self.claim(log, owner=f"o{number}", token=number + 1))
        assert sorted(won) == [False] * 7 + [True]
        lease = self.store.held(log.id)
        assert lease is not None
        assert lease.owner == f"o{won.index(True)}"

    def test_leases_are_renewed_together(self) -> None:
        """Those that are still held under their token live on, and are named."""
        logs = [self.started(held_by("me", number + 1, 10)) for number in range(4)]
        self.store.append(logs[2].park())
        before = self.store.now()
        wanted = [(logs[0].id, 1), (logs[1].id, 99), (logs[2].id, 3), (logs[3].id, 4), (self.log().id, 5)]
        assert self.store.renew(wanted, ttl=90) == {logs[0].id, logs[3].id}
        for log, longer in zip(logs, (True, False, None, True), strict=True):
            lease = self.store.held(log.id)
            assert (None if lease is None else lease.until >= before + timedelta(seconds=90)) is longer
        assert self.store.renew([], ttl=90) == set()

    def test_an_expired_lease_that_nobody_took_is_renewed(self) -> None:
        """A process that was slow has not lost what nobody wanted."""
        log = self.started(held_by("me", 3, 10))
        self.store.shift_clock(timedelta(seconds=11))
        assert self.store.renew([(log.id, 3)], ttl=60) == {log.id}
        assert log.id not in [lease.execution_id for lease in self.store.expired(limit=10_000)]

    def test_a_hand_back_makes_it_ready(self) -> None:
        """Only by the holder's token; a delayed one is not claimed before its time."""
        log = self.started(held_by("me", 3))
        assert self.store.release(log.id, 4) is False
        assert self.owner(log) == "held"
        assert self.store.release(log.id, 3) is True
        assert self.owner(log) == "ready"
        assert self.store.release(log.id, 3) is False
        assert self.claim(log)
        assert self.store.release(log.id, 7, delay=30) is True
        assert self.claim(log) is False
        self.store.shift_clock(timedelta(seconds=31))
        assert self.claim(log) is True

    def test_expired_leases_are_found_oldest_first(self) -> None:
        """By the store's clock; running ones are not among them, but among all leases."""
        logs = [self.started(held_by(f"o{ttl}", ttl, ttl)) for ttl in (30, 10, 20, 500)]
        self.store.shift_clock(timedelta(seconds=100))
        ours = {log.id for log in logs}
        expired = [lease for lease in self.store.expired(limit=10_000) if lease.execution_id in ours]
        assert [lease.execution_id for lease in expired] == [logs[1].id, logs[2].id, logs[0].id]
        assert (expired[0].owner, expired[0].token, expired[0].flow_id) == ("o10", 10, self.flow_id)
        assert expired[0] == self.store.held(logs[1].id)
        everyone = [lease for lease in self.store.leases(limit=10_000) if lease.execution_id in ours]
        assert [lease.execution_id for lease in everyone] == [logs[n].id for n in (1, 2, 0, 3)]
        assert len(self.store.expired(limit=2)) == 2

    def test_an_expired_lease_is_taken_over_once(self) -> None:
        """The first taker holds it under its own token, the second finds another."""
        log = self.started(held_by("dead", 3, 10))
        seen = self._expire(log, 11)
        assert self.store.take_over(seen, owner="me", token=4, ttl=60) is True
        assert self.store.take_over(seen, owner="rival", token=5, ttl=60) is False
        lease = self.store.held(log.id)
        assert lease is not None
        assert (lease.owner, lease.token) == ("me", 4)
        assert self.store.renew([(log.id, 3)], ttl=60) == set()

    def test_a_lease_is_taken_from_the_holder_that_was_seen(self) -> None:
        """One that expired, was taken, and expired again is another lease."""
        log = self.started(held_by("dead", 3, 10))
        seen = self._expire(log, 11)
        assert self.store.take_over(seen, owner="next", token=4, ttl=10)
        assert self._expire(log, 11).token == 4
        assert self.store.take_over(seen, owner="me", token=5, ttl=60) is False

    def _expire(self, log: Log, seconds: float) -> Lease:
        self.store.shift_clock(timedelta(seconds=seconds))
        (lease,) = (one for one in self.store.expired(limit=10_000) if one.execution_id == log.id)
        return lease

    def test_a_lease_that_lives_again_is_not_taken(self) -> None:
        """Renewed, handed back, or parked after it was seen expired: the holder was only slow."""
        for revive in ("renew", "release", "park", "claim"):
            log = self.started(held_by("slow", 3, 10))
            seen = self._expire(log, 11)
            if revive == "renew":
                assert self.store.renew([(log.id, 3)], ttl=60)
            elif revive == "park":
                self.store.append(log.park())
            else:
                assert self.store.release(log.id, 3)
            if revive == "claim":
                assert self.claim(log)
            before = self.owner(log)
            assert self.store.take_over(seen, owner="me", token=4, ttl=60) is False
            assert self.owner(log) == before

    def test_a_live_lease_is_taken_by_force_from_the_holder_that_was_judged(self) -> None:
        """Whatever its renewal moved; not what it has handed back, parked or ended, nor another's."""
        log = self.started(held_by("alive", 3, 60))
        judged = self.store.held(log.id)
        assert judged is not None
        assert self.store.renew([(log.id, 3)], ttl=600) == {log.id}
        assert self.store.take_over(judged, owner="me", token=4, ttl=60, forced=True) is True
        lease = self.store.held(log.id)
        assert lease is not None
        assert (lease.owner, lease.token) == ("me", 4)
        assert self.store.renew([(log.id, 3)], ttl=60) == set()
        assert self.store.take_over(judged, owner="late", token=5, ttl=60, forced=True) is False
        for leave in ("release", "park", "end", "taken"):
            log = self.started(held_by("alive", 3, 60))
            judged = self.store.held(log.id)
            assert judged is not None
            if leave == "park":
                self.store.append(log.park())
            elif leave == "end":
                self.store.append(log.end())
            else:
                assert self.store.release(log.id, 3)
            if leave == "taken":
                assert self.claim(log)
            before = self.owner(log), self.store.held(log.id)
            assert self.store.take_over(judged, owner="me", token=4, ttl=60, forced=True) is False
            assert (self.owner(log), self.store.held(log.id)) == before

    def test_eight_take_a_live_lease_by_force_and_one_has_it(self) -> None:
        """All have judged the same holder."""
        log = self.started(held_by("alive", 3, 60))
        judged = self.store.held(log.id)
        assert judged is not None

        def take(number: int) -> bool:
            return self.store.take_over(judged, owner="me", token=10 + number, ttl=60, forced=True)

        assert sorted(self.in_threads(8, take)) == [*[False] * 7, True]

    def test_a_live_lease_is_not_taken(self) -> None:
        """Its token alone is not enough."""
        log = self.started(held_by("alive", 3, 60))
        lease = self.store.held(log.id)
        assert lease is not None
        assert self.store.take_over(lease, owner="me", token=4, ttl=60) is False

    def test_expired_leases_are_taken_over_together(self) -> None:
        """Each by its own token and end; one that lives again, or is another's, is left to it."""
        logs = [self.started(held_by("dead", number, 10)) for number in (3, 4, 5, 6)]
        self.store.shift_clock(timedelta(seconds=11))
        ours = {log.id: log for log in logs}
        seen = [lease for lease in self.store.expired(limit=10_000) if lease.execution_id in ours]
        renewed, taken = logs[1], logs[2]
        assert self.store.renew([(renewed.id, 4)], ttl=60)
        (other,) = (lease for lease in seen if lease.execution_id == taken.id)
        assert self.store.take_over(other, owner="next", token=7, ttl=10)
        self.store.shift_clock(timedelta(seconds=11))
        free = {logs[0].id, logs[3].id}
        assert self.store.take_over_all(seen, owner="me", token=9, ttl=60) == free
        assert self.store.take_over_all(seen, owner="late", token=8, ttl=60) == set()
        assert self.store.take_over_all([], owner="me", token=9, ttl=60) == set()
        held = {key: lease.token for key in ours if (lease := self.store.held(key)) is not None}
        assert held == {logs[0].id: 9, renewed.id: 4, taken.id: 7, logs[3].id: 9}

    def test_eight_take_over_the_same_leases_and_each_has_one_taker(self) -> None:
        """However they come between each other; what one had to leave out is there for its next look."""
        ids = {self.started(held_by("dead", 3, 10)).id for _ in range(10)}
        self.store.shift_clock(timedelta(seconds=11))
        seen = [lease for lease in self.store.expired(limit=10_000) if lease.execution_id in ids]

        def take(number: int) -> set[str]:
            return self.store.take_over_all(seen, owner="me", token=10 + number, ttl=60)

        takers = self.in_threads(8, take)
        taken = [key for one in takers for key in one]
        assert len(taken) == len(set(taken))
        assert set(taken) | self.store.take_over_all(seen, owner="me", token=9, ttl=60) == ids

    def test_several_are_handed_back_together(self) -> None:
        """Those that the caller holds; the others keep their owner."""
        mine, other = self.started(held_by("me", 3)), self.started(held_by("other", 4))
        also, gone = self.started(held_by("me", 3)), self.log()
        ids = [mine.id, other.id, also.id, gone.id]
        assert self.store.release_all(ids, 3) == {mine.id, also.id}
        assert self.store.release_all(ids, 3) == set()
        assert self.store.release_all([], 3) == set()
        assert self.claim(mine)
        lease = self.store.held(other.id)
        assert lease is not None
        assert lease.token == 4

    def test_tokens_are_taken_of_what_is_as_it_was_looked_at(self) -> None:
        """The end of the log, the token and the holder; one that has moved keeps its token and its count."""
        fit, longer, shorter, moved, other = (self.started(held_by("me", 3)) for _ in range(5))
        self.store.append(longer.commit())
        self.store.acquire_fence(moved.id)
        assert self.store.release(other.id, 3)
        looks = [
            Look(fit.id, 1, fence=0, lease=3, progress=1),
            Look(longer.id, 1, lease=3, progress=1),
            Look(shorter.id, 2, lease=3, progress=1),
            Look(moved.id, 1, fence=0, progress=1),
            Look(other.id, 1, lease=3, progress=1),
            Look(self.log().id, 1),
        ]
        assert self.store.acquire_fences_at(looks) == {fit.id: Taken(1, 1)}
        tokens = [self.store.fence(log.id) for log in (fit, longer, shorter, moved, other)]
        assert tokens == [1, 0, 0, 1, 0]
        assert self.store.acquire_fences_at([Look(moved.id, 1, fence=1)]) == {moved.id: Taken(2, 0)}
        assert self.store.acquire_fences_at([]) == {}

    def test_takeovers_are_counted_with_their_tokens(self) -> None:
        """As count_recovery does: while there is no progress the count goes up."""
        log = self.started(held_by("me", 3))
        look = Look(log.id, 1, lease=3, progress=1)
        assert [self.store.acquire_fences_at([look])[log.id] for _ in range(2)] == [Taken(1, 1), Taken(2, 2)]
        assert self.store.count_recovery(log.id, sequence=1) == 3
        further = replace(look, progress=2)
        assert self.store.acquire_fences_at([further]) == {log.id: Taken(3, 1)}

    def test_park_and_end_take_the_lease_off(self) -> None:
        """In the commit itself: there is no moment in between."""
        log = self.started(held_by("me", 3))
        self.store.append(log.park())
        assert self.store.held(log.id) is None
        assert self.store.renew([(log.id, 3)], ttl=60) == set()
        self.store.append(log.answer(held_by("me", 4)))
        self.store.append(log.end())
        assert self.store.held(log.id) is None

    def test_what_stays_ready_for_long_is_found(self) -> None:
        """Whoever was told of it died; what became ready just now is not among them."""
        log = self.started()
        self.store.shift_clock(timedelta(seconds=40))
        fresh = self.started()
        ours = {log.id, fresh.id}
        stale = [
            lease for lease in self.store.stale_ready(grace=30, limit=10_000) if lease.execution_id in ours
        ]
        assert [(lease.execution_id, lease.owner, lease.token) for lease in stale] == [(log.id, "", 0)]
        assert stale[0].flow_id == self.flow_id

    def test_takeovers_are_counted_while_the_log_stands_still(self) -> None:
        """At another end of the log the count begins anew; the token is left alone."""
        log = self.running()
        token = self.store.acquire_fence(log.id)
        assert [self.store.count_recovery(log.id, sequence=1) for _ in range(3)] == [1, 2, 3]
        assert [self.store.count_recovery(log.id, sequence=2) for _ in range(2)] == [1, 2]
        assert self.store.fence(log.id) == token

    def test_a_start_begins_the_count_anew(self) -> None:
        """What was counted for a deleted execution of the same id is forgotten."""
        log = self.running()
        self.store.acquire_fence(log.id)
        self.store.count_recovery(log.id, sequence=1)
        self.store.append(log.end(fence=1))
        assert self.store.delete_execution(log.id)
        self.store.append(self.log(name=log.id).start(held_by()))
        assert self.store.count_recovery(log.id, sequence=1) == 1


class InboxStoreConformance(StoreConformance):
    """Messages, kept until a receive wants them."""

    def send(
        self, log: Log, body: str = "1", *, name: str = "n", message_id: str = "", **options: Any
    ) -> bool:
        return self.store.send(
            log.id, name=name, message_id=message_id or uuid.uuid4().hex, body=body, **options
        )

    def bodies(self, log: Log, name: str = "n") -> list[str]:
        return [message.body for message in self.store.inbox(log.id, name)]

    def test_messages_come_in_the_order_sent(self) -> None:
        """Numbers grow, names are apart, bodies survive byte by byte."""
        log = self.running()
        sent = ['{"b":1,"a":[2.50]}', '"\\u0000"', "3"]
        for body in sent:
            assert self.send(log, body) is True
        self.send(log, "9", name="other")
        messages = self.store.inbox(log.id, "n")
        assert [message.body for message in messages] == sent
        assert [message.number for message in messages] == sorted({message.number for message in messages})
        assert self.store.message_names(log.id) == {"n", "other"}

    def test_a_message_tells_all_of_itself(self) -> None:
        """To whom, under which name and id, for which wait an answer is kept, and who sent it why."""
        log = self.running()
        self.send(log, "1", message_id="m-1", wait="w-1", principal="anna", reason="on \u2028 paper")
        (message,) = self.store.inbox(log.id, "n")
        assert message == Message(message.number, log.id, "n", "m-1", "1", "w-1", "anna", "on \u2028 paper")

    def test_a_message_id_is_taken_once(self) -> None:
        """Sent again, under whatever name, nothing changes: no message, no wake, no row."""
        log = self.running()
        self.send(log, "1", message_id="same")
        before = (self.store.wakes(log.id), self.store.timers(log.id))
        assert self.send(log, "2", message_id="same") is False
        assert self.send(log, "2", message_id="same", name="other") is False
        assert (self.store.wakes(log.id), self.store.timers(log.id)) == before
        assert self.bodies(log) == ["1"]
        assert self.send(self.running(), "2", message_id="same") is True

    def test_eight_senders_of_one_id(self) -> None:
        """One is told that it was new."""
        log = self.running()
        new = self.in_threads(8, lambda number: self.send(log, str(number), message_id="same"))
        assert sorted(new) == [False] * 7 + [True]
        assert self.bodies(log) == [str(new.index(True))]
        assert self.store.wakes(log.id) == 1

    def test_eight_senders_of_one_receiver(self) -> None:
        """No wake is lost, and none of the messages."""
        log = self.running()
        assert self.in_threads(8, lambda number: self.send(log, str(number))) == [True] * 8
        assert sorted(self.bodies(log)) == [str(number) for number in range(8)]
        assert self.store.wakes(log.id) == 8

    def test_a_message_wakes(self) -> None:
        """One more wake and a due re-drive row, for a sender that dies right after."""
        log = self.parked()
        self.send(log)
        assert self.store.wakes(log.id) == 1
        (row,) = self.store.timers(log.id)
        assert row.redrive == 0
        claimed = self.store.claim_due(limit=10_000, hold=60, known=self.known, redrive=True)
        assert log.id in [due.row.execution_id for due in claimed]

    def test_a_message_to_a_chain_wakes_its_newest_member(self) -> None:
        """Inbox and wakes are the chain's, the re-drive row is the receiver's."""
        first, newest = self.log(), self.parked()
        self.send(first, receiver=newest.id)
        assert self.store.wakes(first.id) == 1
        assert self.store.wakes(newest.id) == 0
        assert self.store.timers(first.id) == []
        assert len(self.store.timers(newest.id)) == 1
        assert self.bodies(first) == ["1"]

    def test_a_commit_takes_messages(self) -> None:
        """Those it names are gone from inbox and names; its refusal leaves them."""
        log = self.parked()
        self.send(log, "1")
        self.send(log, "2", name="other")
        (message,) = self.store.inbox(log.id, "n")
        taken = log.fork().answer(messages=(message.number,))
        self.store.acquire_fence(log.id)
        self.refused(taken, StaleFenceError)
        kinds = (Kind.MESSAGE_CONSUMED, Kind.EXECUTION_RESUMED)
        self.store.append(log.commit(*kinds, ownership=READY, fence=1, messages=(message.number,)))
        assert self.bodies(log) == []
        assert self.store.message_names(log.id) == {"other"}

    def keep(self, log: Log, message_id: str = "kept") -> bool:
        """Store an answer as somebody who has seen the log as it is here."""
        since = log.fold.last_sequence
        return self.store.send_unless_answered(
            log.id, since=since, name="n", message_id=message_id, body="1", wait="w"
        )

    def test_an_answer_for_a_member_is_kept_in_the_chains_inbox(self) -> None:
        """The member's log is looked at; inbox and wakes are the chain's, the re-drive row the member's."""
        first, member = self.log(), self.running()
        kept: dict[str, Any] = {
            "since": 1,
            "name": "n",
            "message_id": "k",
            "body": "1",
            "wait": "w",
            "chain": first.id,
        }
        assert self.store.send_unless_answered(member.id, **kept) is True
        assert self.store.send_unless_answered(member.id, **kept) is False
        assert self.bodies(first) == ["1"]
        assert self.store.wakes(first.id) == 1
        assert len(self.store.timers(member.id)) == 1
        self.store.append(member.park())
        changed = {**kept, "message_id": "l"}
        assert _outcome(lambda: self.store.send_unless_answered(member.id, **changed)) == "Changed"

    def test_an_answer_is_kept_while_nothing_answers(self) -> None:
        """Once, with a wake and a due re-drive row, behind whatever the running body appends."""
        log = self.running()
        seen = log.fork()
        self.store.append(log.commit(Kind.STEP_STARTED, Kind.STEP_COMPLETED, Kind.EXECUTION_DENIED))
        self.store.append(log.commit("an.event.of.an.application"))
        assert self.keep(seen) is True
        assert self.keep(seen) is False
        assert self.keep(log) is False
        (message,) = self.store.inbox(log.id, "n")
        assert (message.message_id, message.wait) == ("kept", "w")
        assert self.store.wakes(log.id) == 1
        assert [row.redrive for row in self.store.timers(log.id)] == [0]

    def test_an_answer_is_not_kept_for_a_log_that_moved_on(self) -> None:
        """The execution has parked or ended since, or was deleted: nothing is stored."""
        for move in ("park", "answer", "end", "delete"):
            log = self.running()
            seen = log.fork()
            self.store.append(log.park() if move in ("park", "answer") else log.end())
            if move == "answer":
                self.store.append(log.answer())
            if move == "delete":
                assert self.store.delete_execution(log.id)
            wakes = self.store.wakes(log.id)
            assert _outcome(lambda seen=seen: self.keep(seen)) == "Changed"  # type: ignore[misc]
            assert self.store.message_names(log.id) == set()
            assert self.store.wakes(log.id) == wakes
            assert self.store.timers(log.id) == []

    def test_a_park_and_an_answer_that_is_kept_exclude_each_other(self) -> None:
        """The park did not see it, so one of them is refused, whichever comes second."""
        for _ in range(10):
            log = self.parked()
            self.store.append(log.answer())
            seen, park = log.fork(), log.fork().park(wakes=0)
            told: list[Any] = [None, None]

            def act(number: int, seen: Log = seen, park: Commit = park, told: list[Any] = told) -> None:
                if number:
                    told[0] = _outcome(lambda: self.store.append(park))
                else:
                    told[1] = _outcome(lambda: self.keep(seen))

            self.in_threads(2, act)
            assert told in (["landed", "Changed"], ["WakesMoved", "landed"])
            assert self.store.message_names(log.id) == ({"n"} if told[1] == "landed" else set())

    def test_a_taken_id_stays_taken(self) -> None:
        """A message that was taken is not sent a second time."""
        log = self.running()
        self.send(log, message_id="once")
        (message,) = self.store.inbox(log.id, "n")
        self.store.append(log.commit(messages=(message.number,)))
        assert self.send(log, message_id="once") is False
        assert self.bodies(log) == []

    def test_a_message_in_a_transaction_that_is_undone(self) -> None:
        """Neither it nor its wake is there."""
        log = self.running()
        with suppress(_Stop), self.store.transaction():
            self.send(log)
            raise _Stop
        assert self.bodies(log) == []
        assert self.store.wakes(log.id) == 0
        assert self.store.timers(log.id) == []


class ScheduleStoreConformance(StoreConformance):
    """What has been decided of each schedule."""

    def row(self, **fields: Any) -> ScheduleRow:
        """A row of a schedule that no other test has."""
        self._logs += 1
        told: dict[str, Any] = {
            "id": f"{self.flow_id}-{self._logs}",
            "flow_id": self.flow_id,
            "cron": "30 3 * * *",
            "time_zone": "Europe/Berlin",
            "decided_until": datetime(2026, 6, 1, 1, 30, 0, 123456, tzinfo=UTC),
        }
        return ScheduleRow(**told | fields)

    def added(self, **fields: Any) -> ScheduleRow:
        row = self.row(**fields)
        assert self.store.add_schedule(row) is True
        return row

    def test_a_row_comes_back_as_it_was_written(self) -> None:
        """Every column, to the microsecond."""
        moment = datetime(2026, 6, 2, 3, 4, 5, 678901, tzinfo=UTC)
        row = self.added(
            paused_at=moment,
            last_execution_id="nightly@1",
            skipped_at=moment + timedelta(microseconds=1),
            skipped_why="missed",
            last_act="pause",
            acted_at=moment + timedelta(microseconds=2),
            acted_by="anna",
            act_reason="a freeze, “until Monday”\nof all",
        )
        assert self.store.schedule_row(row.id) == row
        assert self.store.schedule_row(f"{row.id}-other") is None
        other = self.added()
        mine = [found for found in self.store.schedule_rows() if found.flow_id == self.flow_id]
        assert mine == sorted([row, other], key=lambda found: found.id)

    def test_a_schedule_begins_once(self) -> None:
        """Whoever comes second finds the row, and changes nothing of it."""
        row = self.added()
        assert self.store.add_schedule(replace(row, cron="* * * * *")) is False
        assert self.store.schedule_row(row.id) == row

    def test_a_row_moves_by_compare_and_set(self) -> None:
        """Only over the row that was seen; its revision goes up by one."""
        row = self.added()
        later = row.decided_until + timedelta(days=1)
        assert self.store.move_schedule(row, replace(row, decided_until=later, paused_at=later)) is True
        moved = replace(row, decided_until=later, paused_at=later, revision=1)
        assert self.store.schedule_row(row.id) == moved
        assert self.store.move_schedule(row, replace(row, decided_until=row.decided_until)) is False
        assert self.store.schedule_row(row.id) == moved
        assert self.store.move_schedule(moved, replace(moved, paused_at=None)) is True
        assert self.store.schedule_row(row.id) == replace(moved, paused_at=None, revision=2)

    def test_a_row_that_is_not_there_does_not_move(self) -> None:
        """Nor does it appear."""
        row = self.row()
        assert self.store.move_schedule(row, row) is False
        assert self.store.schedule_row(row.id) is None

    def test_eight_nodes_that_saw_the_same(self) -> None:
        """One of them moves the row; the others learn that it has moved."""
        row = self.added()
        later = row.decided_until + timedelta(days=1)
        moved = self.in_threads(
            8, lambda n: self.store.move_schedule(row, replace(row, decided_until=later, last_act=str(n)))
        )
        assert sorted(moved) == [False] * 7 + [True]
        there = self.store.schedule_row(row.id)
        assert there is not None
        assert (there.revision, there.last_act) == (1, str(moved.index(True)))

    def test_eight_nodes_that_see_it_first(self) -> None:
        """One row."""
        row = self.row()
        added = self.in_threads(8, lambda n: self.store.add_schedule(replace(row, last_act=str(n))))
        assert sorted(added) == [False] * 7 + [True]

    def test_a_move_lands_with_its_start_or_not(self) -> None:
        """In one transaction: undone, neither the mark nor the execution is there."""
        row, log = self.added(), self.log()
        later = replace(row, decided_until=row.decided_until + timedelta(days=1))
        with suppress(_Stop), self.store.transaction():
            assert self.store.move_schedule(row, later) is True
            self.store.append(log.start())
            raise _Stop
        assert self.store.schedule_row(row.id) == row
        assert self.store.status(log.id) is None

    def test_what_still_runs_is_told_from_what_has_ended(self) -> None:
        """Parked counts as running; one that was never there, or is deleted, does not."""
        log = self.parked()
        assert self.store.chain_runs(log.id) is True
        self.store.append(log.answer(READY, timers_off=()))
        assert self.store.chain_runs(log.id) is True
        self.store.append(log.end())
        assert self.store.chain_runs(log.id) is False
        self.store.delete_execution(log.id)
        assert self.store.chain_runs(log.id) is False

    def test_a_continued_execution_runs_while_its_successor_does(self) -> None:
        """The chain goes by the id of its first member."""
        first, second = self.running(), self.log()
        self.store.append(second.start(READY, chain=first.id))
        self.store.append(first.end())
        assert self.store.chain_runs(first.id) is True
        self.store.append(second.end())
        assert self.store.chain_runs(first.id) is False


class RetentionStoreConformance(StoreConformance):
    """What is old, what belongs to it, and how it is put back."""

    def ended(self, **new: Any) -> Log:
        log = self.started(held_by(), **new)
        self.store.append(log.end())
        return log

    def before(self, log: Log) -> datetime:
        """An instant a microsecond behind its end."""
        return self.ended_at(log) + timedelta(microseconds=1)

    def ended_at(self, log: Log) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=log.fold.finished_at)

    def test_what_has_ended_is_told_oldest_first(self) -> None:
        """Of one status, from before an instant, a page at a time; what lives is not among it."""
        self.running()
        first, second = self.ended(), self.ended()
        late = self.started(held_by())
        self.store.append(late.commit())
        self.store.append(late.end())
        ours = {first.id, second.id, late.id}

        def ask(before: datetime, **options: Any) -> list[Ended]:
            found = self.store.ended_before(Status.COMPLETED, before, **{"limit": 10_000, **options})
            return [row for row in found if row.id in ours]

        found = ask(self.before(late))
        assert found == [
            Ended(log.id, log.id, Status.COMPLETED, self.ended_at(log)) for log in (first, second, late)
        ]
        assert [row.id for row in ask(self.ended_at(late))] == [first.id, second.id]
        assert ask(self.before(late), after=(self.ended_at(first), first.id)) == found[1:]
        assert len(self.store.ended_before(Status.COMPLETED, self.before(late), limit=1)) == 1
        others = self.store.ended_before(Status.FAILED, self.before(late), limit=10_000)
        assert not ours & {row.id for row in others}

    def test_children_are_told(self) -> None:
        """In order of id, living ones too, a page at a time."""
        parent = self.running()
        living, ended = self.started(parent_id=parent.id), self.ended(parent_id=parent.id)
        found = self.store.children(parent.id, limit=10)
        assert [(row.id, row.status) for row in found] == [
            (living.id, Status.PENDING),
            (ended.id, Status.COMPLETED),
        ]
        assert found[0].finished_at is None
        assert self.store.children(parent.id, after=living.id, limit=10) == found[1:]
        assert self.store.children(ended.id, limit=10) == []

    def test_the_members_of_a_chain_are_told(self) -> None:
        """By any of them, oldest first; a chain of one is itself, and what is not there has none."""
        first, alone = self.running(), self.running()
        second = self.log(name=f"{first.id}~2")
        self.store.append(
            first.commit(
                Kind.EXECUTION_CONTINUED,
                ownership=NOBODY,
                timers_off=None,
                also=(second.start(held_by(), chain=first.id),),
            )
        )
        for log in (first, second):
            members = self.store.chain_members(log.id)
            assert [(row.id, row.chain) for row in members] == [(first.id, first.id), (second.id, first.id)]
        assert [row.id for row in self.store.chain_members(alone.id)] == [alone.id]
        assert self.store.chain_members(self.log().id) == []

    def continued(self, first: Log, before: Log, link: int, *, flow_id: str | None = None) -> Log:
        """A chain's next member, started with its predecessor's end; later than it, as a successor always is."""
        newest = self.log(name=f"{first.id}~{link}", flow_id=flow_id or self.flow_id)
        event = newest.event(Kind.EXECUTION_STARTED, at=_AT + 1000 * link)
        start = Commit(
            newest.id,
            (event,),
            project(newest.fold),
            ownership=held_by(),
            new=NewExecution(chain=first.id),
        )
        end = before.commit(Kind.EXECUTION_CONTINUED, ownership=NOBODY, timers_off=None, also=(start,))
        self.store.append(end)
        return newest

    def test_the_newest_of_a_chain_is_found_by_any_member(self) -> None:
        """By the order of their starts, and not by that of their ids; a chain of one is its own newest."""
        first = newest = self.running()
        for link in range(2, 12):
            newest = self.continued(first, newest, link)
        for key in (first.id, f"{first.id}~2", newest.id):
            found = self.store.newest(key)
            assert found == Ended(newest.id, first.id, Status.PENDING, None)
        alone = self.parked()
        assert self.store.newest(alone.id) == Ended(alone.id, alone.id, Status.SUSPENDED, None)
        assert self.store.newest(self.log().id) is None

    def test_a_chain_ends_with_its_newest_member(self) -> None:
        """Until then an execution that was continued has not ended; then by an event of the newest."""
        first, alone = self.running(), self.running()
        second = self.continued(first, first, 2)
        assert self.store.ended([first.id, second.id, alone.id]) == dict.fromkeys(
            (first.id, second.id, alone.id)
        )
        third = self.continued(first, second, 3)
        self.store.append(third.end())
        found = self.store.ended([first.id, second.id, alone.id])
        last = self.store.read(third.id)[-1]
        assert found == {first.id: last, second.id: last, alone.id: None}

    def test_a_wake_of_a_chain_is_for_whoever_has_the_code_of_its_newest(self) -> None:
        """What comes to an earlier member concerns that one, whose flow may be another."""
        first = self.running()
        flow_id = f"{self.flow_id}-next"
        self.continued(first, first, 2, flow_id=flow_id)
        self.store.schedule(TimerRow(first.id, self.store.now(), redrive=0))

        def due(known: Known) -> list[str]:
            claimed = self.store.claim_due(limit=9, hold=60, known=known, redrive=True)
            return [one.row.execution_id for one in claimed]

        assert first.id not in due(self.known)
        assert first.id in due(Known({flow_id: 1}))

    def test_a_chain_that_was_removed_in_part_has_no_say_in_another(self) -> None:
        """What an earlier life of an id has left of its chain is not the newest of the new one."""
        first = self.running()
        second = self.continued(first, first, 2)
        self.store.append(second.end())
        assert self.store.delete_execution(first.id)
        found = self.store.newest(first.id)
        assert found is not None
        assert found.id == second.id
        again = self.log(name=first.id)
        event = again.event(Kind.EXECUTION_STARTED, at=_AT + 1_000_000)
        start = Commit(again.id, (event,), project(again.fold), ownership=READY, new=NewExecution())
        self.store.append(start)
        found = self.store.newest(first.id)
        assert found is not None
        assert found.id == first.id

    def test_a_log_comes_back_as_it_was(self) -> None:
        """Byte by byte, with writers, fences, instants and what its start decided."""
        at = self.store.now() + timedelta(days=1)
        log = self.started(
            held_by(), queue="q", priority=3, parent_id="p", subject_type="a.b", subject_id="7",
            attributes='{"a": [1, "é"]}', deadline=at,
        )  # fmt: skip
        body = '{"at":1,"step":"s","tool":"t","b":1.10,"a":[1e2,' + "9" * 40 + '],"b":"\\u0000 \\ud800"}'
        token = self.store.acquire_fence(log.id)
        event = replace(log.event(Kind.STEP_STARTED), body=body, fence=token)
        self.store.append(Commit(log.id, (event,), project(log.fold), fence=token))
        self.store.append(log.commit("shipped", fence=token))
        self.store.append(log.end(fence=token))
        decided, events = self.store.decided(log.id), tuple(self.store.read(log.id))
        assert decided is not None
        assert (decided.queue, decided.deadline, decided.chain) == ("q", at, log.id)
        assert self.store.delete_execution(log.id)
        assert self.store.decided(log.id) is None
        back = Commit(log.id, events, project(log.fold), ownership=NOBODY, new=decided)
        assert self.store.restore(back) is True
        assert tuple(self.store.read(log.id)) == events
        assert self.store.decided(log.id) == decided
        assert self.owner(log) == "finished"
        assert self.store.fence(log.id) == token
        assert self.store.restore(back) is False
        assert tuple(self.store.read(log.id)) == events

    def test_a_log_of_many_events_comes_back(self) -> None:
        """More than go in one statement."""
        log = self.running()
        self.store.append(log.commit(*[Kind.STEP_STARTED] * 2_500))
        self.store.append(log.end())
        events = tuple(self.store.read(log.id))
        assert self.store.delete_execution(log.id)
        assert self.store.restore(
            Commit(log.id, events, project(log.fold), ownership=NOBODY, new=NewExecution())
        )
        assert tuple(self.store.read(log.id)) == events

    def test_what_is_there_is_not_written_over(self) -> None:
        """A log is put back whole or not at all, also where another one has some of its events only."""
        there, log = self.running(), self.log()
        commit = log.start()
        more = log.commit(Kind.STEP_STARTED, Kind.EXECUTION_COMPLETED, ownership=NOBODY)
        rival = [
            replace(event, execution_id=there.id, writer=event.writer + 1)
            for event in (*commit.events, *more.events)
        ]
        before = self.store.read(there.id)
        back = Commit(there.id, tuple(rival), more.projection, ownership=NOBODY, new=NewExecution())
        assert self.store.restore(back) is False
        assert self.store.read(there.id) == before
        assert self.owner(there) == "held"

    def test_a_park_comes_back_with_its_fence_and_its_wakes(self) -> None:
        """Whoever answers it meets whoever acquires it; what runs is for somebody to run."""
        log = self.log()
        start, park = log.start(), log.park()
        at = self.store.now() + timedelta(hours=1)
        back = replace(
            park, events=(*start.events, *park.events), new=start.new, timers=(TimerRow(log.id, at),)
        )
        assert self.store.restore(back) is True
        assert self.owner(log) == "parked"
        assert [row.wake_at for row in self.store.timers(log.id)] == [at]
        parks = self.store.ensure_park_fences(after=self.flow_id, limit=1)
        assert (parks.position, parks.made) == (log.id, 0)
        runs = self.log()
        assert self.store.restore(runs.start()) is True
        assert self.owner(runs) == "ready"
