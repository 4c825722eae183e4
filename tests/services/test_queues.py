"""Which queues a worker claims from, in which order, and how many bodies of each it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from loom_django.conf import LoomSettings
from loom_django.definitions import Registry
from loom_django.engine.core import Engine
from loom_django.engine.run import Ended
from loom_django.services import worker as worker_module
from loom_django.services.worker import Lane, WorkerService, lanes_of, next_in
from loom_django.stores.base import Claimed, Known, QueueLimits
from loom_django.stores.memory import MemoryStore
from loom_django.testing.conformance import Log

pytestmark = pytest.mark.once

PATIENCE = 20.0


class Shop:
    """A worker over a store of its own, whose bodies end when the test says so."""

    def __init__(self, **queues: dict[str, Any]) -> None:
        self.store = MemoryStore()
        settings = replace(LoomSettings(), QUEUES=queues)
        self.engine = Engine(self.store, lambda: settings, Registry())
        self.engine.registry.highest = lambda: {"f": 1}  # type: ignore[method-assign]
        self.begun: list[str] = []
        self.ends = threading.Event()
        self.workers: list[WorkerService] = []

    def worker(self, **options: Any) -> WorkerService:
        self.workers.append(WorkerService(self.engine, **{"concurrency": 16, **options}))
        return self.workers[-1]

    def run(self, engine: Engine, execution_id: str, *, token: int, **rest: Any) -> Ended:
        assert self.ends.wait(PATIENCE)
        log = self.logs.pop(execution_id)
        self.store.append(log.end(fence=self.store.fence(execution_id)))
        return Ended.FINISHED

    logs: dict[str, Log]

    def start(self, queue: str, count: int = 1, **new: Any) -> None:
        self.logs = getattr(self, "logs", {})
        for _ in range(count):
            log = Log(f"{queue}-{len(self.logs)}", "f")
            self.logs[log.id] = log
            self.store.append(log.start(queue=queue, **new))

    def tick(self, worker: WorkerService) -> list[str]:
        """One tick, and the queues of what it claimed."""
        before = worker.held
        worker.tick()
        return sorted(execution_id.split("-")[0] for execution_id in worker.held - before)

    def let_end(self, worker: WorkerService) -> None:
        """All bodies that run now end."""
        self.ends.set()
        with worker._condition:
            assert worker._condition.wait_for(lambda: not worker._held, PATIENCE)
        self.ends.clear()


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes shops with the queues that a test wants."""
    made: list[Shop] = []

    def make(**queues: dict[str, Any]) -> Shop:
        made.append(Shop(**queues))
        monkeypatch.setattr("loom_django.services.worker.run_execution", made[-1].run)
        return made[-1]

    yield make
    for one in made:
        one.ends.set()
        assert all(worker.drain(PATIENCE) for worker in one.workers)


def test_queues_without_limits_are_one_lane_for_each_priority() -> None:
    """Limits of its own make a queue a lane of its own; a worker of all queues serves undeclared ones too."""
    declared = replace(
        LoomSettings(),
        QUEUES={
            "a": {},
            "b": {"priority": 5},
            "c": {"concurrency": 2, "rate": 3},
            "d": {"worker_concurrency": 1, "priority": -1},
            "e": {},
        },
    ).queues
    assert lanes_of(declared, None) == [
        Lane(5, ("b",)),
        Lane(0, ("c",), limits=QueueLimits(2, 3)),
        Lane(0, None, besides=("b", "c", "d")),
        Lane(-1, ("d",), at_once=1),
    ]
    assert lanes_of(declared, ["a", "c", "e"]) == [
        Lane(0, ("c",), limits=QueueLimits(2, 3)),
        Lane(0, ("a", "e")),
    ]
    assert lanes_of(LoomSettings().queues, None) == [Lane(0, None)]


def test_a_queue_of_higher_priority_is_served_first(shop: Any) -> None:
    """The others get the room that is left."""
    world = shop(high={"priority": 1}, low={"priority": -1})
    for queue in ("low", "default", "high"):
        world.start(queue, 2)
    worker = world.worker(concurrency=3)
    assert world.tick(worker) == ["default", "high", "high"]
    world.let_end(worker)
    assert world.tick(worker) == ["default", "low", "low"]


def test_a_worker_that_drains_claims_nothing(shop: Any) -> None:
    """Though its loop may be in the middle of a turn."""
    world = shop()
    world.start("default")
    worker = world.worker()
    worker.draining.set()
    assert world.tick(worker) == []


def test_a_lease_is_kept_from_the_claim_on(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may be entered late: its thread has to begin first, and a busy machine takes its time."""
    world = shop()
    world.start("default")
    worker = world.worker()
    held: list[str] = []
    monkeypatch.setattr(world.engine.keeper, "hold", lambda name, token, lost: held.append(name))
    assert world.tick(worker) == ["default"]
    assert held == list(worker.held), "before run_execution, which is not the engine's here"


def test_a_worker_runs_so_many_of_a_queue_and_no_more(shop: Any) -> None:
    """Another worker has room of its own; what is kept back stays ready, and is claimed when there is room."""
    world = shop(mail={"worker_concurrency": 2})
    world.start("mail", 5)
    world.start("default", 2)
    first, second = world.worker(), world.worker()
    assert world.tick(first) == ["default", "default", "mail", "mail"]
    assert world.tick(first) == []
    assert not first.tick(), "nothing more is to be had at once"
    assert world.tick(second) == ["mail", "mail"]
    world.let_end(first)
    assert world.tick(first) == ["mail"]


def test_workers_together_run_so_many_of_a_queue_and_no_more(shop: Any) -> None:
    """What one of them runs is no room of the other's."""
    world = shop(bank={"concurrency": 3})
    world.start("bank", 9)
    first, second = world.worker(concurrency=2), world.worker()
    assert world.tick(first) == ["bank", "bank"]
    assert world.tick(second) == ["bank"]
    assert world.tick(second) == []
    world.let_end(first)
    world.let_end(second)
    assert world.tick(second) == ["bank", "bank", "bank"]


def test_a_queue_at_its_limit_holds_up_no_other(shop: Any) -> None:
    """However long it is, and however high its priority."""
    world = shop(bank={"concurrency": 1, "priority": 9})
    world.start("bank", 100)
    world.start("default", 3)
    worker = world.worker(concurrency=4)
    assert world.tick(worker) == ["bank", "default", "default", "default"]


def test_queues_of_one_priority_take_turns(shop: Any) -> None:
    """With room for one body at a time, a long queue without limits lets one with limits have its turn."""
    world = shop(bank={"concurrency": 5})
    world.start("bank", 4)
    world.start("default", 4)
    worker = world.worker(concurrency=1)
    order = []
    for _ in range(8):
        order += world.tick(worker)
        world.let_end(worker)
    assert order in (["bank", "default"] * 4, ["default", "bank"] * 4)


def test_a_rate_says_when_there_is_more(shop: Any) -> None:
    """The loop sleeps until then, and not until its next poll; other work is not held up."""
    world = shop(slow={"rate": 0.5})
    world.start("slow", 3)
    world.start("default")
    worker = world.worker()
    assert world.tick(worker) == ["default", "slow"]
    assert world.tick(worker) == []
    assert worker.again_at is not None
    assert 0 < worker.again_at - time.monotonic() <= 2
    ahead = next_in(world.store, worker, timers=True)
    assert ahead is not None
    assert 0 < ahead <= 2


def test_a_worker_of_some_queues_leaves_the_others_alone(shop: Any) -> None:
    """Also those that are declared nowhere; a worker of all queues serves them."""
    world = shop(a={}, b={})
    for queue in ("a", "b", "gone"):
        world.start(queue)
    assert world.tick(world.worker(queues=["a"])) == ["a"]
    assert world.tick(world.worker()) == ["b", "gone"]


def test_a_full_worker_does_not_wake_for_what_is_to_be_ready(shop: Any) -> None:
    """It could not run it; a body that ends wakes the loop."""
    world = shop()
    worker = world.worker(concurrency=1)
    assert next_in(world.store, worker, timers=True) is None
    world.start("default", 2)
    world.tick(worker)
    assert not worker.has_room
    assert next_in(world.store, worker, timers=True) is None


def test_a_thread_that_breaks_off_is_noticed(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim stays held, so that it is handed back when the process ends."""
    world = shop()
    world.start("default")
    told = threading.Event()
    worker = world.worker(on_free=told.set)

    def breaks(claim: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "_run", breaks)
    worker.tick()
    assert told.wait(PATIENCE)
    assert worker.broken
    assert worker.held == {"default-0"}
    worker._held.clear()
    world.workers.clear()


class Kinds:
    """A worker that serves plain flows (``f``) and async ones (``g``), and keeps what it claims until it is told."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryStore()
        registry = Registry()
        registry.highest = lambda: {"f": 1, "g": 1}  # type: ignore[method-assign]
        registry.all_async = lambda: {"g"}  # type: ignore[method-assign]
        self.worker = WorkerService(Engine(self.store, LoomSettings, registry), **options)
        self.worker._submit = self._submit  # type: ignore[method-assign,assignment]
        self.looks: list[tuple[str, ...]] = []
        self.claim_ready = self.store.claim_ready
        self.store.claim_ready = self._look  # type: ignore[method-assign]
        self.begun: list[tuple[str, bool]] = []
        self.numbers = count()

    def _look(self, *, known: Known, **options: Any) -> list[Claimed]:
        self.looks.append(tuple(sorted(known.flows or ())))
        return self.claim_ready(known=known, **options)

    def _submit(self, claims: Any, counted: Any) -> None:
        self.worker.claimed += len(claims)
        for claim, _ in claims:
            self.begun.append((claim.execution_id, counted.is_async))
            self.worker._held[claim] = counted
            self.worker._asynchronous += counted.is_async

    def start(self, *flows: str) -> list[str]:
        logs = [Log(f"{flow}{next(self.numbers)}", flow) for flow in flows]
        for log in logs:
            self.store.append(log.start())
        return [log.id for log in logs]

    def tick(self) -> list[tuple[str, ...]]:
        """One tick; the flows that it looked for, by look."""
        self.looks.clear()
        self.worker.tick()
        return list(self.looks)

    def let_end(self) -> None:
        self.worker._held.clear()
        self.worker._asynchronous = 0


def test_both_kinds_are_looked_for_together() -> None:
    """One look for all, as far as there is room for each; what is claimed is run as its flow is."""
    kinds = Kinds(concurrency=3, tasks=64)
    ids = kinds.start("g", "f", "g", "f", "g")
    assert kinds.tick()[0] == ("f", "g")
    assert sorted(kinds.begun[:3]) == [("f1", False), ("g0", True), ("g2", True)]
    assert sorted(name for name, _ in kinds.begun) == sorted(ids)
    kinds.let_end()
    assert kinds.tick() == [("f", "g")], "what finds less than there is room for has found all"


def test_a_kind_that_has_room_is_not_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a long row of the kind that is full: a look costs as much as that row is long."""
    kinds = Kinds(concurrency=1, tasks=4)
    kinds.start(*["f"] * 100)
    monkeypatch.setattr(worker_module, "REST", 1e9)
    monkeypatch.setattr(worker_module, "REST_AT_MOST", 1e9)
    assert kinds.tick() == [("f", "g"), ("g",)]
    assert [is_async for _, is_async in kinds.begun] == [False]
    assert kinds.tick() == []
    assert kinds.worker.again_at is not None, "the loop is to look again then"
    kinds.worker._rest_until.clear()  # as time would
    assert kinds.tick() == [("g",)]
    kinds.let_end()
    assert kinds.tick()[0] == ("f", "g"), "with room for both nobody rests"


def test_a_kind_that_was_found_is_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one kind is full the other is begun as it comes."""
    kinds = Kinds(concurrency=1, tasks=64)
    kinds.start("f", "f", "g", "g")
    monkeypatch.setattr(worker_module, "REST", 1e9)
    monkeypatch.setattr(worker_module, "REST_AT_MOST", 1e9)
    assert kinds.tick() == [("f", "g"), ("g",)]
    assert kinds.begun == [("f0", False), ("g2", True), ("g3", True)]
    kinds.start(*["g"] * 5)
    assert kinds.tick() == [("g",)]
    assert len(kinds.begun) == 3 + 5


def test_nobody_rests_while_nothing_runs() -> None:
    """Who is asked to do what there is, and then to end, does not end before it."""
    kinds = Kinds(concurrency=4, tasks=4)
    kinds.worker._rest_until = {(None, False): float("inf"), (None, True): float("inf")}
    kinds.start("f", "g")
    kinds.tick()
    assert len(kinds.begun) == 2


def test_a_rest_is_short_however_long_the_look_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have waited for a database that was away."""
    kinds = Kinds(concurrency=1, tasks=4)
    kinds.start("f", "f")
    monkeypatch.setattr(worker_module, "REST", 1e9)
    kinds.tick()
    again_in = kinds.worker._rest_until[None, True] - time.monotonic()
    assert 0 < again_in <= worker_module.REST_AT_MOST


def test_each_lane_rests_by_itself() -> None:
    """That one queue has nothing of a kind says nothing of another queue."""
    kinds = Kinds(concurrency=1, tasks=4)
    kinds.start("f", "f")
    kinds.tick()
    low = Lane(-1, ("low",))
    kinds.worker._rest_until = {(("low",), True): float("inf")}
    assert kinds.worker._rests(low, is_async=True)
    assert not kinds.worker._rests(low, is_async=False)
    assert not kinds.worker._rests(Lane(0, None), is_async=True)
