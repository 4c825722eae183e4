"""Wakes that the log and the inbox can tell again: a re-drive row says only that somebody is to look.

A row is shown to each re-driver in turn until one has something to say. Whoever is contended, or breaks,
keeps the row: it is tried again later. A node without re-drivers leaves such rows to those that have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from loom_django.engine import answers
from loom_django.engine.core import Engine
from loom_django.services.dispatch import Dispatcher, hand_on

Told = Literal["done", "noop", "contended"]


class Redriver(Protocol):
    """Looks at an execution and answers its park if that is this one's to do."""

    name: str

    def redrive(self, execution_id: str) -> Told:
        """``noop`` if it has nothing for the execution, ``contended`` if it is to be asked again.

        An error counts as contended, but for a lost database and for code that this node does not have.
        """


class InboxRedriver:
    """Delivers what lies in an inbox to the park that waits for it."""

    name = "inbox"

    def __init__(self, engine: Engine, dispatcher: Callable[[], Dispatcher]) -> None:
        self.engine = engine
        self.dispatcher = dispatcher

    def redrive(self, execution_id: str) -> Told:
        dispatcher = self.dispatcher()
        ticket = dispatcher.ticket()
        appended = answers.deliver(self.engine, execution_id, ticket.ownership)
        hand_on(self.engine, dispatcher, appended, ticket)
        return "done" if appended.events else "noop"
