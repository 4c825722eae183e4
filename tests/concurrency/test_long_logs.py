"""Logs of thousands of events: read whole, folded whole, and gone on with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loom_django.kernel.fold import fold
from loom_django.kernel.state import Status
from tests.crash.kit import KILLED, Lab, check_history, history, state

STEPS = 2_500
CRASH_AFTER = 2_400
# Five thousand steps are two events each, and one start: no page size is a divisor of that.
MANY = 5_000


@pytest.mark.xdist_group("long")
def test_a_crash_late_in_a_long_run(lab: Lab):
    """Killed after 2 400 of 2 500 steps, a flow goes on where it was; the fold is that of an uncut run."""
    points = [("before-effect", f"counted#{CRASH_AFTER}", 1, "die")]
    child = lab.spawn("start", "counts", "x", args=[STEPS], loom={"DISPATCHER": "inline"}, points=points)
    assert child.wait() == KILLED, child.log
    lab.pass_time()
    lab.run("command", "loom_recover")
    lab.run("command", "run_loom_worker", "--once")
    found = state("x")
    assert found.status is Status.COMPLETED
    runs = lab.counted()
    assert max(runs.values()) == 1, {step: count for step, count in runs.items() if count > 1}
    assert len(runs) == STEPS
    events = check_history("x")
    # Without the second marker of the step that was killed, it is the log of a run that nothing cut.
    again = next(
        event
        for event in events
        if event.kind == "STEP_STARTED" and event.data["step"] == f"counted#{CRASH_AFTER}"
    )
    uncut = [event for event in events if event is not again]
    moved = [replace(event, sequence=number) for number, event in enumerate(uncut, start=1)]
    frames = fold(moved).frames
    assert {step: frame.output for step, frame in frames.items()} == {
        step: frame.output for step, frame in found.frames.items()
    }


@pytest.mark.xdist_group("long")
def test_a_log_of_more_than_ten_thousand_events(lab: Lab):
    """Whoever reads it reads all of it: the body, the fold, verification."""
    lab.run("start", "counts-then-waits", "x", args=[MANY], loom={"DISPATCHER": "inline"})
    assert len(history("x")) > 10_000
    lab.run("resume", "x", "Go", loom={"DISPATCHER": "inline"})
    assert state("x").status is Status.COMPLETED
    runs = lab.counted()
    assert len(runs) == MANY
    assert set(runs.values()) == {1}
    check_history("x")
