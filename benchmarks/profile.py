"""python -m benchmarks.profile: where the time of an execution of one step goes, inline, one at a time.

    python -m benchmarks.profile --backend postgresql --executions 1000

Wall clock and CPU are of a run without a profiler. The shares of CPU are a profiler's own time by who wrote the function,
so calls of many small ones look dearer than they are. What is no CPU of this process is waiting: for the server, its
disk and other work on the machine. Of PostgreSQL, what the server itself counts as active in this database.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import backends
from benchmarks.__main__ import server

OWNERS = (
    ("loom_django", "loom_django"),
    ("/django/", "Django"),
    ("psycopg", "driver"),
    ("sqlite3", "driver"),
    ("orjson", "JSON"),
    ("json", "JSON"),
    ("benchmarks", "the benchmark"),
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=backends.BACKENDS, default="postgresql")
    parser.add_argument("--executions", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--functions", type=int, default=15, help="of the dearest (default: %(default)s)")
    return parser.parse_args(arguments)


def owner(file: str, function: str) -> str:
    """Who wrote a function; of a built-in one its name tells."""
    name = function if file == "~" else file
    return next((who for part, who in OWNERS if part in name), "Python")


def shares(work: Callable[[], object], functions: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Of the time under a profiler, how much each owner's functions took themselves, and the dearest functions."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(work)
    found: Any = pstats.Stats(profile)
    by_owner: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    for (file, line, function), (_, _, own, _, _) in found.stats.items():
        by_owner[owner(file, function)] += own
        by_function[function if file == "~" else f"{Path(file).name}:{line} {function}"] += own
    whole = sum(by_owner.values())
    return (
        {who: own / whole for who, own in by_owner.most_common()},
        [(name, own / whole) for name, own in by_function.most_common(functions)],
    )


def active(connection: Any) -> float:
    """Seconds that PostgreSQL spent on statements in this database."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_stat_force_next_flush()")
        cursor.execute("select active_time / 1000 from pg_stat_database where datname = current_database()")
        return float(cursor.fetchone()[0])


def measure(bench: Any, executions: int, functions: int) -> dict[str, Any]:
    """Microseconds of one execution: wall clock, CPU of this process, waiting, the server's; and the shares of CPU."""
    from benchmarks.fences import run_unfenced

    def work() -> None:
        for _ in range(executions):
            run_unfenced(bench, None)

    run_unfenced(bench, None)
    connection = getattr(bench.store, "connection", None)
    serves = connection is not None and connection.vendor == "postgresql"
    busy = active(connection) if serves else 0.0
    began, spent = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - began, time.process_time() - spent
    each = {"wall": wall, "cpu": cpu, "waiting": wall - cpu}
    if serves:
        each["server active"] = active(connection) - busy
    owners, dearest = shares(work, functions)
    return {
        "us": {name: seconds / executions * 1e6 for name, seconds in each.items()},
        "shares": owners,
        "functions": dearest,
    }


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with ExitStack() as stack:
        url = None
        if options.backend == "postgresql":
            url = stack.enter_context(backends.database_of_its_own(stack.enter_context(server())))
        backends.configure(url, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        from benchmarks.frame import Bench

        told = measure(Bench(backends.make_store(options.backend)), options.executions, options.functions)
    print(f"{options.backend}, an execution of one step, inline, us:")
    for name, us in told["us"].items():
        print(f"{us:8.0f} {name}")
    print("of the CPU:")
    for name, share in told["shares"].items():
        print(f"{share:8.1%} {name}")
    print("the dearest functions:")
    for name, share in told["functions"]:
        print(f"{share:8.1%} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
