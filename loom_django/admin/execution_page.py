"""One execution, read once: what its log says, ready for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from loom_django import conf
from loom_django.admin import show, timeline
from loom_django.admin.show import Payload, Viewer
from loom_django.engine.core import to_micros
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.fold import fold
from loom_django.kernel.state import ON_MESSAGE, ON_VERDICT, ExecutionState, Frame, FrameStatus, is_reserved
from loom_django.models import Execution, Timer
from loom_django.services.operators import about

LOG_PAGE: Final = 50
TIMERS: Final = 50


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, as the table shows it."""

    frame: Frame
    key: str
    began: Any
    took: str
    args: Payload | None
    output: Payload | None
    error: str

    @property
    def in_doubt(self) -> bool:
        return self.frame.status is FrameStatus.IN_DOUBT


@dataclass(frozen=True, slots=True)
class WaitRow:
    """One wait of the newest park."""

    id: str
    on: str
    words: str
    since: Any
    for_: str
    step: str  # of a verdict
    is_own: bool  # the flow's own, which ``resume`` answers
    message: str  # the name of the message that it receives


@dataclass(frozen=True, slots=True)
class LogRow:
    """One event, as the log shows it."""

    event: Event
    at: Any
    since_last: str
    subject: str
    principal: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class LogPage:
    rows: list[LogRow]
    kinds: list[str]
    kind: str
    older: int | None
    newer: int | None


class ExecutionPage:
    """Everything that the page of one execution shows of its log."""

    def __init__(self, events: Sequence[Event], viewer: Viewer, row: Execution) -> None:
        self.events = events
        self.viewer = viewer
        self.row = row
        self.state: ExecutionState = fold(events)
        self.now = to_micros(timezone.now())

    @cached_property
    def timers(self) -> list[Timer]:
        """The wakes that are owed to it, soonest first."""
        return list(Timer.objects.filter(execution_id=self.row.pk).order_by("wake_at")[:TIMERS])

    @property
    def end(self) -> int:
        return self.state.finished_at or max(self.now, self.state.at)

    @property
    def took(self) -> str:
        return show.span((self.end - self.state.started_at) / 1_000_000)

    @property
    def chain(self) -> list[tuple[Any, str | None]]:
        """Its neighbours in the chain that it belongs to, if it does to one."""
        return [
            (_("Continues"), self.state.predecessor),
            (_("Continued as"), self.state.successor),
            (_("First of the chain"), self.state.chain if self.state.options.get("link", 1) > 2 else None),
        ]

    @property
    def long_log(self) -> int | None:
        """How many events its log may have, if there is reason to say so."""
        settings = conf.get_settings()
        return settings.HISTORY_MAX_EVENTS if len(self.events) >= settings.HISTORY_WARN_EVENTS else None

    @property
    def input(self) -> Payload:
        return self.viewer.payload(self.state.input, "input")

    @property
    def attributes(self) -> Payload | None:
        return self.viewer.payload(self.row.attributes, "attributes") if self.row.attributes else None

    @property
    def children(self) -> list[str]:
        """The ids of its children, in the order in which they were started."""
        return [event.data["child"] for event in self.events if event.kind == Kind.CHILD_STARTED]

    @property
    def result(self) -> Payload | None:
        if self.state.status != "COMPLETED":
            return None
        return self.viewer.payload(self.state.result, "result")

    @property
    def error(self) -> dict[str, Any] | None:
        """How the execution failed, or what it is parked on."""
        error = self.state.error or self._parked_error()
        return None if error is None else described(error, self.viewer)

    def _parked_error(self) -> Any:
        park = self.state.park_sequence
        return self.events[park - 1].data.get("error") if park else None

    @property
    def drawing(self) -> timeline.Drawing | None:
        lanes = timeline.lanes_of(self.events)
        return timeline.draw(lanes, self.state.started_at, self.end) if lanes else None

    @property
    def steps(self) -> list[StepRow]:
        return [self._step(frame) for frame in self.state.frames.values()]

    def _step(self, frame: Frame) -> StepRow:
        ended = frame.finished_at or (self.end if frame.status is FrameStatus.RUNNING else 0)
        done = frame.status is FrameStatus.COMPLETED
        return StepRow(
            frame=frame,
            key=frame.idempotency_key(self.state.execution_id),
            began=show.when_micros(frame.started_at),
            took=show.span((ended - frame.started_at) / 1_000_000) if ended and frame.started_at else "",
            args=None if frame.args is None else self.viewer.payload(frame.args, f"step:{frame.tool}:args"),
            output=self.viewer.payload(frame.output, f"step:{frame.tool}:output") if done else None,
            error=one_line(frame.error) if frame.error else "",
        )

    @property
    def waits(self) -> list[WaitRow]:
        return [
            WaitRow(
                id=wait.id,
                on=wait.on,
                words=show.wait_in_words(
                    wait.on, wait.correlation_key, wait.wake_at, wait.budget, len(wait.children)
                ),
                since=show.when_micros(wait.since),
                for_=show.span((self.now - wait.since) / 1_000_000),
                step=str(wait.correlation_key) if wait.on == ON_VERDICT else "",
                is_own=not is_reserved(wait.on),
                message=str(wait.correlation_key) if wait.on == ON_MESSAGE else "",
            )
            for wait in self.state.pending_waits
        ]

    def waits_until(self, moment: datetime) -> str:
        """What ends at this time, in words; '' if nothing that is waited for does."""
        wake_at = to_micros(moment)
        ends = [wait for wait in self.state.pending_waits if wait.wake_at == wake_at]
        return ", ".join(
            show.wait_in_words(wait.on, wait.correlation_key, None, children=len(wait.children))
            for wait in ends
        )

    @property
    def forked_from(self) -> dict[str, Any] | None:
        """The ``execution`` that this one is a copy of, with ``step``, ``principal`` and ``reason`` where there is one."""
        lineage: dict[str, Any] | None = self.state.options.get("forked_from")
        return lineage

    @property
    def acts(self) -> list[LogRow]:
        """What people did, or were not permitted to do."""
        by_people = ((place, event) for place, event in enumerate(self.events) if event.data.get("principal"))
        return [self._row(event, place) for place, event in by_people]

    def log(self, after: int | None, kind: str) -> LogPage:
        """A page of the log by sequence; the newest one if ``after`` is None."""
        chosen = [event for event in self.events if not kind or event.kind == kind]
        if after is None:
            first = max(0, len(chosen) - LOG_PAGE)
        else:
            first = sum(1 for event in chosen if event.sequence <= after)
        shown = chosen[first : first + LOG_PAGE]
        before = max(0, first - LOG_PAGE)
        return LogPage(
            rows=[self._row(event, event.sequence - 1) for event in shown],
            kinds=sorted({event.kind for event in self.events}),
            kind=kind,
            older=(chosen[before].sequence - 1) if first else None,
            newer=shown[-1].sequence if shown and first + LOG_PAGE < len(chosen) else None,
        )

    def _row(self, event: Event, place: int) -> LogRow:
        data = event.data
        at = data.get("at", 0)
        last = self.events[place - 1].data.get("at", 0) if place else 0
        details = [_in_words(name, value) for name, value in about(event) if name != "principal"]
        return LogRow(
            event=event,
            at=show.when(event.recorded_at) or show.when_micros(at),
            since_last=f"+{show.span((at - last) / 1_000_000)}" if last and at else "",
            subject=show.printable(" · ".join(details)),
            principal=show.printable(str(data.get("principal") or "")),
            payload=self.viewer.payload(data, f"event:{event.kind}"),
        )


def described(error: Any, viewer: Viewer) -> dict[str, Any]:
    """A recorded failure: its type and message for all who may look, the traceback as a payload."""
    return {
        "type": str(error.get("type", "")),
        "message": message_of(error),
        "traceback": viewer.text(error.get("traceback", ""), "traceback"),
        "step": error.get("step", ""),
        "expected": [show.printable(str(step)) for step in error.get("expected", ())],
        "seen": show.printable(str(error.get("seen", ""))),
        "source_line": show.printable(str(error.get("source_line", ""))),
    }


def _in_words(name: str, value: Any) -> str:
    """What an event is about, as the project lets it be seen."""
    match name:
        case "waits":
            return ", ".join(map(show.wait_of, value))
        case "cause":
            return str(show.redacted(value, "cause"))
        case "error":
            return one_line(value)[:120]
    return str(value)


def message_of(error: Any) -> str:
    value = show.redacted(error.get("message", ""), "error")
    return show.printable(value) if isinstance(value, str) else show.to_text(value)


def one_line(error: Any) -> str:
    return f"{error.get('type', '')}: {message_of(error)}"[:300]
