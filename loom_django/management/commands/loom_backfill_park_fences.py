"""Fence rows for parks of imported and restored logs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand

from loom_django import conf
from loom_django.management.options import add_format, positive_int
from loom_django.runtime import loom
from loom_django.services.backfill import Walk, backfill_park_fences


class Command(BaseCommand):
    help = (
        "Gives every execution that is parked and unanswered its fence row. For logs that were imported, or "
        "restored without their fences; parks that this app wrote have theirs. Run it before anybody answers."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--batch-size",
            type=positive_int,
            default=1000,
            metavar="N",
            help="Executions looked at before the position is kept (default: %(default)s).",
        )
        parser.add_argument(
            "--again", action="store_true", help="From the beginning, though it was done before."
        )
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        in_words = options["format"] == "text"
        done = backfill_park_fences(
            loom.engine,
            conf.get_settings().DATABASE,
            batch_size=options["batch_size"],
            again=options["again"],
            report=self._report if in_words else lambda walk: None,
        )
        if in_words:
            self._conclude(done)
        else:
            self.stdout.write(json.dumps(asdict(done), default=str))

    def _report(self, walk: Walk) -> None:
        self.stdout.write(f"{walk.parked} parked, {walk.made} rows made, up to {walk.position}")

    def _conclude(self, done: Walk) -> None:
        at = "" if done.done_at is None else done.done_at.isoformat()
        if done.done_before:
            self.stdout.write(f"this was done at {at}; --again does it anew")
            return
        since = f", gone on behind {done.begun_after}" if done.begun_after else ""
        self.stdout.write(f"{done.parked} parked, {done.made} rows made{since}; done at {at}")
