"""python -m benchmarks.scale: what a rate of starts asks of one PostgreSQL and of its workers, day by day.

    python -m benchmarks.scale --per-second 40 --steps 5 --peak 10 --keep-days 90

A simulation and no measurement: it runs days of hours with a busy time, keeps what retention keeps, and says what
is full first. Its constants are of one slow machine (docs/explanation/speed.md); give those of your own.
"""

from __future__ import annotations

import argparse
import sys
from math import ceil

# Of a day's hours, how busy each is beside the mean: nights are quiet, and the peak is an argument.
HOURS = (
    0.2,
    0.2,
    0.2,
    0.2,
    0.3,
    0.5,
    0.8,
    1.2,
    1.6,
    1.8,
    1.8,
    1.7,
    1.5,
    1.6,
    1.8,
    1.7,
    1.5,
    1.2,
    1.0,
    0.9,
    0.8,
    0.7,
    0.5,
    0.3,
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--per-second", type=float, default=40, help="starts, as a day's mean (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of an execution (%(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="a tool takes (%(default)s)")
    parser.add_argument(
        "--peak", type=float, default=5, help="the busiest minute beside the mean (%(default)s)"
    )
    parser.add_argument("--keep-days", type=int, default=90, help="LOOM['RETENTION'] (%(default)s)")
    parser.add_argument("--days", type=int, default=365, help="to look ahead (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=64, help="bodies of a worker (%(default)s)")
    parser.add_argument(
        "--worker-us", type=float, default=310, help="of a worker's CPU an append (%(default)s)"
    )
    parser.add_argument(
        "--server-us", type=float, default=120, help="of the server's CPU an append (%(default)s)"
    )
    parser.add_argument("--server-cores", type=int, default=4, help="(%(default)s)")
    parser.add_argument(
        "--event-bytes", type=int, default=370, help="with its share of indexes (%(default)s)"
    )
    parser.add_argument("--row-bytes", type=int, default=1900, help="of an execution, likewise (%(default)s)")
    parser.add_argument("--disk-gb", type=float, default=500, help="(%(default)s)")
    parser.add_argument("--max-connections", type=int, default=200, help="(%(default)s)")
    return parser.parse_args(arguments)


def days(options: argparse.Namespace) -> list[int]:
    """How many executions are kept at the end of each day: what is started, less what retention removes."""
    kept: list[int] = []
    started: list[int] = []
    scale = options.per_second * 3600 / (sum(HOURS) / len(HOURS))
    for day in range(options.days):
        started.append(round(sum(hour * scale for hour in HOURS)))
        gone = started[day - options.keep_days] if day >= options.keep_days else 0
        kept.append((kept[-1] if kept else 0) + started[-1] - gone)
    return kept


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    appends, events = options.steps + 2, 2 * options.steps + 2
    busiest = options.per_second * options.peak
    bodies = ceil(busiest * options.steps * options.step_seconds)
    cores = busiest * appends * options.worker_us / 1e6
    workers = max(ceil(cores), ceil(bodies / options.concurrency), 1)
    connections = bodies + 6 * workers
    server = busiest * appends * options.server_us / 1e6
    kept = days(options)
    each = events * options.event_bytes + options.row_bytes
    size = max(kept) * each / 1e9
    full = next((day for day, count in enumerate(kept, 1) if count * each / 1e9 > options.disk_gb), None)
    asked = {
        "the server's cores": (server, options.server_cores),
        "connections": (connections, options.max_connections),
        "the disk, in GB": (size, options.disk_gb),
    }
    print(f"an execution: {events} events in {appends} appends, {each / 1000:.1f} kB")
    print(
        f"the busiest minute: {busiest:.0f} starts and {busiest * appends:.0f} appends a second, {bodies} bodies"
    )
    print(f"workers: {workers} processes, {cores:.1f} cores; connections: {connections}")
    print(f"kept at most: {max(kept):,} executions, {max(kept) * events:,} events, {size:.0f} GB")
    print(f"removed each day: {round(kept[0]) * events:,} events, which autovacuum clears up after")
    for name, (wanted, there) in sorted(asked.items(), key=lambda one: -one[1][0] / one[1][1]):
        print(f"{wanted / there:6.0%} of {name}: {wanted:.1f} of {there:g}")
    if full is not None:
        print(f"the disk is full on day {full}")
    return 0 if all(wanted <= there for wanted, there in asked.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
