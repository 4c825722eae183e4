"""loom_schedule: what it lists, what it does, and the exit code of a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from loom_django import FlowContext, flow, schedule, scheduling
from loom_django.definitions import registry
from loom_django.kernel.state import Status
from loom_django.models import Execution, ScheduleState
from loom_django.runtime import loom
from loom_django.services.dispatch import WorkerDispatcher
from tests.admin.conftest import _clean_slate, make_user
from tests.commands.test_acts import refused, run

__all__ = ["_clean_slate"]

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _nightly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scheduling.schedules, "_schedules", {})

    @flow("sched.command")
    def body(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    schedule("nightly", flow="sched.command", cron="30 3 * * *", time_zone="Europe/Berlin")
    yield
    registry.forget("sched.command")


def act(name: str, *args: str) -> str:
    return run("loom_schedule", name, "nightly", "--reason", "why not", *args)


def listed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("loom_schedule", "list", "--format", "json"))
    return found


def test_the_list_knows_what_is_declared_and_what_is_stored():
    """One that no service has seen, one that is paused, one that vanished; a look writes nothing."""
    [new] = listed()
    assert (new["state"], new["declared"], new["decided_until"]) == ("not seen yet", True, None)
    assert len(new["next"]) == 5
    assert not ScheduleState.objects.exists()
    schedule("gone", flow="sched.command", cron="0 4 * * *")
    loom.pause_schedule("gone", reason="r")
    scheduling.schedules.forget("gone")
    act("pause")
    gone, paused = listed()
    assert (gone["id"], gone["state"], gone["next"], gone["cron"]) == (
        "gone",
        "not declared",
        [],
        "0 4 * * *",
    )
    assert (paused["state"], paused["last_act"], paused["reason"]) == ("paused", "pause", "why not")
    text = run("loom_schedule", "list")
    assert "nightly: 30 3 * * * (Europe/Berlin) starts sched.command, paused" in text
    assert "03:30:00+0" in text
    assert "last act: pause by shell:" in text


def test_without_schedules_the_list_says_so():
    """And is no error."""
    scheduling.schedules.forget("nightly")
    assert run("loom_schedule", "list").strip() == "there are no schedules"
    assert listed() == []


def test_pause_and_resume_at_the_shell():
    """Without --user whoever is at the shell acts; a second time is told and changes nothing."""
    assert "would have nightly paused" in act("pause", "--dry-run")
    assert not ScheduleState.objects.exists()
    assert "nightly is paused" in act("pause")
    assert "nightly is paused already; nothing was changed" in act("pause")
    assert ScheduleState.objects.get().acted_by.startswith("shell:")
    assert "nightly is resumed" in act("resume")
    assert "nightly is not paused; nothing was changed" in act("resume", "--dry-run")
    assert ScheduleState.objects.get().paused_at is None


def test_trigger_at_the_shell():
    """The execution is named; a rehearsal starts nothing and tells that one still runs."""
    assert "would start sched.command version 1" in act("trigger", "--dry-run")
    assert not Execution.objects.exists()
    out = json.loads(act("trigger", "--format", "json"))
    assert (out["act"], out["changed"], out["runs"]) == ("trigger_schedule", True, "here")
    assert loom.handle(out["execution_id"]).status is Status.SUSPENDED
    assert "its newest run has not ended" in act("trigger", "--dry-run")


def test_a_worker_takes_up_what_was_triggered(monkeypatch):
    """Where one runs, the shell runs nothing itself."""
    monkeypatch.setattr(loom, "_dispatcher", WorkerDispatcher())
    assert "a worker takes it up" in act("trigger")
    assert Execution.objects.get().ready_at is not None


def test_what_is_refused_exits_with_one():
    """An unknown schedule, a flow that is gone, a user without the permission; wrong use exits with two."""
    code, message = refused("loom_schedule", "pause", "nobody", "--reason", "r")
    assert (code, "not declared" in message) == (1, True)
    make_user("ben", "view_schedulestate", "pause_schedule")
    code, message = refused("loom_schedule", "trigger", "nightly", "--reason", "r", "--user", "ben")
    assert (code, "loom.trigger_schedule" in message) == (1, True)
    registry.forget("sched.command")
    assert refused("loom_schedule", "trigger", "nightly", "--reason", "r")[0] == 1
    assert refused("loom_schedule", "pause", "nightly", "--reason", " ")[0] == 2
    assert refused("loom_schedule", "pause", "nightly", "--reason", "r", "--user", "nobody")[0] == 2
    with pytest.raises(CommandError):
        call_command("loom_schedule", "pause", "nightly")
    assert not ScheduleState.objects.exists()


def test_a_user_acts_under_their_own_name():
    """With the permission."""
    make_user("carl", "pause_schedule")
    act("pause", "--user", "carl")
    assert ScheduleState.objects.get().acted_by == "carl"
