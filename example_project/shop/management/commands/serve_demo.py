"""``manage.py serve_demo``: the example, left running, to look around in."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db.models import Q
from django.urls import reverse

from example_project.stage.processes import Patience, StageError, Troupe, end_on_sigterm
from example_project.stage.seeds import seed
from loom_django.models import Execution

OPERATOR = "operator"
PROVIDER_PORT = 8100  # what settings.py expects, so that a worker started by hand finds it
LEASE = {"LOOM_LEASE_TTL": "6", "LOOM_LEASE_RENEW_INTERVAL": "1.5"}

WELCOME = """
The shop       {site}/
The admin      {site}{admin}
  user         {user}
  password     {password}

Start with the queue of doubts: {site}{queue}
A transfer is in it whose answer got lost. What the bank really did stands in its ledger:
  {ledger}

To make a doubt of your own, buy something and choose the bank whose answer gets lost. Processes at work: the web
server, the payment provider, and a worker (process {worker}): kill it if you like, and start another one by
  {again}

Ctrl-C ends it all. What you did is kept for the next time."""


class Command(BaseCommand):
    help = "Leaves the example running: shop, admin, worker and payment provider, until Ctrl-C."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--port",
            type=int,
            default=8000,
            help="Another one is taken if it is not free (default: %(default)s).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        end_on_sigterm()
        call_command("migrate", verbosity=0)
        folder = Path(tempfile.mkdtemp(prefix="loom-serve-"))
        try:
            with Troupe(folder, _environment()) as troupe:
                self._serve(troupe, options["port"])
        except StageError as exc:
            raise CommandError(str(exc)) from exc
        except KeyboardInterrupt:
            self.stdout.write("\nEverything is stopped.")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _serve(self, troupe: Troupe, port: int) -> None:
        patience = Patience(troupe, 60)
        settings.VAR.mkdir(exist_ok=True)
        ledger = settings.VAR / "provider-ledger.jsonl"
        provider, site = troupe.folder / "provider.address", troupe.folder / "web.address"
        troupe.start(
            "provider",
            *("-m", "example_project.provider.server", "--port", str(PROVIDER_PORT)),
            *("--ledger", str(ledger), "--ready-file", str(provider)),
        )
        address = patience.wait_for_file("the provider", provider)
        troupe.environment["SHOP_PROVIDER_URL"] = address
        troupe.start("web", "-m", "example_project.stage.web", "--port", str(port), "--ready-file", str(site))
        seed()
        # It is told to end before long: a stocktaking that goes on for a day is begun anew next time.
        worker = troupe.manage("worker", "run_loom_worker", "--grace", "1")
        worker.expected_to_run = False  # whoever looks around here may kill it
        patience.wait_for("the worker to take everything up", lambda: not Execution.objects.ready().exists())
        self.stdout.write(
            WELCOME.format(
                site=patience.wait_for_file("the web server", site),
                admin=reverse("admin:index"),
                queue=reverse("admin:loom_in_doubt"),
                user=OPERATOR,
                password=_operator_password(),
                ledger=ledger,
                worker=worker.pid,
                again=_worker_command(address),
            )
        )
        while True:
            troupe.check()
            time.sleep(0.5)


def _worker_command(provider: str) -> str:
    command = f"{os.path.relpath(sys.executable)} manage.py run_loom_worker"
    return command if provider == settings.SHOP_PROVIDER_URL else f"SHOP_PROVIDER_URL={provider} {command}"


def _environment() -> dict[str, str]:
    """The settings of the processes. A key of its own: the one in settings.py is known to everybody."""
    own = {"PYTHONUNBUFFERED": "1", "SECRET_KEY": secrets.token_urlsafe(32), **LEASE}
    return {**own, **os.environ}


def _operator_password() -> str:
    """Give the operator all that an operator can have, and a new password."""
    user, _ = User.objects.get_or_create(username=OPERATOR)
    user.is_staff, user.is_superuser = True, False
    password = secrets.token_urlsafe(9)
    user.set_password(password)
    user.save()
    wanted = Q(content_type__app_label="loom") | Q(
        content_type__app_label="shop", codename__startswith="view_"
    )
    user.user_permissions.set(Permission.objects.filter(wanted))
    return password
