"""``manage.py demo``: the main job, played to its end on real processes."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from example_project.stage.play import LEASE, NAP, SABOTAGES, Play
from example_project.stage.processes import Patience, StageError, Troupe, end_on_sigterm, restart_with
from example_project.stage.promises import Promise

FOLDER = "SHOP_DEMO_FOLDER"

OPENING = """\
This plays one order of a small shop, on real processes, from the click to the end. On the way a worker process is
killed while it is sending money, in the one moment after which nobody can know whether the money went. You will see
who notices, who decides, and that nothing happens twice. It takes about ten seconds."""

CLOSING = """
All promises were kept.

To look around in the shop and its admin yourself, and to make such a mess of your own:  make serve
The code that you saw at work:  example_project/shop/flows.py"""


class Command(BaseCommand):
    help = "Plays the main job to its end on real processes, and exits non-zero if a promise was not kept."
    # The tables may not be there yet.
    requires_migrations_checks = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--deadline",
            type=float,
            default=60,
            help="Seconds after which it gives up (default: %(default)s).",
        )
        parser.add_argument("--sabotage", choices=SABOTAGES, default="", help=argparse.SUPPRESS)

    def handle(self, *args: Any, **options: Any) -> None:
        end_on_sigterm()
        given = os.environ.pop(FOLDER, "")
        if not given:
            restart_with(_environment())
        folder = Path(given)
        try:
            promises = self._play(folder, options)
        except StageError as exc:
            raise CommandError(
                f"The demo could not be played to its end: {exc}\nThe demo's files: {folder}"
            ) from exc
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise CommandError("Stopped. Nothing is left running.", returncode=130) from None
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        broken = [promise for promise in promises if not promise.kept]
        if broken:
            words = "; ".join(f"{promise.words} ({promise.fault})" for promise in broken)
            raise CommandError(
                f"Not kept, {len(broken)} of {len(promises)}: {words}\nThe demo's files: {folder}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        self.stdout.write(CLOSING)

    def _play(self, folder: Path, options: dict[str, Any]) -> list[Promise]:
        self.stdout.write(OPENING)
        with Troupe(folder, dict(os.environ)) as troupe:
            patience = Patience(troupe, options["deadline"])
            return Play(troupe, patience, self._say, options["sabotage"]).act()

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()  # through a pipe too, each line comes when it happens


def _environment() -> dict[str, str]:
    """What this program and its children share. The database is a new file, unless DATABASE_URL names one."""
    folder = Path(tempfile.mkdtemp(prefix="loom-demo-"))
    return {
        FOLDER: str(folder),
        "DATABASE_URL": os.environ.get("DATABASE_URL") or f"sqlite:///{folder / 'shop.sqlite3'}",
        "DEBUG": "false",
        "LOOM_DISPATCHER": "worker",
        **LEASE,
        "PYTHONUNBUFFERED": "1",
        "SECRET_KEY": secrets.token_urlsafe(32),
        "SHOP_RETURN_PERIOD": str(NAP.total_seconds()),
    }
