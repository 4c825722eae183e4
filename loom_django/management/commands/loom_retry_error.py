"""Another run of a body that raised."""

from __future__ import annotations

from typing import Any

from loom_django.management.base import ActCommand
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        'Runs an execution again that is parked on an error of its body (on_error="park"), after its code was '
        "fixed. Finished steps are not repeated."
    )
    act = Act.RETRY_ERROR

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.retry_error(
            loom, operator, execution_id, reason=options["reason"], dry_run=options["dry_run"]
        )
