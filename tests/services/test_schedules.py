"""Schedules: each occurrence is decided once, in time or not, by whichever node looks first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loom_django import FlowContext, flow, schedule, scheduling, signals
from loom_django.errors import (
    ExecutionConflictError,
    FlowNotFoundError,
    InvalidInputError,
    ScheduleNotFoundError,
)
from loom_django.kernel.state import Status
from loom_django.scheduling import Schedule
from loom_django.services import schedules as service_module
from loom_django.services.schedules import ScheduleService, execution_id_of
from loom_django.stores.base import ScheduleRow
from tests.engine.conftest import World

MONDAY = datetime(2026, 6, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def _forget_schedules() -> Iterator[None]:
    known = set(scheduling.schedules._schedules)
    yield
    for schedule_id in set(scheduling.schedules._schedules) - known:
        scheduling.schedules.forget(schedule_id)


class Node:
    """A process that looks at schedules, as far as one is more than a thread: its own service."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.service = ScheduleService(world.engine, lambda: world.loom.dispatcher)

    def look(self) -> None:
        while self.service.tick():
            pass


def go_to(world: World, moment: datetime) -> None:
    """Set the store's clock."""
    world.shift(moment - world.engine.store.now())


def row_of(world: World, schedule_id: str = "s") -> ScheduleRow:
    row = world.engine.store.schedule_row(schedule_id)
    assert row is not None
    return row


@pytest.fixture
def runs(world: World) -> Callable[[], list[datetime]]:
    """The occurrences for which the flow "f" has run, in the order in which it did; "f" ends at once."""
    ran: list[datetime] = []

    @flow("f")
    def body(ctx: FlowContext, note: str = "") -> str:
        assert ctx.scheduled_at is not None
        ran.append(ctx.scheduled_at)
        return note

    return lambda: ran


@pytest.fixture
def skips() -> Iterator[list[tuple[str, datetime, str]]]:
    """What the signal told, as (schedule, occurrence, why)."""
    told: list[tuple[str, datetime, str]] = []

    def hear(sender: Any, schedule_id: str, occurrence: datetime, why: str, **kwargs: Any) -> None:
        assert kwargs["execution_id"] == execution_id_of(schedule_id, occurrence)
        assert kwargs["sequence"] is None
        told.append((schedule_id, occurrence, why))

    signals.schedule_skipped.connect(hear)
    yield told
    signals.schedule_skipped.disconnect(hear)


# In time.


def test_an_occurrence_starts_its_execution(world: World, runs: Any) -> None:
    """Under the id that tells the instant, with the arguments of the declaration, once."""
    schedule("s", flow="f", cron="30 3 * * *", time_zone="Europe/Berlin", kwargs={"note": "all"})
    node = Node(world)
    go_to(world, MONDAY)
    node.look()
    assert runs() == []

    go_to(world, MONDAY + 1.5 * HOUR + 5 * SECOND)
    node.look()
    node.look()

    assert runs() == [MONDAY + 1.5 * HOUR]
    handle = world.loom.handle(f"s@{int((MONDAY + 1.5 * HOUR).timestamp()) * 1000}")
    assert handle.result() == "all"
    assert row_of(world).decided_until == MONDAY + 1.5 * HOUR
    assert row_of(world).last_execution_id == handle.id


def test_a_schedule_begins_when_it_is_first_seen(world: World, runs: Any, skips: Any) -> None:
    """Whatever its policy: yesterday's occurrences were nobody's."""
    schedule("s", flow="f", cron="0 * * * *", catch_up="all")
    go_to(world, MONDAY + 30 * MINUTE)
    Node(world).look()

    assert (runs(), skips) == ([], [])
    assert row_of(world).decided_until >= MONDAY + 30 * MINUTE


def test_through_the_repeated_hour_it_runs_once(world: World, runs: Any) -> None:
    """Two nodes that look every 20 seconds of the night in which Berlin's 02:00 comes twice."""
    schedule("s", flow="f", cron="0 2 * * *", time_zone="Europe/Berlin")
    nodes = [Node(world), Node(world)]
    moment = datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    while moment < datetime(2026, 10, 25, 2, tzinfo=UTC):
        go_to(world, moment)
        for node in nodes:
            node.look()
        moment += 20 * SECOND

    assert runs() == [datetime(2026, 10, 25, tzinfo=UTC)]
    assert world.loom.handle("s@1792886400000").status is Status.COMPLETED


def test_restarts_lose_no_weekly_run(world: World, runs: Any) -> None:
    """The service starts anew every ten minutes, once five seconds before the occurrence."""
    schedule("s", flow="f", cron="0 3 * * 1")
    weeks = [MONDAY + timedelta(days=7) * week + 3 * HOUR for week in range(2)]
    go_to(world, MONDAY)
    Node(world).look()
    for due in weeks:
        for offset in (-20 * MINUTE, -10 * MINUTE, -5 * SECOND, 10 * MINUTE - 5 * SECOND, 20 * MINUTE):
            go_to(world, due + offset)
            node = Node(world)
            node.look()
            if offset == -5 * SECOND:
                go_to(world, due + SECOND)
                node.look()

    assert runs() == weeks


def test_a_node_without_a_look_at_the_row_would_wait_for_the_next_one(world: World, runs: Any) -> None:
    """A service need not ask the database before an occurrence is due, and asks at least once a minute."""
    schedule("s", flow="f", cron="0 * * * *")
    go_to(world, MONDAY)
    node = Node(world)
    node.look()
    asked: list[str] = []
    store: Any = world.engine.store
    look = store.schedule_row
    store.schedule_row = lambda schedule_id: asked.append(schedule_id) or look(schedule_id)
    try:
        for _ in range(50):
            node.service.tick()
        assert asked == []
        world.shift(MINUTE + SECOND)  # the node reckons the time, to within a round trip
        node.service.tick()
        assert asked == ["s"]
    finally:
        del store.schedule_row


# Missed.


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("skip", []), ("latest", [5]), ("all", [1, 2, 3, 4, 5])],
)
def test_what_was_missed_goes_by_the_policy(
    world: World, runs: Any, skips: Any, policy: Any, expected: list[int]
) -> None:
    """Five hours without a node; what is not started is told, and nothing is decided twice."""
    schedule("s", flow="f", cron="0 * * * *", catch_up=policy)
    go_to(world, MONDAY)
    Node(world).look()
    go_to(world, MONDAY + 5 * HOUR + 20 * MINUTE)
    Node(world).look()
    Node(world).look()

    assert runs() == [MONDAY + hour * HOUR for hour in expected]
    left = [hour for hour in range(1, 6) if hour not in expected]
    assert skips == [("s", MONDAY + hour * HOUR, "missed") for hour in left]


@pytest.mark.parametrize(("late", "started"), [(20, True), (59, True), (62, False)])
def test_a_short_silence_is_no_miss(world: World, runs: Any, late: int, started: bool) -> None:
    """A deploy over the occurrence: within the grace it is in time, whatever the policy."""
    schedule("s", flow="f", cron="0 * * * *")
    go_to(world, MONDAY)
    Node(world).look()
    go_to(world, MONDAY + HOUR + late * SECOND - 0.5 * SECOND)
    Node(world).look()

    assert bool(runs()) is started


def test_the_grace_is_a_setting(world: World, runs: Any) -> None:
    """A longer one makes the same silence no miss."""
    settings = replace(world.engine.settings(), MISFIRE_GRACE=600.0)
    world.engine.settings = lambda: settings
    schedule("s", flow="f", cron="0 * * * *")
    go_to(world, MONDAY)
    Node(world).look()
    go_to(world, MONDAY + HOUR + 9 * MINUTE)
    Node(world).look()

    assert runs() == [MONDAY + HOUR]


def test_catching_up_is_bounded(world: World, runs: Any, skips: Any) -> None:
    """The newest are started, the others told."""
    schedule("s", flow="f", cron="0 * * * *", catch_up="all", catch_up_limit=3)
    go_to(world, MONDAY)
    Node(world).look()
    go_to(world, MONDAY + 10 * HOUR + 20 * MINUTE)
    Node(world).look()

    assert runs() == [MONDAY + hour * HOUR for hour in (8, 9, 10)]
    assert skips == [("s", MONDAY + hour * HOUR, "catch-up-limit") for hour in range(1, 8)]


def test_what_is_in_time_is_no_catching_up(world: World, runs: Any, skips: Any) -> None:
    """A look that comes within the grace starts all of them, whatever the limit."""
    settings = replace(world.engine.settings(), MISFIRE_GRACE=600.0)
    world.engine.settings = lambda: settings
    schedule("s", flow="f", cron="* * * * *", catch_up="all", catch_up_limit=1)
    go_to(world, MONDAY + SECOND)
    Node(world).look()
    go_to(world, MONDAY + 3 * MINUTE + SECOND)
    Node(world).look()

    assert runs() == [MONDAY + minute * MINUTE for minute in (1, 2, 3)]
    assert skips == []


def test_a_very_long_silence_is_told_in_few_words(
    world: World, runs: Any, skips: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Years of minutes: a thousand are named, the rest as a span; the service is not held up."""
    schedule("s", flow="f", cron="* * * * *", catch_up="latest")
    go_to(world, MONDAY)
    Node(world).look()
    go_to(world, MONDAY + timedelta(days=900, seconds=30))
    settings = replace(world.engine.settings(), MISFIRE_GRACE=1.0)
    world.engine.settings = lambda: settings
    with caplog.at_level(logging.WARNING, "loom_django"):
        Node(world).look()

    assert runs() == [MONDAY + timedelta(days=900)]
    assert len(skips) == service_module.MOST - 1
    assert any("all of its earlier occurrences since 2026-06-01T00:00" in line for line in caplog.messages)


def test_a_clock_that_is_set_back_decides_nothing_twice(world: World, runs: Any) -> None:
    """What was decided stays decided; the next one comes at its time."""
    schedule("s", flow="f", cron="0 * * * *", catch_up="all")
    go_to(world, MONDAY + 30 * MINUTE)
    node = Node(world)
    node.look()
    go_to(world, MONDAY + HOUR + SECOND)
    node.look()
    for moment in (MONDAY + 20 * MINUTE, MONDAY + HOUR + SECOND, MONDAY + 2 * HOUR + SECOND):
        go_to(world, moment)
        node.look()
        Node(world).look()

    assert runs() == [MONDAY + HOUR, MONDAY + 2 * HOUR]


# Overlap.


def waiting_flow() -> Any:
    @flow("waits")
    def body(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    return body


def test_overlap_skip_follows_the_newest_run(world: World, skips: Any) -> None:
    """While it has not ended the next occurrences are left out; an older one that still runs is no reason."""
    waiting_flow()
    schedule("s", flow="waits", cron="0 * * * *", overlap="skip")
    node = Node(world)
    go_to(world, MONDAY)
    node.look()
    for hour in (1, 2, 3):
        go_to(world, MONDAY + hour * HOUR + SECOND)
        node.look()
    first = execution_id_of("s", MONDAY + HOUR)
    assert world.loom.handle(first).status is Status.SUSPENDED
    assert skips == [("s", MONDAY + hour * HOUR, "overlap") for hour in (2, 3)]
    assert (row_of(world).skipped_at, row_of(world).skipped_why) == (MONDAY + 3 * HOUR, "overlap")

    newest = world.loom.trigger_schedule("s", reason="by hand")
    world.loom.cancel(newest.id)
    go_to(world, MONDAY + 4 * HOUR + SECOND)
    node.look()

    assert world.loom.handle(execution_id_of("s", MONDAY + 4 * HOUR)).status is Status.SUSPENDED
    assert world.loom.handle(first).status is Status.SUSPENDED


def test_overlap_is_judged_within_one_look_too(world: World, skips: Any) -> None:
    """Of three that are caught up at once the first one stands in the way of the others."""
    waiting_flow()
    schedule("s", flow="waits", cron="0 * * * *", overlap="skip", catch_up="all")
    go_to(world, MONDAY)
    Node(world).look()
    go_to(world, MONDAY + 3 * HOUR + 20 * MINUTE)
    Node(world).look()

    assert skips == [("s", MONDAY + hour * HOUR, "overlap") for hour in (2, 3)]


def test_overlap_allow_starts_them_all(world: World, skips: Any) -> None:
    """It is the default."""
    waiting_flow()
    schedule("s", flow="waits", cron="0 * * * *")
    node = Node(world)
    for hour in (0, 1, 2):
        go_to(world, MONDAY + hour * HOUR + SECOND)
        node.look()

    assert skips == []
    assert [world.loom.handle(execution_id_of("s", MONDAY + hour * HOUR)).status for hour in (1, 2)] == [
        Status.SUSPENDED
    ] * 2


# Other nodes, other code.


def test_an_execution_that_is_there_settles_its_occurrence(
    world: World, runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Another release started it with other arguments: no error, no second run; a program's start still conflicts."""
    declared = schedule("s", flow="f", cron="0 * * * *", kwargs={"note": "new"})
    waiting = waiting_flow()
    there = execution_id_of("s", MONDAY + HOUR)
    waiting.using(execution_id=there).start()
    node = Node(world)
    with caplog.at_level(logging.INFO, "loom_django"):
        go_to(world, MONDAY)
        node.look()
        go_to(world, MONDAY + HOUR + SECOND)
        node.look()

    assert runs() == []
    assert row_of(world).last_execution_id == there
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    with pytest.raises(ExecutionConflictError):
        declared.flow().using(execution_id=there).start()


def test_a_changed_expression_keeps_what_was_decided(world: World, runs: Any) -> None:
    """Nothing runs twice for it, and the row tells the new one."""
    schedule("s", flow="f", cron="0 * * * *", catch_up="all")
    go_to(world, MONDAY + 30 * MINUTE)
    Node(world).look()
    go_to(world, MONDAY + HOUR + SECOND)
    Node(world).look()

    scheduling.schedules.forget("s")
    schedule("s", flow="f", cron="*/30 * * * *", time_zone="Asia/Kolkata", catch_up="all")
    Node(world).look()
    assert (row_of(world).cron, row_of(world).time_zone) == ("*/30 * * * *", "Asia/Kolkata")
    go_to(world, MONDAY + HOUR + 30 * MINUTE + SECOND)
    Node(world).look()

    assert runs() == [MONDAY + HOUR, MONDAY + HOUR + 30 * MINUTE]


def test_a_schedule_that_vanished_from_the_code_never_fires(world: World, runs: Any) -> None:
    """Its row stays, for whoever looks."""
    schedule("s", flow="f", cron="0 * * * *")
    go_to(world, MONDAY)
    node = Node(world)
    node.look()
    scheduling.schedules.forget("s")
    go_to(world, MONDAY + HOUR + SECOND)
    node.look()

    assert runs() == []
    assert row_of(world).decided_until < MONDAY + HOUR


def test_a_broken_schedule_stops_no_other_one(
    world: World, runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported once in a while and tried again; what it missed goes by its policy when it is mended."""
    schedule("a", flow="nobody", cron="0 * * * *", catch_up="all")
    schedule("s", flow="f", cron="0 * * * *")
    seconds = [0.0]
    service = ScheduleService(world.engine, lambda: world.loom.dispatcher, clock=lambda: seconds[0])
    go_to(world, MONDAY)
    service.tick()
    with caplog.at_level(logging.ERROR, "loom_django.schedules"):
        go_to(world, MONDAY + HOUR + SECOND)
        for _ in range(200):
            service.tick()
            seconds[0] += 1.0
        lines = [message for message in caplog.messages if '"a"' in message]
        assert len(lines) == 1
        assert "not registered here" in lines[0]
        assert service._watched["a"].failures < 15  # 200 seconds with pauses that double up to a minute
        seconds[0] += service_module.REPORT_EVERY
        service.tick()
        assert len(caplog.messages) == 2
    assert runs() == [MONDAY + HOUR]

    @flow("nobody")
    def found(ctx: FlowContext) -> None:
        """It is there again."""

    seconds[0] += 100.0
    service.tick()
    assert world.loom.handle(execution_id_of("a", MONDAY + HOUR)).status is Status.COMPLETED


def test_nothing_of_a_look_that_fails_is_kept(
    world: World, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark and the starts are one transaction: without the second start, neither the first one nor the mark."""
    schedule("s", flow="f", cron="0 * * * *", catch_up="all")
    go_to(world, MONDAY)
    Node(world).look()
    before = row_of(world)
    go_to(world, MONDAY + 2 * HOUR + SECOND)
    real, calls = service_module.start_run, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the second one")
        return real(*args, **options)

    monkeypatch.setattr(service_module, "start_run", failing)
    Node(world).look()
    assert len(calls) == 2
    assert row_of(world) == before
    assert world.engine.store.status(execution_id_of("s", MONDAY + HOUR)) is None

    monkeypatch.undo()
    Node(world).look()
    assert runs() == [MONDAY + HOUR, MONDAY + 2 * HOUR]


def test_the_loser_of_a_race_starts_nothing(
    world: World, runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Both nodes have read the row before either one writes; the second one finds it moved and says nothing."""
    schedule("s", flow="f", cron="0 * * * *")
    go_to(world, MONDAY)
    slow, quick = Node(world), Node(world)
    slow.look()
    quick.look()
    go_to(world, MONDAY + HOUR + SECOND)
    real: Any = slow.service._carry_out

    def overtaken(*args: Any) -> int:
        quick.look()
        return int(real(*args))

    setattr(slow.service, "_carry_out", overtaken)  # noqa: B010  a method of this one service
    with caplog.at_level(logging.INFO, "loom_django"):
        slow.service.tick()

    assert runs() == [MONDAY + HOUR]
    assert (slow.service.started, quick.service.started) == (0, 1)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


# What people do.


def test_a_paused_schedule_starts_nothing(world: World, runs: Any, skips: Any) -> None:
    """What falls due meanwhile is skipped, before and after the resume alike; the next one is on time."""
    schedule("s", flow="f", cron="0 * * * *", catch_up="all")
    node = Node(world)
    go_to(world, MONDAY)
    node.look()
    assert world.loom.pause_schedule("s", reason="freeze", principal="anna") is True
    assert world.loom.pause_schedule("s", reason="again", principal="ben") is False
    row = row_of(world)
    assert (row.last_act, row.acted_by, row.act_reason) == ("pause", "anna", "freeze")
    go_to(world, MONDAY + HOUR + SECOND)
    node.look()
    go_to(world, MONDAY + 2 * HOUR + SECOND)  # nobody looks at this one before the resume
    assert world.loom.resume_schedule("s", reason="thaw", principal="anna") is True
    assert world.loom.resume_schedule("s", reason="thaw") is False
    node.look()
    assert runs() == []
    assert skips == [("s", MONDAY + HOUR, "paused"), ("s", MONDAY + 2 * HOUR, "paused")]

    go_to(world, MONDAY + 3 * HOUR + SECOND)
    node.look()
    assert runs() == [MONDAY + 3 * HOUR]
    assert row_of(world).last_act == "resume"


def test_a_trigger_starts_one_beside_the_occurrences(world: World) -> None:
    """Paused or not, with no occurrence's id and without a time of one; each has its own id."""
    seen: list[Any] = []

    @flow("f")
    def body(ctx: FlowContext, note: str) -> str:
        seen.append(ctx.scheduled_at)
        return note

    schedule("s", flow=body, cron="0 * * * *", args=["x"])
    go_to(world, MONDAY)
    world.loom.pause_schedule("s", reason="r")
    handles = [world.loom.trigger_schedule("s", reason="now", principal="anna") for _ in range(3)]

    assert [handle.result() for handle in handles] == ["x"] * 3
    assert len({handle.id for handle in handles}) == 3
    assert all(handle.created and int(handle.id.removeprefix("s@")) % 1000 != 0 for handle in handles)
    assert seen == [None] * 3
    row = row_of(world)
    assert (row.last_execution_id, row.last_act, row.acted_by) == (handles[-1].id, "trigger", "anna")
    assert row.paused_at is not None


def test_acts_on_what_is_not_there_are_refused(world: World) -> None:
    """A name that nobody declared; a flow that is gone; one that takes other arguments. Nothing is written."""
    for act in (world.loom.pause_schedule, world.loom.resume_schedule, world.loom.trigger_schedule):
        with pytest.raises(ScheduleNotFoundError, match="is not declared"):
            act("nobody", reason="r")
    assert world.engine.store.schedule_row("nobody") is None
    schedule("s", flow="gone", cron="0 * * * *")
    with pytest.raises(FlowNotFoundError):
        world.loom.trigger_schedule("s", reason="r")

    @flow("gone")
    def body(ctx: FlowContext, needed: int) -> None:
        """It takes an argument."""

    with pytest.raises(InvalidInputError, match="needed"):
        world.loom.trigger_schedule("s", reason="r")
    assert world.engine.store.schedule_row("s") is None


def test_a_schedule_that_vanished_can_be_paused_and_not_triggered(world: World) -> None:
    """During a deploy the process that answers may not have its code any more."""
    schedule("s", flow="f", cron="0 * * * *")
    Node(world).look()
    scheduling.schedules.forget("s")

    assert world.loom.pause_schedule("s", reason="r") is True
    with pytest.raises(ScheduleNotFoundError):
        world.loom.trigger_schedule("s", reason="r")


def test_options_of_the_flow_go_with_each_run(world: World) -> None:
    """``using`` gives a schedule's runs their priority and attributes, and the schedule its queue."""
    settings = replace(world.engine.settings(), QUEUES={"slow": {}})
    world.engine.settings = lambda: settings

    @flow("f")
    def body(ctx: FlowContext) -> Any:
        return ctx.attributes

    made: Schedule = schedule(
        "s", flow=body.using(attributes={"a": 1}, priority=7), cron="0 * * * *", queue="slow"
    )
    node = Node(world)
    go_to(world, MONDAY)
    node.look()
    go_to(world, MONDAY + HOUR + SECOND)
    node.look()

    handle = world.loom.handle(execution_id_of(made.id, MONDAY + HOUR))
    assert handle.result() == {"a": 1}
    assert {name: world.state(handle).options[name] for name in ("queue", "priority")} == {
        "queue": "slow",
        "priority": 7,
    }
