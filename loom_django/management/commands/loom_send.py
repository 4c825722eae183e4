"""A message to a flow."""

from __future__ import annotations

import argparse
from typing import Any

from loom_django.management.base import ActCommand, json_value
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator


class Command(ActCommand):
    help = "Sends a message to a flow's ctx.receive; it is kept until the flow wants it."
    act = Act.SEND_MESSAGE
    said = {
        "taken": "the flow waits for it",
        "kept": "it is kept until the flow wants it",
        "known": "a message of that id was sent before; nothing was done",
    }

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="The name that the flow receives.")
        parser.add_argument("--payload", metavar="JSON", default="null", help="What the flow gets.")
        parser.add_argument(
            "--message-id", metavar="ID", help="A second message of this id is dropped; made up if left out."
        )

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        return operators.send_message(
            loom,
            operator,
            execution_id,
            options["name"],
            json_value(options["payload"], "--payload"),
            message_id=options["message_id"],
            reason=options["reason"],
            dry_run=options["dry_run"],
        )

    def describe(self, done: Done, *, dry_run: bool) -> list[str]:
        return [self.said[done.message]]
