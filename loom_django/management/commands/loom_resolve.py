"""A verdict on an effect in doubt."""

from __future__ import annotations

import argparse
from typing import Any

from loom_django.management.base import ActCommand
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        "Settles an effect in doubt: gives its result, has the step run again with a fresh key, or fails it."
    )
    act = Act.RESOLVE_STEP

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("step_id", metavar="STEP", help="The step in doubt.")
        verdict = parser.add_mutually_exclusive_group(required=True)
        verdict.add_argument("--completed", metavar="JSON", help="It happened; this is the step's result.")
        verdict.add_argument(
            "--retry-fresh",
            action="store_true",
            help="It did not happen: run the step again, with a fresh key.",
        )
        verdict.add_argument("--fail", metavar="TEXT", help="It failed for good; the flow gets this failure.")
        parser.add_argument(
            "--park-sequence",
            type=int,
            metavar="N",
            help="The event that asked: its EFFECT_INDOUBT, or the park. Another question is refused.",
        )

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        # Before the JSON is looked at: whoever may not act learns nothing of the log.
        operators.require(loom, operator, self.act, execution_id)
        verdict: dict[str, Any] = {"resolution": "retry-fresh"}
        if options["completed"] is not None:
            output = operators.read_output(loom, execution_id, options["step_id"], options["completed"])
            verdict = {"resolution": "completed-with-result", "output": output}
        elif options["fail"] is not None:
            verdict = {"resolution": "fail", "error": options["fail"]}
        return operators.resolve_step(
            loom,
            operator,
            execution_id,
            options["step_id"],
            question=options["park_sequence"],
            reason=options["reason"],
            dry_run=options["dry_run"],
            **verdict,
        )
