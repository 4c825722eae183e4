"""Removing what ended long ago, with an archive or without one, and never what somebody still needs.

An execution is removed when it is older than its status may be and nothing pins it. A parent and its children are
a family: what cannot be judged of one of them keeps all of them, and is told. A chain goes together. What a living chain has left behind goes by an age of its own, if it has one. Each deletion
is a transaction of its own, and is taken back if the log is not the one that was judged and archived.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from django.core.files.storage import Storage
from django.db import IntegrityError, models

from loom_django.engine.core import Engine
from loom_django.errors import OpenTransactionError, StoreUnavailableError
from loom_django.kernel.events import Event
from loom_django.kernel.fold import fold
from loom_django.kernel.state import ON_CHILD, ExecutionState, Status
from loom_django.models import Execution
from loom_django.services import archive as archives
from loom_django.stores.base import Ended

log = logging.getLogger("loom_django.retention")

# An archive is closed when it has so many bytes of payloads, whatever the batch's size.
MOST_BYTES: Final = 32 * 1024 * 1024
# Parents, and families, whose judgement is kept: so many families may come mixed before one is judged again.
_REMEMBERED: Final = 1024
_PAGE: Final = 500

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finished:
    """What a pin is asked about: a chain that has ended, as its logs tell; nearly every chain has one member.

    Or a single member of a chain that may live: one that was continued, if such logs have an age of their own.
    """

    members: tuple[ExecutionState, ...]

    @property
    def id(self) -> str:
        """Of the newest member."""
        return self.members[-1].execution_id

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(member.execution_id for member in self.members)

    @property
    def parent(self) -> str | None:
        """Who started it as a child, by its own log."""
        parent: str | None = self.members[0].options.get("parent")
        return parent


class Pin(Protocol):
    """Says that something is still needed. One that raises keeps the whole family, and is told."""

    def __call__(self, finished: Finished, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run found and did.

    ``scanned`` executions were old enough. ``removed`` are gone, ``archived`` of them are in ``archives``; with
    ``dry_run`` they would be. ``pinned`` are needed still, as (id, the pin's name). ``kept`` are kept because
    something went wrong with them or in their family, and ``changed`` were written to meanwhile, or removed by somebody else. ``failures`` are
    (id, what went wrong).
    """

    scanned: int = 0
    removed: int = 0
    archived: int = 0
    kept: int = 0
    changed: int = 0
    pinned: tuple[tuple[str, str], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    archives: tuple[str, ...] = ()
    dry_run: bool = False


class Host(Protocol):
    """What a run needs of the runtime."""

    @property
    def engine(self) -> Engine: ...


def prune(
    loom: Host,
    *,
    ages: Mapping[str, float | None] | None = None,
    archive: Storage | None = None,
    pins: Sequence[Pin] = (),
    batch_size: int = 100,
    dry_run: bool = False,
    report: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Remove what ended long ago.

    Args:
        ages: seconds after the end, by status; None keeps that status. Default: ``LOOM["RETENTION"]``.
        archive: the storage to which a batch is written, and from which it is read back, before it is deleted.
        pins: what else is to be asked, beside whether a living parent still needs its child.
        batch_size: executions in one archive.
        dry_run: say what would be done; change nothing.
        report: called with what was done so far, after each batch.

    Raises:
        ArchiveError: the storage failed; nothing of that batch was deleted.
        OpenTransactionError: in a transaction, which would hold all that it deletes until its end.
    """
    engine = loom.engine
    if engine.store.in_transaction():
        raise OpenTransactionError(
            "prune", "all that it deletes would stay locked until its end", "Call it after the block."
        )
    given = engine.settings().RETENTION if ages is None else ages
    run = _Run(engine, given, archive, pins, batch_size, dry_run, report)
    run.all()
    return run.summary()


# What is known of families.


class _Unreadable(Exception):
    """A log that cannot be folded."""

    def __init__(self, execution_id: str, why: str) -> None:
        super().__init__(execution_id, why)
        self.execution_id = execution_id
        self.why = why


@dataclass(frozen=True, slots=True)
class _Parent:
    """What a chain needs of its children: the ids whose end its newest member has not recorded yet."""

    needs: frozenset[str]
    problem: _Unreadable | None = None


class _Known(OrderedDict[str, _T]):
    """What was found out lately."""

    def remember(self, key: str, find: Callable[[], _T]) -> _T:
        if key not in self:
            self[key] = find()
            if len(self) > _REMEMBERED:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


class Families:
    """Reads logs, and tells what parents still need."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._parents: _Known[_Parent] = _Known()

    def read(self, execution_id: str) -> tuple[tuple[Event, ...], ExecutionState]:
        store = self.engine.store
        try:
            events = tuple(store.read(execution_id))
            return events, fold(events)
        except Exception as exc:
            if isinstance(exc, StoreUnavailableError) or store.is_connection_lost(exc):
                raise
            raise _Unreadable(execution_id, f"its log cannot be read: {exc}") from exc

    def needs(self, parent: str) -> frozenset[str]:
        """The children that a parent has started and not seen the end of; none once it has ended, or is gone.

        A child leaves this set once and for all: with the fact in the parent's log that tells its end, or with
        the end of that log. So an old answer is never too small.

        Raises:
            _Unreadable: its log, or that of the newest of its chain.
        """
        known = self._parents.remember(parent, lambda: self._look(parent))
        if known.problem is not None:
            raise known.problem
        return known.needs

    def _look(self, parent: str) -> _Parent:
        """Of a chain the newest is asked: it cannot wait for what its predecessors have started."""
        newest = self.engine.store.newest(parent)
        try:
            _, state = self.read(newest.id if newest is not None else parent)
        except _Unreadable as problem:
            return _Parent(frozenset(), problem)
        if state.finished or not state.last_sequence:
            return _Parent(frozenset())
        handed_on = state.options.get("children", ())
        return _Parent(frozenset(state.children.keys() - handed_on) | frozenset(_waited_for(state)))


def _waited_for(state: ExecutionState) -> Iterator[str]:
    for wait in state.pending_waits:
        if wait.on == ON_CHILD:
            yield from wait.children


def pin_parked_children(families: Families) -> Pin:
    """Keeps a child for as long as its parent lives and has not recorded how it ended.

    That is while the parent is parked on it, and also before it parks and after it was woken: in all of that time
    the parent's body may still look at the child's log.
    """

    def pin_parked_children(finished: Finished, /) -> bool:
        parent = finished.parent
        return parent is not None and not finished.ids.isdisjoint(families.needs(parent))

    return pin_parked_children


# One run.


@dataclass(frozen=True, slots=True)
class _Unit:
    """A chain that may go: the logs of its members, oldest first."""

    logs: tuple[tuple[Event, ...], ...]
    finished: Finished
    pinned: str = ""

    @property
    def size(self) -> int:
        return sum(len(event.body) for events in self.logs for event in events)


@dataclass
class _Run:
    engine: Engine
    ages: Mapping[str, float | None]
    archive: Storage | None
    pins: Sequence[Pin]
    batch_size: int
    dry_run: bool
    report: Callable[[Summary], None]

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("scanned", "removed", "archived", "kept", "changed"), 0)
    )
    pinned: list[tuple[str, str]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    batch: list[_Unit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = self.engine.store
        self.now = self.store.now()
        self.families = Families(self.engine)
        self.pins = [pin_parked_children(self.families), *self.pins]
        self._broken: _Known[str] = _Known()  # per family: what went wrong in it, "" for nothing
        self._blocking = list(_foreign_keys())

    def summary(self) -> Summary:
        return Summary(
            **self.counts,
            pinned=tuple(self.pinned),
            failures=tuple(self.failures.items()),
            archives=tuple(self.written),
            dry_run=self.dry_run,
        )

    def all(self) -> None:
        for status, age in self.ages.items():
            if age is not None:
                self._all_of(Status(status), self.now - timedelta(seconds=age))
        self._flush()

    def _all_of(self, status: Status, before: datetime) -> None:
        after: tuple[datetime, str] | None = None
        while page := self.store.ended_before(status, before, after=after, limit=_PAGE):
            for row in page:
                self._consider(row)
                if row.finished_at is not None:
                    after = (row.finished_at, row.id)

    def _consider(self, row: Ended) -> None:
        if row.status is Status.CONTINUED and row.id == row.chain:
            return  # a chain is addressed by its first id for as long as it lives
        self.counts["scanned"] += 1
        unit = self._judge(row)
        if unit is None or self._family_is_broken(row, unit):
            self.counts["kept"] += 1
            return
        if unit.pinned:
            self.pinned.append((row.id, unit.pinned))
            return
        if self._is_blocked(unit.finished):
            self.counts["kept"] += 1
            return
        self.batch.append(unit)
        if len(self.batch) >= self.batch_size or sum(one.size for one in self.batch) >= MOST_BYTES:
            self._flush()

    def _judge(self, row: Ended) -> _Unit | None:
        """The chain whose newest member this is, or the member that it was continued from, by itself; with the pin
        that keeps it. None, and told, if that is unknown.
        """
        try:
            alone = row.status is Status.CONTINUED
            members = [row.id] if alone else [member.id for member in self.store.chain_members(row.id)]
            logs = [self.families.read(member) for member in members]
            finished = Finished(tuple(state for _, state in logs))
            if problem := self._disagreement(row, finished):
                raise _Unreadable(row.id, problem)
            unit = _Unit(tuple(events for events, _ in logs), finished)
            return _Unit(unit.logs, finished, self._pin_of(finished))
        except _Unreadable as problem:
            self._fail(problem.execution_id, problem.why)
            return None

    def _disagreement(self, row: Ended, finished: Finished) -> str:
        """What speaks against taking the row's word; the log is the truth."""
        if not finished.members:
            return "it was removed meanwhile"
        if any(not member.finished for member in finished.members):
            return "its row says that it has ended, its log, or that of its chain, does not: see loom_verify"
        return ""

    def _is_blocked(self, finished: Finished) -> bool:
        """True, and told, if the database would refuse to delete it."""
        alias = self.engine.settings().DATABASE
        names = []
        for name, key in self._blocking:
            rows: models.QuerySet[Any] = models.QuerySet(key.model).using(alias)
            if rows.filter(**{f"{key.name}__in": finished.ids}).exists():
                names.append(name)
        if names:
            self._fail(finished.id, f"rows of {', '.join(names)} refer to it by a foreign key")
        return bool(names)

    def _pin_of(self, finished: Finished) -> str:
        """The name of the first pin that keeps it, or ""."""
        for pin in self.pins:
            name = str(getattr(pin, "__name__", None) or type(pin).__name__)
            try:
                if pin(finished):
                    return name
            except _Unreadable:
                raise
            except Exception as exc:
                if isinstance(exc, StoreUnavailableError) or self.store.is_connection_lost(exc):
                    raise
                raise _Unreadable(finished.id, f"the pin {name} failed: {exc}") from exc
        return ""

    def _family_is_broken(self, row: Ended, unit: _Unit) -> bool:
        """True if anything of the families that it belongs to, as a child and as a parent, cannot be judged."""
        heads = [*unit.finished.ids, *([unit.finished.parent] if unit.finished.parent else [])]
        judged = (self._broken.remember(head, partial(self._look_over, head)) for head in heads)
        return any(judged)

    def _look_over(self, head: str) -> str:
        """Judge a parent and all of its children that are old enough."""
        children = [child for child in self._children(head) if self._is_due(child)]
        if not children:
            return ""
        try:
            self.families.needs(head)
        except _Unreadable as problem:
            self._fail(problem.execution_id, f"{problem.why}; its family is kept")
            return problem.why
        due = [*children, *filter(self._is_due, self.store.chain_members(head))]
        if all(self._judge(one) is not None for one in due):
            return ""
        return "one of its family could not be judged"

    def _children(self, head: str) -> Iterator[Ended]:
        after = ""
        while page := self.store.children(head, after=after, limit=_PAGE):
            yield from page
            after = page[-1].id

    def _is_due(self, row: Ended) -> bool:
        age = self.ages.get(str(row.status))
        if age is None or row.finished_at is None or row.status is Status.CONTINUED:
            return False
        return row.finished_at < self.now - timedelta(seconds=age)

    def _fail(self, execution_id: str, why: str) -> None:
        if execution_id not in self.failures:
            self.failures[execution_id] = why
            log.error("retention keeps an execution: %s", why, extra={"execution_id": execution_id})

    # Doing it.

    def _flush(self) -> None:
        batch, self.batch = self.batch, []
        if not batch:
            return
        if self.dry_run:
            count = sum(len(unit.logs) for unit in batch)
            self.counts["removed"] += count
            self.counts["archived"] += count if self.archive is not None else 0
        elif self.archive is None:
            self._delete_all(batch)
        else:
            whole = [one for unit in batch for one in self._whole(unit)]
            if whole:
                self.written.append(archives.write(self.archive, whole, self.now.date()))
                self.counts["archived"] += self._delete_all(batch)
        self.report(self.summary())

    def _whole(self, unit: _Unit) -> Iterator[archives.Whole]:
        for events in unit.logs:
            decided = self.store.decided(events[0].execution_id)
            if decided is not None:  # somebody else has removed it
                yield archives.Whole(events, decided)

    def _delete_all(self, batch: Sequence[_Unit]) -> int:
        before = self.counts["removed"]
        for unit in batch:
            self._delete(unit)
        return self.counts["removed"] - before

    def _delete(self, unit: _Unit) -> None:
        """Oldest member first: a run that dies in between finds the chain again by its newest."""
        for events in unit.logs:
            last = events[-1]
            try:
                gone = self.store.delete_execution(last.execution_id, last=last)
            except IntegrityError as exc:
                self._fail(last.execution_id, f"the database refuses to delete its row: {exc}")
                return
            if not gone:
                self.counts["changed"] += 1
                return
            self.counts["removed"] += 1


def _foreign_keys() -> Iterator[tuple[str, Any]]:
    """The project's foreign keys to executions: a row behind one would make the database refuse a deletion."""
    relation: Any
    for relation in Execution._meta.get_fields(include_hidden=True):
        if relation.auto_created and getattr(relation.field, "db_constraint", False):
            yield f"{relation.field.model._meta.label}.{relation.field.name}", relation.field
