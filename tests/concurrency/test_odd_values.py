"""Values and exceptions that broke other systems, through whole flows, replays and workers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from loom_django.kernel import codec
from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash import flows
from tests.crash.kit import Lab, check_history, state

VALUES = {"nul": {flows.NUL: [flows.NUL]}, "floats": flows.DEEP, "big": {"of": flows.BIG}}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_from_everywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As input, argument, result, decision, emitted value, answer and message: equal, and of the same type."""
    monkeypatch.setenv(flows.LEDGER, str(tmp_path / "ledger"))
    value = VALUES[name]
    handle = flows.echoes.using(execution_id="x").start(value)
    assert handle.refresh().status == "SUSPENDED"
    loom.resume("x", event_type="Go", payload=value)
    loom.send("x", "note", value)
    assert same(handle.refresh().result(), [value] * 5)
    again = flows.echoes.using(execution_id="x").start(value)
    assert not again.created  # and so is the input when it is compared
    assert (tmp_path / "ledger").read_text().count("\n") == 1
    check_history("x")


def same(one: Any, other: Any) -> bool:
    """Equal down to the sign of a zero, and a NaN equal to another."""
    if isinstance(one, float) and isinstance(other, float):
        return math.copysign(1, one) == math.copysign(1, other) and (
            one == other or (one != one and other != other)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_an_odd_exception_fails_its_step_and_nothing_else(lab: Lab):
    """The worker lives, the failure has its name and a bounded text, and is caught in the replay as at first."""
    names = list(flows.ODD_ERRORS)
    for name in names:
        lab.run("start", "odd-errors", name, args=[name])
    worker = lab.spawn("command", "run_loom_worker", "--once")
    assert worker.wait() == 0, worker.log
    first = {name: state(name) for name in names}
    assert {name for name in names if first[name].status is not Status.SUSPENDED} == set(), worker.log
    for name in names:
        lab.run("resume", name, "Go")
    lab.run("command", "run_loom_worker", "--once")
    for name in names:
        found = state(name)
        assert found.status is Status.COMPLETED, found.error
        error_type, message = codec.decode(found.result)
        recorded = found.frames["odd"].error
        assert recorded is not None
        assert error_type == recorded["type"]
        assert error_type.rpartition(".")[2] in repr(type(flows.ODD_ERRORS[name]()))
        assert codec.decode(recorded["message"]).startswith(message)
        assert len(str(recorded)) < 100_000
        assert len(lab.effects(name)) == 1
        check_history(name)
