"""A move of an execution to other code."""

from __future__ import annotations

import argparse
from typing import Any

from loom_django.engine.moves import STRATEGIES
from loom_django.management.base import ActCommand, json_value
from loom_django.management.options import positive_int
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        "Moves an execution to other code of its flow, or to another flow, and with --event answers what it waits "
        "for in the same append."
    )
    act = Act.MOVE_EXECUTION

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "flow", metavar="FLOW", help="The id of the flow to move it to, as a rule its own."
        )
        parser.add_argument(
            "--flow-version", type=positive_int, metavar="N", help="Default: the one that new starts get."
        )
        parser.add_argument(
            "--strategy",
            choices=STRATEGIES,
            default="replay-check",
            help="How it is known that the code fits (default: %(default)s).",
        )
        parser.add_argument(
            "--event", metavar="TYPE", help="What the flow waits for. Without it nothing is answered."
        )
        parser.add_argument(
            "--payload", metavar="JSON", default="null", help="The answer (default: %(default)s)."
        )
        parser.add_argument(
            "--key", metavar="KEY", help="The correlation key, where several waits are of one type."
        )

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        if options["dry_run"] and options["format"] == "text" and operator.may(self.act):
            report = operators.move_report(loom, execution_id, options["flow"], options["flow_version"])
            self.stdout.write(
                f"replay check: {'passed' if report.ok else 'not passed'}, {report.frames} recorded steps"
            )
            for line in (*report.problems, *report.differences):
                self.stdout.write(f"  {line}")
        return operators.move_execution(
            loom,
            operator,
            execution_id,
            options["flow"],
            version=options["flow_version"],
            event_type=options["event"],
            payload=json_value(options["payload"], "--payload"),
            correlation_key=options["key"],
            strategy=options["strategy"],
            reason=options["reason"],
            dry_run=options["dry_run"],
        )
