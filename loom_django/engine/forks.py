"""A new execution over a copied beginning of another one's log.

What the copy holds is served, not done again; from the chosen step on the new execution does everything itself,
under its own id and so under its own idempotency keys. The source is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from loom_django.definitions import Flow
from loom_django.engine.code import flow_for, graph_of
from loom_django.engine.core import Engine, new_execution_id, random_token
from loom_django.engine.journal import Journal
from loom_django.engine.outside import load_existing
from loom_django.engine.start import Started, check_startable, deadline_timer, row_of_start
from loom_django.errors import ExecutionConflictError, InvalidInputError
from loom_django.kernel.events import AUDIT, TERMINAL, Event, Kind, pack
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import HISTORY_DECISION, Status
from loom_django.stores.base import Ownership, SequenceOccupied

# Not of the copy's own: it has no parent and no chain, was started by no schedule, and its time begins anew.
_NOT_INHERITED = (
    "parent", "on_parent_close", "scheduled_at", "start_at", "deadline", "chain", "link", "children",
)  # fmt: skip

# Of the events that say which code goes on, the newest counts; the prefix of their fields.
_SAY_THE_CODE: Final[Mapping[str, str]] = {Kind.EXECUTION_STARTED: "", Kind.EXECUTION_MIGRATED: "to_"}


def fork(
    engine: Engine,
    execution_id: str,
    from_step: str,
    ownership: Ownership,
    *,
    new_id: str | None = None,
    flow: Flow[..., Any] | None = None,
    principal: str | None = None,
    reason: str = "",
) -> Started:
    """Start an execution that has everything of another one's log before a step was first begun.

    Raises:
        ExecutionNotFoundError: there is no such execution.
        InvalidInputError: it never began that step; children of it were started before whose end is not known
            there; the flow is another one, or pinned.
        ExecutionConflictError: the new id is taken, and not by this same fork.
        FlowCodeMismatchError: without ``flow``: no registered version is the recorded one.
    """
    events = load_existing(engine, execution_id).events
    place = _begun_at(events, from_step)
    if place is None:
        begun = dict.fromkeys(event.data["step"] for event in events if event.kind == Kind.STEP_STARTED)
        raise InvalidInputError(
            f"{execution_id!r} has never begun step {from_step!r}; it has begun {', '.join(begun) or 'none'}"
        )
    return _Copy(engine, events[:place], flow, principal, reason, from_step).start(new_id, ownership)


def rerun(
    engine: Engine,
    execution_id: str,
    ownership: Ownership,
    *,
    new_id: str | None = None,
    principal: str | None = None,
    reason: str = "",
) -> Started:
    """Start a failed execution again as a new one, from the step that it failed with, or from its end.

    Raises:
        InvalidInputError: it has not failed; its compensations have run. For the rest see :func:`fork`.
    """
    events = load_existing(engine, execution_id).events
    end = next((event for event in events if event.kind in TERMINAL), None)
    if end is None or end.kind != Kind.EXECUTION_FAILED:
        raise InvalidInputError(f"{execution_id!r} has not failed: fork it from a step, or start another one")
    undone = next((event.data["step"] for event in events if event.data.get("undoes")), None)
    if undone is not None:
        raise InvalidInputError(
            f"{execution_id!r} was undone by its compensations, {undone!r} first: what it had done would be served "
            f"as if it stood. Start another one, or fork it from the first step that is to be done anew"
        )
    step = end.data["error"].get("step")
    if step is not None and _begun_at(events, step) is not None:
        return fork(engine, execution_id, step, ownership, new_id=new_id, principal=principal, reason=reason)
    return _Copy(engine, events[: end.sequence - 1], None, principal, reason, None).start(new_id, ownership)


def _begun_at(events: Sequence[Event], step_id: str) -> int | None:
    """The place of the first STEP_STARTED of a step."""
    places = (
        place
        for place, event in enumerate(events)
        if event.kind == Kind.STEP_STARTED and event.data["step"] == step_id
    )
    return next(places, None)


class _Copy:
    def __init__(
        self,
        engine: Engine,
        events: Sequence[Event],
        flow: Flow[..., Any] | None,
        principal: str | None,
        reason: str,
        from_step: str | None,
    ) -> None:
        self.engine = engine
        self.flow = flow
        self.events = [event for event in events if not _is_left_out(event)]
        self.source = events[0].execution_id
        self.fold = _folded(self.source, self.events)
        self.lineage = {
            "execution": self.source,
            "step": from_step,
            "principal": principal,
            "reason": reason or None,
        }
        target = flow or flow_for(engine, self.fold)
        if target.id != self.fold.flow_id:
            raise InvalidInputError(
                f"{self.source!r} is one of flow {self.fold.flow_id!r}, not {target.id!r}"
            )
        check_startable(target)
        if unknown := self.fold.children.keys() - set(self.fold.options.get("children", ())):
            raise InvalidInputError(
                f"children of {self.source!r} had been started by then whose end it did not know: "
                f"{', '.join(sorted(unknown))}. Fork from a step before they were started, or behind their wait"
            )
        if self.fold.status is Status.SUSPENDED:
            raise InvalidInputError(
                f"{self.source!r} is parked there: answer it, or fork from an earlier step"
            )

    def start(self, new_id: str | None, ownership: Ownership) -> Started:
        engine = self.engine
        execution_id = new_id or new_execution_id()
        engine.store.check_clock()
        journal = Journal(engine, Fold(), fence=None, writer=random_token())
        options = self._options(journal)
        code = next(event for event in reversed(self.events) if event.kind in _SAY_THE_CODE)
        for event in self.events:
            fields = event.data
            if event is code and self.flow is not None:
                fields = {**fields, **_code_of(self.flow, _SAY_THE_CODE[event.kind])}
            if event.kind == Kind.EXECUTION_STARTED:
                fields = {**fields, "options": options}
            elif event.kind == Kind.CHILD_STARTED:
                fields = {**fields, "on_parent_close": "abandon"}  # they are the source's
            body = event.body if fields is event.data else pack(fields)
            self._copy(journal, event, body, execution_id)
        new = row_of_start(options, execution_id)
        timers = deadline_timer(execution_id, new)
        try:
            journal.land(ownership=ownership, new=new, timers=timers, pass_notes=False)
        except SequenceOccupied:
            self._check_same(execution_id)
            return Started(execution_id, self.fold.flow_id, False)
        if new_id is not None:
            journal.fence = engine.store.fence(execution_id) or None
        return Started(execution_id, self.fold.flow_id, True, journal)

    def _copy(self, journal: Journal, event: Event, body: str, execution_id: str) -> None:
        copied = replace(
            event,
            execution_id=execution_id,
            sequence=journal.fold.last_sequence + 1,
            body=body,
            fence=None,
            writer=journal.writer,
            recorded_at=None,
        )
        journal.fold.apply(copied)
        journal.kept.append(copied)

    def _options(self, journal: Journal) -> dict[str, Any]:
        """The source's, as far as they are the copy's too, with its lineage."""
        source = self.fold.options
        options = {name: value for name, value in source.items() if name not in _NOT_INHERITED}
        if source.get("deadline") is not None:
            # As long from now on as the source had from its start.
            began = source.get("start_at") or self.fold.started_at
            options["deadline"] = journal.stamp() + source["deadline"] - began
        options["forked_from"] = {name: value for name, value in self.lineage.items() if value is not None}
        return options

    def _check_same(self, execution_id: str) -> None:
        events = self.engine.store.read(execution_id, limit=1)
        there = (events[0].data.get("options") or {}).get("forked_from") if events else None
        if there is None or any(there.get(name) != self.lineage[name] for name in ("execution", "step")):
            raise ExecutionConflictError(execution_id, "lineage")


def _code_of(flow: Flow[..., Any], prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}version": flow.version,
        f"{prefix}hash": flow.flow_hash,
        f"{prefix}code": flow.code_hash,
        f"{prefix}graph": graph_of(flow),
    }


def _is_left_out(event: Event) -> bool:
    """Notes of others, and that the source's log was full: how long the copy's may be is told anew."""
    return event.kind in AUDIT or event.data.get("decision") == HISTORY_DECISION


def _folded(execution_id: str, events: Sequence[Event]) -> Fold:
    """The events in new sequences, since notes of others are left out, folded."""
    fold = Fold()
    for number, event in enumerate(events, 1):
        fold.apply(replace(event, sequence=number))
    fold.execution_id = execution_id
    return fold
