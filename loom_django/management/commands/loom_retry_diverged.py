"""Another run of a body that skipped what its log holds."""

from __future__ import annotations

from typing import Any

from loom_django.management.base import ActCommand
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        "Runs an execution again that is parked because its body did not ask for what its log holds, after its code "
        "was set right. Finished steps are not repeated."
    )
    act = Act.RETRY_DIVERGED

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.retry_diverged(
            loom, operator, execution_id, reason=options["reason"], dry_run=options["dry_run"]
        )
