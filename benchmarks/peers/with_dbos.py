"""The work in DBOS, run by a Python that has it: prints executions per second and CPU for each as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dbos import DBOS  # type: ignore[import-not-found]

ORDER = "order-2026-000017"
DIES = "BENCHMARK_DIES"
reached = threading.Semaphore(0)


@DBOS.step()  # type: ignore[untyped-decorator]
def book(order: str, amount: int) -> dict[str, object]:
    return {"order": order, "amount": amount, "reference": DBOS.workflow_id, "state": "booked"}


@DBOS.workflow()  # type: ignore[untyped-decorator]
def steps(order: str, count: int) -> int:
    for _ in range(count):
        book(order, 1999)
    return count


@DBOS.workflow()  # type: ignore[untyped-decorator]
def parks(order: str) -> str:
    booked = book(order, 1999)
    return f"{booked['state']} {DBOS.recv('approval')['by']}"


@DBOS.workflow()  # type: ignore[untyped-decorator]
def fans_out(count: int) -> int:
    children = [DBOS.start_workflow(steps, ORDER, 1) for _ in range(count)]
    return len([child.get_result() for child in children])


@DBOS.workflow()  # type: ignore[untyped-decorator]
def dies(before: int, after: int) -> None:
    """A process that was told to die does so between these steps."""
    for _ in range(before):
        book(ORDER, 1999)
    if os.environ.get(DIES):
        reached.release()
        threading.Event().wait()
    for _ in range(after):
        book(ORDER, 1999)


def run(count: int) -> None:
    assert DBOS.start_workflow(steps, ORDER, count).get_result() == count


def park(_: int) -> None:
    handle = DBOS.start_workflow(parks, ORDER)
    DBOS.send(handle.workflow_id, {"by": "anna"}, "approval")
    assert handle.get_result() == "booked anna"


def timed(pieces: int, work: Callable[[], object]) -> None:
    began, spent = time.perf_counter(), time.process_time()
    work()
    elapsed, spent = time.perf_counter() - began, time.process_time() - spent
    print(json.dumps({"per_second": pieces / elapsed, "cpu_us": spent / pieces * 1e6}), flush=True)


def leave_behind(executions: int, before: int, after: int) -> None:
    """Start so many workflows and die when all of them have got so far."""
    for _ in range(executions):
        DBOS.start_workflow(dies, before, after)
    for _ in range(executions):
        reached.acquire()
    os._exit(0)


def recover(executions: int) -> None:
    """Launching takes up what a dead process of the same name left."""
    DBOS.launch()
    while ended() < executions:
        time.sleep(0.02)


def ended() -> int:
    return len(DBOS.list_workflows(status="SUCCESS", load_input=False, load_output=False))


def main(url: str, case: str, *numbers: str) -> None:
    level, executions, count = map(int, numbers)
    before, after = (count, 0) if case == "replay" else (0, 1)
    recovers = case in ("recovery", "replay") and not os.environ.get(DIES)
    if recovers:
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, DIES: "1"}, check=True)
    DBOS(
        config={
            "name": "benchmark",
            "system_database_url": url,
            "log_level": "ERROR",
            "run_admin_server": False,
        }
    )
    if recovers:
        timed(count if case == "replay" else executions, lambda: recover(executions))
        os._exit(0)
    DBOS.launch()
    if os.environ.get(DIES):
        leave_behind(executions, before, after)
    with ThreadPoolExecutor(level) as pool:
        work: Callable[[int], object] = park if case == "park" else lambda _: run(count)
        list(pool.map(work, range(level)))
        if case == "fan":
            timed(count, lambda: DBOS.start_workflow(fans_out, count).get_result())
        else:
            timed(executions, lambda: list(pool.map(work, range(executions))))
    DBOS.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
