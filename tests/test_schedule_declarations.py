"""What a schedule may be declared as, and what a declaration is refused for."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loom_django import FlowContext, Schedule, flow, schedule, scheduling
from loom_django.definitions import registry
from loom_django.errors import InvalidIdError, InvalidInputError, ScheduleDefinitionError

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_flows", {})
    monkeypatch.setattr(scheduling.schedules, "_schedules", {})


@pytest.fixture
def audit() -> Any:
    @flow("audit", version=2)
    def body(ctx: FlowContext, scope: str, day: int = 1) -> None:
        """It takes a scope."""

    return body


def nightly(**options: Any) -> Schedule:
    return schedule("nightly", **{"flow": "audit", "cron": "30 3 * * *", **options})


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"cron": "0 0 30 2 *"}, "cron", "names no date of any year"),
        ({"cron": "* 24 * * *"}, "cron", "has the hour field '24', which has 24; 0 to 23 is allowed"),
        ({"cron": "5/15 * * * *"}, "cron", "write 5-59/15, or */15"),
        ({"cron": "@daily"}, "cron", "write its five fields: 0 0 * * *"),
        ({"cron": None}, "cron", "must be text"),
        ({"time_zone": "Mars/Olympus"}, "time_zone", "is no time zone"),
        ({"time_zone": None}, "time_zone", "is no time zone"),
        ({"flow": 7}, "flow", "neither a flow nor a flow's id"),
        ({"args": "abc"}, "args", "must be a tuple or a list"),
        ({"kwargs": ["scope"]}, "kwargs", "must be a mapping"),
        ({"kwargs": {"scope": object()}}, "kwargs", "cannot be recorded"),
        ({"args": [open]}, "args", "cannot be recorded"),
        ({"catch_up": "newest"}, "catch_up", "must be one of 'skip', 'latest', 'all'"),
        ({"overlap": None}, "overlap", "must be one of 'allow', 'skip'"),
        ({"queue": 7}, "queue", "no name of a queue"),
        ({"catch_up_limit": 0}, "catch_up_limit", "from 1 to 1000"),
        ({"catch_up_limit": True}, "catch_up_limit", "from 1 to 1000"),
        ({"catch_up_limit": 1001}, "catch_up_limit", "from 1 to 1000"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_declared(options, field, says):
    """The error has the schedule, the field and its value; nothing is registered."""
    began = time.process_time()
    with pytest.raises(ScheduleDefinitionError) as refused:
        nightly(**options)

    assert time.process_time() - began < 0.1
    assert (refused.value.schedule_id, refused.value.field) == ("nightly", field)
    assert says in str(refused.value)
    assert scheduling.schedules.all() == []


@pytest.mark.parametrize("given", [{}, {"kwargs": {"scop": "all"}}, {"args": (1, 2, 3)}])
def test_arguments_are_bound_to_the_flow_that_is_given(audit, given):
    """A wrong one is found at import, not at half past three."""
    with pytest.raises(ScheduleDefinitionError, match=r"body\(scope: 'str', day: 'int' = 1\)"):
        nightly(flow=audit, **given)
    assert nightly(flow=audit, args=["all"]).bound(audit) == {"scope": "all", "day": 1}


def test_a_flow_by_its_id_may_come_later():
    """Modules are imported in any order; the check says what is missing in the end."""
    assert nightly(flow="later").flow_id == "later"


@pytest.mark.parametrize(
    "options",
    [
        {"execution_id": "x"},
        {"start_at": datetime(2030, 1, 1, tzinfo=UTC)},
        {"deadline": datetime(2030, 1, 1, tzinfo=UTC)},
    ],
)
def test_options_of_one_execution_make_no_schedule(audit, options):
    """Every occurrence would be the same execution, or begin or end at the same moment."""
    with pytest.raises(
        ScheduleDefinitionError, match=f"as {next(iter(options))}= .* each occurrence has its own"
    ):
        nightly(flow=audit.using(**options), args=["all"])
    assert nightly(flow=audit.using(deadline=60, priority=3), args=["all"]).flow().options.priority == 3


@pytest.mark.parametrize("id", ["", "a\nb", 5, "x" * 201])
def test_an_id_leaves_room_for_the_occurrence(id):
    """200 printable characters, so that the execution's id is never shortened."""
    with pytest.raises(InvalidIdError):
        schedule(id, flow="audit", cron="* * * * *")


def test_the_same_declaration_again_is_quiet(audit):
    """Modules are reloaded; spaces of the expression and the kind of the arguments' list do not count."""
    first = nightly(flow=audit, args=["all"], time_zone="UTC")
    second = nightly(flow=audit, cron=" 30  3 * * * ", args=("all",))
    assert first.content == second.content
    assert scheduling.schedules.all() == [second]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cron": "31 3 * * *"}, "cron"),
        ({"time_zone": "Europe/Berlin"}, "time_zone"),
        ({"kwargs": {"scope": "none"}}, "kwargs"),
        ({"flow": "other"}, "flow"),
        ({"catch_up": "all"}, "catch_up"),
        ({"catch_up_limit": 7}, "catch_up_limit"),
        ({"overlap": "skip"}, "overlap"),
        ({"queue": "slow"}, "queue"),
    ],
)
def test_another_declaration_under_the_same_id_is_refused(options, field):
    """Which one counted would be import order."""
    first = nightly()
    with pytest.raises(ScheduleDefinitionError, match="another schedule of this id") as refused:
        nightly(**options)
    assert refused.value.field == field
    assert scheduling.schedules.all() == [first]


def test_arguments_are_those_of_the_declaration(audit):
    """A list that the program changes afterwards, or that a run changes, is not the schedule's."""
    scopes = ["a"]
    made = nightly(flow=audit, args=[scopes])
    scopes.append("b")
    made.bound(audit)["scope"].append("c")
    assert made.bound(audit)["scope"] == ["a"]


def test_occurrences_are_public():
    """After the first instant, up to and with the second one; through a change of the clocks."""
    made = nightly(cron="30 2 * * *", time_zone="Europe/Berlin")
    first, last = datetime(2026, 3, 28, 1, 30, tzinfo=UTC), datetime(2026, 3, 30, 0, 30, tzinfo=UTC)
    assert made.occurrences(first, last) == [datetime(2026, 3, 29, 1, 30, tzinfo=UTC), last]
    assert made.occurrences(last, first) == []
    assert made.occurrences(first.astimezone(made.zone), last) == made.occurrences(first, last)


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), None, 5, "2026-01-01"])
def test_occurrences_are_between_instants(moment):
    """A naive time is none."""
    made = nightly()
    now = datetime(2026, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidInputError, match="aware datetime"):
        made.occurrences(moment, now)
    with pytest.raises(InvalidInputError, match="aware datetime"):
        made.occurrences(now, moment)


def test_a_flow_fixes_its_version_and_an_id_does_not(audit):
    """By the id it is the highest that takes new starts, whenever it is asked."""
    fixed = nightly(flow=audit, args=["all"])
    open_ = schedule("open", flow="audit", cron="* * * * *")

    @flow("audit", version=3)
    def newer(ctx: FlowContext) -> None:
        """A later release."""

    assert (fixed.flow().version, open_.flow().version) == (2, 3)


def test_a_year_of_occurrences_is_soon_told():
    """The public call is for calendars and tests, so it takes long spans."""
    began = time.process_time()
    found = nightly(cron="*/10 * * * *").occurrences(
        datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=365)
    )
    assert len(found) == 365 * 144
    assert time.process_time() - began < 3
