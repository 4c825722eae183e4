"""python -m benchmarks.peers: the same work in DBOS, in Absurd and in loom, in turn, on one PostgreSQL.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install dbos absurd-sdk absurdctl "psycopg[binary]"
    /tmp/peers/bin/python -c "import absurdctl; print(absurdctl.BUNDLED_SCHEMA_SQL)" > /tmp/absurd.sql
    python -m benchmarks.peers --python /tmp/peers/bin/python --absurd-schema /tmp/absurd.sql

Who is not there is left out, and a line says so. "Inline" is a thread that starts an execution and stays with it to its
end; "backlog" is what was started before, and is drained by a worker; of loom by one of plain and by one of async bodies.
Parks of loom are answered with a conditional fence; in a backlog all park first, then all are answered.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import backends
from benchmarks.__main__ import ROOT, URL, server

HERE: Final = Path(__file__).resolve().parent
LOOM: Final = [sys.executable, "-m", "benchmarks.peers.with_loom"]
ASYNC: Final = "loom, async"


@dataclass(frozen=True)
class Work:
    """``case`` names it in the scripts beside this one. ``executions`` of None are as many as were asked for; ``runs`` of
    None likewise: what takes seconds by itself is run once."""

    name: str
    case: str
    level: int
    steps: int
    who: tuple[str, ...] = ("DBOS", "Absurd", "loom")
    executions: int | None = None
    runs: int | None = None


WORKS: Final = (
    *(
        Work(
            f"{steps} step{'s' * (steps > 1)}, {case}",
            "steps" if case == "inline" else case,
            level,
            steps,
            who,
        )
        for steps in (1, 5, 20)
        for level in (1, 8, 64)
        for case, who in (("inline", ("DBOS", "Absurd", "loom")), ("backlog", ("Absurd", "loom", ASYNC)))
        if case == "inline" or level == 64
    ),
    *(Work("park and resume", "park", level, 1) for level in (1, 8, 64)),
    Work("park and resume, backlog", "park-backlog", 64, 1, ("Absurd", "loom", ASYNC)),
    Work("children of one parent, of 1 000", "fan", 64, 1_000, ("DBOS", "loom", ASYNC), 1, 1),
    Work("recovery of 1 000", "recovery", 64, 1, executions=1_000, runs=1),
    Work("replay of 1 000 steps", "replay", 1, 1_000, executions=1, runs=1),
    Work("replay of 10 000 steps", "replay", 1, 10_000, ("Absurd", "loom"), executions=1, runs=1),
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="an interpreter that has dbos and absurd-sdk, or one of them")
    parser.add_argument("--absurd-schema", type=Path, metavar="FILE", help="absurd.sql; without it no Absurd")
    parser.add_argument("--runs", type=int, default=5, help="of each, in turn (default: %(default)s)")
    parser.add_argument("--executions", type=int, default=256, help="in each run (default: %(default)s)")
    parser.add_argument("--work", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--concurrency", help="default: all of 1, 8 and 64")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    levels = {int(level) for level in (options.concurrency or "1,8,64").split(",")}
    options.works = [
        work
        for work in WORKS
        if work.level in levels
        and (not options.work or work.name in options.work or work.case in options.work)
    ]
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with ExitStack() as stack:
        url = os.environ.get(URL) or stack.enter_context(server())
        told = measure(options, url)
    print(json.dumps(told, indent=1) if options.format == "json" else table(told))
    return 0


def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Every work by everyone who is there, in turn, each in a process of its own over a database of its own."""
    commands, absent = present(options)
    rows: list[dict[str, Any]] = []
    for work in options.works:
        rows += _measured(work, {who: commands[who] for who in work.who if who in commands}, options, url)
    return {"absent": absent, "peers": rows}


def present(options: argparse.Namespace) -> tuple[dict[str, list[str]], list[str]]:
    """How each is called, and of who is left out, why."""
    commands, absent = {"loom": LOOM, ASYNC: [*LOOM, "--async"]}, []
    for who, module, more in (
        ("DBOS", "dbos", []),
        ("Absurd", "absurd_sdk", [str(options.absurd_schema.resolve())] if options.absurd_schema else None),
    ):
        if options.python is None:
            absent.append(f"{who} is left out: no --python names an interpreter that has it")
        elif more is None:
            absent.append(f"{who} is left out: --absurd-schema names no absurd.sql")
        elif subprocess.run([options.python, "-c", f"import {module}"], capture_output=True).returncode:
            absent.append(f"{who} is left out: {options.python} has no {module}")
        else:
            commands[who] = [options.python, str(HERE / f"with_{who.lower()}.py")]
    return commands, absent


def _measured(
    work: Work, commands: dict[str, list[str]], options: argparse.Namespace, url: str
) -> Iterator[dict[str, Any]]:
    executions = work.executions or max(work.level, options.executions // work.steps)
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in commands}
    backends.say(work.level, work.name)
    with ExitStack() as stack:
        databases = {who: stack.enter_context(backends.database_of_its_own(url)) for who in commands}
        for number in range(work.runs or options.runs):
            for who in list(commands) if number % 2 == 0 else list(commands)[::-1]:
                schema = [str(options.absurd_schema.resolve())] if who == "Absurd" else []
                arguments = [work.case, *map(str, (work.level, executions, work.steps))]
                runs[who].append(_run([*commands[who], databases[who], *schema, *arguments]))
    for who, told in runs.items():
        yield {
            "work": work.name,
            "concurrency": work.level,
            "who": who,
            "per_second": median(one["per_second"] for one in told),
            "cpu_us": median(one["cpu_us"] for one in told),
            "times_loom": _times(runs["loom"], told),
            "times_async": _times(runs[ASYNC], told) if ASYNC in runs else None,
            "runs": len(told),
        }


def _times(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return median(our["per_second"] / their["per_second"] for our, their in pairs)


def table(told: dict[str, Any]) -> str:
    """Markdown; beside the figures stands how many times as fast loom was in the same runs, by its plain and async bodies."""
    lines = [*told["absent"], ""] if told["absent"] else []
    columns = ("work", "at a time", "who", "per second", "CPU, us", "loom, times", f"{ASYNC}, times", "runs")
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in told["peers"]:
        by_async = "-" if one["times_async"] is None else f"{one['times_async']:.1f}"
        figures = f"{one['per_second']:.0f} | {one['cpu_us']:.0f} | {one['times_loom']:.1f} | {by_async} | {one['runs']}"
        lines.append(f"| {one['work']} | {one['concurrency']} | {one['who']} | {figures} |")
    return "\n".join(lines)


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
