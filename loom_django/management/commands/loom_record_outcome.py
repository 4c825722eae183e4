"""A note on an execution that has ended."""

from __future__ import annotations

import argparse
from typing import Any

from loom_django.management.base import ActCommand, json_value
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        "Notes something about an execution that has ended: such as what became of an effect that was in doubt "
        "when it was cancelled."
    )
    act = Act.RECORD_OUTCOME

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("outcome", metavar="OUTCOME", help="What happened, in a few words.")
        parser.add_argument("--payload", metavar="JSON", default="null", help="More about it.")
        parser.add_argument(
            "--step", metavar="STEP", help="The step in doubt that this settles; it leaves the queue."
        )

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.record_outcome(
            loom,
            operator,
            execution_id,
            options["outcome"],
            json_value(options["payload"], "--payload"),
            step_id=options["step"],
            reason=options["reason"],
            dry_run=options["dry_run"],
        )
