"""Removing what ended long ago."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from django.core.files.storage import Storage
from django.core.management.base import BaseCommand, CommandError

from loom_django import conf
from loom_django.errors import ArchiveError
from loom_django.management.options import add_format, positive_int
from loom_django.runtime import loom
from loom_django.services.archive import storage_of
from loom_django.services.retention import Summary, prune

# Pinned ones are told by name up to so many; the JSON form has all.
LISTED = 20


class Command(BaseCommand):
    help = (
        'Removes executions that ended longer ago than LOOM["RETENTION"] keeps them, with --archive only after '
        "they were archived. Children that a living parent needs are kept. Exit code 1 if something could not be "
        "judged or removed."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--archive",
            action="store_true",
            help='Write them to LOOM["ARCHIVE_STORAGE"] first; what loom_restore puts back.',
        )
        parser.add_argument(
            "--batch-size",
            type=positive_int,
            default=100,
            metavar="N",
            help="Executions in one archive (default: %(default)s).",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Say what would be removed; change nothing."
        )
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        in_words = options["format"] == "text"
        try:
            done = prune(
                loom,
                archive=archive_storage() if options["archive"] else None,
                batch_size=options["batch_size"],
                dry_run=options["dry_run"],
                report=self._progress if in_words and options["verbosity"] > 1 else lambda summary: None,
            )
        except ArchiveError as exc:
            raise CommandError(str(exc), returncode=1) from exc
        if in_words:
            self._tell(done)
        else:
            self.stdout.write(json.dumps(asdict(done)))
        if done.failures:
            raise CommandError(f"{len(done.failures)} problems; what they concern is kept", returncode=1)

    def _progress(self, so_far: Summary) -> None:
        self.stdout.write(f"{so_far.removed} of {so_far.scanned}")

    def _tell(self, done: Summary) -> None:
        would = "would be removed" if done.dry_run else "removed"
        self.stdout.write(
            f"scanned {done.scanned}, {would} {done.removed}, archived {done.archived}, pinned "
            f"{len(done.pinned)}, kept {done.kept}, changed meanwhile {done.changed}"
        )
        for execution_id, pin in done.pinned[:LISTED]:
            self.stdout.write(f"  {execution_id}: kept by {pin}")
        if len(done.pinned) > LISTED:
            self.stdout.write(f"  … and {len(done.pinned) - LISTED} more that are pinned")
        for execution_id, why in done.failures:
            self.stdout.write(f"  {execution_id}: {why}")
        for name in done.archives:
            self.stdout.write(f"  archive {name}")


def archive_storage() -> Storage:
    """The storage of ``LOOM["ARCHIVE_STORAGE"]``; exit code 2 if there is none."""
    alias = conf.get_settings().ARCHIVE_STORAGE
    if alias is None:
        raise CommandError(
            'LOOM["ARCHIVE_STORAGE"] is None: name an alias of STORAGES in it, where archives are to lie.',
            returncode=2,
        )
    return storage_of(alias)
