"""The tables against the log."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django import conf
from loom_django.management.options import add_format
from loom_django.runtime import loom
from loom_django.services.verify import verify


class Command(BaseCommand):
    help = (
        "Folds every log and reports each row that says something else. Exit code 1 if any does. Run it while "
        "nothing is written, or read a single report as a hint."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repair", action="store_true", help="Rewrite the rows from the log.")
        parser.add_argument("--execution", help="Only this execution.")
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        alias = conf.get_settings().DATABASE
        found = list(verify(loom.engine, alias, execution_id=options["execution"], repair=options["repair"]))
        if options["format"] == "json":
            self.stdout.write(json.dumps({"problems": [asdict(problem) for problem in found]}))
        else:
            for problem in found:
                self.stdout.write(f"{problem.execution_id}: {problem.what}")
            self.stdout.write(f"{len(found)} problems")
        left = [problem for problem in found if not (options["repair"] and problem.repairable)]
        if left:
            raise CommandError(f"{len(left)} problems are left", returncode=1)
