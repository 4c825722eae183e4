"""Counts of executions."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand

from loom_django import conf
from loom_django.management.options import add_format
from loom_django.runtime import loom
from loom_django.services.census import census

LABELS = {
    "held": "held under a lease",
    "expired": "… of them with a lease that has ended",
    "ready": "ready, to be taken up",
    "overdue": "… of them for longer than READY_GRACE",
    "never_leased": "… of them never taken up by anybody",
    "in_doubt": "with an effect in doubt",
}


class Command(BaseCommand):
    help = "Counts executions by status and by who runs them; what nobody watches is told apart."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--flow", help="Only this flow.")
        parser.add_argument("--by-version", action="store_true", help="Count per flow and version as well.")
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        counted = census(
            loom.engine,
            conf.get_settings().DATABASE,
            flow_id=options["flow"],
            by_version=options["by_version"],
        )
        if options["format"] == "json":
            self.stdout.write(json.dumps(counted))
            return
        for status, count in counted["by_status"].items():
            self.stdout.write(f"{status:<12}{count:>10}")
        for name, count in counted["ownership"].items():
            self.stdout.write(f"{LABELS[name]:<42}{count:>10}")
        for row in counted.get("by_version", ()):
            self.stdout.write(
                f"{row['flow_id']} version {row['version']} {row['status']:<12}{row['count']:>8}"
            )
