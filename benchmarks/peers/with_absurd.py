"""The work in Absurd, run by a Python that has its SDK: prints executions per second and CPU for each as JSON.

Each thread has a connection of its own. One that is called inline spawns a task and runs whichever is ready; a backlog
is spawned before the clock runs, and claimed by twenties.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
from absurd_sdk import Absurd  # type: ignore[import-not-found]

ORDER = "order-2026-000017"
ended, parking = threading.Semaphore(0), threading.Semaphore(0)


def book(ctx: Any) -> Any:
    made = {"order": ORDER, "amount": 1999, "reference": str(ctx.task_id), "state": "booked"}
    return ctx.step("book", lambda: made)


def steps(given: Any, ctx: Any) -> Any:
    for _ in range(given["count"]):
        book(ctx)
    ended.release()
    return given["count"]


def parks(given: Any, ctx: Any) -> Any:
    booked = book(ctx)
    parking.release()
    answer = ctx.await_event(given["event"])
    ended.release()
    return f"{booked['state']} {answer['by']}"


def breaks(given: Any, ctx: Any) -> Any:
    """Breaks off after its steps, once; the second time they are all served."""
    for _ in range(given["count"]):
        book(ctx)
    if not ended.acquire(blocking=False):
        ended.release()
        raise RuntimeError("broke off")
    ended.release(2)
    return given["count"]


class Crew:
    """So many threads, each with its own client of one queue."""

    def __init__(self, url: str, level: int) -> None:
        self._url, self._local = url, threading.local()
        self._pool, self._size = ThreadPoolExecutor(level), level

    def client(self) -> Any:
        if not hasattr(self._local, "client"):
            self._local.client = client = Absurd(self._url)
            for task in (steps, parks, breaks):
                client.register_task(task.__name__)(task)
        return self._local.client

    def each(self, count: int, work: Callable[[int], object]) -> None:
        list(self._pool.map(work, range(count)))

    def drain(self, count: int, most: int = 20, reached: threading.Semaphore = ended) -> None:
        """Have all threads claim until so many have ended, or come to their park."""
        left, batch = [None] * count, max(1, min(most, count // self._size))

        def serve(_: int) -> None:
            while left:
                self.client().work_batch(batch_size=batch)
                while left and reached.acquire(blocking=False):
                    left.pop()

        self.each(self._size, serve)


def inline(crew: Crew, executions: int, count: int) -> None:
    def run(_: int) -> None:
        crew.client().spawn("steps", {"count": count})
        crew.client().work_batch()

    crew.each(executions, run)
    crew.drain(executions, 1)


def park(crew: Crew, executions: int, _: int) -> None:
    def run(_: int) -> None:
        event = f"approval:{time.monotonic_ns()}:{threading.get_ident()}"
        crew.client().spawn("parks", {"event": event})
        crew.client().work_batch()
        crew.client().emit_event(event, {"by": "anna"})
        crew.client().work_batch()

    crew.each(executions, run)
    crew.drain(executions, 1)


def spawn(crew: Crew, executions: int, count: int) -> None:
    crew.each(executions, lambda _: crew.client().spawn("steps", {"count": count}))


def spawn_parks(crew: Crew, executions: int, _: int) -> None:
    crew.each(executions, lambda number: crew.client().spawn("parks", {"event": f"approval:{number}"}))


def park_backlog(crew: Crew, executions: int, _: int) -> None:
    crew.drain(executions, reached=parking)
    crew.each(executions, lambda number: crew.client().emit_event(f"approval:{number}", {"by": "anna"}))
    crew.drain(executions)


def lost(crew: Crew, executions: int, _: int) -> None:
    """All are claimed by a worker that dies: their claims end after a second."""
    at_once = {"kind": "fixed", "base_seconds": 0}
    crew.each(
        executions,
        lambda _: crew.client().spawn("steps", {"count": 1}, retry_strategy=at_once, max_attempts=3),
    )
    assert len(crew.client().claim_tasks(executions, claim_timeout=1)) == executions
    time.sleep(1.5)


def broken(crew: Crew, _: int, count: int) -> None:
    at_once = {"kind": "fixed", "base_seconds": 0}
    crew.client().spawn("breaks", {"count": count}, retry_strategy=at_once, max_attempts=2)
    crew.client().work_batch(claim_timeout=600)


def again(crew: Crew, _: int, count: int) -> None:
    crew.client().work_batch(claim_timeout=600)
    assert all(ended.acquire(blocking=False) for _ in range(2))  # so it did run to its end


def backlog(crew: Crew, executions: int, _: int) -> None:
    crew.drain(executions)


def nothing(crew: Crew, executions: int, count: int) -> None:
    pass


# What is prepared outside the clock, and what is timed.
CASES = {
    "steps": (nothing, inline),
    "backlog": (spawn, backlog),
    "park": (nothing, park),
    "park-backlog": (spawn_parks, park_backlog),
    "recovery": (lost, backlog),
    "replay": (broken, again),
}


def main(url: str, schema: str, case: str, *numbers: str) -> None:
    level, executions, count = map(int, numbers)
    with psycopg.connect(url, autocommit=True) as connection:
        there = connection.execute("select to_regnamespace('absurd') is not null").fetchone()
        if there is not None and not there[0]:
            connection.execute(Path(schema).read_bytes())
            Absurd(connection).create_queue("default")
    crew = Crew(url, level)
    prepare, work = CASES[case]
    if case != "replay":
        inline(crew, level, 1)  # connections, and what the server learns about each of them
    prepare(crew, executions, count)
    began, spent = time.perf_counter(), time.process_time()
    work(crew, executions, count)
    elapsed, spent = time.perf_counter() - began, time.process_time() - spent
    pieces = count if case == "replay" else executions
    print(json.dumps({"per_second": pieces / elapsed, "cpu_us": spent / pieces * 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
