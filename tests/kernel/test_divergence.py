"""The watch over recorded steps: who is missed when, and what it costs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from loom_django.kernel import divergence
from loom_django.kernel.divergence import Watch
from loom_django.kernel.state import Decision, Frame, FrameStatus

DONE, BEGUN = FrameStatus.COMPLETED, FrameStatus.RUNNING


def frames(*named: Any) -> list[Frame]:
    """Frames in the order of a log, by their ids, or by ``(id, scope, status)``."""
    made = []
    for place, given in enumerate(named, 1):
        step_id, scope, status = given if isinstance(given, tuple) else (given, "", DONE)
        made.append(
            Frame(step_id, step_id, status, scope=scope, first_sequence=2 * place, started_sequence=2 * place)
        )
    return made


def asked(watch: Watch, *step_ids: str) -> Watch:
    for step_id in step_ids:
        watch.asked(step_id)
    return watch


def test_what_was_not_asked_for_is_skipped() -> None:
    """Outcomes, failures too, are owed; a step without one is not."""
    log = frames("a", ("b", "", FrameStatus.FAILED), ("c", "", BEGUN), "d")
    watch = Watch(log)
    assert watch.skipped() == ("a", "b", "d")
    assert asked(watch, "a", "c", "new").skipped() == ("b", "d")
    assert asked(watch, "b", "d").skipped() == ()


def test_an_order_is_no_membership() -> None:
    """A body may ask in another order than it did."""
    assert asked(Watch(frames("a", "b", "c")), "c", "a", "b").skipped() == ()


def test_a_step_that_the_log_holds_is_judged_by_what_was_begun_before_it() -> None:
    """What came later may well be asked for later."""
    log = frames("a", ("b", "", BEGUN), "c")
    watch = Watch(log)
    assert watch.skipped(watch.before(log[1], "")) == ("a",)
    asked(watch, "a")
    assert watch.skipped(watch.before(log[1], "")) == ()
    assert watch.skipped(watch.before(None, "")) == ("c",)


def test_a_step_in_a_scope_is_judged_by_what_was_begun_before_the_scope() -> None:
    """Siblings race, and what follows the scope is asked for after it."""
    log = frames("a", ("b", "1.left", DONE), ("c", "1.right.1.up", DONE), "d")
    watch = Watch(log)
    assert watch.skipped(watch.before(None, "1.left")) == ("a",)
    asked(watch, "a")
    assert watch.skipped(watch.before(None, "1.right.1.down")) == ()
    assert watch.skipped(watch.before(None, "2.new")) == ("b", "c", "d")  # it was not there before


def test_the_frames_of_a_scope_are_compared_as_a_set() -> None:
    """By the scope, with the scopes inside it; another scope's are not its own."""
    log = frames(("b", "1.left", DONE), ("c", "1.right.1.up", DONE), ("d", "11.left", DONE))
    watch = Watch(log)
    assert (watch.skipped_in("1.right.1"), watch.skipped_in("1")) == (("c",), ("b", "c"))
    asked(watch, "b", "c")
    assert (watch.skipped_in("1.right.1"), watch.skipped_in("1"), watch.skipped()) == ((), (), ("d",))


def test_a_failed_scope_owes_nothing() -> None:
    """Its branches were stopped wherever they were."""
    watch = Watch(frames("a", ("b", "1.left", DONE), ("c", "1.right.1.up", DONE), ("d", "2.left", DONE)))
    watch.scope_failed("1")
    assert watch.skipped() == ("a", "d")


def test_what_was_begun_before_a_migration_is_exempt() -> None:
    """By its newest attempt: one that the new code has made, it must ask for again."""
    log = frames("a", "b", "c")
    log[0] = Frame("a", "a", DONE, first_sequence=2, started_sequence=9)
    assert Watch(log, 5).skipped() == ("a", "c")


def test_a_served_decision_exempts_exactly_its_own_steps() -> None:
    """Not those that look like them."""
    watch = Watch(frames("check", "check#1", "check#2"))
    watch.decided(Decision(None, 0, sequence=20, inner_steps=("check#1",)))
    assert watch.skipped() == ("check", "check#2")


def test_a_decision_of_too_many_steps_exempts_what_was_begun_while_it_ran() -> None:
    """Its record names some, and says when the first was begun."""
    watch = Watch(frames("a", "b", "c", "d", "e"))
    watch.decided(Decision(None, 0, sequence=9, inner_steps=("b",), inner_since=4))
    assert watch.skipped() == ("a", "e")


def lines_run(steps: int) -> int:
    """How many lines of the module a run of so many recorded steps, and as many new ones, takes."""
    log = frames(*((f"s{number}", "1.left", DONE) for number in range(steps)))
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != divergence.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        watch = Watch(log)
        for frame in log:
            watch.asked(frame.step_id)
            watch.skipped(watch.before(frame, "1.left"))
        for _ in log:
            watch.skipped(watch.before(None, "1.left"))
            watch.skipped()
            watch.skipped_in("1")
    finally:
        sys.settrace(before)
    return count


def test_it_costs_the_same_for_each_step() -> None:
    """Ten times as many steps take ten times as many lines: 10 000 recorded ones, 10 000 new ones."""
    small, large = lines_run(1_000), lines_run(10_000)
    assert large / small == pytest.approx(10, rel=0.02)
    assert large < 10_000 * 60
