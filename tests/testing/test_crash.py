"""A process that dies at a point of a step's life, and what recovery makes of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from loom_django import loom
from loom_django.conf import get_settings
from loom_django.errors import InvalidInputError
from loom_django.kernel.state import Status
from loom_django.testing import Harness
from loom_django.testing.harnessing import POINTS
from tests.shop.models import Ledger
from tests.testing.flows import (
    TOOLS,
    booked,
    fetch,
    keyed_steps,
    once,
    one_step,
    pages,
    repeatable,
    swallows,
    unsure,
)

pytestmark = pytest.mark.django_db

DONE, IN_DOUBT = "EXECUTION_COMPLETED", "EXECUTION_SUSPENDED"

# How often the tool is called in all, and how the execution ends; a call that was never made counts for none.
TABLE = {
    ("undeclared", "before-start"): (1, DONE),
    ("undeclared", "before-effect"): (1, DONE),
    ("undeclared", "in-effect"): (2, DONE),
    ("undeclared", "after-effect"): (2, DONE),
    ("undeclared", "after-outcome"): (2, DONE),  # a quick outcome waits for the next boundary
    ("repeatable", "before-start"): (1, DONE),
    ("repeatable", "before-effect"): (1, DONE),
    ("repeatable", "in-effect"): (2, DONE),
    ("repeatable", "after-effect"): (2, DONE),
    ("repeatable", "after-outcome"): (2, DONE),
    ("once", "before-start"): (1, DONE),
    ("once", "before-effect"): (0, IN_DOUBT),
    ("once", "in-effect"): (1, IN_DOUBT),
    ("once", "after-effect"): (1, IN_DOUBT),
    ("once", "after-outcome"): (1, DONE),  # durable at once
    ("booked", "before-start"): (1, DONE),
    ("booked", "before-effect"): (1, DONE),
    ("booked", "in-effect"): (2, DONE),  # the first one's rows were rolled back
    ("booked", "after-effect"): (2, DONE),
    ("booked", "after-outcome"): (1, DONE),  # durable with its rows
}


def test_the_table_is_whole() -> None:
    """Each tool at each point."""
    assert set(TABLE) == {(name, point) for name in TOOLS for point in POINTS}


@pytest.mark.parametrize(("name", "point"), TABLE, ids=lambda value: value)
def test_a_crash_at_each_point(loom_harness: Harness, name: str, point: Any) -> None:
    """After recovery the log, the calls, the keys and the rows are what the declaration promises."""
    called, end = TABLE[name, point]
    one_step.using(execution_id="e1").start(name)
    loom_harness.crash(TOOLS[name], point)
    loom_harness.run()
    assert loom.store.held("e1") is not None
    assert loom_harness.events("e1")[-1] not in (DONE, IN_DOUBT)
    loom_harness.run()
    calls = loom_harness.calls(TOOLS[name])
    assert (len(calls), loom_harness.events("e1")[-1]) == (called, end)
    assert {call.idempotency_key for call in calls} <= {f"e1:{name}"}
    assert len(loom_harness.in_doubt()) == (end == IN_DOUBT)
    assert Ledger.objects.count() == (name == "booked")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("point", POINTS)
def test_a_transactional_step_on_committed_rows(loom_harness: Harness, point: Any) -> None:
    """Its rows are there exactly once, also where the transaction is a real one."""
    one_step.start("booked")
    loom_harness.crash(booked, point)
    loom_harness.run()
    loom_harness.run()
    assert Ledger.objects.count() == 1


def test_a_crash_stops_the_process(loom_harness: Harness) -> None:
    """What else is ready waits for the next run, which comes after the dead process's lease."""
    first = one_step.start("once")
    second = one_step.start("repeatable")
    began = loom_harness.now
    loom_harness.crash(once, "after-outcome")
    loom_harness.run()
    assert (first.status, second.status) == (Status.RUNNING, Status.PENDING)
    assert loom_harness.now == began
    loom_harness.run()
    assert (first.status, second.status) == (Status.COMPLETED, Status.COMPLETED)
    assert loom_harness.now >= began + timedelta(seconds=get_settings().LEASE_TTL)


def test_a_crash_happens_once(loom_harness: Harness) -> None:
    """The step's second attempt passes the point."""
    one_step.start("repeatable")
    loom_harness.crash(repeatable, "in-effect")
    loom_harness.run()
    loom_harness.run()
    one_step.start("repeatable")
    loom_harness.run()
    assert len(loom_harness.calls(repeatable)) == 3


def test_two_crashes_one_after_the_other(loom_harness: Harness) -> None:
    """Recovery may die too."""
    handle = one_step.start("repeatable")
    loom_harness.crash(repeatable, "in-effect")
    loom_harness.crash(repeatable, "in-effect")
    owners = set()
    for _ in range(2):
        loom_harness.run()
        lease = loom.store.held(handle.id)
        assert lease is not None
        owners.add(lease.owner)
    assert len(owners) == 2
    loom_harness.run()
    assert handle.result() == "done"
    assert [call.attempt for call in loom_harness.calls(repeatable)] == [1, 2, 3]


def test_a_crash_of_one_keyed_step(loom_harness: Harness) -> None:
    """tool.keyed(key) means that step alone."""
    handle = keyed_steps.start(["a", "b"])
    loom_harness.crash(repeatable.keyed("b"), "before-effect")
    loom_harness.run()
    assert [call.step_id for call in loom_harness.calls(repeatable)] == ["repeatable#a"]
    loom_harness.run()
    assert handle.result() == ["a", "b"]


def test_a_crash_while_the_clock_is_moved(loom_harness: Harness) -> None:
    """advance() stops running and goes to its target; the next call recovers."""
    loom_harness.stub(fetch, "hello")
    handle = pages.start("https://example.com")
    loom_harness.run()
    loom_harness.crash(pages.steps["publish"], "before-start")
    target = loom_harness.now + timedelta(hours=2)
    loom_harness.advance(target)
    assert loom_harness.now == target
    assert handle.status == Status.RUNNING
    loom_harness.advance(timedelta(hours=1))
    assert handle.result() == 5


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_of_an_async_step(loom_harness: Harness, point: Any) -> None:
    """Both kinds of flow die alike."""
    loom_harness.stub(fetch, "hello")
    handle = pages.start("https://example.com")
    loom_harness.crash(fetch, point)
    loom_harness.run()
    assert handle.status in (Status.PENDING, Status.RUNNING)
    loom_harness.run()
    loom_harness.advance(timedelta(hours=1))
    assert handle.result() == 5


@pytest.mark.parametrize("point", ["before-effect", "in-effect", "after-effect"])
def test_a_body_that_catches_everything_writes_nothing_after_its_death(
    loom_harness: Harness, point: Any
) -> None:
    """Neither except nor finally gets another word into the log."""
    swallows.using(execution_id="e1").start()
    loom_harness.crash(once, point)
    loom_harness.run()
    assert loom_harness.events("e1") == ["EXECUTION_STARTED", "STEP_STARTED"]


def test_a_crash_in_an_effect_that_raises(loom_harness: Harness) -> None:
    """The process is gone before the exception could be recorded."""
    loom_harness.stub(once, raises=ValueError("refused"))
    one_step.using(execution_id="e1").start("once")
    loom_harness.crash(once, "in-effect")
    loom_harness.run()
    loom_harness.run()
    assert loom_harness.events("e1")[-2:] == ["EFFECT_INDOUBT", "EXECUTION_SUSPENDED"]


def test_a_recovery_that_fails_is_not_silent(loom_harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What recovery would log and leave alone fails the test."""
    one_step.start("repeatable")
    loom_harness.crash(repeatable, "in-effect")
    loom_harness.run()
    monkeypatch.setattr(one_step, "flow_hash", "sha256:changed")
    with pytest.raises(AssertionError, match="could not be recovered"):
        loom_harness.run()


def test_an_unknown_point_is_refused(loom_harness: Harness) -> None:
    """With the names that there are."""
    point: Any = "during-effect"
    with pytest.raises(InvalidInputError, match="in-effect"):
        loom_harness.crash(unsure, point)
