"""The end of an execution."""

from __future__ import annotations

from typing import Any

from loom_django.management.base import ActCommand
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        "Ends an execution for good. A step that is running may still have its effect; nothing more of it is "
        "recorded, and compensations do not run."
    )
    act = Act.CANCEL_EXECUTION
    nothing_appended = "it was cancelled already; nothing was appended"

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.cancel_execution(
            loom, operator, execution_id, reason=options["reason"], dry_run=options["dry_run"]
        )
