"""Who may do what."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand

from loom_django.management.options import add_format
from loom_django.services.who import holders


class Command(BaseCommand):
    help = (
        "Lists the permissions for acts and for what is shown, each with the active users who have it, directly or "
        "by a group. Superusers have all. What other authentication backends grant is not seen."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_format(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        found = holders()
        if options["format"] == "json":
            self.stdout.write(json.dumps(found))
            return
        for permission, who in found.items():
            names = [f"{row['user']} ({', '.join(row['by'])})" for row in who]
            self.stdout.write(f"{permission:<28}{', '.join(names) or 'nobody'}")
