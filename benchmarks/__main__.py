"""python -m benchmarks: measures, and prints a table or JSON.

    python -m benchmarks                                      all backends, at 1, 8 and 64 concurrent
    python -m benchmarks --backend postgresql --concurrency 8
    python -m benchmarks --against ../before --case "execution, unfenced"
                                                              this tree's loom_django beside another tree's

A PostgreSQL is started for the time of the run, with fsync on, unless LOOM_BENCH_POSTGRES_URL names one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import backends

URL = "LOOM_BENCH_POSTGRES_URL"
ROOT = Path(__file__).resolve().parent.parent
COUNTED = ("events", "commits", "statements", "round_trips", "sent_bytes")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=backends.BACKENDS, help="default: all")
    parser.add_argument("--concurrency", default="1,8,64", help="default: %(default)s; SQLite up to 8")
    parser.add_argument("--runs", type=int, default=7, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--executions", type=int, default=240, help="in each run (default: %(default)s)")
    parser.add_argument("--case", action="append", metavar="NAME", help="default: all columns")
    parser.add_argument(
        "--columns-only", action="store_true", help="not what is done in one piece, nor by itself"
    )
    parser.add_argument("--for-share", action="store_true", help="also with FOR SHARE in the append's lock")
    parser.add_argument("--against", type=Path, metavar="TREE", help="measure another checkout as well")
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    options.backend = options.backend or [name for name in backends.BACKENDS if name != "sqlite-normal"]
    options.levels = [int(level) for level in options.concurrency.split(",")]
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with ExitStack() as stack:
        url = None
        if "postgresql" in options.backend:
            url = os.environ.get(URL) or stack.enter_context(server())
        if options.against is not None:
            told = _compare(options, url)
        else:
            told = _measure(
                options, None if url is None else stack.enter_context(backends.database_of_its_own(url))
            )
    print(json.dumps(told, indent=1) if options.format == "json" else _table(told))
    return 0


def server() -> Any:
    from contextlib import contextmanager

    from tests import postgres

    @contextmanager
    def url() -> Any:
        with postgres.running(fsync=True) as server:
            yield server.url

    return url()


def _measure(options: argparse.Namespace, url: str | None) -> dict[str, Any]:
    sys.path.insert(0, str(options.tree))
    with tempfile.TemporaryDirectory() as folder:
        backends.configure(url, Path(folder))
        import loom_django
        from benchmarks import columns, fences
        from benchmarks.frame import measure, paired, paired_cpu
        from benchmarks.singles import SINGLES
        from benchmarks.singles import measure as measure_singles
        from benchmarks.wholes import WHOLES
        from benchmarks.wholes import measure as measure_wholes

        if Path(loom_django.__file__).resolve().parent.parent != options.tree.resolve():
            raise SystemExit(f"{loom_django.__file__} would be measured, and not {options.tree}")
        cases = [*columns.CASES, *(fences.FOR_SHARE if options.for_share else ())]
        if options.case:
            cases = [case for case in cases if case.name in options.case]
        chosen = [one for one in WHOLES if not options.case or one.name in options.case]
        singles = [one for one in SINGLES if not options.case or one.name in options.case]
        results, wholes, alone = [], [], []
        for backend in options.backend:
            bare = backends.Bare(backend)
            for level in options.levels:
                if backends.is_sqlite(backend) and level > 8:
                    continue  # writers with connections of their own starve each other there
                backends.say(backend, level, "columns")
                results += measure(
                    backend, bare, cases, concurrency=level, runs=options.runs, executions=options.executions
                )
            if not options.columns_only:
                wholes += measure_wholes(backend, bare, chosen, levels=options.levels, runs=options.runs)
                alone += measure_singles(backend, singles)
        ratios = []
        for at in {(one.backend, one.concurrency): None for one in results}:
            by_name = {one.case: one for one in results if (one.backend, one.concurrency) == at}
            ratios += [
                {
                    "backend": at[0],
                    "concurrency": at[1],
                    "of": one,
                    "to": other,
                    "times": paired(by_name[one].runs, by_name[other].runs),
                    "times_cpu": paired_cpu(by_name[one].runs, by_name[other].runs),
                }
                for one, other in fences.RATIOS
                if one in by_name and other in by_name
            ]
        about = {backend: backends.about(backend) for backend in options.backend}
    return {
        "machine": _machine(),
        "backends": about,
        "results": [one.told() for one in results],
        "ratios": ratios,
        "wholes": wholes,
        "singles": alone,
    }


def _machine() -> dict[str, str]:
    import django

    found = {"cpu": backends.cpu(), "python": platform.python_version(), "django": django.__version__}
    with suppress(ImportError):
        import psycopg

        found["psycopg"] = f"{psycopg.__version__} ({psycopg.pq.__impl__})"
    with suppress(PackageNotFoundError):
        found["uvloop"] = version("uvloop")
    return found


def _compare(options: argparse.Namespace, url: str | None) -> dict[str, Any]:
    """One run of each tree after the other, each in a process of its own; the trees take turns in going first."""
    trees = [ROOT, options.against.resolve()]
    pairs: list[dict[Path, list[dict[str, Any]]]] = []
    for number in range(options.runs):
        pairs.append({})
        for tree in trees if number % 2 == 0 else trees[::-1]:
            pairs[-1][tree] = _run_in(tree, options, url)
    here, there = trees
    ratios = []
    for place, one in enumerate(pairs[0][here]):
        cpu = [pair[here][place]["cpu_us"] / pair[there][place]["cpu_us"] for pair in pairs]
        times = [pair[there][place]["per_second"] / pair[here][place]["per_second"] for pair in pairs]
        ratios.append(
            {
                **{name: one[name] for name in ("case", "backend", "concurrency")},
                "times": median(times),
                "times_cpu": median(cpu),
                "least": min(times),
                "most": max(times),
                "here": {name: one[name] for name in COUNTED},
                "there": {name: pairs[0][there][place][name] for name in COUNTED},
            }
        )
    return {"machine": _machine(), "against": str(options.against), "compared": ratios}


def _run_in(tree: Path, options: argparse.Namespace, url: str | None) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--tree",
        str(tree),
        "--runs=1",
        "--format=json",
        "--columns-only",
    ]
    command += [f"--concurrency={options.concurrency}", f"--executions={options.executions}"]
    command += [f"--backend={backend}" for backend in options.backend]
    command += [f"--case={name}" for name in options.case or ()]
    env = {**os.environ, **({URL: url} if url else {})}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


def _table(told: dict[str, Any]) -> str:
    lines = [f"{name}: {value}" for name, value in (told["machine"] | told.get("backends", {})).items()]
    for one in told.get("compared", ()):
        one["spread"] = f"{one['least']:.2f}-{one['most']:.2f}"
        for side in ("here", "there"):
            one[f"counts {side}"] = " / ".join(str(value) for value in one[side].values())
    at = ("backend", "concurrency")
    for rows, columns in (
        ("compared", (*at, "case", "times", "spread", "times_cpu", "counts here", "counts there")),
        (
            "results",
            (
                *at,
                "case",
                "per_second",
                "p50_ms",
                "p99_ms",
                "cpu_us",
                "times_bare",
                "times_bare_cpu",
                *COUNTED,
            ),
        ),
        ("ratios", (*at, "of", "to", "times", "times_cpu")),
        (
            "wholes",
            (
                *at,
                "case",
                "pieces",
                "per_second",
                "seconds",
                "cpu_us",
                "times_bare",
                "times_bare_cpu",
                "runs",
            ),
        ),
    ):
        if told.get(rows):
            lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(_cell(one[column]) for column in columns)} |" for one in told[rows]]
    for one in told.get("singles", ()):
        figures = ", ".join(
            f"{name} {_cell(value)}" for name, value in one.items() if name not in ("backend", "case")
        )
        lines += ["", f"{one['case']}, {one['backend']}: {figures}"]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if value < 20 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
