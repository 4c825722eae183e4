"""Putting back what was archived."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django.errors import ArchiveError
from loom_django.management.commands.loom_prune import archive_storage
from loom_django.management.options import add_format
from loom_django.runtime import loom
from loom_django.services.archive import restore


class Command(BaseCommand):
    help = (
        "Puts back what loom_prune --archive has removed: all executions of an archive, or one by its id. An id that "
        "is there is left as it is, and is exit code 1."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "what", metavar="PATH|ID", help="The name of an archive or of its manifest, or an execution's id."
        )
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            done = restore(loom.engine, archive_storage(), options["what"])
        except ArchiveError as exc:
            raise CommandError(str(exc), returncode=1) from exc
        if options["format"] == "json":
            self.stdout.write(json.dumps(asdict(done)))
        else:
            for execution_id in done.restored:
                self.stdout.write(f"restored {execution_id}")
            for execution_id, why in done.refused:
                self.stdout.write(f"refused {execution_id}: {why}")
        if done.refused:
            raise CommandError(f"{len(done.refused)} executions were not put back", returncode=1)
