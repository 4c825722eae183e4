"""Messages on their way to a flow's ``ctx.receive``: stored with a wake, and kept until they are wanted."""

from __future__ import annotations

import uuid
from typing import Any

from loom_django.engine.core import Engine
from loom_django.errors import ExecutionClosedError, ExecutionNotFoundError
from loom_django.kernel import codec, keys
from loom_django.kernel.state import TERMINAL_STATUSES


def send(
    engine: Engine,
    execution_id: str,
    name: str,
    payload: Any,
    *,
    message_id: str | None,
    principal: str = "",
    reason: str = "",
) -> bool:
    """Store a message in the inbox of the chain; whoever calls has it looked at after the commit.

    Returns:
        False if a message of that ``message_id`` was sent before: the first payload stands.

    Raises:
        ExecutionNotFoundError: no such execution. ExecutionClosedError: it has ended.
        InvalidIdError: no name, or no message id. UnencodableValueError, PayloadTooLargeError: the payload
            cannot be recorded.
    """
    keys.check_id(name, "message name")
    identity = keys.check_id(message_id, "message id") if message_id is not None else str(uuid.uuid4())
    body = codec.dumps(payload, path="payload", limit=engine.settings().MAX_PAYLOAD_BYTES)
    newest = engine.store.newest(execution_id)
    if newest is None:
        raise ExecutionNotFoundError(execution_id)
    if newest.status in TERMINAL_STATUSES:
        raise ExecutionClosedError(execution_id, str(newest.status))
    return engine.store.send(
        newest.chain,
        name=name,
        message_id=identity,
        body=body,
        receiver=newest.id,
        principal=principal,
        reason=reason,
    )
