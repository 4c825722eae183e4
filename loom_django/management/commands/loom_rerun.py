"""A failed execution, again."""

from __future__ import annotations

from typing import Any

from loom_django.management.base import CopyCommand
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(CopyCommand):
    help = (
        "Starts a failed execution again as a new one, from the step that it failed with. What was done before is "
        "kept and not done again. The source is not touched."
    )
    act = Act.RERUN_EXECUTION

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.rerun_execution(
            loom,
            operator,
            execution_id,
            new_execution_id=options["new_id"],
            reason=options["reason"],
            dry_run=options["dry_run"],
        )
