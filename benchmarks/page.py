"""python -m benchmarks.page: everything that docs/explanation/speed.md tells in figures, as its very tables.

    python -m benchmarks.page --json /tmp/figures.json --into docs/explanation/speed.md \\
        --python /tmp/peers/bin/python --absurd-schema /tmp/absurd.sql
    python -m benchmarks.page --from /tmp/figures.json --into docs/explanation/speed.md

A table stands in the page between "<!-- table: NAME -->" and "<!-- end of table -->"; without --into all are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.__main__ import ROOT, URL, server
from benchmarks.peers.__main__ import measure as measure_peers
from benchmarks.peers.__main__ import parse as parse_peers
from benchmarks.peers.__main__ import table as peers_table

NAMES: Final = {
    "memory": "memory",
    "sqlite": "SQLite",
    "sqlite-normal": "SQLite, NORMAL",
    "postgresql": "PostgreSQL",
}
_TABLE: Final = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

# Of SQLite with synchronous=NORMAL only what differs by it most.
NORMAL: Final = ("execution, unfenced", "worker, 1 step")

Rows = list[dict[str, Any]]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--peer-runs", type=int, help="beside the peers (default: as many)")
    parser.add_argument("--executions", type=int, default=96, help="in each run (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,8,64", help="default: %(default)s; inline SQLite up to 8")
    parser.add_argument("--case", action="append", metavar="NAME", help="default: everything of benchmarks")
    parser.add_argument("--backend", action="append", choices=tuple(NAMES), help="default: all")
    parser.add_argument("--python", help="an interpreter that has dbos and absurd-sdk")
    parser.add_argument("--absurd-schema", metavar="FILE", help="absurd.sql")
    parser.add_argument("--without-peers", action="store_true", help="loom alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    parser.add_argument(
        "--from", type=Path, dest="kept", metavar="FILE", help="measure nothing: figures that were kept"
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the tables into this page")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    told = measure(options) if options.kept is None else json.loads(options.kept.read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1))
    made = tables(told)
    if options.into is None:
        print("\n\n".join(f"## {name}\n\n{table}" for name, table in made.items()))
    else:
        options.into.write_text(filled(options.into.read_text(), made))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Our figures by a process of its own, and those of the peers, on one server."""
    with ExitStack() as stack:
        url = os.environ.get(URL) or stack.enter_context(server())
        told = _ours(
            options, url, [name for name in options.backend or NAMES if name != "sqlite-normal"], options.case
        )
        if "sqlite-normal" in (options.backend or NAMES):
            for key, found in _ours(options, url, ["sqlite-normal"], options.case or NORMAL).items():
                told[key] = told[key] | found if isinstance(found, dict) else told[key] + found
        if not options.without_peers:
            asked = [f"--runs={options.peer_runs or options.runs}", f"--executions={options.executions}"]
            asked += [f"--concurrency={options.concurrency}"]
            asked += [f"--python={options.python}"] if options.python else []
            asked += [f"--absurd-schema={options.absurd_schema}"] if options.absurd_schema else []
            told |= measure_peers(parse_peers(asked), url)
    return told


def _ours(
    options: argparse.Namespace, url: str, names: Sequence[str], cases: Sequence[str] | None
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "--format=json", f"--runs={options.runs}"]
    command += [f"--executions={options.executions}", f"--concurrency={options.concurrency}"]
    command += [f"--backend={name}" for name in names] + [f"--case={name}" for name in cases or ()]
    env = {**os.environ, URL: url}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def tables(told: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name, those of which there are figures."""
    made = {
        "machine": _about(told),
        "shape": _shape(told["results"]),
        "figures": _pivot(told["results"], _figure),
        "latency": _pivot([one for one in told["results"] if one["concurrency"] == 1], _latency),
        "fences": _pivot(
            [{**one, "case": f"{one['of']} over {one['to']}"} for one in told["ratios"]],
            lambda one: f"{one['times']:.2f} ({one['times_cpu']:.2f})",
        ),
        "wholes": _pivot(told["wholes"], _figure),
        "singles": _singles(told["singles"]),
    }
    if "peers" in told:
        made["peers"] = peers_table(told)
    return {name: table for name, table in made.items() if table}


def filled(page: str, made: dict[str, str]) -> str:
    """The page with these tables in their places; a place for which there is none stays as it is.

    Raises:
        SystemExit: the page has no place for one of them.
    """
    missing = set(made) - {match[2] for match in _TABLE.finditer(page)}
    if missing:
        raise SystemExit(f"the page has no <!-- table: {min(missing)} -->")

    def put(match: re.Match[str]) -> str:
        return f"{match[1]}\n{made[match[2]]}\n\n{match[3]}" if match[2] in made else match[0]

    return _TABLE.sub(put, page)


def _figure(one: dict[str, Any]) -> str:
    return f"{one['per_second']:.0f}, {one['cpu_us']:.0f} us ({one['times_bare']:.1f}, {one['times_bare_cpu']:.1f})"


def _latency(one: dict[str, Any]) -> str:
    ours, bare = (f"{one[f'{side}p50_ms']:.2f} / {one[f'{side}p99_ms']:.2f}" for side in ("", "bare_"))
    return f"{ours} (bare {bare})"


def _pivot(rows: Rows, cell: Any) -> str:
    """A row for each case, a column for each database and number at a time."""
    places = list(dict.fromkeys((one["backend"], one["concurrency"]) for one in rows))
    cases = list(dict.fromkeys(one["case"] for one in rows))
    found = {(one["case"], one["backend"], one["concurrency"]): cell(one) for one in rows}
    if not cases:
        return ""
    heads = [
        f"{NAMES[backend]}, {level}"
        for backend, level in sorted(places, key=lambda at: list(NAMES).index(at[0]))
    ]
    places.sort(key=lambda at: list(NAMES).index(at[0]))
    return _table(
        ["", *heads], [[case, *(found.get((case, *place), "-") for place in places)] for case in cases]
    )


def _shape(results: Rows) -> str:
    """What is counted: the same at every number at a time, so one of each is told."""
    of = {(one["case"], one["backend"]): one for one in results}
    rows = []
    for case in dict.fromkeys(one["case"] for one in results):
        served, filed = of.get((case, "postgresql"), {}), of.get((case, "sqlite"), {})
        either = served or filed or of.get((case, "memory"), {})
        names = ("statements", "round_trips", "sent_bytes")
        rows.append(
            [case, *(either.get(name, "-") for name in ("events", "commits"))]
            + [served.get(name, "-") for name in names]
            + [filed.get("statements", "-")]
        )
    heads = [
        "",
        "events",
        "commits",
        "PostgreSQL: statements",
        "round trips",
        "bytes sent",
        "SQLite: statements",
    ]
    return _table(heads, rows) if rows else ""


def _singles(rows: Rows) -> str:
    lines = []
    for one in rows:
        for name, value in one.items():
            if name not in ("backend", "case"):
                text = f"{value:.2f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"
                lines.append([one["case"], NAMES[one["backend"]], name.replace("_", " "), text])
    return _table(["", "database", "what", "figure"], lines) if lines else ""


def _about(told: dict[str, Any]) -> str:
    rows = [[name, value] for name, value in told["machine"].items()]
    for backend, about in told["backends"].items():
        if about:
            rows.append([NAMES[backend], ", ".join(f"{name} {value}" for name, value in about.items())])
    return _table(["machine", ""], rows)


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
