"""Workers are killed and the database restarted while flows run; then everything is accounted for.

Two of three are straight flows; the third has branches, children and a message. Every other one is async.

What is claimed afterwards: every execution completes, or waits for a verdict and completes with it; one gapless
history each; a key that the outside world saw is ``execution:step`` and nothing else; an effect that must not
repeat happened at most once; the rows of a transactional step are there exactly once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from django.db import Error, connections

from loom_django import loom
from loom_django.errors import StoreUnavailableError
from loom_django.kernel import codec
from loom_django.kernel.state import TERMINAL_STATUSES, Status
from loom_django.models import Execution
from tests.chaos.flows import (
    MIXED,
    MIXED_AND_CHILDREN,
    PLAN,
    async_mixed,
    async_ten_steps,
    mixed,
    ten_steps,
)
from tests.chaos.site import Site, eventually
from tests.shop.models import Order

# What goes on after a verdict may be put in doubt too, where a process stood still for longer than its lease.
ROUNDS: Final = 3


@dataclass
class Plan:
    seconds: float = 60.0
    flows: int = 200
    workers: int = 3
    every: float = 2.0
    seed: int = 1


@dataclass
class Chaos:
    site: Site
    plan: Plan
    kills: int = 0
    restarts: int = 0
    fleet: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.plan.seed)

    def run(self) -> dict[str, Any]:
        """Play it and return the account; fails where a promise was broken."""
        self.fleet = [self._worker() for _ in range(self.plan.workers)]
        self._storm()
        self._await_quiet()
        doubts = 0
        for _ in range(ROUNDS):
            doubts += self._settle_doubts()
            self._await_quiet()
        eventually(lambda: self._living() == 0, "all have ended", instead=self._left)
        self.site.stop_workers(self.fleet)
        return self._account(doubts)

    def _worker(self) -> subprocess.Popen[bytes]:
        return self.site.start_worker("--concurrency", "8", "--async-concurrency", "8", "--grace", "5")

    def _storm(self) -> None:
        began = time.monotonic()
        started = 0
        next_kill = began + self.plan.every
        restart_at = began + self.plan.seconds / 2
        while (now := time.monotonic()) < began + self.plan.seconds:
            due = int(self.plan.flows * (now - began) / (self.plan.seconds * 0.7)) + 1
            while started < min(due, self.plan.flows):
                self._start(started)
                started += 1
            if now >= next_kill:
                next_kill += self.plan.every
                self._kill_one()
            if self.site.server and not self.restarts and now >= restart_at:
                self.site.server.restart("immediate")
                self.restarts += 1
            time.sleep(0.02)
        while started < self.plan.flows:
            self._start(started)
            started += 1

    def _start(self, number: int) -> None:
        """Started once, however often this has to be tried: the id is given."""
        pauses = [round(self.random.uniform(0.0, 0.3), 3) for _ in PLAN]
        while True:
            try:
                is_async = number % 2 == 1
                if self._is_mixed(number):
                    (async_mixed if is_async else mixed).using(execution_id=f"x-{number}").start(pauses)
                    loom.send(f"x-{number}", "news", "heard", message_id="once")
                else:
                    straight = async_ten_steps if is_async else ten_steps
                    straight.using(execution_id=f"x-{number}").start(pauses)
                return
            except (Error, StoreUnavailableError):
                connections.close_all()
                time.sleep(0.1)

    def _is_mixed(self, number: int) -> bool:
        return number % 3 == 2

    def _kill_one(self) -> None:
        place = self.random.randrange(len(self.fleet))
        victim = self.fleet[place]
        assert victim.poll() is None, f"a worker ended by itself:\n{self.site.log_of(victim)[-4000:]}"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        self.kills += 1
        self.fleet[place] = self._worker()

    def _await_quiet(self) -> None:
        eventually(
            lambda: self._living() == len(self._in_doubt()),
            "all have ended but those in doubt",
            instead=self._left,
        )

    def _living(self) -> int:
        ended = [str(status) for status in TERMINAL_STATUSES]
        return Execution.objects.exclude(status__in=ended).count()

    def _left(self) -> object:
        ended = [str(status) for status in TERMINAL_STATUSES]
        rows = Execution.objects.exclude(status__in=ended)
        return list(rows.values_list("pk", "status", "waiting_on", "ready_at", "lease_until"))

    def _in_doubt(self) -> list[str]:
        return list(Execution.objects.in_doubt().values_list("pk", flat=True))

    def _settle_doubts(self) -> int:
        """As an operator would who looks at the provider: nobody runs anything while this is judged."""
        settled = 0
        happened = {(line["execution"], line["step"]) for line in self.site.ledger("transfer")}
        while ids := self._in_doubt():
            for execution_id in ids:
                for frame in loom.state(execution_id).in_doubt:
                    settled += 1
                    if (execution_id, frame.step_id) in happened:
                        loom.resolve(execution_id, frame.step_id, "completed-with-result", output="seen")
                    else:
                        loom.resolve(execution_id, frame.step_id, "retry-fresh")
        return settled

    # What is so afterwards.

    def _account(self, doubts: int) -> dict[str, Any]:
        runs = Counter[str]()
        for number in range(self.plan.flows):
            self._check(f"x-{number}", runs)
        calls = self.site.ledger("call")
        wrong = [line["key"] for line in calls if line["key"] != f"{line['execution']}:{line['step']}"]
        assert not wrong, f"keys that no provider should have seen: {wrong}"
        transfers = Counter((line["execution"], line["step"]) for line in self.site.ledger("transfer"))
        twice = {step: count for step, count in transfers.items() if count > 1}
        assert not twice, f"effects that happened twice: {twice}"
        assert sum(transfers.values()) == self._expected("transfer"), "an effect never happened"
        booked = Counter(Order.objects.values_list("customer", "note"))
        assert set(booked.values()) == {1}, {row: count for row, count in booked.items() if count > 1}
        assert len(booked) == self._expected("book")
        called = {(line["execution"], line["step"]) for line in calls}
        assert len(called) == self._expected("call")
        run_again = len(calls) - len(called)
        assert not self.kills or run_again + doubts > 0, "no kill has hit a step: this proves nothing"
        return {
            "flows": self.plan.flows,
            "kills": self.kills,
            "restarts": self.restarts,
            "in doubt": doubts,
            "calls run again": run_again,
            "events": sum(runs.values()),
        }

    def _expected(self, kind: str) -> int:
        """How many steps of that kind there are in all executions."""
        straight = sum(1 for step in PLAN if step.name == kind)
        numbers = range(self.plan.flows)
        return sum(MIXED_AND_CHILDREN[kind] if self._is_mixed(number) else straight for number in numbers)

    def _check(self, execution_id: str, runs: Counter[str]) -> None:
        from tests.crash.kit import check_history

        events = check_history(execution_id)
        runs.update(str(event.kind) for event in events)
        state = loom.state(execution_id)
        assert state.status is Status.COMPLETED, (execution_id, state.status, state.error)
        is_mixed = state.flow_id in (mixed.id, async_mixed.id)
        assert len(state.frames) == (sum(MIXED.values()) if is_mixed else len(PLAN))
        if is_mixed:
            children = list(state.child_ids.values())
            assert codec.decode(state.result) == [
                "heard",
                *(f"{child}:book" for child in map(_key, children)),
            ]
            taken = [event for event in events if event.kind == "MESSAGE_CONSUMED"]
            assert len(taken) == 1, "one message, taken once"
            for child in children:
                check_history(child)
                assert loom.state(child).status is Status.COMPLETED


def _key(execution_id: str) -> str:
    """The execution's part of an idempotency key."""
    return execution_id.replace("%", "%25").replace(":", "%3A")
