"""python -m benchmarks.peers --python VENV/bin/python: the same work in DBOS and in loom, in turn, on one PostgreSQL.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install dbos
    python -m benchmarks.peers --python /tmp/peers/bin/python

An execution has so many steps, each of which returns a small record; somebody starts it and waits for its end. Loom
does it with bodies inline, in threads, and again as a backlog that one worker drains.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import backends
from benchmarks.__main__ import ROOT, URL, server

HERE: Final = Path(__file__).resolve().parent
SHAPES: Final = ((1, 1), (8, 1), (64, 1), (64, 5), (64, 20))  # at a time, steps


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="an interpreter that has dbos")
    parser.add_argument("--runs", type=int, default=3, help="of each, in turn (default: %(default)s)")
    parser.add_argument("--executions", type=int, default=256, help="in each run (default: %(default)s)")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        url = os.environ.get(URL) or stack.enter_context(server())
        commands = {
            "DBOS": [options.python, str(HERE / "with_dbos.py"), _fresh(stack, url)],
            "loom, inline": [
                sys.executable,
                "-m",
                "benchmarks.peers.with_loom",
                _fresh(stack, url),
                "inline",
            ],
            "loom, worker": [
                sys.executable,
                "-m",
                "benchmarks.peers.with_loom",
                _fresh(stack, url),
                "worker",
            ],
        }
        print("| steps | at a time | who | per second | CPU, us | times DBOS |\n|---|---|---|---|---|---|")
        for level, steps in SHAPES:
            executions = max(level, options.executions // steps)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
            for _ in range(options.runs):
                for name, command in commands.items():
                    runs[name].append(_run([*command, str(level), str(executions), str(steps)]))
            for name, told in runs.items():
                pairs = zip(told, runs["DBOS"], strict=True)
                times = median(one["per_second"] / other["per_second"] for one, other in pairs)
                rate, cpu = (median(one[key] for one in told) for key in ("per_second", "cpu_us"))
                print(f"| {steps} | {level} | {name} | {rate:.0f} | {cpu:.0f} | {times:.1f} |", flush=True)
    return 0


def _fresh(stack: ExitStack, url: str) -> str:
    return stack.enter_context(backends.database_of_its_own(url))


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
