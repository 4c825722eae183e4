"""The work in loom: bodies inline in as many threads, or in one worker; prints as the peers do."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks import backends


def main(url: str, how: str, level: int, executions: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        backends.configure(url, Path(folder))
        from benchmarks import fences, wholes
        from benchmarks.frame import Bench, Crew
        from loom_django.services.dispatch import InlineDispatcher

        bench = Bench(backends.make_store("postgresql"))
        order = fences.ORDER
        if how == "worker":
            wholes.drain(bench, wholes.ready(bench, wholes.steps, level, order, count), level)
            ids = wholes.ready(bench, wholes.steps, executions, order, count)
            told = wholes.timed(executions, lambda: wholes.drain(bench, ids, level))
        else:
            bench.loom.dispatcher = InlineDispatcher(bench.engine)
            crew = Crew("postgresql", level)
            crew.run(range(level), lambda _: bench.loom.start(wholes.steps, args=(order, count)))
            told = crew.run(range(executions), lambda _: bench.loom.start(wholes.steps, args=(order, count)))
            crew.close()
    print(json.dumps({"per_second": told.rate, "cpu_us": told.cpu_us}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
