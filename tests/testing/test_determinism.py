"""A body that would not replay fails its first test, with what was recorded and what it asks for now."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import transaction

from loom_django import loom
from loom_django.errors import ExecutionFailedError
from loom_django.kernel.state import Status
from loom_django.signals import execution_suspended
from loom_django.testing import Harness, NonDeterminismError
from tests.testing import flows
from tests.testing.flows import (
    asks,
    breaks,
    charge,
    decides,
    goes_round,
    goes_round_by_chance,
    order,
    parcels,
    random_and_no_park,
    random_argument,
    reads_a_setting,
    repeatable,
    undeclared,
    waits_for_itself,
    wire_transfer,
)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def settings_of_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "SETTINGS", dict(flows.SETTINGS))


def test_a_random_argument(loom_harness: Harness) -> None:
    """Both values are told, with the line and the way out."""
    handle = random_argument.start()
    with pytest.raises(NonDeterminismError) as caught:
        loom_harness.run()
    error = caught.value
    [call] = loom_harness.calls(repeatable)
    assert (error.execution_id, error.flow_id, error.step_id) == (handle.id, random_argument.id, "repeatable")
    assert error.recorded == f"step repeatable('{call.args[0]}')"
    assert error.replayed.startswith("step repeatable('0.")
    assert error.replayed != error.recorded
    assert "flows.py:" in str(error)
    assert "ctx.random()" in str(error)


def test_a_flow_without_a_park(loom_harness: Harness) -> None:
    """An end is checked as a park is: a crash would have replayed it."""
    random_and_no_park.start()
    with pytest.raises(NonDeterminismError):
        loom_harness.run()


@pytest.mark.parametrize(
    ("what", "value", "recorded", "replayed"),
    [
        ("step", "undeclared", "step repeatable('x')", "step undeclared('x') at "),
        ("words", ["b"], "step repeatable#a('a')", "step repeatable#b('b') at "),
        ("words", ["a", "b"], "no step, but a wait for Approval", "step repeatable#b('b') at "),
        ("words", [], "step repeatable#a('a')", "the step is not asked for"),
        ("on", "Refusal", "a wait for Approval", "a wait for Refusal at "),
        ("sleep", True, "a wait for Approval", "the end of the flow"),
        ("emit", 1, "no such event", "Counted at "),
        ("decide", True, "no such decision", "decision 'late' at "),
    ],
)
def test_a_setting_that_changes(
    loom_harness: Harness,
    request: pytest.FixtureRequest,
    what: str,
    value: Any,
    recorded: str,
    replayed: str,
) -> None:
    """A changed step, argument, wait, event or end is found, each with both sides."""

    def change(**facts: Any) -> None:
        flows.SETTINGS[what] = value

    execution_suspended.connect(change)
    request.addfinalizer(lambda: execution_suspended.disconnect(change))
    reads_a_setting.start()
    with pytest.raises(NonDeterminismError) as caught:
        loom_harness.run()
    assert caught.value.recorded == recorded
    assert caught.value.replayed.startswith(replayed)
    assert "decided" not in flows.SETTINGS


def test_an_answer_at_the_moment_of_the_park(loom_harness: Harness, request: pytest.FixtureRequest) -> None:
    """What comes after the park is no part of what the body has asked for."""

    def answer(execution_id: str, **facts: Any) -> None:
        loom.resume(execution_id, event_type="Approval", payload={"by": "anna"})

    execution_suspended.connect(answer)
    request.addfinalizer(lambda: execution_suspended.disconnect(answer))
    loom_harness.stub(charge, {"id": "ch_1"})
    loom_harness.stub(wire_transfer, "tx-1")
    handle = order.start(1, Decimal(1), "DE02")
    loom_harness.run()
    assert handle.result() == "paid"


def test_a_message_at_the_moment_of_the_park(loom_harness: Harness, request: pytest.FixtureRequest) -> None:
    """One that lies in the inbox by then is taken by the next run, not by the replay."""

    def send(execution_id: str, **facts: Any) -> None:
        with transaction.atomic():
            loom.send(execution_id, "carrier", {"status": "delivered"}, message_id="m1")

    execution_suspended.connect(send)
    request.addfinalizer(lambda: execution_suspended.disconnect(send))
    handle = parcels.start()
    loom_harness.run()
    assert handle.result() == ["delivered"]


def test_a_replay_is_a_body_run_that_is_silent(
    loom_harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """What is refused in a body is refused there too, and what was logged is not logged again."""
    caplog.set_level("INFO", "loom_django.flow")
    handle = waits_for_itself.start()
    loom_harness.run()
    assert handle.status == Status.SUSPENDED
    assert [record.message for record in caplog.records if record.name == "loom_django.flow"] == [
        "of course not"
    ]


def test_the_same_setting_is_fine(loom_harness: Harness) -> None:
    """Reading one is not forbidden as long as it stays."""
    handle = reads_a_setting.start()
    loom_harness.run()
    loom.resume(handle.id, event_type="Approval")
    loom_harness.run()
    assert handle.status == Status.COMPLETED


def test_what_the_context_gives_is_deterministic(loom_harness: Harness) -> None:
    """now(), random(), uuid4(), decide(), emit() and meter() replay."""
    handle = decides.start()
    loom_harness.run()
    loom_harness.advance(timedelta(days=1))
    loom.resume(handle.id, event_type="Approval")
    loom_harness.run()
    assert handle.status == Status.COMPLETED


def test_the_replay_has_no_effects(loom_harness: Harness) -> None:
    """No tool is called by it and nothing is added to the log."""
    order_calls: list[str] = []
    loom_harness.stub(charge, calls=lambda ctx, *args: order_calls.append(ctx.step_id) or {"id": "ch"})
    order.using(execution_id="o1").start(1, Decimal(1), "DE02")
    loom_harness.run()
    assert order_calls == ["charge"]
    assert loom_harness.events("o1") == [
        "EXECUTION_STARTED",
        "STEP_STARTED",
        "STEP_COMPLETED",
        "EXECUTION_SUSPENDED",
    ]


@pytest.mark.parametrize("flow_", [asks, parcels, breaks], ids=lambda flow_: flow_.id)
def test_parks_of_each_kind_replay(loom_harness: Harness, flow_: Any) -> None:
    """In doubt, on a message, on an error: the body comes to the same place."""
    handle = flow_.start()
    loom_harness.run()
    assert handle.status == Status.SUSPENDED


def test_misuse_replays_as_misuse(loom_harness: Harness) -> None:
    """A body that ends by its own mistake is told of that mistake, not of a divergence."""
    flows.SETTINGS["step"] = "no-such-step"
    handle = reads_a_setting.start()
    loom_harness.run()
    with pytest.raises(ExecutionFailedError, match="no-such-step"):
        handle.result()


def test_a_failed_step_replays(loom_harness: Harness) -> None:
    """A recorded failure is raised again in the replay, and the body goes the same way."""
    loom_harness.stub(undeclared, raises=ValueError("no"))
    flows.SETTINGS["step"] = "undeclared"
    handle = reads_a_setting.start()
    loom_harness.run()
    with pytest.raises(ExecutionFailedError, match="no"):
        handle.result()


def test_a_flow_that_continues_replays(loom_harness: Harness) -> None:
    """Each member's log, up to the hand-over; and the harness runs the whole chain."""
    handle = goes_round.start(1)
    loom_harness.run()
    assert handle.result() == 3
    assert [call.args[0] for call in loom_harness.calls(repeatable)] == ["1", "2", "3"]


def test_a_flow_that_continues_by_chance(loom_harness: Harness) -> None:
    """It is told that the log went on in a successor, and the body does not."""
    flows.CHANCES.clear()
    goes_round_by_chance.start(1)
    with pytest.raises(NonDeterminismError) as caught:
        loom_harness.run()
    assert (caught.value.recorded, caught.value.replayed) == ("continue_as_new", "the end of the flow")
