"""Everybody who locks rows does so in one order: no deadlock, whatever is done to the same few executions at once.

Eight threads do everything that there is to do, with the server told to look for deadlocks after a tenth of a
second. LOOM_TEST_OPERATIONS is how much each of them does; `make locks` has it be 10 000 (some five minutes).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
from django.db import transaction

from loom_django import FlowContext, StepContext, definitions, flow, tool
from loom_django.engine.core import NoKeeper, random_token
from loom_django.engine.run import run_execution
from loom_django.errors import (
    ExecutionClosedError,
    ExecutionNotFoundError,
    ResumeContendedError,
    ResumeRefusedError,
    StaleFenceError,
)
from loom_django.kernel.events import Kind
from loom_django.kernel.state import TERMINAL_STATUSES, Status
from loom_django.runtime import Loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.verify import verify
from loom_django.stores import store_for
from loom_django.stores.base import READY, AppendRefused, Commit, Known, Look, TimerRow
from loom_django.testing.conformance import Log, held_by
from tests.crash.kit import only_postgresql
from tests.shop.models import Order
from tests.stores.rivals import InThread, database_default, deadlocks, wait_until_alone

THREADS: Final = 8
OPERATIONS: Final = int(os.environ.get("LOOM_TEST_OPERATIONS", "2000"))
EXECUTIONS: Final = 12
REFUSALS: Final = (
    AppendRefused,
    StaleFenceError,
    ResumeRefusedError,
    ResumeContendedError,
    ExecutionClosedError,
    ExecutionNotFoundError,
)


@tool(transactional=True)
def book(ctx: StepContext) -> None:
    Order.objects.create(customer="c", amount=1, note=ctx.execution_id)


class Crowd:
    """What one thread does: one thing after the other, to executions drawn at random."""

    def __init__(self, loom: Loom, flow: Any, ids: list[str], seed: int) -> None:
        self.loom, self.store, self.flow, self.ids = loom, loom.store, flow, ids
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.together: Counter[str] = Counter()  # what the calls for several have done
        self.acts: list[Callable[[], object]] = [
            self.append,
            self.append,
            self.append_many,
            self.append_many,
            self.acquire_fence,
            self.acquire_fence_if,
            self.resume,
            self.cancel,
            self.append_if_unchanged,
            self.delete_execution,
            self.send,
            self.work,
            self.die,
            self.recover_together,
            self.in_a_block,
        ]

    def run(self, count: int) -> None:
        for _ in range(count):
            act = self.random.choice(self.acts)
            self.done[act.__name__] += 1
            try:
                act()
            except REFUSALS as error:
                self.refused[type(error).__name__] += 1

    def draw(self) -> str:
        return self.random.choice(self.ids)

    def look(self, execution_id: str) -> tuple[Log, int]:
        """The execution as it is, to be written to by somebody who read it; started if it is not there."""
        loaded = self.store.load(execution_id)
        while not loaded.events:
            self.loom.start_flow(self.flow.using(execution_id=execution_id), (), {})
            loaded = self.store.load(execution_id)
        log = Log(execution_id, self.flow.id)
        for event in loaded.events:
            log.fold.apply(event)
        return log, loaded.fence

    # What they do.

    def commit(self, execution_id: str | None = None) -> Commit:
        """Something that suits where an execution stands."""
        log, fence = self.look(execution_id or self.draw())
        options: dict[str, Any] = {"fence": fence or None}
        if log.fold.status in TERMINAL_STATUSES:
            return log.commit(Kind.EXECUTION_DENIED)
        if self.random.random() < 0.4:
            # Several may wake the same ones; and some start others, who land with them.
            options["wake"] = tuple(self.random.sample(self.ids, self.random.choice((1, 2))))
        if self.random.random() < 0.2:
            options["also"] = (self.child(),)
        if log.fold.status is Status.SUSPENDED:
            if self.random.random() < 0.5:
                options |= {"takes": fence, "fence": fence + 1}
            return log.answer(self.random.choice((READY, held_by())), **options)
        match self.random.randrange(4):
            case 0:
                return log.commit(Kind.STEP_STARTED, **options)
            case 1:
                return log.end(**options)
            case 2:
                return log.park(wakes=self.store.wakes(log.id), **options)
            case _:
                return log.park(timers=(TimerRow(log.id, self.store.now()),), **options)

    def child(self) -> Commit:
        """Of a flow that nobody here runs."""
        return Log(f"child-{random_token()}", "hunted.child").start(parent_id=self.draw())

    def append(self) -> None:
        self.store.append(self.commit())

    def append_many(self) -> None:
        ids = self.random.sample(self.ids, 4)
        for outcome in self.store.append_many([self.commit(id) for id in ids]):
            if outcome is not None and not isinstance(outcome, REFUSALS):
                raise outcome

    def acquire_fence(self) -> None:
        self.store.acquire_fence(self.draw())

    def acquire_fence_if(self) -> None:
        log, fence = self.look(self.draw())
        self.store.acquire_fence_if(log.id, fence=fence, park_seq=log.fold.park_sequence or 1)

    def resume(self) -> None:
        self.loom.resume(self.draw(), event_type="Go")

    def cancel(self) -> None:
        self.loom.cancel(self.draw())

    def append_if_unchanged(self) -> None:
        log, fence = self.look(self.draw())
        self.store.append_if_unchanged(log.commit(Kind.OUTCOME_RECORDED), fence=fence)

    def delete_execution(self) -> None:
        self.store.delete_execution(self.draw())

    def send(self) -> None:
        self.loom.send(self.draw(), "m", 1)

    def work(self) -> None:
        """Claim a few and run their bodies: a transactional step, a park, an end."""
        token = random_token()
        known = Known({self.flow.id: 1})
        for claim in self.store.claim_ready(owner="me", token=token, ttl=60, limit=3, known=known):
            run_execution(self.loom.engine, claim.execution_id, token=token, fence=claim.fence)

    def die(self) -> None:
        """Claim a few under leases that are over at once."""
        known = Known({self.flow.id: 1})
        self.store.claim_ready(owner="dead", token=random_token(), ttl=0, limit=3, known=known)

    def recover_together(self) -> None:
        """What a recovery pass does with several, each in one statement; given in any order."""
        token = random_token()
        leases = self.store.expired(limit=EXECUTIONS)
        self.random.shuffle(leases)
        taken = self.store.take_over_all(leases, owner="other", token=token, ttl=0)
        ids = self.random.sample(self.ids, 6)
        heads = {id: self.store.head(id) for id in ids}
        looks = [Look(id, head.sequence, progress=1) for id, head in heads.items() if head is not None]
        fenced = self.store.acquire_fences_at(looks)
        released = self.store.release_all(self.random.sample(sorted(taken), len(taken)), token)
        self.together += Counter(taken=len(taken), fenced=len(fenced), released=len(released))

    def in_a_block(self) -> None:
        """A caller's transaction with an answer in it, which holds the fence row up to the commit."""
        with transaction.atomic():
            Order.objects.create(customer="c", amount=1)
            self.loom.resume(self.draw(), event_type="Go")


@pytest.fixture
def hunted(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Loom, Any]]:
    loom = Loom(store_for("default"), keeper=NoKeeper())
    loom.dispatcher = WorkerDispatcher()

    @flow("hunted", steps=[book])
    def body(ctx: FlowContext) -> Any:
        ctx.run(book)
        if ctx.suspend("Go") is None:
            return ctx.receive("m")
        return None

    monkeypatch.setattr(definitions, "_bound_runtime", lambda: loom)
    yield loom, body
    definitions.registry.forget("hunted")


@only_postgresql
def test_whatever_is_done_at_once_makes_no_deadlock(hunted: tuple[Loom, Any]) -> None:
    """Thousands of operations on twelve executions: each is done or refused, and nobody waits in a circle."""
    loom, body = hunted
    ids = [f"x-{number:02}" for number in range(EXECUTIONS)]
    before = deadlocks()
    with database_default("deadlock_timeout", "100ms"):
        crowds = [Crowd(loom, body, ids, seed) for seed in range(THREADS)]
        threads = [InThread(partial(crowd.run, OPERATIONS)) for crowd in crowds]
        for thread in threads:
            thread.join(600)
        wait_until_alone()
    done = sum((crowd.done for crowd in crowds), Counter())
    refused = sum((crowd.refused for crowd in crowds), Counter())
    assert deadlocks() == before, refused
    assert done.total() == THREADS * OPERATIONS
    together = sum((crowd.together for crowd in crowds), Counter())
    assert min(together[what] for what in ("taken", "fenced", "released")) > OPERATIONS // 40, together
    for id in ids:
        events = loom.store.read(id)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert [problem.what for problem in verify(loom.engine, "default", execution_id=id)] == []
