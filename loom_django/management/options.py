"""Argument types and set-up that the commands share."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from django.core.management.base import BaseCommand

from loom_django import conf
from loom_django.runtime import loom
from loom_django.services.loop import Beat, Loop
from loom_django.services.notices import Listener, are_used
from loom_django.stores.base import Store

_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


def positive_int(text: str) -> int:
    """An int above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int above 0")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def names(text: str) -> list[str]:
    """Names with commas between them, each once."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names: write a,b")
    return list(dict.fromkeys(found))


@contextmanager
def listening(store: Store, loop: Loop) -> Iterator[Listener | None]:
    """Have notices wake a loop, where they are used."""
    if not are_used(conf.get_settings(), store):
        yield None
        return
    listener = Listener(store, loop.wake.set)
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


def logging_to_console(handle: Callable[..., None]) -> Callable[..., None]:
    """Have a command show loom's log on its error stream, if the project has configured nothing for it.

    Until the command ends: one that is called in a process, by a test say, leaves its logging as it was.
    """

    @wraps(handle)
    def shown(self: BaseCommand, *args: Any, **options: Any) -> None:
        logger = logging.getLogger("loom_django")
        if logger.handlers:
            handle(self, *args, **options)
            return
        handler = logging.StreamHandler(self.stderr)
        handler.setFormatter(_WithIds("%(asctime)s %(levelname)s %(message)s"))
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(_LEVELS.get(options["verbosity"], logging.INFO))
        logger.propagate = False
        try:
            handle(self, *args, **options)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]

    return shown


class _WithIds(logging.Formatter):
    """Appends the ids that a record carries."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        ids = {name: getattr(record, name) for name in ("execution_id", "step_id") if hasattr(record, name)}
        return text + "".join(f" {name}={value}" for name, value in ids.items())


def beat(kind: str) -> Beat:
    """A service by which a loop of that kind says that it is alive."""
    engine = loom.engine

    def say() -> None:
        engine.store.beat(engine.identity.name, kind)
        engine.store.check_clock()

    return Beat(say, lambda: engine.settings().LEASE_RENEW_INTERVAL)


def add_format(parser: argparse.ArgumentParser, *choices: str) -> None:
    """Add ``--format`` for commands whose output a machine may read."""
    parser.add_argument(
        "--format",
        choices=choices or ("text", "json"),
        default="text",
        help="How to print (default: %(default)s).",
    )


Options = dict[str, Any]
