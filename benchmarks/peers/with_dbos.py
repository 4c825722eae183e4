"""The work in DBOS, run by a Python that has it: prints executions per second and CPU for each as JSON."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from dbos import DBOS  # type: ignore[import-not-found]


@DBOS.step()  # type: ignore[untyped-decorator]
def book(order: str, amount: int) -> dict[str, object]:
    return {"order": order, "amount": amount, "reference": DBOS.workflow_id, "state": "booked"}


@DBOS.workflow()  # type: ignore[untyped-decorator]
def steps(order: str, count: int) -> int:
    for _ in range(count):
        book(order, 1999)
    return count


def main(url: str, level: int, executions: int, count: int) -> None:
    DBOS(
        config={
            "name": "benchmark",
            "system_database_url": url,
            "log_level": "ERROR",
            "run_admin_server": False,
        }
    )
    DBOS.launch()

    def run(_: int) -> None:
        assert DBOS.start_workflow(steps, "order-2026-000017", count).get_result() == count

    with ThreadPoolExecutor(level) as pool:
        list(pool.map(run, range(level)))
        began, spent = time.perf_counter(), time.process_time()
        list(pool.map(run, range(executions)))
        elapsed, spent = time.perf_counter() - began, time.process_time() - spent
    print(json.dumps({"per_second": executions / elapsed, "cpu_us": spent / executions * 1e6}))
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
