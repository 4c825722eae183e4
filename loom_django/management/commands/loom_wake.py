"""Wakes that are due, tried now."""

from __future__ import annotations

from typing import Any

from loom_django.management.base import ActCommand
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = (
        "Has the wakes of an execution tried now that are due, and were put off since they could not be served. "
        "A wake whose time has not come is left alone."
    )
    act = Act.WAKE_TIMER

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.wake_timer(
            loom, operator, execution_id, reason=options["reason"], dry_run=options["dry_run"]
        )

    def describe(self, done: Done, *, dry_run: bool) -> list[str]:
        return [f"wakes that {'would be' if dry_run else 'are'} tried now: {done.wakes}"]
