"""The loop: drains, backs off, reports seldom, ends when told."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loom_django.services.loop import ROUND_UP, Loop, Service, stop_on_signals

pytestmark = pytest.mark.once


class Scripted:
    """A service whose ticks are told in advance; an exception is raised, else returned."""

    def __init__(self, name: str, *ticks: Any) -> None:
        self.name = name
        self.ticks = list(ticks)
        self.calls = 0

    def tick(self) -> bool:
        self.calls += 1
        outcome = self.ticks.pop(0) if self.ticks else False
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def loop_of(*services: Service, clock: Callable[[], float] = time.monotonic) -> Loop:
    return Loop(services, interval=lambda: 0.01, after_turn=lambda: None, draw=lambda: 0.5, clock=clock)


def test_it_turns_until_no_service_has_more() -> None:
    """run_once ends when all are idle, and says that all went well."""
    first, second = Scripted("a", True, True), Scripted("b")
    assert loop_of(first, second).run_once() is True
    assert (first.calls, second.calls) == (3, 3)


def test_a_failing_service_is_backed_off_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """At most about one attempt in each back-off, and one line for a whole outage."""
    clock = Clock()
    bad = Scripted("bad", *[ConnectionError("away")] * 200)
    good = Scripted("good")
    loop = loop_of(bad, good, clock=clock)
    with caplog.at_level(logging.ERROR, "loom_django.loop"):
        for _ in range(200):
            loop.turn()
            clock.now += 0.1
    assert good.calls == 200
    assert bad.calls <= 10  # 20 seconds, delays doubling from 0.5 to 5
    assert len(caplog.records) == 1
    assert loop_of(Scripted("bad", ValueError())).run_once() is False


def test_a_service_that_works_again_is_ticked_every_turn() -> None:
    """The back-off ends with the failure."""
    clock = Clock()
    service = Scripted("s", ConnectionError(), False, False)
    loop = loop_of(service, clock=clock)
    loop.turn()
    clock.now += 10
    loop.turn()
    loop.turn()
    assert service.calls == 3


def test_a_stop_ends_the_wait_at_once() -> None:
    """No interval has to pass before a loop notices that it is to end."""
    loop = Loop([Scripted("s")], interval=lambda: 3600, after_turn=lambda: None, draw=lambda: 0.5)
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.request_stop()
    thread.join(20)
    assert not thread.is_alive()


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    """A loop in a thread is stopped by its owner; it must not fail for want of signals."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(stop_on_signals(lambda: None)()))
    thread.start()
    thread.join(20)
    assert outcome == [None]


def test_a_signal_stops_a_loop_whose_thread_holds_the_lock_of_what_it_waits_for() -> None:
    """It is handled between any two steps of the main thread, and these may be within a wait or a wake."""
    loop = Loop([Scripted("s")], interval=lambda: 3600, after_turn=lambda: None, draw=lambda: 0.5)
    lock: Any = loop.wake._cond  # type: ignore[attr-defined]
    # A handler that waits for the lock would wait for ever; the alarm ends that with a failure.
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("the handler waits for a lock"))
    undo = stop_on_signals(loop.request_stop)
    try:
        signal.alarm(20)
        with lock:
            signal.raise_signal(signal.SIGTERM)
        loop.run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        undo()
    assert loop.stop.is_set()


def test_a_ready_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is told once in a while, and the loop serves on."""
    monkeypatch.setattr("loom_django.services.loop.REPORT_PROGRESS_EVERY", 0.0)
    service = Scripted("a", True, True, True)
    loop = loop_of(service)
    loop.ready_file = tmp_path / "absent" / "ready"
    loop.after_turn = lambda: loop.request_stop() if service.calls == 5 else None
    with caplog.at_level(logging.ERROR, "loom_django.loop"):
        assert loop.run() is True
    assert service.calls == 5
    assert [record.message.startswith("the ready file") for record in caplog.records] == [True]


def sleeping(next_in: Callable[[], float | None], *services: Service) -> Loop:
    return Loop(services, interval=lambda: 8.0, after_turn=lambda: None, draw=lambda: 0.5, next_in=next_in)


@pytest.mark.parametrize(
    ("ahead", "pause"), [(None, 8.0), (3600.0, 8.0), (0.5, 0.5 + ROUND_UP), (0.0, ROUND_UP), (-9.0, ROUND_UP)]
)
def test_it_sleeps_until_what_is_due_and_no_longer_than_a_poll(ahead: float | None, pause: float) -> None:
    """What is known of the future shortens the wait; the poll bounds it."""
    assert sleeping(lambda: ahead)._pause() == pause


def test_what_is_not_known_does_not_end_the_loop() -> None:
    """A database that is away while it is asked for what comes next; and a service that fails asks nothing."""

    def fails() -> float:
        raise ConnectionError("away")

    assert sleeping(fails)._pause() == 8.0
    loop = sleeping(lambda: 0.0, Scripted("bad", ConnectionError()))
    loop.turn()
    assert loop.failing
    assert loop._pause() == 8.0


def test_the_ready_file_grows_old_while_the_loop_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alive is not at work: whoever watches the file's age sees the difference."""
    monkeypatch.setattr("loom_django.services.loop.REPORT_PROGRESS_EVERY", 0.0)
    hangs, inside, go_on = threading.Event(), threading.Event(), threading.Event()

    class Hanging:
        name = "hanging"

        def tick(self) -> bool:
            if hangs.is_set():
                inside.set()
                assert go_on.wait(20)
            return False

    ready = tmp_path / "ready"
    loop = loop_of(Hanging())
    loop.ready_file = ready
    thread = threading.Thread(target=loop.run)
    thread.start()

    def told_at() -> float:
        return float(json.loads(ready.read_text())["at"]) if ready.exists() else 0.0

    def passes(at: float) -> bool:
        deadline = time.monotonic() + 20
        while told_at() <= at and time.monotonic() < deadline:
            time.sleep(0.005)
        return told_at() > at

    assert passes(0.0)
    assert passes(told_at())
    hangs.set()
    assert inside.wait(20)
    stuck = told_at()
    time.sleep(0.1)  # ten polls
    assert told_at() == stuck
    hangs.clear()
    go_on.set()
    assert passes(stuck)
    loop.request_stop()
    thread.join(20)
