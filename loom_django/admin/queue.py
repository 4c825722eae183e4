"""The queue of effects in doubt: the home of the console, oldest question first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

from django.db.models import Q

from loom_django.engine.core import from_micros
from loom_django.kernel.events import Kind
from loom_django.models import Event, Execution

PAGE: Final = 50
# A doubt stands at the end of its log, before the park that it caused and what was noted since.
TAIL: Final = 100


@dataclass(frozen=True, slots=True)
class Doubt:
    """One row of the queue. ``settled`` if no verdict can be given any more: its execution has ended."""

    execution: Execution
    step: str
    sequence: int | None
    key: str
    cause: str
    since: Any
    attempts: str

    @property
    def settled(self) -> bool:
        return self.execution.is_finished


def doubts(*, flow: str = "", after: str = "") -> tuple[list[Doubt], str]:
    """A page of the queue, and the mark to give as ``after`` for the next one ('' if this was the last).

    Two queries, whatever the page holds; no log is read but its end.
    """
    rows = Execution.objects.in_doubt().order_by("created_at", "pk")
    if flow:
        rows = rows.filter(flow_id=flow)
    rows = _behind(rows, after)
    executions: list[Execution] = list(rows.defer("attributes", "error_message")[: PAGE + 1])
    shown = executions[:PAGE]
    facts = _facts(shown)
    found = [doubt for execution in shown for doubt in _doubts_of(execution, facts)]
    more = len(executions) > PAGE
    return found, shown[-1].pk if more else ""


def _behind(rows: Any, after: str) -> Any:
    """What comes after an execution in the queue; all of it, if that one is gone."""
    mark = Execution.objects.filter(pk=after).values_list("created_at", flat=True).first() if after else None
    if mark is None:
        return rows
    return rows.filter(Q(created_at__gt=mark) | Q(created_at=mark, pk__gt=after))


def _facts(executions: Sequence[Execution]) -> dict[tuple[str, str], tuple[int, dict[str, Any]]]:
    """The newest EFFECT_INDOUBT of each step in the ends of these logs."""
    if not executions:
        return {}
    ends: Iterable[Q] = (
        Q(execution_id=execution.pk, sequence__gt=execution.last_sequence - TAIL) for execution in executions
    )
    rows = Event.objects.filter(reduce(or_, ends), kind=Kind.EFFECT_INDOUBT).order_by(
        "execution_id", "sequence"
    )
    return {(row.execution_id, row.data["step"]): (row.sequence, row.data) for row in map(_parsed, rows)}


@dataclass(frozen=True, slots=True)
class _Parsed:
    execution_id: str
    sequence: int
    data: dict[str, Any]


def _parsed(row: Event) -> _Parsed:
    return _Parsed(row.execution_id, row.sequence, json.loads(row.payload))


def _doubts_of(
    execution: Execution, facts: dict[tuple[str, str], tuple[int, dict[str, Any]]]
) -> Iterable[Doubt]:
    """The doubts that wait for a verdict; of an execution that has ended, those that its log ends with."""
    waits = {wait["key"]: wait for wait in execution.pending_waits if wait["id"].startswith("in-doubt:")}
    steps = list(waits) or [step for pk, step in facts if pk == execution.pk]
    for step in steps:
        sequence, data = facts.get((execution.pk, step), (None, {}))
        wait = waits.get(step)
        since = wait["since"] if wait else data.get("at")
        yield Doubt(
            execution=execution,
            step=step,
            sequence=sequence,
            key=data.get("key", ""),
            cause=data.get("cause", ""),
            since=from_micros(since) if since else None,
            attempts=wait["id"].rpartition(":")[2] if wait else "",
        )
