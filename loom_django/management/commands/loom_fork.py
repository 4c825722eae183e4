"""A new execution over what another one had done."""

from __future__ import annotations

import argparse
from typing import Any

from loom_django.management.base import CopyCommand
from loom_django.management.options import positive_int
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(CopyCommand):
    help = (
        "Starts a new execution over what another one had done before a step was first begun. What was done is "
        "kept and not done again; the rest is done under the new id. The source is not touched."
    )
    act = Act.FORK_EXECUTION

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_act_arguments(parser)
        parser.add_argument(
            "--from-step", metavar="STEP", required=True, help="The first step that is done anew."
        )
        parser.add_argument(
            "--flow-version",
            metavar="N",
            type=positive_int,
            help="The version of the flow that the copy runs under (default: the recorded one).",
        )

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.fork_execution(
            loom,
            operator,
            execution_id,
            options["from_step"],
            new_execution_id=options["new_id"],
            version=options["flow_version"],
            reason=options["reason"],
            dry_run=options["dry_run"],
        )
