"""The log of one execution."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError

from loom_django.engine.core import from_micros
from loom_django.errors import ExecutionNotFoundError
from loom_django.kernel import codec
from loom_django.kernel.events import Event
from loom_django.management.options import add_format
from loom_django.runtime import loom
from loom_django.services.operators import about, exported

MAX_ERROR: Final = 200


class Command(BaseCommand):
    help = (
        "Prints the log of an execution. Its JSON forms hold all values as they are recorded, unredacted; a file "
        "of jsonl can be kept with the tests of a flow."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("execution_id", metavar="ID", help="The execution's id.")
        parser.add_argument(
            "--after", type=int, default=0, metavar="N", help="Only what comes after this event."
        )
        add_format(parser, "text", "json", "jsonl")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            events = loom.history(options["execution_id"], after=options["after"])
        except ExecutionNotFoundError as exc:
            raise CommandError(str(exc), returncode=1) from exc
        match options["format"]:
            case "json":
                self.stdout.write(json.dumps([exported(event, event.data) for event in events]))
            case "jsonl":
                for event in events:
                    self.stdout.write(json.dumps(exported(event, event.data)))
            case _:
                for event in events:
                    self.stdout.write(as_text(event))


def as_text(event: Event) -> str:
    """An event on one line."""
    told = (f"{name}={_plain(name, value)!r}" for name, value in about(event))
    return " ".join((f"{event.sequence:>6}", f"{_time(event):%Y-%m-%d %H:%M:%S}", f"{event.kind:<20}", *told))


def _plain(name: str, value: Any) -> Any:
    match name:
        case "waits":
            return ", ".join(
                f"{wait['on']} ({wait['key']})" if wait.get("key") else wait["on"] for wait in value
            )
        case "error":
            return f"{value.get('type', '')}: {codec.decode(value.get('message', ''))}"[:MAX_ERROR]
    return value


def _time(event: Event) -> datetime:
    return event.recorded_at or from_micros(event.data.get("at", 0))
