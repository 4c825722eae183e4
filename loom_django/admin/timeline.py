"""The life of an execution as lanes over time, and the geometry to draw them.

Lanes come from the log alone. Time in which nothing ran is drawn short, so that two days of waiting do not hide
two seconds of work. The drawing says by shape and text what it says by colour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from django.utils.translation import gettext

from loom_django.admin import show
from loom_django.kernel.events import TERMINAL, Event, Kind
from loom_django.kernel.state import ON_VERDICT

Look = Literal["done", "failed", "lost", "open", "doubt", "park"]

MOST_LANES: Final = 60
MOST_TICKS: Final = 200  # the newest of a lane

# Geometry, in the units of the drawing.
WIDTH: Final = 760
LABELS: Final = 200
ROW: Final = 26
TOP: Final = 10
BAR: Final = 14
# An idle stretch is drawn at most this long, as a share of the busy time.
IDLE_SHARE: Final = 0.15


@dataclass
class Segment:
    """A stretch of a lane, in microseconds; without an ``end`` it lasts until now."""

    start: int
    look: Look
    end: int | None = None
    note: str = ""


@dataclass
class Lane:
    """One step, one wait, or the notes of one kind that the flow emitted."""

    label: str
    is_wait: bool = False
    segments: list[Segment] = field(default_factory=list)
    ticks: list[int] = field(
        default_factory=list
    )  # failed attempts that were retried; notes of the flow's own

    def close(self, at: int, look: Look, note: str = "") -> None:
        if self.segments and self.segments[-1].end is None:
            last = self.segments[-1]
            last.end = max(at, last.start)
            last.note = note
            if last.look == "open":
                last.look = look


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    width: float
    look: Look
    title: str

    @property
    def end(self) -> float:
        return round(self.x + self.width, 1)


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    short: str
    y: int
    text_y: int
    bars: tuple[Bar, ...]
    ticks: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    width: int
    height: int
    label_x: int
    rows: tuple[Row, ...]
    breaks: tuple[tuple[float, str], ...]  # where idle time was left out, and how much
    left_out: int
    bar_height: int = BAR


class _Lanes:
    def __init__(self) -> None:
        self.by_name: dict[str, Lane] = {}

    def step(self, step_id: str) -> Lane:
        return self.by_name.setdefault(f"step {step_id}", Lane(step_id))

    def note(self, kind: str) -> Lane:
        return self.by_name.setdefault(f"note {kind}", Lane(kind))

    def wait(self, wait_id: str, label: str) -> Lane:
        return self.by_name.setdefault(f"wait {wait_id}", Lane(label, is_wait=True))

    def answered(self, wait_id: str, at: int, note: str) -> None:
        lane = self.by_name.get(f"wait {wait_id}")
        if lane is None and wait_id.startswith("in-doubt:"):
            lane = self.by_name.get(f"step {wait_id.removeprefix('in-doubt:').rpartition(':')[0]}")
        if lane is not None:
            lane.close(at, "park", note)


def lanes_of(events: Iterable[Event]) -> list[Lane]:
    """The lanes of a log, in the order in which they began."""
    lanes = _Lanes()
    for event in events:
        rule = _RULES.get(event.kind)
        if rule is not None:
            rule(lanes, event.data)
        elif not event.is_kernel:
            lanes.note(event.kind).ticks.append(event.data.get("at", 0))
        if event.kind in TERMINAL:
            for lane in lanes.by_name.values():
                lane.close(event.data["at"], "lost", gettext("ended with the execution"))
    return list(lanes.by_name.values())


def _started(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lane = lanes.step(data["step"])
    lane.close(data["at"], "lost", gettext("interrupted"))
    lane.segments.append(Segment(data["at"], "open"))


def _completed(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lanes.step(data["step"]).close(data["at"], "done", gettext("completed"))


def _failed(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lanes.step(data["step"]).close(data["at"], "failed", gettext("failed"))


def _retrying(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lane = lanes.step(data["step"])
    lane.close(data["at"], "failed", gettext("failed, to be retried"))
    lane.ticks.append(data["at"])


def _in_doubt(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lane = lanes.step(data["step"])
    lane.close(data["at"], "lost", gettext("nobody knows how it ended"))
    lane.segments.append(Segment(data["at"], "doubt"))


def _suspended(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    for wait in data["waits"]:
        if wait["on"] == ON_VERDICT:
            continue  # drawn on the step's own lane
        lane = lanes.wait(wait["id"], show.wait_of(wait))
        if not lane.segments or lane.segments[-1].end is not None:
            lane.segments.append(Segment(data["at"], "park"))


def _resumed(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    by = data.get("principal")
    note = gettext("answered by %(name)s") % {"name": by} if by else gettext("answered")
    lanes.answered(data.get("wait", ""), data["at"], note)


def _fired(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lanes.answered(data["wait"], data["at"], gettext("the time came"))


def _message(lanes: _Lanes, data: Mapping[str, Any]) -> None:
    lanes.answered(data["wait"], data["at"], gettext("a message came"))


_RULES: Final[Mapping[str, Callable[[_Lanes, Mapping[str, Any]], None]]] = {
    Kind.STEP_STARTED: _started,
    Kind.STEP_COMPLETED: _completed,
    Kind.STEP_FAILED: _failed,
    Kind.STEP_RETRYING: _retrying,
    Kind.EFFECT_INDOUBT: _in_doubt,
    Kind.EXECUTION_SUSPENDED: _suspended,
    Kind.EXECUTION_RESUMED: _resumed,
    Kind.TIMER_FIRED: _fired,
    Kind.MESSAGE_CONSUMED: _message,
}


class _Scale:
    """From a time to a place; idle stretches are shortened."""

    def __init__(self, lanes: list[Lane], start: int, end: int) -> None:
        busy = _merged(
            (segment.start, segment.end if segment.end is not None else end)
            for lane in lanes
            for segment in lane.segments
            if segment.look not in ("park", "doubt")
        )
        self.times = [start]
        self.places = [0.0]
        self.breaks: list[tuple[float, int]] = []
        most_idle = max(sum(b - a for a, b in busy), 1) * IDLE_SHARE
        for a, b in busy:
            self._add_idle(a, most_idle)
            self._add(b, b - self.times[-1])
        self._add_idle(end, most_idle)

    def _add(self, time: int, length: float) -> None:
        if time > self.times[-1]:
            self.times.append(time)
            self.places.append(self.places[-1] + length)

    def _add_idle(self, time: int, most: float) -> None:
        idle = time - self.times[-1]
        if idle > most:
            self.breaks.append((self.places[-1] + most / 2, idle))
        self._add(time, min(idle, most))

    def x(self, time: int) -> float:
        place = bisect_right(self.times, time) - 1
        if place < 0:
            return self._to_x(0.0)
        if place + 1 >= len(self.times):
            return self._to_x(self.places[-1])
        share = (time - self.times[place]) / (self.times[place + 1] - self.times[place])
        return self._to_x(self.places[place] + share * (self.places[place + 1] - self.places[place]))

    def _to_x(self, length: float) -> float:
        whole = self.places[-1] or 1.0
        return round(LABELS + length / whole * (WIDTH - LABELS - 10), 1)

    def gaps(self) -> tuple[tuple[float, str], ...]:
        return tuple((self._to_x(place), show.span(idle / 1_000_000)) for place, idle in self.breaks)


def _merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def draw(lanes: list[Lane], start: int, end: int) -> Drawing:
    """Place the newest lanes; ``start`` and ``end`` are the execution's first and last instants."""
    shown = lanes[-MOST_LANES:]
    scale = _Scale(shown, start, end)
    rows = tuple(_row(lane, number, scale, end) for number, lane in enumerate(shown))
    return Drawing(
        width=WIDTH,
        height=TOP * 2 + ROW * len(rows),
        label_x=LABELS - 8,
        rows=rows,
        breaks=scale.gaps(),
        left_out=len(lanes) - len(shown),
    )


def _row(lane: Lane, number: int, scale: _Scale, end: int) -> Row:
    y = TOP + number * ROW
    label = lane.label if len(lane.label) <= 26 else f"{lane.label[:25]}…"
    bars = tuple(_bar(segment, scale, end) for segment in lane.segments)
    return Row(
        lane.label, label, y, y + BAR - 3, bars, tuple(scale.x(tick) for tick in lane.ticks[-MOST_TICKS:])
    )


def _bar(segment: Segment, scale: _Scale, end: int) -> Bar:
    last = segment.end if segment.end is not None else max(end, segment.start)
    left, right = scale.x(segment.start), scale.x(last)
    length = show.span((last - segment.start) / 1_000_000)
    return Bar(left, max(3.0, round(right - left, 1)), segment.look, f"{_look_in_words(segment)}, {length}")


def _look_in_words(segment: Segment) -> str:
    if segment.note:
        return segment.note
    if segment.look == "doubt":
        return gettext("in doubt")
    return gettext("waiting") if segment.look == "park" else gettext("running")
