"""What the act commands share: who acts, why, what is printed, and which exit code a refusal has.

0 the act was done; 1 it was refused, and nothing was appended; 2 the command was not used as it is meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from loom_django.errors import (
    InvalidIdError,
    InvalidInputError,
    LoomError,
    PayloadTooLargeError,
    UnencodableValueError,
)
from loom_django.management.options import add_format
from loom_django.services import typed_json
from loom_django.services.operators import Act, Done, Operator
from loom_django.stores.base import AppendRefused

MISUSE = (InvalidIdError, InvalidInputError, PayloadTooLargeError, UnencodableValueError)


class ActCommand(BaseCommand):
    """An act on one execution, with a reason. Subclasses add what is asked and call the operators' function."""

    act: ClassVar[Act]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("execution_id", metavar="ID", help="The execution's id.")
        self.add_act_arguments(parser)
        add_act_options(parser)

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        """What this act asks beside a reason."""

    def perform(self, operator: Operator, execution_id: str, **options: Any) -> Done:
        """Do it."""
        raise NotImplementedError

    def handle(self, *args: Any, **options: Any) -> None:
        operator = operator_named(options["user"])
        with act_errors():
            done = self.perform(operator, **options)
        self._print(done, operator, options)

    def _print(self, done: Done, operator: Operator, options: dict[str, Any]) -> None:
        if options["format"] == "json":
            self.stdout.write(json.dumps(_described(done, operator, dry_run=options["dry_run"])))
            return
        would = "would append" if options["dry_run"] else "appended"
        for event in done.events:
            self.stdout.write(f"{would} event {event.sequence} {event.kind} to {done.execution_id}")
        if done.fresh_key:
            self.stdout.write(f"the step runs again with the key {done.fresh_key}")
        if done.kept:
            self.stdout.write(
                "the answer is kept: the flow is running, and takes it when it comes to this wait"
            )
        elif not done.events:
            for line in self.describe(done, dry_run=options["dry_run"]):
                self.stdout.write(line)
        if done.runs == "worker":
            self.stdout.write("a worker takes it up")

    def describe(self, done: Done, *, dry_run: bool) -> list[str]:
        """What is printed of an act that appends nothing to the log."""
        return [self.nothing_appended]

    nothing_appended: ClassVar[str] = "there was nothing to do; nothing was appended"


class CopyCommand(ActCommand):
    """An act that starts a new execution over what another one had done."""

    def add_act_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--new-id", metavar="ID", help="Of the new execution; makes it idempotent (default: made up)."
        )

    def describe(self, done: Done, *, dry_run: bool) -> list[str]:
        copy = done.started
        if copy is None:
            return []
        if not copy.created:
            return [f"this copy was made before: {copy.execution_id}"]
        started = "would start" if dry_run else "started"
        steps = ", ".join(copy.steps) or "none"
        name = copy.execution_id or "an execution"
        return [f"{started} {name} of {copy.flow_id} version {copy.version}; steps kept: {steps}"]


def add_act_options(
    parser: argparse.ArgumentParser, *, rehearsal: str = "Say what would be appended; change nothing."
) -> None:
    """Add what every act asks."""
    parser.add_argument(
        "--reason", required=True, help="Why; recorded with your name for whoever reads the log later."
    )
    parser.add_argument(
        "--user",
        metavar="NAME",
        help="Act as this user, with this user's permissions. Without it whoever is at the shell acts.",
    )
    parser.add_argument("--dry-run", action="store_true", help=rehearsal)
    add_format(parser)


@contextmanager
def act_errors() -> Iterator[None]:
    """Turn what an act raises into a message and an exit code."""
    try:
        yield
    except MISUSE as exc:
        raise CommandError(str(exc), returncode=2) from exc
    except LoomError as exc:
        raise CommandError(str(exc), returncode=1) from exc
    except AppendRefused as exc:
        raise CommandError(
            "others kept writing to this log; nothing was appended. Try again.", returncode=1
        ) from exc


def _described(done: Done, operator: Operator, *, dry_run: bool) -> dict[str, Any]:
    return {
        "act": done.act.value,
        "execution_id": done.execution_id,
        "principal": operator.name,
        "dry_run": dry_run,
        "events": [{"sequence": event.sequence, "kind": event.kind} for event in done.events],
        "fresh_key": done.fresh_key or None,
        "runs": done.runs,
        "kept": done.kept,
        "message": done.message or None,
        "started": done.started and dataclasses.asdict(done.started),
        "wakes": done.wakes,
    }


def operator_named(name: str | None) -> Operator:
    """The user of that name, or whoever is at the shell."""
    if name is None:
        return Operator.at_shell()
    users = get_user_model()
    try:
        return Operator.of(users._default_manager.get_by_natural_key(name))
    except users.DoesNotExist:
        raise CommandError(f"there is no user {name!r}", returncode=2) from None


def json_value(text: str, option: str) -> Any:
    """The value of an option that is JSON."""
    try:
        return typed_json.read(text)
    except InvalidInputError as exc:
        raise CommandError(f"{option}: {exc}", returncode=2) from exc
