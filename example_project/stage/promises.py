"""What the demo promises, and how each promise is judged from what was seen.

Judging is apart from playing, so that the tests can hand in evidence of a broken promise and see it found.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from example_project.provider.ledger import Request


@dataclass(frozen=True, slots=True)
class Fact:
    """An event of the log, as far as the promises need it."""

    sequence: int
    kind: str
    step: str = ""
    event: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was seen, from the provider's ledger, the shop's tables and the log."""

    requests: Sequence[Request]
    facts: Sequence[Fact]
    status: str
    orders_made: int  # by two purchases, of which one was rolled back
    executions_made: int
    worker_exit: int
    operator: str
    order_paid: bool
    order_transfer: str
    bookings: int
    held_while_asleep: bool
    still_asleep: bool  # when its time was over and no timer loop was there
    sleep_until: datetime | None
    woken_at: datetime | None
    verify_exit: int
    verify_said: str

    def of(self, what: str) -> list[Request]:
        return [request for request in self.requests if request.what == what]

    def count(self, kind: str, *, step: str = "", event: str = "") -> int:
        return len(
            [
                fact
                for fact in self.facts
                if fact.kind == kind and step in ("", fact.step) and event in ("", fact.event)
            ]
        )


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise: its words, and what is wrong if it does not hold ("" if it does)."""

    words: str
    fault: str

    @property
    def kept(self) -> bool:
        return not self.fault


def check(evidence: Evidence) -> list[Promise]:
    """Judge all promises."""
    return [Promise(words, judge(evidence)) for words, judge in PROMISES]


def _rollback(seen: Evidence) -> str:
    if (seen.orders_made, seen.executions_made) == (1, 1):
        return ""
    return f"{seen.orders_made} orders and {seen.executions_made} executions were made, not 1 and 1"


def _charge(seen: Evidence) -> str:
    charges = seen.of("charge")
    booked = [request for request in charges if request.booked]
    keys = {request.key for request in charges}
    if len(booked) != 1:
        return f"the provider charged {len(booked)} times"
    return "" if len(keys) == 1 else f"the provider saw {len(keys)} keys for one charge: {sorted(keys)}"


def _killed(seen: Evidence) -> str:
    if seen.worker_exit != -signal.SIGKILL:
        return f"the worker was not killed: exit {seen.worker_exit}"
    unanswered = [request for request in seen.of("transfer") if request.answered == "caller gone"]
    return "" if unanswered else "the provider's answer did reach the worker"


def _transfer(seen: Evidence) -> str:
    transfers = seen.of("transfer")
    if len(transfers) == 1 and transfers[0].booked:
        return ""
    booked = len([request for request in transfers if request.booked])
    return f"the bank saw {len(transfers)} requests and moved money {booked} times"


def _asked_once(seen: Evidence) -> str:
    doubts = seen.count("EFFECT_INDOUBT")
    begun = seen.count("STEP_STARTED", step="wire_transfer")
    if (doubts, seen.count("EFFECT_INDOUBT", step="wire_transfer"), begun) == (1, 1, 1):
        return ""
    return f"the log has {doubts} EFFECT_INDOUBT and {begun} starts of the transfer"


def _verdict(seen: Evidence) -> str:
    verdicts = [fact for fact in seen.facts if fact.event == "EffectInDoubtResolved"]
    if len(verdicts) != 1:
        return f"the log has {len(verdicts)} verdicts"
    by = verdicts[0].by
    return "" if by == seen.operator else f"the log says that {by or 'nobody'} gave it, not {seen.operator}"


def _result(seen: Evidence) -> str:
    real = [request.booking for request in seen.of("transfer") if request.booked]
    return "" if real == [seen.order_transfer] else f"the order says {seen.order_transfer!r}, the bank {real}"


def _rows(seen: Evidence) -> str:
    if not seen.order_paid:
        return "the order is not paid"
    return "" if seen.bookings == 1 else f"the books have {seen.bookings} lines for one payment"


def _sleep(seen: Evidence) -> str:
    if seen.held_while_asleep:
        return "a process held the execution while it slept"
    if not seen.still_asleep:
        return "something else than the timer loop woke it"
    fired = seen.count("TIMER_FIRED")
    if fired != 1:
        return f"the log has {fired} TIMER_FIRED"
    if seen.sleep_until is None or seen.woken_at is None or seen.woken_at < seen.sleep_until:
        return f"it was to sleep until {seen.sleep_until} and was woken at {seen.woken_at}"
    return ""


def _end(seen: Evidence) -> str:
    ends = seen.count("EXECUTION_COMPLETED")
    if seen.status != "COMPLETED" or ends != 1:
        return f"its status is {seen.status}, and its log has {ends} ends"
    sequences = [fact.sequence for fact in seen.facts]
    return "" if sequences == list(range(1, len(sequences) + 1)) else f"its log has gaps: {sequences}"


def _steps_once(seen: Evidence) -> str:
    done = Counter(fact.step for fact in seen.facts if fact.kind == "STEP_COMPLETED")
    twice = [step for step, times in done.items() if times > 1]
    missing = [step for step in ("charge", "mark_paid", "close_order") if step not in done]
    return f"done more than once: {twice}, not done: {missing}" if twice or missing else ""


def _verify(seen: Evidence) -> str:
    return "" if seen.verify_exit == 0 else f"loom_verify: exit {seen.verify_exit}: {seen.verify_said}"


PROMISES: Sequence[tuple[str, Callable[[Evidence], str]]] = (
    ("A purchase that is rolled back leaves no order and no execution", _rollback),
    ("The worker was really killed while the bank had the transfer", _killed),
    ("The customer was charged once, under one key", _charge),
    ("The transfer was sent to the bank once, and never again", _transfer),
    ("The doubt was noticed and recorded once, and a person was asked", _asked_once),
    ("One verdict settled it, and the log says whose", _verdict),
    ("The flow went on with the transfer id that the bank really gave", _result),
    ("The order is paid, and the shop's books have exactly one line for it", _rows),
    ("No process waited during the sleep; the timer loop ended it, once and not early", _sleep),
    ("No step of the flow was done twice", _steps_once),
    ("The flow came to its end once, and its log has no gap", _end),
    ("loom_verify finds the tables and the log in agreement", _verify),
)
