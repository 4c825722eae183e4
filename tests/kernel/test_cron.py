"""Cron expressions: what is read, what is refused, and when it is, through every change of the clocks."""

from __future__ import annotations

import json
import random
import time
from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom_django.kernel import cron
from loom_django.kernel.cron import CronError

pytestmark = pytest.mark.once

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cron_cases.json").read_text())["cases"]

MICROSECOND = timedelta(microseconds=1)
MINUTE = timedelta(minutes=1)


def instant(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def of_kind(*kinds: str) -> Any:
    cases = [case for case in CASES if case["kind"] in kinds]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["id"])


# The cases.


@of_kind("window")
def test_a_window_holds_its_occurrences(case):
    """From the first instant on, the last one left out; counted from the end it is the same."""
    expression, zone = cron.parse(case["expr"]), cron.zone_of(case["zone"])
    after, until = instant(case["from_ms"]) - MICROSECOND, instant(case["to_ms"]) - MICROSECOND
    expected = [instant(ms) for ms in case["expected_ms"]]

    assert len(expected) == case["count"]
    assert cron.occurrences(expression, zone, after, until) == expected
    assert cron.newest(expression, zone, after, until, 1000) == expected
    assert cron.newest(expression, zone, after, until, 2) == expected[-2:]


@of_kind("next")
def test_the_next_occurrence_lies_strictly_ahead(case):
    """Also when it is asked at an occurrence, or in the second pass of a repeated hour."""
    found = cron.following(cron.parse(case["expr"]), cron.zone_of(case["zone"]), instant(case["after_ms"]))

    assert found == [instant(case["expected_next_ms"])]


@of_kind("reject", "never")
def test_what_cannot_work_is_refused_at_once(case):
    """With the field and its value named, and without a search."""
    cron.parse.cache_clear()
    began = time.process_time()
    with pytest.raises(CronError) as refused:
        cron.parse(case["expr"])

    assert time.process_time() - began < 0.1
    assert refused.value.field in {"cron", *(field.name for field in cron._FIELDS)}
    assert str(refused.value.value) in case["expr"]


def test_every_kind_of_case_is_tried():
    """A case of a new kind would be run by no test above."""
    assert {case["kind"] for case in CASES} == {"window", "next", "reject", "never"}


# The grammar.


@pytest.mark.parametrize(
    ("expression", "field", "way_out"),
    [
        ("5/15 * * * *", "minute", "write 5-59/15, or */15"),
        ("0 0 L * *", "day of month", "run on 28-31"),
        ("0 0 L-3 * *", "day of month", "run on 28-31"),
        ("0 0 * * 5L", "day of week", "run on 28-31"),
        ("0 0 15W * *", "day of month", "run on MON-FRI"),
        ("0 0 LW * *", "day of month", "run on MON-FRI"),
        ("0 0 * * 5#2", "day of week", "run on the weekday"),
        ("0 0 ? * 1", "day of month", "write *"),
        ("@daily", "cron", "0 0 * * *"),
        ("@Hourly", "cron", "0 * * * *"),
        ("@reboot", "cron", "write five fields"),
        ("0 30 3 * * *", "cron", "30 3 * * *"),
        ("0 0 * * FRI-MON", "day of week", "5-7,0-1"),
        ("50-10 * * * *", "minute", "50-59,0-10"),
        ("*/60 * * * *", "minute", "from 1 to 59"),
        ("0 0 * * 8", "day of week", "0 to 7 or SUN-SAT"),
        ("0 0 * 13 *", "month", "1 to 12 or JAN-DEC"),
        ("0 0 31 2,4 *", "cron", "never has that day"),
        ("* * * *", "cron", "write five fields"),
        ("0 0 * * *\n", "day of week", "no item"),
        ("٣ * * * *", "minute", "0 to 59"),
        ("0 0 * * MONDAY", "day of week", "no item"),
        ("00000 * * * *", "minute", "no item"),
        (f"{','.join(['0'] * 200)} * * * *", "cron", "255 are allowed"),
    ],
)
def test_a_refusal_says_what_to_write(expression, field, way_out):
    """The field, its value, and how five fields say it."""
    with pytest.raises(CronError) as refused:
        cron.parse(expression)

    assert refused.value.field == field
    assert way_out in refused.value.problem


@pytest.mark.parametrize("field", range(5))
def test_every_range_and_step_is_expanded_in_full(field):
    """Whatever the library underneath makes of ranges of one value, of Sunday, of steps."""
    facts = cron._FIELDS[field]
    values = range(facts.low, facts.high + 1)
    for low in values:
        for high in values[low - facts.low :: 3]:
            for step in {1, 2, 5, facts.span - 1}:
                expected = {value % 7 if field == 4 else value for value in range(low, high + 1, step)}
                assert read(field, f"{low}-{high}/{step}") == expected
        assert read(field, str(low)) == {low % 7 if field == 4 else low}
    for step in range(1, facts.span):
        assert read(field, f"*/{step}") == set(
            range(facts.low, min(facts.high, 6 if field == 4 else 99) + 1, step)
        )


def read(field: int, text: str) -> set[int]:
    parts = ["*"] * 5
    parts[field] = text
    parsed = cron.parse(" ".join(parts))
    return set((parsed.minutes, parsed.hours, parsed.days, parsed.months, parsed.weekdays)[field])


@pytest.mark.parametrize("sunday", ["0", "7", "SUN", "sun", "7-7", "0-0", "SUN-SUN", "0,7"])
def test_every_spelling_of_sunday(sunday):
    """They are one day."""
    assert read(4, sunday) == {0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5-7", {5, 6, 0}),
        ("FRI-SUN", {5, 6, 0}),
        ("fri-0", {5, 6, 0}),
        ("SAT-SUN", {6, 0}),
        ("SUN-TUE", {0, 1, 2}),
    ],
)
def test_a_range_may_begin_or_end_on_sunday(text, expected):
    """It is the first day of the week and the last one."""
    assert read(4, text) == expected


@given(st.text(alphabet="0123456789*/-,LW#?@ SUNJA\t\n", max_size=30))
def test_any_text_is_read_or_refused(text):
    """Nothing else comes out, whatever is typed."""
    try:
        parsed = cron.parse(text)
    except CronError:
        return
    assert all((parsed.minutes, parsed.hours, parsed.days, parsed.months, parsed.weekdays))


@pytest.mark.parametrize(
    "name",
    ["Mars/Olympus", "", "../etc/passwd", "America", "localtime", "/etc/localtime", "a\0b", "ä", "x" * 5000],
)
def test_a_zone_that_is_none_is_refused(name):
    """Also what the file system would make something else of."""
    with pytest.raises(CronError, match="is no time zone"):
        cron.zone_of(name)


# Against a slower way to the same.

ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Kathmandu",
]
EXPRESSIONS = [
    "*/15 * * * *",
    "0 * * * *",
    "30 2 * * *",
    "45 1-3 * * *",
    "0 0 * * *",
    "59 23 * * SAT",
    "0 0 31 * *",
    "0 12 13 * FRI",
    "5 0 1 1 *",
    "30 */6 29-31 3,10-12 1-5",
]
# Some days around changes of the clocks in one or several of the zones; two of them take a day from Apia or give
# New York its hour back.
SPANS = [
    (datetime(2011, 12, 28, tzinfo=UTC), datetime(2012, 1, 3, tzinfo=UTC)),
    (datetime(2010, 11, 5, tzinfo=UTC), datetime(2010, 11, 9, tzinfo=UTC)),
    (datetime(2026, 3, 6, tzinfo=UTC), datetime(2026, 3, 10, tzinfo=UTC)),
    (datetime(2026, 3, 27, tzinfo=UTC), datetime(2026, 4, 7, tzinfo=UTC)),
    (datetime(2026, 10, 2, tzinfo=UTC), datetime(2026, 10, 6, tzinfo=UTC)),
    (datetime(2026, 10, 24, tzinfo=UTC), datetime(2026, 11, 3, tzinfo=UTC)),
    (datetime(1985, 12, 30, tzinfo=UTC), datetime(1986, 1, 3, tzinfo=UTC)),
]


def minute_by_minute(
    zone: ZoneInfo, first: datetime, last: datetime
) -> list[tuple[datetime, list[datetime]]]:
    """Each minute of real time with the wall times that count for it, as a clock on the wall goes.

    Its own, unless that has been there before; and one that was skipped, if it lies as far behind the beginning of
    the gap as this minute behind the jump. Nothing is asked about folds.
    """
    minutes = []
    seen: set[datetime] = set()
    moment = first - timedelta(days=3)
    gap: tuple[datetime, datetime] | None = None  # the wall time at which a gap began, and when that was
    gap_end = moment
    before = wall_of(moment - MINUTE, zone)
    while moment < last:
        wall = wall_of(moment, zone)
        jump = wall - before - MINUTE
        if jump > timedelta():
            gap, gap_end = (before + MINUTE, moment), moment + jump
        counts = [] if wall in seen else [wall]
        if gap and moment < gap_end:
            counts.append(gap[0] + (moment - gap[1]))
        if first <= moment:
            minutes.append((moment, counts))
        seen.add(wall)
        before = wall
        moment += MINUTE
    return minutes


def wall_of(moment: datetime, zone: ZoneInfo) -> datetime:
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def matches(parsed: cron.Cron, wall: datetime) -> bool:
    return wall.minute in parsed.minutes and wall.hour in parsed.hours and parsed.admits(wall.date())


@pytest.mark.parametrize("name", ZONES)
def test_a_walk_over_every_minute_finds_the_same(name):
    """An oracle that knows nothing of fold: it meets gaps and repeated times as a clock on the wall does."""
    zone = cron.zone_of(name)
    for first, last in SPANS:
        minutes = minute_by_minute(zone, first, last)
        for expression in EXPRESSIONS:
            parsed = cron.parse(expression)
            expected = [moment for moment, walls in minutes if any(matches(parsed, wall) for wall in walls)]
            found = cron.occurrences(parsed, zone, first - MICROSECOND, last - MICROSECOND)
            assert found == expected, expression


@pytest.mark.parametrize("name", ZONES)
def test_asked_afresh_it_is_one_long_walk(name):
    """At 500 random instants the next one is that of a walk from the beginning, and is never behind."""
    zone = cron.zone_of(name)
    draw = random.Random(name)
    first, last = datetime(2009, 1, 1, tzinfo=UTC), datetime(2012, 6, 1, tzinfo=UTC)
    span = (last - first).total_seconds()
    for expression in EXPRESSIONS:
        parsed = cron.parse(expression)
        walk = cron.occurrences(parsed, zone, first, last + timedelta(days=400))
        for number in range(500):
            moment = first + timedelta(seconds=draw.uniform(0, span))
            place = bisect_right(walk, moment)
            assert cron.following(parsed, zone, moment) == [walk[place]], (expression, moment)
            if (
                place and number % 5 == 0
            ):  # an occurrence itself is behind, one microsecond before it is ahead
                assert cron.following(parsed, zone, walk[place - 1]) == [walk[place]], (expression, moment)


def test_a_time_that_is_shifted_over_midnight_comes_in_its_order():
    """Clocks go from 23:30 to 24:00: a quarter to twelve comes after five past twelve, which is a date later."""
    parsed, zone = cron.parse("5,45 0,23 * * *"), cron.zone_of("Asia/Pyongyang")
    change = datetime(2018, 5, 4, 15, tzinfo=UTC)
    five, quarter = change + 5 * MINUTE, change + 15 * MINUTE

    assert cron.following(parsed, zone, change - MINUTE) == [five]
    assert cron.following(parsed, zone, five) == [quarter]
    assert cron.newest(parsed, zone, change - 60 * MINUTE, quarter + MINUTE, 1) == [quarter]


def test_the_ends_of_the_calendar_are_answered():
    """The first and the last dates that Python knows are no reason to fail."""
    parsed, zone = cron.parse("0 0 1 1 *"), cron.zone_of("Pacific/Kiritimati")
    low, high = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)

    assert cron.following(parsed, zone, high) == []
    assert cron.newest(parsed, zone, low, high, 1) == [datetime(9998, 12, 31, 10, tzinfo=UTC)]
    assert cron.following(parsed, zone, low)[0].year == 2


def test_years_of_silence_are_not_walked():
    """The newest hundred of ten years of minutes are found without the others."""
    zone = cron.zone_of("Europe/Berlin")
    until = datetime(2026, 1, 1, tzinfo=UTC)
    began = time.process_time()
    found = cron.newest(cron.parse("* * * * *"), zone, until - timedelta(days=3650), until, 100)

    assert found == [until - MINUTE * back for back in reversed(range(100))]
    assert time.process_time() - began < 0.5
