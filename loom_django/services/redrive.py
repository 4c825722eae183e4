"""Wakes that the log and the inbox can tell again: a re-drive row says only that somebody is to look.

A row is shown to each re-driver in turn until one has something to say. Whoever is contended, or breaks,
keeps the row: it is tried again later. A node without re-drivers leaves such rows to those that have them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Protocol

from loom_django.engine import answers
from loom_django.engine.core import Engine
from loom_django.services.dispatch import Dispatcher, hand_on

log = logging.getLogger("loom_django.inbox")

Told = Literal["done", "noop", "contended"]


class Redriver(Protocol):
    """Looks at an execution and answers its park if that is this one's to do."""

    name: str

    def redrive(self, execution_id: str) -> Told:
        """``noop`` if it has nothing for the execution, ``contended`` if it is to be asked again.

        An error counts as contended, but for a lost database and for code that this node does not have.
        """


class ArrivalRedriver:
    """Answers a park with what has come for it: a message, an answer that was kept, children that ended.

    A child that was started to end with its parent is ended if that has come to its end; this is asked first.
    """

    name = "arrivals"

    def __init__(self, engine: Engine, dispatcher: Callable[[], Dispatcher]) -> None:
        self.engine = engine
        self.dispatcher = dispatcher

    def redrive(self, execution_id: str) -> Told:
        return self.glance(execution_id) or self.deliver(execution_id)

    def glance(self, execution_id: str) -> Told | None:
        """What can be told without its log; None if that is to be read."""
        head = self.engine.store.head(execution_id)
        if head is None:
            return None
        if head.parent_id is not None and answers.close_with_parent(self.engine, execution_id) is not None:
            return "done"
        return "noop" if self.engine.watch.in_vain(self.engine, execution_id, head) else None

    def deliver(self, execution_id: str) -> Told:
        """Read its log, and answer its park if something has come for it."""
        dispatcher = self.dispatcher()
        ticket = dispatcher.ticket()
        appended = answers.deliver(self.engine, execution_id, ticket.ownership)
        if not appended.events:
            self.engine.watch.remember_read(self.engine, appended.journal.fold)
            return "noop"
        hand_on(self.engine, dispatcher, appended, ticket)
        return "done"


def look_now(engine: Engine, dispatcher: Callable[[], Dispatcher], execution_id: str) -> None:
    """Do at once what a re-drive row asks for; the row stays, and is done again if this fails.

    Of threads that are to look at one execution at the same time one does it for all.
    """
    redriver = ArrivalRedriver(engine, dispatcher)
    try:
        if not engine.watch.told_together(execution_id, lambda: redriver.glance(execution_id) is not None):
            redriver.deliver(execution_id)
    except Exception:
        log.warning(
            "what has come for an execution could not be delivered at once; the timer loop will",
            exc_info=True,
            extra={"execution_id": execution_id},
        )
