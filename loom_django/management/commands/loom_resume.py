"""An answer to what a flow waits for."""

from __future__ import annotations

import argparse
from typing import Any

from loom_django.management.base import ActCommand, json_value
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = "Answers what a flow waits for by ctx.suspend."
    act = Act.RESUME_EXECUTION

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--event", required=True, metavar="TYPE", help="What the flow waits for.")
        parser.add_argument(
            "--payload", metavar="JSON", default="null", help="The answer (default: %(default)s)."
        )
        parser.add_argument(
            "--key", metavar="KEY", help="The correlation key, where several waits are of one type."
        )

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.resume_execution(
            loom,
            operator,
            execution_id,
            options["event"],
            payload=json_value(options["payload"], "--payload"),
            correlation_key=options["key"],
            reason=options["reason"],
            dry_run=options["dry_run"],
        )
