"""Answers that came while the body was running: kept in the inbox, and taken at the wait that they name.

A park may hold several waits. When one is answered the body runs, and the others are still pending; whoever
answers one of those now is not sent away. The answer goes the way of a message: it is stored with a wake, so a
park that did not see it is refused, and one that landed first is answered by its re-drive row.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from loom_django.engine.core import Engine
from loom_django.errors import ResumeRefusedError
from loom_django.kernel.events import Encoded, pack
from loom_django.kernel.state import Wait
from loom_django.stores.base import Message

# The name under which answers lie in an inbox; no message can have it.
NAME = ""


def keep(
    engine: Engine,
    execution_id: str,
    wait: Wait,
    event_type: str,
    payload: Encoded | None,
    principal: str | None,
    reason: str | None,
) -> None:
    """Store an answer for a pending wait.

    Raises:
        ResumeRefusedError: there is one already.
    """
    body = pack({"event": event_type, "payload": payload, "principal": principal, "reason": reason or None})
    key = _key(wait)
    # A user's message ids are printable.
    if not engine.store.send(execution_id, name=NAME, message_id=f"\x1f{key}", body=body, wait=key):
        raise ResumeRefusedError(
            execution_id, "not-suspended", f"An answer to {event_type!r} is stored and waits to be taken."
        )


def find(engine: Engine, execution_id: str, wait: Wait) -> Message | None:
    """The answer that is stored for a wait."""
    key = _key(wait)
    return next((kept for kept in engine.store.inbox(execution_id, NAME) if kept.wait == key), None)


def fields_of(wait: Wait, kept: Message) -> dict[str, Any]:
    """The payload of the MESSAGE_CONSUMED that takes a kept answer."""
    answer = json.loads(kept.body)
    payload = Encoded(json.dumps(answer["payload"], separators=(",", ":"))) if "payload" in answer else None
    return {
        "wait": wait.id,
        "on": wait.on,
        "name": answer["event"],
        "number": kept.number,
        "message": _key(wait),
        "payload": payload,
        "event": answer["event"],
        "principal": answer.get("principal"),
        "reason": answer.get("reason"),
    }


def _key(wait: Wait) -> str:
    """A wait's identity in a column's length."""
    return hashlib.sha256(wait.id.encode()).hexdigest()
