"""Schedules in the console: what is due, what ran, and the acts with their permissions, previews and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from loom_django import FlowContext, flow, schedule, scheduling
from loom_django.definitions import registry
from loom_django.models import Execution, ScheduleState
from loom_django.runtime import loom
from loom_django.services.schedules import ScheduleService, execution_id_of
from tests.admin.conftest import client_of, make_user, url
from tests.admin.test_escaping import NASTY, check

pytestmark = pytest.mark.django_db(transaction=True)

LOOK = ("view_schedulestate", "view_execution")
PAGES = ("trigger", "pause", "resume")
SATURDAY = datetime(2026, 3, 28, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _own_schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A flow that ends at once; no schedule of another test, and the clock as it was."""
    monkeypatch.setattr(scheduling.schedules, "_schedules", {})

    @flow("sched.quick")
    def quick(ctx: FlowContext, note: str = "") -> str:
        return note

    @flow("sched.waits")
    def waits(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    yield
    registry.forget("sched.quick")
    registry.forget("sched.waits")


@pytest.fixture
def clock() -> Iterator[Any]:
    """Sets the store's clock."""
    shifted = timedelta()

    def go_to(moment: datetime) -> None:
        nonlocal shifted
        by = moment - loom.store.now()
        loom.store.shift_clock(by)
        shifted += by

    yield go_to
    loom.store.shift_clock(-shifted)


@pytest.fixture
def chief(db: None) -> Any:
    return client_of(make_user("chief", *LOOK, "pause_schedule", "trigger_schedule"))


def look() -> None:
    service = ScheduleService(loom.engine, lambda: loom.dispatcher)
    while service.tick():
        pass


def page(client: Any, schedule_id: str = "nightly") -> str:
    answer = client.get(url("schedulestate_change", schedule_id))
    assert answer.status_code == 200
    return str(answer.content.decode())


def row_of(schedule_id: str = "nightly") -> Any:
    return ScheduleState.objects.get(pk=schedule_id)


# To look at.


def test_the_page_of_a_schedule_tells_when_it_is_due(chief, clock):
    """In words, on its wall clock and in UTC, and what the change of the clocks does to it."""
    schedule("nightly", flow="sched.quick", cron="30 2 * * *", time_zone="Europe/Berlin", catch_up="latest")
    clock(SATURDAY)
    look()
    text = page(chief)
    assert "At 02:30, every day" in text
    assert "Europe/Berlin" in text
    assert "of what was missed the newest is started" in text
    sunday, monday = text.split("Sun 2026-03-29 03:30 CEST (+0200)")[1].split(
        "Mon 2026-03-30 02:30 CEST (+0200)"
    )
    assert "2026-03-29 01:30 UTC" in sunday
    assert "the offset from UTC has changed before it" in sunday
    assert "skipped on that day, so it is shifted by the gap" in sunday
    assert "2026-03-30 00:30 UTC" in monday
    assert "has changed before it" not in monday
    assert text.count('<th scope="row">') == 5


def test_a_time_that_comes_twice_is_marked(chief, clock):
    """The first pass counts, and the page says so."""
    schedule("nightly", flow="sched.quick", cron="30 2 * * *", time_zone="Europe/Berlin")
    clock(datetime(2026, 10, 24, 12, tzinfo=UTC))
    look()
    text = page(chief)
    sunday, monday = text.split("Sun 2026-10-25 02:30 CEST (+0200)")[1].split(
        "Mon 2026-10-26 02:30 CET (+0100)"
    )
    assert "its wall time comes twice; this is the first time" in sunday
    assert "has changed before it" not in sunday
    assert "has changed before it" in monday


def test_the_page_tells_where_and_with_what_it_runs(chief, clock):
    """Queue and input; the input only to those who may see payloads."""
    flow = registry.current("sched.quick").using(queue="default")
    schedule("nightly", flow=flow, cron="30 2 * * *", kwargs={"note": "of the night"})
    chief_sees = client_of(make_user("seer", *LOOK, "view_payload"))
    assert "of the night" in page(chief_sees)
    assert "of the night" not in page(chief)
    assert '<dd class="loom-id">default</dd>' in page(chief)


def test_a_run_leads_to_its_schedule(chief, clock):
    """Those who may see schedules have the link on the execution's page."""
    schedule("nightly", flow="sched.quick", cron="0 * * * *")
    clock(SATURDAY - timedelta(seconds=5))
    look()
    clock(SATURDAY + timedelta(seconds=1))
    look()
    address = url("execution_change", execution_id_of("nightly", SATURDAY))
    link = f'href="{url("schedulestate_change", "nightly")}"'
    assert link in chief.get(address).content.decode()
    guest = client_of(make_user("guest", "view_execution"))
    assert link not in guest.get(address).content.decode()


def test_the_page_tells_what_ran(chief, clock):
    """The newest first, with status and occurrence; none of a schedule whose id begins alike."""
    schedule("nightly", flow="sched.quick", cron="0 * * * *")
    schedule("nightly-2", flow="sched.quick", cron="0 * * * *")
    schedule("nightly@x", flow="sched.quick", cron="0 * * * *")
    for hour in range(3):
        clock(SATURDAY + timedelta(hours=hour, seconds=1))
        look()
    handle = loom.trigger_schedule("nightly", reason="r")
    text = page(chief)
    runs = [execution_id_of("nightly", SATURDAY + timedelta(hours=hour)) for hour in (2, 1)]
    places = [text.index(run) for run in (handle.id, *runs)]
    assert places == sorted(places)
    assert "nightly-2@" not in text
    assert "nightly@x@" not in text
    assert "triggered" in text
    assert text.count("loom-is-completed") == 3


def test_the_list_tells_the_state_of_each(chief, clock):
    """Active, paused, vanished from the code; and those that no service has seen are named above."""
    schedule("a-active", flow="sched.quick", cron="30 3 * * *")
    schedule("b-paused", flow="sched.quick", cron="0 4 * * 1")
    schedule("c-gone", flow="sched.quick", cron="0 5 1 * *")
    clock(SATURDAY)
    look()
    loom.trigger_schedule("a-active", reason="r")
    loom.pause_schedule("b-paused", reason="the archive moves", principal="anna")
    scheduling.schedules.forget("c-gone")
    schedule("d-new", flow="sched.quick", cron="0 6 * * *")
    before = list(ScheduleState.objects.values_list())

    text = chief.get(url("schedulestate_changelist")).content.decode()
    assert "not declared in this code" in text
    assert "At 04:00, on Monday" in text
    assert "the archive moves" in text
    assert "paused · anna" in text
    assert url("schedulestate_change", "d-new") in text
    assert "2026-03-29 03:30" in text
    assert text.count("loom-is-completed") == 1
    assert "0 of" not in text
    paused = chief.get(url("schedulestate_changelist"), {"state": "paused"}).content.decode()
    assert "b-paused" in paused
    assert url("schedulestate_change", "a-active") not in paused
    assert list(ScheduleState.objects.values_list()) == before


def test_the_list_asks_no_more_for_more_rows(chief, django_assert_max_num_queries):
    """What the last run came to is read with the rows."""
    for number in range(12):
        schedule(f"s{number}", flow="sched.quick", cron="30 3 * * *")
        loom.trigger_schedule(f"s{number}", reason="r")
    chief.get(url("schedulestate_changelist"))
    with django_assert_max_num_queries(10):
        chief.get(url("schedulestate_changelist"))


def test_pages_of_what_vanished_or_is_new_say_so(chief):
    """And of what cannot start its flow, or is declared otherwise than it was seen."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    assert "not seen by any service yet" in page(chief)
    look()
    scheduling.schedules.forget("nightly")
    gone = page(chief)
    assert "It starts nothing here" in gone or "it starts nothing here" in gone
    assert "30 3 * * *" in gone
    assert url("schedule_trigger", "nightly") not in gone
    schedule("nightly", flow="nobody", cron="0 4 * * *")
    other = page(chief)
    assert "declares it otherwise" in other
    assert "It cannot start its flow" in other
    assert "not registered here" in other


def test_runs_are_for_those_who_may_see_executions(chief, clock):
    """Without that permission the page shows none of them."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    handle = loom.trigger_schedule("nightly", reason="r")
    assert handle.id in page(chief)
    assert handle.id not in page(client_of(make_user("eve", "view_schedulestate")))


@pytest.mark.parametrize("permissions", [(), ("view_execution",), ("pause_schedule", "trigger_schedule")])
def test_schedules_are_for_those_who_may_look(permissions):
    """Neither list, page nor act without the permission to see schedules."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    client = client_of(make_user("eve", *permissions))
    addresses = [url("schedulestate_changelist"), url("schedulestate_change", "nightly")]
    for address in [*addresses, *(url(f"schedule_{name}", "nightly") for name in PAGES)]:
        assert client.get(address).status_code == 403
        assert client.post(address, {"reason": "r", "stage": "confirm"}).status_code in (403, 405)
    assert not ScheduleState.objects.exists()
    assert not Execution.objects.exists()


def test_an_unknown_schedule_is_not_found(chief):
    """Neither declared nor known to the database."""
    assert chief.get(url("schedulestate_change", "nobody")).status_code == 404
    assert chief.post(url("schedule_pause", "nobody"), {"reason": "r"}).status_code == 404


# Acts.


def send(client: Any, name: str, stage: str = "confirm", **given: Any) -> Any:
    return client.post(url(f"schedule_{name}", "nightly"), {"reason": "why not", "stage": stage, **given})


def test_pause_and_resume_by_form_preview_and_confirmation(chief):
    """The preview writes nothing; a done act is in the row, in the admin's history, and on the page."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    look()
    form = chief.get(url("schedule_pause", "nightly")).content.decode()
    assert 'name="reason"' in form
    assert url("schedulestate_change", "nightly") in form
    preview = send(chief, "pause", "preview").content.decode()
    assert "From now on no occurrence of the schedule starts anything." in preview
    assert row_of().paused_at is None
    assert "why not" in send(chief, "pause", "edit").content.decode()

    assert send(chief, "pause").status_code == 302
    row = row_of()
    assert (row.last_act, row.acted_by, row.act_reason) == ("pause", "chief", "why not")
    assert row.paused_at is not None
    [entry] = LogEntry.objects.all()
    assert (entry.object_id, entry.get_change_message()) == ("nightly", "pause: why not")
    text = page(chief)
    assert "why not" in text
    assert url("schedule_resume", "nightly") in text
    assert url("schedule_pause", "nightly") not in text

    assert send(chief, "resume").status_code == 302
    assert row_of().paused_at is None
    assert LogEntry.objects.count() == 2
    assert chief.get(url("schedulestate_history", "nightly")).status_code == 200


def test_trigger_starts_the_flow_and_leads_to_it(chief):
    """The message links the execution; the history names it."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *", kwargs={"note": "x"})
    preview = send(chief, "trigger", "preview").content.decode()
    assert "An execution of sched.quick version 1 is started." in preview
    assert not Execution.objects.exists()
    answer = chief.post(
        url("schedule_trigger", "nightly"), {"reason": "now", "stage": "confirm"}, follow=True
    )
    [execution] = Execution.objects.all()
    assert url("execution_change", execution.pk) in answer.content.decode()
    assert loom.handle(execution.pk).result() == "x"
    [entry] = LogEntry.objects.all()
    assert entry.get_change_message() == f"trigger ({execution.pk}): now"


def test_a_preview_tells_that_the_newest_run_has_not_ended(chief):
    """So that nobody starts a second one unawares."""
    schedule("nightly", flow="sched.waits", cron="30 3 * * *")
    loom.trigger_schedule("nightly", reason="r")
    assert "has not ended" in send(chief, "trigger", "preview").content.decode()


@pytest.mark.parametrize("stage", ["preview", "confirm"])
def test_an_act_that_comes_second_is_told_who_was_first(chief, stage):
    """An ordinary page, and nothing is written."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    loom.pause_schedule("nightly", reason="r", principal="anna")
    answer = send(chief, "pause", stage)
    assert answer.status_code == 409
    assert "It is paused already, by anna" in answer.content.decode()
    assert row_of().acted_by == "anna"
    assert LogEntry.objects.count() == 0


def test_what_cannot_be_done_is_an_ordinary_page(chief):
    """A flow that is gone; a resume of what is not paused; no reason, or a reason that cannot be kept."""
    schedule("nightly", flow="nobody", cron="30 3 * * *")
    answer = send(chief, "trigger")
    assert answer.status_code == 409
    assert "not registered here" in answer.content.decode()
    assert "It is not paused." in send(chief, "resume").content.decode()
    assert "This field is required" in send(chief, "pause", reason=" ").content.decode()
    assert send(chief, "pause", reason="x" * 2001).status_code == 200
    assert LogEntry.objects.count() == 0


@pytest.mark.parametrize(
    ("name", "permission"),
    [("pause", "pause_schedule"), ("resume", "pause_schedule"), ("trigger", "trigger_schedule")],
)
def test_each_act_has_its_permission(name, permission, caplog):
    """The other one does not help; a refusal is a line in the log and names what is missing."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    if name == "resume":
        loom.pause_schedule("nightly", reason="r")
    before = list(ScheduleState.objects.values_list())
    other = {"pause_schedule", "trigger_schedule"} - {permission}
    client = client_of(make_user("ben", *LOOK, *other))
    assert url(f"schedule_{name}", "nightly") not in page(client)
    assert client.get(url(f"schedule_{name}", "nightly")).status_code == 403
    for stage in ("preview", "confirm"):
        answer = send(client, name, stage)
        assert answer.status_code == 403
        assert f"loom.{permission}" in answer.content.decode()
    assert list(ScheduleState.objects.values_list()) == before
    assert not Execution.objects.exists()
    assert [record.principal for record in caplog.records if record.message == "an act was denied"] == [
        "ben"
    ] * 2

    allowed = client_of(make_user("carl", *LOOK, permission))
    assert url(f"schedule_{name}", "nightly") in page(allowed)
    assert send(allowed, name).status_code == 302


@pytest.mark.parametrize("method", ["get", "head"])
def test_safe_methods_write_nothing(method, chief):
    """Every page of a schedule, seen before or not, with whatever its address asks."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    schedule("new", flow="sched.quick", cron="30 3 * * *")
    ScheduleService(
        loom.engine, lambda: loom.dispatcher, declared=lambda: [scheduling.schedules.find("nightly")]
    ).tick()
    before = (list(ScheduleState.objects.values_list()), Execution.objects.count(), LogEntry.objects.count())
    for schedule_id in ("nightly", "new"):
        for name in ("schedulestate_change", *(f"schedule_{page}" for page in PAGES)):
            answer = getattr(chief, method)(url(name, schedule_id), {"stage": "confirm", "reason": "r"})
            assert answer.status_code == 200, name
    assert before == (
        list(ScheduleState.objects.values_list()),
        Execution.objects.count(),
        LogEntry.objects.count(),
    )


@pytest.mark.parametrize("method", ["put", "patch", "delete"])
def test_other_methods_are_refused(method, chief):
    """Neither the page nor an act knows them."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    for name in ("schedulestate_change", *(f"schedule_{page}" for page in PAGES)):
        assert getattr(chief, method)(url(name, "nightly")).status_code == 405


def test_an_act_needs_the_token(chief):
    """A form of somebody else's page is refused by Django."""
    schedule("nightly", flow="sched.quick", cron="30 3 * * *")
    strict = client_of(
        make_user("dora", *LOOK, "pause_schedule", "trigger_schedule"), enforce_csrf_checks=True
    )
    for name in PAGES:
        assert send(strict, name).status_code == 403
    assert not ScheduleState.objects.exists()


@pytest.mark.parametrize("nasty", [text[:200] for text in NASTY], ids=range(len(NASTY)))
def test_nothing_of_a_schedule_runs_in_the_browser(chief, nasty):
    """Its id and the reasons and names of who acted are text, on every page."""
    schedule(nasty, flow="sched.quick", cron="30 3 * * *")
    loom.trigger_schedule(nasty, reason=nasty, principal=nasty)
    loom.pause_schedule(nasty, reason=nasty, principal=nasty)
    addresses = [
        url("schedulestate_changelist"),
        url("schedulestate_change", nasty),
        *(url(f"schedule_{name}", nasty) for name in PAGES),
    ]
    for address in addresses:
        answer = chief.get(address)
        assert answer.status_code == 200, address
        check(answer.content.decode())
    for name in ("pause", "resume", "trigger"):
        for stage in ("preview", "confirm"):
            answer = chief.post(
                url(f"schedule_{name}", nasty), {"reason": nasty, "stage": stage}, follow=True
            )
            assert answer.status_code in (200, 409)
            check(answer.content.decode())
    scheduling.schedules.forget(nasty)
    check(chief.get(url("schedulestate_change", nasty)).content.decode())
