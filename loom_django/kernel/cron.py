"""Cron expressions: a strict grammar, and the instants that an expression names on a zone's wall clock.

The five fields are read on the wall clock. A wall time that a change of the offset skips is shifted forward by
the length of the gap; one that occurs twice counts at its first pass; two wall times that come to lie on one
instant are one occurrence. This holds for changes of any length, a missing day included.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Final, NoReturn
from zoneinfo import ZoneInfo

from croniter import croniter

MAX_LENGTH: Final = 255

_DAY: Final = timedelta(days=1)

# Dates are walked between these two, so that no arithmetic leaves what a date can say.
_FIRST: Final = date(2, 1, 1)
_LAST: Final = date(9998, 12, 31)

# Offsets are shorter than a day. So what lies on a date of the wall calendar lies, in UTC, between the beginning
# of the day before and the end of the day after, and two dates later everything is later.
_BEFORE: Final = _DAY
_BEHIND: Final = 2 * _DAY

_MONTHS: Final = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


class CronError(ValueError):
    """An expression, or a zone, that cannot be used: which part of it, and what to write instead."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field}={value!r} {problem}")
        self.field = field
        self.value = value
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    low: int
    high: int  # as an expression may write it; Sunday is 0 and 7
    names: dict[str, int]

    @property
    def span(self) -> int:
        return self.high - self.low + 1

    @property
    def allowed(self) -> str:
        named = f" or {next(iter(self.names))}-{list(self.names)[-1]}" if self.names else ""
        return f"{self.low} to {self.high}{named}"


_FIELDS: Final = (
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of month", 1, 31, {}),
    _Field("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    _Field("day of week", 0, 7, {name: number for number, name in enumerate(_DAYS)}),
)

_NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_SYNTAX: Final = "five fields, minute, hour, day of month, month and day of week, each *, */n, a, a-b, a-b/n or a list of these"

_ITEM: Final = re.compile(r"(?:(?P<all>\*)|(?P<a>\w+)(?:-(?P<b>\w+))?)(?:/(?P<step>\w+))?", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cron:
    """A parsed expression: what each field admits. ``weekdays`` count from Sunday, 0.

    ``either_day`` tells the rule of the two day fields: both restricted, and either is enough.
    """

    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    either_day: bool

    def admits(self, day: date) -> bool:
        """Tell if a date of the wall calendar matches the three date fields."""
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month or by_week if self.either_day else by_month and by_week


# Reading.


@lru_cache(maxsize=1024)
def parse(text: str) -> Cron:
    """Read an expression of five fields.

    Raises:
        CronError: it is none, or it names no date that ever comes; at once, without a search.
    """
    stripped = text.strip(" \t")
    if stripped.startswith("@"):
        _refuse_nickname(text, stripped)
    if len(text) > MAX_LENGTH:
        raise CronError("cron", text, f"has {len(text)} characters, {MAX_LENGTH} are allowed")
    parts = re.split(r"[ \t]+", stripped) if stripped else []
    if len(parts) != len(_FIELDS):
        _refuse_count(text, parts)
    normal = [_normal(field, part) for field, part in zip(_FIELDS, parts, strict=True)]
    expanded = croniter.expand(" ".join(normal))[0]
    minutes, hours, days, months, weekdays = (
        _numbers(field, values) for field, values in zip(_FIELDS, expanded, strict=True)
    )
    either = not parts[2].startswith("*") and not parts[4].startswith("*")
    cron = Cron(" ".join(parts), minutes, hours, days, months, weekdays, either)
    if not either and min(days) > max(map(_longest, months)):
        raise CronError(
            "cron", text, "names no date of any year: that month never has that day. Use a day that it has"
        )
    return cron


def _numbers(field: _Field, values: Iterable[int | str]) -> tuple[int, ...]:
    """What croniter made of a field; it writes a full one as ``*``, and Sunday as 0."""
    found = list(values)
    high = 6 if field.high == 7 else field.high
    if found == ["*"]:
        return tuple(range(field.low, high + 1))
    return tuple(sorted({int(value) for value in found}))


def _longest(month: int) -> int:
    """The days that a month has at most. Over 400 years each date falls on each day of the week."""
    return 29 if month == 2 else calendar.monthrange(2001, month)[1]


def _normal(field: _Field, part: str) -> str:
    """A field in numbers, checked item by item."""
    return ",".join(_normal_item(field, item, part) for item in part.split(","))


def _normal_item(field: _Field, item: str, part: str) -> str:
    matched = _ITEM.fullmatch(item)
    if matched is None or not item.isascii():
        _refuse_item(field, item, part)
    step = _step(field, matched["step"], part)
    suffix = "" if step is None else f"/{step}"
    if matched["all"]:
        return f"*{suffix}"
    low = _number(field, matched["a"], part)
    if matched["b"] is None:
        if step is not None:
            raise CronError(
                field.name, part, f"has a step without a range: write {low}-{field.high}{suffix}, or */{step}"
            )
        return str(low)
    high = _number(field, matched["b"], part)
    if high == 0 and field.high == 7 and low > 0:
        high = 7  # a range that ends on Sunday
    if low > high:
        raise CronError(
            field.name,
            part,
            f"has a range that goes down: a range a-b goes up. Write two: {low}-{field.high},"
            f"{field.low}-{high}",
        )
    # croniter 7 takes a range of one value for the whole field.
    return str(low) if low == high else f"{low}-{high}{suffix}"


def _number(field: _Field, text: str, part: str) -> int:
    if _NUMBER.fullmatch(text):
        value = int(text)
    elif text.upper() in field.names:
        value = field.names[text.upper()]
    else:
        _refuse_item(field, text, part)
    if not field.low <= value <= field.high:
        raise CronError(field.name, part, f"has {text}; {field.allowed} is allowed")
    return value


def _step(field: _Field, text: str | None, part: str) -> int | None:
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) < field.span:
        raise CronError(
            field.name,
            part,
            f"has the step {text}; a step counts within the field, from 1 to {field.span - 1}. What is rarer "
            "belongs into the field to its right",
        )
    return int(text)


def _refuse_item(field: _Field, item: str, part: str) -> NoReturn:
    upper = item.upper()
    if item == "":
        problem = "has an empty item: take the comma out, or write *"
    elif "?" in item:
        problem = "has ?: write *"
    elif "#" in item:
        problem = (
            "has #, the n-th weekday of a month, for which five fields have no word: run on the weekday and have "
            "the flow look at the date of ctx.scheduled_at"
        )
    elif upper == "L" or re.fullmatch(r"[0-9]+L|L-?[0-9]+", upper):
        problem = (
            "has L, the last day, for which five fields have no word: run on 28-31 and have the flow look at "
            "ctx.scheduled_at, or run on day 1 of the month after"
        )
    elif re.fullmatch(r"[0-9]*L?W", upper):
        problem = (
            "has W, the nearest weekday, for which five fields have no word: run on MON-FRI and have the flow "
            "look at ctx.scheduled_at"
        )
    else:
        problem = (
            f"has {item!r}, which is no item of {field.name}: *, */n, a, a-b or a-b/n, of {field.allowed}"
        )
    raise CronError(field.name, part, problem)


def _refuse_nickname(text: str, stripped: str) -> NoReturn:
    known = _NICKNAMES.get(stripped.lower())
    if known is None:
        raise CronError("cron", text, f"is a nickname that no five fields stand for; write {_SYNTAX}")
    raise CronError("cron", text, f"is a nickname; write its five fields: {known}")


def _refuse_count(text: str, parts: list[str]) -> NoReturn:
    hint = ""
    if len(parts) == 6:
        hint = f". Without seconds or year: {' '.join(parts[1:])} or {' '.join(parts[:5])}"
    raise CronError("cron", text, f"has {len(parts)} fields; write {_SYNTAX}{hint}")


def zone_of(name: str) -> ZoneInfo:
    """The zone of an IANA name.

    Raises:
        CronError: there is none of that name; ``localtime`` is none, because hosts differ in it.
    """
    try:
        if name == "localtime":
            raise ValueError(name)
        return ZoneInfo(name)
    # A folder of the zone database is no zone either; so is what no file can be called.
    except (ValueError, OSError, LookupError) as exc:
        raise CronError(
            "time_zone", name, 'is no time zone: write an IANA name, as "Europe/Berlin" or "UTC"'
        ) from exc


# Walking.


def occurrences(cron: Cron, zone: ZoneInfo, after: datetime, until: datetime) -> list[datetime]:
    """The occurrences after ``after``, up to and with ``until``, in order; aware UTC."""
    first, last = _date(after) - _BEFORE, _date(until) + _BEFORE
    found = {instant for day in _dates(cron, first, last) for instant in _instants(cron, zone, day)}
    return sorted(instant for instant in found if after < instant <= until)


def newest(cron: Cron, zone: ZoneInfo, after: datetime, until: datetime, limit: int) -> list[datetime]:
    """The last ``limit`` of :func:`occurrences`, however long ago ``after`` is; in order."""
    found: set[datetime] = set()
    enough: date | None = None
    for day in _dates_down(cron, _date(until) + _BEFORE, _date(after) - _BEFORE):
        if enough is not None and day < enough:
            break
        found |= {instant for instant in _instants(cron, zone, day) if after < instant <= until}
        if enough is None and len(found) >= limit:
            enough = day - _BEHIND
    return sorted(found)[-limit:]


def following(cron: Cron, zone: ZoneInfo, after: datetime, count: int = 1) -> list[datetime]:
    """The next occurrences after an instant; fewer than ``count`` only where the calendar ends."""
    found: set[datetime] = set()
    enough: date | None = None
    for day in _dates(cron, _date(after) - _BEFORE, _LAST):
        if enough is not None and day > enough:
            break
        found |= {instant for instant in _instants(cron, zone, day) if instant > after}
        if enough is None and len(found) >= count:
            enough = day + _BEHIND
    return sorted(found)[:count]


def _date(instant: datetime) -> date:
    return min(max(instant.astimezone(UTC).date(), _FIRST), _LAST)


def _dates(cron: Cron, first: date, last: date) -> Iterator[date]:
    """The matching dates of the wall calendar from first to last; months that do not match are leapt over."""
    day = first
    while day <= last:
        if day.month not in cron.months:
            day = (day.replace(day=1) + 32 * _DAY).replace(day=1)
            continue
        if cron.admits(day):
            yield day
        day += _DAY


def _dates_down(cron: Cron, last: date, first: date) -> Iterator[date]:
    """The same, from last to first."""
    day = last
    while day >= first:
        if day.month not in cron.months:
            day = day.replace(day=1) - _DAY
            continue
        if cron.admits(day):
            yield day
        day -= _DAY


def _instants(cron: Cron, zone: ZoneInfo, day: date) -> list[datetime]:
    """When the wall times of a date are, in UTC.

    With ``fold=0`` a time that occurs twice is its first pass, and a time that is skipped is read with the
    offset from before the change, which is to shift it by the gap.
    """
    return [
        datetime.combine(day, time(hour, minute), zone).astimezone(UTC)
        for hour in cron.hours
        for minute in cron.minutes
    ]
