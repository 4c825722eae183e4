"""All columns: those of fences, and executions of more steps than one."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from benchmarks import fences, wholes
from benchmarks.frame import Bench, Case


def run_steps(bench: Bench, _: Any, *, count: int) -> str:
    return str(bench.loom.start(wholes.steps, args=(fences.ORDER, count)).id)


def run_transactional(bench: Bench, _: Any) -> str:
    return str(bench.loom.start(wholes.transactional, args=(fences.ORDER,)).id)


STEPS: Final = {
    f"execution, {count} steps": Case(
        f"execution, {count} steps", partial(run_steps, count=count), weight=count
    )
    for count in (5, 20, 100)
}
CASES: Final = (*fences.CASES, *STEPS.values(), Case("execution, a transactional step", run_transactional))
