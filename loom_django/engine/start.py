"""Starting: one commit makes the log, the row and its owner; the id makes it idempotent.

The same id with the same flow and input is the same execution. What "same" means: the arguments bound to the
signature, encoded canonically, byte for byte; version and options do not count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from loom_django.conf import DEFAULT_QUEUE
from loom_django.definitions import Flow, Options
from loom_django.engine.code import graph_of
from loom_django.engine.core import Engine, from_micros, new_execution_id, random_token, to_micros
from loom_django.engine.journal import Journal, Opening
from loom_django.errors import (
    ExecutionConflictError,
    InvalidInputError,
    StoreUnavailableError,
    shown,
)
from loom_django.kernel import codec, keys
from loom_django.kernel.durations import seconds
from loom_django.kernel.events import Encoded, Kind
from loom_django.kernel.fold import Fold
from loom_django.stores.base import READY, Commit, NewExecution, Ownership, SequenceOccupied, TimerRow

# A start that meets an id whose holder rolls back is tried again.
ATTEMPTS: Final = 5

MAX_ATTRIBUTE_DEPTH: Final = 100

# What the columns of the subject hold.
MAX_SUBJECT_TYPE: Final = 100
MAX_SUBJECT_ID: Final = 255

# Dates from the year 9999 on, in microseconds, are not told as a date in every time zone.
_LATEST: Final = to_micros(datetime(9999, 1, 1, tzinfo=UTC))


@dataclass(frozen=True, slots=True)
class Started:
    """An execution that exists: made by this call, or before it."""

    execution_id: str
    flow_id: str
    created: bool
    journal: Journal | None = None
    later: bool = False  # its time has not come: it is ready from then on, and nobody runs it now


def start(
    engine: Engine,
    flow: Flow[..., Any],
    given: Mapping[str, Any],
    options: Options,
    ownership: Ownership,
    *,
    scheduled_at: datetime | None = None,
    at_once: bool = False,
) -> Started:
    """Write the start of an execution, or find the one that has its id.

    With ``at_once`` the caller runs the body now, in this thread: a start that nobody else can know of lands with the
    body's first facts, in one append, and the caller has it opened alone where the body has none. Not where a deadline
    may end it before, nor where a receiver of ``execution_started`` is to be heard before the body.

    An occurrence of a schedule, ``scheduled_at``, is settled by any execution that has its id: nodes of two
    releases may start it with other arguments, and the first one is right.

    Raises:
        InvalidInputError: the flow is pinned, or an option cannot be used: a queue that is not declared is one.
        UnencodableValueError, PayloadTooLargeError: the input or the attributes cannot be recorded.
        ExecutionConflictError: the id is another flow's, or another input's.
    """
    check_startable(flow)
    check_queue(engine, options.queue)
    execution_id = options.execution_id or new_execution_id()
    engine.store.check_clock()
    for _ in range(ATTEMPTS):
        journal = Journal(engine, Fold(), fence=None, writer=random_token())
        fields, new = _facts(engine, journal, flow, given, options, execution_id, scheduled_at)
        journal.record(Kind.EXECUTION_STARTED, fields, execution_id=execution_id)
        timers = deadline_timer(execution_id, new)
        later = new.not_before is not None
        owned = Ownership("ready", at=new.not_before) if later else ownership
        rides = at_once and options.execution_id is None and not later and not timers
        if rides and not engine.tells(tuple(journal.kept)):
            journal.opening = Opening(owned, new)
            return Started(execution_id, flow.id, True, journal)
        try:
            journal.land(ownership=owned, new=new, timers=timers, pass_notes=False)
        except SequenceOccupied:
            found = _existing(engine, flow, given, execution_id, settled=scheduled_at is not None)
            if found is not None:
                return found
            continue
        if options.execution_id is not None:
            # A deleted execution of the same id may have left a token that this one runs under.
            journal.fence = engine.store.fence(execution_id) or None
        return Started(execution_id, flow.id, True, journal, later)
    raise StoreUnavailableError(f"the id {execution_id!r} was taken and given up again and again", ATTEMPTS)


def child_start(
    engine: Engine,
    flow: Flow[..., Any],
    given: Mapping[str, Any],
    options: Options,
    execution_id: str,
    parent: str,
) -> Commit:
    """The start of a child as a commit that lands with its parent's.

    Raises: as :func:`start`, but for conflicts: the caller has looked.
    """
    check_startable(flow)
    check_queue(engine, options.queue)
    journal = Journal(engine, Fold(), fence=None, writer=random_token())
    fields, new = _facts(engine, journal, flow, given, options, execution_id, None, parent)
    journal.record(Kind.EXECUTION_STARTED, fields, execution_id=execution_id)
    owned = Ownership("ready", at=new.not_before)
    return journal.start_of(ownership=owned, new=new, timers=deadline_timer(execution_id, new))


# What a successor takes over from its predecessor's start.
_HANDED_ON: Final = (
    "subject", "attributes", "queue", "priority", "deadline", "scheduled_at", "parent", "on_parent_close",
)  # fmt: skip


def successor_start(
    engine: Engine,
    flow: Flow[..., Any],
    given: Mapping[str, Any],
    predecessor: Fold,
    execution_id: str,
    link: int,
    children: Sequence[str],
) -> Commit:
    """The start of a chain's next member as a commit that lands with its predecessor's end.

    It runs on the code that is registered now. A deadline that the chain has stays as it is; if it has none, the
    flow's own begins now. ``children`` end with the chain.

    Raises:
        InvalidInputError: the flow is pinned.
        UnencodableValueError, PayloadTooLargeError: the input cannot be recorded.
    """
    check_startable(flow)
    # Later than the predecessor's start, whatever the clock says: the newest of a chain is the one started last.
    at = max(engine.now(), predecessor.at + 1)
    options: dict[str, Any] = {
        name: predecessor.options[name] for name in _HANDED_ON if name in predecessor.options
    }
    options.setdefault("deadline", _deadline(at, flow, Options()))
    options |= {"chain": predecessor.chain, "link": link, "children": list(children) or None}
    fields = _start_fields(at, flow, options, _input(flow, given, engine.settings().MAX_PAYLOAD_BYTES))
    journal = Journal(engine, Fold(), fence=None, writer=random_token())
    journal.record(Kind.EXECUTION_STARTED, fields, execution_id=execution_id)
    new = row_of_start(journal.fold.options, predecessor.chain)
    return journal.start_of(ownership=READY, new=new, timers=deadline_timer(execution_id, new))


def check_startable(flow: Flow[..., Any]) -> None:
    """Refuse to start a version that only serves what it has.

    Raises:
        InvalidInputError: it is pinned.
    """
    if flow.pinned:
        raise InvalidInputError(
            f"version {flow.version} is pinned: it serves the executions it has and starts no new ones",
            flow.id,
        )


def check_queue(engine: Engine, queue: str | None) -> None:
    """Refuse a queue that no worker could have been told of.

    Raises:
        InvalidInputError: it is not in ``LOOM["QUEUES"]``.
    """
    if queue is None:
        return
    declared = engine.settings().queues
    if queue not in declared:
        raise InvalidInputError(
            f'queue={shown(queue)} is not declared: add it to LOOM["QUEUES"], or take one of '
            f"{', '.join(map(repr, declared))}"
        )


def start_time(options: Options, now: int) -> int | None:
    """From when on the body may be run, in microseconds; None if that is now.

    Raises:
        InvalidInputError: it lies outside the years that every database takes.
    """
    if options.start_at is None:
        return None
    micros = to_micros(options.start_at)
    _check_years(micros, f"start_at={shown(options.start_at)}")
    return micros if micros > now else None


def _check_years(micros: int, what: str) -> None:
    if not 0 <= micros < _LATEST:
        raise InvalidInputError(f"{what} must lie between the years 1970 and 9999: leave it out for none")


def _existing(
    engine: Engine, flow: Flow[..., Any], given: Mapping[str, Any], execution_id: str, *, settled: bool
) -> Started | None:
    events = engine.store.read(execution_id, limit=1)
    if not events:
        return None
    recorded = events[0].data
    if settled:
        return Started(execution_id, recorded["flow"], False)
    if recorded["flow"] != flow.id:
        raise ExecutionConflictError(execution_id, f"flow ({recorded['flow']})")
    if codec.canonical(codec.decode(recorded.get("input"))) != codec.canonical(dict(given)):
        raise ExecutionConflictError(execution_id, "input")
    return Started(execution_id, flow.id, False)


def _facts(
    engine: Engine,
    journal: Journal,
    flow: Flow[..., Any],
    given: Mapping[str, Any],
    options: Options,
    execution_id: str,
    scheduled_at: datetime | None,
    parent: str | None = None,
) -> tuple[dict[str, Any], NewExecution]:
    limit = engine.settings().MAX_PAYLOAD_BYTES
    attributes = _attributes(options.attributes, limit)
    now = journal.stamp()
    later = start_time(options, now)
    deadline = _deadline(later or now, flow, options)
    recorded: dict[str, Any] = {
        "subject": _subject(options.subject),
        "attributes": json.loads(attributes) if options.attributes else None,
        "queue": options.queue,
        "priority": options.priority or None,
        "start_at": later,
        "deadline": deadline,
        "scheduled_at": None if scheduled_at is None else to_micros(scheduled_at),
        "parent": parent,
        "on_parent_close": options.on_parent_close if parent is not None else None,
    }
    fields = _start_fields(now, flow, recorded, _input(flow, given, limit))
    return fields, row_of_start(recorded, execution_id)


def _start_fields(
    at: int, flow: Flow[..., Any], options: Mapping[str, Any], given: Encoded
) -> dict[str, Any]:
    """The payload of EXECUTION_STARTED."""
    return {
        "at": at,
        "flow": flow.id,
        "version": flow.version,
        "hash": flow.flow_hash,
        "code": flow.code_hash or None,
        "graph": graph_of(flow),
        "options": {name: value for name, value in options.items() if value is not None} or None,
        "input": given,
    }


def row_of_start(options: Mapping[str, Any], chain: str) -> NewExecution:
    """What the options of a start, as it records them, decide for the row."""
    subject = options.get("subject") or ("", "")
    return NewExecution(
        queue=options.get("queue") or DEFAULT_QUEUE,
        priority=options.get("priority") or 0,
        not_before=_instant(options.get("start_at")),
        deadline=_instant(options.get("deadline")),
        parent_id=options.get("parent"),
        chain=chain,
        subject_type=subject[0],
        subject_id=subject[1],
        attributes=json.dumps(options["attributes"]) if options.get("attributes") else "{}",
        scheduled_at=_instant(options.get("scheduled_at")),
    )


def _instant(micros: int | None) -> datetime | None:
    return None if micros is None else from_micros(micros)


def deadline_timer(execution_id: str, new: NewExecution) -> tuple[TimerRow, ...]:
    """The row that ends an execution whose time is up."""
    return () if new.deadline is None else (TimerRow(execution_id, new.deadline, deadline=True),)


def _input(flow: Flow[..., Any], given: Mapping[str, Any], limit: int) -> Encoded:
    """The input by parameter name; a refusal names the parameter."""
    tree = {name: codec.encode(value, path=name) for name, value in given.items()}
    return Encoded.of_tree(tree, path=f"input of flow {flow.id}", limit=limit)


def _attributes(attributes: Mapping[str, Any], limit: int) -> str:
    """Attributes are plain JSON, so that the database can filter by them."""
    if not attributes:
        return "{}"
    try:
        text = json.dumps(dict(attributes), allow_nan=False)
        tree = json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(f"attributes= must be plain JSON values: {exc}") from None
    if len(text) > limit:
        raise InvalidInputError(f"attributes= has {len(text)} bytes, {limit} are allowed")
    _check_tree(tree, 0)
    return text


def _check_tree(tree: Any, depth: int) -> None:
    """Refuse texts, keys and integers that a database or a parser does not take as they are, and what is nested too
    deep to be read again."""
    if depth > MAX_ATTRIBUTE_DEPTH:
        raise InvalidInputError(
            f"attributes= is nested deeper than {MAX_ATTRIBUTE_DEPTH} levels: pass flat values"
        )
    if isinstance(tree, str) and not keys.is_storable(tree):
        raise InvalidInputError(
            f"attributes= holds {shown(tree)}, which has a NUL or a lone surrogate: take it out, since not "
            "every database takes it"
        )
    if isinstance(tree, int) and not -(2**63) <= tree < 2**63:
        raise InvalidInputError(
            f"attributes= holds {shown(tree)}, an integer beyond 64 bits: pass it as text, since some readers of "
            "JSON make a float of it"
        )
    if isinstance(tree, dict):
        for name, value in tree.items():
            _check_tree(name, depth)
            _check_tree(value, depth + 1)
    if isinstance(tree, list):
        for value in tree:
            _check_tree(value, depth + 1)


def _subject(subject: Any) -> tuple[str, str] | None:
    if subject is None:
        return None
    meta = getattr(subject, "_meta", None)
    if meta is None or getattr(subject, "pk", None) is None:
        raise InvalidInputError(f"subject= must be a saved model instance, not {type(subject).__name__}")
    return (
        keys.check_text(meta.label_lower, "the model of subject", MAX_SUBJECT_TYPE),
        keys.check_text(str(subject.pk), "the primary key of subject", MAX_SUBJECT_ID),
    )


def _deadline(now: int, flow: Flow[..., Any], options: Options) -> int | None:
    given = options.deadline if options.deadline is not None else flow.deadline
    if given is None:
        return None
    if isinstance(given, datetime):
        if given.utcoffset() is None:
            raise InvalidInputError(f"deadline= must be aware, not {given!r}: give it a time zone")
        micros = to_micros(given)
    else:
        micros = now + round(seconds(given, "deadline") * 1_000_000)
    _check_years(micros, f"deadline={shown(given)}")
    return micros
