"""The work in loom: bodies inline in as many threads, or in one worker (with --async, of async bodies); prints as the peers
do."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import backends


def main(*arguments: str) -> None:
    is_async = arguments[0] == "--async"
    url, case, *numbers = arguments[is_async:]
    level, executions, count = map(int, numbers)
    with tempfile.TemporaryDirectory() as folder:
        backends.configure(url, Path(folder))
        from benchmarks.frame import Bench

        told = _run(Bench(backends.make_store("postgresql")), case, level, executions, count, is_async)
    print(json.dumps({"per_second": told.rate, "cpu_us": told.cpu_us}))


def _run(bench: Any, case: str, level: int, executions: int, count: int, is_async: bool) -> Any:
    from benchmarks import fences, wholes
    from benchmarks.frame import Crew
    from loom_django.services.garbage import rare_collections

    def whole(prepare: Any, work: Any, pieces: int) -> Any:
        prepared = prepare(bench, pieces)
        with rare_collections():  # as the worker's command
            return wholes.timed(pieces, lambda: work(bench, prepared, level))

    def backlog(flow: Any, work: Any, *arguments: Any) -> Any:
        def prepare(bench: Any, count: int) -> Any:
            return wholes.ready(bench, flow, count, fences.ORDER, *arguments)

        whole(prepare, work, level)
        return whole(prepare, work, executions)

    match case:
        case "backlog":
            return backlog(wholes.async_steps if is_async else wholes.steps, wholes.drain, count)
        case "park-backlog":
            return backlog(wholes.async_parks if is_async else fences.parks, wholes.park_and_resume)
        case "recovery":
            return whole(wholes.abandoned, wholes.recover, executions)
        case "fan":
            return whole(wholes.fans_async if is_async else wholes.fans, wholes.run_fan, count)
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
