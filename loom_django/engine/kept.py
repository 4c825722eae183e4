"""Answers that came while the body was running: kept in the inbox, and taken at the wait that they name.

A park may hold several waits. When one is answered the body runs, and the others are still pending; whoever
answers one of those now is not sent away. The answer goes the way of a message: it is stored with a wake, so a
park that did not see it is refused. It is stored only while the body runs: once that has parked again, the answer
is for the park.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from loom_django.engine.core import Engine
from loom_django.engine.journal import Journal
from loom_django.kernel.events import Encoded, pack
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import ON_VERDICT, Wait
from loom_django.stores.base import Message

# The name under which answers lie in an inbox; no message can have it.
NAME = ""


def keep(
    engine: Engine,
    fold: Fold,
    wait: Wait,
    event_type: str,
    payload: Encoded | None,
    principal: str | None,
    reason: str | None,
) -> bool:
    """Store an answer for a wait that is pending while the body runs, by the fold; False if one is there.

    Raises:
        Changed: the body has parked, or ended, since the fold.
    """
    body = pack({"event": event_type, "payload": payload, "principal": principal, "reason": reason or None})
    key = _key(fold, wait)
    # A user's message ids are printable.
    return engine.store.send_unless_answered(
        fold.execution_id,
        since=fold.last_sequence,
        name=NAME,
        message_id=f"\x1f{key}",
        body=body,
        wait=key,
        chain=fold.chain,
    )


def find(engine: Engine, fold: Fold, wait: Wait) -> Message | None:
    """The answer that is stored for a wait of an execution."""
    key = _key(fold, wait)
    return next((kept for kept in engine.store.inbox(fold.chain, NAME) if kept.wait == key), None)


def find_unseen(journal: Journal, wait: Wait) -> Message | None:
    """The answer that is stored for a wait of the park, which the park has not looked for.

    Whoever parks on a wait looks first. Only a doubt stands in every park, beside what that is on.
    """
    if wait.on != ON_VERDICT or len(journal.fold.park_waits) < 2:
        return None
    return find(journal.engine, journal.fold, wait)


def principal_of(message: Message) -> str | None:
    """Who gave a kept answer."""
    principal: str | None = json.loads(message.body).get("principal")
    return principal


def fields_of(wait: Wait, kept: Message) -> dict[str, Any]:
    """The payload of the MESSAGE_CONSUMED that takes a kept answer."""
    answer = json.loads(kept.body)
    payload = Encoded(json.dumps(answer["payload"], separators=(",", ":"))) if "payload" in answer else None
    return {
        "wait": wait.id,
        "on": wait.on,
        "name": answer["event"],
        "number": kept.number,
        "message": kept.wait,
        "payload": payload,
        "event": answer["event"],
        "principal": answer.get("principal"),
        "reason": answer.get("reason"),
    }


def _key(fold: Fold, wait: Wait) -> str:
    """A wait's identity in a column's length; the members of a chain share an inbox, and names of waits."""
    # Ids are printable.
    return hashlib.sha256(f"{fold.execution_id}\x1f{wait.id}".encode()).hexdigest()
