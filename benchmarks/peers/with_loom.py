"""The work in loom: bodies inline in as many threads, or in one worker; prints as the peers do."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import backends


def main(url: str, case: str, *numbers: str) -> None:
    level, executions, count = map(int, numbers)
    with tempfile.TemporaryDirectory() as folder:
        backends.configure(url, Path(folder))
        from benchmarks.frame import Bench

        told = _run(Bench(backends.make_store("postgresql")), case, level, executions, count)
    print(json.dumps({"per_second": told.rate, "cpu_us": told.cpu_us}))


def _run(bench: Any, case: str, level: int, executions: int, count: int) -> Any:
    from benchmarks import fences, wholes
    from benchmarks.frame import Crew
    from loom_django.services.garbage import rare_collections

    def whole(prepare: Any, work: Any, pieces: int) -> Any:
        prepared = prepare(bench, pieces)
        with rare_collections():  # as the worker's command
            return wholes.timed(pieces, lambda: work(bench, prepared, level))

    match case:
        case "backlog":
            whole(
                lambda bench, n: wholes.ready(bench, wholes.steps, n, fences.ORDER, count),
                wholes.drain,
                level,
            )
            return whole(
                lambda bench, n: wholes.ready(bench, wholes.steps, n, fences.ORDER, count),
                wholes.drain,
                executions,
            )
        case "recovery":
            return whole(wholes.abandoned, wholes.recover, executions)
        case "fan":
            return whole(wholes.fans, wholes.run_fan, count)
        case "replay":
            return whole(wholes.recorded, wholes.replay, count)
        case "park":

            def work(_: int) -> object:
                return fences.answer_if_parked(bench, fences.park(bench))

        case _:

            def work(_: int) -> object:
                return bench.loom.start(wholes.steps, args=(fences.ORDER, count))

    crew = Crew("postgresql", level)
    crew.run(range(level), work)
    told = crew.run(range(executions), work)
    crew.close()
    return told


if __name__ == "__main__":
    main(*sys.argv[1:])
