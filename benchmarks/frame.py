"""How things are measured: in interleaved runs, each beside its bare loop, and told by medians.

A machine's speed changes from one minute to the next, by what else runs on it; the ratio of two runs that
follow each other changes far less. So every figure is a pair, and of the pairs the median is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from benchmarks import backends
from benchmarks.counts import Counts, count

WARM_UP = 16


class Bench:
    """A runtime over one store, which runs bodies in the thread that starts or answers them."""

    def __init__(self, store: Any, *, keeper: Any = None) -> None:
        from loom_django.runtime import Loom

        self.loom = Loom(store, keeper=keeper)
        self.store = store
        self.engine = self.loom.engine


@dataclass(frozen=True)
class Case:
    """One kind of work.

    ``prepare`` makes ready what one piece of it needs, outside the clock; ``work`` does it and returns the id
    of the execution, which must have completed then. ``around`` stands around a whole run.
    """

    name: str
    work: Callable[[Bench, Any], str]
    prepare: Callable[[Bench], Any] = lambda bench: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    weight: int = 1  # so many times fewer executions in a run


@dataclass
class Timed:
    """One run: executions per second, the median of their latencies in milliseconds and what 99 of 100 stay below,
    and what this process's CPU spent on each, in microseconds: the figure that others on the machine move least."""

    rate: float
    p50: float
    cpu_us: float
    p99: float = 0.0


@dataclass
class Result:
    """All runs of a case, and of its bare loop; the nth of one belongs to the nth of the other."""

    case: str
    backend: str
    concurrency: int
    counts: Counts
    runs: list[Timed] = field(default_factory=list)
    bare: list[Timed] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "backend": self.backend,
            "concurrency": self.concurrency,
            "per_second": median(run.rate for run in self.runs),
            "p50_ms": median(run.p50 for run in self.runs),
            "p99_ms": median(run.p99 for run in self.runs),
            "bare_p50_ms": median(run.p50 for run in self.bare),
            "bare_p99_ms": median(run.p99 for run in self.bare),
            "cpu_us": median(run.cpu_us for run in self.runs),
            "bare_per_second": median(run.rate for run in self.bare),
            "times_bare": paired(self.runs, self.bare),
            "times_bare_cpu": paired_cpu(self.runs, self.bare),
            "runs": len(self.runs),
            **self.counts.told(),
        }


def paired(one: Sequence[Timed], other: Sequence[Timed]) -> float:
    """How many times as long ``one`` took as ``other``: the median over the pairs of runs."""
    return median(second.rate / first.rate for first, second in zip(one, other, strict=True))


def paired_cpu(one: Sequence[Timed], other: Sequence[Timed]) -> float:
    """How many times as much CPU ``one`` took in this process as ``other``."""
    return median(first.cpu_us / second.cpu_us for first, second in zip(one, other, strict=True))


class Crew:
    """Threads that stay, each with its connection, so that what a server prepares stays prepared."""

    def __init__(self, backend: str, size: int) -> None:
        self.backend, self.size = backend, size
        self._pool = ThreadPoolExecutor(size)
        self._barrier = threading.Barrier(size)

    def run(self, items: Sequence[Any], work: Callable[[Any], object]) -> Timed:
        """Do the work for each item and time it."""
        queue, latencies = iter(items), []
        lock = threading.Lock()

        def take() -> Iterator[Any]:
            while True:
                with lock:
                    item = next(queue, self)
                if item is self:
                    return
                yield item

        def serve() -> tuple[float, float]:
            backends.connect(self.backend)
            self._barrier.wait()
            began = time.perf_counter()
            for item in take():
                start = time.perf_counter()
                work(item)
                latencies.append(time.perf_counter() - start)
            return began, time.perf_counter()

        spent = time.process_time()
        spans = [future.result() for future in [self._pool.submit(serve) for _ in range(self.size)]]
        elapsed = max(end for _, end in spans) - min(began for began, _ in spans)
        spent = time.process_time() - spent
        latencies.sort()
        late = latencies[len(latencies) * 99 // 100] * 1000
        return Timed(len(items) / elapsed, median(latencies) * 1000, spent / len(items) * 1e6, late)

    def close(self) -> None:
        from django.db import connections

        def leave() -> None:
            self._barrier.wait()
            connections.close_all()

        for future in [self._pool.submit(leave) for _ in range(self.size)]:
            future.result()
        self._pool.shutdown()


@contextmanager
def _crew(backend: str, size: int) -> Iterator[Crew]:
    crew = Crew(backend, size)
    try:
        yield crew
    finally:
        crew.close()


def measure(
    backend: str, bare: backends.Bare, cases: Sequence[Case], *, concurrency: int, runs: int, executions: int
) -> list[Result]:
    """Warm up, then run all cases in turn, ``runs`` times over, every other time backwards."""
    bench = Bench(backends.make_store(backend))
    results = {case.name: Result(case.name, backend, concurrency, shape(bench, case)) for case in cases}
    with _crew(backend, concurrency) as crew:
        for case in cases:
            _pair(crew, bench, bare, case, results[case.name].counts, WARM_UP + concurrency)
        for number in range(runs):
            for case in cases if number % 2 == 0 else cases[::-1]:
                result = results[case.name]
                beside, run = _pair(
                    crew, bench, bare, case, result.counts, max(concurrency, executions // case.weight)
                )
                result.bare.append(beside)
                result.runs.append(run)
    return list(results.values())


def shape(bench: Bench, case: Case) -> Counts:
    """What one execution of a case asks for, once the server knows its statements."""
    with case.around():
        for _ in range(2):
            item = case.prepare(bench)
            counts = count(bench.store, partial(case.work, bench, item))
    return counts


def _pair(
    crew: Crew, bench: Bench, bare: backends.Bare, case: Case, counts: Counts, executions: int
) -> tuple[Timed, Timed]:
    beside = crew.run(range(executions), lambda _: bare.write(counts.appends))
    items = [case.prepare(bench) for _ in range(executions)]
    done: list[str] = []
    with case.around():
        run = crew.run(items, lambda item: done.append(case.work(bench, item)))
    for execution_id in done[:: max(1, executions // 20)]:
        status = bench.store.status(execution_id)
        if str(status) != "COMPLETED":
            raise RuntimeError(f"{case.name}: {execution_id} is {status}: what failed was measured")
    return beside, run
