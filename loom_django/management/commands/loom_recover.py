"""One recovery pass."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django.management.options import add_format, logging_to_console, positive_float, positive_int
from loom_django.runtime import loom
from loom_django.services.recovery import recover_abandoned
from loom_django.stores.base import Lease


class Command(BaseCommand):
    help = (
        "Takes up executions whose process died: those whose lease has ended. What must not run twice is parked "
        "for a verdict. With the tasks dispatcher it also enqueues again what nobody has taken up. Exit code 1 "
        "if one could not be recovered."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--stale-after",
            type=positive_float,
            help="Only leases that ended at least so many seconds ago.",
        )
        parser.add_argument(
            "--limit", type=positive_int, default=50, help="At most so many (default: %(default)s)."
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Say what would be recovered; change nothing."
        )
        add_format(parser)

    @logging_to_console
    def handle(self, *args: Any, **options: Any) -> None:
        if options["dry_run"]:
            self._dry_run(options)
            return
        summary = recover_abandoned(
            loom, leases=loom.store, is_abandoned=self._judge(options["stale_after"]), limit=options["limit"]
        )
        if options["format"] == "json":
            self.stdout.write(json.dumps(asdict(summary)))
        else:
            self.stdout.write(
                f"scanned {summary.scanned}, candidates {summary.candidates}, "
                f"recovered {summary.recovered}, failed {summary.failed}, enqueued {summary.enqueued}"
            )
            for execution_id, why in summary.failures:
                self.stdout.write(f"  {execution_id}: {why}")
        if summary.failed:
            raise CommandError(f"{summary.failed} executions could not be recovered", returncode=1)

    def _judge(self, stale_after: float | None) -> Any:
        if stale_after is None:
            return None
        limit = loom.store.now() - timedelta(seconds=stale_after)
        return lambda lease: lease.until <= limit

    def _dry_run(self, options: dict[str, Any]) -> None:
        judge = self._judge(options["stale_after"]) or (lambda lease: True)
        found: list[Lease] = [lease for lease in loom.store.expired(limit=options["limit"]) if judge(lease)]
        if options["format"] == "json":
            items = [
                {"execution_id": lease.execution_id, "until": lease.until.isoformat()} for lease in found
            ]
            self.stdout.write(json.dumps({"candidates": items}))
            return
        for lease in found:
            self.stdout.write(f"{lease.execution_id}: lease of {lease.owner} ended {lease.until.isoformat()}")
        self.stdout.write(f"{len(found)} would be recovered")
